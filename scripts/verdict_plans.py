"""What a plan can find, and what an undecided run lacks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from scripts.json_files import InputError
from scripts.verdict_gates import CLASS_LOSS
from scripts.verdict_intervals import WIDEST, BootSpread, Estimate, Z, least_difference, student
from scripts.verdict_runs import FEWEST_PROMPTS

POWER = 0.9
MOST_LOADS = 40  # that advice may ask for
MOST_TIMES = 8  # the prompts at hand that advice may ask for
REALISTIC = (0.17, 0.43)  # log standard deviation of the effect between prompts, in runs that were measured
BOOT_SD = 0.05  # the larger of those that were drawn
# On top of the logarithm of what `with_classes` says: its largest shortfall against drawn runs is 4 %.
MARGIN = 1.05
# Above this share of refused null runs 9 of 10 hangs on a hair, and no closed form meets the drawn runs.
MOST_REFUSED = 0.05
SIMULATION = Path(__file__).resolve().parent.parent / "benchmarks/results/verdict-simulation.json"


@dataclass(frozen=True)
class Plan:
    """A run to come. Standard deviations are of log seconds per token; effects vary by `prompt_sd` from prompt to
    prompt, repeats by `request_sd` a request and `pass_sd` a whole pass, loads by `boot_sd`."""

    prompts: int = 72
    repeats: int = 3
    base_boots: int = 2
    variant_boots: int = 1
    one_load: int = 0  # 1: both arms in the same loads, the setting changed at run time
    prompt_sd: float = 0.30
    request_sd: float = 0.03
    pass_sd: float = 0.005
    boot_sd: float = 0.045
    known: BootSpread = field(default_factory=BootSpread)

    @property
    def loads(self) -> int:
        """Loads that it takes."""
        return max(self.base_boots, self.variant_boots) if self.one_load else self.base_boots + self.variant_boots


def parse_plan(text: str) -> Plan:
    """A plan from `prompts=72 repeats=3 boots=2,1 ...`. Raises InputError."""
    known = {item.name: item.type for item in fields(Plan) if item.name != "known"}
    values: dict[str, Any] = {}
    for part in text.replace(";", " ").split():
        key, sign, value = part.partition("=")
        pairs = [(key, value)]
        if key == "boots":
            pairs = list(zip(("base_boots", "variant_boots"), value.split(","), strict=False))
            sign = sign if value.count(",") == 1 else ""
        for name, number in pairs:
            if not sign or name not in known:
                raise InputError(
                    f"--plan: found {part!r}, expected NAME=NUMBER with a name of {', '.join(known)}, "
                    "or boots=BASE,VARIANT"
                )
            try:
                values[name] = int(number) if known[name] == "int" else float(number)
            except ValueError as error:
                raise InputError(f"--plan: found {part!r}, expected a number for {name}") from error
            least = 0 if name == "one_load" or known[name] == "float" else 1
            if not least <= values[name] < 1e6:
                raise InputError(f"--plan: found {part!r}, expected {least} or more")
    plan = Plan(**values)
    if plan.prompts < FEWEST_PROMPTS or plan.repeats < 2:
        raise InputError(
            f"--plan: found prompts={plan.prompts} repeats={plan.repeats}, expected at least "
            f"{FEWEST_PROMPTS} prompts, and 2 repeats for the null run; no verdict comes of less"
        )
    if plan.one_load and plan.base_boots != plan.variant_boots:
        plan = replace(plan, base_boots=plan.variant_boots)
    return plan


def power(plan: Plan) -> dict[str, Any]:
    """What `plan` finds in 9 of 10 runs, in closed form; benchmarks/verdict_simulation.py compares it with draws.

    {"smallest_effect": speed-up as a ratio, None if the null run fails too often for 9 of 10 | "null_refused": share of
     runs whose null run is not equivalent, "interval": half-width as a share, "mostly_from": "prompts" or "boots",
     "d", "loads", "sentence"}
    """
    each = 1 / plan.base_boots + 1 / plan.variant_boots
    request, passes = plan.request_sd**2 / plan.repeats, plan.pass_sd**2 / plan.repeats
    prompts = (plan.prompt_sd**2 + request * each) / plan.prompts
    # Drawing a prompt's repeats again, after the prompts, counts the scatter of the repeats nearly twice.
    again = request * (1 - 1 / plan.repeats) * each / plan.prompts
    share = 0.0 if plan.one_load else each
    more = 0 if plan.one_load else plan.base_boots + plan.variant_boots - 2
    df = plan.known.df + more
    believed = (plan.known.sd**2 * plan.known.df + plan.boot_sd**2 * more) / df
    from_prompts = student(plan.prompts - 1) ** 2 * (prompts + again)
    from_boots = student(df) ** 2 * believed * share
    half = math.sqrt(from_prompts + from_boots)
    real = math.sqrt(prompts + passes * each + plan.boot_sd**2 * share)
    d = least_difference(math.sqrt(plan.pass_sd**2 + plan.request_sd**2 / plan.prompts))

    sizes = (plan.repeats // 2, plan.repeats - plan.repeats // 2)
    halves = sum(1 / size for size in sizes) / plan.base_boots
    drawn = sum((2 - 1 / size) / size for size in sizes) / plan.base_boots
    room = math.log1p(min(d, WIDEST)) - student(plan.prompts - 1) * plan.request_sd * math.sqrt(drawn / plan.prompts)
    moves = math.sqrt(halves * (plan.pass_sd**2 + plan.request_sd**2 / plan.prompts))
    normal = NormalDist()
    refused = (2 * normal.cdf(-room / moves) if moves else 0.0) if room > 0 else 1.0
    wanted = POWER / (1 - refused) if refused < 1 else math.inf
    smallest = math.exp(math.log1p(d) + half + normal.inv_cdf(wanted) * real) if wanted < 1 else None

    mostly = "boots" if from_boots > from_prompts else "prompts"
    tail = f" (d {d:.1%}, interval +-{math.expm1(half):.1%}, mostly from {mostly})"
    if smallest is None:
        said = f"the null run would refuse the rig in {refused:.0%} of runs; plan more repeats or prompts"
    else:
        said = (
            f"a speed-up of {smallest:.2f}x or more is called faster in 9 of 10 runs, a smaller one may stay undecided"
        )
    return {
        "smallest_effect": smallest,
        "null_refused": refused,
        "interval": math.expm1(half),
        "mostly_from": mostly,
        "d": d,
        "loads": plan.loads,
        "sentence": _head(plan) + said + tail,
    }


def _head(plan: Plan) -> str:
    return (
        f"{plan.prompts} prompts x {plan.repeats} repeats, {plan.loads} load{'s' if plan.loads != 1 else ''} "
        f"({'both arms in each' if plan.one_load else f'{plan.base_boots} base, {plan.variant_boots} variant'}): "
    )


def with_classes(plan: Plan, classes: int) -> float | None:
    """As `power`'s smallest effect, and the class gate has to pass as well: few prompts a class stray below it."""
    weighed = power(plan)
    wanted = POWER / (1 - weighed["null_refused"]) if weighed["null_refused"] < 1 else math.inf
    if wanted >= 1:
        return None
    each = 1 / plan.base_boots + 1 / plan.variant_boots
    of_prompt = plan.prompt_sd**2 + plan.request_sd**2 / plan.repeats * each
    together = plan.pass_sd**2 / plan.repeats * each + (0.0 if plan.one_load else plan.boot_sd**2 * each)
    sizes = [len(range(kind, plan.prompts, classes)) for kind in range(classes)]
    enough = math.log1p(weighed["d"]) + math.log1p(weighed["interval"])
    mean = NormalDist(enough, math.sqrt(of_prompt / plan.prompts + together))
    kinds = [NormalDist(math.log(1 - CLASS_LOSS), max(math.sqrt(of_prompt / size), 1e-9)) for size in sizes]
    draws = [(step / 5, math.exp(-(step**2) / 50)) for step in range(-20, 21)]  # what moves all classes at once

    def chance(effect: float) -> float:
        passed = sum(w * math.prod(one.cdf(effect + at * math.sqrt(together)) for one in kinds) for at, w in draws)
        return mean.cdf(effect) * passed / sum(w for _, w in draws)

    low, high = 0.0, 5.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) < wanted else (low, middle)
    return math.exp(high)


def simulated(plan: Plan, prompt_sd: float) -> float | None:
    """The smallest effect of drawn runs of this very plan, the larger of those drawn; None where none was drawn."""
    rows = json.loads(SIMULATION.read_text(encoding="utf-8"))["rows"]
    keys = ("prompts", "repeats", "base_boots", "variant_boots", "one_load")
    same = [row for row in rows if all(row[key] == getattr(plan, key) for key in keys)]
    return max((row["smallest_effect"] or 0.0 for row in same if row["prompt_sd"] == prompt_sd), default=0.0) or None


def smallest_range(plan: Plan, classes: int) -> dict[str, Any]:
    """What a plan finds in 9 of 10 runs where prompts differ as they do in practice.

    {"low", "high": speed-ups as ratios, None where none can be named, "source", "sentence"}
    """
    ends: Sequence[float | None] = [simulated(plan, sd) for sd in REALISTIC]
    source = "simulated"
    refused = power(plan)["null_refused"]
    if None in ends:
        source = f"closed form, class gate and {MARGIN - 1:.0%} included"
        rough = [with_classes(replace(plan, prompt_sd=sd, boot_sd=BOOT_SD), classes) for sd in REALISTIC]
        ends = [None if one is None or refused > MOST_REFUSED else one**MARGIN for one in rough]
    low, high = ends
    said = (
        f"too small to promise a verdict: the check of the baseline against itself would fail in {refused:.0%} of "
        "runs, and then no speed-up, however large, is called faster; plan more repeats or prompts"
        if low is None or high is None
        else f"a speed-up of {low:.2f}x (prompts that behave alike) to {high:.2f}x (prompts that differ) or more is "
        f"called faster in 9 of 10 runs ({source}); a smaller one may stay undecided"
    )
    return {"low": low, "high": high, "source": source, "sentence": _head(plan) + said}


def needed(found: Estimate, d: float, prompts: int, base_boots: int, variant_boots: int) -> dict[str, Any]:
    """What would decide an undecided run if its estimate stays where it is.

    {"prompts": how many more prompts alone | None, "boots": {"base", "variant"} more loads alone | None,
     "both": {"prompts", "base", "variant"} | None, "said"}
    """
    same = min(d, WIDEST)
    borders = [math.log1p(one) for one in (-d, -same, same, d)]
    # Between what is equal and d no word waits, however narrow the interval gets.
    between = borders[0] <= found.value <= borders[1] or borders[2] <= found.value <= borders[3]
    room = 0.0 if between else min(abs(found.value - border) for border in borders)
    share = 1 / base_boots + 1 / variant_boots
    apart = found.boot_sd > 0

    def boots_part(base: int, variant: int) -> float:
        return (student(found.df) * found.boot_sd) ** 2 * (1 / base + 1 / variant) / share if apart else 0.0

    def prompts_for(boots: float) -> int | None:
        left = room**2 - boots
        count = math.ceil(prompts * (Z * found.prompt_sd) ** 2 / left) if left > 0 else None
        return max(count - prompts, 0) if count is not None and count <= MOST_TIMES * prompts else None

    alone = prompts_for(boots_part(base_boots, variant_boots))
    boots = both = None
    base, variant = base_boots, variant_boots
    for _ in range(MOST_LOADS if apart else 0):
        base, variant = (base + 1, variant) if base <= variant else (base, variant + 1)
        more = prompts_for(boots_part(base, variant))
        if more is not None and both is None:
            both = {"prompts": more, "base": base - base_boots, "variant": variant - variant_boots}
        if more == 0:
            boots = {"base": base - base_boots, "variant": variant - variant_boots}
            break
    ways = []
    if alone is not None:
        ways.append(f"{max(alone, 1)} more prompts")
    if boots:
        ways.append(
            f"{boots['base'] + boots['variant']} more boots ({boots['base']} of the base, {boots['variant']} "
            "of the variant)"
        )
    if both and both["prompts"] and alone is None:
        ways.append(f"{both['prompts']} more prompts with {both['base'] + both['variant']} more boots")
    at = f"at {math.exp(found.value):.3f}x it lies"
    if ways:
        said = " or ".join(ways) + f" needed, if the speed-up stays at {math.exp(found.value):.3f}x"
    elif between and d > WIDEST:
        said = f"no number of prompts or boots decides: {at} beyond {WIDEST:.0%} and within d {d:.1%}; quieten the host"
    else:
        said = f"no affordable number of prompts or boots decides: {at} on the border"
    return {"prompts": None if alone is None else max(alone, 1), "boots": boots, "both": both, "said": said}
