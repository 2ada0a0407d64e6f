"""What a unit is: a model, a variant of it, and the slot of the host that it runs in. Every record names it this way.

A unit's name follows from it (``variants.unit_name``) and is never taken apart again: `vllm-a-b.service` may be variant
`b` of model `a`, or the base of model `a-b`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

SLOT = "main"  # the only one today

JsonDict = dict[str, Any]


class Identity(NamedTuple):
    """Model, variant and slot of one unit; sorted by model first."""

    model: str
    variant: str
    slot: str = SLOT

    def __str__(self) -> str:
        where = "" if self.slot == SLOT else "@" + self.slot
        return f"{self.model}/{self.variant}{where}"


def of(variant: Mapping[str, Any]) -> Identity:
    """Of a resolved variant."""
    return Identity(variant["model"]["name"], variant["name"], variant.get("slot", SLOT))


def record(variant: Mapping[str, Any]) -> JsonDict:
    """A resolved variant as records name it: {"model", "variant", "slot", "unit"}."""
    return {**of(variant)._asdict(), "unit": variant["unit"]}


def labels(variants: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By unit, what people call each of these resolved variants: its name, with the model where there are several."""
    found = {variant["unit"]: of(variant) for variant in variants}
    several = len({one.model for one in found.values()}) > 1
    return {unit: str(one) if several else one.variant for unit, one in found.items()}
