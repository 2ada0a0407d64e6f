"""Gates on the rig (no verdict without them) and on what *faster* must not cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts.verdict_arms import Arm, Gate, Settings
from scripts.verdict_intervals import FLOOR, WIDEST, Boot, BootSpread, Estimate, Floats, word_of
from scripts.verdict_runs import SYNTHETIC_CLASSES
from scripts.verdict_texts import synthetic_texts

TAIL_DRAWS = 1_000  # of the 95th percentiles, whose gate looks at a bound far less fine than the verdict's
FEWEST_ANSWERED = 0.9  # of the cells (prompt, repeat) of a boot; fewer means that the arm died or was cut off
CLASS_LOSS = 0.10
RULED_OUT = 3.0  # standard deviations between two baseline boots beyond which they are not the same machine
LOOKUP_METHODS = ("ngram", "ngram_gpu", "suffix")


def complete_gate(arms: Sequence[Arm], prompts: Sequence[str]) -> Gate:
    """Every load of both arms answered nearly everything that was asked."""
    short = []
    for arm in arms:
        for boot in arm.numbers:
            mine = [request for request in arm.requests if request.boot == boot]
            expected = len(prompts) * len({request.repeat for request in mine})
            answers = sum(request.error is None for request in mine)
            if answers < FEWEST_ANSWERED * expected:
                short.append(f"arm {arm.label}, boot {boot}: {answers} of {expected} answers")
    return Gate(
        "arm_incomplete",
        "rig",
        not short,
        ("; ".join(short) + f"; expected {FEWEST_ANSWERED:.0%}: did the engine die? record the arm again")
        if short
        else "every load answered what it was asked",
    )


def null_gate(null: Estimate | None, d: float) -> Gate:
    """The base against itself must be equivalent."""
    if null is None:
        return Gate(
            "null",
            "rig",
            False,
            "no load of the base has two repeats, so that it cannot be compared with "
            "itself; record at least 2 repeats a load",
        )
    word = word_of(null.low, null.high, d)
    said = (
        f"base against itself inside its loads: {math.exp(null.value):.3f}x, "
        f"{math.exp(null.low):.3f}..{math.exp(null.high):.3f}, {word} at d {d:.1%}"
    )
    if word != "equivalent":
        within = f", within {WIDEST:.0%}" if d > WIDEST else ""
        said += f"; expected equivalent{within}: record more repeats a load, or quieten the host"
    return Gate("null", "rig", word == "equivalent", said)


def drift_gate(base: Sequence[Boot], known: BootSpread, shared: bool = False) -> Gate:
    """The base's loads are one machine. `shared`: its only load is the variant's too."""
    if shared and len(base) == 1:
        return Gate("drift", "rig", True, "both arms in one load, so that its level counts for neither")
    if len(base) < 2:
        return Gate(
            "drift",
            "rig",
            None,
            "one load of the base: its drift is unknown and enters the interval as "
            f"boot-to-boot spread of {known.sd:.1%}; load the base again after the variant",
        )
    means = np.array([boot.mean for boot in base])
    means = means[:, ~np.isnan(means).any(axis=0)]
    levels = means.mean(axis=1) if means.size else np.zeros(len(base))
    moved, most = float(np.ptp(levels)), max(RULED_OUT * math.sqrt(2) * known.sd, math.log1p(FLOOR))
    said = f"the base's loads differ by {math.expm1(moved):.1%}, {math.expm1(most):.1%} are within reason"
    return Gate(
        "drift",
        "rig",
        moved <= most,
        said
        if moved <= most
        else said + "; look for another load on the host, clocks or heat, and record all arms again",
    )


def order_gate(base: Arm, variant: Arm) -> Gate:
    """Base loads before and after the variant's, or shared with it."""
    around = any(min(base.numbers) <= number <= max(base.numbers) for number in variant.numbers)
    return Gate(
        "order",
        "rig",
        True if around else None,
        "base loads on both sides of the variant's"
        if around
        else "no base load closes the run (A B, not A B A): drift cannot be told from effect, and enters only as "
        "boot-to-boot spread; add the base's next load to the file",
    )


def throttle_gate(arms: Sequence[Arm]) -> Gate:
    """No load ran on a throttled GPU."""
    hot = [
        f"arm {arm.label}, boot {boot}: {', '.join(facts['throttle_reasons'])}"
        for arm in arms
        for boot, facts in sorted(arm.facts.items())
        if facts.get("throttle_reasons")
    ]
    stated = any("throttle_reasons" in facts for arm in arms for facts in arm.facts.values())
    if hot:
        return Gate("throttled", "rig", False, "; ".join(hot) + "; expected none: let it cool or raise the limit")
    return Gate(
        "throttled",
        "rig",
        True if stated else None,
        "no GPU was throttled" if stated else "no boot line states throttle reasons",
    )


def methods_of(arms: Sequence[Arm], settings: Settings) -> set[str] | None:
    """Methods of speculation in use; None when nothing says so."""
    if settings.method is not None:
        return {settings.method}
    stated = [facts["method"] for arm in arms for facts in arm.facts.values() if "method" in facts]
    return {method or "none" for method in stated} if stated else None


def synthetic_gate(arms: Sequence[Arm], kinds: Mapping[str, str], settings: Settings) -> Gate:
    """No n-gram or suffix verdict on text that nobody wrote."""
    methods = methods_of(arms, settings)
    if methods is not None and not methods & set(LOOKUP_METHODS):
        return Gate(
            "synthetic_text",
            "rig",
            True,
            f"speculation: {', '.join(sorted(methods))}; draws nothing from the text itself",
        )
    declared = sorted({kind for kind in kinds.values() if kind.casefold() in SYNTHETIC_CLASSES})
    texts = {name: text for name, text in (settings.texts or {}).items() if name in kinds}
    found = synthetic_texts(texts)
    why = f"classes {', '.join(declared)}" if declared else next(iter(found.values()), "")
    if declared or len(found) > 0.1 * len(kinds):
        stated = "whose method nobody stated" if methods is None else f"with {', '.join(sorted(methods))}"
        return Gate(
            "synthetic_text",
            "rig",
            False,
            f"synthetic text ({why}) {stated}: what such text repeats is not "
            "what users repeat; use prompts that users send, or state --method none",
        )
    return Gate(
        "synthetic_text",
        "rig",
        True if texts else None,
        "prompts read like written text"
        if texts
        else "prompts not given (--prompts FILE), so that only their declared classes were looked at",
    )


def class_gate(classes: Sequence[Mapping[str, Any]]) -> Gate:
    """No class loses much."""
    worst = min(classes, key=lambda row: float(row["speedup"]["value"]))
    value = worst["speedup"]["value"]
    ok = value >= 1 - CLASS_LOSS
    said = f"the slowest class is {worst['class']}, {value:.3f}x"
    return Gate("class_slower", "cost", ok, said if ok else f"{said}; no class may lose more than {CLASS_LOSS:.0%}")


def itl_gate(base: Arm, variant: Arm, prompts: Sequence[str]) -> Gate:
    """States how the tail of inter-token latency moved: accepted drafts come in bursts, with longer steps between."""
    sides = [arm.values(prompts, "itl_p95_s") for arm in (base, variant)]
    if any(np.isnan(side).all() for side in sides):
        return Gate("itl_p95", "cost", None, "inter-token latency is not recorded")
    left, right = (float(np.nanmedian(side)) for side in sides)
    return Gate(
        "itl_p95",
        "cost",
        None,
        f"p95 of inter-token latency, median over requests: {1000 * right:.1f} ms, {1000 * left:.1f} ms in the base",
    )


def p95(values: Floats) -> Floats:
    """95th percentile along the last axis by nearest rank, NaN left out; there must be a value."""
    ranked = np.sort(values, axis=-1)  # NaN come last
    rank = np.ceil(0.95 * (~np.isnan(values)).sum(axis=-1, keepdims=True)).astype(np.intp) - 1
    return np.take_along_axis(ranked, rank, -1)[..., 0]


def tail_gate(
    name: str,
    key: str,
    base: Arm,
    variant: Arm,
    prompts: Sequence[str],
    d: float,
    found: Estimate,
    rng: np.random.Generator,
) -> Gate:
    """The 95th percentile of a time over all requests is not worse by more than d, beyond what noise explains."""
    what = {"ttft_s": "time to first token", "e2e_s": "end-to-end time"}[key]
    left, right = base.values(prompts, key), variant.values(prompts, key)
    if len(prompts) < 2:
        return Gate(name, "cost", None, f"p95 {what}: too few prompts with the same answer in both arms")
    ratio = float(p95(right.ravel()) / max(float(p95(left.ravel())), 1e-9))
    picked = rng.integers(0, len(prompts), (TAIL_DRAWS, len(prompts)))
    tops = [np.maximum(p95(side[picked].reshape(TAIL_DRAWS, -1)), 1e-9) for side in (left, right)]
    logs = np.log(tops[1] / tops[0])
    low = math.exp(float(np.percentile(logs + rng.standard_t(found.df, TAIL_DRAWS) * found.boot_sd, 2.5)))
    ok = ratio <= 1 + d or low <= 1
    said = f"p95 {what} is {ratio:.3f} times the base's (lower 95 % bound {low:.3f})"
    if not ok:
        said += f", at most {1 + d:.3f} may be"
    elif ratio > 1 + d:
        said += ": worse, but no more than prompts and boots explain"
    return Gate(name, "cost", ok, said)


def server_gates(base: Arm, variant: Arm) -> list[Gate]:
    """What the servers said: errors, preemptions, acceptance, KV capacity."""
    rates = [sum(r.error is not None for r in arm.requests) / max(len(arm.requests), 1) for arm in (base, variant)]
    first = next((r for r in variant.requests if r.error is not None), None)
    gates = [
        Gate(
            "errors",
            "cost",
            rates[1] <= rates[0],
            f"{rates[1]:.1%} of the requests failed, {rates[0]:.1%} in "
            "the base" + (f"; first at {first.where}: {(first.error or '')[:120]}" if first else ""),
        )
    ]

    loads = [max(len(arm.numbers), 1) for arm in (base, variant)]
    before, after = base.total("preemptions"), variant.total("preemptions")
    if before is None or after is None:
        gates.append(Gate("preemptions", "cost", None, "not stated by boot lines of both arms"))
    else:
        gates.append(
            Gate(
                "preemptions",
                "cost",
                after / loads[1] <= before / loads[0],
                f"{after} preemptions in {loads[1]} load(s), {before} in {loads[0]} of the base",
            )
        )

    drafted, accepted = variant.total("drafted"), variant.total("accepted")
    speculates = any(facts.get("method") for facts in variant.facts.values())
    if drafted is None or accepted is None:
        gates.append(Gate("acceptance", "cost", None, "drafted and accepted tokens are not stated by boot lines"))
    elif accepted == 0 and (drafted or speculates):
        gates.append(
            Gate(
                "acceptance",
                "cost",
                False,
                f"zero acceptance: {drafted} tokens drafted, none accepted; "
                "a gain cannot come from speculation: check its settings against the engine's log",
            )
        )
    else:
        gates.append(
            Gate(
                "acceptance",
                "cost",
                True if drafted else None,
                f"{accepted} of {drafted} drafted tokens accepted"
                if drafted
                else "nothing was drafted, and no speculation is stated",
            )
        )

    sizes = [
        [facts["kv_cache_tokens"] for facts in arm.facts.values() if facts.get("kv_cache_tokens")]
        for arm in (base, variant)
    ]
    if all(sizes):
        means = [sum(size) / len(size) for size in sizes]
        gates.append(
            Gate(
                "kv_capacity",
                "cost",
                None,
                f"KV cache {means[1]:.0f} tokens, {means[0]:.0f} in the base: {means[1] / means[0] - 1:+.1%}",
            )
        )
    else:
        gates.append(
            Gate("kv_capacity", "cost", None, "KV capacity lost is unknown: no boot line states it for both arms")
        )
    return gates
