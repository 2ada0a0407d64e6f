"""The verdict: intervals against a slow reference, words, every gate by a run that trips it, and what a plan finds."""

import io
import json
import math
import random
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from raw_lines import KINDS, answer, lines_of, requests  # noqa: E402

from benchmarks import verdict_simulation  # noqa: E402
from scripts import verdict, verdict_arms, verdict_gates, verdict_intervals, verdict_plans, verdict_runs, verdict_texts  # noqa: E402

QUICK = verdict_arms.Settings(draws=500)
QUIET = verdict_intervals.BootSpread(0.005, 20)


def run_of(lines):
    return verdict_runs.read_run([json.dumps(line).encode() for line in lines], "run.jsonl")


def judged(lines, **settings):
    known = settings.pop("known", QUIET)
    return verdict.judge(run_of(lines), "A", "B", settings=verdict_arms.Settings(draws=500, known=known, **settings))


# -- interval ---------------------------------------------------------------------------------------------------------


def slow_interval(base, variant, draws, seed):
    """The same bootstrap in plain loops: prompts, then each prompt's repeats in every load, stretched for few."""
    rng, count = random.Random(seed), len(base[0].logs)

    def level(boots, prompt, again):
        parts = []
        for boot in boots:
            values = [value for value in boot.logs[prompt] if not math.isnan(value)]
            if values:
                parts.append(sum(rng.choice(values) if again else value for value in values) / len(values))
        return sum(parts) / len(parts)

    value = sum(level(base, p, False) - level(variant, p, False) for p in range(count)) / count
    means = []
    for _ in range(draws):
        picked = [rng.randrange(count) for _ in range(count)]
        means.append(sum(level(base, p, True) - level(variant, p, True) for p in picked) / count)
    low, high = np.percentile(means, (2.5, 97.5))
    stretch = math.sqrt(count / (count - 1)) * verdict_intervals.student(count - 1) / verdict_intervals.Z
    return value, value + stretch * (low - value), value + stretch * (high - value)


def test_interval_is_that_of_a_slow_bootstrap():
    rng = np.random.default_rng(3)
    base = [verdict_intervals.Boot(n, rng.normal(0, 0.2, (20, 3))) for n in (0, 2)]
    variant = [verdict_intervals.Boot(1, rng.normal(-0.3, 0.2, (20, 3)))]
    base[0].logs[::2, 1] = base[1].logs[7] = np.nan  # failed requests, and a prompt that one load never answered
    variant[0].logs[::3, 0] = np.nan
    ones = np.ones(20)
    found = verdict_intervals.estimate(
        base, variant, ones, ones, verdict_intervals.BootSpread(0.0, 9), np.random.default_rng(1), 10_000
    )
    value, low, high = slow_interval(base, variant, 2_500, 2)
    assert found.value == pytest.approx(value, abs=1e-12)
    assert found.low == pytest.approx(low, abs=0.01)
    assert found.high == pytest.approx(high, abs=0.01)
    assert 0.05 < found.high - found.value < 0.4


def test_decode_time_is_per_token_after_the_first():
    lines = lines_of(effect=1.0, sd=0.0, noise=0.0)
    for line in requests(lines, "B"):  # as fast, but only two tokens long
        line["decode_s"] /= line["output_tokens"] - 1
        line["output_tokens"] = 2
    result = judged(lines)
    assert result["speedup"]["value"] == pytest.approx(1)
    first = requests(lines, "B")[0]
    assert result["by_prompt"][0]["variant_ms_per_token"] == pytest.approx(1000 * first["decode_s"])


def test_boot_spread_enters_the_interval_unless_the_load_is_shared():
    logs = np.zeros((20, 2))
    ones, spread = np.ones(20), verdict_intervals.BootSpread(0.045, 8)

    def width(base, variant):
        arms = [[verdict_intervals.Boot(number, logs) for number in numbers] for numbers in (base, variant)]
        return verdict_intervals.estimate(*arms, ones, ones, spread, np.random.default_rng(1)).high

    # Student's t with 8 degrees of freedom: 2.306 standard deviations, times the root of 1/loads + 1/loads.
    assert width([0], [1]) == pytest.approx(2.306 * 0.045 * math.sqrt(2), rel=0.05)
    assert width([0, 2], [1]) == pytest.approx(2.306 * 0.045 * math.sqrt(1.5), rel=0.05)
    assert width([0, 1], [0, 1]) == 0
    assert (
        verdict_intervals.contrast(
            [verdict_intervals.Boot(0, logs)], [verdict_intervals.Boot(0, logs), verdict_intervals.Boot(1, logs)]
        )
        == 0.5
    )


def test_loads_that_differ_widen_what_is_known():
    known = verdict_intervals.BootSpread(0.04, 4)
    boots = [verdict_intervals.Boot(number, np.full((5, 2), level)) for number, level in enumerate((0.0, 0.2))]
    updated = known.updated(boots, boots[:1])
    assert updated.df == 5
    assert updated.sd == pytest.approx(math.sqrt((0.04**2 * 4 + 2 * 0.1**2) / 5))


@pytest.mark.parametrize(("df", "wanted"), [(4, 2.776), (8, 2.306), (15, 2.131), (71, 1.994)])
def test_student_quantile(df, wanted):
    assert verdict_intervals.student(df) == pytest.approx(wanted, rel=0.01)


def test_totals_weigh_long_and_slow_answers_as_the_owner_pays_them():
    base = [verdict_intervals.Boot(0, np.log(np.full((2, 1), 0.01)))]
    variant = [verdict_intervals.Boot(0, np.log(np.array([[0.005], [0.02]])))]
    tokens = np.array([100.0, 900.0])
    found = verdict_intervals.estimate(base, variant, np.ones(2), tokens, QUIET, np.random.default_rng(1), 100)
    assert math.exp(found.value) == pytest.approx(1)
    assert math.exp(found.totals) == pytest.approx((100 * 0.01 + 900 * 0.01) / (100 * 0.005 + 900 * 0.02))


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.031, 1.2, "faster"),
        (1.029, 1.2, "undecided"),
        (0.8, 0.969, "slower"),
        (0.8, 0.971, "undecided"),
        (0.971, 1.029, "equivalent"),
        (0.9, 1.1, "undecided"),
        (0.969, 1.029, "undecided"),
    ],
)
def test_words(low, high, word):
    assert verdict_intervals.word_of(math.log(low), math.log(high), 0.03) == word


def test_d_is_twice_the_spread_from_repeat_to_repeat():
    logs = np.zeros((10, 2)) + np.array([0.0, 0.1])
    spread, df = verdict_intervals.within_spread([verdict_intervals.Boot(0, logs)], np.ones(10))
    assert (df, spread) == (1, pytest.approx(0.1 / math.sqrt(2)))
    assert verdict_intervals.least_difference(spread) == pytest.approx(2 * math.expm1(0.1 / math.sqrt(2)))
    assert verdict_intervals.least_difference(0.01) == 0.03
    assert verdict_intervals.within_spread([verdict_intervals.Boot(0, logs[:, :1])], np.ones(10))[1] == 0


# -- words of whole runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"effect": 1.4}, "faster"),
        ({"effect": 0.8}, "slower"),
        ({"effect": 1.0, "shared": True, "boots": "AB", "sd": 0.01}, "equivalent"),
        ({"effect": 1.05, "sd": 0.3}, "undecided"),
    ],
)
def test_word_of_a_run(given, word):
    result = judged(lines_of(**given))
    assert result["word"] == word, result["sentence"]
    assert (result["needed"] is not None) == (word == "undecided")
    assert word in result["sentence"]


def test_everything_is_stated():
    result = judged(lines_of())
    assert result["reasons"] == []
    assert result["prompts"] == 24
    assert result["speedup"]["low"] < result["speedup"]["value"] < result["speedup"]["high"]
    assert result["speedup"]["value"] == pytest.approx(1.4, rel=0.05)
    assert [row["class"] for row in result["classes"]] == list(KINDS)
    assert [(row["arm"], row["boot"]) for row in result["boots"]] == [("A", 0), ("A", 2), ("B", 1)]
    said = {gate["name"]: gate["said"] for gate in result["gates"]}
    assert said["kv_capacity"].endswith("-10.0%")
    assert len(said) == len(result["gates"])
    json.dumps(result, allow_nan=False)


def test_a_run_is_judged_the_same_twice_and_by_its_seed():
    lines = lines_of()
    first = judged(lines)
    assert judged(lines) == first
    assert judged(lines, seed=6)["speedup"]["low"] != first["speedup"]["low"]


def test_one_load_each_is_undecided_where_boots_vary():
    lines = lines_of(effect=1.1, boots="AB", boot_sd=0.0)
    result = judged(lines, known=verdict_intervals.BootSpread())
    assert result["word"] == "undecided"
    assert result["needed"]["prompts"] is None  # more of the same load cannot tell
    assert result["needed"]["boots"]["variant"] >= 1
    assert "more boots" in result["sentence"]
    assert next(gate for gate in result["gates"] if gate["name"] == "order")["ok"] is None


def test_what_is_needed_decides():
    known = verdict_intervals.BootSpread(0.0, 20)
    few = judged(lines_of(effect=1.05, prompts=24, sd=0.3, shared=True, boots="AB"), known=known)
    assert few["word"] == "undecided"
    more = few["needed"]["prompts"]
    value = math.log(few["speedup"]["value"])
    half = (math.log(few["speedup"]["high"]) - value) * math.sqrt(24 / (24 + more))
    border = min((math.log1p(few["d"]), math.log1p(-few["d"])), key=lambda edge: abs(edge - value))
    assert half == pytest.approx(abs(value - border), rel=0.15)


def test_an_effect_on_the_border_is_said_to_be_undecidable():
    found = verdict_intervals.Estimate(math.log1p(0.03) + 1e-5, -0.1, 0.2, 0, 0, 0, 0.04, 0.04, 8)
    need = verdict_plans.needed(found, 0.03, 72, 2, 1)
    assert (need["prompts"], need["boots"], need["both"]) == (None, None, None)
    assert "border" in need["said"]


def test_weights_by_class():
    lines = lines_of(effect=1.0, sd=0.0, noise=0.001)
    for line in requests(lines, "B"):
        if line["class"] == "code_edit":
            line["decode_s"] /= 2
    few = [line for line in lines if line.get("class") != "code_edit" or line in requests(lines, None, 6)]
    assert judged(few)["speedup"]["value"] == pytest.approx(2 ** (2 / 20), rel=0.01)
    even = judged(few, weights=dict.fromkeys(KINDS, 1.0))
    mostly = judged(lines, weights={**dict.fromkeys(KINDS, 1.0), "code_edit": 5.0})
    alone = judged(lines, weights={**dict.fromkeys(KINDS, 0.0), "code_edit": 1.0})
    assert even["speedup"]["value"] == pytest.approx(2**0.25, rel=0.01)
    assert mostly["speedup"]["value"] == pytest.approx(2**0.625, rel=0.01)
    assert alone["speedup"]["value"] == pytest.approx(2, rel=0.01)
    assert alone["reasons"] == ["too_few_prompts"]


def test_every_concurrency_and_arm_has_a_verdict():
    lines = lines_of(effect=1.4, boots="ABCA")
    crowded = [{**line, "concurrency": 8} for line in requests(lines)]
    for line in crowded:
        if line["arm"] != "A":
            line["decode_s"] *= 1.4 * 1.3
            line["e2e_s"] = line["ttft_s"] + line["decode_s"]
    results = verdict.verdicts(run_of([*lines, *crowded]), settings=verdict_arms.Settings(draws=500, known=QUIET))
    words = {(result["variant"]["arm"], result["concurrency"]): result["word"] for result in results}
    assert words[("B", 1)] == "faster"
    assert words[("B", 8)] == "slower"  # the sign flips with load
    assert words[("C", 8)] == "slower"
    assert "at concurrency 8" in results[1]["sentence"]


# -- gates ------------------------------------------------------------------------------------------------------------


def change(arm, prompts=None, **values):
    """A tripped run: sets values on the requests of an arm; a function gets the line."""

    def trip(lines):
        for line in requests(lines, arm, prompts):
            line.update({key: value(line) if callable(value) else value for key, value in values.items()})
        return lines

    return trip


def state(arm, **facts):
    """A tripped run: sets facts of an arm's loads."""

    def trip(lines):
        for line in lines:
            if "facts" in line and line["arm"] == arm:
                line["facts"].update(facts)
        return lines

    return trip


def dies(lines):
    """The variant's load ends in the middle of its first pass, without a word."""
    mine = requests(lines, "B")
    keep = {id(line) for line in mine[:10]}
    return [line for line in lines if line["arm"] != "B" or "facts" in line or id(line) in keep]


def fails(lines):
    """The variant's load fails from its tenth request on."""
    for line in requests(lines, "B")[10:]:
        for key in ("ttft_s", "decode_s", "e2e_s", "output_tokens", "finish_reason", "token_ids"):
            del line[key]
        line["error"] = "connection reset"
    return lines


def drifts(lines):
    for line in requests(lines, "A"):
        if line["boot"] == 2:
            line["decode_s"] *= 1.1
            line["e2e_s"] *= 1.1
    return lines


def noisy(lines):
    """One repeat of the base differs from the next, prompt by prompt."""
    for line in requests(lines, "A"):
        if line["repeat"] == 1 and int(line["prompt_id"][1:]) % 2:
            line["decode_s"] *= 1.5
            line["e2e_s"] *= 1.5
        elif line["repeat"] == 1:
            line["decode_s"] /= 1.5
    return lines


def uneven(factor):
    """One repeat of the base is slower as a whole, which makes d as wide as that."""

    def spoil(lines):
        for line in requests(lines, "A"):
            if line["repeat"] == 1:
                line["decode_s"] *= factor
                line["e2e_s"] *= factor
        return lines

    return spoil


def looping(line):
    return [*line["token_ids"][:20], *[11, 12, 13] * ((line["output_tokens"] - 20) // 3)]


def short(line):
    return line["token_ids"][:3]


def total_seconds(line):
    return line["ttft_s"] + line["decode_s"]


def slow_class(lines):
    for line in requests(lines, "B"):
        if line["class"] == "summary":
            line["decode_s"] *= 1.4 * 1.2
            line["e2e_s"] = total_seconds(line)
    return lines


def slow_long_answers(lines):
    """Twenty short answers gain, and four long ones, which cost most, lose more in total."""
    for line in requests(lines):
        per_token = line["decode_s"] / (line["output_tokens"] - 1)
        if int(line["prompt_id"][1:]) >= 20:
            line["output_tokens"] = 3000
            per_token *= 1.6 if line["arm"] == "B" else 1
        elif line["arm"] == "B":
            per_token /= 1.3
        line["decode_s"] = per_token * (line["output_tokens"] - 1)
        line["e2e_s"] = total_seconds(line)
    return lines


def some_errors(lines):
    for line in requests(lines, "B", 1):
        line["error"] = "timed out"
    return lines


GATES = [
    # name, what trips it, the word
    (
        "too_few_prompts",
        lambda lines: [line for line in lines if "facts" in line or line in requests(lines, None, 15)],
        "refused",
    ),
    ("arm_incomplete", dies, "refused"),
    ("arm_incomplete", fails, "refused"),
    ("errors", fails, "refused"),
    ("throttled", state("B", throttle_reasons=["sw_thermal_slowdown"]), "refused"),
    ("synthetic_text", change(None, **{"class": "random"}), "refused"),
    ("null", lambda lines: [line for line in lines if line.get("repeat", 0) == 0], "refused"),
    ("null", noisy, "refused"),
    ("null", uneven(1.4), "refused"),
    ("null", uneven(4.0), "refused"),
    ("drift", drifts, "refused"),
    ("short_base", change(None, output_tokens=3, token_ids=short), "refused"),
    ("diverged", change("B", 4, token_ids=lambda line: line["token_ids"][::-1]), "output changed"),
    ("finish_reasons", change("B", 4, finish_reason="length"), "output changed"),
    ("finish_reasons", change("B", 1, finish_reason="abort"), "output changed"),
    ("output_length", change("B", 20, output_tokens=lambda line: line["output_tokens"] // 2), "output changed"),
    ("looping_output", change("B", 1, token_ids=looping), "output changed"),
    ("looping_output", change("B", 1, token_ids=None, text="I went home. " * 40), "output changed"),
    ("short_answers", change("B", output_tokens=3, token_ids=short), "output changed"),
    ("short_answers", change("B", 1, output_tokens=3, token_ids=short), "output changed"),
    ("tool_calls", change("B", 1, tool_call_ok=False), "output changed"),
    ("reasoning", change("B", 1, reasoning_ok=False), "output changed"),
    ("class_slower", slow_class, "not faster"),
    ("totals", slow_long_answers, "not faster"),
    ("ttft_p95", change("B", 4, ttft_s=lambda line: line["ttft_s"] * 1.5), "not faster"),
    ("e2e_p95", change("B", e2e_s=lambda line: line["e2e_s"] + 3), "not faster"),
    ("errors", some_errors, "not faster"),
    ("preemptions", state("B", preemptions=4), "not faster"),
    ("acceptance", state("B", accepted=0), "not faster"),
    ("acceptance", state("B", drafted=0, accepted=0), "not faster"),
]


@pytest.mark.parametrize(("name", "trip", "word"), GATES, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(GATES)])
def test_gate(name, trip, word):
    lines = trip(lines_of(effect=1.4))
    result = judged(lines)
    assert name in result["reasons"], result["sentence"]
    assert result["word"] == word, result["sentence"]
    assert f"{name}: " in result["sentence"]


def test_every_failing_gate_has_a_row():
    """A gate that the table does not trip could be one that cannot fail."""
    states_only = {"order", "kv_capacity", "looping_base", "itl_p95"}
    names = {gate["name"] for gate in judged(lines_of())["gates"]} - states_only
    assert names | {"short_base"} == {name for name, *_ in GATES}


def test_p95_is_the_nearest_rank_of_what_is_known():
    values = np.array([[*range(1, 21)], [7.0, *[np.nan] * 19], [3.0, 1.0, 2.0, *[np.nan] * 17]], float)
    assert verdict_gates.p95(values).tolist() == [19, 7, 3]


@pytest.mark.parametrize(("shared", "ok"), [(True, True), (False, None)])
def test_drift_is_unknown_after_one_load_unless_it_is_both_arms(shared, ok):
    result = judged(lines_of(effect=1.4, boots="AB", shared=shared))
    assert next(gate for gate in result["gates"] if gate["name"] == "drift")["ok"] is ok


def test_the_tail_fails_beyond_what_boots_explain_only():
    lines = change("B", ttft_s=lambda line: line["ttft_s"] * 1.08)(lines_of(effect=1.4))
    assert judged(lines)["reasons"] == ["ttft_p95"]
    loose = judged(lines, known=verdict_intervals.BootSpread())
    assert loose["word"] == "faster"
    assert "no more than prompts and boots explain" in next(
        gate["said"] for gate in loose["gates"] if gate["name"] == "ttft_p95"
    )


def test_answers_that_differ_within_the_base_too_are_no_change():
    lines = lines_of(effect=1.4)
    for line in requests(lines, None, 12):
        line["token_ids"] = answer(1000 * line["boot"] + line["repeat"] + 7, line["output_tokens"])
    result = judged(lines)
    assert result["word"] == "faster"
    assert len(result["diverged"]) == 12


def test_differing_prompts_are_flagged_and_compared_on_seconds_per_token_only():
    # A tenth of the answers go on for long: their end-to-end time says nothing, their time per token does.
    lines = lines_of(effect=1.4, prompts=200)
    longer = {line["prompt_id"]: line["token_ids"] * 20 for line in requests(lines, "B", 20)}
    for line in requests(lines, "B", 20):
        per_token = line["decode_s"] / (line["output_tokens"] - 1)
        line.update(output_tokens=4000, token_ids=longer[line["prompt_id"]], decode_s=per_token * 3999)
        line["e2e_s"] = total_seconds(line)
    result = judged(lines)
    assert result["diverged"] == list(longer)
    assert not {"diverged", "e2e_p95"} & set(result["reasons"])
    assert result["by_prompt"][0]["speedup"] == pytest.approx(1.4, rel=0.2)
    for line in requests(lines, "A", 20):  # the same times, of what is now the same answers
        line["token_ids"] = longer[line["prompt_id"]]
    same = judged(lines)
    assert same["diverged"] == []
    assert "e2e_p95" in same["reasons"]


def test_without_answers_divergence_is_unknown():
    lines = change(None, token_ids=None)(lines_of(effect=1.4))
    gate = next(gate for gate in judged(lines)["gates"] if gate["name"] == "diverged")
    assert gate["ok"] is None
    assert "not recorded" in gate["said"]


def test_answers_recorded_once_are_compared_and_timed_repeats_without_them_are_not():
    lines = lines_of(effect=1.4)
    for line in requests(lines):
        if line["repeat"] == 1:  # timed by a load generator that returns no token ids
            line["token_ids"] = None
            line["output_tokens"] += 3
    for line in requests(lines, "B", 8):
        if line["repeat"] == 0:
            line["token_ids"] = line["token_ids"][::-1]
    result = judged(lines)
    assert result["word"] == "output changed"
    assert result["diverged"] == [f"p{number}" for number in range(8)]


def test_broken_tool_calls_and_unseparated_reasoning_are_seen_in_the_text():
    call = '{"tool": "stock", "arguments": {"article": "pot"}}'
    given = {"token_ids": None, "tool_call_ok": None, "reasoning_ok": None, "text": call}
    broken = judged(change("B", 2, text=call[:-1])(change(None, **given)(lines_of())))
    assert "tool_calls" in broken["reasons"]
    mixed = judged(change("B", 1, text=f"<think>so</think>{call}")(change(None, **given)(lines_of())))
    assert "reasoning" in mixed["reasons"]
    fine = judged(change(None, **given)(lines_of()))
    assert fine["word"] == "faster"
    assert "good on 24 prompts" in next(gate["said"] for gate in fine["gates"] if gate["name"] == "tool_calls")


def test_the_tail_of_inter_token_latency_and_the_kv_capacity_lost_are_stated():
    lines = change("B", itl_s={"p95": 0.03})(change("A", itl_s={"p95": 0.02})(lines_of()))
    result = judged(lines)
    assert result["word"] == "faster"
    assert "KV cache 90000 tokens, 100000 in the base: -10.0%" in result["sentence"]
    said = next(gate for gate in result["gates"] if gate["name"] == "itl_p95")
    assert said["ok"] is None and "30.0 ms, 20.0 ms in the base" in said["said"]


def test_what_the_base_does_too_is_not_held_against_the_variant():
    lines = change(None, 3, token_ids=looping)(lines_of(effect=1.4))
    result = judged(change(None, 3, tool_call_ok=False)(lines))
    assert result["reasons"] == []
    assert any(gate["name"] == "looping_base" for gate in result["gates"])


@pytest.mark.parametrize(
    ("method", "word"),
    [(None, "refused"), ("none", "faster"), ("eagle3", "faster"), ("suffix", "refused"), ("ngram_gpu", "refused")],
)
def test_synthetic_text_is_refused_where_speculation_looks_it_up(method, word):
    lines = [line for line in change(None, **{"class": "random"})(lines_of(effect=1.4)) if "facts" not in line]
    assert judged(lines, method=method)["word"] == word


def test_random_prompts_are_seen_although_their_class_says_otherwise():
    rng = random.Random(4)
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = {
        f"p{n}": " ".join("".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(120)) for n in range(24)
    }
    result = judged(lines_of(effect=1.4), texts=texts)
    assert result["reasons"] == ["synthetic_text"]
    assert "random tokens" in result["sentence"]


@pytest.mark.parametrize(
    ("ids", "loop"),
    [
        ([], False),
        ([5] * 31, False),
        ([5] * 32, True),
        ([*range(100), *[1, 2, 3] * 20], True),
        ([*range(300), *[1, 2, 3] * 12], False),  # a short run at the end of a long answer, such as a table's rule
        ([*range(40), *[1, 2, 3] * 20, 99], False),  # it found its way out
        ([*range(60), *range(60), *range(60)], False),  # three times is not yet a loop
        ([*range(60)] * 4, True),
        (list(range(500)), False),
    ],
)
def test_loops(ids, loop):
    assert verdict_texts.loops(ids) is loop


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        ("The same again. " * 20 + "\n", True),
        ("Once upon a time there was a miller who had three sons, a mill, a donkey and a cat. " * 3, False),
        ("", False),
    ],
)
def test_loops_in_text(text, loop):
    assert verdict_texts.loops_text(text) is loop


WRITTEN = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WORDS = sorted({word for word in WRITTEN.split() if word.isalpha()})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (WRITTEN, None),
        (Path(verdict.__file__).read_text(encoding="utf-8"), None),
        (json.dumps([{"id": i, "name": f"item {i}", "price": i * 3} for i in range(60)]), None),
        ("too short to tell", None),
        (
            "的了一是我不在人们有来他这上着个地到大里说就去子得也和那要下看天时过出小么起你都把好还多没为又可家学" * 3,
            None,
        ),
        (" ".join(random.Random(1).choices([f"w{n}" for n in range(30_000)], k=200)), "random tokens"),
        (" ".join(random.Random(2).choices([f"w{n}" for n in range(1_000)], k=400)), "random words"),
        ("hello world " * 100, "one phrase repeated"),
    ],
)
def test_synthetic_text(text, why):
    found = verdict_texts.looks_synthetic(text)
    assert (found is None) if why is None else (found or "").startswith(why)


def test_short_random_prompts_are_judged_together():
    rng = random.Random(5)
    texts = {str(n): " ".join(f"w{rng.randrange(30_000)}" for _ in range(20)) for n in range(20)}
    assert set(verdict_texts.synthetic_texts(texts)) == set(texts)
    words = WRITTEN.split()
    assert verdict_texts.synthetic_texts({str(n): " ".join(words[20 * n : 20 * n + 20]) for n in range(20)}) == {}


# -- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        verdict_plans.Plan(prompts=24, one_load=1, base_boots=1, repeats=4),
        verdict_plans.Plan(prompts=40, base_boots=2, variant_boots=1),
    ],
    ids=["one load", "A B A"],
)
def test_closed_form_agrees_with_drawn_runs(plan):
    row = verdict_simulation.cell((7, "test", plan, 120))
    weighed = verdict_plans.power(plan)
    assert row["false_faster"] < 0.05
    assert weighed["smallest_effect"] == pytest.approx(row["smallest_effect"], rel=0.06)
    assert row["refused"] == pytest.approx(weighed["null_refused"], abs=0.06)


def test_committed_simulation_is_what_the_page_and_the_closed_form_say():
    stored = json.loads((ROOT / "benchmarks/results/verdict-simulation.json").read_text(encoding="utf-8"))
    assert stored["worst_false_faster"] < 0.05
    assert stored["runs"] >= 10_000
    for row in stored["rows"]:
        plan = verdict_plans.Plan(
            **{
                key: row[key]
                for key in (
                    "prompts",
                    "repeats",
                    "base_boots",
                    "variant_boots",
                    "one_load",
                    "prompt_sd",
                    "request_sd",
                    "pass_sd",
                    "boot_sd",
                )
            }
        )
        formula = verdict_plans.power(plan)["smallest_effect"]
        assert formula == pytest.approx(row["smallest_effect_closed_form"])
        if row["one_load"]:  # with several loads of the base, its drift refuses some too
            assert row["null_refused_closed_form"] == pytest.approx(row["refused"], abs=0.03), row["plan"]
        if row["smallest_effect"] and row["refused"] < 0.05:
            assert formula == pytest.approx(row["smallest_effect"], rel=0.06), row["plan"]


def test_with_classes_and_margin_no_drawn_run_needs_more():
    for row in json.loads(verdict_plans.SIMULATION.read_text(encoding="utf-8"))["rows"]:
        own = {key: row[key] for key in row.keys() & {item.name for item in fields(verdict_plans.Plan)}}
        plan = verdict_plans.Plan(**own)
        if verdict_plans.power(plan)["null_refused"] < verdict_plans.MOST_REFUSED:
            said = verdict_plans.with_classes(plan, verdict_simulation.CLASSES) ** verdict_plans.MARGIN
            assert row["smallest_effect"] < said * 1.003 and said < 1.04 * row["smallest_effect"], row["plan"]


@pytest.mark.parametrize(
    ("words", "low", "high", "source"),
    [
        ("prompts=72 repeats=3 boots=2,1", 1.28, 1.36, "simulated"),
        ("prompts=24 repeats=3 boots=2,1", 1.33, 1.54, "simulated"),
        ("prompts=16 repeats=6 boots=1,1 one_load=1", 1.32, 2.65, "simulated"),
        ("prompts=24 repeats=4 boots=2,1", 1.33, 1.58, "closed form, class gate and 5% included"),
    ],
)
def test_a_plan_says_what_it_finds_for_prompts_as_they_are(words, low, high, source):
    found = verdict_plans.smallest_range(verdict_plans.parse_plan(words), 6)
    assert (found["low"], found["high"]) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.02))
    assert found["source"] == source
    assert f"{found['low']:.2f}x (prompts that behave alike) to {found['high']:.2f}x" in found["sentence"]


def test_a_plan_on_the_border_of_its_null_run_names_no_effect():
    found = verdict_plans.smallest_range(verdict_plans.parse_plan("prompts=16 repeats=3 boots=1,1 one_load=1"), 6)
    assert found["high"] is None and "the check of the baseline against itself would fail in" in found["sentence"]


def test_more_prompts_and_boots_find_smaller_effects():
    plans = ["prompts=24", "prompts=72", "prompts=72 boots=3,3", "prompts=72 boots=1,1 one_load=1"]
    effects = [verdict_plans.power(verdict_plans.parse_plan(plan))["smallest_effect"] for plan in plans]
    assert effects == sorted(effects, reverse=True)


def test_the_closed_form_knows_how_well_the_boot_spread_is_known():
    def half(df):
        return math.log1p(
            verdict_plans.power(
                verdict_plans.Plan(
                    prompt_sd=0, request_sd=0, pass_sd=0, variant_boots=2, known=verdict_intervals.BootSpread(0.045, df)
                )
            )["interval"]
        )

    assert half(1000) == pytest.approx(1.96 * 0.045, rel=0.01)
    assert half(3) == pytest.approx(2.571 * 0.045, rel=0.01)  # Student's t with 3 + 2 degrees of freedom


def test_a_plan_whose_null_run_fails_says_so():
    weighed = verdict_plans.power(verdict_plans.Plan(prompts=16, repeats=2, request_sd=0.15, base_boots=1))
    assert weighed["smallest_effect"] is None
    assert "more repeats" in weighed["sentence"]


def test_raw_lines_are_read_as_bytes():
    stream = io.BytesIO(b"\n".join(json.dumps(line).encode() for line in lines_of()))
    assert verdict_runs.read_run(stream, "x").arms == ["A", "B"]
