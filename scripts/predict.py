#!/usr/bin/env python3
"""Predict whether speculation will help, from answers that were recorded without it and a probe of the plain engine.

    python scripts/predict.py replay FILE.jsonl --grid "k=5 min=4 max=4; k=2 min=1 max=4" --semantics v1
    python scripts/predict.py predict FILE.jsonl --probe PROBE.json --grid "..." --engine-version 0.32.0
    python scripts/predict.py fixed-cost PLAIN.jsonl OFF.jsonl --store fixed-costs.jsonl ...
    python scripts/predict.py check FILE.jsonl MEASURED.jsonl --probe PROBE.json --engine-version 0.32.0
    python scripts/predict.py plan --preset kimi-k2

Exit codes:

    0  done
    1  standard output could not be written; `check`: a prediction and its measurement disagree
    2  the input, the grid, the call or a file to write was wrong; the message says where, found and expected
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from scripts import expert_sets, heat_map, json_files, prediction, replay, step_cost, step_plan  # noqa: E402
from scripts.json_files import InputError  # noqa: E402

# A table is read in a pager or a log as well as in a terminal; without a terminal there is no width to ask for.
PLAIN_WIDTH = 120
# Recorded texts that a probe gets, so that its repeats are not all of one.
PROBE_TEXTS = 16
RECORDED = "lines as `swapgate record` writes them"
# Of streams at once; the host program takes no more.
LARGEST_PROBE = 256

REPLAY_HELP = """
Replay the n-gram proposer over recorded answers: exact drafts and accepted tokens per step, no engine needed.

Input, one JSON object a line (other keys are ignored, blank lines skipped):

    {"id": string or number, "class": string, "prompt_token_ids": [...], "output_token_ids": [...]}

--json prints a list, one object per request and setting, in the order of the input, then of the grid:

    {"id", "class", "k", "min", "max",
     "steps":            decode steps; the first output token comes from the prefill, not from a step
     "drafted":          draft tokens verified, one number per step
     "accepted":         those accepted, one number per step, at most the tokens that the answer still holds
     "tokens_per_step":  (output tokens - 1) / steps, null without a step}

--json --summary prints one object instead, with the sums per class (class null: all classes):

    {"semantics", "checked": what the rule was compared with, "max_model_len",
     "summary": [{"class", "k", "min", "max", "requests", "tokens", "steps", "tokens_per_step",
                  "draft_step_share":        share of the steps that had a draft, 0..1
                  "drafted", "accepted":     tokens
                  "drafted_by_position", "accepted_by_position":  tokens, positions 1..k
                  "acceptance_by_position":  accepted / drafted at that position, 0..1, null where none was drafted}]}

Without --json: the summary as a table. Tokens per step is also the free-verify bound: the decode speed-up if verifying
k + 1 tokens cost no more than computing one. No host can do better with that setting on these answers.
"""
REPLAY_END = """
semantics: choose by the runner that will serve.
    v1  earliest match, 0..k drafts a step    V1 runner: CPU builds; GPUs in 0.26, where n-gram turns the V2 runner off
    v2  latest match, always k drafts a step  V2 runner: GPUs in 0.32

exit codes: 0 done, 1 the output could not be written, 2 the input, the grid or the call was wrong
"""


def share(value: float | None) -> str:
    """A share 0..1 in whole per cent."""
    return "-" if value is None else f"{100 * value:.0f}"


def table_of(rows: Sequence[dict[str, Any]], rule: replay.Rule) -> Table:
    """The summary's rows for a reader."""
    limit = "" if rule.max_model_len is None else f", max_model_len {rule.max_model_len}"
    table = Table(
        title=f"Replayed acceptance, semantics {rule.semantics}{limit}",
        caption=f"tokens/step is the free-verify bound; {rule.semantics} is {replay.CHECKED[rule.semantics]}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("class", overflow="fold")
    for name in ("k", "min", "max", "requests", "tokens", "steps", "tokens/step", "steps with\ndrafts, %"):
        table.add_column(name, justify="right")
    table.add_column("accepted by position, %", overflow="fold")
    for i, row in enumerate(rows):
        bound = row["tokens_per_step"]
        table.add_row(
            # Text, not a string: a class may hold brackets, which rich would take for markup.
            Text("all" if row["class"] is None else row["class"], style="bold" if row["class"] is None else ""),
            *(str(row[key]) for key in ("k", "min", "max", "requests", "tokens", "steps")),
            "-" if bound is None else f"{bound:.3f}",
            share(row["draft_step_share"]),
            " ".join(share(value) for value in row["acceptance_by_position"]),
            end_section=i + 1 < len(rows) and rows[i + 1]["class"] != row["class"],
        )
    return table


def read(path: str, max_model_len: int | None) -> list[replay.Transcript]:
    """Transcripts of a file, or of standard input for "-"."""
    if path == "-":
        return replay.read_transcripts(sys.stdin.buffer, "standard input", max_model_len)
    try:
        with Path(path).open("rb") as stream:
            return replay.read_transcripts(stream, path, max_model_len)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror or error}; expected a JSONL file of "
            "transcripts, or - for standard input"
        ) from error


def command_replay(options: argparse.Namespace) -> int:
    """The command `replay`."""
    if options.summary and not options.json:
        raise InputError("--summary: found without --json; a table is a summary already: add --json or drop it")
    settings = replay.parse_grid(options.grid)
    rule = replay.Rule(options.semantics, options.max_model_len)
    transcripts = read(options.file, options.max_model_len)
    if options.json and not options.summary:
        # The rows have no place for it, and their shape is fixed.
        if rule.latest:
            print(f"predict replay: semantics {rule.semantics} is {replay.CHECKED[rule.semantics]}", file=sys.stderr)
        out = sys.stdout.buffer
        for i, transcript in enumerate(transcripts):
            out.write(b",\n" if i else b"[")
            out.write(replay.replay(transcript, settings, rule).rows_json())
        out.write(b"]\n")
        return 0
    summary = replay.Summary(settings)
    for transcript in transcripts:
        summary.add(replay.replay(transcript, settings, rule))
    if options.json:
        print(
            json.dumps(
                {
                    "semantics": rule.semantics,
                    "checked": replay.CHECKED[rule.semantics],
                    "max_model_len": rule.max_model_len,
                    "summary": summary.rows(),
                }
            )
        )
    else:
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        Console(width=width).print(table_of(summary.rows(), rule))
    return 0


PREDICT_HELP = """
Predict decode speed-up of n-gram speculation for every setting of a grid: replayed acceptance, the probe's cost of a
step, and the fixed cost of having speculation on. Nothing is loaded and nothing stops.

FILE.jsonl as for `replay`. PROBE.json is what `swapgate probe` wrote on the plain baseline. The fixed cost
T_on(1)/T(1) is --fixed-cost, or the last line of --fixed-costs for this host, model, version and method; without it the
prediction says so, and no setting is worth it below 1.15x, or below 1 + 3 ms / T(1) where steps are short.

--json prints
    {"overall": {"speedup", "low", "high": geometric mean over prompts with its 95 % interval; "totals": ratio of total
                 decode times; "worth", "why"},
     "classes": {name: {...}}, "prompts": {id: {...}},
     "settings": [{"k", "min", "max", "speedup", "low", "high", "totals", "tokens_per_step", "draft_step_share",
                   "free_verify_bound", "worth": yes | no | unclear, "why", "classes", "sign_flip"}],
     "best", "fixed_cost": null | {...}, "verify_cost": the curve,
     "break_even": [{"k", "draft_cost": of a draft token, in T(1), "acceptance_length", "reachable"}],
     "sign_flip", "semantics", "semantics_why", "reload", "host", "model", "caveats",
     "experts": null | {"label": "exact from dumps", "adjacent": mean distinct experts of a layer over 1, 2, ... k + 1
                 adjacent tokens, "classes": the same per class, "different": over tokens of different answers}}
"""
CHECK_HELP = """
Compare a prediction with a run that was measured, and say which of its three terms failed where they disagree.

MEASURED.jsonl: a line per request as `swapgate record` writes it, {"id", "setting", "output_tokens", "decode_s",
"cpu_s", "drafted", "accepted", "output_token_ids"}; setting "off" drafts nothing, other names hold k, min, max
("5,4,4"). With --plain (lines of the plain baseline) speed-ups are against that, and the fixed cost is checked too.
"""
PLAN_HELP = """
An estimate of T(t)/T(1) before anything was measured, for a mixture of experts: distinct experts read, their bytes, and
what links carry. Every input is printed with its source. --set replaces one: --set overlap=0.31 "Cohere, April 2026".
"""


def variant_of(file: str) -> dict[str, Any]:
    """An installed variant's JSON; its engine's package and version and its model's name are there."""
    expected = "an installed variant, /etc/swapgate/variants/UNIT.json of the host"
    found: dict[str, Any] = json_files.read_json(file, dict, expected)
    for part, key in (("engine", "package"), ("engine", "version"), ("model", "name")):
        if not isinstance(found.get(part), dict) or not isinstance(found[part].get(key), str):
            raise InputError(f"{file}: {part}: {key} is not there; expected {expected}")
    return found


def engine_of(options: argparse.Namespace) -> None:
    """Fill what the options leave open from --variant, the installed variant's JSON as it lies on the host."""
    if options.variant is None:
        return
    variant = variant_of(options.variant)
    package, version, model = variant["engine"]["package"], variant["engine"]["version"], variant["model"]["name"]
    options.engine_version = options.engine_version or version
    options.model = options.model or model
    options.device = options.device or ("cpu" if package.endswith("-cpu") else "gpu")


def clock_of(metric: str | None) -> str:
    """The key of a measured line that a probe's metric belongs to."""
    return {"cpu": "cpu_s", "engine": "engine_decode_s"}.get(metric or "", "decode_s")


def rule_of(options: argparse.Namespace) -> tuple[replay.Rule, str]:
    """The replay rule of the options, and why."""
    engine_of(options)
    if options.semantics != "auto":
        return replay.Rule(options.semantics, options.max_model_len), "as stated"
    semantics, why = prediction.semantics_of(
        options.method, options.engine_version, options.device or "gpu", options.runner
    )
    return replay.Rule(semantics, options.max_model_len), why


def fixed_of(options: argparse.Namespace) -> prediction.Fixed | None:
    """The fixed cost of the options, or None."""
    if options.fixed_cost is not None:
        (value, low, high), drafting = options.fixed_cost
        return prediction.Fixed(value, low, high, "as stated", drafting)
    if options.fixed_costs is None:
        return None
    wanted = {
        "host": options.host,
        "model": options.model,
        "engine_version": options.engine_version,
        "method_family": prediction.FAMILIES.get(options.method),
    }
    absent = [f"--{name.replace('_', '-')}" for name in ("host", "model", "engine_version") if not wanted[name]]
    if absent:
        raise InputError(f"--fixed-costs: {', '.join(absent)} not given: a fixed cost holds for one of each")
    rows = json_files.read_lines(options.fixed_costs, "what `predict.py fixed-cost --store` wrote", tuple(wanted))
    last = next((row for row in reversed(rows) if all(row[key] == wanted[key] for key in wanted)), None)
    if last is None:
        return None

    def stored(keys: str, values: Any) -> prediction.Three:
        if found := triple(values):
            return found
        raise InputError(
            f"{options.fixed_costs}: {keys}: found {json.dumps(values):.60} for {options.host}, expected three "
            "numbers above 0, value, low, high; measure it again with `predict.py fixed-cost --store`"
        )

    value, low, high = stored("fixed_cost, low, high", [last.get(key) for key in ("fixed_cost", "low", "high")])
    drafting = None if last.get("drafting") is None else stored("drafting", last["drafting"])
    return prediction.Fixed(value, low, high, f"{options.fixed_costs}: {last.get('source')}", drafting)


def triple(values: Any) -> prediction.Three | None:
    """Value, lower and upper end of a factor, or None for anything else."""
    if not isinstance(values, (list, tuple)) or len(values) != 3:
        return None
    if not all(isinstance(one, (int, float)) and math.isfinite(one) for one in values):
        return None
    value, low, high = map(float, values)
    return (value, low, high) if 0 < low <= value <= high else None


def reload_of(options: argparse.Namespace, worth: str) -> dict[str, Any] | None:
    """Minutes that trying a variant costs on this host (there and back), from its history of swaps."""
    if options.reload_minutes is not None:
        minutes, source = options.reload_minutes, "as stated"
    elif options.history is not None:
        expected = "the list of swaps that `swapgate history` prints"
        swaps = json_files.read_json(options.history, list, expected)
        if not all(isinstance(swap, dict) for swap in swaps):
            raise InputError(f"{options.history}: found a list of something else, expected {expected}")
        away = [swap["seconds_without_service"] for swap in swaps if swap.get("seconds_without_service")]
        if not all(isinstance(one, (int, float)) and one > 0 for one in away):
            raise InputError(
                f"{options.history}: seconds_without_service: found {json.dumps(away):.40}, expected numbers: "
                f"{expected}"
            )
        if not away:
            return None
        minutes, source = statistics.median(away) / 60, f"median of {len(away)} swaps in {options.history}"
    else:
        return None
    return {
        "minutes_of_one": minutes,
        "minutes_of_a_try": 2 * minutes,
        "saved": 2 * minutes if worth == "no" else 0.0,
        "source": source,
    }


def prediction_of(options: argparse.Namespace) -> dict[str, Any]:
    """The prediction of the options."""
    settings = replay.parse_grid(options.grid)
    rule, why = rule_of(options)
    transcripts = read(options.file, options.max_model_len)
    work = prediction.workload(transcripts, settings, rule)
    probe = step_cost.read_probe(options.probe)
    rng = np.random.default_rng(options.seed)
    experts = expert_sets.count(transcripts, 1 + max(setting.k for setting in settings))
    share = experts["share"] if experts else None
    curve = step_cost.curve_of(probe, options.probe, options.metric, options.kind, options.draws, rng, share)
    fixed = fixed_of(options)
    found = prediction.predict(work, curve, fixed, options.seed)
    if options.fixed_costs and not fixed:
        found["caveats"].append(
            f"{options.fixed_costs} has no fixed cost of host {options.host}, model {options.model}, engine "
            f"{options.engine_version}, method {options.method}: measure it with `predict.py fixed-cost --store`"
        )
    worths = {row["worth"] for row in found["settings"]}
    overall = "yes" if "yes" in worths else "unclear" if "unclear" in worths else "no"
    reload = reload_of(options, overall)
    if options.history and not reload:
        found["caveats"].append(
            f"{options.history} has no swap that took the service away: what a try costs is not known"
        )
    return {
        **found,
        "semantics_why": why,
        "experts": experts,
        "reload": reload,
        "host": options.host,
        "model": options.model,
    }


def prediction_table(found: Mapping[str, Any]) -> list[Any]:
    """What a reader sees of a prediction: the answer, the grid, classes, what else follows."""
    fixed = found["fixed_cost"]
    head = Text()
    best = found["best"]
    overall = found["overall"]
    head.append(f"Worth a reload: {overall['worth']}. ", style="bold")
    head.append(
        f"Best of the grid: k={best['k']} min={best['min']} max={best['max']}, decoding {overall['speedup']:.2f}x "
        f"({overall['low']:.2f} to {overall['high']:.2f}); {overall['why']}\n"
    )
    drafting = fixed and fixed["drafting"]
    with_drafts = f", {drafting['value']:.3f} in steps with drafts" if drafting else ""
    head.append(
        f"Fixed cost {fixed['value']:.3f} ({fixed['low']:.3f} to {fixed['high']:.3f}){with_drafts}; {fixed['source']}. "
        if fixed
        else f"All figures {prediction.WITHOUT_FIXED}. "
    )
    head.append(f"Semantics {found['semantics']}: {found['semantics_why']}.")
    grid = Table(title="Settings", title_justify="left")
    for name in ("k", "min", "max", "speed-up", "95 %", "tokens/step", "bound"):
        grid.add_column(name, justify="right")
    grid.add_column("worth")
    grid.add_column("why", overflow="fold")
    for row in found["settings"]:
        grid.add_row(
            str(row["k"]),
            str(row["min"]),
            str(row["max"]),
            f"{row['speedup']:.3f}",
            f"{row['low']:.2f}..{row['high']:.2f}",
            f"{row['tokens_per_step']:.3f}",
            f"{row['free_verify_bound']:.3f}",
            row["worth"],
            row["why"],
        )
    classes = Table(title="Classes at the best setting", title_justify="left")
    classes.add_column("class", overflow="fold")
    for name in ("prompts", "speed-up", "95 %"):
        classes.add_column(name, justify="right")
    for name, row in found["classes"].items():
        interval = f"{row['low']:.2f}..{row['high']:.2f}"
        classes.add_row(Text(name), str(row["prompts"]), f"{row['speedup']:.3f}", interval)
    cost = found["verify_cost"]
    tail = Text()
    curve = "  ".join(
        f"{row['b']}: {row['ratio']:.2f} ({row['low']:.2f}..{row['high']:.2f})" for row in cost["curve"][1:]
    )
    tail.append(f"T(b)/T(1), {cost['central']}, by {cost['metric']}:  {curve}\n")
    free = [row for row in found["break_even"] if row["draft_cost"] == prediction.DRAFT_COSTS[1]]
    lengths = ", ".join(
        f"k={row['k']}: {row['acceptance_length']:.2f}" + ("" if row["reachable"] else " (out of reach)")
        for row in free
    )
    tail.append(
        f"A draft model at {prediction.DRAFT_COSTS[1]:g} T(1) a token breaks even at acceptance length {lengths}\n"
    )
    tail.append(f"Streams at once: {found['sign_flip']['text']}\n")
    if found["experts"]:
        sets = "  ".join(f"{b}: {one:.1f}" for b, one in enumerate(found["experts"]["adjacent"], 1) if one is not None)
        tail.append(f"Distinct experts of b adjacent tokens, {found['experts']['label']}:  {sets}\n")
    if found["reload"]:
        one = found["reload"]
        tail.append(f"A try costs {one['minutes_of_a_try']:.0f} min without the old service ({one['source']})")
        tail.append(f", {one['saved']:.0f} of them saved\n" if one["saved"] else "\n")
    for caveat in found["caveats"]:
        tail.append(f"- {caveat}\n")
    return [head, grid, classes, tail]


def show(parts: Iterable[Any]) -> None:
    """Print for a reader."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    for part in parts:
        console.print(part)


def command_probe_request(options: argparse.Namespace) -> int:
    """The command `probe-request`."""
    settings = replay.parse_grid(options.grid)
    transcripts = [one for one in read(options.file, None) if one.outputs > 1]
    steps = {setting.k + 1 for setting in settings}
    # Where each stream drafts all its k, so many tokens are computed at once. The probe makes them of as many streams
    # of one token, and those are as many as the engine runs at once.
    many = {b for count in options.streams if count > 1 for b in (count, count * max(steps))}
    most = seats_of(options.variant)
    # Of every class alike, long ones first: a staircase needs room.
    by_class: dict[str, list[replay.Transcript]] = {}
    for one in sorted(transcripts, key=lambda one: -len(one.tokens)):
        by_class.setdefault(one.cls, []).append(one)
    chosen = [one for turn in itertools.zip_longest(*by_class.values()) for one in turn if one]
    later = sorted(b for b in many - {2, *steps} if b <= most)
    texts = [one.tokens.tolist() for one in chosen[: max(PROBE_TEXTS, *steps, *later)] if len(one.tokens) >= 8]
    if not texts:
        raise InputError(f"{options.file}: found no text of 8 tokens or more, expected some; record longer answers")
    request = {
        "variant": options.name,
        "texts": texts,
        "batch": sorted({2, *steps}),
        "later": later,
        "repeats": options.repeats,
        "max_minutes": options.max_minutes,
    }
    print(json.dumps(request))
    return 0


def seats_of(file: str | None) -> int:
    """How many requests the variant in this file runs at once; without a limit of its own, what a probe takes."""
    if file is None:
        return LARGEST_PROBE
    limit = dict(itertools.pairwise(variant_of(file).get("argv") or [])).get("--max-num-seqs", str(LARGEST_PROBE))
    return min(int(limit), LARGEST_PROBE) if limit.isdigit() else LARGEST_PROBE


def command_predict(options: argparse.Namespace) -> int:
    """The command `predict`."""
    found = prediction_of(options)
    if options.out:
        json_files.write(options.out, json.dumps(found, indent=1) + "\n", "--out")
    if options.chart:
        json_files.write(options.chart, heat_map.svg(found), "--chart")
    if options.json:
        print(json.dumps(found))
    else:
        show(prediction_table(found))
    return 0


def command_fixed_cost(options: argparse.Namespace) -> int:
    """The command `fixed-cost`."""
    clock = clock_of(options.metric)
    rows = json_files.read_lines(options.off, RECORDED)
    off = [row for row in rows if row.get("setting") in (None, options.setting)]
    if not off:
        have = ", ".join(dict.fromkeys(repr(row["setting"]) for row in rows))
        raise InputError(
            f"{options.off}: found settings {have}, expected {options.setting!r}; name the one that drafts nothing "
            "with --setting"
        )
    plain = prediction.per_token(json_files.read_lines(options.plain, RECORDED), options.plain, clock)
    source = options.source or f"{Path(options.off).name} over {Path(options.plain).name}"
    idle = prediction.per_token(off, options.off, clock)
    found = prediction.fixed_cost(plain, idle, source)
    drafting = None
    if options.probe:
        probe = step_cost.read_probe(options.probe)
        rng = np.random.default_rng(prediction.SEED)
        curve = step_cost.curve_of(probe, options.probe, options.metric, None, prediction.DRAWS, rng)
        others = [row for row in rows if row.get("setting") != options.setting]
        drafting = prediction.drafting_cost(plain, idle, timed_steps(options.off, others, clock), curve)
        if drafting is None:
            raise InputError(
                f"{options.off}: found fewer than 3 prompts with drafts, expected a setting that drafts beside "
                f"{options.setting!r}; record more prompts, or leave --probe out"
            )
    row = {
        "host": options.host,
        "model": options.model,
        "engine_version": options.engine_version,
        "method_family": prediction.FAMILIES.get(options.method, options.method),
        "fixed_cost": found.value,
        "low": found.low,
        "high": found.high,
        "drafting": drafting,
        "clock": clock,
        "source": found.source,
        "unix": round(time.time()),
    }
    if options.store:
        json_files.write(options.store, json.dumps(row) + "\n", "--store", "a")
    print(json.dumps(row))
    return 0


def timed_steps(
    path: str, rows: Sequence[Mapping[str, Any]], clock: str
) -> Iterator[tuple[str, float, prediction.Floats]]:
    """(prompt, seconds, steps by drafts) of a trial's lines under its largest k, by their own tokens.

    A unit of its own with a smaller k has graphs for that; in the trial such steps fall out of them.
    """
    named = [row for row in rows if len(re.findall(r"\d+", str(row.get("setting")))) == 3]
    settings = {name: setting for row in named if (setting := setting_of(name := str(row["setting"])))}
    most = max((setting.k for setting in settings.values()), default=0)
    for row, name, _ in prediction.decoded(named, clock):
        setting = settings.get(str(row["setting"]))
        if setting and setting.k == most:
            [transcript] = replay.read_transcripts([json.dumps(row).encode()], path)
            steps = replay.replay(transcript, [setting], replay.Rule("v1")).drafted_steps[0]
            yield name, float(row[clock]), steps.astype(float)


def setting_of(name: str) -> replay.Setting | None:
    """The setting that a name holds ("5,4,4", "k5-min4-max4"); None for off."""
    numbers = [int(one) for one in re.findall(r"\d+", name)]
    if name == "off" or (numbers and numbers[0] == 0):
        return None
    if len(numbers) != 3:
        raise InputError(f"setting {name!r}: found {len(numbers)} numbers, expected k, min, max, as in 5,4,4, or off")
    return replay.parse_grid("k={} min={} max={}".format(*numbers))[0]


def command_check(options: argparse.Namespace) -> int:
    """The command `check`."""
    lines = json_files.read_lines(options.measured, RECORDED, ["id"])
    rows = [row for row in lines if row.get("setting") is not None]
    names = [name for name in dict.fromkeys(str(row["setting"]) for row in rows) if setting_of(name)]
    if not names:
        raise InputError(f"{options.measured}: found no line with a setting, expected those of a trial")
    settings = [setting for name in names if (setting := setting_of(name))]
    rule, _ = rule_of(options)
    transcripts = read(options.file, options.max_model_len)
    work = prediction.workload(transcripts, settings, rule)
    rng = np.random.default_rng(options.seed)
    probe = step_cost.read_probe(options.probe)
    curve = step_cost.curve_of(probe, options.probe, options.metric, options.kind, options.draws, rng)
    clock = clock_of(options.metric)
    plain = None
    if options.plain:
        plain = prediction.per_token(json_files.read_lines(options.plain, RECORDED), options.plain, clock)
    found = prediction.check(work, transcripts, curve, fixed_of(options), names, rows, rule, clock, plain, options.seed)
    if not found["settings"]:
        shared = [row for row in rows if str(row["id"]) in {str(one.id) for one in transcripts}]
        timed = sum(1 for row in shared if row.get(clock))
        off = options.plain or '"off" (or --plain PLAIN.jsonl)'
        raise InputError(
            f"{options.measured}: nothing can be compared: found {len(shared)} of {len(rows)} lines with an id of "
            f"{options.file}, {timed} of them with {clock}; expected both under a setting, and under {off}"
        )
    if options.json:
        print(json.dumps(found))
    else:
        table = Table(title=f"Prediction against measurement, by {clock}", title_justify="left")
        for name in (
            "setting",
            "predicted",
            "measured",
            "agree",
            "failed term",
            "arrays equal",
            "step cost: said",
            "found",
        ):
            table.add_column(name, overflow="fold")
        for row in found["settings"]:
            said, got, arrays, cost = row["predicted"], row["measured"], row["acceptance"], row["verify"]
            table.add_row(
                row["setting"],
                f"{said['speedup']:.3f} ({said['low']:.2f}..{said['high']:.2f})",
                f"{got['speedup']:.3f} ({got['low']:.2f}..{got['high']:.2f})",
                "yes" if row["agree"] else "no",
                ", ".join(row["failed_terms"]) or "-",
                f"{arrays['equal']} of {arrays['same_text']}",
                "-" if cost is None else f"{cost['predicted']['cost']:.3f}",
                "-" if cost is None else f"{cost['measured']['cost']:.3f}",
            )
        show([table, f"mean abs error per prompt {100 * found['mean_abs_error']:.1f} %"])
    return 0 if all(row["agree"] for row in found["settings"]) else 1


def command_plan(options: argparse.Namespace) -> int:
    """The command `plan`."""
    inputs = dict(step_plan.PRESETS[options.preset]) if options.preset else {}
    for text, source in options.set or []:
        name, _, value = text.partition("=")
        try:
            inputs[name] = step_plan.Input(float(value), source)
        except ValueError:
            raise InputError(f"--set: found {text!r}, expected NAME=NUMBER and its source") from None
        if name not in step_plan.INPUTS:
            raise InputError(f"--set: found {name!r}, expected one of {', '.join(step_plan.INPUTS)}")
    found = step_plan.estimate(inputs, options.tokens)
    if options.json:
        print(json.dumps(found))
        return 0
    table = Table(title=found["label"], caption=found["bound"], title_justify="left", caption_justify="left")
    for name in (
        "tokens a step",
        "distinct experts",
        "x one token's",
        "added, experts ms",
        "added, links ms",
        "T(t)/T(1)",
    ):
        table.add_column(name, justify="right")
    for row in found["steps"]:
        table.add_row(
            str(row["tokens"]),
            f"{row['distinct_experts']:.1f}",
            f"{row['expert_multiple']:.2f}",
            f"{row['added_experts_ms']:.2f}",
            f"{row['added_link_ms']:.2f}",
            f"{row['ratio']:.2f}",
        )
    sources = Table(title="Inputs", title_justify="left")
    for name in ("input", "value", "what", "source"):
        sources.add_column(name, overflow="fold")
    for name, one in found["inputs"].items():
        sources.add_row(name, f"{one['value']:g} {one['unit']}".strip(), one["what"], one["source"])
    show([table, sources])
    return 0


def whole(text: str, least: int = 1, what: str = "") -> int:
    """A whole number of the command line."""
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number {what}from {least}")
    return int(text)


def length(text: str) -> int:
    """A max_model_len of the command line, in tokens."""
    return whole(text, 1, "of tokens ")


def from_zero(text: str) -> int:
    """A seed of the command line."""
    return whole(text, 0)


def minutes(text: str) -> float:
    """Minutes of the command line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of minutes above 0")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    one = commands.add_parser(
        "replay",
        help="replay acceptance over recorded answers",
        description=REPLAY_HELP,
        epilog=REPLAY_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("file", metavar="FILE.jsonl", help="transcripts, one a line, or - for standard input")
    one.add_argument(
        "--grid",
        required=True,
        help=f'settings with ";" between: "k=5 min=4 max=4; k=2 min=1 max=4", in tokens, each 1..{replay.LARGEST}',
    )
    one.add_argument("--semantics", required=True, choices=replay.SEMANTICS, help="rule of the runner that will serve")
    one.add_argument(
        "--max-model-len",
        type=length,
        metavar="TOKENS",
        help="limit of the server, prompt and answer together: cuts the last drafts as the engine does",
    )
    one.add_argument("--json", action="store_true", help="print JSON instead of a table")
    one.add_argument("--summary", action="store_true", help="with --json: sums per class instead of steps per request")
    one.set_defaults(run=command_replay)
    add_prediction(commands)
    return top


def fixed_cost(text: str) -> tuple[prediction.Three, prediction.Three | None]:
    """A fixed cost of the command line: VALUE, or VALUE,LOW,HIGH, or that and three more of steps with drafts."""
    try:
        values = [float(one) for one in text.split(",")]
    except ValueError:
        values = []
    if len(values) == 1:
        values *= 3
    idle, drafting = triple(values[:3]), triple(values[3:])
    if not idle or (values[3:] and not drafting):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected VALUE or VALUE,LOW,HIGH, such as 1.8,1.7,1.9, or six numbers: F of steps "
            "without drafts, then with"
        )
    return idle, drafting


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between."""
    return [whole(one.strip()) for one in text.split(",")]


def add_engine(one: argparse.ArgumentParser) -> None:
    """What says which engine is meant."""
    one.add_argument("--semantics", choices=("auto", *replay.SEMANTICS), default="auto", help="default: by the engine")
    one.add_argument("--engine-version", help="of the engine that will run, as 0.32.0")
    one.add_argument("--method", default="ngram", help="of speculation: ngram (default), ngram_gpu")
    one.add_argument("--device", choices=("gpu", "cpu"), help="of the engine; default gpu")
    one.add_argument("--variant", metavar="FILE", help="installed variant's JSON: version, device and model from there")
    one.add_argument("--runner", choices=replay.SEMANTICS, help="model runner that serves, where its log says it")
    one.add_argument("--max-model-len", type=length, metavar="TOKENS", help="limit of the server")
    one.add_argument("--host", help="inventory name, for the stored fixed cost")
    one.add_argument("--model", help="model name, for the stored fixed cost")


def add_cost(one: argparse.ArgumentParser) -> None:
    """What says which cost of a step is meant."""
    one.add_argument("--probe", required=True, metavar="PROBE.json", help="what `swapgate probe` wrote")
    one.add_argument("--kind", choices=("pooled", *step_cost.DECODING, "suffix-prefill"), help="default: by the model")
    one.add_argument(
        "--metric", choices=step_cost.METRICS, help="clock of the probe: default the engine's own, else wall"
    )
    cost = one.add_mutually_exclusive_group()
    cost.add_argument(
        "--fixed-cost",
        type=fixed_cost,
        metavar="F[,LOW,HIGH[,F,LOW,HIGH]]",
        help="T_on(1)/T(1); then F of steps with drafts, where it is known (else the same)",
    )
    cost.add_argument("--fixed-costs", metavar="FILE.jsonl", help="what `fixed-cost --store` wrote")
    one.add_argument("--seed", type=from_zero, default=prediction.SEED)
    one.add_argument("--draws", type=whole, default=prediction.DRAWS)
    one.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_prediction(commands: Any) -> None:
    """The commands beside `replay`."""
    raw = argparse.RawDescriptionHelpFormatter
    one = commands.add_parser(
        "predict", help="predict the speed-up of a grid", description=PREDICT_HELP, formatter_class=raw
    )
    one.add_argument("file", metavar="FILE.jsonl", help="transcripts, one a line, or - for standard input")
    one.add_argument("--grid", required=True, help="as for replay")
    add_engine(one)
    add_cost(one)
    one.add_argument("--out", metavar="FILE.json", help="write the JSON there as well")
    one.add_argument("--chart", metavar="FILE.svg", help="write a heat map of the grid")
    time_lost = one.add_mutually_exclusive_group()
    time_lost.add_argument(
        "--history", metavar="FILE", help="what `swapgate history` printed: minutes that a try costs"
    )
    time_lost.add_argument("--reload-minutes", type=minutes, help="minutes without service of one swap")
    one.set_defaults(run=command_predict)

    ask = commands.add_parser("probe-request", help="the request of `swapgate probe` for a grid, from recorded answers")
    ask.add_argument("file", metavar="FILE.jsonl", help="transcripts")
    ask.add_argument("--grid", required=True, help="as for replay: the probe measures steps of k + 1 tokens")
    ask.add_argument("--name", required=True, help="the installed variant that serves")
    ask.add_argument(
        "--streams", type=numbers, default=[1], help="measure steps of so many streams at once too, as 1,2,4,8 (1)"
    )
    ask.add_argument("--variant", metavar="FILE", help="installed variant's JSON: no more streams than it runs at once")
    ask.add_argument("--repeats", type=whole, default=3)
    ask.add_argument("--max-minutes", type=minutes, default=5.0, help="that the probe may load the engine (5)")
    ask.set_defaults(run=command_probe_request)

    two = commands.add_parser("fixed-cost", help="T_on(1)/T(1) of two record runs: loaded but off, over plain")
    two.add_argument("plain", metavar="PLAIN.jsonl", help="record lines of the plain baseline")
    two.add_argument("off", metavar="OFF.jsonl", help="record lines of a trial; those of --setting count")
    two.add_argument("--setting", default="off", help="name of the setting that drafts nothing (off)")
    two.add_argument("--metric", choices=step_cost.METRICS, help="clock: default wall")
    two.add_argument(
        "--probe", metavar="PROBE.json", help="of the plain baseline: F of steps with drafts too, by the other settings"
    )
    two.add_argument("--store", metavar="FILE.jsonl", help="append it here for later predictions")
    two.add_argument("--source", help="where it is from, for the record")
    for name in ("--host", "--model", "--engine-version"):
        two.add_argument(name, required=True)
    two.add_argument("--method", default="ngram")
    two.set_defaults(run=command_fixed_cost)

    three_ = commands.add_parser(
        "check", help="prediction against a measured run", description=CHECK_HELP, formatter_class=raw
    )
    three_.add_argument("file", metavar="FILE.jsonl", help="transcripts of the plain baseline")
    three_.add_argument("measured", metavar="MEASURED.jsonl")
    three_.add_argument("--plain", metavar="PLAIN.jsonl", help="timed lines of the plain baseline")
    add_engine(three_)
    add_cost(three_)
    three_.set_defaults(run=command_check)

    four = commands.add_parser(
        "plan", help="an estimate before anything is measured", description=PLAN_HELP, formatter_class=raw
    )
    four.add_argument("--preset", choices=tuple(step_plan.PRESETS))
    four.add_argument("--set", nargs=2, action="append", metavar=("NAME=NUMBER", "SOURCE"))
    four.add_argument("--tokens", type=numbers, default=[1, 2, 3, 4, 6, 8], help="tokens a step, commas between")
    four.add_argument("--json", action="store_true")
    four.set_defaults(run=command_plan)


def main(arguments: Iterable[str] | None = None) -> int:
    """Command line; returns the exit code that the module's text lists."""
    options = parser().parse_args(list(arguments) if arguments is not None else None)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except InputError as error:
        print(f"predict {options.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # Else the interpreter, flushing once more at its end, would print a second, unclear error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(
            f"predict {options.command}: standard output cannot be written: {error.strerror or error}; expected a "
            "reader that takes all of it, or a file with room",
            file=sys.stderr,
        )
        return 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
