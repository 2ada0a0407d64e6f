"""The interval of a speed-up: bootstrap over prompts and repeats, spread between loads, and the word for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

DRAWS = 10_000
BLOCK = 1_000_000  # cells of one resampled block: bounds the memory of a large run
FLOOR = 0.03  # the smallest d
MOST = 0.99  # the largest d: no speed-up is below 1 - d then
WIDEST = 0.10  # what may still be called equivalent, however far the base lies from itself
Z = 1.959964  # of a two-sided 95 % interval


@dataclass(frozen=True)
class Boot:
    """One load as one arm saw it: its number in the run, and log seconds per token, (prompts, repeats), NaN: none."""

    number: int
    logs: Floats

    def take(self, rows: Indices) -> Boot:
        """The same load over some prompts."""
        return Boot(self.number, self.logs[rows])

    def half(self, which: int) -> Boot:
        """The same load over every second repeat, from repeat `which`."""
        return Boot(self.number, self.logs[:, which::2])

    @property
    def mean(self) -> Floats:
        """Mean over repeats of each prompt, NaN without any."""
        return known_mean(self.logs)


@dataclass(frozen=True)
class BootSpread:
    """Standard deviation of log speed from load to load, known as well as from `df` loads compared."""

    sd: float = 0.045  # public figures: 4-5 %
    df: int = 8

    def updated(self, *arms: Sequence[Boot]) -> BootSpread:
        """With what these arms' own loads show, prompt by prompt, added to what was known before."""
        squares, df = self.sd**2 * self.df, self.df
        for boots in arms:
            means = np.array([boot.mean for boot in boots])
            means = means[:, ~np.isnan(means).any(axis=0)]
            if len(boots) > 1 and means.size:
                levels = means.mean(axis=1)
                squares += float(((levels - levels.mean()) ** 2).sum())
                df += len(boots) - 1
        return BootSpread(math.sqrt(squares / df), df)


@dataclass(frozen=True)
class Estimate:
    """A log ratio of speeds, variant over base, with its 95 % interval and what makes it wide (standard deviations)."""

    value: float
    low: float
    high: float
    totals: float
    totals_low: float
    totals_high: float
    prompt_sd: float
    boot_sd: float
    df: int


def known_mean(values: Floats) -> Floats:
    """Mean along the last axis over what is not NaN; NaN without any, and no warning."""
    known = ~np.isnan(values)
    count = known.sum(axis=-1)
    total: Floats = np.where(known, values, 0.0).sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def contrast(base: Sequence[Boot], variant: Sequence[Boot]) -> float:
    """How much boot-to-boot variance enters: sum of squares of (share in base - share in variant) over all loads.

    Loads that both arms share, because the setting was changed at run time, cancel.
    """
    numbers = {boot.number for boot in (*base, *variant)}
    share = {
        number: sum(boot.number == number for boot in base) / len(base)
        - sum(boot.number == number for boot in variant) / len(variant)
        for number in numbers
    }
    return sum(value**2 for value in share.values())


def student(df: int, z: float = Z) -> float:
    """Quantile of Student's t where the normal has `z` (Cornish-Fisher, good to 1 % from 3 degrees on)."""
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    )


def few_prompts(count: int) -> float:
    """How much wider an interval from so many prompts is than their percentile bootstrap: n - 1 for n, t for normal."""
    return math.sqrt(count / (count - 1)) * student(count - 1) / Z if count > 1 else 1.0


def _resampled(boots: Sequence[Boot], picked: Indices, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """For picked prompts (draws, prompts): log seconds per token, and seconds per token, each a mean over the boots
    of the mean over that prompt's repeats, drawn again with replacement."""
    logs, seconds = np.zeros(picked.shape), np.zeros(picked.shape)
    seen = np.zeros(picked.shape)
    for boot in boots:
        known = ~np.isnan(boot.logs)
        counts = known.sum(axis=1)
        # Known repeats first, so that a drawn number below the count always hits one.
        packed = np.take_along_axis(np.where(known, boot.logs, 0.0), np.argsort(~known, axis=1, kind="stable"), 1)
        width, flat = packed.shape[1], packed.ravel()
        lengths = counts[picked]
        start = picked * width
        sum_logs, sum_seconds = np.zeros(picked.shape), np.zeros(picked.shape)
        for turn in range(width):
            value = flat[start + (rng.random(picked.shape) * lengths).astype(np.intp)]
            used = turn < lengths
            sum_logs += value * used
            sum_seconds += np.exp(value) * used
        lengths_or_one = np.maximum(lengths, 1)
        logs += sum_logs / lengths_or_one
        seconds += sum_seconds / lengths_or_one
        seen += lengths > 0
    return logs / seen, seconds / seen


def estimate(
    base: Sequence[Boot],
    variant: Sequence[Boot],
    weights: Floats,
    tokens: Floats,
    spread: BootSpread,
    rng: np.random.Generator,
    draws: int = DRAWS,
) -> Estimate:
    """Log speed-up of `variant` over `base`, with its interval.

    `weights` and `tokens` (prompts,): what a prompt counts, and the tokens that the totals are taken at. Every prompt
    needs a value in both arms. Bootstrap over prompts, then over each prompt's repeats, stretched by what few prompts
    make it too narrow (1.12 at 16, 1.02 at 72). Boot-to-boot spread is added as a Student t with the spread's degrees
    of freedom, because a handful of loads cannot be resampled.
    """
    arms = [
        (
            known_mean(np.stack([boot.mean for boot in boots], axis=1)),
            known_mean(np.stack([known_mean(np.exp(boot.logs)) for boot in boots], axis=1)),
        )
        for boots in (base, variant)
    ]
    (base_logs, base_seconds), (variant_logs, variant_seconds) = arms
    value = float(weights @ (base_logs - variant_logs) / weights.sum())
    owed = weights * tokens
    totals = math.log(float(owed @ base_seconds) / float(owed @ variant_seconds))

    count = len(weights)
    logs, sums = np.empty(draws), np.empty(draws)
    step = max(1, BLOCK // count)
    for first in range(0, draws, step):
        size = min(step, draws - first)
        picked = rng.integers(0, count, (size, count))
        (left, left_s), (right, right_s) = _resampled(base, picked, rng), _resampled(variant, picked, rng)
        w, o = weights[picked], owed[picked]
        logs[first : first + size] = (w * (left - right)).sum(axis=1) / w.sum(axis=1)
        sums[first : first + size] = np.log((o * left_s).sum(axis=1) / (o * right_s).sum(axis=1))
    stretch = few_prompts(count)
    logs, sums = value + stretch * (logs - value), totals + stretch * (sums - totals)
    boot_sd = spread.sd * math.sqrt(contrast(base, variant))
    moved = rng.standard_t(spread.df, draws) * boot_sd
    low, high = np.percentile(logs + moved, (2.5, 97.5))
    totals_low, totals_high = np.percentile(sums + moved, (2.5, 97.5))
    return Estimate(
        value,
        float(low),
        float(high),
        totals,
        float(totals_low),
        float(totals_high),
        float(logs.std()),
        boot_sd,
        spread.df,
    )


def within_spread(boots: Sequence[Boot], weights: Floats) -> tuple[float, int]:
    """Standard deviation of the whole set's log speed from repeat to repeat inside a load, and its degrees of freedom.

    (NaN, 0) without a load that has two repeats."""
    squares, df = 0.0, 0
    for boot in boots:
        whole = ~np.isnan(boot.logs).any(axis=1)
        if boot.logs.shape[1] > 1 and whole.any():
            levels = weights[whole] @ boot.logs[whole] / weights[whole].sum()
            squares += float(((levels - levels.mean()) ** 2).sum())
            df += len(levels) - 1
    return (math.sqrt(squares / df), df) if df else (math.nan, 0)


def least_difference(within: float) -> float:
    """d, as a share: the least difference worth a word, max(3 %, twice the within-boot spread)."""
    return min(max(FLOOR, 2 * math.expm1(within)), MOST) if math.isfinite(within) else FLOOR


def null_run(
    boots: Sequence[Boot], weights: Floats, tokens: Floats, rng: np.random.Generator, draws: int = DRAWS
) -> Estimate | None:
    """The base against itself inside its loads: odd repeats against even ones, through `estimate`. None: no repeats."""
    several = [boot for boot in boots if boot.logs.shape[1] > 1]
    if not several:
        return None
    halves = [[boot.half(which) for boot in several] for which in (0, 1)]
    rows = np.flatnonzero(
        ~np.isnan([known_mean(np.stack([boot.mean for boot in half], 1)) for half in halves]).any(axis=0)
    )
    if len(rows) < 2:
        return None
    first, second = ([boot.take(rows) for boot in half] for half in halves)
    return estimate(first, second, weights[rows], tokens[rows], BootSpread(0.0, 1), rng, draws)


def word_of(low: float, high: float, d: float) -> str:
    """The word for a 95 % interval of the log speed-up."""
    if low > math.log1p(d):
        return "faster"
    if high < math.log1p(-d):
        return "slower"
    same = min(d, WIDEST)
    return "equivalent" if math.log1p(-same) < low and high < math.log1p(same) else "undecided"
