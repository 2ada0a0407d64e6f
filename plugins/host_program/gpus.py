"""The GPUs of this host: as nvidia-smi tells them, judged by module_utils.nvidia_smi, and whose each of them is.

A process that holds a GPU is one of these KINDS
    engine    of a unit of swapgate that is up
    orphan    an engine's process whose unit is dead, told by the service user, by what it runs from, and by its cgroup;
              by no title: not every build sets one. It may be ended, with consent
    foreign   anything else that can be seen: never ended
    unseen    nvidia-smi names its pid and this host's /proc does not: gone since, or of another PID namespace
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..module_utils import nccl, nvidia_smi, processes, records, topology
from . import systemd
from .installed import managed_variants, service_user

LIMIT_S = 30.0
WATCH_S = 10.0
# What passes by itself once the engine that serves is gone.
PASSING = ("busy",)
# A state that is not one of these and lasts so long does not pass by waiting. A process's end can leave some of them
# for a moment, and nvidia-smi can fail once.
STUCK_S = 10.0
# Between asking an orphan to end and making it, and for its end to be seen.
ORPHAN_TERM_S = 10.0
ORPHAN_KILL_S = 5.0


def _run(*words: str) -> str:
    """What nvidia-smi prints; that it is missing or hangs is a line that nvidia_smi knows."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
            timeout=LIMIT_S,
        )
        return done.stdout
    except FileNotFoundError:
        return "nvidia-smi: command not found"
    except subprocess.TimeoutExpired:
        return f"nvidia-smi: no answer in {LIMIT_S:.0f} s"


def _ask(kind: str, fields: Sequence[str]) -> dict[str, Any]:
    return nvidia_smi.parse_csv(_run(f"--query-{kind}={','.join(fields)}", "--format=csv"))


_not_known: set[str] = set()  # fields that this host's driver does not know


def _report() -> dict[str, Any]:
    """The answer to QUERY without the fields that the driver does not know: it refuses the whole query for one."""
    while True:
        report = _ask("gpu", [field for field in nvidia_smi.QUERY if field not in _not_known])
        field = nvidia_smi.unknown_field(report)
        if field not in nvidia_smi.QUERY or field in _not_known:
            return report
        _not_known.add(field)


def pace(indices: Sequence[int]) -> list[dict[str, Any]]:
    """Clocks, temperature and throttling of these GPUs now, as nvidia_smi.pace; empty where nothing can be read."""
    if not indices:
        return []
    for last in (nvidia_smi.PACE_QUERY[-1], nvidia_smi.THROTTLE_FIELD):
        found = nvidia_smi.pace(_ask("gpu", (*nvidia_smi.PACE_QUERY[:-1], last)))
        if found:
            return [gpu for gpu in found if gpu["index"] in indices]
    return []


class MemoryWatch:
    """Whether the memory in use on some GPUs moves, asked without waiting for the answer."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        self._command += ["--id=" + ",".join(str(index) for index in indices)]
        self._asked: subprocess.Popen[str] | None = None
        self._asked_at = 0.0
        self._seen = ""

    def moved(self, now_s: float) -> bool:
        """True when an answer came that differs from the one before; a question is asked every WATCH_S at most."""
        if self._asked is None:
            if now_s - self._asked_at >= WATCH_S:
                self._asked_at = now_s
                with contextlib.suppress(OSError):
                    self._asked = subprocess.Popen(
                        self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                    )
            return False
        if self._asked.poll() is None:
            if now_s - self._asked_at > LIMIT_S:
                self._asked.kill()
            return False
        answer, _ = self._asked.communicate()
        failed, self._asked = self._asked.returncode != 0, None
        if failed or answer == self._seen:
            return False
        first, self._seen = not self._seen, answer
        return not first


class Ours(NamedTuple):
    """What tells an engine's process: the units of swapgate, their users, and the folders that engines run from."""

    units: frozenset[str]
    users: frozenset[str]
    folders: frozenset[str]


def ours(layout: records.Layout) -> Ours:
    """Of what is installed on this host."""
    variants = managed_variants(layout)
    return Ours(
        frozenset(variant["unit"] for variant in variants),
        frozenset(service_user(layout, variant["unit"]) for variant in variants),
        frozenset(os.path.dirname(variant["engine"]["venv"]) for variant in variants),
    )


def _alive(unit: str) -> bool:
    return systemd.show(unit, "ActiveState").get("ActiveState") in systemd.ALIVE


def kind_of(owner: processes.Owner, known: Ours, proc: str = "/proc") -> str:
    """The KIND of a process that can be seen."""
    alive = bool(owner.unit) and _alive(owner.unit)
    if alive and owner.unit in known.units:
        return "engine"
    engine = owner.user in known.users and any(processes.runs_from(owner.pid, root, proc) for root in known.folders)
    # What runs in a live unit or session of its own is somebody's: a check by hand, a preflight, another service.
    return "orphan" if engine and not alive else "foreign"


def orphans(layout: records.Layout, proc: str = "/proc") -> list[processes.Owner]:
    """Every orphan of this host, whether it holds a GPU or not."""
    known = ours(layout)
    seen = [
        owner for pid in processes.pids(proc) if (owner := processes.owner(pid, proc)) and owner.user in known.users
    ]
    return [owner for owner in seen if kind_of(owner, known, proc) == "orphan"]


def end_orphans(layout: records.Layout) -> list[dict[str, Any]]:
    """End every orphan: SIGTERM, and SIGKILL to what is still there. [{"who": text, "ended": bool}]"""
    handles: dict[int, processes.Owner] = {}
    for owner in orphans(layout):
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(owner.pid)
            # The pid may be another process's by now; the handle cannot become one.
            if processes.owner(owner.pid) == owner:
                handles[handle] = owner
            else:
                os.close(handle)
    gone: set[int] = set()
    for number, limit_s in ((signal.SIGTERM, ORPHAN_TERM_S), (signal.SIGKILL, ORPHAN_KILL_S)):
        for handle in set(handles) - gone:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
        deadline = time.monotonic() + limit_s
        while set(handles) - gone and time.monotonic() < deadline:
            gone |= {handle for handle, owner in handles.items() if processes.owner(owner.pid) != owner}
            time.sleep(0.1)
    for handle in handles:
        os.close(handle)
    return [{"who": str(owner), "ended": handle in gone} for handle, owner in handles.items()]


def _whole(indices: Sequence[int]) -> dict[str, Any]:
    """One report over these GPUs and the processes on them."""
    report = _report()
    holders = _ask("compute-apps", nvidia_smi.PROCESS_QUERY)
    report["gpus"] = [gpu for gpu in report["gpus"] if gpu.get("index") in indices]
    report["notices"] = report["notices"] + [item for item in holders["notices"] if item not in report["notices"]]
    uuids = {gpu["uuid"] for gpu in report["gpus"]}
    report["processes"] = [one for one in holders["processes"] if one["gpu"] in uuids or not _elsewhere(one, report)]
    report["processes_known"] = holders["processes_known"]
    return report


def _elsewhere(process: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    """Whether a process is on a GPU that has a name and is none of the report's."""
    return str(process["gpu"] or "").startswith("GPU-") and all(gpu["uuid"] for gpu in report["gpus"])


def judge(indices: Sequence[int], busy_mib: float) -> dict[str, Any]:
    """nvidia_smi.judge over the GPUs with these indices; a GPU counts as busy from ``busy_mib`` on."""
    return nvidia_smi.judge(_whole(indices), expected=len(indices), busy_mib=busy_mib)


def holders(report: Mapping[str, Any], known: Ours) -> list[dict[str, Any]]:
    """Who holds the GPUs of a report: [{"gpu": index | null, "pid", "kind", "used_mib", "who": text}]"""
    places = {gpu["uuid"]: gpu["index"] for gpu in report["gpus"]}
    found = []
    for process in report["processes"]:
        owner = processes.owner(process["pid"]) if process["pid"] else None
        kind = kind_of(owner, known) if owner else "unseen"
        who = str(owner) if owner else "pid {} ({}), which /proc does not show".format(process["pid"], process["name"])
        found.append(
            {
                "gpu": places.get(process["gpu"]),
                "pid": process["pid"],
                "kind": kind,
                "used_mib": process["used_mib"],
                "who": who,
            }
        )
    return found


def ownership(layout: records.Layout) -> dict[str, Any]:
    """Each GPU of the installed variants, its state, and whose it is; without GPUs the orphans alone.

    {"schema", "gpus": [{"index", "state", "used_mib", "holders": [as in `holders`]}], "orphans": [text]}
    """
    indices = sorted({index for variant in managed_variants(layout) for index in variant["gpus"]})
    known = ours(layout)
    rows = []
    if indices:
        report = _whole(indices)
        held = holders(report, known)
        verdict = nvidia_smi.judge(report, expected=len(indices), busy_mib=nvidia_smi.BUSY_MIB)
        states = {gpu["gpu"]: gpu["state"] for gpu in verdict["gpus"]}
        for gpu in report["gpus"]:
            mine = [holder for holder in held if holder["gpu"] in (None, gpu["index"])]
            rows.append(
                {
                    "index": gpu["index"],
                    "state": states.get(gpu["index"], "unknown"),
                    "used_mib": gpu["memory_used_mib"],
                    "holders": mine,
                }
            )
    return {"schema": records.SCHEMA, "gpus": rows, "orphans": [str(owner) for owner in orphans(layout)]}


ADVICE = {
    "orphan": "It is an orphan of a dead engine: `swapgate end-orphans`, or run again with -e end_orphans=true.",
    "foreign": "It is not an engine of swapgate, which never ends it: stop it yourself.",
    "unseen": "Look for it in containers.",
    "engine": "It still stops.",
}


def _told(holder: Mapping[str, Any]) -> str:
    used = "an unknown amount" if holder["used_mib"] is None else "{:.0f} MiB".format(holder["used_mib"])
    return "GPU {}: {} held by {}. {}".format(holder["gpu"], used, holder["who"], ADVICE[holder["kind"]])


class FreeWatch:
    """Whether the GPUs of a variant are free, asked again and again.

    ``hopeless`` names a state that waiting does not change, once it has lasted STUCK_S: a wedged GPU, memory that
    nobody holds, a GPU that asks for a reset or is gone.
    """

    def __init__(self, layout: records.Layout, variant: Mapping[str, Any]) -> None:
        self._indices: Sequence[int] = variant["gpus"]
        self._busy_mib = float(variant["free_memory_mib"])
        self._known = ours(layout)
        self._state = "ok"
        self._since = 0.0
        self.hopeless: str | None = None

    def blocked(self, now_s: float) -> list[str]:
        """What keeps the GPUs from being free at the monotonic time ``now_s``, in sentences; nothing when they are."""
        if not self._indices:
            return []
        report = _whole(self._indices)
        verdict = nvidia_smi.judge(report, expected=len(self._indices), busy_mib=self._busy_mib)
        state = verdict["state"]
        if state != self._state:
            self._state, self._since = state, now_s
        if verdict["verdict"].startswith("accept"):
            return []
        if verdict["verdict"] == "reject" and state not in PASSING and now_s - self._since >= STUCK_S:
            self.hopeless = state
        return [*verdict["faults"], *(_told(one) for one in holders(report, self._known))]


def foreign(layout: records.Layout, variant: Mapping[str, Any]) -> list[str]:
    """Who would still hold a variant's GPUs when every engine has stopped, while one serves: no swap could end well."""
    report = _whole(variant["gpus"])
    least = float(variant["free_memory_mib"])
    held = [one for one in holders(report, ours(layout)) if one["kind"] != "engine"]
    return [_told(one) for one in held if (one["used_mib"] or 0) >= least]


def health(indices: Sequence[int]) -> tuple[list[str], list[str]]:
    """What is wrong with these GPUs besides that somebody uses them, seen before anything is stopped: faults, and what
    is no reason to refuse them."""
    report = _whole(indices)
    xids = nvidia_smi.xids(systemd.kernel_log())
    for gpu in report["gpus"]:
        gpu["xids"] = xids.get(_kernel_bus_id(gpu).rpartition(".")[0], [])
    verdict = nvidia_smi.judge(report, expected=len(indices), busy_mib=float("inf"))
    if verdict["state"] in PASSING:
        return [], []
    return verdict["faults"], verdict["warnings"]


def faults(indices: Sequence[int]) -> list[str]:
    """What of `health` refuses these GPUs."""
    return health(indices)[0]


def _kernel_bus_id(gpu: Mapping[str, Any]) -> str:
    """nvidia-smi writes the domain with eight digits, the kernel with four."""
    return (gpu["bus_id"] or "").lower()[-12:]


def picture(sysfs: str = "/sys") -> dict[str, Any]:
    """How this host's GPUs are joined, as far as tables tell.

    {"gpus": [{"index", "name", "uuid", "bus_id", "numa": node | null, "mig": text | null}], "topology": topology.parse
    of `topo -m`, "peers": topology.parse of `topo -p2p`, "verdict": topology.judge, "notices": what nvidia-smi said
    besides}
    """
    report = _report()
    found = []
    for gpu in report["gpus"]:
        bus_id = _kernel_bus_id(gpu)
        node = Path(sysfs, "bus/pci/devices", bus_id, "numa_node")
        numa = int(node.read_text(encoding="ascii")) if bus_id and node.exists() else -1
        found.append(
            {
                **{key: gpu[key] for key in ("index", "name", "uuid", "bus_id")},
                "numa": numa if numa >= 0 else None,
                "mig": gpu["fields"].get("mig.mode.current"),
            }
        )
    matrix = topology.parse(_run("topo", "-m"), "topo")
    return {
        "gpus": found,
        "topology": matrix,
        "peers": topology.parse(_run("topo", "-p2p", "r"), "p2p"),
        "verdict": topology.judge(matrix),
        "notices": report["notices"],
    }


def link_gbps(variant: dict[str, Any]) -> float | None:
    """GB/s each way of the slowest link between a variant's GPUs, as far as tables tell."""
    seen = picture()
    indices = variant["gpus"]
    refused = any(word not in ("OK", topology.UNKNOWN) for word in nccl.select(seen["peers"], indices).values())
    rows = [
        gpu["fields"]
        for gpu in _ask("gpu", ("index", "pcie.link.gen.max", "pcie.link.width.current"))["gpus"]
        if gpu["index"] in indices
    ]

    def least(field: str) -> float | None:
        found = [value for row in rows if (value := nvidia_smi.number(row.get(field, ""))) is not None]
        return min(found, default=None)

    return nccl.link_gbps(
        nccl.select(seen["topology"], indices),
        least("pcie.link.gen.max"),
        least("pcie.link.width.current"),
        peers=not refused and variant["env"].get("NCCL_P2P_DISABLE") != "1",
    )


def collective_notices(variant: dict[str, Any]) -> list[str]:
    """What of a variant's NCCL settings does not fit this host; nothing where it has fewer than two GPUs."""
    if len(variant["gpus"]) < 2:
        return []
    seen = picture()
    return nccl.compare(variant["env"], variant["argv"], seen["topology"], seen["peers"], variant["gpus"])
