#!/usr/bin/env python3
"""How often does the verdict say *faster* when nothing is faster, and what does a plan find in 9 of 10 runs?

    python benchmarks/verdict_simulation.py --out benchmarks/results/verdict-simulation.json [--runs 800]

Draws runs of each plan from a model with known truth: effects that differ from prompt to prompt around none, loads that
differ, passes that drift, requests that scatter. Every run goes through the functions of scripts/verdict.py that a
measured run goes through: interval, spread, d, null run, drift and class gate. Not drawn: the gates on tails and
outputs, which can only take a *faster* away.

Shifting the variant by an effect shifts its interval by as much and leaves d alone. So a run drawn without effect also
says how large an effect it would have called *faster*, and the smallest effect with 90 % power is a quantile over runs.

Prints a table and writes all figures. Exit codes: 0 done, 1 false *faster* reaches 5 % somewhere, 2 the call was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import verdict_gates, verdict_intervals, verdict_plans  # noqa: E402

SEED = 2025
DRAWS = 1_000  # of each bootstrap: the noise of its bounds averages out over the runs
CLASSES = 6
PLANS = {
    "A B A, 72 prompts": verdict_plans.Plan(prompts=72, repeats=3, base_boots=2, variant_boots=1),
    "A B A, 24 prompts": verdict_plans.Plan(prompts=24, repeats=3, base_boots=2, variant_boots=1),
    "A B A B A, 72 prompts": verdict_plans.Plan(prompts=72, repeats=3, base_boots=3, variant_boots=2),
    "one load, 72 prompts": verdict_plans.Plan(prompts=72, repeats=3, base_boots=1, variant_boots=1, one_load=1),
    "one load, 16 prompts x 6": verdict_plans.Plan(prompts=16, repeats=6, base_boots=1, variant_boots=1, one_load=1),
}
PROMPT_SDS = (0.17, 0.25, 0.43)
BOOT_SDS = (0.04, 0.05)


def drawn(
    plan: verdict_plans.Plan, rng: np.random.Generator
) -> tuple[list[verdict_intervals.Boot], list[verdict_intervals.Boot]]:
    """The loads of base and variant of one run without effect on average."""
    level = rng.normal(0, 0.1, plan.prompts)
    gain = rng.normal(0, plan.prompt_sd, plan.prompts)
    size = (plan.prompts, plan.repeats)
    moves = rng.normal(0, plan.boot_sd, plan.base_boots + plan.variant_boots)

    def boot(number: int, faster: float) -> verdict_intervals.Boot:
        passes = rng.normal(0, plan.pass_sd, plan.repeats)
        logs = (level - faster * gain)[:, None] + moves[number] + passes + rng.normal(0, plan.request_sd, size)
        return verdict_intervals.Boot(number, logs)

    base = [boot(number, 0.0) for number in range(plan.base_boots)]
    first = 0 if plan.one_load else plan.base_boots
    return base, [boot(first + number, 1.0) for number in range(plan.variant_boots)]


def one_run(plan: verdict_plans.Plan, rng: np.random.Generator) -> tuple[str, float, float, float]:
    """(word at no effect, the log effect from which this run says *faster*, low, high); inf: this run says it never."""
    base, variant = drawn(plan, rng)
    ones = np.ones(plan.prompts)
    spread = plan.known.updated(base, variant)
    found = verdict_intervals.estimate(base, variant, ones, ones, spread, rng, DRAWS)
    d = verdict_intervals.least_difference(verdict_intervals.within_spread(base, ones)[0])
    null = verdict_intervals.null_run(base, ones, ones, rng, DRAWS)
    gates = (verdict_gates.null_gate(null, d), verdict_gates.drift_gate(base, plan.known))
    if any(gate.ok is False for gate in gates):
        return "refused", math.inf, found.low, found.high
    gains = np.mean([b.mean for b in base], axis=0) - np.mean([b.mean for b in variant], axis=0)
    worst = min(float(gains[kind::CLASSES].mean()) for kind in range(CLASSES))
    floor = math.log(1 - verdict_gates.CLASS_LOSS)
    enough = max(math.log1p(d) - found.low, floor - worst)
    word = verdict_intervals.word_of(found.low, found.high, d)
    return ("not faster" if word == "faster" and worst < floor else word), enough, found.low, found.high


def cell(task: tuple[int, str, verdict_plans.Plan, int]) -> dict[str, Any]:
    """All runs of one plan."""
    number, name, plan, runs = task
    started = time.process_time()
    rng = np.random.default_rng((SEED, number))
    found = [one_run(plan, rng) for _ in range(runs)]
    words = [word for word, *_ in found]
    effects = np.sort([effect for _, effect, *_ in found])
    weighed = verdict_plans.power(plan)
    smallest = float(effects[math.ceil(0.9 * runs) - 1])
    return {
        "plan": name,
        **{key: value for key, value in asdict(plan).items() if key != "known"},
        "runs": runs,
        "false_faster": words.count("faster") / runs,
        "false_slower": words.count("slower") / runs,
        # A variant that is faster by exactly d is not faster by more than d.
        "faster_at_d": float(np.mean(effects < math.log1p(verdict_intervals.FLOOR))),
        "equivalent": words.count("equivalent") / runs,
        "undecided": words.count("undecided") / runs,
        "refused": words.count("refused") / runs,
        "null_refused_closed_form": weighed["null_refused"],
        "interval_holds_truth": float(np.mean([low <= 0 <= high for *_, low, high in found])),
        "smallest_effect": math.exp(smallest) if math.isfinite(smallest) else None,
        "smallest_effect_closed_form": weighed["smallest_effect"],
        "cpu_s": time.process_time() - started,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the figures go")
    parser.add_argument("--runs", type=int, default=800, metavar="N", help="runs per plan and noise; default 800")
    options = parser.parse_args(arguments)
    if options.runs < 20:
        parser.error(f"--runs: found {options.runs}, expected 20 or more: a 90 % quantile of fewer says nothing")
    os.nice(15)
    tasks = [
        (number, name, replace(plan, prompt_sd=prompt_sd, boot_sd=boot_sd), options.runs)
        for number, ((name, plan), prompt_sd, boot_sd) in enumerate(
            itertools.product(PLANS.items(), PROMPT_SDS, BOOT_SDS)
        )
    ]
    started = time.monotonic()
    rows = []
    with ProcessPoolExecutor(2) as pool:
        print(f"{'plan':24} prompt boot   false  faster  holds   null     smallest effect")
        print(f"{'':24}   sd    sd  faster   at d   truth refused  drawn  closed form")
        for row in pool.map(cell, tasks):
            rows.append(row)
            shown = "never" if row["smallest_effect"] is None else f"{row['smallest_effect']:.3f}"
            formula = (
                "never" if row["smallest_effect_closed_form"] is None else (f"{row['smallest_effect_closed_form']:.3f}")
            )
            print(
                f"{row['plan']:24} {row['prompt_sd']:.2f}  {row['boot_sd']:.2f}  {row['false_faster']:6.1%} "
                f"{row['faster_at_d']:6.1%} {row['interval_holds_truth']:6.1%}  {row['refused']:6.1%}  {shown:>5} "
                f"       {formula:>5}",
                flush=True,
            )
    runs = sum(row["runs"] for row in rows)
    false = sum(row["false_faster"] * row["runs"] for row in rows) / runs
    result = {
        "what": "verdict, drawn runs with no effect on average",
        "seed": SEED,
        "draws": DRAWS,
        "runs": runs,
        "false_faster": false,
        "worst_false_faster": max(row["false_faster"] for row in rows),
        "wall_s": time.monotonic() - started,
        "cpu_s": sum(row["cpu_s"] for row in rows),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__},
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"{runs} runs: false faster {false:.2%}, at worst {result['worst_false_faster']:.1%}; "
        f"{result['cpu_s']:.0f} s of one core"
    )
    return 0 if result["worst_false_faster"] < 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
