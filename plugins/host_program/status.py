"""What serves, what was good, and how it went before. Reads only."""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

from ..module_utils import identity, metrics, nccl, records, units
from . import engine_api, gpus, jobs, preflight, systemd
from .installed import managed_variants

JsonDict = dict[str, Any]


def status(layout: records.Layout) -> JsonDict:
    """What serves, what was last good, what the current swap does. Reads only.

    {"schema", "last_good", "swap", "units": [{"model", "variant", "slot", "unit", "release", "active", "sub",
    "enabled", "since": text, "load": load.json | null}], "acceptance": null | metrics.acceptance,
    "usual_seconds_without_service": {unit: s}, "jobs": jobs.under_way, "way_back": null | way_back(), "now_unix": the
    host's clock, "problem": null | str}
    """
    problem = back = None
    try:
        state = records.read_state(layout)
        with contextlib.suppress(records.RecordError):  # nothing was good before
            back = way_back(layout)
    except records.RecordError as error:
        state, problem = records.empty_state(), str(error)
    found: list[JsonDict] = []
    acceptance = None
    for variant in managed_variants(layout):
        now = systemd.show(
            variant["unit"], "ActiveState", "SubState", "ActiveEnterTimestamp", "StatusText", "NRestarts"
        )
        text = (layout.units / variant["unit"]).read_text(encoding="utf-8")
        found.append(
            {
                **identity.record(variant),
                "release": units.release_id(text, variant),
                "active": now["ActiveState"],
                "sub": now["SubState"],
                "status": now.get("StatusText", ""),
                "restarts": int(now.get("NRestarts") or 0),
                "enabled": systemd.is_enabled(variant["unit"]),
                "since": now.get("ActiveEnterTimestamp", ""),
                "load": records.read_if_there(layout.unit_runtime(variant["unit"]) / "load.json"),
            }
        )
        if now["ActiveState"] == "active":
            with contextlib.suppress(engine_api.EngineError):
                acceptance = metrics.acceptance(engine_api.samples(variant["bind"], variant["port"]))
    return {
        "schema": records.SCHEMA,
        "last_good": state["last_good"],
        "swap": state["swap"],
        "units": found,
        "acceptance": acceptance,
        "usual_seconds_without_service": usual_seconds_without_service(layout),
        "jobs": jobs.under_way(layout),
        "way_back": back,
        "now_unix": time.time(),
        "problem": problem,
    }


def topology(layout: records.Layout) -> JsonDict:
    """How the GPUs are joined, the NCCL settings that fit them, and what of the installed variants does not.

    {"schema", "picture": gpus.picture, "derived": nccl.derive over the GPUs that variants use, or all,
     "variants": {name: [what does not fit]}}
    """
    seen = gpus.picture()
    matrix, peers = seen["topology"], seen["peers"]
    variants = managed_variants(layout)
    used = sorted({index for variant in variants for index in variant["gpus"]})
    called = identity.labels(variants)
    indices = used or [gpu["index"] for gpu in seen["gpus"]] or list(range(matrix["gpus"]))
    return {
        "schema": records.SCHEMA,
        "picture": seen,
        "derived": nccl.derive(matrix, peers, indices),
        "variants": {
            called[variant["unit"]]: nccl.compare(variant["env"], variant["argv"], matrix, peers, variant["gpus"])
            for variant in variants
        },
    }


def way_back(layout: records.Layout) -> JsonDict:
    """The release to go back to: the last good one when it does not serve, else the one that was good before it."""
    state = records.read_state(layout)
    good = state["last_good"]
    if good and systemd.show(good["unit"], "ActiveState")["ActiveState"] != "active":
        return _release(good)
    for swap in reversed(records.read_history(layout)):
        before = swap["from"]
        if swap["outcome"] == "swapped" and before and before["release"] != (good or {}).get("release"):
            return _release(before)
    raise records.RecordError(
        "no variant was good before {}. Deploy one by name.".format(good["variant"] if good else "now")
    )


def _release(record: JsonDict) -> JsonDict:
    return {key: record.get(key) for key in ("model", "variant", "release")}


SERVING = "serving"


def show_release(layout: records.Layout, release: str) -> JsonDict | None:
    """A staged release, or with SERVING what serves, as it is installed now; else the last good one; None for nothing.

    {"release", "serves": bool, "variant": its data, "unit_text", "dropins": {file name: text} of the administrator's
    own for its unit, "changed_below": [what of engine, model, drop-ins and driver is not what it was proven on]}
    """
    good = records.read_state(layout)["last_good"]
    if release == SERVING:
        for variant in managed_variants(layout):
            if systemd.show(variant["unit"], "ActiveState")["ActiveState"] == "active":
                return _shown(layout, variant, layout.units, good, True)
        if good is None:
            return None
        release = good["release"]
    return _shown(layout, preflight.load_release(layout, release), layout.release(release), good, False)


def _shown(layout: records.Layout, variant: JsonDict, folder: Path, good: JsonDict | None, serves: bool) -> JsonDict:
    text = (folder / variant["unit"]).read_text(encoding="utf-8")
    release = units.release_id(text, variant)
    same = good is not None and good["release"] == release
    own = preflight.own_dropins(layout, variant["unit"])
    return {
        "release": release,
        "serves": serves,
        "variant": variant,
        "unit_text": text,
        "dropins": {name: content.decode("utf-8", "replace") for name, content in own.items()},
        "changed_below": preflight.changed_below(good, variant, layout) if good and same else [],
    }


def usual_seconds_without_service(layout: records.Layout) -> dict[str, float]:
    """By unit, the median over this host's swaps to it."""
    times: dict[str, list[float]] = {}
    for swap in records.read_history(layout):
        if swap["outcome"] == "swapped" and swap["seconds_without_service"] is not None:
            times.setdefault(swap["to"]["unit"], []).append(swap["seconds_without_service"])
    return {unit: statistics.median(values) for unit, values in times.items()}
