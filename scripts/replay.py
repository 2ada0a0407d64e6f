"""Acceptance of n-gram speculation, replayed from recorded answers: no engine, no GPU, exact per step.

A transcript is the token ids of one request: the prompt, then the answer. An n-gram proposer looks only at the tokens
so far, and a draft token is accepted exactly when it equals the token that the model emitted. So a recorded answer says
which drafts would have been accepted, whether it is greedy or was sampled at the production temperature (a rejected
draft is never the token emitted in its place).

Two rules, by the runner that will serve:

- `v1` (V1 runner, CPU builds): the EARLIEST match of the longest n in [min, max] in prompt + answer so far. A step
  drafts 0..k tokens: those that follow the match, up to the last token known.
- `v2` (V2 runner, the default on GPUs): the LATEST match of the longest n. Every step has k drafts; a slot without a
  token, and every slot of a step without a match, holds the last sampled token, which is verified like any other.

The index. A position t means "the first t tokens are known". For each order n, the n-gram that ends at t belongs to a
class, named by the earliest position where that n-gram ends. Going from n - 1 to n, its class follows from the class of
its last n - 1 tokens and one more token on the left: mostly by comparing that token with the one at the representative,
else by one hash look-up. A position adds at most one entry to the hash table, because once an n-gram is new, every
longer one is. The class IS the earliest match; the latest match is the class's last member. So all settings of a grid
share one index, O(max) per position, and a setting's walk reads one entry per step and compares only what it drafts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from scripts.json_files import InputError, kind_of

SEMANTICS = ("v1", "v2")
# What each rule has been compared with; printed beside every result that rests on it.
CHECKED = {
    "v1": "compared with the engine's own proposer (tests/engine)",
    "v2": "compared with the engine's own kernel on a GPU (0.32's, one H200: benchmarks/results/gpu/kernel.json)",
}
LARGEST = 255
TOKEN_LIMIT = 2**31
KEYS = ("id", "class", "prompt_token_ids", "output_token_ids")

Tokens = npt.NDArray[np.int32]
Small = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """One point of the grid: at most `k` drafts (v2: always k) after an n-gram of `min` to `max` tokens."""

    k: int
    min: int
    max: int

    def __str__(self) -> str:
        return f"k={self.k} min={self.min} max={self.max}"


@dataclass(frozen=True)
class Rule:
    """How the engine that will run proposes: `semantics` of SEMANTICS; `max_model_len` in tokens, None: no limit."""

    semantics: str
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if self.semantics not in SEMANTICS:
            raise InputError(f"semantics: found {self.semantics!r}, expected {' or '.join(SEMANTICS)}")

    @property
    def latest(self) -> bool:
        """Whether the latest match counts, and every slot is filled."""
        return self.semantics == "v2"

    @property
    def limit(self) -> int:
        """`max_model_len`, or a number that no transcript reaches."""
        return 2**62 if self.max_model_len is None else self.max_model_len


@dataclass(frozen=True)
class Transcript:
    """One recorded request: `tokens` is prompt then answer, shape (prompt + output,); `prompt` counts prompt tokens.

    `experts`: ids of the experts that the output tokens read, shape (tokens, layers, experts per token), where known.
    """

    id: str | int
    cls: str
    prompt: int
    tokens: Tokens
    experts: Tokens | None = None

    @property
    def outputs(self) -> int:
        """Recorded output tokens. The first comes from the prefill, the others from decode steps."""
        return len(self.tokens) - self.prompt


@dataclass(frozen=True)
class Replayed:
    """One transcript under every setting of a grid.

    `drafted` and `accepted`, shape (sum of steps,), have one value per step; setting i has starts[i]:starts[i + 1].
    `drafted_steps[i, d]` counts the steps with d drafts, `accepted_steps[i, a]` those with a accepted; both have shape
    (settings, largest k + 1).
    """

    transcript: Transcript
    settings: tuple[Setting, ...]
    starts: Counts
    drafted: Small
    accepted: Small
    drafted_steps: Counts
    accepted_steps: Counts

    def steps(self, i: int) -> int:
        """Decode steps under setting i."""
        return int(self.starts[i + 1] - self.starts[i])

    def tokens_per_step(self, i: int) -> float | None:
        """Recorded tokens after the first, per step; None for an answer without decode steps."""
        steps = self.steps(i)
        return (self.transcript.outputs - 1) / steps if steps else None

    def rows(self) -> list[dict[str, Any]]:
        """One row per setting, as `predict.py replay --json` prints it."""
        return [
            {
                "id": self.transcript.id,
                "class": self.transcript.cls,
                "k": setting.k,
                "min": setting.min,
                "max": setting.max,
                "steps": self.steps(i),
                "drafted": self.drafted[self.starts[i] : self.starts[i + 1]].tolist(),
                "accepted": self.accepted[self.starts[i] : self.starts[i + 1]].tolist(),
                "tokens_per_step": self.tokens_per_step(i),
            }
            for i, setting in enumerate(self.settings)
        ]

    def rows_json(self) -> bytes:
        """The rows as JSON objects, a comma and a line feed between them; much faster than `json.dumps` of the rows."""
        head = f'{{"id":{json.dumps(self.transcript.id)},"class":{json.dumps(self.transcript.cls)},'
        buffer = np.empty(4 * int(self.starts[-1]), np.uint8)
        parts = []
        for i, setting in enumerate(self.settings):
            part = slice(self.starts[i], self.starts[i + 1])
            drafted = buffer[: _write_numbers(self.drafted[part], buffer)].tobytes()
            accepted = buffer[: _write_numbers(self.accepted[part], buffer)].tobytes()
            parts.append(
                head.encode()
                + b'"k":%d,"min":%d,"max":%d,' % (setting.k, setting.min, setting.max)
                + b'"steps":%d,"drafted":[%s],"accepted":[%s],' % (self.steps(i), drafted, accepted)
                + b'"tokens_per_step":%s}' % json.dumps(self.tokens_per_step(i)).encode()
            )
        return b",\n".join(parts)


@dataclass
class Total:
    """Sums over a class under one setting; the arrays, shape (k + 1,), count steps by drafts and by accepted."""

    setting: Setting
    requests: int = 0
    tokens: int = 0
    steps: int = 0
    drafted_steps: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    accepted_steps: Counts = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        self.drafted_steps = np.zeros(self.setting.k + 1, np.int64)
        self.accepted_steps = np.zeros(self.setting.k + 1, np.int64)

    def add(self, replayed: Replayed, i: int) -> None:
        """Add one request under setting i of its grid."""
        self.requests += 1
        self.tokens += max(0, replayed.transcript.outputs - 1)
        self.steps += replayed.steps(i)
        self.drafted_steps += replayed.drafted_steps[i, : self.setting.k + 1]
        self.accepted_steps += replayed.accepted_steps[i, : self.setting.k + 1]

    def row(self, cls: str | None) -> dict[str, Any]:
        """One row of the summary; class None is all classes together. Shares are None where nothing was counted."""
        drafted = _at_least(self.drafted_steps)
        accepted = _at_least(self.accepted_steps)
        drafting = drafted[0]
        return {
            "class": cls,
            "k": self.setting.k,
            "min": self.setting.min,
            "max": self.setting.max,
            "requests": self.requests,
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_per_step": self.tokens / self.steps if self.steps else None,
            "draft_step_share": drafting / self.steps if self.steps else None,
            "drafted": sum(drafted),
            "accepted": sum(accepted),
            "drafted_by_position": drafted,
            "accepted_by_position": accepted,
            "acceptance_by_position": [a / d if d else None for d, a in zip(drafted, accepted)],
        }


class Summary:
    """Totals per class and setting, and over all classes (class None, first in the rows)."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self.settings = tuple(settings)
        self._totals: dict[str | None, list[Total]] = {None: [Total(setting) for setting in self.settings]}

    def add(self, replayed: Replayed) -> None:
        """Add one request under every setting."""
        for cls in (None, replayed.transcript.cls):
            totals = self._totals.setdefault(cls, [Total(setting) for setting in self.settings])
            for i, total in enumerate(totals):
                total.add(replayed, i)

    def rows(self) -> list[dict[str, Any]]:
        """All classes together, then each class in the order of its first request; settings in the grid's order."""
        return [total.row(cls) for cls, totals in self._totals.items() for total in totals]


def _at_least(steps: Counts) -> list[int]:
    """Steps with at least 1, 2, ... k of what the histogram counts."""
    return [int(n) for n in steps[::-1].cumsum()[::-1][1:]]


def parse_grid(text: str) -> tuple[Setting, ...]:
    """Settings of a grid like "k=5 min=4 max=4; k=2 min=1 max=4". Raises InputError."""
    example = 'expected settings like "k=5 min=4 max=4; k=2 min=1 max=4"'
    settings: list[Setting] = []
    for number, part in enumerate(text.split(";"), 1):
        if not part.strip():
            continue
        where = f"grid, setting {number} ({part.strip()!r})"
        values: dict[str, int] = {}
        for word in part.split():
            name, _, value = word.partition("=")
            if name not in ("k", "min", "max"):
                raise InputError(f"{where}: found {word!r}; {example}")
            if name in values:
                raise InputError(f"{where}: {name} is given twice; name each of k, min, max once")
            if not (value.isascii() and value.isdigit()) or not 1 <= int(value[:9]) <= LARGEST:
                raise InputError(f"{where}: {name} found {value!r}, expected a whole number from 1 to {LARGEST}")
            values[name] = int(value)
        absent = [name for name in ("k", "min", "max") if name not in values]
        if absent:
            raise InputError(
                f"{where}: {' and '.join(absent)} not given; name k, min and max (an engine sets an "
                "absent min or max equal to the other one, or both to 5)"
            )
        setting = Setting(values["k"], values["min"], values["max"])
        if setting.min > setting.max:
            raise InputError(f"{where}: min found {setting.min}, expected at most max, which is {setting.max}")
        if setting in settings:
            raise InputError(f"{where}: the same setting is given twice; remove one")
        settings.append(setting)
    if not settings:
        raise InputError(f"grid: found no setting; {example}")
    return tuple(settings)


def read_transcripts(stream: Iterable[bytes], name: str, max_model_len: int | None = None) -> list[Transcript]:
    """Transcripts of the lines of a JSONL file; blank ones, and those of requests that failed (a text as `error`), are
    skipped. Errors (InputError) call the file `name`.
    """
    found = [
        transcript
        for number, line in enumerate(stream, 1)
        if line.strip() and (transcript := _transcript(line, f"{name}:{number}", max_model_len)) is not None
    ]
    if not found:
        raise InputError(
            f"{name}: found no transcript, expected one JSON object a line with {', '.join(KEYS)}; "
            "record some answers first"
        )
    return found


def _transcript(line: bytes, where: str, max_model_len: int | None) -> Transcript | None:
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON
        raise InputError(
            f"{where}: not JSON ({error}); expected one object a line with {', '.join(KEYS)}; "
            "is the file cut off, or not JSONL?"
        ) from error
    if not isinstance(entry, dict):
        raise InputError(f"{where}: found {kind_of(entry)}, expected an object with {', '.join(KEYS)}")
    if isinstance(entry.get("error"), str):
        return None
    absent = [key for key in KEYS if key not in entry]
    if absent:
        raise InputError(
            f"{where}: {', '.join(absent)} not found among {', '.join(sorted(entry)) or 'no keys'}; "
            f"expected {', '.join(KEYS)}"
        )
    if not isinstance(entry["id"], (str, int)) or isinstance(entry["id"], bool):
        raise InputError(f"{where}: id found {kind_of(entry['id'])}, expected a string or a whole number")
    if not isinstance(entry["class"], str):
        raise InputError(f"{where}: class found {kind_of(entry['class'])}, expected a string")
    prompt = _token_ids(entry["prompt_token_ids"], f"{where}: prompt_token_ids")
    output = _token_ids(entry["output_token_ids"], f"{where}: output_token_ids")
    if max_model_len is not None and len(prompt) + len(output) > max_model_len:
        raise InputError(
            f"{where}: found {len(prompt)} + {len(output)} tokens, expected at most max_model_len, "
            f"{max_model_len}: no server with that limit gave this answer; correct the limit"
        )
    experts = _experts(entry.get("routed_experts"), len(output), f"{where}: routed_experts")
    return Transcript(entry["id"], entry["class"], len(prompt), np.concatenate((prompt, output)), experts)


def _experts(value: Any, outputs: int, where: str) -> Tokens | None:
    if value is None:
        return None
    try:
        found = np.array(value)
    except ValueError:  # lists of unlike lengths
        found = np.array(None)
    # The last token was emitted and never computed.
    if (
        found.ndim != 3
        or found.dtype.kind != "i"
        or found.size == 0
        or found.min() < 0
        or outputs - len(found) not in (0, 1)
    ):
        raise InputError(
            f"{where}: found {kind_of(value)} of {len(value) if isinstance(value, list) else 'no'} tokens, expected "
            f"{outputs} or {outputs - 1}, each with a list per layer of equally many expert ids from 0"
        )
    return found.astype(np.int32)


def _token_ids(value: Any, where: str) -> Tokens:
    if not isinstance(value, list):
        raise InputError(f"{where} found {kind_of(value)}, expected a list of token ids; record with return_token_ids")
    # Types first: in an array, true would pass as 1 and 1.5 as 1.
    if set(map(type, value)) - {int} or (value and not 0 <= min(value) <= max(value) < TOKEN_LIMIT):
        i = next(i for i, token in enumerate(value) if type(token) is not int or not 0 <= token < TOKEN_LIMIT)
        raise InputError(
            f"{where}[{i}] found {json.dumps(value[i])[:40]}, expected a token id, a whole number from 0 "
            f"to {TOKEN_LIMIT - 1}"
        )
    return np.array(value, np.int32)


def replay(transcript: Transcript, settings: Sequence[Setting], rule: Rule) -> Replayed:
    """Replay one transcript under every setting.

    The first output token comes from the prefill. A step at position t drafts d tokens from the first t, a of them are
    accepted, and a + 1 tokens are emitted. `accepted` counts at most the tokens that the transcript still holds: the
    last draft may run past the end of the answer, and what the engine would have accepted there is thrown away with
    the request.

    Under a max_model_len the scheduler leaves room for the sampled token: a step at t gets at most
    max_model_len - t - 1 drafts (the v1 proposer alone would allow one more).
    """
    grid = np.array([(setting.k, setting.min, setting.max) for setting in settings], np.int64).reshape(-1, 3)
    parts = _replay(transcript.tokens, transcript.prompt + 1, grid, rule.latest, rule.limit - 1)
    return Replayed(transcript, tuple(settings), *parts)


def proposals(tokens: Tokens, setting: Setting, rule: Rule) -> tuple[Tokens, Tokens]:
    """What the proposer alone drafts after each token, before any scheduler: for comparing with an engine's own.

    Returns drafts, shape (tokens, k), -1 in unused slots, and counts, shape (tokens,); row t - 1 is for t known tokens.
    v1 cuts at max_model_len - t; the v2 kernel knows no such limit.
    """
    drafts, counts = _proposals(tokens, (setting.k, setting.min, setting.max), rule.latest, rule.limit)
    return drafts, counts


# Compiled code, cached beside this file or in the user's cache. One thread: a million tokens under 60 settings take
# less than a second, about as long as writing them down.


@numba.njit(cache=True)
def _index(tokens: Tokens, first: int, orders: int, latest: bool) -> Any:
    """Matches for positions first..len(tokens).

    Returns ends, int32, shape (positions, orders): where the matched n-gram of order n (column n - 1) ends, valid for
    n <= depth; and depth, uint8, shape (positions,): the longest n with a match, at most `orders`.
    """
    total = len(tokens)
    size = 1024
    while size < 2 * total:
        size *= 2
    mask = size - 1
    # A slot holds an order (high half) and the position of a representative. No n-gram ends at 0, so 0 is "empty".
    table = np.zeros(size, np.int64)
    classes = np.empty((total + 1, orders), np.int32)
    members = np.zeros((total + 1 if latest else 0, orders), np.int32)
    rows = max(0, total - first + 1)
    ends = np.empty((rows, orders), np.int32)
    depth = np.zeros(rows, np.uint8)
    for t in range(1, total + 1):
        row = t - first
        known = 0  # the class of the n - 1 last tokens
        for n in range(1, min(orders, t) + 1):
            left = tokens[t - n]
            if known >= n and tokens[known - n] == left:
                found = known
            else:
                mixed = (np.uint64(known) << np.uint64(32)) ^ np.uint64(left) ^ (np.uint64(n) << np.uint64(56))
                mixed *= np.uint64(0x9E3779B97F4A7C15)
                mixed ^= mixed >> np.uint64(29)
                mixed *= np.uint64(0xBF58476D1CE4E5B9)
                slot = np.int64(mixed >> np.uint64(32)) & mask
                found = 0
                while table[slot] != 0:
                    at = table[slot] & 0xFFFFFFFF
                    if table[slot] >> 32 == n and tokens[at - n] == left and (n == 1 or classes[at, n - 2] == known):
                        found = at
                        break
                    slot = (slot + 1) & mask
                if found == 0:
                    table[slot] = (np.int64(n) << 32) | t
                    break
            classes[t, n - 1] = found
            match = found
            if latest:
                if members[found, n - 1] != 0:
                    match = members[found, n - 1]
                members[found, n - 1] = t
            if row >= 0:
                ends[row, n - 1] = match
                depth[row] = n
            known = found
    return ends, depth


@numba.njit(cache=True)
def _match(ends: Any, depth: Any, row: int, low: int, high: int) -> int:
    """Where the longest matching n-gram with low <= n <= high ends, or 0."""
    n = min(int(depth[row]), high)
    return int(ends[row, n - 1]) if n >= low else 0


@numba.njit(cache=True)
def _slots(k: int, t: int, end: int, latest: bool) -> int:
    """Drafts of a step at t whose match ends at `end` (0: no match)."""
    if latest:
        return k
    return min(k, t - end) if end else 0


@numba.njit(cache=True)
def _draft(tokens: Tokens, t: int, end: int, j: int) -> int:
    """Draft j of a step at t: what follows the match, else the last sampled token."""
    return int(tokens[end + j] if end and end + j < t else tokens[t - 1])


@numba.njit(cache=True)
def _replay(tokens: Tokens, first: int, grid: Counts, latest: bool, limit: int) -> Any:
    """Fields starts..accepted_steps of Replayed; `first` is the first position that drafts, no draft passes `limit`."""
    total = len(tokens)
    orders = 1
    width = 0
    for i in range(len(grid)):
        orders = max(orders, grid[i, 2])
        width = max(width, grid[i, 0])
    ends, depth = _index(tokens, first, orders, latest)
    room = len(grid) * max(0, total - first)
    drafted = np.empty(room, np.uint8)
    accepted = np.empty(room, np.uint8)
    starts = np.zeros(len(grid) + 1, np.int64)
    drafted_steps = np.zeros((len(grid), width + 1), np.int64)
    accepted_steps = np.zeros((len(grid), width + 1), np.int64)
    step = 0
    for i in range(len(grid)):
        k, low, high = grid[i]
        t = first
        while t < total:
            end = _match(ends, depth, t - first, low, high)
            drafts = max(0, min(_slots(k, t, end, latest), limit - t))
            hits = 0
            while hits < drafts and t + hits < total and _draft(tokens, t, end, hits) == tokens[t + hits]:
                hits += 1
            drafted[step] = drafts
            accepted[step] = hits
            drafted_steps[i, drafts] += 1
            accepted_steps[i, hits] += 1
            step += 1
            t += hits + 1
        starts[i + 1] = step
    return starts, drafted[:step], accepted[:step], drafted_steps, accepted_steps


@numba.njit(cache=True)
def _proposals(tokens: Tokens, setting: tuple[int, int, int], latest: bool, limit: int) -> Any:
    k, low, high = setting
    total = len(tokens)
    ends, depth = _index(tokens, 1, high, latest)
    drafts = np.full((total, k), -1, np.int32)
    counts = np.zeros(total, np.int32)
    for t in range(1, total + 1):
        end = _match(ends, depth, t - 1, low, high)
        slots = _slots(k, t, end, latest)
        counts[t - 1] = slots if latest else max(0, min(slots, limit - t))
        for j in range(counts[t - 1]):
            drafts[t - 1, j] = _draft(tokens, t, end, j)
    return drafts, counts


@numba.njit(cache=True)
def _write_numbers(values: Small, buffer: Small) -> int:
    """Write values in decimal, commas between, into the buffer (4 bytes a value); returns the bytes written."""
    ten, hundred, zero, comma = 10, 100, ord("0"), ord(",")
    at = 0
    for i in range(len(values)):
        value = int(values[i])
        if i:
            buffer[at] = comma
            at += 1
        if value >= hundred:
            buffer[at] = zero + value // hundred
            at += 1
        if value >= ten:
            buffer[at] = zero + value // ten % ten
            at += 1
        buffer[at] = zero + value % ten
        at += 1
    return at
