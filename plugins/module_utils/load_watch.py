"""What a load is doing, from the engine's output and a clock: phase, percent, time left, and whether it still moves.

`LoadWatch` is fed raw output as it comes and never reads a clock itself. Progress is told from noise: a line that was
printed before, word for word, moves nothing (a waiting engine repeats itself for ever), a shard bar that counts up
does. Work that prints nothing is reported through `activity`; what it is worth depends on the phase, because a hung
collective spins the processor too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

from .log_text import Line, parse, split_lines
from .phases import (
    API,
    ARGUMENTS,
    COMPILE,
    CONFIG,
    DISTRIBUTED,
    GRAPHS,
    KV_CACHE,
    ORDER,
    PHASES,
    POST_LOAD,
    PROCESS,
    READY,
    WARMUP,
    WEIGHTS,
    Bar,
    Mark,
    mark_of,
)

# Seconds without progress after which a phase counts as stalled. NCCL's own watchdog takes 600 s to speak, a healthy
# rendezvous of 8 ranks well under a minute. A single torch.compile or autotune step was seen to take 37 minutes with
# the processor busy.
STALL_LIMITS_S: dict[str, float] = {
    PROCESS: 300.0,
    ARGUMENTS: 300.0,
    CONFIG: 600.0,
    DISTRIBUTED: 300.0,
    WEIGHTS: 600.0,
    POST_LOAD: 900.0,
    COMPILE: 900.0,
    KV_CACHE: 600.0,
    GRAPHS: 600.0,
    WARMUP: 900.0,
    API: 300.0,
    READY: float("inf"),
}

_CHANGES_KEPT = 64
# Loads of a history that the time left is reckoned from.
RECENT_LOADS = 3

# What `activity(what)` is worth in a phase. "strong" counts like a new line; "weak" stretches the limit by
# WEAK_FACTOR and no more, since a spinning wait looks the same; what is not listed counts for nothing.
WEAK_FACTOR = 4.0
_EVIDENCE: dict[str, dict[str, str]] = {
    PROCESS: {"cpu": "strong", "disk": "strong", "gpu_memory": "strong"},
    ARGUMENTS: {"cpu": "strong", "disk": "strong", "gpu_memory": "strong"},
    CONFIG: {"cpu": "weak", "disk": "strong", "gpu_memory": "strong"},
    DISTRIBUTED: {"gpu_memory": "strong", "disk": "weak"},
    WEIGHTS: {"cpu": "weak", "disk": "strong", "gpu_memory": "strong"},
    POST_LOAD: {"cpu": "weak", "disk": "strong", "gpu_memory": "strong"},
    COMPILE: {"cpu": "strong", "disk": "strong", "gpu_memory": "strong"},
    KV_CACHE: {"cpu": "weak", "disk": "weak", "gpu_memory": "strong"},
    GRAPHS: {"cpu": "weak", "disk": "weak", "gpu_memory": "strong"},
    WARMUP: {"cpu": "strong", "disk": "strong", "gpu_memory": "strong"},
    API: {"cpu": "weak", "disk": "weak", "gpu_memory": "strong"},
    READY: {},
}

# Share of a load that each phase takes, in percent, for a host that has no history: large models on local disks. Only
# the percent is made from it, never a time.
_USUAL_SHARE: dict[str, float] = {
    PROCESS: 3,
    ARGUMENTS: 1,
    CONFIG: 3,
    DISTRIBUTED: 3,
    WEIGHTS: 60,
    POST_LOAD: 5,
    COMPILE: 10,
    KV_CACHE: 2,
    GRAPHS: 8,
    WARMUP: 3,
    API: 2,
    READY: 0,
}

# A load passes these twice: a draft model is loaded after the target, graphs are captured after the first warm-up.
_MAY_GO_BACK = {(POST_LOAD, WEIGHTS), (WARMUP, GRAPHS)}

# Printed again and again by an engine that waits; a number in it may change.
_HEARTBEATS = (
    "No available shared memory broadcast block",
    "core engine proc(s) to start",
    "core engine proc(s) to connect",
    "Waiting for READY message",
    "Waiting for creating a placement group",
    '"GET /health',
    '"GET /ping',
    '"GET /metrics',
    "Avg prompt throughput",
    "retrying",
)
HISTORY_KEPT = 5
_SEEN_KEPT = 4096
_PARTIAL_KEPT = 65536
_LONGEST_S = 1e7  # no load takes months; such a number is damage


class LoadWatch:
    """Follows one load. `history` is what `merge_history` returned (or one `record`), `now_s` a monotonic clock's
    reading.

    `stall_limits_s` replaces single limits of `STALL_LIMITS_S`; an unknown phase name there is a ValueError.
    """

    def __init__(
        self, history: Mapping[str, Any] | None, now_s: float, stall_limits_s: Mapping[str, float] | None = None
    ) -> None:
        unknown = sorted(set(stall_limits_s or {}) - set(PHASES))
        if unknown:
            raise ValueError(f"stall_limits_s: found phase {unknown[0]!r}, expected one of {', '.join(PHASES)}")
        self._limits = {**STALL_LIMITS_S, **(stall_limits_s or {})}
        self._history = typical_load(history)
        self._started_s = now_s
        self._phase = PROCESS
        self._phase_since_s = now_s
        self._spent: dict[str, float] = {}
        self._partial = ""
        self._bar: Bar | None = None
        self._bar_first: tuple[float, int] | None = None
        self._bar_last_s = now_s
        self._strong_s = now_s
        self._weak_s = now_s
        self._what_moved = "the start"
        self._last_line = ""
        self._seen: dict[str, None] = {}
        self._percent = 0.0
        self._ready_s: float | None = None
        self._changes: dict[str, None] = {}
        self._draft = False

    def feed(self, text: str, now_s: float) -> None:
        """Take raw output: any cut of it, carriage returns, escape codes and lines of several ranks included."""
        text = self._partial + text
        cut = max(text.rfind("\n"), text.rfind("\r")) + 1
        self._partial = text[cut:]
        if len(self._partial) > _PARTIAL_KEPT:  # a writer that never ends its line must not grow this process
            self._partial = self._partial[-_PARTIAL_KEPT:]
        for raw in split_lines(text[:cut]):
            if raw and not raw.isspace():
                self._line(parse(raw), now_s)

    def _line(self, line: Line, now_s: float) -> None:
        message = line.message
        mark = mark_of(line)
        if mark:
            self._enter(mark, message, now_s)
        if mark and mark.bar:
            moved = self._count(mark.bar, now_s)
        else:
            moved = self._is_new(message)
            if moved:
                self._last_line = line.shown.strip()[:300]
            change = change_of(line)
            # The engine says it twice, once with the reason and once per process without.
            few = len(self._changes) < _CHANGES_KEPT
            if change and few and not any(known.startswith(change) for known in self._changes):
                self._changes.setdefault(change)
        if moved:
            self._strong_s = now_s
            self._what_moved = "output"

    def _is_new(self, message: str) -> bool:
        if not message.strip() or any(text in message for text in _HEARTBEATS):
            return False
        key = message[:200]
        if key in self._seen:
            return False
        if len(self._seen) >= _SEEN_KEPT:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = None
        return True

    def _enter(self, mark: Mark, message: str, now_s: float) -> None:
        new = mark.phase
        if "Loading drafter model" in message:
            self._draft = True
        if new == self._phase:
            return
        if ORDER[new] < ORDER[self._phase] and (self._phase, new) not in _MAY_GO_BACK:
            return
        self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now_s - self._phase_since_s
        self._phase = new
        self._phase_since_s = now_s
        self._bar = self._bar_first = None
        if new == READY and self._ready_s is None:
            self._ready_s = now_s

    def _count(self, bar: Bar, now_s: float) -> bool:
        old = self._bar
        if old and old.what == bar.what and old.total == bar.total and bar.n <= old.n:
            return False  # another rank's bar, or the same state drawn again
        if not old or old.what != bar.what or old.total != bar.total:
            self._bar_first = (now_s, bar.n)
        self._bar = bar
        self._bar_last_s = now_s
        return True

    def activity(self, now_s: float, what: str) -> None:
        """Evidence of work besides the output: `what` is "cpu", "disk" or "gpu_memory" (anything else is a
        ValueError)."""
        if what not in {"cpu", "disk", "gpu_memory"}:
            raise ValueError(f"activity: found {what!r}, expected cpu, disk or gpu_memory")
        worth = _EVIDENCE[self._phase].get(what)
        if worth == "strong":
            self._strong_s = now_s
        elif worth == "weak":
            self._weak_s = now_s
        if worth:
            self._what_moved = {"cpu": "processor time", "disk": "disk reads", "gpu_memory": "GPU memory"}[what]

    def _within(self) -> float:
        """Part of the current phase that is done, 0 to 1, where its steps are counted."""
        return self._bar.n / self._bar.total if self._bar else 0.0

    def _bar_left_s(self) -> float | None:
        """Seconds until the bar is full at the rate since its first state; None before two states were seen."""
        if not self._bar or not self._bar_first:
            return None
        first_s, first_n = self._bar_first
        steps, spent = self._bar.n - first_n, self._bar_last_s - first_s
        if steps <= 0 or spent <= 0:
            return None
        return spent / steps * (self._bar.total - self._bar.n)

    def _left(self, now_s: float) -> tuple[float | None, str | None]:
        if self._phase == READY:
            return 0.0, None
        rate = self._bar_left_s()
        if rate is not None:
            rate = max(0.0, rate - (now_s - self._bar_last_s))
        if self._history:
            later = sum(seconds for name, seconds in self._history.items() if ORDER[name] > ORDER[self._phase])
            if rate is None:
                usual = self._history.get(self._phase, 0.0)
                rate = max(usual * (1 - self._within()) if self._bar else usual - (now_s - self._phase_since_s), 0.0)
            return rate + later, "history"
        if rate is not None and self._phase == WEIGHTS:
            return rate, "shard rate"
        return None, None

    def _percent_done(self, now_s: float) -> float:
        if self._phase == READY:
            return 100.0
        shares = self._history or _USUAL_SHARE
        whole = sum(shares.values()) or 1.0
        done = sum(share for name, share in shares.items() if ORDER[name] < ORDER[self._phase])
        share = shares.get(self._phase, 0.0)
        within = self._within()
        if not self._bar and self._history and share > 0:
            within = min((now_s - self._phase_since_s) / share, 0.95)
        # Never backwards, never full before the server is up.
        self._percent = max(self._percent, min(99.0, 100.0 * (done + share * within) / whole))
        return self._percent

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """State of the load now: see docs/diagnosis.md for every key. Seconds everywhere; `remaining_s` None = not
        known."""
        left, left_from = self._left(now_s)
        limit = self._limits[self._phase]
        quiet = max(0.0, now_s - max(self._strong_s, self._weak_s))
        no_progress = max(0.0, now_s - self._strong_s)
        stalled = quiet > limit or no_progress > limit * WEAK_FACTOR
        return {
            "phase": self._phase,
            "percent": round(self._percent_done(now_s), 1),
            "elapsed_s": round((self._ready_s if self._ready_s is not None else now_s) - self._started_s, 1),
            "remaining_s": None if left is None else round(left, 1),
            "remaining_from": left_from,
            "detail": self._detail(left_from),
            "phases": [{"name": name, "seconds": round(seconds, 1)} for name, seconds in self._seconds(now_s)],
            "quiet_s": round(quiet, 1),
            "stalled": stalled,
            "evidence": self._evidence(now_s, quiet, no_progress, limit, stalled),
        }

    def _detail(self, left_from: str | None) -> str:
        parts = []
        if self._bar:
            noun = {WEIGHTS: "shards", GRAPHS: "graphs"}.get(self._phase, "steps")
            model = " of the draft model" if self._draft and self._phase == WEIGHTS else ""
            parts.append(f"{self._bar.n} of {self._bar.total} {noun}{model}")
        if self._phase != READY and not self._history:
            parts.append(
                "time left for the weights only, no earlier load on this host"
                if left_from
                else "no earlier load on this host to tell the time left from"
            )
        return "; ".join(parts)

    def _evidence(self, now_s: float, quiet: float, no_progress: float, limit: float, stalled: bool) -> str:
        last = f"; last line: {self._last_line}" if self._last_line else "; no line printed yet"
        if not stalled:
            return f"{self._what_moved} moved {quiet:.0f} s ago (phase {self._phase}, limit {limit:.0f} s)" + last
        if quiet > limit:
            silent = "output, " + ", ".join(_EVIDENCE[self._phase]) if _EVIDENCE[self._phase] else "output"
            return f"nothing moved ({silent}) for {quiet:.0f} s in phase {self._phase}, limit {limit:.0f} s{last}"
        return (
            f"{self._what_moved} moves, but no new output for {no_progress:.0f} s in phase {self._phase}, "
            f"limit {limit * WEAK_FACTOR:.0f} s (a spinning wait looks like this){last}"
        )

    def _seconds(self, now_s: float) -> Sequence[tuple[str, float]]:
        spent = dict(self._spent)
        if self._phase != READY:
            spent[self._phase] = spent.get(self._phase, 0.0) + now_s - self._phase_since_s
        return [(name, spent[name]) for name in PHASES if name in spent]

    def record(self) -> dict[str, Any]:
        """Phase times of a finished load: ``{"finished", "total_s", "phases": {name: seconds}, "changes": [...]}``.

        `finished` is False (and `total_s` None) until the server was up; such a record must not enter the history.
        """
        total = None if self._ready_s is None else round(self._ready_s - self._started_s, 1)
        return {
            "finished": total is not None,
            "total_s": total,
            "phases": {name: round(self._spent[name], 1) for name in PHASES if name in self._spent},
            "changes": self.changes(),
        }

    def changes(self) -> list[str]:
        """What the engine changed at start without being asked, one sentence each, in the order in which it said so."""
        return list(self._changes)


def merge_history(history: Mapping[str, Any] | None, record: Mapping[str, Any]) -> dict[str, Any]:
    """The history with a finished load added; the last `HISTORY_KEPT` are kept, an unfinished one changes nothing."""
    loads = [load for load in (history or {}).get("loads", []) if isinstance(load, Mapping)]
    if record.get("finished"):
        loads.append({"total_s": record["total_s"], "phases": dict(record["phases"])})
    return {"loads": loads[-HISTORY_KEPT:]}


def typical_load(history: Mapping[str, Any] | None) -> dict[str, float]:
    """Seconds of each phase in a usual load, from a history (or one record); {} where it holds nothing usable.

    The lower median of the last three: a cold first load, which compiles for minutes, must not double the time left of
    the second one.

    A history file is read after crashes and by other releases, so whatever is not a number of seconds is skipped.
    """
    if not isinstance(history, Mapping):
        return {}
    loads = history.get("loads", [history])
    if not isinstance(loads, (list, tuple)):
        return {}
    seen: dict[str, list[float]] = {}
    for load in loads[-RECENT_LOADS:]:
        phases = load.get("phases") if isinstance(load, Mapping) else None
        if not isinstance(phases, Mapping):
            continue
        for name in PHASES:
            seconds = phases.get(name)
            if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 <= seconds < _LONGEST_S:
                seen.setdefault(name, []).append(float(seconds))
    return {name: median_low(values) for name, values in seen.items()}


# What an engine says when it serves something else than it was asked for. Patterns over the message; group 1 and 2
# fill the text.
_CHANGES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (
            r"Async scheduling not supported with (\S+)-based spec",
            "async scheduling off: not supported with {0} speculation",
        ),
        (r"Async(?:hronous)? scheduling (?:is|will be) disabled(?: because (.{1,120}))?", "async scheduling off: {0}"),
        (r"Async scheduling is not compatible with (.{1,80}?) and will be disabled", "async scheduling off: {0}"),
        (
            r"Model Runner V2 (?:does not yet support|requires) (.{1,120}?); using the V1 model runner",
            "model runner V1: V2 lacks {0}",
        ),
        (r"Using V2 Model Runner", "model runner V2"),
        (
            r"(.{0,80}?)[Oo]verriding cudagraph_mode(?: from)?(?: (\S+))? to (\w+)",
            "cudagraph mode {2} instead of {1}: {0}",
        ),
        (
            r"Cudagraph mode (\S+) is not compatible with (.{1,60}?)\. Overriding to (\w+)",
            "cudagraph mode {2} instead of {0}: {1}",
        ),
        (r"Setting cudagraph_mode to (\w+)", "cudagraph mode {0}"),
        (r"(?:Skipping CUDA graph capture|Cudagraph is disabled|Enforce eager set)", "CUDA graphs off"),
        (r"CUDA graph is not supported for (.{1,60}?),? ?fall", "CUDA graphs off: not supported for {0}"),
        (r"Truncating max_cudagraph_capture_size to (\d+)", "largest captured graph cut to {0}"),
        (r"Custom allreduce is disabled because (.{1,90}?)(?:\.|$)", "custom all-reduce off: {0}"),
        (r"Auto-fit max_model_len: reduced from (\d+) to (\d+)", "max_model_len {1} instead of {0}"),
        (
            r"max_num_scheduled_tokens is set to (\d+) based on the spec",
            "max_num_scheduled_tokens {0} because of speculation",
        ),
        (r"Defaulted num_speculative_tokens to (\d+)", "num_speculative_tokens {0} by default"),
        (r"Casting (torch\.\w+) to (torch\.\w+)", "dtype {1} instead of {0}"),
        (r"(?:Hybrid KV cache manager is disabled|Turning off hybrid kv cache manager)", "hybrid KV cache manager off"),
        (
            r"min_p and logit_bias parameters won't work with spec",
            "min_p and logit_bias refused because of speculation",
        ),
        (r"Dynamic speculative decoding is not supported with data par", "dynamic speculation off: data parallel"),
        (
            r"Default vLLM sampling parameters have been overridden by .{1,60}?: `(.{1,120}?)`",
            "sampling defaults from the model: {0}",
        ),
        (r"Falling back to (.{1,60}?)(?:\.| for |$)", "fallback: {0}"),
        (
            r"Overriding draft model max(?:_position_embeddings|.model.len) from (\d+) to (?:.*?\()?(\d+)",
            "draft max_model_len {1} instead of {0}",
        ),
    )
)
_CHANGE_WORDS = (
    "scheduling",
    "Runner",
    "cudagraph",
    "Cudagraph",
    "CUDA graph",
    "eager",
    "allreduce",
    "Auto-fit",
    "Defaulted",
    "Casting",
    "ybrid",
    "logit_bias",
    "speculative",
    "overridden",
    "Falling back",
    "verriding",
)
_NGRAM = re.compile(r"'method': '(?:ngram|ngram_gpu)'[^}]*\}")
_LOOKUP = re.compile(r"'prompt_lookup_(min|max)': (\d+)")
_GRAPH_MODE = re.compile(r"'?cudagraph_mode'?[:=] ?<CUDAGraphMode\.(\w+)")


def change_of(line: Line) -> str | None:
    """The sentence for a line in which the engine says that it departs from its arguments, or None."""
    message = line.message
    if line.level in {"ERROR", "CRITICAL"}:
        return None
    if "prompt_lookup_" in message and "non-default args" in message:
        return _lookup_change(message)
    if "cudagraph_mode" in message and "LLM engine (v" in message:
        match = _GRAPH_MODE.search(message)
        return f"cudagraph mode {match[1]}" if match else None
    if not any(word in message for word in _CHANGE_WORDS):
        return None
    for pattern, text in _CHANGES:
        match = pattern.search(message)
        if match:
            return (
                text.format(*((group or "").strip(" .;,") for group in match.groups()))
                .rstrip(": ")
                .replace("instead of : ", ": ")
            )
    return None


def _lookup_change(message: str) -> str | None:
    ngram = _NGRAM.search(message)
    bounds = dict(_LOOKUP.findall(ngram[0])) if ngram else {}
    if len(bounds) != 1:
        return None
    given, value = next(iter(bounds.items()))
    other = "max" if given == "min" else "min"
    return f"prompt_lookup_{other} {value}, copied from prompt_lookup_{given}: only {value}-grams are looked up"
