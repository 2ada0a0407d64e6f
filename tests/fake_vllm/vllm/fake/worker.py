"""The worker as far as an extension sees it: its class mixed in, its drafting, and calls by name (/collective_rpc)."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

from vllm.fake.speculative import SpeculativeConfig
from vllm.v1.spec_decode.ngram_proposer import NgramProposer


class Worker:
    """One rank."""

    use_v2_model_runner = False

    def __init__(self, spec: SpeculativeConfig | None):
        self.model_runner = SimpleNamespace(drafter=None)
        if spec is not None and spec.method.startswith("ngram"):
            low, high = spec.prompt_lookup_min, spec.prompt_lookup_max
            self.model_runner.drafter = NgramProposer(low, high, spec.num_speculative_tokens)


def make(spec: SpeculativeConfig | None, extension: str | None) -> Any:
    """A worker with the class that `extension` names mixed in. Import errors end the load, as in the real engine."""
    kind: Any = Worker
    if extension:
        module, _, name = extension.rpartition(".")
        kind = type("Worker", (Worker, getattr(importlib.import_module(module), name)), {})
    return kind(spec)


def has_endpoints() -> bool:
    """Whether the development endpoints are there."""
    return os.environ.get("VLLM_SERVER_DEV_MODE", "0") == "1"
