"""What a verifying step may cost, by arithmetic alone: an estimate for planning, before anything was measured.

    T(t)/T(1) = 1 + [time of one token's experts * (E(t)/k - 1) + bytes on links] / T(1)

E(t) = N (1 - (1 - k/N)^t) is the number of distinct experts that t tokens read when each picks k of N uniformly and
independently. Real routing is neither: neighbours share experts, so E is an upper mark; `overlap` is the share by which
it is too high. It counts weights read, not time: attention, shared experts and AllReduce
latency do not grow with t. Every input carries its source, and every output the word "estimate".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.json_files import InputError

LABEL = "estimate: arithmetic from stated inputs, nothing measured"

# name: unit, what it is
INPUTS = {
    "experts": ("", "routed experts of a layer, N"),
    "per_token": ("", "experts that a token reads in a layer, k"),
    "moe_layers": ("", "layers with routed experts"),
    "expert_mb": ("MB", "bytes of one expert as stored"),
    "gpus": ("", "GPUs that share the experts evenly"),
    "bandwidth_gb_s": ("GB/s", "memory bandwidth that a GPU reaches"),
    "step_ms": ("ms", "T(1): a plain step"),
    "hidden": ("", "hidden size"),
    "layers": ("", "all layers, two AllReduces each"),
    "link_gb_s": ("GB/s", "what an AllReduce moves between GPUs"),
    "overlap": ("0..1", "share by which real routing reads fewer distinct experts"),
}

# Cohere, April 2026, a production mixture of experts: up to so much below the formula.
OVERLAP_COHERE = 0.31


@dataclass(frozen=True)
class Input:
    """One input with its source."""

    value: float
    source: str


def distinct_experts(experts: float, per_token: float, tokens: int) -> float:
    """E(t): distinct experts of one layer that so many tokens read, uniformly and independently routed."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


def multiple(experts: float, per_token: float, tokens: int) -> float:
    """E(t) in units of what one token reads."""
    return distinct_experts(experts, per_token, tokens) / per_token


# Kimi-K2-class on 8 GPUs without NVLink; docs/original-case.md works it through.
_SHAPE = "public model configuration"
_ORIGINAL = "the original's own report"
PRESETS: dict[str, dict[str, Input]] = {
    "kimi-k2": {
        "experts": Input(384, _SHAPE),
        "per_token": Input(8, _SHAPE),
        "moe_layers": Input(60, _SHAPE),
        "expert_mb": Input(25, "3 x 7168 x 2048 weights of 4 bits with scales per 32"),
        "gpus": Input(8, _ORIGINAL),
        "bandwidth_gb_s": Input(1500, "assumption: about 85 % of a 1.79 TB/s data sheet"),
        "step_ms": Input(13.6, _ORIGINAL),
        "hidden": Input(7168, _SHAPE),
        "layers": Input(61, _SHAPE),
        "link_gb_s": Input(25, "assumption: PCIe 5 x16, what a ring reaches"),
        "overlap": Input(0.0, "assumption: none, the upper mark"),
    }
}


def estimate(inputs: Mapping[str, Input], tokens: Sequence[int]) -> dict[str, Any]:
    """T(t)/T(1) for each number of tokens, with its parts in ms, and the inputs with their sources.

    Raises InputError when an input is missing or out of range.
    """
    absent = [name for name in INPUTS if name not in inputs]
    if absent:
        raise InputError(f"plan: {', '.join(absent)} not given; expected each of {', '.join(INPUTS)}, or --preset")
    value = {name: inputs[name].value for name in INPUTS}
    for name, found in value.items():
        good = 0 <= found <= 1 if name == "overlap" else found > 0
        if not good:
            raise InputError(f"plan: {name}: found {found:g}, expected {'0 to 1' if name == 'overlap' else 'above 0'}")
    if value["per_token"] > value["experts"]:
        raise InputError(
            f"plan: per_token: found {value['per_token']:g}, expected at most experts, {value['experts']:g}"
        )
    layer_ms = value["per_token"] * value["expert_mb"] / value["gpus"] / value["bandwidth_gb_s"]
    experts_ms = layer_ms * value["moe_layers"]
    rows = []
    for t in tokens:
        times = multiple(value["experts"], value["per_token"], t)
        added = experts_ms * max(0.0, times * (1 - value["overlap"]) - 1)
        # Two AllReduces a layer of 2 bytes an element, each value sent about twice; their latency does not grow.
        sent = 2 * value["layers"] * 2 * 2 * value["hidden"] * (t - 1) / value["link_gb_s"] / 1e6
        ratio = 1 + (added + sent) / value["step_ms"]
        rows.append(
            {
                "tokens": t,
                "distinct_experts": distinct_experts(value["experts"], value["per_token"], t),
                "expert_multiple": times,
                "added_experts_ms": added,
                "added_link_ms": sent,
                "ratio": ratio,
                "break_even_tokens_per_step": ratio,
            }
        )
    return {
        "label": LABEL,
        "inputs": {
            name: {"value": one.value, "unit": INPUTS[name][0], "what": INPUTS[name][1], "source": one.source}
            for name, one in inputs.items()
        },
        "one_token_experts_ms": experts_ms,
        "steps": rows,
        "bound": "experts alone can never make T(t) more than t T(1): slower than that is another path, not experts",
    }


def verify_multiple(tokens_per_step: float, speedup: float) -> float:
    """What a step with speculation cost in plain steps, from a published tokens per step and speed-up."""
    return tokens_per_step / speedup
