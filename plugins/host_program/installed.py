"""What of swapgate is installed on this host."""

from __future__ import annotations

from typing import Any

from ..module_utils import records, unit_text
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


def service_user(layout: records.Layout, unit: str) -> str:
    """The user that an installed unit runs as."""
    text = (layout.units / unit).read_text(encoding="utf-8")
    return next(
        (value for section, key, value in unit_text.parse(text) if (section, key) == ("Service", "User")), "root"
    )


def api_key(layout: records.Layout) -> str | None:
    """The API key of this host's engines, where they have one."""
    try:
        return layout.api_key.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None


def active_units(layout: records.Layout) -> list[str]:
    """Those of them that run, start or stop right now."""
    return [unit for unit, state in systemd.states(managed_units(layout)).items() if state in systemd.ALIVE]
