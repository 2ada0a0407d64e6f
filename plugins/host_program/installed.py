"""What of swapgate is installed on this host."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

from ..module_utils import identity, records, unit_text, units
from . import systemd

JsonDict = dict[str, Any]

# The end of the first line of every unit that role vllm_service renders.
RENDERED = "rendered by swapgate. Edit group_vars, not this file."


def _data(layout: records.Layout) -> dict[str, tuple[Path, JsonDict]]:
    """By unit, the file with the data of its variant, and that data.

    Releases of swapgate that knew one model a host named the file after the variant. Only they write it, so where both
    are there it is the newer one.
    """
    found: dict[str, tuple[Path, JsonDict]] = {}
    for file in sorted(layout.variants.glob("*.json")):
        variant = records.read_if_there(file)
        unit = (variant or {}).get("unit")
        if variant and unit and (file != layout.data(unit) or unit not in found):
            found[unit] = (file, variant)
    return found


def data_file(layout: records.Layout, unit: str) -> Path:
    """Where the data of an installed unit's variant is; its place also where there is none yet."""
    found = _data(layout).get(unit)
    return found[0] if found else layout.data(unit)


def managed_variants(layout: records.Layout) -> list[JsonDict]:
    """The resolved variants whose units are installed on this host, by identity."""
    found = [variant for unit, (_, variant) in _data(layout).items() if (layout.units / unit).exists()]
    return sorted(found, key=identity.of)


def managed_units(layout: records.Layout) -> list[str]:
    """The units of swapgate that are installed on this host."""
    return [variant["unit"] for variant in managed_variants(layout)]


def named(layout: records.Layout, name: str) -> JsonDict:
    """The installed variant called ``name``: a unit, MODEL/VARIANT, or a variant's name alone.

    Of several models' variants of that name it is the one that runs. RecordError when there is none, or no such one.
    """
    managed = sorted((variant for _, variant in _data(layout).values()), key=identity.of)
    calls = [one for one in managed if name in (one["unit"], str(identity.of(one)), one["name"])]
    if len(calls) > 1:
        active = active_units(layout)
        calls = [one for one in calls if one["unit"] in active] or calls
    if len(calls) == 1:
        return calls[0]
    words = ", ".join(str(identity.of(one)) for one in calls or managed) or "none"
    if calls:
        raise records.RecordError(f"variant {name!r} is one of several models: {words}. Name it with its model.")
    raise records.RecordError(f"variant {name!r} is not installed on this host; installed are {words}")


def supervised(layout: records.Layout, name: str, unit: str) -> JsonDict:
    """The data of the variant whose supervisor runs in ``unit``; by ``name`` where that is no engine's unit."""
    if unit.startswith("vllm-") and (layout.units / unit).exists():
        found = _data(layout).get(unit)
        if found is None:
            raise records.RecordError(
                f"{unit} is not known to swapgate: {layout.data(unit)} is missing. Deploy its model's variant again."
            )
        return found[1]
    return named(layout, name)


def strays(layout: records.Layout) -> list[str]:
    """Units that swapgate rendered and has no data of: the data file of another model's variant replaced theirs."""
    known = _data(layout)
    found = []
    for file in sorted(layout.units.glob("vllm-*.service")):
        if file.name not in known and not file.is_symlink():
            first = file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
            if first.startswith(f"# {file.name}: ") and first.endswith(RENDERED):
                found.append(file.name)
    return found


def migrate(layout: records.Layout, say: Callable[[str], None]) -> None:
    """Bring what an older swapgate left here to today's names. Each step is one rename or one file: a power cut between
    two of them leaves a host that is read as before, and the next call goes on.

    Data files are named after their units. A stray gets its data back from its release, so that it excludes others
    again, and does not start at boot any more. The last good release learns its model.
    """
    moved = {unit: file for unit, (file, _) in _data(layout).items() if file != layout.data(unit)}
    for unit, file in moved.items():
        target = layout.data(unit)
        there = records.read_if_there(target)
        if there is None or there["unit"] == unit:  # not the file of a variant that is called like a unit
            file.replace(target)
    state = records.read_state(layout)
    good = state["last_good"]
    for unit in strays(layout):
        text = (layout.units / unit).read_text(encoding="utf-8")
        for folder in sorted(layout.releases.glob("*"), key=lambda folder: folder.stat().st_mtime, reverse=True):
            variant = records.read_if_there(folder / "variant.json")
            if variant and variant.get("unit") == unit and units.release_id(text, variant) == folder.name:
                say(f"{unit} is {identity.of(variant)}: swapgate knows it again")
                if unit != (good or {}).get("unit"):
                    systemd.systemctl("disable", "--quiet", "--no-reload", unit, check=False)
                records.write_json(layout.data(unit), variant)
                break
    if good and "model" not in good:
        variant = records.read_if_there(layout.release(good["release"]) / "variant.json")
        if variant:
            good.update(identity.record(variant))
            records.write_json(layout.state, state)


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
