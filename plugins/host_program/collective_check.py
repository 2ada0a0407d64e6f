"""The collective under a variant's own unit: same user, environment, devices and limits, another command.

The unit file is the variant's with nothing but the command replaced, so that what is proven is what serves. It needs
idle GPUs: where an engine or anybody else uses them it says so and runs nothing.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..module_utils import records, units
from . import collective, gpus, installed, preflight, systemd

JsonDict = dict[str, Any]

UNIT = "swapgate-collective.service"
TRANSIENT = Path("/run/systemd/system")
# What belongs to a server that goes on, not to a command that ends; comments and [Install] are dropped too.
_SERVER_ONLY = (
    "Description=",
    "ExecStart=",
    "LoadCredential=",
    "NotifyAccess=",
    "Restart=",
    "RestartPreventExitStatus=",
    "RestartSec=",
    "StartLimit",
    "SyslogIdentifier=",
    "TimeoutStartSec=",
    "Type=",
    "Watchdog",
)


def check_unit(text: str, argv: Sequence[str], limit_s: float) -> str:
    """The text of a variant's unit with ``argv`` as its command, run once and ended after ``limit_s``."""
    kept = []
    skipping = False
    for line in text.partition("\n[Install]")[0].splitlines():
        skipping = skipping or line.startswith(("#", *_SERVER_ONLY))
        if not skipping:
            kept.append(line)
        skipping = skipping and line.endswith("\\") and not line.startswith("#")
    own = [
        "[Service]",
        "Type=oneshot",
        f"TimeoutStartSec={limit_s:.0f}",
        "ExecStart=" + " ".join(units.quote(word) for word in argv),
    ]
    return "\n".join([*kept, *own]) + "\n"


def _choose(layout: records.Layout, name: str | None) -> tuple[JsonDict, str]:
    """The variant and the text of its unit: of a staged release, an installed variant, or the last good one."""
    if name is None:
        good = records.read_state(layout)["last_good"]
        if good is None:
            raise records.RecordError("no variant was good yet. Name a staged release: /var/lib/swapgate/releases")
        name = str(good["release"])
    if (layout.release(name) / "variant.json").exists():
        variant = preflight.load_release(layout, name)
        return variant, (layout.release(name) / variant["unit"]).read_text(encoding="utf-8")
    try:
        variant = installed.named(layout, name)
        return variant, (layout.units / variant["unit"]).read_text(encoding="utf-8")
    except (FileNotFoundError, records.RecordError) as error:
        raise records.RecordError(
            f"'{name}' is neither an installed variant nor a staged release. Deploy it, or look at `swapgate status`."
        ) from error


def check(layout: records.Layout, name: str | None, limit_s: float) -> JsonDict:
    """The report of collective.py with "variant", and after a fault "after": what is wrong with the GPUs since."""
    variant, text = _choose(layout, name)
    indices = variant["gpus"]
    if len(indices) == 1:
        return _nothing_run(variant, "unable", "one GPU has no link to prove")
    expected = None
    if indices:
        state = gpus.judge(indices, variant["free_memory_mib"])
        if not state["verdict"].startswith("accept"):
            return _nothing_run(variant, "busy", " ".join(state["faults"]))
        expected = gpus.link_gbps(variant)
    report = _run(layout, variant, text, limit_s, expected)
    report["fabric"] = collective.fabric_state()  # as root: the unit's user does not see ACS
    if report["verdict"] in collective.FAULTS and indices:
        report["after"] = gpus.faults(indices)
    return report


def _nothing_run(variant: JsonDict, verdict: str, what: str) -> JsonDict:
    return {
        "schema": collective.SCHEMA,
        "variant": variant["name"],
        "verdict": verdict,
        "what": what,
        "remedy": collective.REMEDIES.get(verdict),
        "sizes": [],
        "fabric": collective.fabric_state(),
    }


def _run(layout: records.Layout, variant: JsonDict, text: str, limit_s: float, expected: float | None) -> JsonDict:
    indices = variant["gpus"]
    runtime = layout.unit_runtime(UNIT)
    out = runtime / "report.json"
    argv = [variant["engine"]["venv"] + "/bin/python", str(Path(collective.__file__).resolve()), "--out", str(out)]
    argv += ["--ranks", str(len(indices) or 2), "--backend", "nccl" if indices else "gloo", "--limit-s", str(limit_s)]
    if expected is not None:
        argv += ["--link-gbps", str(expected)]
    if indices and "CUDA_VISIBLE_DEVICES" not in variant["env"]:
        argv += ["--gpus", ",".join(str(index) for index in indices)]
    whole_s = limit_s + collective.START_LIMIT_S + 60
    unit = TRANSIENT / UNIT
    dropins = unit.with_name(UNIT + ".d")
    started = time.time()
    try:
        records.write_atomic(unit, check_unit(text, argv, whole_s))
        for own in sorted((layout.units / (variant["unit"] + ".d")).glob("*.conf")):
            if own.name != preflight.EXCLUSION_DROPIN:
                records.write_atomic(dropins / own.name, own.read_text(encoding="utf-8"))
        systemd.systemctl("daemon-reload")
        systemd.systemctl("start", UNIT, limit_s=whole_s + 30, check=False)
        report = records.read_if_there(out)
        said = systemd.journal(UNIT, started)
    finally:
        systemd.systemctl("stop", UNIT, check=False)
        systemd.systemctl("reset-failed", UNIT, check=False)
        with contextlib.suppress(FileNotFoundError):
            unit.unlink()
        shutil.rmtree(dropins, ignore_errors=True)
        shutil.rmtree(runtime, ignore_errors=True)
        systemd.systemctl("daemon-reload")
    if report is None:
        last = "; ".join(said[-3:]) or "nothing was printed"
        report = _nothing_run(variant, "unable", f"{argv[0]} left no report: {last}")
    return dict(report, variant=variant["name"])
