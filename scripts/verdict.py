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
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

DRAWS = 10_000
TAIL_DRAWS = 1_000  # of the 95th percentiles, whose gate looks at a bound far less fine than the verdict's
SEED = 5
BLOCK = 1_000_000  # cells of one resampled block: bounds the memory of a large run
FLOOR = 0.03  # the smallest d
Z = 1.959964  # of a two-sided 95 % interval
POWER = 0.9
FEWEST_PROMPTS = 16
FEWEST_ANSWERED = 0.9  # of the cells (prompt, repeat) of a boot; fewer means that the arm died or was cut off
CLASS_LOSS = 0.10
FEWEST_OF_CLASS = 4  # prompts; fewer say nothing of how their class varies, and have no interval
DIVERGING = 0.10
SHORT = 3
JUDGED_WORDS = 80
TOKEN_LIMIT = 2**31
RULED_OUT = 3.0  # standard deviations between two baseline boots beyond which they are not the same machine
MOST_LOADS = 40  # that advice may ask for
MOST_TIMES = 8  # the prompts at hand that advice may ask for

LOOKUP_METHODS = ("ngram", "ngram_gpu", "suffix")
SYNTHETIC_CLASSES = ("random", "synthetic", "dummy", "lorem", "prefix_repetition")
ENDS = ("stop", "length", "tool_calls")
PROMPT_KEYS = ("id", "class", "messages", "max_tokens")
# A word is a run of letters and digits; scripts written without spaces count by sign.
WORD = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W_]+")


class InputError(ValueError):
    """The input cannot be used; the text says what, where, found against expected, and what to do."""


# ---------------------------------------------------------------------------------------------------------------------
# Raw lines


@dataclass(frozen=True)
class Request:
    """One answered or failed request. Times in seconds; without an answer (`error`) they are NaN."""

    where: str
    arm: str
    variant: str
    boot: int
    repeat: int
    concurrency: int
    prompt: str
    kind: str
    ttft_s: float
    decode_s: float
    e2e_s: float
    tokens: int
    finish: str
    answer: tuple[int, ...] | str | None
    looping: bool
    error: str | None
    tool_call_ok: bool | None
    reasoning_ok: bool | None

    @property
    def seconds_per_token(self) -> float:
        """Decode seconds per output token after the first; NaN with fewer than two tokens or without an answer."""
        return self.decode_s / (self.tokens - 1) if self.error is None and self.tokens > 1 else math.nan


@dataclass
class Run:
    """The lines of one file: requests, and by (arm, boot) what is known of that load."""

    name: str
    requests: list[Request] = field(default_factory=list)
    facts: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    @property
    def arms(self) -> list[str]:
        """Arms by their first line."""
        return list(dict.fromkeys(request.arm for request in self.requests))


def _wrong(where: str, key: str, found: object, expected: str) -> InputError:
    shown = json.dumps(found, ensure_ascii=False, default=str)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InputError(f"{where}: {key}: found {shown}, expected {expected}; correct the line and run again")


def _text(line: Mapping[str, Any], key: str, where: str, expected: str = "a text that is not empty") -> str:
    value = line.get(key)
    if not isinstance(value, str) or not value.strip():
        raise _wrong(where, key, value, expected)
    return value


def _whole(line: Mapping[str, Any], key: str, where: str, least: int, default: int | None = None) -> int:
    value = line.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _wrong(where, key, value, f"a whole number of at least {least}")
    return value


def _seconds(line: Mapping[str, Any], key: str, where: str, above: bool) -> float:
    value = line.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0
        or (above and value == 0)
    ):
        raise _wrong(where, key, value, "seconds, a finite number above 0" if above else "seconds, a finite number")
    return float(value)


def _flag(line: Mapping[str, Any], key: str, where: str) -> bool | None:
    value = line.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(where, key, value, "true, false or null")
    return value


def _answer(line: Mapping[str, Any], where: str) -> tuple[tuple[int, ...] | str | None, bool]:
    """What identifies the answer (token ids before text), and whether it loops."""
    ids, text = line.get("token_ids"), line.get("text")
    if ids is not None:
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < TOKEN_LIMIT for i in ids):
            raise _wrong(where, "token_ids", ids, "a list of whole numbers from 0 to below 2^31")
        return tuple(ids), loops(ids)
    if text is not None:
        if not isinstance(text, str):
            raise _wrong(where, "text", text, "a text")
        return text, loops_text(text)
    return None, False


def parse_request(line: Mapping[str, Any], where: str) -> Request:
    """The request of one raw line. Raises InputError with `where` in it."""
    error = line.get("error")
    if error is not None and not isinstance(error, str):
        raise _wrong(where, "error", error, "a text or null")
    failed = bool(error)
    tokens = 0 if failed else _whole(line, "output_tokens", where, 0)
    ttft = decode = e2e = math.nan
    answer, looping, finish = None, False, ""
    if not failed:
        ttft, e2e = _seconds(line, "ttft_s", where, False), _seconds(line, "e2e_s", where, True)
        decode = _seconds(line, "decode_s", where, tokens > 1)
        if decode > e2e * 1.001 + 0.001:
            raise _wrong(where, "decode_s", decode, f"at most e2e_s ({e2e}), both in seconds")
        finish = _text(line, "finish_reason", where)
        answer, looping = _answer(line, where)
    prompt = line.get("prompt_id")
    if isinstance(prompt, bool) or not isinstance(prompt, (str, int)) or prompt == "":
        raise _wrong(where, "prompt_id", prompt, "a text or a whole number")
    return Request(
        where=where,
        arm=_text(line, "arm", where),
        variant=_text(line, "variant", where),
        boot=_whole(line, "boot", where, 0),
        repeat=_whole(line, "repeat", where, 0),
        concurrency=_whole(line, "concurrency", where, 1, 1),
        prompt=str(prompt),
        kind=_text(line, "class", where),
        ttft_s=ttft,
        decode_s=decode,
        e2e_s=e2e,
        tokens=tokens,
        finish=finish,
        answer=answer,
        looping=looping,
        error=error if failed else None,
        tool_call_ok=_flag(line, "tool_call_ok", where),
        reasoning_ok=_flag(line, "reasoning_ok", where),
    )


def parse_facts(line: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The known facts of a boot line, checked; others are kept as they are. Raises InputError."""
    facts = line["facts"]
    if not isinstance(facts, dict):
        raise _wrong(where, "facts", facts, "an object")
    for key in ("kv_cache_tokens", "preemptions", "drafted", "accepted"):
        if facts.get(key) is not None:
            _whole(facts, key, where, 0)
    if facts.get("method") is not None:
        _text(facts, "method", where, "the speculation's method, or null without speculation")
    reasons = facts.get("throttle_reasons")
    if reasons is not None and not (isinstance(reasons, list) and all(isinstance(reason, str) for reason in reasons)):
        raise _wrong(where, "throttle_reasons", reasons, "a list of texts")
    return facts


def json_lines(lines: Iterable[bytes], name: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """(file:line, object) of every line that is not blank. Raises InputError."""
    for number, raw in enumerate(lines, 1):
        where = f"{name}:{number}"
        try:
            text = raw.decode("utf-8")
            value = json.loads(text) if text.strip() else None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(
                f"{where}: not JSON ({error}); expected one JSON object a line; "
                "was the recording cut off? remove the line or record again"
            ) from error
        if text.strip():
            if not isinstance(value, dict):
                raise InputError(f"{where}: found {type(value).__name__}, expected one JSON object a line")
            yield where, value


def read_run(lines: Iterable[bytes], name: str) -> Run:
    """Requests and facts of a file of raw lines. Raises InputError, with file:line where one line is at fault."""
    run = Run(name)
    seen: dict[tuple[str, int, int, int, str], str] = {}
    variants: dict[str, tuple[str, str]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    for where, line in json_lines(lines, name):
        if "facts" in line:
            at = (_text(line, "arm", where), _whole(line, "boot", where, 0))
            run.facts.setdefault(at, {}).update(parse_facts(line, where))
            continue
        request = parse_request(line, where)
        key = (request.arm, request.boot, request.repeat, request.concurrency, request.prompt)
        if key in seen:
            raise InputError(
                f"{where}: arm {request.arm}, boot {request.boot}, repeat {request.repeat}, prompt "
                f"{request.prompt}: found twice, first at {seen[key]}; expected once: was the same arm "
                "recorded twice into one file? number its boots or repeats on"
            )
        seen[key] = where
        for what, of, table, value in (
            ("variant of arm", request.arm, variants, request.variant),
            ("class of prompt", request.prompt, kinds, request.kind),
        ):
            known = table.setdefault(of, (value, where))
            if known[0] != value:
                raise InputError(
                    f"{where}: {what} {of}: found {value!r}, expected {known[0]!r} as at {known[1]}; "
                    "an arm is one variant, a prompt has one class"
                )
        run.requests.append(request)
    if len(run.arms) < 2:
        raise InputError(
            f"{name}: found {len(run.arms)} arm(s) {run.arms}, expected at least two; "
            "record the other arm into the same file"
        )
    return run


# ---------------------------------------------------------------------------------------------------------------------
# What a text looks like


def loops(sequence: Sequence[int], least: int = 32, times: int = 4, longest: int = 128) -> bool:
    """Whether a sequence of token ids ends in a loop.

    That is: its end, of at least `least` elements and a quarter of the whole, repeats one period of at most `longest`
    elements at least `times` times.
    """
    ids = np.asarray(sequence, np.int64)
    need = max(least, len(ids) // 4)
    for period in range(1, min(longest, len(ids) // times) + 1):
        differs = ids[period:][::-1] != ids[:-period][::-1]
        run = int(np.argmax(differs)) if differs.any() else len(differs)
        if run and run + period >= max(need, times * period):
            return True
    return False


def loops_text(text: str) -> bool:
    """Whether a text ends in a loop: as `loops`, by character, with lengths about those of so many tokens."""
    return loops([ord(sign) for sign in text.rstrip()], least=128, longest=400)


def looks_synthetic(text: str) -> str | None:
    """Why a text of 80 words or more looks generated at random, or None.

    Written language and code repeat their words: of the first 300 words usually a quarter or more occur twice.
    Random tokens of a vocabulary hardly do; random words of a small vocabulary do, but no ten of them stand out.
    """
    words = [word.casefold() for word in WORD.findall(text)][:300]
    if len(words) < JUDGED_WORDS:
        return None
    counts = Counter(words)
    repeated = sum(count for count in counts.values() if count > 1) / len(words)
    top = sum(count for _, count in counts.most_common(10)) / len(words)
    if repeated < 0.08:
        return f"random tokens: {repeated:.0%} of its words occur more than once, in written text 25 % and more"
    if len(words) >= 250 and top < 0.12:
        return f"random words: its ten commonest make {top:.0%}, in written text 15 % and more"
    if len(counts) <= 0.05 * len(words):
        return f"one phrase repeated: {len(counts)} different words among {len(words)}"
    return None


def synthetic_texts(texts: Mapping[str, str]) -> dict[str, str]:
    """By prompt id why it looks synthetic. Texts too short to tell are judged joined, and named together."""
    found = {name: why for name, text in texts.items() if (why := looks_synthetic(text))}
    short = {name: text for name, text in texts.items() if len(WORD.findall(text)) < JUDGED_WORDS}
    why = looks_synthetic("\n".join(short.values()))
    if why and "phrase" not in why:  # a template before each short question is no loop
        found.update(dict.fromkeys(short, why))
    return found


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set; `messages` are {"role", "content"}, the last of them the user's."""

    id: str
    kind: str
    messages: tuple[dict[str, str], ...]
    max_tokens: int

    @property
    def text(self) -> str:
        """All that is said, one message after the other."""
        return "\n".join(message["content"] for message in self.messages)


def read_prompts(lines: Iterable[bytes], name: str) -> list[Prompt]:
    """The prompts of a JSONL file, checked line by line. Raises InputError."""
    prompts: list[Prompt] = []
    ids: dict[str, str] = {}
    texts: dict[str, str] = {}
    for where, line in json_lines(lines, name):
        extra = sorted(set(line) - set(PROMPT_KEYS))
        if extra:
            raise InputError(
                f"{where}: found the key(s) {', '.join(extra)}, expected only {', '.join(PROMPT_KEYS)}; "
                "sampling is fixed by the benchmark, and ignore_eos would time text that nobody asked for"
            )
        identity, kind = _text(line, "id", where), _text(line, "class", where)
        messages = line.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _wrong(where, "messages", messages, 'a list of {"role", "content"}')
        for message in messages:
            if (
                not isinstance(message, dict)
                or set(message) != {"role", "content"}
                or message["role"] not in ("system", "user", "assistant")
            ):
                raise _wrong(where, "messages", message, '{"role": system, user or assistant, "content": text}')
            _text(message, "content", where)
        if messages[-1]["role"] != "user":
            raise _wrong(where, "messages", messages[-1]["role"], "the last message to be the user's")
        prompt = Prompt(identity, kind, tuple(messages), _whole(line, "max_tokens", where, 16))
        for what, table, value in (("id", ids, identity), ("text", texts, prompt.text)):
            if value in table:
                raise InputError(
                    f"{where}: {what}: found the same as at {table[value]}, expected every prompt to be "
                    "another one: a second copy counts nothing and warms caches; remove one"
                )
            table[value] = where
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"{name}: found no prompt, expected at least {FEWEST_PROMPTS}")
    return prompts


def check_prompts(prompts: Sequence[Prompt]) -> list[str]:
    """What keeps a set from carrying an n-gram or suffix verdict; empty when nothing does."""
    problems = []
    if len(prompts) < FEWEST_PROMPTS:
        problems.append(f"found {len(prompts)} prompts, expected at least {FEWEST_PROMPTS}, better 60; add prompts")
    declared = sorted({prompt.kind for prompt in prompts if prompt.kind.casefold() in SYNTHETIC_CLASSES})
    if declared:
        problems.append(f"classes {', '.join(declared)}: synthetic by name, expected text that users send; replace it")
    for identity, why in synthetic_texts({prompt.id: prompt.text for prompt in prompts}).items():
        problems.append(f"prompt {identity}: {why}; replace it")
    return problems


# ---------------------------------------------------------------------------------------------------------------------
# The interval


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
        return _mean(self.logs)


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


def _mean(values: Floats) -> Floats:
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
            _mean(np.stack([boot.mean for boot in boots], axis=1)),
            _mean(np.stack([_mean(np.exp(boot.logs)) for boot in boots], axis=1)),
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
    return max(FLOOR, 2 * math.expm1(within)) if math.isfinite(within) else FLOOR


def null_run(
    boots: Sequence[Boot], weights: Floats, tokens: Floats, rng: np.random.Generator, draws: int = DRAWS
) -> Estimate | None:
    """The base against itself inside its loads: odd repeats against even ones, through `estimate`. None: no repeats."""
    several = [boot for boot in boots if boot.logs.shape[1] > 1]
    if not several:
        return None
    halves = [[boot.half(which) for boot in several] for which in (0, 1)]
    rows = np.flatnonzero(~np.isnan([_mean(np.stack([boot.mean for boot in half], 1)) for half in halves]).any(axis=0))
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
    return "equivalent" if math.log1p(-d) < low and high < math.log1p(d) else "undecided"


# ---------------------------------------------------------------------------------------------------------------------
# What a plan can find, and what an undecided run lacks


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
    room = math.log1p(d) - student(plan.prompts - 1) * plan.request_sd * math.sqrt(drawn / plan.prompts)
    moves = math.sqrt(halves * (plan.pass_sd**2 + plan.request_sd**2 / plan.prompts))
    normal = NormalDist()
    refused = (2 * normal.cdf(-room / moves) if moves else 0.0) if room > 0 else 1.0
    wanted = POWER / (1 - refused) if refused < 1 else math.inf
    smallest = math.exp(math.log1p(d) + half + normal.inv_cdf(wanted) * real) if wanted < 1 else None

    mostly = "boots" if from_boots > from_prompts else "prompts"
    head = (
        f"{plan.prompts} prompts x {plan.repeats} repeats, {plan.loads} load{'s' if plan.loads != 1 else ''} "
        f"({'both arms in each' if plan.one_load else f'{plan.base_boots} base, {plan.variant_boots} variant'}): "
    )
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
        "sentence": head + said + tail,
    }


def needed(found: Estimate, d: float, prompts: int, base_boots: int, variant_boots: int) -> dict[str, Any]:
    """What would decide an undecided run if its estimate stays where it is.

    {"prompts": how many more prompts alone | None, "boots": {"base", "variant"} more loads alone | None,
     "both": {"prompts", "base", "variant"} | None, "said"}
    """
    upper, lower = math.log1p(d), math.log1p(-d)
    room = min(abs(found.value - upper), abs(found.value - lower))
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
    said = (
        (" or ".join(ways) + f" needed, if the speed-up stays at {math.exp(found.value):.3f}x")
        if ways
        else (
            f"no affordable number of prompts or boots decides: at {math.exp(found.value):.3f}x it lies on the border"
        )
    )
    return {"prompts": None if alone is None else max(alone, 1), "boots": boots, "both": both, "said": said}


# ---------------------------------------------------------------------------------------------------------------------
# Gates


@dataclass(frozen=True)
class Gate:
    """One condition. `kind`: rig (no verdict without it), output (the same job?) or cost (what *faster* must not cost).

    `ok` None: nothing is known about it, or it only states something."""

    name: str
    kind: str
    ok: bool | None
    said: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "kind": self.kind, "ok": self.ok, "said": self.said}


@dataclass(frozen=True)
class Settings:
    """What the caller decides: seed, draws, weights by class, boot spread known before, the speculation's method
    (None: as the boot lines say), and prompt texts by id for the detector of synthetic text."""

    seed: int = SEED
    draws: int = DRAWS
    weights: Mapping[str, float] | None = None
    known: BootSpread = field(default_factory=BootSpread)
    method: str | None = None
    texts: Mapping[str, str] | None = None


class Arm:
    """One arm at one concurrency over an ordered list of prompts."""

    def __init__(self, run: Run, name: str, level: int, prompts: Sequence[str]) -> None:
        self.name = name
        self.requests = [r for r in run.requests if r.arm == name and r.concurrency == level]
        self.variant = next(r.variant for r in run.requests if r.arm == name)
        self.by_prompt: dict[str, list[Request]] = {prompt: [] for prompt in prompts}
        for request in self.requests:
            self.by_prompt[request.prompt].append(request)
        self.facts = {boot: facts for (arm, boot), facts in run.facts.items() if arm == name}
        self.numbers = sorted({request.boot for request in self.requests})
        row = {prompt: i for i, prompt in enumerate(prompts)}
        self.boots: list[Boot] = []
        for number in self.numbers:
            mine = [request for request in self.requests if request.boot == number]
            column = {repeat: i for i, repeat in enumerate(sorted({request.repeat for request in mine}))}
            logs = np.full((len(prompts), len(column)), np.nan)
            for request in mine:
                if math.isfinite(request.seconds_per_token):
                    logs[row[request.prompt], column[request.repeat]] = math.log(request.seconds_per_token)
            self.boots.append(Boot(number, logs))

    @property
    def label(self) -> str:
        """Arm and variant for a reader."""
        return f"{self.name} ({self.variant})"

    def answered(self, prompt: str) -> list[Request]:
        """This prompt's requests that have an answer."""
        return [request for request in self.by_prompt[prompt] if request.error is None]

    def total(self, fact: str) -> int | None:
        """Sum of a counter over the loads that state it."""
        values = [facts[fact] for facts in self.facts.values() if facts.get(fact) is not None]
        return sum(values) if values else None

    def values(self, prompts: Sequence[str], key: str) -> Floats:
        """A time of every answered request, (prompts, most requests of one), NaN where there is none."""
        rows = [[getattr(request, key) for request in self.answered(prompt)] for prompt in prompts]
        table = np.full((len(rows), max((len(row) for row in rows), default=0)), np.nan)
        for i, row in enumerate(rows):
            table[i, : len(row)] = row
        return table


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


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
    return Gate(
        "null",
        "rig",
        word == "equivalent",
        said
        if word == "equivalent"
        else said + "; expected equivalent: record more repeats a load, or quieten the host",
    )


def drift_gate(base: Sequence[Boot], known: BootSpread) -> Gate:
    """The base's loads are one machine."""
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


def divergence(base: Arm, variant: Arm, prompts: Sequence[str]) -> tuple[set[str], set[str], int]:
    """Prompts where the variant gives an answer that the base never gave, those where the base differs from itself,
    and of how many prompts the answers are known. Without answers their lengths stand in."""
    between, within, known = set(), set(), 0
    for prompt in prompts:
        sides = [
            {(r.answer if r.answer is not None else r.tokens) for r in arm.answered(prompt)} for arm in (base, variant)
        ]
        known += all(r.answer is not None for arm in (base, variant) for r in arm.answered(prompt))
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
        stated = test in ("looping", "short") or any(
            getattr(r, test) is not None for prompt in prompts for r in variant.answered(prompt)
        )
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


# ---------------------------------------------------------------------------------------------------------------------
# The verdict


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
        _mean(np.stack([boot.mean for boot in arm.boots], 1)) if arm.boots else np.full(len(prompts), np.nan)
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
        gates += [null_gate(null, d), drift_gate(left, chosen.known), order_gate(base, variant)]

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
        worst = min(result["classes"], key=lambda row: row["speedup"]["value"])
        gates.append(
            Gate(
                "class_slower",
                "cost",
                worst["speedup"]["value"] >= 1 - CLASS_LOSS,
                f"the slowest class is {worst['class']}, {worst['speedup']['value']:.3f}x"
                + (
                    ""
                    if worst["speedup"]["value"] >= 1 - CLASS_LOSS
                    else f"; no class may lose more than {CLASS_LOSS:.0%}"
                ),
            )
        )
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
    failed request, which needs no times), "tool_call_ok", "reasoning_ok" (true, false)
Two arms with the same boot number shared that load: the setting was changed at run time, and boots cancel.

A load, optional, from the server's own metrics and the host:
    {"arm", "boot", "facts": {"method": speculation's method or null, "kv_cache_tokens", "preemptions", "drafted",
     "accepted": counts, "throttle_reasons": [text]}}

Words: faster (lower 95 % bound above 1 + d), slower (upper bound below 1 - d), equivalent (all of the interval within
d), undecided (with the prompts or boots that it lacks), not faster (by the interval it is, but a gate fails), output
changed, refused. d is 3 %, or twice the spread from repeat to repeat inside the base's loads. docs/verdict.md tells
how and why. --json prints {"file", "seed", "draws", "verdicts": [...]}, each as in `judge` of this program.
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


def _lines(path: str) -> list[bytes]:
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
        prompts = read_prompts(_lines(options.check_prompts), options.check_prompts)
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
        else {prompt.id: prompt.text for prompt in read_prompts(_lines(options.prompts), options.prompts)}
    )
    known = BootSpread() if options.boot_sd is None else BootSpread(options.boot_sd, options.boot_loads - 1)
    settings = Settings(
        seed=options.seed,
        draws=options.draws,
        known=known,
        method=options.method,
        texts=texts,
        weights=None if options.weights is None else parse_weights(options.weights),
    )
    results = verdicts(read_run(_lines(options.run), options.run), options.base, settings)
    if options.json:
        print(
            json.dumps(
                {"file": options.run, "seed": options.seed, "draws": options.draws, "verdicts": results},
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
