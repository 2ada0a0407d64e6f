"""What a step of b tokens costs beside a step of one: the curve T(b)/T(1) of a probe's raw runs, with its noise.

A ratio is a run of b over the mean of the single-stream runs before and after it (plugins/host_program/probes.py says
how they are made). Between two probed b the curve is a straight line; it never falls, and it ends at the largest b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts import json_files
from scripts.json_files import InputError

Floats = npt.NDArray[np.float64]

DECODING = ("independent", "duplicate", "staircase")
METRICS = ("engine", "wall", "cpu")
TAILS = (2.5, 97.5)
COUNTED = "experts exact from dumps"
EXPECTED = "what `swapgate probe` wrote"
_TIME = (int, float, type(None))
# What is read of a RUN.
RUN_KEYS: dict[str, Any] = {
    **{"kind": str, "group": int, "b": int, "ok": bool, "steps": int},
    **dict.fromkeys(("engine_s", "wall_s", "thread_s"), _TIME),
}


@dataclass(frozen=True)
class Ratio:
    """One run of b tokens a step beside its single-stream neighbours."""

    kind: str
    group: int
    b: int
    value: float


def seconds_of(run: Mapping[str, Any], metric: str) -> float | None:
    """Seconds of one step of a run: the engine's own, the client's wall clock, or CPU of the busiest thread."""
    if metric == "engine":
        return float(run["engine_s"]) if run["engine_s"] else None
    value = run["wall_s" if metric == "wall" else "thread_s"]
    return None if value is None or not run["steps"] else float(value) / float(run["steps"])


def ratios_of(runs: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[Ratio], float]:
    """Ratios of all usable runs, and T(1) in seconds (median of the single-stream decode runs; NaN without one)."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault(run["group"], []).append(run)
    single = [
        value
        for run in runs
        if run["b"] == 1 and run["ok"] and run["kind"] in DECODING and (value := seconds_of(run, metric))
    ]
    step = float(np.median(single)) if single else math.nan
    found = []
    for number, members in groups.items():
        for i, run in enumerate(members):
            own = seconds_of(run, metric)
            if run["b"] == 1 or not run["ok"] or not own:
                continue
            beside = [
                value
                for other in members[max(0, i - 1) : i + 2]
                if other["b"] == 1 and other["ok"] and (value := seconds_of(other, metric))
            ]
            if not beside:
                continue
            base = sum(beside) / len(beside)
            # A prefill has costs of its own; what b - 1 more tokens add to it is what they add to a step.
            value = own / base if run["kind"] in DECODING else 1 + (own - base) / step
            if math.isfinite(value) and value > 0:
                found.append(Ratio(run["kind"], number, run["b"], value))
    return found, step


def rising(values: Floats, weights: Floats) -> Floats:
    """The closest curve that starts at 1 and never falls (pool adjacent violators); shape (points,)."""
    blocks: list[list[float]] = [[1.0, 1e12, 1]]
    for value, weight in zip(values, weights):
        blocks.append([float(value), float(weight), 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            last, previous = blocks.pop(), blocks.pop()
            total = last[1] + previous[1]
            mean = (last[0] * last[1] + previous[0] * previous[1]) / total
            blocks.append([mean, total, last[2] + previous[2]])
    return np.array([mean for mean, _, count in blocks for _ in range(int(count))])


def _counted(found: Sequence[Ratio], share: Mapping[int, float]) -> list[Ratio]:
    """Ratios of adjacent tokens whose experts were counted; those of a staircase where no count is (many streams)."""
    rows: list[Ratio] = []
    for b in sorted({ratio.b for ratio in found}):
        own, other = (
            [one for one in found if one.b == b and one.kind == kind] for kind in ("duplicate", "independent")
        )
        if b in share:
            rows += [
                Ratio(COUNTED, one.group, b, one.value + share[b] * (more.value - one.value))
                for one, more in zip(own, other)
            ]
        elif rows:
            rows += [Ratio(COUNTED, one.group, b, one.value) for one in found if one.b == b and one.kind == "staircase"]
    return rows


@dataclass(frozen=True)
class Curve:
    """T(b)/T(1): `batch`, shape (points,), starts with 1; `draws`, shape (draws, points), is its noise."""

    batch: tuple[int, ...]
    values: Floats
    draws: Floats
    kinds: dict[str, dict[int, list[float]]]
    metric: str
    central: str
    step_s: float
    moe: bool
    source: str
    stopped: str | None

    @property
    def largest(self) -> int:
        """The largest b that was probed."""
        return self.batch[-1]

    def at(self, b: npt.ArrayLike) -> Floats:
        """T(b)/T(1) for each b, all within 1..largest."""
        wanted = np.asarray(b, float)
        if wanted.size and float(wanted.max()) > self.largest:
            raise InputError(
                f"{self.source}: found steps of up to {self.largest} tokens, expected {int(wanted.max())}: probe with "
                f"a batch that holds {int(wanted.max())} (k + 1), or leave that setting out"
            )
        found: Floats = np.interp(wanted, self.batch, self.values)
        return found

    def table(self, most: int) -> Floats:
        """Draws of T(1 + d)/T(1) for d = 0..most, shape (draws, most + 1)."""
        self.at([1 + most])
        wanted = np.arange(1, most + 2, dtype=float)
        return np.array([np.interp(wanted, self.batch, row) for row in self.draws])

    def as_json(self) -> dict[str, Any]:
        """The curve for a reader, per kind and as it is used."""
        low, high = np.percentile(self.draws, TAILS, axis=0)
        return {
            "metric": self.metric,
            "central": self.central,
            "moe": self.moe,
            "step_s": None if math.isnan(self.step_s) else self.step_s,
            "source": self.source,
            "stopped": self.stopped,
            "curve": [
                {"b": b, "ratio": float(self.values[i]), "low": float(low[i]), "high": float(high[i])}
                for i, b in enumerate(self.batch)
            ],
            "kinds": {
                kind: [
                    {
                        "b": b,
                        "ratio": float(np.median(values)),
                        "low": min(values),
                        "high": max(values),
                        "n": len(values),
                    }
                    for b, values in sorted(rows.items())
                ]
                for kind, rows in self.kinds.items()
            },
        }


def curve_of(
    probe: Mapping[str, Any],
    source: str,
    metric: str | None,
    central: str | None,
    draws: int,
    rng: np.random.Generator,
    share: Mapping[int, float] | None = None,
) -> Curve:
    """The curve of a probe's RESULT. InputError where it has no usable run.

    `metric` None: the engine's own clock where it has one, else wall. `central` None: adjacent tokens (staircase) for a
    mixture of experts, all decoding kinds together for a dense model. A mixture's draws take one kind each, so that the
    spread between kinds, which is the experts', is in the interval; with the `share` of expert_sets, where a mixture's
    adjacent tokens lie between the two is known.
    """
    runs = _runs(probe, source)
    if metric is None:
        metric = "engine" if any(run["ok"] and run["engine_s"] for run in runs) else "wall"
    found, step = ratios_of(runs, metric)
    moe = bool(probe.get("experts"))
    counted = _counted(found, share) if moe and share and central is None else []
    if counted:
        found, central = found + counted, COUNTED
    kinds: dict[str, dict[int, list[float]]] = {}
    for ratio in found:
        kinds.setdefault(ratio.kind, {}).setdefault(ratio.b, []).append(ratio.value)
    central = central or ("staircase" if moe and "staircase" in kinds else "pooled")
    chosen = [kind for kind in DECODING if kind in kinds] if central == "pooled" else [central]
    if not any(kind in kinds for kind in chosen):
        have = {one: ", ".join(dict.fromkeys(ratio.kind for ratio in ratios_of(runs, one)[0])) for one in METRICS}
        timed = "; ".join(f"by {one}: {names}" for one, names in have.items() if names)
        why = next((str(run["why"]) for run in runs if run.get("why")), "too few of them")
        raise InputError(
            f"{source}: found usable runs {timed or 'of no kind by any clock: ' + why}; expected "
            f"{' or '.join(chosen or DECODING)} by {metric}: choose --metric and --kind among those, or probe again"
        )
    batch = sorted({ratio.b for ratio in found if ratio.kind in chosen})
    weights = np.array([sum(len(kinds[kind].get(b, ())) for kind in chosen if kind in kinds) for b in batch], float)

    def fitted(some: Sequence[Ratio]) -> Floats:
        rows: dict[int, list[float]] = {}
        for ratio in some:
            rows.setdefault(ratio.b, []).append(ratio.value)
        have = [b for b in batch if b in rows]
        medians = [float(np.median(rows[b])) for b in have]
        # A kind that lacks a b (too few texts) lends it the neighbours' line.
        return rising(np.interp(batch, [1, *have], [1.0, *medians]), weights)

    used = [ratio for ratio in found if ratio.kind in chosen]
    bracket = [kind for kind in DECODING if kind in kinds] if moe and not counted else [central]
    drawn = []
    for _ in range(draws):
        kind = bracket[int(rng.integers(len(bracket)))]
        some = used if kind in ("pooled", central) else [ratio for ratio in found if ratio.kind == kind]
        picked: list[Ratio] = []
        by_b: dict[int, list[Ratio]] = {}
        for ratio in some:
            by_b.setdefault(ratio.b, []).append(ratio)
        for members in by_b.values():
            picked += [members[i] for i in rng.integers(len(members), size=len(members))]
        drawn.append(fitted(picked))
    return Curve(
        (1, *batch), fitted(used), np.array(drawn), kinds, metric, central, step, moe, source, probe.get("stopped")
    )


def flat(largest: int) -> Curve:
    """A curve on which verifying is free."""
    values = np.ones(2)
    return Curve((1, largest), values, np.ones((1, 2)), {}, "none", "none", math.nan, False, "free verify", None)


def read_probe(path: str) -> dict[str, Any]:
    """A probe's RESULT; InputError names the file."""
    found: dict[str, Any] = json_files.read_json(path, dict, EXPECTED)
    return found


def _runs(probe: Mapping[str, Any], source: str) -> list[Mapping[str, Any]]:
    """The runs of a RESULT, each with what is read of it."""
    runs = probe.get("runs")
    if not isinstance(runs, list) or not runs or probe.get("schema") != 1:
        raise InputError(f"{source}: found no runs of schema 1, expected {EXPECTED}; run the probe again")
    for i, run in enumerate(runs):
        wrong = [
            key
            for key, kinds in RUN_KEYS.items()
            if not isinstance(run, dict) or key not in run or not isinstance(run[key], kinds)
        ]
        if wrong:
            raise InputError(
                f"{source}: runs[{i}]: {', '.join(wrong)} not there or of another type; expected {EXPECTED}"
            )
    return runs
