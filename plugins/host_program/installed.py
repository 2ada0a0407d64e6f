"""What of swapgate is installed on this host."""

from __future__ import annotations

from typing import Any

from ..module_utils import records
from . import systemd

JsonDict = dict[str, Any]


def managed_variants(layout: records.Layout) -> list[JsonDict]:
    """The resolved variants whose units are installed on this host."""
    found = []
    for file in sorted(layout.variants.glob("*.json")):
        variant = records.read_if_there(file)
        if variant and (layout.units / variant["unit"]).exists():
            found.append(variant)
    return found


def managed_units(layout: records.Layout) -> list[str]:
    """The units of swapgate that are installed on this host."""
    return [variant["unit"] for variant in managed_variants(layout)]


def active_units(layout: records.Layout) -> list[str]:
    """Those of them that run, start or stop right now."""
    alive = ("active", "activating", "deactivating", "reloading")
    return [unit for unit in managed_units(layout) if systemd.show(unit, "ActiveState")["ActiveState"] in alive]
