"""What an experiment consists of, how long it takes, and what its recordings become: data to data, for experiment.py.

A plan (YAML; only `variants`, `grid` or `trial` must be there, one of them at least)

    base: baseline               # arm A; default: the variant that serves
    variants: [ngram]            # one arm each, loaded as a unit
    grid: [{k: 5, min: 4, max: 4}]   # n-gram settings, one arm and one load each; made from the base
    boots: 1                     # loads of each arm but A
    order: return                # A B A C A; `fewest`: A B C A
    prompts: benchmarks/prompts/mixed.jsonl
    first_prompts: 24            # only so many of them, each class in turn
    max_tokens: 96               # an upper bound on each prompt's own
    repeats: 3
    concurrency: [1]
    cache: cold
    budget_minutes: 180
    load_minutes: 30             # of a variant that this host never loaded
    trial: {variant: ngram_trial, grid: [{k: 5, min: 4, max: 4}], repeats: 3}
    confirm_winner: false        # true: the trial's winner becomes an arm
    prediction: runs/predict-HOST/prediction.json   # what `predict.yml` found, shown beside what is measured
    skip_predicted: false        # true: settings that the prediction calls not worth it are left out
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

JsonDict = dict[str, Any]

ORDERS = ("return", "fewest")
CACHES = ("cold", "warm")
LETTERS = "ABCDEFGHIJKLMNOPQRSUVWXYZ"  # without TRIAL
OFF = "off"
TRIAL = "T"
# Of a swap, what is spent on a load; the wait for a confirmation is not.
LOAD_PHASES = ("stop", "install", "free", "start", "watch", "probe", "soak")
ENDED = ("done", "failed", "skipped")
# A trial's first repeat warms caches and kernels, and is thrown away.
WARM_UP = 1
# Of a recorded line, what a raw line has under another name or not at all.
NOT_RAW = ("id", "prompt_token_ids", "output_token_ids", "reasoning")


class PlanError(ValueError):
    """The plan cannot be carried out; the text says where, what was found, what was expected and what to do."""


@dataclass(frozen=True)
class Plan:
    """A plan with its defaults in place."""

    base: str | None = None
    variants: tuple[str, ...] = ()
    grid: tuple[JsonDict, ...] = ()
    boots: int = 1
    order: str = "return"
    prompts: str = "benchmarks/prompts/mixed.jsonl"
    first_prompts: int | None = None
    max_tokens: int | None = None
    repeats: int = 3
    concurrency: tuple[int, ...] = (1,)
    cache: str = "cold"
    budget_minutes: float = 240.0
    load_minutes: float | None = None
    trial: JsonDict | None = None
    confirm_winner: bool = False
    prediction: str | None = None
    skip_predicted: bool = False


def _wrong(where: str, key: str, found: Any, expected: str) -> PlanError:
    return PlanError(f"{where}: {key}: found {found!r:.80}, expected {expected}. Correct the plan.")


def _whole(where: str, key: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _wrong(where, key, value, f"a whole number of at least {least}")
    return value


def _grid(where: str, key: str, value: Any) -> tuple[JsonDict, ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(where, key, value, "a list of {k, min, max}")
    for point in value:
        if not isinstance(point, dict) or set(point) != {"k", "min", "max"}:
            raise _wrong(where, key, point, "k, min and max, and nothing else")
        for name in ("k", "min", "max"):
            _whole(where, f"{key}: {name}", point[name], 1)
        if point["min"] > point["max"]:
            raise _wrong(where, key, point, "min of at most max")
    names = [setting_name(point) for point in value]
    if len(set(names)) < len(names):
        raise _wrong(where, key, names, "each setting once")
    return tuple(dict(point) for point in value)


def read_plan(value: Any, where: str) -> Plan:
    """The plan in a parsed YAML file. Raises PlanError."""
    if not isinstance(value, dict):
        raise PlanError(f"{where}: found {type(value).__name__}, expected a map; docs/experiment.md has an example")
    known = {item.name for item in fields(Plan)}
    unknown = sorted(set(map(str, value)) - known)
    if unknown:
        raise _wrong(where, unknown[0], value.get(unknown[0]), f"a key of {', '.join(sorted(known))}")
    given = {key: item for key, item in value.items() if item is not None}
    for key in ("boots", "repeats", "first_prompts", "max_tokens"):
        if key in given:
            _whole(where, key, given[key], 16 if key == "max_tokens" else 1)
    for key in ("budget_minutes", "load_minutes"):
        if key in given and (
            isinstance(given[key], bool) or not isinstance(given[key], (int, float)) or not 0 < given[key] < math.inf
        ):
            raise _wrong(where, key, given[key], "finite minutes above 0")
    for key in ("base", "prompts", "prediction"):
        if key in given and not isinstance(given[key], str):
            raise _wrong(where, key, given[key], "a text")
    for key in ("confirm_winner", "skip_predicted"):
        if key in given and not isinstance(given[key], bool):
            raise _wrong(where, key, given[key], "true or false")
    for key, choices in (("order", ORDERS), ("cache", CACHES)):
        if given.get(key, choices[0]) not in choices:
            raise _wrong(where, key, given[key], " or ".join(choices))
    names = given.get("variants", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise _wrong(where, "variants", names, "a list of variants' names, each once")
    levels = given.get("concurrency", [1])
    if not isinstance(levels, list) or not levels:
        raise _wrong(where, "concurrency", levels, "a list of whole numbers")
    for level in levels:
        _whole(where, "concurrency", level, 1)
    trial = given.get("trial")
    if trial is not None:
        trial = _trial(where, trial, given.get("repeats", 3))
    if given.get("confirm_winner") and trial is None:
        raise _wrong(where, "confirm_winner", True, "a `trial` whose winner it is")
    grid = _grid(where, "grid", given["grid"]) if "grid" in given else ()
    if not names and not grid and trial is None:
        raise PlanError(f"{where}: found no arm, expected at least one of variants, grid and trial. Add one.")
    if given.get("repeats", 3) < 2:
        raise _wrong(where, "repeats", given["repeats"], "at least 2: the null run compares repeats of one load")
    if len(names) + len(grid) > len(LETTERS) - 2:
        raise _wrong(where, "variants and grid", len(names) + len(grid), f"at most {len(LETTERS) - 2} arms")
    return Plan(
        **{
            **given,
            "variants": tuple(names),
            "grid": grid,
            "concurrency": tuple(sorted(set(levels))),
            "trial": trial,
        }
    )


def _trial(where: str, value: Any, repeats: int) -> JsonDict:
    if not isinstance(value, dict) or not set(value) <= {"variant", "grid", "repeats"} or "grid" not in value:
        raise _wrong(where, "trial", value, "variant, grid and repeats")
    found = {"variant": "ngram_trial", "repeats": repeats, **value}
    if not isinstance(found["variant"], str):
        raise _wrong(where, "trial: variant", found["variant"], "a trial variant's name")
    _whole(where, "trial: repeats", found["repeats"], 2)
    return {**found, "grid": list(_grid(where, "trial: grid", found["grid"]))}


def as_json(plan: Plan) -> JsonDict:
    """The plan as it is kept in a run folder; `read_plan` takes it back."""
    found: JsonDict = json.loads(json.dumps(asdict(plan)))
    return {key: value for key, value in found.items() if value not in (None, [])}


def sha256(content: bytes) -> str:
    """Its hash, in hex."""
    return hashlib.sha256(content).hexdigest()


# --- arms and their order --------------------------------------------------------------------------------------------


def setting_name(point: Mapping[str, Any]) -> str:
    """`k5_min4_max4`."""
    return f"k{point['k']}_min{point['min']}_max{point['max']}"


def setting_variant(point: Mapping[str, Any], base: str) -> tuple[str, JsonDict]:
    """Name and entry of the variant that is one n-gram setting on ``base``."""
    return f"ngram_{setting_name(point)}", {
        "extends": base,
        "description": f"n-gram drafts, k={point['k']} min={point['min']} max={point['max']}",
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": point["k"],
            "prompt_lookup_min": point["min"],
            "prompt_lookup_max": point["max"],
        },
    }


def arms_of(plan: Plan, base: str) -> dict[str, str]:
    """Arm's letter to variant; A is the base."""
    names = [base, *plan.variants, *(setting_variant(point, base)[0] for point in plan.grid)]
    if base in plan.variants:
        raise PlanError(f"variants: found '{base}', which is the base already, expected the others. Remove it.")
    if len(set(names)) < len(names):
        raise PlanError(f"variants and grid: found {names}, expected each variant once. Correct the plan.")
    return dict(zip(LETTERS, names, strict=False))


def step(arm: str, variant: str, kind: str = "arm") -> JsonDict:
    """One load to measure: {"arm", "variant", "kind": "arm"|"trial", "state", ...}; `state` moves from "pending"
    over "measuring" to one of ENDED."""
    return {"arm": arm, "variant": variant, "kind": kind, "state": "pending", "cause": None, "seconds": None}


def steps_of(plan: Plan, base: str) -> list[JsonDict]:
    """The loads in their order. A base load begins and ends it, since the verdict wants drift bracketed.

    `return`: A between any two arms. Each arm is compared with base loads just before and after it, and the host comes
    back by itself when the controller is gone. `fewest`: A only at both ends of a round, which saves a load an arm.
    The trial comes first: the base load after it is the one before the next arm, and its winner can still be an arm.
    """
    arms = arms_of(plan, base)
    home = step("A", base)
    order = [dict(home)]
    if plan.trial:
        order += [step(TRIAL, plan.trial["variant"], "trial"), dict(home)]
    for _ in range(plan.boots):
        for letter, variant in list(arms.items())[1:]:
            order.append(step(letter, variant))
            if plan.order == "return":
                order.append(dict(home))
    if order[-1]["arm"] != "A":
        order.append(dict(home))
    return order


def add_winner(steps: list[JsonDict], variant: str, base: str) -> list[JsonDict]:
    """The steps with the trial's winner as one more arm at the end, and the base load that closes it."""
    if variant in {one["variant"] for one in steps}:
        return steps
    used = {one["arm"] for one in steps}
    letter = next(letter for letter in LETTERS if letter not in used and letter != TRIAL)
    return [*steps, step(letter, variant), step("A", base)]


def next_step(steps: Sequence[JsonDict]) -> int | None:
    """The step to do now. One that was being measured is done anew; a base load that would close nothing is skipped."""
    for at, one in enumerate(steps):
        if one["state"] in ENDED:
            continue
        before = [other for other in steps[:at] if other["state"] == "done"]
        if one["arm"] == "A" and before and before[-1]["arm"] == "A":
            one.update(state="skipped", cause="no arm was measured since the base was")
            continue
        return at
    return None


# --- what it costs ---------------------------------------------------------------------------------------------------


def load_seconds(history: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """By variant, the median seconds from the stop of the old engine to the end of the soak, over the host's swaps.

    A way back counts for the variant that it brought back: a host whose swaps all went back knows its base too.
    """
    found: dict[str, list[float]] = {}
    for swap in history:
        for prefix, record in (("", swap["to"]), ("rollback-", swap.get("from"))):
            parts = {
                phase["name"][len(prefix) :]: phase["seconds"]
                for phase in swap.get("phases") or []
                if phase["name"].startswith("rollback-") == bool(prefix)
            }
            answered = "probe" in parts and (prefix or swap["outcome"] == "swapped" or "confirm" in parts)
            if record and answered:
                total = sum(parts.get(name, 0.0) for name in LOAD_PHASES)
                found.setdefault(record["variant"], []).append(total)
    return {variant: statistics.median(times) for variant, times in found.items()}


def budget(
    steps: Sequence[Mapping[str, Any]],
    known_s: Mapping[str, float],
    serving: str | None,
    measure_s: Mapping[str, float],
    load_minutes: float | None,
) -> JsonDict:
    """What the steps that are not done yet cost.

    {"loads": n, "load_s": s | null, "measure_s": s | null, "unknown": [variant, ...]}

    ``measure_s`` is by kind of step; null figures are not known. A variant without history takes ``load_minutes``.
    """
    assumed = load_minutes * 60 if load_minutes else max(known_s.values(), default=None)
    loads, load_s, unknown = 0, 0.0, []
    measured: float | None = 0.0
    now = serving
    for one in steps:
        if one["state"] in ENDED:
            continue
        if one["variant"] != now:
            loads += 1
            seconds = known_s.get(one["variant"])
            if seconds is None and one["variant"] not in unknown:
                unknown.append(one["variant"])
            seconds = assumed if seconds is None else seconds
            load_s = None if load_s is None or seconds is None else load_s + seconds  # type: ignore[assignment]
            now = one["variant"]
        each = measure_s.get(one["kind"])
        measured = None if measured is None or each is None else measured + each
    return {"loads": loads, "load_s": load_s, "measure_s": measured, "unknown": unknown}


def minutes(seconds: float | None) -> str:
    """`12 min`, or that it is not known."""
    return (
        "a time not known yet"
        if seconds is None
        else f"{seconds / 60:.0f} min"
        if seconds >= 90
        else f"{seconds:.0f} s"
    )


def power_words(plan: Plan, prompts: int, trial: bool = False) -> str:
    """`scripts/verdict.py --plan` words of one arm against the base."""
    if trial and plan.trial:
        return f"prompts={prompts} repeats={plan.trial['repeats']} boots=1,1 one_load=1"
    base = 1 + plan.boots * (1 if plan.order == "fewest" else max(len(plan.variants) + len(plan.grid), 1))
    return f"prompts={prompts} repeats={plan.repeats} boots={base},{plan.boots}"


def chosen_prompts(prompts: Sequence[JsonDict], first: int | None, max_tokens: int | None) -> list[JsonDict]:
    """At most ``first`` of them, the classes in turn so that each has its share, answers at most so long."""
    turns: dict[str, int] = {}
    ranked = []
    for at, prompt in enumerate(prompts):
        turn = turns[prompt["class"]] = turns.get(prompt["class"], -1) + 1
        ranked.append((turn, at))
    kept = sorted(at for _, at in sorted(ranked)[: first or len(ranked)])
    cap = max_tokens or max(prompt["max_tokens"] for prompt in prompts)
    return [{**prompts[at], "max_tokens": min(prompts[at]["max_tokens"], cap)} for at in kept]


def setting_of(entry: Mapping[str, Any]) -> JsonDict | None:
    """The n-gram setting that a variant's entry states, None for another one. A missing length is as the other one."""
    config = entry.get("speculative_config") or {}
    least, most = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    found = {"k": config.get("num_speculative_tokens"), "min": least or most, "max": most or least}
    return found if config.get("method") == "ngram" and all(found.values()) else None


def not_worth_it(prediction: Mapping[str, Any] | None, points: Iterable[Mapping[str, Any]]) -> list[JsonDict]:
    """The settings among ``points`` that a prediction calls not worth a measurement."""
    rows = (prediction or {}).get("settings") or []
    verdicts = {(row.get("k"), row.get("min"), row.get("max")): row.get("worth") for row in rows}
    return [dict(point) for point in points if verdicts.get((point["k"], point["min"], point["max"])) == "no"]


def to_skip(plan: Plan, prediction: Mapping[str, Any] | None, table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What of a plan a prediction calls not worth a measurement: names of its variants and of its settings."""
    settings = {name: point for name in plan.variants if (point := setting_of(table.get(name) or {}))}
    named = [name for name, point in settings.items() if not_worth_it(prediction, [point])]
    points = not_worth_it(prediction, [*plan.grid, *(plan.trial or {}).get("grid", [])])
    return list(dict.fromkeys([*named, *map(setting_name, points)]))


def without(plan: Plan, left_out: Iterable[str]) -> Plan:
    """The plan less what `to_skip` named. PlanError when nothing is left."""
    less = set(left_out)
    names = tuple(name for name in plan.variants if name not in less)
    grid = tuple(point for point in plan.grid if setting_name(point) not in less)
    trial = plan.trial
    if trial:
        points = [point for point in trial["grid"] if setting_name(point) not in less]
        trial = {**trial, "grid": points} if points else None
    if not names and not grid and trial is None:
        raise PlanError("plan: the prediction calls no setting worth a measurement; nothing is left to do")
    winner = plan.confirm_winner and trial is not None
    return replace(plan, variants=names, grid=grid, trial=trial, confirm_winner=winner)


# --- what was recorded -----------------------------------------------------------------------------------------------


def trial_settings(points: Sequence[Mapping[str, Any]]) -> list[JsonDict]:
    """The recorder's settings: off first, then the grid."""
    off = {"name": OFF, "k": 0, "min": points[0]["min"], "max": points[0]["max"]}
    return [off, *({"name": setting_name(point), **point} for point in points)]


def trial_arms(points: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Setting's name to arm's letter; A is off."""
    return dict(zip((setting["name"] for setting in trial_settings(points)), LETTERS, strict=False))


def trial_lines(recorded: Iterable[Mapping[str, Any]], arms: Mapping[str, str], variant: str) -> list[JsonDict]:
    """Raw lines for scripts/verdict.py: an arm a setting, all of one load; the warm-up repeat is left out."""
    lines: list[JsonDict] = []
    drafted: dict[str, list[int]] = {arm: [0, 0] for arm in arms.values()}
    for one in recorded:
        if one["repeat"] < WARM_UP:
            continue
        arm = arms[one["setting"]]
        head = {
            "arm": arm,
            "variant": f"{variant} {one['setting']}",
            "boot": 1,
            "concurrency": 1,
            "prompt_id": one["id"],
        }
        kept = {key: value for key, value in one.items() if key not in NOT_RAW}
        if "output_token_ids" in one:
            kept["token_ids"] = one["output_token_ids"]
        lines.append({**head, **kept, "repeat": one["repeat"] - WARM_UP, "setting": one["setting"]})
        for place, key in enumerate(("drafted", "accepted")):
            drafted[arm][place] += sum(one.get(key) or [])
    facts = [
        {
            "arm": arm,
            "boot": 1,
            "facts": {
                "method": None if setting == OFF else "ngram",
                "drafted": drafted[arm][0],
                "accepted": drafted[arm][1],
            },
        }
        for setting, arm in arms.items()
    ]
    return [*facts, *lines]


def transcripts(recorded: Iterable[Mapping[str, Any]], arms: Mapping[str, str], variant: str) -> list[JsonDict]:
    """A line a prompt and setting, of the first repeat that has an answer."""
    seen: set[tuple[str, str]] = set()
    found = []
    for one in recorded:
        key = (one["id"], one["setting"])
        if one.get("error") or key in seen:
            continue
        seen.add(key)
        kept = {
            name: one[name] for name in ("id", "class", "prompt_token_ids", "output_token_ids", "text", "finish_reason")
        }
        found.append({**kept, "variant": variant, "arm": arms[one["setting"]], "setting": one["setting"], "boot": 1})
    return found


def winner_of(verdicts: Iterable[Mapping[str, Any]], arms: Mapping[str, str]) -> str | None:
    """The setting that is called faster by the most, or None."""
    faster = [one for one in verdicts if one["word"] == "faster"]
    if not faster:
        return None
    best = max(faster, key=lambda one: one["speedup"]["value"])
    return next(setting for setting, arm in arms.items() if arm == best["variant"]["arm"])
