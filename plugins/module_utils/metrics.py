"""The engine's Prometheus page, read for the few figures that swapgate acts on."""

from __future__ import annotations

import math
import re
from typing import Any

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_POSITION = re.compile("[0-9]{1,3}")

Sample = tuple[str, dict[str, str], float]


def parse(text: str) -> list[Sample]:
    """All samples as (name, labels, value); lines that are no samples are passed over."""
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            try:
                value = float(match.group(3))
            except ValueError:
                continue
            samples.append((match.group(1), dict(_LABEL.findall(match.group(2) or "")), value))
    return samples


def total(samples: list[Sample], name: str) -> float | None:
    """The sum of a metric over its labels, or None when the page does not have it, or no number for it."""
    values = [value for found, _, value in samples if found == name and math.isfinite(value)]
    return sum(values) if values else None


def load(samples: list[Sample]) -> dict[str, float | None]:
    """How busy the engine is: requests running and waiting, and every token that it has worked on so far."""
    tokens = [total(samples, "vllm:" + name) for name in ("prompt_tokens_total", "generation_tokens_total")]
    known = [value for value in tokens if value is not None]
    return {
        "running": total(samples, "vllm:num_requests_running"),
        "waiting": total(samples, "vllm:num_requests_waiting"),
        "tokens": sum(known) if known else None,
    }


def acceptance(samples: list[Sample]) -> dict[str, Any] | None:
    """Speculative decoding so far, or None when it is off (the engine then has none of these metrics).

    {"drafts", "draft_tokens", "accepted_tokens": counts, "acceptance_rate": accepted over drafted,
     "acceptance_length": 1 + accepted over drafts (steps without a draft are not in it), "by_position": [rate, ...]}
    Rates are None before the first draft.
    """
    drafts = total(samples, "vllm:spec_decode_num_drafts_total")
    if drafts is None:
        return None
    drafted = total(samples, "vllm:spec_decode_num_draft_tokens_total") or 0.0
    accepted = total(samples, "vllm:spec_decode_num_accepted_tokens_total") or 0.0
    positions: dict[int, float] = {}
    for name, labels, value in samples:
        known = name == "vllm:spec_decode_num_accepted_tokens_per_pos_total" and math.isfinite(value)
        if known and _POSITION.fullmatch(labels.get("position", "")):
            position = int(labels["position"])
            positions[position] = positions.get(position, 0.0) + value
    return {
        "drafts": int(drafts),
        "draft_tokens": int(drafted),
        "accepted_tokens": int(accepted),
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "by_position": [positions[key] / drafts for key in sorted(positions)] if drafts else [],
    }
