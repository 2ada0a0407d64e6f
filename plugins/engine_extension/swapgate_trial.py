"""Change n-gram drafting of a running engine between requests: what a trial variant is for.

The engine mixes `TrialWorker` into its worker (`--worker-extension-cls swapgate_trial.TrialWorker`) and calls its
methods by name: POST /collective_rpc {"method": "swapgate_set", "kwargs": {"k": 3, "min": 3, "max": 3}}. Only the V1
runner's `ngram` proposer can be changed: elsewhere the number of drafts is part of graphs or kernels, and the call is
refused.
"""

from __future__ import annotations

import inspect
from typing import Any

PROPOSER = "vllm.v1.spec_decode.ngram_proposer"


class TrialError(ValueError):
    """The setting cannot be had on this engine; nothing was changed."""


def _number(name: str, value: Any) -> int:
    try:
        if isinstance(value, (bool, float)):
            raise TypeError
        return int(value)
    except (TypeError, ValueError):
        raise TrialError(f"trial: {name} is {value!r}, expected a whole number") from None


def proposer_of(worker: Any) -> Any:
    """The n-gram proposer of a worker; TrialError says why there is none whose setting can change."""
    runner = getattr(worker, "model_runner", None)
    if getattr(worker, "use_v2_model_runner", False) or type(runner).__module__.startswith("vllm.v1.worker.gpu."):
        raise TrialError(
            "trial: the engine runs model runner V2, where k is fixed by graphs and scheduler. Load each "
            "setting as a variant of its own, or set VLLM_USE_V2_MODEL_RUNNER=0 in the trial variant's env"
        )
    proposer = getattr(runner, "drafter", None)
    if proposer is None or PROPOSER not in {kind.__module__ for kind in type(proposer).__mro__}:
        found = "no proposer" if proposer is None else type(proposer).__name__
        raise TrialError(f"trial: the engine drafts with {found}, expected the n-gram proposer of the V1 runner")
    return proposer


class Drafting:
    """The setting of one proposer, in force between two calls of `change`."""

    def __init__(self, proposer: Any) -> None:
        self.proposer = proposer
        self.loaded_k = int(proposer.k)
        self.now = {"k": self.loaded_k, "min": int(proposer.min_n), "max": int(proposer.max_n)}
        self.batch_propose = proposer.batch_propose
        # From about 0.30 the scheduler hands k to each call; before, the proposer's own k counts.
        self.told_k = "k" in inspect.signature(self.batch_propose).parameters
        proposer.batch_propose = self.propose

    def propose(self, num_requests: int, *rest: Any, **named: Any) -> list[list[int]]:
        """The engine's batch_propose with the k in force; no drafts where that is 0."""
        k = self.now["k"]
        if not k:
            return [[] for _ in range(num_requests)]
        if self.told_k:
            if "k" in named:
                named["k"] = min(named["k"], k)
            else:
                rest = (*rest[:-1], min(rest[-1], k))
        drafts: list[list[int]] = self.batch_propose(num_requests, *rest, **named)
        return drafts

    def change(self, k: Any, low: Any, high: Any) -> dict[str, int]:
        """Put a setting in force; ``low`` and ``high`` of None stay. TrialError where it is out of range."""
        asked = {
            "k": _number("k", k),
            "min": self.now["min"] if low is None else _number("min", low),
            "max": self.now["max"] if high is None else _number("max", high),
        }
        if not 0 <= asked["k"] <= self.loaded_k:
            raise TrialError(f"trial: k is {asked['k']}, expected 0 (off) to {self.loaded_k}, the k that was loaded")
        if not 1 <= asked["min"] <= asked["max"]:
            raise TrialError(f"trial: min is {asked['min']} and max {asked['max']}, expected 1 <= min <= max")
        self.now = asked
        self.proposer.min_n, self.proposer.max_n = asked["min"], asked["max"]
        if not self.told_k and asked["k"]:
            self.proposer.k = asked["k"]
        return dict(asked)


class TrialWorker:
    """Mixed into the engine's worker. Each rank answers with the setting in force: {"k", "min", "max"}."""

    def swapgate_set(self, k: Any, min: Any = None, max: Any = None) -> dict[str, int]:
        """Use this setting from the next step on; k=0 drafts nothing. A TrialError becomes status 500 with its text."""
        return self.swapgate_drafting().change(k, min, max)

    def swapgate_get(self) -> dict[str, int]:
        """The setting in force."""
        return dict(self.swapgate_drafting().now)

    def swapgate_drafting(self) -> Drafting:
        """This worker's one `Drafting`, made at the first call."""
        made: Drafting | None = self.__dict__.get("swapgate_made")
        if made is None:
            made = self.__dict__["swapgate_made"] = Drafting(proposer_of(self))
        return made
