"""Gates on the output: did both arms do the same job?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.verdict_arms import Arm, Gate

DIVERGING = 0.10
SHORT = 3
ENDS = ("stop", "length", "tool_calls")


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def divergence(base: Arm, variant: Arm, prompts: Sequence[str]) -> tuple[set[str], set[str], int]:
    """Prompts where the variant gives an answer that the base never gave, those where the base differs from itself,
    and of how many prompts the answers are known. Token ids are compared where both arms have some, else texts, else
    lengths."""
    between, within, known = set(), set(), 0
    for prompt in prompts:
        sides: list[set[Any]] = []
        for kind in (tuple, str):
            sides = [{r.answer for r in arm.answered(prompt) if isinstance(r.answer, kind)} for arm in (base, variant)]
            if all(sides):
                known += 1
                break
        else:
            sides = [{r.tokens for r in arm.answered(prompt)} for arm in (base, variant)]
        if sides[1] - sides[0]:
            between.add(prompt)
        if len(sides[0]) > 1:
            within.add(prompt)
    return between, within, known


def divergence_gate(between: set[str], within: set[str], known: int, prompts: Sequence[str]) -> Gate:
    """Greedy answers are the same, up to what the base shows against itself."""
    only = sorted(between - within)
    share = len(only) / max(len(prompts), 1)
    said = (
        f"{len(between)} of {len(prompts)} prompts answered differently than by the base (compared on seconds per "
        f"token only), {len(between & within)} of them differ within the base too"
    )
    if share > DIVERGING:
        return Gate(
            "diverged",
            "output",
            False,
            f"{said}; {share:.0%} differ only between the arms, "
            f"{DIVERGING:.0%} are tolerated: {_some(only)}; compare the answers",
        )
    if known < len(prompts):
        return Gate(
            "diverged",
            "output",
            None,
            f"answers of {len(prompts) - known} prompts are not recorded, only their lengths were compared; {said}",
        )
    return Gate("diverged", "output", True, said)


def finish_gate(base: Arm, variant: Arm, prompts: Sequence[str]) -> Gate:
    """Answers end as they did."""
    reasons: Counter[str] = Counter(r.finish for prompt in prompts for r in variant.answered(prompt))
    before = {r.finish for prompt in prompts for r in base.answered(prompt)}
    strange = sorted(set(reasons) - set(ENDS) - before)
    changed = [
        prompt
        for prompt in prompts
        if not {r.finish for r in variant.answered(prompt)} & {r.finish for r in base.answered(prompt)}
    ]
    said = "answers end by " + ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    if strange:
        return Gate("finish_reasons", "output", False, f"{said}; {', '.join(strange)} never occurred in the base")
    if len(changed) > DIVERGING * len(prompts):
        return Gate(
            "finish_reasons",
            "output",
            False,
            f"{said}; {len(changed)} of {len(prompts)} prompts end in another way than in the base: {_some(changed)}",
        )
    return Gate("finish_reasons", "output", True, said)


def length_gate(base: Arm, variant: Arm, prompts: Sequence[str], rng: np.random.Generator, draws: int) -> Gate:
    """Answers are as long as they were."""
    logs = np.array(
        [
            np.mean([math.log(max(r.tokens, 1)) for r in variant.answered(prompt)])
            - np.mean([math.log(max(r.tokens, 1)) for r in base.answered(prompt)])
            for prompt in prompts
        ]
    )
    picked = rng.integers(0, len(logs), (min(draws, 2000), len(logs)))
    low, high = np.percentile(logs[picked].mean(axis=1), (2.5, 97.5))
    value = float(logs.mean())
    ok = bool(low <= 0 <= high) or abs(value) < math.log1p(0.02)
    return Gate(
        "output_length",
        "output",
        ok,
        f"answers are {math.exp(value):.3f} times as long "
        f"({math.exp(low):.3f}..{math.exp(high):.3f}){'' if ok else ', expected 1 within the interval'}",
    )


def output_gates(base: Arm, variant: Arm, prompts: Sequence[str]) -> list[Gate]:
    """Looping and very short answers, tool calls and reasoning, each against what the base does."""

    def new(test: str) -> list[str]:
        def hit(arm: Arm, prompt: str) -> bool:
            answers = arm.answered(prompt)
            if test == "looping":
                return any(r.looping for r in answers)
            if test == "short":
                return any(r.tokens <= SHORT for r in answers)
            return any(getattr(r, test) is False for r in answers)

        return [prompt for prompt in prompts if hit(variant, prompt) and not hit(base, prompt)]

    gates = []
    for name, test, good, bad in (
        ("looping_output", "looping", "no answer loops that did not before", "answers end in a loop"),
        (
            "short_answers",
            "short",
            f"no answer of {SHORT} tokens or fewer that was longer before",
            f"answers have {SHORT} tokens or fewer",
        ),
        ("tool_calls", "tool_call_ok", "tool calls are as valid as before", "tool calls are not valid"),
        ("reasoning", "reasoning_ok", "reasoning is separated as before", "reasoning is not separated"),
    ):
        found = new(test)
        stated = test in ("looping", "short")
        if not stated:
            counts = [
                [sum(any(getattr(r, test) is ok for r in arm.answered(p)) for p in prompts) for ok in (True, False)]
                for arm in (base, variant)
            ]
            stated = any(counts[1])
            good += ": good on {} prompts, bad on {}; base {} and {}".format(*counts[1], *counts[0])
        if found:
            gates.append(
                Gate(
                    name,
                    "output",
                    False,
                    f"{bad} on {len(found)} of {len(prompts)} prompts where the base's do not fail: {_some(found)}",
                )
            )
        else:
            gates.append(Gate(name, "output", True if stated else None, good if stated else "not recorded"))
    looping = sum(any(r.looping for r in base.answered(prompt)) for prompt in prompts)
    short = sum(all(r.tokens <= SHORT for r in base.answered(prompt)) for prompt in prompts)
    if looping > DIVERGING * len(prompts):
        gates.append(
            Gate(
                "looping_base",
                "output",
                None,
                f"the base's own answers loop on {looping} of "
                f"{len(prompts)} prompts: loops flatter n-gram speculation; lower max_tokens",
            )
        )
    if short > DIVERGING * len(prompts):
        gates.append(
            Gate(
                "short_base",
                "rig",
                False,
                f"the base answers {short} of {len(prompts)} prompts in {SHORT} "
                "tokens or fewer: too few to time; use prompts that make it write",
            )
        )
    return gates
