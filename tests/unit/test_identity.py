"""What a unit is: model, variant and slot, in one place; and hosts of an older swapgate, which knew one model only."""

import json
import os
import shutil
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.host_program import installed, preflight, systemd
from ansible_collections.swapgate.core.plugins.module_utils import identity, records, units

REPO = Path(__file__).resolve().parents[2]


def variant(model, name, unit, **more):
    return {"name": name, "unit": unit, "model": {"name": model}, "port": 8100, "gpus": [], **more}


A = variant("a", "baseline", "vllm-a.service")
A_NGRAM = variant("a", "ngram", "vllm-a-ngram.service")
B = variant("b", "baseline", "vllm-b.service")


def text_of(one):
    return f"# {one['unit']}: variant {one['name']}, {installed.RENDERED}\n[Service]\nExecStart=/bin/true\n"


def stage(layout, one):
    release = units.release_id(text_of(one), one)
    records.write_json(layout.release(release) / "variant.json", one)
    records.write_atomic(layout.release(release) / one["unit"], text_of(one))
    return release


def install(layout, one, name=None):
    """One variant as it is on a host: its unit and its data, under the file name that an older swapgate gave it."""
    records.write_atomic(layout.units / one["unit"], text_of(one))
    records.write_json(layout.variants / f"{name}.json" if name else layout.data(one["unit"]), one)


@pytest.fixture
def layout(tmp_path):
    return records.Layout(str(tmp_path))


@pytest.fixture
def asked(monkeypatch):
    """What systemctl was asked for; the real one answers in tests/e2e/test_two_models.py."""
    words = []
    monkeypatch.setattr(systemd, "systemctl", lambda *said, **_: words.append(said) or "")
    return words


# --- what it is called -----------------------------------------------------------------------------------------------


def test_a_resolved_variant_without_a_slot_is_in_the_main_one():
    assert identity.of(A) == ("a", "baseline", "main")
    assert identity.record(A) == {"model": "a", "variant": "baseline", "slot": "main", "unit": "vllm-a.service"}
    assert str(identity.of({**A, "slot": "left"})) == "a/baseline@left"


def test_a_model_is_named_only_where_there_are_several():
    assert identity.labels([A, A_NGRAM]) == {"vllm-a.service": "baseline", "vllm-a-ngram.service": "ngram"}
    assert identity.labels([A, B]) == {"vllm-a.service": "a/baseline", "vllm-b.service": "b/baseline"}


def test_a_unit_of_ours_is_told_by_the_first_line_that_the_template_writes():
    first = (REPO / "roles/vllm_service/templates/vllm_variant.service.j2").read_text().partition("\n")[0]
    assert first.startswith("# {{ vllm_service_variant.unit }}: ") and first.endswith(installed.RENDERED)


# --- two models on one host ------------------------------------------------------------------------------------------


def test_two_models_of_one_variant_name_are_both_known_and_exclude_each_other(layout):
    install(layout, A)
    install(layout, B)
    assert installed.managed_units(layout) == ["vllm-a.service", "vllm-b.service"]
    assert units.exclusions(installed.managed_variants(layout))["vllm-a.service"] == ["vllm-b.service"]


def test_a_name_finds_the_one_that_runs_or_asks_for_the_model(layout, monkeypatch):
    for one in (A, A_NGRAM, B):
        install(layout, one)
    running = {"vllm-b.service": "active"}
    monkeypatch.setattr(systemd, "states", lambda known: {unit: running.get(unit, "inactive") for unit in known})
    assert installed.named(layout, "ngram") == A_NGRAM
    assert installed.named(layout, "a/baseline") == installed.named(layout, "vllm-a.service") == A
    assert installed.named(layout, "baseline") == B
    running.clear()
    with pytest.raises(records.RecordError, match=r"one of several models: a/baseline, b/baseline\. Name it"):
        installed.named(layout, "baseline")
    with pytest.raises(records.RecordError, match="'eagle3' is not installed on this host; installed are a/baseline"):
        installed.named(layout, "eagle3")


def test_a_supervisor_takes_the_data_of_its_own_unit(layout):
    install(layout, A)
    install(layout, B)
    assert installed.supervised(layout, "baseline", "vllm-a.service") == A
    assert installed.supervised(layout, "baseline", "vllm-b.service") == B
    layout.data("vllm-a.service").unlink()
    with pytest.raises(records.RecordError, match=r"vllm-a\.service is not known to swapgate"):
        installed.supervised(layout, "baseline", "vllm-a.service")
    assert installed.supervised(layout, "baseline", "") == B, "by hand, outside a unit"


def test_a_unit_name_that_two_identities_share_is_refused_on_the_host(layout):
    install(layout, variant("a-b", "baseline", "vllm-a-b.service"))
    clash = variant("a", "b", "vllm-a-b.service")
    (problem,) = preflight._identity(clash, layout)
    assert problem.startswith("vllm-a-b.service is installed as a-b/baseline, expected a/b or no such unit. Rename ")
    assert preflight._identity(variant("a-b", "baseline", "vllm-a-b.service"), layout) == []


# --- hosts of an older swapgate --------------------------------------------------------------------------------------


def old_host(layout):
    """Model a, then model b with a variant of the same name, whose data replaced the first one's; b is last good."""
    release = {one["unit"]: stage(layout, one) for one in (A, A_NGRAM, B)}
    install(layout, A, "baseline")
    install(layout, A_NGRAM, "ngram")
    install(layout, B, "baseline")
    good = {"variant": "baseline", "unit": B["unit"], "release": release[B["unit"]], "since_unix": 1.0, "answer": None}
    records.write_json(layout.state, {"schema": 1, "last_good": good, "swap": None})


def picture(layout):
    """What is read of a host, whatever its files are called."""
    return {one["unit"]: one for one in installed.managed_variants(layout)}


def test_an_older_host_is_read_as_it_is(layout):
    old_host(layout)
    assert picture(layout) == {"vllm-a-ngram.service": A_NGRAM, "vllm-b.service": B}
    assert installed.data_file(layout, "vllm-b.service").name == "baseline.json"
    assert installed.strays(layout) == ["vllm-a.service"]


def test_migration_names_files_after_units_and_finds_the_lost_one_again(layout, asked):
    old_host(layout)
    said = []
    installed.migrate(layout, said.append)
    names = sorted(file.name for file in layout.variants.iterdir())
    assert names == ["vllm-a-ngram.json", "vllm-a.json", "vllm-b.json"]
    assert picture(layout) == {"vllm-a.service": A, "vllm-a-ngram.service": A_NGRAM, "vllm-b.service": B}
    assert said == ["vllm-a.service is a/baseline: swapgate knows it again"]
    assert asked == [("disable", "--quiet", "--no-reload", "vllm-a.service")], "two would start at boot"
    good = records.read_state(layout)["last_good"]
    assert (good["model"], good["variant"], good["slot"], good["since_unix"]) == ("b", "baseline", "main", 1.0)
    before = {file: file.read_bytes() for file in layout.state_dir.parent.parent.rglob("*") if file.is_file()}
    installed.migrate(layout, said.append)
    assert len(said) == 1 and before == {file: file.read_bytes() for file in before}, "a second call does nothing"


class PowerCut(Exception):
    """The machine went off."""


@pytest.mark.parametrize("steps", range(6))
def test_a_power_cut_in_the_migration_leaves_a_host_that_is_read_alike_and_migrates(
    layout, asked, monkeypatch, steps, tmp_path
):
    old_host(layout)
    before, done = picture(layout), []

    def counted(real):
        def step(*words, **more):
            if len(done) == steps:
                raise PowerCut
            done.append(words)
            return real(*words, **more)

        return step

    with monkeypatch.context() as cut:
        cut.setattr("os.replace", counted(os.replace))
        cut.setattr("pathlib.Path.replace", counted(Path.replace))
        cut.setattr(systemd, "systemctl", counted(lambda *_, **__: ""))
        try:
            installed.migrate(layout, lambda _: None)
        except PowerCut:
            assert len(done) == steps
        else:
            assert steps >= 5, "fewer steps than the migration has"
    for left in layout.variants.glob(".*"):
        left.unlink()
    found = picture(layout)
    assert {unit: found[unit] for unit in before} == before
    installed.migrate(layout, lambda _: None)
    assert sorted(picture(layout)) == ["vllm-a-ngram.service", "vllm-a.service", "vllm-b.service"]
    assert records.read_state(layout)["last_good"]["model"] == "b"


def test_an_older_swapgate_that_was_used_again_has_the_last_word(layout, asked):
    old_host(layout)
    installed.migrate(layout, lambda _: None)
    newer = {**B, "soak_s": 9}
    install(layout, newer, "baseline")
    assert picture(layout)["vllm-b.service"] == newer
    installed.migrate(layout, lambda _: None)
    assert picture(layout)["vllm-b.service"] == newer and not (layout.variants / "baseline.json").exists()


def test_a_variant_that_is_called_like_a_unit_keeps_its_data(layout, asked):
    odd = variant("b", "vllm-a", "vllm-b-vllm-a.service")
    install(layout, A, "baseline")
    install(layout, odd, "vllm-a")
    for _ in range(2):
        installed.migrate(layout, lambda _: None)
        assert picture(layout) == {"vllm-a.service": A, "vllm-b-vllm-a.service": odd}
    assert json.loads(layout.data("vllm-a.service").read_text())["model"] == {"name": "a"}


def test_a_unit_that_is_nobodys_release_stays_a_stray(layout, asked):
    old_host(layout)
    shutil.rmtree(layout.releases)
    records.write_atomic(layout.units / "vllm-hand.service", "[Service]\nExecStart=/bin/true\n")
    installed.migrate(layout, lambda _: None)
    assert installed.strays(layout) == ["vllm-a.service"], "a unit that somebody wrote by hand is none of ours"
    assert asked == []
