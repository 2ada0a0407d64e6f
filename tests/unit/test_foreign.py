"""Files and text of somebody else's: whatever the engine's user leaves is read in bounded time and memory, or not."""

import json
import os
import subprocess
import threading

import pytest
from ansible_collections.swapgate.core.plugins.host_program import transaction
from ansible_collections.swapgate.core.plugins.module_utils import foreign, records
from ansible_collections.swapgate.core.plugins.module_utils.text import printable
from hypothesis import given
from hypothesis import strategies as st

SHAPE = {"state": str, "after_s": (float,), "changes": [str], "load": {"percent": float}, "on": bool, "pid": (int,)}
GOOD = {"state": "ready", "after_s": None, "changes": ["a"], "load": {"percent": 3.5}, "on": True, "pid": 7}


def test_a_plain_file_of_the_shape_is_read_and_what_it_has_besides_is_left_out(tmp_path):
    file = tmp_path / "load.json"
    file.write_text(json.dumps({**GOOD, "more": 1, "load": {"percent": 3.5, "x": []}}))
    assert foreign.read_object(file, SHAPE) == GOOD


def fifo(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def link(path):
    (path.parent / "secret").write_text(json.dumps(GOOD))
    path.symlink_to(path.parent / "secret")


def device(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    path.touch()
    os.truncate(path, 200 << 30)


def deep(path):
    path.write_text("[" * 200_000)


@pytest.mark.parametrize("leave", [fifo, folder, link, device, sparse, deep])
def test_what_a_hostile_user_can_leave_counts_as_nothing_at_once(tmp_path, leave):
    leave(tmp_path / "load.json")
    found = []
    thread = threading.Thread(
        target=lambda: found.append(foreign.read_object(tmp_path / "load.json", SHAPE)), daemon=True
    )
    thread.start()
    thread.join(10)
    assert found == [None]


@pytest.mark.parametrize(
    "value",
    [
        {**GOOD, "state": 7},
        {**GOOD, "load": []},
        {**GOOD, "load": {}},
        {**GOOD, "changes": "x"},
        {**GOOD, "changes": [{}]},
        {**GOOD, "after_s": float("nan")},
        {**GOOD, "load": {"percent": True}},
        {**GOOD, "on": 1},
        {**GOOD, "pid": 1.5},
        [],
        None,
    ],
)
def test_another_shape_counts_as_nothing(tmp_path, value):
    (tmp_path / "load.json").write_text(json.dumps(value))
    assert foreign.read_object(tmp_path / "load.json", SHAPE) is None


def test_long_lists_and_texts_are_cut():
    found = foreign.fit({**GOOD, "changes": ["x" * 9999] * 9999}, SHAPE)
    assert len(found["changes"]) == foreign.ITEMS and {len(one) for one in found["changes"]} == {500}


@given(st.binary(max_size=400))
def test_any_bytes_are_an_object_or_nothing(tmp_path_factory, raw):
    file = tmp_path_factory.mktemp("any") / "load.json"
    file.write_bytes(raw)
    found = foreign.read_object(file, records.LOAD)
    assert found is None or set(found) == set(records.LOAD)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;OWNED\x07", r"\x1b]0;OWNED\x07"),
        ("a\nREADY=1", r"a\x0aREADY=1"),
        ("\x9b31m", r"\x9b31m"),
        ("abc\u202eexe", r"abc\u202eexe"),
        ("a\u2028b\x85c", r"a\u2028b\x85c"),
        ("\ud800", r"\ud800"),
        ("größer 你好 \u00a0.", "größer 你好 \u00a0."),
        ("a\tb", "a b"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown


@given(st.text())
def test_nothing_printable_moves_a_cursor(text):
    shown = printable(text)
    assert all(sign.isprintable() or sign == "\u00a0" or sign.isspace() for sign in shown)
    assert not set(shown) & set("\x1b\x07\x08\r\n\x0b\x0c\x9b\u2028\u2029\u202e\u2066")


def test_the_lock_is_roots_alone_also_where_an_older_swapgate_left_one(tmp_path):
    layout = records.Layout(str(tmp_path))
    layout.lock.parent.mkdir(parents=True)
    layout.lock.touch(0o644)
    with transaction.locked(layout, "a test"):
        assert layout.lock.stat().st_mode & 0o777 == 0o600
        with pytest.raises(transaction.Busy, match="a swap is running: a test since"), transaction.locked(layout, "b"):
            pass
    layout.lock.unlink()
    layout.lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError), transaction.locked(layout, "a test"):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_nobody_else_can_hold_the_lock(tmp_path):
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    layout = records.Layout(str(tmp_path))
    with transaction.locked(layout, "a test"):
        pass
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "flock", "-n", str(layout.lock), "true"]
    assert subprocess.run(words, capture_output=True, check=False).returncode != 0


def test_whatever_is_there_is_removed(tmp_path):
    for leave in (fifo, folder, link, deep):
        place = tmp_path / leave.__name__ / "load.json"
        place.parent.mkdir()
        leave(place)
        records.remove(place)
        assert not os.path.lexists(place)
    assert (tmp_path / "link/secret").exists()
    records.remove(tmp_path / "nothing")


def test_state_and_history_are_not_for_every_local_user(tmp_path):
    layout = records.Layout(str(tmp_path))
    layout.state_dir.mkdir(parents=True)
    layout.history.touch(0o644)
    records.append_history(layout, {"id": "a"})
    assert layout.history.stat().st_mode & 0o777 == 0o640
