"""What the host program keeps on disk: never half there, never trusted when it is broken."""

import errno
import json
import os
import stat

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

properties = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(blacklist_categories=["Cs"]), max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def layout(tmp_path):
    """The layout of a host whose root is an empty folder."""
    return records.Layout(str(tmp_path))


def names(folder):
    """What lies in a folder, hidden files too."""
    return sorted(entry.name for entry in folder.iterdir())


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_file_is_written_with_its_mode_and_its_folder(tmp_path):
    path = tmp_path / "new/folder/file"
    records.write_atomic(path, "é\n", 0o600)
    assert path.read_text(encoding="utf-8") == "é\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    records.write_atomic(path, "other\n")
    assert path.read_text(encoding="utf-8") == "other\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("call", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, call, error):
    path = tmp_path / "state.json"
    path.write_text("old")

    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        records.write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["state.json"]


def test_text_that_cannot_be_encoded_leaves_nothing_behind(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        records.write_atomic(tmp_path / "file", "\ud800")
    assert names(tmp_path) == []


def test_a_reader_sees_the_old_or_the_new_file_at_every_step(tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []
    path.write_text("old")
    for call in ("fsync", "chmod", "replace"):
        real = getattr(os, call)

        def watched(*args, real=real, **kwargs):
            seen.append(path.read_text())
            done = real(*args, **kwargs)
            seen.append(path.read_text())
            return done

        monkeypatch.setattr(os, call, watched)
    records.write_atomic(path, "new")
    # Synced and given its mode beside the old file, then renamed, then the folder synced.
    assert seen == ["old"] * 5 + ["new"] * 3


@properties
@given(JSON)
def test_json_comes_back(tmp_path, value):
    path = tmp_path / "value.json"
    records.write_json(path, value)
    assert records.read_json(path) == value
    assert path.read_text(encoding="utf-8").endswith("\n")


# --- reading ---------------------------------------------------------------------------------------------------------


BROKEN = {
    "empty": b"",
    "cut": b'{"schema": 1, "last_go',
    "no JSON": b"hello",
    "not UTF-8": b"\xff\xfe{}",
    "zeros after a power cut": b"\0" * 64,
}
NO_STATE = {
    "a list": b"[1]",
    "a number": b"1",
    "null": b"null",
    "no schema": b'{"last_good": null, "swap": null}',
    "no swap": b'{"schema": 1, "last_good": null}',
}
OTHER_SCHEMA = {
    "newer": b'{"schema": 2, "last_good": null, "swap": null, "more": 1}',
    "a word": b'{"schema": "1", "last_good": null, "swap": null}',
    "null": b'{"schema": null, "last_good": null, "swap": null}',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_an_error_that_names_it(tmp_path, kind):
    path = tmp_path / "file.json"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(records.RecordError, match=f"^{path}: "):
        records.read_json(path)
    assert records.read_if_there(path) is None


def test_a_folder_in_the_place_of_a_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(records.RecordError, match=f"^{tmp_path}: "):
        records.read_json(tmp_path)


def test_a_file_that_is_not_there_is_told_apart_from_a_broken_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        records.read_json(tmp_path / "none")
    assert records.read_if_there(tmp_path / "none") is None


@pytest.mark.parametrize("text", [b"[1]", b"1", b"null"])
def test_read_if_there_gives_objects_only(tmp_path, text):
    (tmp_path / "file").write_bytes(text)
    assert records.read_if_there(tmp_path / "file") is None


def test_no_state_file_is_the_state_of_a_new_host(layout):
    assert records.read_state(layout) == {"schema": 1, "last_good": None, "swap": None} == records.empty_state()


@pytest.mark.parametrize("text", [*BROKEN.values(), *NO_STATE.values(), *OTHER_SCHEMA.values()])
def test_a_state_file_that_cannot_be_trusted_is_an_error_that_names_it_and_stays(layout, text):
    layout.state_dir.mkdir(parents=True)
    layout.state.write_bytes(text)
    with pytest.raises(records.RecordError, match=f"^{layout.state}: "):
        records.read_state(layout)
    assert layout.state.read_bytes() == text


@pytest.mark.parametrize("kind", OTHER_SCHEMA)
def test_another_schema_is_told_with_what_was_expected(layout, kind):
    layout.state_dir.mkdir(parents=True)
    layout.state.write_bytes(OTHER_SCHEMA[kind])
    with pytest.raises(records.RecordError, match=r"schema .*, expected 1\. Another release of swapgate wrote it\."):
        records.read_state(layout)


def test_a_state_comes_back(layout):
    state = {"schema": 1, "last_good": {"variant": "é"}, "swap": None}
    records.write_json(layout.state, state)
    assert records.read_state(layout) == state


# --- history ---------------------------------------------------------------------------------------------------------


def test_history_keeps_its_order_and_passes_over_a_cut_line(layout):
    assert records.read_history(layout) == []
    layout.state_dir.mkdir(parents=True)
    first = {"id": "1", "cause": "line\nbreak é \u2028 \x85 \x1c"}
    records.append_history(layout, first)
    with layout.history.open("a") as file:
        file.write('{"id": "cut off by a power fail\n')
    records.append_history(layout, {"id": "2"})
    assert records.read_history(layout) == [first, {"id": "2"}]


def test_a_line_after_a_cut_one_without_its_end_is_not_lost(layout):
    layout.state_dir.mkdir(parents=True)
    layout.history.write_bytes(b'{"id": "1"}\n{"id": "cut within a letter \xc3')
    records.append_history(layout, {"id": "2"})
    assert [swap["id"] for swap in records.read_history(layout)] == ["1", "2"]


# --- layout ----------------------------------------------------------------------------------------------------------


def test_the_layout_is_the_one_that_the_architecture_page_tells(layout, tmp_path):
    real = records.Layout()
    assert str(real.state) == "/var/lib/swapgate/state.json"
    assert str(real.history) == "/var/lib/swapgate/history.jsonl"
    assert str(real.release("abc")) == "/var/lib/swapgate/releases/abc"
    assert str(real.preflights) == "/var/lib/swapgate/preflight"
    assert str(real.manifests) == "/var/lib/swapgate/manifests"
    assert str(real.units) == "/etc/systemd/system"
    assert str(real.unit_runtime("vllm-m-x.service")) == "/run/swapgate/vllm-m-x"
    for name, path in vars(layout).items():
        assert str(path) == f"{tmp_path}{vars(real)[name]}"


def test_outcomes_are_the_closed_list():
    assert records.OUTCOMES == ("swapped", "unchanged", "refused", "rolled_back", "recovered", "failed")
    assert json.dumps(records.OUTCOMES)
