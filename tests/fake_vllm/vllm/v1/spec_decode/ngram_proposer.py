"""The n-gram proposer, under the real engine's name and with its attributes, for worker extensions that look for it."""

from __future__ import annotations

from typing import Any

from vllm.fake import text


class NgramProposer:
    """Drafts of one request a call."""

    def __init__(self, low: int, high: int, count: int):
        self.min_n, self.max_n, self.k = low, high, count

    def batch_propose(
        self, num_requests: int, valid_ngram_requests: list[int], num_tokens_no_spec: Any, token_ids_cpu: Any, k: int
    ) -> list[list[int]]:
        """At most k drafts for each request."""
        return [text.ngram_drafts(token_ids_cpu[at], self.min_n, self.max_n, k) for at in range(num_requests)]

    def drafts(self, tokens: list[int]) -> list[int]:
        """Drafts after these tokens."""
        return self.batch_propose(1, [0], [len(tokens)], [tokens], self.k)[0]
