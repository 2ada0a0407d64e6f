"""An experiment's plan, order, cost and lines: pure functions."""

import math
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from scripts import experiment_plan as plans  # noqa: E402
from scripts import verdict  # noqa: E402

POINT, OTHER = {"k": 5, "min": 4, "max": 4}, {"k": 2, "min": 1, "max": 4}


def plan(**keys):
    return plans.read_plan(keys, "plan.yml")


def letters(steps):
    return "".join(one["arm"] for one in steps)


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        ({"variants": ["b"]}, "ABA"),
        ({"variants": ["b", "c"]}, "ABACA"),
        ({"variants": ["b", "c"], "order": "fewest"}, "ABCA"),
        ({"variants": ["b"], "boots": 2}, "ABABA"),
        ({"variants": ["b", "c"], "boots": 2, "order": "fewest"}, "ABCBCA"),
        ({"trial": {"grid": [POINT]}}, "ATA"),
        ({"variants": ["b"], "trial": {"grid": [POINT]}}, "ATABA"),
        ({"grid": [POINT, OTHER], "order": "fewest", "trial": {"grid": [POINT]}}, "ATABCA"),
    ],
)
def test_a_base_load_is_at_both_ends_of_every_order(keys, order):
    steps = plans.steps_of(plan(**keys), "base")
    assert letters(steps) == order
    assert all((one["variant"] == "base") == (one["arm"] == "A") for one in steps)


def test_a_grid_makes_variants_and_the_winner_becomes_an_arm_once():
    made = plan(variants=["b"], grid=[POINT], trial={"grid": [POINT, OTHER]}, confirm_winner=True)
    assert plans.arms_of(made, "base") == {"A": "base", "B": "b", "C": "ngram_k5_min4_max4"}
    steps = plans.steps_of(made, "base")
    assert plans.add_winner(steps, "ngram_k5_min4_max4", "base") == steps, "it is an arm already"
    longer = plans.add_winner(steps, "ngram_k2_min1_max4", "base")
    assert letters(longer) == letters(steps) + "DA" and longer[-2]["variant"] == "ngram_k2_min1_max4"
    name, entry = plans.setting_variant(OTHER, "base")
    assert name == "ngram_k2_min1_max4" and entry["extends"] == "base"
    assert entry["speculative_config"]["prompt_lookup_min"] == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "found no arm"),
        ({"variant": ["b"]}, "variant: found ['b'], expected a key of"),
        ({"variants": "b"}, "variants: found 'b'"),
        ({"variants": ["b", "b"]}, "each once"),
        ({"variants": ["b"], "boots": 0}, "boots: found 0"),
        ({"variants": ["b"], "repeats": 1}, "at least 2: the null run"),
        ({"variants": ["b"], "budget_minutes": 0}, "minutes above 0"),
        ({"variants": ["b"], "budget_minutes": math.nan}, "budget_minutes: found nan, expected finite minutes"),
        ({"variants": ["b"], "load_minutes": math.inf}, "load_minutes: found inf"),
        ({"variants": ["b"], "order": "best"}, "return or fewest"),
        ({"variants": ["b"], "concurrency": []}, "concurrency"),
        ({"variants": ["b"], "concurrency": [0]}, "concurrency: found 0"),
        ({"grid": [{"k": 5, "min": 4}]}, "k, min and max"),
        ({"grid": [{"k": 5, "min": 5, "max": 4}]}, "min of at most max"),
        ({"grid": [POINT, POINT]}, "each setting once"),
        ({"variants": ["b"], "confirm_winner": True}, "a `trial` whose winner it is"),
        ({"trial": {"variant": "t"}}, "trial: found"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_what_was_found(keys, said):
    with pytest.raises(plans.PlanError) as caught:
        plan(**keys)
    assert said in str(caught.value) and str(caught.value).startswith("plan.yml: ")


def test_a_plan_survives_its_run_folder():
    made = plan(variants=["b"], trial={"grid": [POINT]}, concurrency=[4, 1], first_prompts=24, max_tokens=96)
    assert plans.read_plan(plans.as_json(made), "again") == made


# --- the order of what is left ---------------------------------------------------------------------------------------


def test_steps_are_done_in_order_and_never_twice():
    steps = plans.steps_of(plan(variants=["b", "c"]), "base")
    measured = []
    while (at := plans.next_step(steps)) is not None:
        steps[at]["state"] = "measuring"
        assert plans.next_step(steps) == at, "one that a kill cut off is the next"
        steps[at]["state"] = "done"
        measured.append(at)
    assert measured == [0, 1, 2, 3, 4]


def test_an_arm_that_fails_needs_no_base_load_of_its_own():
    steps = plans.steps_of(plan(variants=["b", "c"]), "base")
    for state in ("done", "failed"):
        steps[plans.next_step(steps)]["state"] = state
    assert plans.next_step(steps) == 3 and steps[2]["state"] == "skipped"
    steps[3]["state"] = "done"
    assert plans.next_step(steps) == 4, "the closing one is still wanted"
    steps[3]["state"] = "failed"
    assert plans.next_step(steps) is None


# --- cost ------------------------------------------------------------------------------------------------------------


def swap(to, outcome="swapped", back=None, seconds=100.0, confirm=0.0):
    names = ["preflight", "stop", "install", "free", "start", "watch", "probe", "soak"]
    phases = [{"name": name, "seconds": seconds if name == "watch" else 1.0} for name in names]
    if confirm:
        phases.append({"name": "confirm", "seconds": confirm})
    if back:
        phases += [{"name": "rollback-" + name, "seconds": 10.0} for name in names[1:7]]
    return {
        "to": {"variant": to},
        "from": {"variant": back} if back else None,
        "outcome": outcome,
        "phases": phases,
    }


def test_load_times_come_from_the_hosts_own_swaps_without_the_wait_for_a_word():
    history = [
        swap("ngram"),
        swap("ngram", seconds=200.0),
        swap("ngram", seconds=300.0),
        swap("trial", "rolled_back", back="baseline", seconds=50.0, confirm=999.0),
        swap("broken", "refused"),
    ]
    assert plans.load_seconds(history) == {"ngram": 206.0, "trial": 56.0, "baseline": 60.0}


def test_the_budget_counts_loads_and_says_what_it_does_not_know():
    steps = plans.steps_of(plan(variants=["b", "c"]), "base")
    cost = plans.budget(steps, {"base": 60.0, "b": 100.0}, "base", {}, None)
    assert cost == {"loads": 4, "load_s": 60.0 + 60.0 + 100.0 + 100.0, "measure_s": None, "unknown": ["c"]}
    steps[0]["state"] = "done"
    cost = plans.budget(steps, {"base": 60.0, "b": 100.0}, "base", {"arm": 30.0}, 30.0)
    assert (cost["load_s"], cost["measure_s"]) == (60.0 + 60.0 + 100.0 + 1800.0, 120.0)
    assert plans.budget(steps, {}, "base", {}, None)["load_s"] is None
    assert plans.budget(steps, {}, "other", {}, None)["loads"] == 4, "b, base, c, base"


def test_what_a_plan_can_find_is_weighed_by_the_verdicts_own_words():
    made = plan(variants=["b", "c"], trial={"grid": [POINT], "repeats": 4})
    found = verdict.parse_plan(plans.power_words(made, 24))
    assert (found.prompts, found.repeats, found.base_boots, found.variant_boots) == (24, 3, 3, 1)
    trial = verdict.parse_plan(plans.power_words(made, 24, trial=True))
    assert (trial.one_load, trial.repeats) == (1, 4)
    assert verdict.power(trial)["smallest_effect"] < verdict.power(found)["smallest_effect"]


def test_prompts_are_taken_class_by_class_and_capped():
    given = [{"id": f"{kind}{at}", "class": kind, "max_tokens": 512} for kind in "abc" for at in range(4)]
    chosen = plans.chosen_prompts(given, 6, 96)
    assert [one["id"] for one in chosen] == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert {one["max_tokens"] for one in chosen} == {96}
    assert plans.chosen_prompts(given, None, None) == given


def test_a_prediction_leaves_out_what_is_not_worth_it():
    prediction = {"settings": [{**POINT, "worth": "no"}, {**OTHER, "worth": "unclear"}]}
    made = plan(variants=["b", "n"], grid=[POINT, OTHER], trial={"grid": [POINT]}, confirm_winner=True)
    # The engine takes a missing minimum as the maximum.
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    table = {"b": {}, "n": {"speculative_config": config}}
    assert plans.to_skip(made, prediction, table) == ["n", "k5_min4_max4"]
    left = plans.without(made, plans.to_skip(made, prediction, table))
    assert (left.variants, left.grid, left.trial, left.confirm_winner) == (("b",), (OTHER,), None, False)
    assert plans.to_skip(made, None, table) == [] and plans.without(made, []) == made
    with pytest.raises(plans.PlanError, match="no setting worth"):
        plans.without(plan(variants=["n"]), ["n"])


# --- lines -----------------------------------------------------------------------------------------------------------


def recorded(setting, repeat, prompt, seconds, drafted=None):
    return {
        "id": prompt,
        "class": "x",
        "setting": setting,
        "repeat": repeat,
        "prompt_token_ids": [1],
        "output_token_ids": [int(prompt[1:]), *range(40)],
        "text": "",
        "reasoning": None,
        "finish_reason": "stop",
        "ttft_s": 0.1,
        "decode_s": seconds,
        "e2e_s": seconds + 0.1,
        "output_tokens": 41,
        "drafted": drafted,
        "accepted": drafted,
        "error": None,
    }


def test_a_trial_is_judged_within_its_one_load_and_its_winner_found():
    arms = plans.trial_arms([POINT, OTHER])
    assert arms == {"off": "A", "k5_min4_max4": "B", "k2_min1_max4": "C"}
    speeds = {"off": 1.0, "k5_min4_max4": 0.5, "k2_min1_max4": 1.2}
    lines = [
        recorded(
            name, repeat, f"p{at}", seconds * (9.0 if repeat == 0 else 1 + at / 100), None if name == "off" else [2]
        )
        for repeat in range(4)
        for at in range(20)
        for name, seconds in speeds.items()
    ]
    raw = plans.trial_lines(lines, arms, "ngram_trial")
    facts = {line["arm"]: line["facts"] for line in raw if "facts" in line}
    assert facts["A"] == {"method": None, "drafted": 0, "accepted": 0}
    assert facts["B"]["method"] == "ngram" and facts["B"]["drafted"] == 2 * 60
    requests = [line for line in raw if "facts" not in line]
    assert {line["boot"] for line in requests} == {1} and {line["repeat"] for line in requests} == {0, 1, 2}
    assert max(line["decode_s"] for line in requests) < 2, "the warm-up repeat is no measurement"
    run = verdict.read_run([verdict.json.dumps(line).encode() for line in raw], "raw.jsonl")
    found = verdict.verdicts(run)
    words = {one["variant"]["arm"]: one["word"] for one in found}
    assert words == {"B": "faster", "C": "slower"}
    assert plans.winner_of(found, arms) == "k5_min4_max4"
    assert plans.winner_of([one for one in found if one["variant"]["arm"] == "C"], arms) is None
    told = plans.transcripts(lines, arms, "ngram_trial")
    assert len(told) == 60 and {"prompt_token_ids", "output_token_ids", "arm", "setting"} <= set(told[0])
