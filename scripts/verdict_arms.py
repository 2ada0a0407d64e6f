"""One arm of a run, what the caller decides about the comparison, and the shape of a gate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scripts.verdict_intervals import DRAWS, Boot, BootSpread, Floats
from scripts.verdict_runs import Request, Run

SEED = 5


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
