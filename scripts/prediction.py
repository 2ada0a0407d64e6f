"""Will speculation help: replayed acceptance, the cost of a step and the fixed cost put together, with an interval.

Decode time under a setting is the SUM over the replayed steps of the cost of a step with that many drafts:

    time = sum over steps of [ T(1 + d) / T(1) + F(d) - 1 ],  in units of one plain step;  speed-up = plain steps / time

F is what having speculation on costs a step: F(0) = T_on(1)/T(1) one without drafts, and often less one with, since the
V1 runner replays a whole CUDA graph only for steps of exactly k + 1 tokens a stream. Intervals: prompts are drawn anew
within their class, the curve from its probes' repeats, F from its own interval, and MODEL_SD for what such a sum leaves
out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts import replay
from scripts.json_files import InputError
from scripts.step_cost import TAILS, Curve

Floats = npt.NDArray[np.float64]
Three = tuple[float, float, float]  # value, lower and upper end of its 95 % interval

DRAWS = 2000
NEWTON = 25  # steps of it; few are needed
LEAST_FIXED = 0.01  # F is a factor
SEED = 6
SMALLEST = 0.03  # gain or loss that matters
UNKNOWN_FIXED = 1.15  # a gain below this may be eaten by a fixed cost that nobody measured
FIXED_SEEN_S = 0.003  # what a step cost more with n-gram loaded than without, on one H200: much, where steps are short
FEWEST_PROMPTS = 16
CLASS_LOSS = 0.10
FEWEST_OF_CLASS = 4
# Log error of the sum itself, beside the noise of its inputs: the probes' stand-in for a step that verifies. From
# benchmarks/results/prediction.
MODEL_SD = 0.03
DRAFT_COSTS = (0.0, 0.02, 0.05, 0.1)
FAMILIES = {"ngram": "ngram", "ngram_gpu": "ngram_gpu", "suffix": "suffix"}
WITHOUT_FIXED = "excluding the cost of switching speculation on"
MEASURE_DRAFTING = "measure it with `predict.py fixed-cost --probe`"


@dataclass(frozen=True)
class Fixed:
    """F(0) with its 95 % interval and where it is from; `drafting`: F of steps with drafts, (value, low, high)."""

    value: float
    low: float
    high: float
    source: str
    drafting: Three | None = None

    def draws(self, count: int, most: int, rng: np.random.Generator) -> Floats:
        """Log-normal draws of F(0..most), shape (count, most + 1)."""
        parts = [(self.value, self.low, self.high), self.drafting]
        drawn = []
        for value, low, high in filter(None, parts):
            sd = math.log(high / low) / (2 * 1.959964) if high > low else 0.0
            drawn.append(value * np.exp(rng.normal(0.0, sd, count)))
        return np.stack([drawn[0], *[drawn[-1]] * most], axis=1)

    def at(self, most: int) -> Floats:
        """F(0..most)."""
        return np.array([self.value, *[self.drafting[0] if self.drafting else self.value] * most])

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "source": self.source,
            "drafting": dict(zip(("value", "low", "high"), self.drafting)) if self.drafting else None,
        }


def semantics_of(method: str, version: str | None, device: str, runner: str | None) -> tuple[str, str]:
    """The replay rule of an engine and why it is that one. `runner` v1 or v2 where the engine's log says it.

    InputError for a method that no recorded answer can replay, and where the release does not decide the runner.
    """
    if method == "suffix":
        raise InputError(
            "method suffix: its drafts come from trees over earlier answers too, which this replay does not build; "
            "measure it with a trial instead (docs/prediction.md says what was tried)"
        )
    if method not in ("ngram", "ngram_gpu"):
        raise InputError(
            f"method {method}: its drafts come from a model, so no recorded answer says what it would draft; "
            "`break_even` of a prediction for n-gram says what acceptance length it must reach"
        )
    if device == "cpu":
        return "v1", "CPU builds run the V1 runner"
    if runner is not None:
        return runner, f"runner {runner} as stated"
    found = re.match(r"0\.(\d+)", version or "")
    if not found:
        raise InputError(
            "semantics: neither the engine's version nor its runner is known; give --engine-version, --runner or "
            "--semantics (the engine's log says `V2 Model Runner` or `Model Runner V2 does not yet support` at start)"
        )
    minor = int(found.group(1))
    if minor <= 26:
        return "v1", f"vLLM {version}: n-gram turns the V2 runner off (seen on a GPU with 0.26)"
    if minor >= 32:
        return "v2", f"vLLM {version}: the V2 runner is the default and has n-gram (source of 0.32)"
    raise InputError(
        f"semantics: vLLM {version} lies between 0.26 (n-gram on the V1 runner) and 0.32 (V2): give --runner, as "
        "its log at start says"
    )


@dataclass
class Workload:
    """Transcripts under a grid: `counts[p, s, d]` steps with d drafts; `base[p]` plain steps, one a token."""

    ids: list[str | int]
    classes: list[str]
    settings: tuple[replay.Setting, ...]
    counts: Floats
    base: Floats
    skipped: int
    semantics: str
    max_model_len: int | None = None
    spans: dict[str, npt.NDArray[np.intp]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = list(dict.fromkeys(self.classes))
        self.spans = {name: np.array([i for i, cls in enumerate(self.classes) if cls == name]) for name in names}

    def resampled(self, draws: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
        """Prompts drawn with replacement within their classes, shape (draws, prompts)."""
        parts = [span[rng.integers(len(span), size=(draws, len(span)))] for span in self.spans.values()]
        return np.concatenate(parts, axis=1)


def workload(
    transcripts: Sequence[replay.Transcript], settings: Sequence[replay.Setting], rule: replay.Rule
) -> Workload:
    """Replay every transcript under every setting. Answers of fewer than two tokens have no decode step."""
    used = [one for one in transcripts if one.outputs > 1]
    if not used:
        raise InputError("transcripts: found no answer of two tokens or more, expected some; record longer answers")
    rows = [replay.replay(one, settings, rule) for one in used]
    return Workload(
        [one.id for one in used],
        [one.cls for one in used],
        tuple(settings),
        np.array([row.drafted_steps for row in rows], float),
        np.array([one.outputs - 1 for one in used], float),
        len(transcripts) - len(used),
        rule.semantics,
        rule.max_model_len,
    )


def _interval(draws: Floats) -> tuple[float, float]:
    low, high = np.percentile(draws, TAILS)
    return float(low), float(high)


def _row(point: float, draws: Floats) -> dict[str, Any]:
    low, high = _interval(draws)
    return {"speedup": point, "low": low, "high": high}


def _geometric(logs: Floats, axis: int = -1) -> Floats:
    result: Floats = np.exp(logs.mean(axis=axis))
    return result


def _overall(each: Floats, picked: npt.NDArray[np.intp]) -> Floats:
    """Geometric mean over the prompts of each draw; `each` are logs, shape (draws, prompts)."""
    return _geometric(np.take_along_axis(each, picked, axis=1))


def unknown_fixed(curve: Curve) -> float:
    """The gain that a fixed cost nobody measured may eat: 1.15, or more where T(1) is only a few milliseconds."""
    return UNKNOWN_FIXED if math.isnan(curve.step_s) else max(UNKNOWN_FIXED, 1 + FIXED_SEEN_S / curve.step_s)


def worth(
    row: Mapping[str, Any], bound_high: float, fixed: Fixed | None, unknown: float, prompts: int, losing: str | None
) -> tuple[str, str]:
    """ "yes", "no" or "unclear" for one setting, and the reason. `unknown`: see `unknown_fixed`."""
    least = 1 + SMALLEST
    if bound_high < least:
        given = "the answers and the fixed cost" if fixed else "the answers"
        return "no", (
            f"proven from {given} alone: even if verifying drafts were free, the gain would be at most "
            f"{bound_high:.3f}x, below {least:g}x"
        )
    if row["high"] < least:
        return "no", f"at best {row['high']:.3f}x, below {least:g}x"
    if row["low"] <= (least if fixed else unknown):
        if fixed is None and row["low"] > least:
            return "unclear", (
                f"{row['low']:.3f}x at least, {WITHOUT_FIXED}: without that cost no yes below {unknown:.3g}x"
            )
        return (
            "unclear",
            f"between {row['low']:.3f}x and {row['high']:.3f}x: more prompts or probe repeats may decide it",
        )
    if losing:
        return "unclear", f"faster overall, but class {losing} is predicted more than {100 * CLASS_LOSS:.0f} % slower"
    if prompts < FEWEST_PROMPTS:
        return "unclear", f"{row['low']:.3f}x at least, but over {prompts} prompts, expected {FEWEST_PROMPTS} or more"
    return "yes", f"{row['low']:.3f}x at least"


def sign_flip(counts: Floats, tokens_per_step: float, curve: Curve, extra: Floats) -> dict[str, Any]:
    """At how many streams at once the gain is gone. `counts` steps by drafts; `extra` is F(0), F(1), ... less 1.

    m streams step together: a plain step computes m tokens, one with speculation m + the sum of their drafts, whose
    distribution is the m-fold convolution of one stream's. It costs F of steps with drafts where all of them draft.
    """
    share = counts / counts.sum()
    most = int(np.flatnonzero(share)[-1])
    speedups: dict[str, float] = {}
    total = np.ones(1)
    flips = None
    streams = 0
    while (streams + 1) * (1 + most) <= curve.largest:
        streams += 1
        total = np.convolve(total, share)
        used = np.flatnonzero(total > 0)
        all_draft = (1 - share[0]) ** streams
        overhead = float(extra[0] + all_draft * (extra[-1] - extra[0]))
        cost = float((total[used] * curve.at(streams + used)).sum()) + overhead
        speedups[str(streams)] = tokens_per_step * float(curve.at([streams])[0]) / cost
        if flips is None and speedups[str(streams)] < 1:
            flips = streams
    if flips is not None:
        text = f"slower from {flips} stream{'s' if flips > 1 else ''} on"
    elif streams > 1:
        text = f"not up to {streams} streams; more needs a probe of {(streams + 1) * (1 + most)} tokens a step"
    else:
        text = f"not probed: 2 streams need steps of {2 * (1 + most)} tokens, the probe has up to {curve.largest}"
    return {"streams": flips, "probed_to": streams, "speedups": speedups, "text": text}


def break_even(curve: Curve, extra: float) -> list[dict[str, Any]]:
    """For a draft model with k tokens every step: the acceptance length (tokens a step) at which it gains nothing.

    `draft_cost` is one draft token's, in plain steps of the target.
    """
    return [
        {
            "k": b - 1,
            "draft_cost": cost,
            "acceptance_length": (needed := float(curve.at([b])[0]) + extra + cost * (b - 1)),
            "reachable": needed <= b,
        }
        for b in curve.batch[1:]
        for cost in DRAFT_COSTS
    ]


def predict(
    work: Workload, curve: Curve, fixed: Fixed | None, seed: int = SEED, model_sd: float = MODEL_SD
) -> dict[str, Any]:
    """The prediction as `predict.py predict --json` prints it, without what only its caller knows.

    InputError when a setting needs longer steps than the curve has.
    """
    rng = np.random.default_rng(seed)
    draws = len(curve.draws)
    most = work.counts.shape[2] - 1
    # Steps past what a setting drafted are not needed, even if the grid is wider than the probe.
    needed = int(np.flatnonzero(work.counts.sum(axis=(0, 1)))[-1])
    extra = fixed.at(most) - 1 if fixed else np.zeros(most + 1)
    cost, table = np.zeros(most + 1), np.zeros((draws, most + 1))
    cost[: needed + 1] = curve.at(np.arange(1, needed + 2)) + extra[: needed + 1]
    noise = fixed.draws(draws, needed, rng) - 1 if fixed else np.zeros((draws, needed + 1))
    table[:, : needed + 1] = curve.table(needed) + noise
    picked = work.resampled(draws, rng)
    # The least that a step can cost: what F is of steps with drafts is not known from those without.
    least = 1 + extra
    if fixed and not fixed.drafting:
        least[1:] = np.minimum(least[1:], 1.0)
    bounds = np.log(work.base[:, None] / (work.counts @ least))
    unknown = unknown_fixed(curve)
    settings, logs, drawn = [], [], []
    prompts = len(work.ids)
    for s, setting in enumerate(work.settings):
        point = np.log(work.base / (work.counts[:, s] @ cost))
        wrong = rng.normal(0.0, model_sd, draws)
        each = np.log(work.base) - np.log(table @ work.counts[:, s].T) - wrong[:, None]
        overall = _overall(each, picked)
        logs.append(point)
        drawn.append((each, overall))
        classes = {
            name: _row(float(_geometric(point[span])), _geometric(each[:, span])) for name, span in work.spans.items()
        }
        bound = bounds[:, s]
        bound_high = float(np.percentile(_geometric(bound[picked]), TAILS[1]))
        row = _row(float(_geometric(point)), overall)
        losing = next(
            (
                name
                for name, span in work.spans.items()
                if len(span) >= FEWEST_OF_CLASS and classes[name]["high"] < 1 - CLASS_LOSS
            ),
            None,
        )
        decided, why = worth(row, bound_high, fixed, unknown, prompts, losing)
        if decided == "no" and fixed and not fixed.drafting and bound_high >= 1 + SMALLEST:
            spared = table.copy()
            spared[:, 1 : needed + 1] -= np.maximum(noise[:, 1:], 0.0)
            hoped = _overall(np.log(work.base) - np.log(spared @ work.counts[:, s].T) - wrong[:, None], picked)
            if (most_hoped := float(np.percentile(hoped, TAILS[1]))) >= 1 + SMALLEST:
                decided = "unclear"
                why = f"{why} if steps with drafts cost F too, {most_hoped:.3f}x if none of it: {MEASURE_DRAFTING}"
        steps = work.counts[:, s].sum(axis=0)
        tokens = float(work.base.sum() / steps.sum())
        settings.append(
            {
                "k": setting.k,
                "min": setting.min,
                "max": setting.max,
                **row,
                "totals": float(work.base.sum() / (steps @ cost)),
                "tokens_per_step": tokens,
                "draft_step_share": float(1 - steps[0] / steps.sum()),
                "free_verify_bound": float(_geometric(bound)),
                "free_verify_bound_high": bound_high,
                "worth": decided,
                "why": why,
                "classes": classes,
                "sign_flip": sign_flip(steps, tokens, curve, extra),
            }
        )
    best = int(np.argmax([row["speedup"] for row in settings]))
    # What picking the best of a grid flatters it by: the best of each draw, looked at in the draw and in the whole.
    over = np.array([overall for _, overall in drawn])
    whole = np.array([row["speedup"] for row in settings])
    champions = over.argmax(axis=0)
    optimism = float(np.mean(over.max(axis=0) - whole[champions])) if len(settings) > 1 else 0.0
    each, _ = drawn[best]
    caveats = []
    if fixed is None:
        caveats.append(
            f"predicted {WITHOUT_FIXED}: async scheduling off, another runner, graphs lost; no yes below {unknown:.3g}x"
        )
    elif not fixed.drafting and fixed.low > 1 + SMALLEST:
        caveats.append(f"F is of steps without drafts, those with drafts can cost less: {MEASURE_DRAFTING}")
    if prompts < FEWEST_PROMPTS:
        caveats.append(f"{prompts} prompts: expected {FEWEST_PROMPTS} or more")
    if len(settings) > 1:
        caveats.append(
            f"the best of {len(settings)} settings is picked on the prompts it is judged by, which flatters it by "
            f"about {max(0.0, optimism):.3f}"
        )
    if curve.stopped:
        caveats.append(f"the probe ended early: {curve.stopped}")
    if work.semantics == "v2":
        caveats.append(f"semantics v2 is {replay.CHECKED['v2']}")
    if work.skipped:
        caveats.append(f"{work.skipped} answers of fewer than two tokens are left out")
    return {
        "schema": 1,
        "overall": {key: settings[best][key] for key in ("speedup", "low", "high", "totals", "worth", "why")},
        "classes": {name: {**row, "prompts": len(work.spans[name])} for name, row in settings[best]["classes"].items()},
        "prompts": {
            str(one): {"class": work.classes[p], **_row(float(np.exp(logs[best][p])), np.exp(each[:, p]))}
            for p, one in enumerate(work.ids)
        },
        "settings": settings,
        "best": {key: settings[best][key] for key in ("k", "min", "max")} | {"optimism": optimism},
        "fixed_cost": fixed.as_json() if fixed else None,
        "verify_cost": curve.as_json(),
        "break_even": break_even(curve, float(extra[-1])),
        "sign_flip": settings[best]["sign_flip"],
        "semantics": work.semantics,
        "checked": replay.CHECKED[work.semantics],
        "caveats": caveats,
    }


# ---------------------------------------------------------------------------------------------------------------------
# The fixed cost


def decoded(rows: Iterable[Mapping[str, Any]], clock: str) -> Iterator[tuple[Mapping[str, Any], str, float]]:
    """(row, its prompt, log seconds per decoded token).

    A row has an id (or `prompt`), `decode_s` (or `cpu_s`), and `output_tokens`, `tokens` or `n`. Rows with an error, or
    of fewer than two tokens, are passed over.
    """
    for row in rows:
        name = row.get("id", row.get("prompt"))
        tokens = row.get("output_tokens", row.get("n", row.get("tokens")))
        seconds = row.get(clock)
        if isinstance(tokens, list):
            tokens = len(tokens)
        if name is None or row.get("error") or not seconds or not isinstance(tokens, int) or tokens < 2:
            continue
        if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise InputError(f"request {name}: {clock}: found {seconds!r:.40}, expected seconds")
        yield row, str(name), math.log(seconds / (tokens - 1))


def per_token(rows: Sequence[Mapping[str, Any]], source: str, clock: str) -> dict[str, float]:
    """Log seconds per decoded token of each prompt, the mean over its repeats. Rows as in `decoded`."""
    found: dict[str, list[float]] = {}
    for _, name, log in decoded(rows, clock):
        found.setdefault(name, []).append(log)
    if not found:
        raise InputError(f"{source}: found no line with id, {clock} and output_tokens, expected those of a record run")
    return {name: float(np.mean(values)) for name, values in found.items()}


def fixed_cost(plain: Mapping[str, float], off: Mapping[str, float], source: str, seed: int = SEED) -> Fixed:
    """T_on(1)/T(1) from seconds per token (logs, by prompt): speculation loaded but drafting nothing, over plain."""
    shared = sorted(set(plain) & set(off))
    if len(shared) < 3:
        raise InputError(f"fixed cost: found {len(shared)} prompts in both runs, expected the same prompts in both")
    logs = np.array([off[name] - plain[name] for name in shared])
    return Fixed(*_boot(logs, np.random.default_rng(seed)), source)


def drafting_cost(
    plain: Mapping[str, float],
    off: Mapping[str, float],
    timed: Iterable[tuple[str, float, Floats]],
    curve: Curve,
    seed: int = SEED,
) -> Three | None:
    """F of steps with drafts, (value, low, high): what requests under a setting took beyond all that is known of them.

    `timed`: (prompt, decode seconds, steps by drafts); `plain` and `off` as for `fixed_cost`. A step without drafts
    counts as the prompt's "off" one, one with d as T(1 + d). Least squares of log seconds, so that noise, which is a
    share of them, pulls neither way; prompts are drawn anew. None where fewer than 3 prompts have drafts.
    """
    names: list[str] = []
    found: list[tuple[float, float, float]] = []  # in plain steps: seconds, what is known of them; steps with drafts
    for name, seconds, steps in timed:
        if name in plain and name in off and steps[1:].any():
            drafts = np.flatnonzero(steps[1:]) + 1
            known = steps[0] * math.exp(off[name] - plain[name]) + float(steps[drafts] @ curve.at(1 + drafts))
            names.append(name)
            found.append((seconds / math.exp(plain[name]), known, float(steps[1:].sum())))
    owners, places = np.unique(names, return_inverse=True)
    if len(owners) < 3:
        return None
    times, known_of, drafting = np.array(found).T
    drawn = np.random.default_rng(seed).multinomial(len(owners), [1 / len(owners)] * len(owners), DRAWS)
    counted = np.vstack([np.ones(len(owners)), drawn])[:, places]
    extra = np.zeros((len(counted), 1))
    for _ in range(NEWTON):
        fitted = known_of + extra * drafting
        slope = counted * drafting / fitted
        extra += (slope * np.log(times / fitted)).sum(1, keepdims=True) / (slope * drafting / fitted).sum(
            1, keepdims=True
        )
        # A step with drafts computes something, however the noise fell.
        extra = np.maximum(extra, -0.9 * (known_of / drafting).min())
    values = np.maximum(1 + extra[:, 0], LEAST_FIXED)
    low, high = _interval(values[1:])
    return float(values[0]), min(low, float(values[0])), max(high, float(values[0]))


# ---------------------------------------------------------------------------------------------------------------------
# Prediction against measurement


def _measured(rows: Sequence[Mapping[str, Any]], clock: str) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for row, name, log in decoded(rows, clock):
        found.setdefault((name, str(row["setting"])), []).append(log)
    return found


def in_situ(
    work: Workload, names: Sequence[str], rows: Sequence[Mapping[str, Any]], clock: str = "decode_s"
) -> dict[str, Any]:
    """Seconds of a step with d drafts inside a server with speculation, by least squares over its requests.

    Rows as for `check`; those whose text is not the transcript's are left out, since their steps are not known. "off"
    rows are steps without drafts. {"seconds": {d: s}, "ratio": {d: of a step without drafts}, "requests", "low",
    "high": of the ratio, over prompts drawn anew}; only d that at least 3 % of the steps of some setting have.
    """
    place = {str(one): p for p, one in enumerate(work.ids)}
    table, seconds, owner = [], [], []
    for row in rows:
        p, name = place.get(str(row.get("id"))), str(row.get("setting"))
        if p is None or not row.get("same", True) or not row.get(clock) or row.get("error"):
            continue
        counts = np.zeros(work.counts.shape[2])
        if name == "off":
            counts[0] = work.base[p]
        elif name in names:
            counts = work.counts[p, list(names).index(name)]
        else:
            continue
        table.append(counts)
        seconds.append(row[clock])
        owner.append(p)
    if not table:
        return {"seconds": {}, "ratio": {}, "requests": 0}
    steps, times, owners = np.array(table), np.array(seconds), np.array(owner)
    shares = work.counts.sum(axis=0) / work.counts.sum(axis=(0, 2))[:, None]
    used = [d for d in range(steps.shape[1]) if d == 0 or (shares[:, d] >= 0.03).any()]
    # What is too rare to have a cost of its own counts as the next longer step that has one.
    merged = np.zeros((len(steps), len(used)))
    for d in range(steps.shape[1]):
        spot = next((i for i, one in enumerate(used) if one >= d), len(used) - 1)
        merged[:, spot] += steps[:, d]

    def solve(picked: npt.NDArray[np.intp]) -> Floats:
        scaled = merged[picked] / times[picked][:, None]
        found: Floats = np.linalg.lstsq(scaled, np.ones(len(picked)), rcond=None)[0]
        return found

    point = solve(np.arange(len(times)))
    rng = np.random.default_rng(SEED)
    spans = [np.flatnonzero(owners == p) for p in np.unique(owners)]
    drawn = np.array(
        [solve(np.concatenate([spans[i] for i in rng.integers(len(spans), size=len(spans))])) for _ in range(200)]
    )
    ratios = drawn / drawn[:, :1]
    low, high = np.percentile(ratios, TAILS, axis=0)
    keys = [str(d) for d in used]
    return {
        "seconds": dict(zip(keys, point.tolist())),
        "ratio": dict(zip(keys, (point / point[0]).tolist())),
        "low": dict(zip(keys, low.tolist())),
        "high": dict(zip(keys, high.tolist())),
        "requests": len(times),
    }


def _boot(logs: Floats, rng: np.random.Generator) -> tuple[float, float, float]:
    drawn = np.exp(logs[rng.integers(len(logs), size=(DRAWS, len(logs)))].mean(axis=1))
    low, high = _interval(drawn)
    return float(np.exp(logs.mean())), low, high


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[2] < other[1] or other[2] < one[1]


def check(
    work: Workload,
    transcripts: Sequence[replay.Transcript],
    curve: Curve,
    fixed: Fixed | None,
    names: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    rule: replay.Rule,
    clock: str = "decode_s",
    plain: Mapping[str, float] | None = None,
    seed: int = SEED,
) -> dict[str, Any]:
    """Compare with a run that was measured: per setting, whether they agree, and if not, which term failed.

    `rows` are measured requests ({"id", "setting", "repeat", clock, tokens, "drafted", "accepted", "same"}); setting
    "off" is speculation loaded but drafting nothing, `names[i]` is `work.settings[i]`. `plain`: logs of seconds per
    token of the baseline, by prompt. Speed-ups are against `plain` where it is given, else against "off".

    Terms: `acceptance` fails where arrays differ though the text is the same; `verify` where the measured cost of a
    mean step, in units of an "off" step, lies apart from the predicted one; `fixed` where "off" over plain lies apart
    from F.
    """
    rng = np.random.default_rng(seed)
    logs = _measured(rows, clock)
    mean = {key: float(np.mean(values)) for key, values in logs.items()}
    by_id = {str(one.id): one for one in transcripts}
    place = {str(one): p for p, one in enumerate(work.ids)}
    fixed_value = fixed.value if fixed else 1.0
    measured_fixed = None
    if plain is not None:
        shared = [name for name in plain if (name, "off") in mean]
        if shared:
            measured_fixed = _boot(np.array([mean[name, "off"] - plain[name] for name in shared]), rng)
    report: dict[str, Any] = {"clock": clock, "fixed": None, "settings": []}
    if measured_fixed:
        assumed = [fixed_value, fixed.low if fixed else 1.0, fixed.high if fixed else 1.0]
        report["fixed"] = {
            "measured": dict(zip(("value", "low", "high"), measured_fixed)),
            "assumed": dict(zip(("value", "low", "high"), assumed)),
            "failed": _apart(measured_fixed, assumed),
        }
    base_logs = plain if plain is not None else {name: value for (name, s), value in mean.items() if s == "off"}
    predicted = predict(work, curve, fixed, seed)
    # Without a plain run the base is "off", whose steps carry F(0).
    over = 1.0 if plain is not None else fixed_value
    # An "off" step costs F: the one of this run where it was measured, so that a wrong F is not called a wrong curve.
    off_cost = measured_fixed[0] if measured_fixed else fixed_value
    needed = int(np.flatnonzero(work.counts.sum(axis=(0, 1)))[-1])
    overhead = (fixed.at(needed) if fixed and fixed.drafting else np.full(needed + 1, off_cost)) - 1
    overhead[0] = off_cost - 1
    table, computed = curve.table(needed) + overhead, curve.at(np.arange(1, needed + 2))
    assumed_cost = computed + (fixed.at(needed) - 1 if fixed else 0.0)
    pairs: list[dict[str, Any]] = []
    for s, (setting, name) in enumerate(zip(work.settings, names)):
        own = [row for row in rows if str(row["setting"]) == name and not row.get("error")]
        same, equal, differing, first = 0, 0, 0, None
        for row in own:
            known = by_id.get(str(row["id"]))
            if known is None or not same_text(row, known):
                continue
            if row.get("drafted") is None and row.get("drafts") != 0:
                continue
            same += 1
            done = replay.replay(known, [setting], rule)
            if arrays_equal(
                row.get("drafted") or [], row.get("accepted") or [], done.drafted.tolist(), done.accepted.tolist()
            ):
                equal += 1
            else:
                differing += 1
                first = first or str(row["id"])
        ids = [one for one in place if (one, name) in mean and one in base_logs]
        if not ids:
            continue
        gain = _boot(np.array([base_logs[one] - mean[one, name] for one in ids]), rng)
        spots = [place[one] for one in ids]
        steps = work.counts[spots, s].sum(axis=1)
        costs = None
        if all((one, "off") in mean for one in ids):
            # Seconds of a mean step under the setting, over those of an "off" step of the same prompt.
            inside = np.array([mean[one, name] - mean[one, "off"] for one in ids]) + np.log(work.base[spots] / steps)
            costs = _boot(inside, rng)
        weights = work.counts[spots, s][:, : needed + 1] / steps[:, None]
        # In units of an "off" step, which costs F(0).
        expected = (table @ weights.T).mean(axis=1) / off_cost
        point = float(((computed + overhead) @ weights.T).mean()) / off_cost
        spread = np.exp(rng.normal(0.0, MODEL_SD, len(expected)))
        low, high = _interval(expected * spread)
        foretold = predicted["settings"][s]
        told = [over * foretold[key] for key in ("speedup", "low", "high")]
        agree = not _apart(gain, told)
        failed = []
        if differing:
            failed.append("acceptance")
        if costs and _apart(costs, (point, low, high)):
            failed.append("verify")
        if report["fixed"] and report["fixed"]["failed"]:
            failed.append("fixed")
        for one in ids:
            p = place[one]
            time = float(work.counts[p, s][: needed + 1] @ assumed_cost)
            said = over * work.base[p] / time
            pairs.append(
                {
                    "id": one,
                    "class": work.classes[p],
                    "setting": name,
                    "predicted": float(said),
                    "measured": math.exp(base_logs[one] - mean[one, name]),
                }
            )
        report["settings"].append(
            {
                "setting": name,
                "predicted": dict(zip(("speedup", "low", "high"), told)),
                "measured": dict(zip(("speedup", "low", "high"), gain)),
                "agree": agree,
                "failed_terms": [] if agree else failed or ["none alone: each term is within its own interval"],
                "acceptance": {"same_text": same, "equal": equal, "differ": differing, "first_differing": first},
                "verify": None
                if costs is None
                else {
                    "measured": dict(zip(("cost", "low", "high"), costs)),
                    "predicted": {"cost": point, "low": low, "high": high},
                    "failed": "verify" in failed,
                },
            }
        )
    errors = [abs(pair["predicted"] / pair["measured"] - 1) for pair in pairs]
    report["mean_abs_error"] = float(np.mean(errors)) if errors else None
    report["mean_log_error"] = (
        float(np.mean([math.log(p["predicted"] / p["measured"]) for p in pairs])) if pairs else None
    )
    report["pairs"] = pairs
    return report


def same_text(row: Mapping[str, Any], transcript: replay.Transcript) -> bool:
    """Whether a measured answer is the recorded one, token for token."""
    if "output_token_ids" in row:
        return bool(row["output_token_ids"] == transcript.tokens[transcript.prompt :].tolist())
    return bool(row.get("same"))


def arrays_equal(drafted: Sequence[int], accepted: Sequence[int], ours: Sequence[int], hits: Sequence[int]) -> bool:
    """Whether an engine's arrays are the replay's.

    The engine's may hold the steps with drafts alone, and its last step may accept more than the answer still held.
    """
    if len(drafted) != len(ours):
        ours, hits = [d for d in ours if d], [h for d, h in zip(ours, hits) if d]
    if list(drafted) != list(ours) or len(accepted) != len(hits):
        return False
    return list(accepted[:-1]) == list(hits[:-1]) and (not hits or accepted[-1] >= hits[-1])
