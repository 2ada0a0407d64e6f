"""A streamed answer of the engine's chat API, read token-exactly: token ids, times, and what speculation did per step.

Pure: lines and the moments at which they came go in. How many tokens a chunk carries is the engine's choice, so that
nothing here is counted in chunks except the gaps between them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

JsonDict = dict[str, Any]

PREFIX = "data:"
END = "[DONE]"
SHARES = (50, 95, 99)


class StreamError(ValueError):
    """A stream that cannot be used: an error event, a cut, or token ids that do not add up. The text says which."""


def percentile(values: Sequence[float], share: float) -> float:
    """The ``share`` percent point, linear between neighbours. ValueError without a value."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def gaps_of(times: Sequence[float]) -> dict[str, float] | None:
    """{"p50", "p95", "p99"}: seconds between neighbours of ``times``; None with fewer than two."""
    gaps = [later - sooner for sooner, later in zip(times, times[1:])]
    return {f"p{share}": percentile(gaps, share) for share in SHARES} if gaps else None


def decode_steps(tokens: int, accepted: int, chunks: int) -> int:
    """The engine's steps after the first token of an answer that came in so many ``chunks``.

    Each step yields one token and those of its draft that were accepted. The last draft may reach past the end of the
    answer, which makes the difference too small; a chunk never holds less than a step.
    """
    return max(tokens - 1 - accepted, chunks - 1, 0)


class AnswerStream:
    """Takes the lines of one answer as they come; ``first_at`` and ``last_at`` are when tokens came first and last."""

    def __init__(self) -> None:
        self.prompt_token_ids: list[int] = []
        self.output_token_ids: list[int] = []
        self.text = ""
        self.reasoning = ""
        self.finish_reason: str | None = None
        self.times: list[float] = []
        self.usage: JsonDict | None = None
        self.speculation: JsonDict | None = None
        self.ended = False

    @property
    def first_at(self) -> float | None:
        """When the first token came."""
        return self.times[0] if self.times else None

    def feed(self, line: str, at: float) -> None:
        """One line of the stream, which came at ``at``. StreamError for an error event or what is no JSON."""
        line = line.strip()
        if not line.startswith(PREFIX):  # blank lines between events, comments that keep the connection open
            return
        data = line[len(PREFIX) :].strip()
        if data == END:
            self.ended = True
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise StreamError(f"an event that is no JSON: {data:.120}") from error
        if not isinstance(event, dict) or "error" in event:
            said = event.get("error") if isinstance(event, dict) else event
            raise StreamError(f"the engine said: {(said or {}).get('message') if isinstance(said, dict) else said}")
        self.prompt_token_ids = event.get("prompt_token_ids") or self.prompt_token_ids
        for choice in event.get("choices") or []:
            self._choice(choice, at)
        self.usage = event.get("usage") or self.usage
        self.speculation = (event.get("metrics") or {}).get("speculative_decoding") or self.speculation

    def _choice(self, choice: JsonDict, at: float) -> None:
        self.prompt_token_ids = choice.get("prompt_token_ids") or self.prompt_token_ids
        delta = choice.get("delta") or {}
        self.text += delta.get("content") or ""
        self.reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        ids = choice.get("token_ids") or []
        if ids:
            self.output_token_ids += ids
            self.times.append(at)

    def result(self, started: float) -> JsonDict:
        """{"prompt_token_ids", "output_token_ids", "text", "reasoning": str | null, "finish_reason", "ttft_s",
        "decode_s": last token - first, "e2e_s", "output_tokens", "itl_s": gaps between chunks | null,
        "drafted", "accepted": [per step that drafted] | null, "steps": n after the first token | null}, seconds since
        ``started``.

        StreamError when the stream was cut, or its token ids are not as many as the engine counted.
        """
        counted = (self.usage or {}).get("completion_tokens")
        if not self.ended or self.finish_reason is None:
            raise StreamError(f"the stream was cut after {len(self.output_token_ids)} tokens")
        if counted != len(self.output_token_ids):
            raise StreamError(
                f"found {len(self.output_token_ids)} token ids, expected the {counted} that the engine counted; is the "
                "engine too old for return_token_ids, or does it hide those of its reasoning?"
            )
        if not self.times:
            raise StreamError("an answer without a token")
        if not self.prompt_token_ids:
            raise StreamError("no ids of the prompt's tokens; is the engine too old for return_token_ids?")
        told = self.speculation or {}
        drafted, accepted = told.get("per_step_drafted"), told.get("per_step_accepted")
        if told.get("num_spec_steps") == 0:  # nothing drafted: the engine leaves empty arrays out
            drafted, accepted = [], []
        total = told.get("num_accepted_draft_tokens")
        tokens, chunks = len(self.output_token_ids), len(self.times)
        return {
            "prompt_token_ids": self.prompt_token_ids,
            "output_token_ids": self.output_token_ids,
            "text": self.text,
            "reasoning": self.reasoning or None,
            "finish_reason": self.finish_reason,
            "ttft_s": self.times[0] - started,
            "decode_s": self.times[-1] - self.times[0],
            "e2e_s": self.times[-1] - started,
            "output_tokens": tokens,
            "itl_s": gaps_of(self.times),
            "drafted": drafted,
            "accepted": accepted,
            "steps": None if total is None else decode_steps(tokens, total, chunks),
        }
