#!/usr/bin/env python3
"""Say from raw per-request timings whether one arm decodes faster than another, or why that cannot be said.

    python scripts/verdict.py RUN.jsonl [--json]          the verdict on every arm against the base arm
    python scripts/verdict.py --plan "prompts=72 ..."     what a plan can find, before it runs
    python scripts/verdict.py --check-prompts FILE.jsonl  whether a prompt set can carry a verdict

Needs nothing else of swapgate. Exit codes:

    0  an arm is faster (or: the plan was weighed, the prompt set is good)
    1  a verdict was reached, and no arm is faster
    2  the input or the call was wrong; the message says where, what was found and what was expected
    3  no verdict: the rig or the run is refused, the reasons are named
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.json_files import InputError  # noqa: E402
from scripts.verdict_arms import SEED, Arm, Gate, Settings  # noqa: E402
from scripts.verdict_gates import (  # noqa: E402
    class_gate,
    complete_gate,
    drift_gate,
    itl_gate,
    null_gate,
    order_gate,
    server_gates,
    synthetic_gate,
    tail_gate,
    throttle_gate,
)
from scripts.verdict_history import read_history, spread_of  # noqa: E402
from scripts.verdict_intervals import (  # noqa: E402
    DRAWS,
    FLOOR,
    BootSpread,
    Estimate,
    Floats,
    estimate,
    known_mean,
    least_difference,
    null_run,
    within_spread,
    word_of,
)
from scripts.verdict_outputs import divergence, divergence_gate, finish_gate, length_gate, output_gates  # noqa: E402
from scripts.verdict_plans import needed, parse_plan, power, smallest_range  # noqa: E402
from scripts.verdict_runs import FEWEST_PROMPTS, Run, check_prompts, read_prompts, read_run  # noqa: E402

FEWEST_OF_CLASS = 4  # prompts; fewer say nothing of how their class varies, and have no interval

__all__ = [
    "BootSpread",
    "InputError",
    "Run",
    "Settings",
    "check_prompts",
    "judge",
    "parse_plan",
    "power",
    "read_prompts",
    "read_run",
    "smallest_range",
    "verdicts",
]


def check_weights(run: Run, weights: Mapping[str, float] | None) -> None:
    """Raises InputError unless the weights name exactly the classes of the run, one of them above 0."""
    kinds = sorted({request.kind for request in run.requests})
    if weights is not None and sorted(weights) != kinds:
        raise InputError(
            f"--weights: found {', '.join(sorted(weights))}, expected the classes of {run.name}: "
            f"{', '.join(kinds)}; name each once, 0 leaves it out"
        )
    if weights is not None and not any(weights.values()):
        raise InputError("--weights: found only zeros, expected a class that counts")


def weights_of(kinds: Sequence[str], weights: Mapping[str, float] | None) -> Floats:
    """What each prompt counts, from what its class counts. Without weights every prompt counts the same."""
    counts = Counter(kinds)
    return np.array([1.0 if weights is None else weights[kind] / counts[kind] for kind in kinds])


def _ratio(low: float, value: float, high: float, bounds: bool = True) -> dict[str, float | None]:
    return {
        "low": math.exp(low) if bounds else None,
        "value": math.exp(value),
        "high": math.exp(high) if bounds else None,
    }


def judge(
    run: Run,
    base_name: str,
    variant_name: str,
    level: int = 1,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """The verdict on one arm against the base at one concurrency.

    {"word", "sentence", "reasons": names of the gates that fail, "base", "variant": {"arm", "variant", "boots"},
     "concurrency", "d", "within_spread", "boot_spread": {"sd", "df"}, "prompts": how many are paired,
     "speedup", "totals": {"low", "value", "high"} ratios above 1 for a faster variant | None, "null": the same | None,
     "needed": see `needed` | None,
     "classes": [{"class", "prompts", "speedup", "totals"}], bounds None below 4 prompts,
     "gates": [{"name", "kind", "ok", "said"}], "diverged": prompt ids,
     "boots": [{"arm", "boot", "ms_per_token": geometric mean}],
     "by_prompt": [{"prompt_id", "class", "base_ms_per_token", "variant_ms_per_token", "speedup"}]}
    """
    chosen = settings or Settings()
    kinds = {r.prompt: r.kind for r in run.requests if r.concurrency == level and r.arm in (base_name, variant_name)}
    prompts = list(kinds)
    base, variant = (Arm(run, name, level, prompts) for name in (base_name, variant_name))

    def rng(stage: int) -> np.random.Generator:
        return np.random.default_rng((chosen.seed, stage))

    both = [prompt for prompt in prompts if base.answered(prompt) and variant.answered(prompt)]
    means = [
        known_mean(np.stack([boot.mean for boot in arm.boots], 1)) if arm.boots else np.full(len(prompts), np.nan)
        for arm in (base, variant)
    ]
    counts = np.array([chosen.weights is None or chosen.weights[kind] > 0 for kind in kinds.values()], bool)
    rows = np.flatnonzero(~np.isnan(means).any(axis=0) & counts)
    paired = [prompts[row] for row in rows]
    absent = sorted(
        {kind for kind, counted in zip(kinds.values(), counts, strict=True) if counted}
        - {kinds[prompt] for prompt in paired}
    )
    enough = len(rows) >= FEWEST_PROMPTS and not absent
    gates = [
        Gate(
            "too_few_prompts",
            "rig",
            enough,
            f"{len(rows)} prompts timed in both arms"
            + (
                ""
                if enough
                else (f", none of class {', '.join(absent)}" if absent else "")
                + f"; expected at least {FEWEST_PROMPTS}, and some of every class; record more prompts"
            ),
        ),
        complete_gate((base, variant), prompts),
        throttle_gate((base, variant)),
        synthetic_gate((base, variant), kinds, chosen),
    ]
    result: dict[str, Any] = {
        "base": {"arm": base.name, "variant": base.variant, "boots": base.numbers},
        "variant": {"arm": variant.name, "variant": variant.variant, "boots": variant.numbers},
        "concurrency": level,
        "prompts": len(rows),
        "speedup": None,
        "totals": None,
        "null": None,
        "needed": None,
        "d": FLOOR,
        "within_spread": None,
        "boot_spread": None,
        "classes": [],
        "by_prompt": [],
        "boots": [],
    }
    word = "undecided"
    between: set[str] = set()
    found: Estimate | None = None
    if both:
        between, within, known = divergence(base, variant, both)
        gates += [
            divergence_gate(between, within, known, both),
            finish_gate(base, variant, both),
            length_gate(base, variant, both, rng(1), chosen.draws),
            *output_gates(base, variant, both),
        ]
    gates += server_gates(base, variant)
    if len(rows) > 1:
        weights = weights_of([kinds[prompt] for prompt in paired], chosen.weights)
        tokens = np.array([np.mean([max(r.tokens - 1, 1) for r in base.answered(prompt)]) for prompt in paired])
        left, right = ([boot.take(rows) for boot in arm.boots] for arm in (base, variant))
        spread = chosen.known.updated(left, right)
        found = estimate(left, right, weights, tokens, spread, rng(2), chosen.draws)
        deviation, df = within_spread(left, weights)
        d = least_difference(deviation)
        null = null_run(left, weights, tokens, rng(3), chosen.draws)
        word = word_of(found.low, found.high, d)
        gates += [
            null_gate(null, d),
            drift_gate(left, chosen.known, base.numbers == variant.numbers),
            order_gate(base, variant),
        ]

        names = np.array([kinds[prompt] for prompt in paired])
        for kind in dict.fromkeys(names.tolist()):
            mine = np.flatnonzero(names == kind)
            part = estimate(
                [boot.take(mine) for boot in left],
                [boot.take(mine) for boot in right],
                np.ones(len(mine)),
                tokens[mine],
                spread,
                rng(4),
                min(chosen.draws, 2000),
            )
            result["classes"].append(
                {
                    "class": kind,
                    "prompts": len(mine),
                    "speedup": _ratio(part.low, part.value, part.high, len(mine) >= FEWEST_OF_CLASS),
                    "totals": _ratio(part.totals_low, part.totals, part.totals_high, len(mine) >= FEWEST_OF_CLASS),
                }
            )
        gates.append(class_gate(result["classes"]))
        gates.append(
            Gate(
                "totals",
                "cost",
                found.totals >= 0 or word != "faster",
                f"ratio of total decode times {math.exp(found.totals):.3f}x",
            )
        )
        same = [prompt for prompt in both if prompt not in between]
        gates += [
            tail_gate("ttft_p95", "ttft_s", base, variant, both, d, found, rng(5)),
            tail_gate("e2e_p95", "e2e_s", base, variant, same, d, found, rng(6)),
            itl_gate(base, variant, both),
        ]
        result.update(
            d=d,
            within_spread=deviation if df else None,
            boot_spread={"sd": spread.sd, "df": spread.df},
            speedup=_ratio(found.low, found.value, found.high),
            totals=_ratio(found.totals_low, found.totals, found.totals_high),
            null=null and _ratio(null.low, null.value, null.high),
            by_prompt=[
                {
                    "prompt_id": prompt,
                    "class": kinds[prompt],
                    "base_ms_per_token": 1000 * math.exp(means[0][row]),
                    "variant_ms_per_token": 1000 * math.exp(means[1][row]),
                    "speedup": math.exp(means[0][row] - means[1][row]),
                }
                for prompt, row in zip(paired, rows, strict=True)
            ],
            boots=[
                {"arm": arm.name, "boot": boot.number, "ms_per_token": 1000 * math.exp(float(np.nanmean(boot.mean)))}
                for arm in (base, variant)
                for boot in arm.boots
                if not np.isnan(boot.mean).all()
            ],
        )
        if word == "undecided":
            result["needed"] = needed(found, d, len(rows), len(base.boots), len(variant.boots))
    failed = [gate for gate in gates if gate.ok is False]
    kinds_failed = {gate.kind for gate in failed}
    if "rig" in kinds_failed or found is None:
        word = "refused"
    elif "output" in kinds_failed:
        word = "output changed"
    elif word == "faster" and failed:
        word = "not faster"
    result.update(
        word=word,
        reasons=[gate.name for gate in failed],
        gates=[gate.as_dict() for gate in gates],
        diverged=[prompt for prompt in prompts if prompt in between],
    )
    result["sentence"] = sentence_of(result)
    return result


def sentence_of(result: Mapping[str, Any]) -> str:
    """The verdict in one sentence."""
    word, speed = result["word"], result["speedup"]
    arms = [f"{result[side]['arm']} ({result[side]['variant']})" for side in ("variant", "base")]
    at = f" at concurrency {result['concurrency']}" if result["concurrency"] > 1 else ""
    measured = (
        ""
        if speed is None
        else (f"{speed['value']:.3f}x, 95 % interval {speed['low']:.3f}..{speed['high']:.3f}, d {result['d']:.1%}")
    )
    because = "; ".join(f"{gate['name']}: {gate['said']}" for gate in result["gates"] if gate["ok"] is False)
    if word == "refused":
        return f"No verdict on {arms[0]} against {arms[1]}{at}. {because}" + (f" (read {measured})" if speed else "")
    if word in ("output changed", "not faster"):
        head = "The output changed" if word == "output changed" else "Faster by the interval, but not to be kept"
        return f"{head}: {arms[0]} against {arms[1]}{at}, {measured}. {because}"
    tail = f": {result['needed']['said']}" if result["needed"] else ""
    verb = {"undecided": "is undecided against", "equivalent": "is equivalent to"}.get(word, f"is {word} than")
    if word == "faster":  # what it costs, for want of which nobody should keep it
        because = next(gate["said"] for gate in result["gates"] if gate["name"] == "kv_capacity")
    extra = f". {because}" if because else ""
    return f"{arms[0]} {verb} {arms[1]}{at}: {measured}{tail}{extra}"


def verdicts(run: Run, base: str | None = None, settings: Settings | None = None) -> list[dict[str, Any]]:
    """`judge` of every other arm at every concurrency of the base. Raises InputError for a base that is not there."""
    name = base or ("A" if "A" in run.arms else run.arms[0])
    if name not in run.arms:
        raise InputError(f"--base: found {name!r}, expected an arm of {run.name}: {', '.join(run.arms)}")
    check_weights(run, settings.weights if settings else None)
    levels = sorted({r.concurrency for r in run.requests if r.arm == name})
    return [judge(run, name, arm, level, settings) for arm in run.arms if arm != name for level in levels]


# ---------------------------------------------------------------------------------------------------------------------
# Command line

HELP = """
Input: one JSON object a line, of two kinds.

A request:
    {"arm": "A" | "B" | ..., "variant": its name, "boot": number of the load, counted over the whole run,
     "repeat": number, "prompt_id", "class", "ttft_s", "decode_s": last token - first token, "e2e_s": seconds,
     "output_tokens", "finish_reason"}
    optional: "concurrency" (1; each level has a verdict of its own), "token_ids" or "text" of the answer, "error" (a
    failed request, which needs no times), "itl_s": {"p95"}, "tool_call_ok", "reasoning_ok" (true, false; judged from
    the text where that is all there is)
Two arms with the same boot number shared that load: the setting was changed at run time, and boots cancel.

A load, optional, from the server's own metrics and the host:
    {"arm", "boot", "facts": {"method": speculation's method or null, "kv_cache_tokens", "preemptions", "drafted",
     "accepted": counts, "throttle_reasons": [text]}}

Words: faster (lower 95 % bound above 1 + d), slower (upper bound below 1 - d), equivalent (all of the interval within
d, and 10 %), undecided (with the prompts or boots that it lacks), not faster (by the interval it is, but a gate
fails), output changed, refused. d is 3 %, or twice the spread from repeat to repeat inside the base's loads.
docs/verdict.md tells how and why.

--json prints {"file", "seed", "draws", "settings": {"base", "boot_sd", "boot_loads", "method", "weights", "prompts"},
"verdicts": [...]}, each as in `judge` of this program.

--history: earlier loads of this host's baseline, one JSON object a line: {"run", "boot", "ms_per_token",
"started_unix", "host", "model", "variant", "release", "engine_version", "prompts_sha256", "cache", "concurrency"}.
Loads alike in the last eight are compared with each other; from 9 loads on, what they show replaces the public 4.5 %.
"""
EXITS = (
    "exit codes: 0 an arm is faster, or the plan or set is good; 1 no arm is faster; 2 the input or the call was "
    "wrong; 3 no verdict"
)


def show(result: Mapping[str, Any]) -> str:
    """A verdict for a reader."""
    lines = [result["sentence"], ""]
    if result["speedup"]:
        width = max(len(row["class"]) for row in [*result["classes"], {"class": "all prompts"}])
        lines.append(f"  {'':{width}}  prompts  speed-up (95 % interval)    ratio of totals")
        rows = [
            *result["classes"],
            {"class": "all prompts", **{key: result[key] for key in ("prompts", "speedup", "totals")}},
        ]
        for row in rows:
            cells = [
                f"{cell['value']:.3f}  "
                + ("(too few prompts)" if cell["low"] is None else f"({cell['low']:.3f}..{cell['high']:.3f})").ljust(19)
                for cell in (row["speedup"], row["totals"])
            ]
            lines.append(f"  {row['class']:{width}}  {row['prompts']:7d}  {'  '.join(cells)}".rstrip())
        lines.append("")
    for gate in sorted(result["gates"], key=lambda gate: (gate["ok"] is not False, gate["ok"] is True)):
        mark = {True: "ok  ", False: "FAIL", None: "    "}[gate["ok"]]
        lines.append(f"  {mark}  {gate['name']}: {gate['said']}")
    return "\n".join(lines)


def parse_weights(text: str) -> dict[str, float]:
    """Weights from `class=number,class=number`. Raises InputError."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, sign, number = part.strip().rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not sign or not name or name in weights or not (math.isfinite(value) and value >= 0):
            raise InputError(
                f"--weights: found {part.strip()!r}, expected CLASS=NUMBER,..., each class once, 0 or more"
            )
        weights[name] = value
    return weights


def lines_of(path: str) -> list[bytes]:
    if path == "-":
        return list(sys.stdin.buffer)
    try:
        with Path(path).open("rb") as stream:
            return list(stream)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}; expected a JSONL file") from error


def command(options: argparse.Namespace) -> int:
    """What the options ask for; returns the exit code."""
    chosen = [option for option in (options.run, options.plan, options.check_prompts) if option is not None]
    if len(chosen) != 1:
        raise InputError(f"found {len(chosen)} of RUN.jsonl, --plan and --check-prompts, expected one; see --help")
    if options.plan is not None:
        weighed = power(parse_plan(options.plan))
        print(json.dumps(weighed, indent=1) if options.json else weighed["sentence"])
        return 0
    if options.check_prompts is not None:
        prompts = read_prompts(lines_of(options.check_prompts), options.check_prompts)
        problems = check_prompts(prompts)
        counts = Counter(prompt.kind for prompt in prompts)
        if options.json:
            print(json.dumps({"prompts": len(prompts), "classes": counts, "problems": problems}, indent=1))
        else:
            print(
                f"{options.check_prompts}: {len(prompts)} prompts: "
                + ", ".join(f"{kind} {count}" for kind, count in counts.items())
            )
            print("\n".join(problems) or "can carry an n-gram or suffix verdict")
        return 2 if problems else 0
    if options.boot_sd is not None and options.boot_loads is None:
        raise InputError("--boot-sd: found without --boot-loads, expected how many loads it was measured over")
    if (options.boot_sd is not None and options.boot_sd < 0) or (options.boot_loads or 2) < 2 or options.draws < 100:
        raise InputError("found a negative --boot-sd, fewer than 2 --boot-loads or fewer than 100 --draws")
    texts = (
        None
        if options.prompts is None
        else {prompt.id: prompt.text for prompt in read_prompts(lines_of(options.prompts), options.prompts)}
    )
    known = BootSpread() if options.boot_sd is None else BootSpread(options.boot_sd, options.boot_loads - 1)
    if options.history is not None:
        if options.boot_sd is not None:
            raise InputError("found --history and --boot-sd, expected one of them")
        own = None if options.run == "-" else Path(options.run).resolve().parent.name
        known = spread_of(read_history(lines_of(options.history), options.history, own))
    settings = Settings(
        seed=options.seed,
        draws=options.draws,
        known=known,
        method=options.method,
        texts=texts,
        weights=None if options.weights is None else parse_weights(options.weights),
    )
    results = verdicts(read_run(lines_of(options.run), options.run), options.base, settings)
    if options.json:
        print(
            json.dumps(
                {
                    "file": options.run,
                    "seed": options.seed,
                    "draws": options.draws,
                    "settings": {
                        "base": options.base,
                        "boot_sd": known.sd,
                        "boot_loads": known.df + 1,
                        "method": options.method,
                        "weights": settings.weights,
                        "prompts": options.prompts,
                    },
                    "verdicts": results,
                },
                indent=1,
                allow_nan=False,
            )
        )
    else:
        print("\n\n".join(show(result) for result in results))
    words = {result["word"] for result in results}
    return 0 if "faster" in words else 3 if words == {"refused"} else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EXITS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", metavar="RUN.jsonl", help="raw lines, - for standard input")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    parser.add_argument("--base", metavar="ARM", help="the arm to compare with; default A, else the first")
    parser.add_argument("--prompts", metavar="FILE", help="the prompt set, to look for synthetic text")
    parser.add_argument("--method", metavar="NAME", help="the speculation's method, if no boot line states it; none")
    parser.add_argument("--weights", metavar="CLASS=N,...", help="what each class counts; default: its prompts")
    parser.add_argument(
        "--boot-sd",
        type=float,
        metavar="SD",
        help="this host's boot-to-boot standard deviation of log speed; default 0.045 as from 9 loads",
    )
    parser.add_argument("--history", metavar="FILE", help="the baseline's earlier loads, instead of --boot-sd")
    parser.add_argument("--boot-loads", type=int, metavar="N", help="the loads that --boot-sd was measured over")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the bootstrap; default {SEED}")
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"of the bootstrap; default {DRAWS}")
    parser.add_argument(
        "--plan",
        metavar="WORDS",
        help='weigh a plan: "prompts=72 repeats=3 boots=2,1 prompt_sd=0.3 '
        'request_sd=0.03 pass_sd=0.005 boot_sd=0.045 one_load=0"',
    )
    parser.add_argument("--check-prompts", metavar="FILE", help="check a prompt set of one's own")
    try:
        return command(parser.parse_args(arguments))
    except InputError as error:
        print(f"verdict: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


if __name__ == "__main__":
    sys.exit(main())
