"""What nvidia-smi says about the GPUs, with every odd value as a named state and never as a number.

``nvidia-smi --query-gpu=... --format=csv`` exits 0 with ``[N/A]``, ``[Unknown Error]`` or ``[GPU requires reset]`` in
a cell while ``memory.used`` reads ``0 MiB``; a gate that only reads the memory passes a broken GPU. `parse` reads csv
(with or without header), the table, and observations written down by hand; `judge` says whether an engine may be
started on what was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .log_text import split_lines, strip_ansi, unquote

# Xids (NVIDIA's catalogue has them) that say a fault of the GPU, and those of the program that ran on it.
_XID_FAULTS = (48, 63, 64, 79, 94, 95, 119, 120, 154)
_XID_PROGRAM = (13, 31, 43, 45)
# A display session or a driver context holds some 100 MiB; the smallest engine much more.
BUSY_MIB = 1000.0
# Without a process a healthy GPU idles; after a hung collective was killed it spins at 100 %.
SPINNING_PERCENT = 90.0
# A GPU that drives no display computes for somebody from here on.
WORKING_PERCENT = 50.0
# No board has less; a smaller number in a row without a header is no memory.
_SMALLEST_MIB = 256

# What the host is asked for. A driver refuses a whole query for one field that it does not know: see `unknown_field`.
QUERY = (
    "index",
    "uuid",
    "pci.bus_id",
    "name",
    "memory.total",
    "memory.reserved",
    "memory.used",
    "memory.free",
    "utilization.gpu",
    "power.draw",
    "temperature.gpu",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "compute_mode",
    "gpu_recovery_action",
    "fabric.state",
    "mig.mode.pending",
    "ecc.mode.current",
    "ecc.mode.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "retired_pages.pending",
)
# What may slow a GPU down while it works. Older drivers know the last field as THROTTLE_FIELD.
PACE_QUERY = (
    "index",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "clocks_event_reasons.active",
)
THROTTLE_FIELD = "clocks_throttle_reasons.active"
# Bits of that field, as NVML numbers them: idle, a clock that somebody set, and a power cap that all arms have alike
# are no throttling.
_THROTTLING = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_POWER_CAP = 0x4
PROCESS_QUERY = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")
# An empty list of processes proves nothing: inside a container those of the host are not listed.
_LOOK = (
    "Look for the holder on the host itself, not in a container, which lists none of the others' processes "
    "(nvidia-smi as root, fuser -v /dev/nvidia*)"
)

_STATES: tuple[tuple[str, str], ...] = (
    ("deprecated", "deprecated"),
    ("requires reset", "requires reset"),
    ("is lost", "lost"),
    ("err!", "error"),
    ("unknown error", "unknown error"),
    ("insufficient permission", "no permission"),
    ("not supported", "not supported"),
    ("not found", "not found"),
    ("n/a", "not available"),
    ("not active", "not active"),
    ("unknown", "unknown"),
)
# States of a cell that condemn the GPU, and those that leave it unknown. What is merely not supported says nothing.
_BROKEN = {"requires reset", "lost", "error"}
_UNKNOWN = {"unknown error", "no permission", "not found", "unknown", "unreadable"}

# Lines that are no row. Pattern, state, class of the verdict: "bad" refuses, "unknown" refuses for lack of knowledge,
# "warning" and "none" do not.
_NOTICES: tuple[tuple[re.Pattern[str], str, str, str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), state, weight, remedy)
    for pattern, state, weight, remedy in (
        (
            r"driver/library version mismatch",
            "driver mismatch",
            "bad",
            "Reboot, or reload the modules. What still serves keeps working: do not stop it.",
        ),
        (
            r"no devices (?:were )?found",
            "no devices",
            "bad",
            "Read the kernel log for NVRM, power-cycle the host, then compare driver and firmware.",
        ),
        (
            r"couldn.t communicate with the nvidia driver",
            "driver not loaded",
            "bad",
            "Load the module (modprobe nvidia), and see whether it was built for the running kernel.",
        ),
        (
            r"unable to (?:determine|detect) the device handle for.*",
            "gpu not answering",
            "bad",
            "Read the kernel log for Xid and bus errors, then reboot. One such GPU hides all others.",
        ),
        (r"gpu is lost|fallen off the bus", "lost", "bad", "Reboot or power-cycle the host."),
        (
            r"requires reset|reset required|reboot the system to recover",
            "requires reset",
            "bad",
            "Reset the GPU or reboot before any start.",
        ),
        (
            r"failed to initialize nvml",
            "nvml failed",
            "bad",
            "Run nvidia-smi as root and as the service user, then check the device nodes and the cgroup.",
        ),
        (
            r"nvidia-smi['\u2019]?:? (?:command )?not found|nvidia-smi.*no such file",
            "nvidia-smi missing",
            "bad",
            "Install the driver's utilities (role nvidia_stack).",
        ),
        (
            r"libnvidia-ml\.so",
            "driver library missing",
            "bad",
            "Install the driver's libraries in the version of the loaded module (role nvidia_stack).",
        ),
        (
            r"^(?:killed|terminated|aborted|hangup|segmentation fault|bus error)\b[^,]*$",
            "nvidia-smi ended",
            "unknown",
            "Run nvidia-smi again: it did not end by itself, and rows may be missing.",
        ),
        (
            r"gpu access blocked by the operating system|insufficient permissions",
            "no permission",
            "unknown",
            "Run nvidia-smi as root.",
        ),
        (
            r"is not a valid field to query",
            "field not known",
            "unknown",
            "Leave that field out of the query: this driver is older than the field.",
        ),
        (r"infoROM is corrupted", "inforom corrupted", "warning", "Plan to exchange the board that the line names."),
        (
            r"unable to retrieve|unable to get|not able to",
            "partly unreadable",
            "warning",
            "Read the line: the field that it names is missing.",
        ),
        (
            r"timed? ?out|no answer in",
            "no answer",
            "bad",
            "Read the kernel log: a GPU or the driver does not answer.",
        ),
        (r"no running (?:compute )?processes found", "no processes", "none", ""),
        (r"^nvml library version", "library version", "none", ""),
        (r"^\[?unknown error\]?\.?$", "unknown error", "unknown", "Run nvidia-smi again. Unknown is not healthy."),
    )
)
_HEADER_CELL = re.compile(r"^(?P<field>[a-z][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)(?: \[(?P<unit>[^\]]+)\])?$")
_KNOWN_FIELDS = {
    "index",
    "name",
    "uuid",
    "gpu_uuid",
    "pid",
    "process_name",
    "used_memory",
    "used_gpu_memory",
    "timestamp",
    "count",
    "serial",
    "pstate",
    "driver_version",
    "compute_mode",
    "persistence_mode",
    "display_active",
    "display_mode",
    "gpu_recovery_action",
    "gpu_name",
    "gpu_bus_id",
    "vbios_version",
    "gpu_serial",
    "compute_cap",
}
_NUMBER = re.compile(r"^(?P<number>-?\d+(?:\.\d+)?)\s*(?P<unit>MiB|GiB|KiB|MB|GB|%|W|C|MHz)?$")
_SIZE = re.compile(r"\d ?(?:[KMG]iB|MB|GB)$")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d])")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})[^)]*\): (?P<xid>\d+)\b")
_UUID = re.compile(r"^(?:GPU|MIG)-")
_LISTED = re.compile(r"^GPU (?P<index>\d+): (?P<name>.+?) \(UUID: (?P<uuid>GPU-[^)]*)\)")
_LISTED_SLICE = re.compile(r"^\s*MIG .*\(UUID: MIG-")
_TO_MIB = {"GiB": 1024.0, "KiB": 1 / 1024, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20}


def cell_state(text: str) -> str | None:
    """Named state of a cell that holds no value, or None where it holds one (or is empty)."""
    plain = text.strip().lower()
    if not plain or _NUMBER.match(text.strip()):
        return None
    bracketed = plain.startswith("[") and plain.endswith("]")
    for word, state in _STATES:
        if word in plain and (
            bracketed or plain in {word, "gpu " + word} or word in {"err!", "requires reset", "is lost"}
        ):
            return state
    return "unreadable" if bracketed else None


def number(text: str) -> float | None:
    """The number of a cell, sizes in MiB; None where the cell holds no number."""
    match = _NUMBER.match(text.strip())
    if not match:
        return None
    return float(match["number"]) * _TO_MIB.get(match["unit"] or "", 1.0)


def _cells(line: str) -> list[str]:
    """Cells of a row. nvidia-smi parts them by comma and space, so a comma between digits is one of thousands."""
    if ", " in line or _SIZE.search(line):
        line = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), line)
    return [cell.strip() for cell in line.split(",")]


def _header(cells: Sequence[str]) -> list[str] | None:
    fields = []
    known = 0
    for cell in cells:
        match = _HEADER_CELL.match(cell)
        if not match:
            return None
        fields.append(match["field"])
        known += "." in match["field"] or match["field"] in _KNOWN_FIELDS
    return fields if known and known * 2 >= len(fields) else None


def unknown_field(report: Mapping[str, Any]) -> str | None:
    """The field that the driver did not know, where that is why a query has no rows: ask again without it."""
    for notice in () if report["gpus"] else report["notices"]:
        if notice["state"] == "field not known" and (match := re.search(r'["\']([\w.]+)["\']', notice["text"])):
            return match[1]
    return None


def xids(lines: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
    """Xids in the kernel's log of this boot, {"0000:01:00": [(number, line)]}, without those of a program.

    What stands before the driver was loaded anew, or before it said that a GPU needs nothing any more, is over.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for line in lines:
        match = _XID.search(line)
        if "NVRM: loading NVIDIA" in line:
            found.clear()
        elif match and re.search(r"to 0x0 \(None\)", line):
            found.pop(match["bus"].lower(), None)
        elif match and int(match["xid"]) not in _XID_PROGRAM:
            found.setdefault(match["bus"].lower(), []).append((int(match["xid"]), line.strip()))
    return found


def is_header(line: str) -> bool:
    """Whether a line is the header of a query's csv."""
    return _header(_cells(line)) is not None


def _notice(line: str) -> dict[str, str] | None:
    for pattern, state, weight, remedy in _NOTICES:
        if pattern.search(line):
            return {"text": line, "state": state, "weight": weight, "remedy": remedy}
    return None


def _gpu(fields: Mapping[str, str], untold: bool = False) -> dict[str, Any]:
    """One GPU as plain values: numbers in MiB, percent, W and C or None, and the `states` of the fields that hold
    none; ``untold``: nothing says how much of its memory is in use."""

    def value(*names: str) -> float | None:
        return next((number(fields[name]) for name in names if name in fields), None)

    def words(name: str) -> str | None:
        text = fields.get(name)
        return None if text is None or cell_state(text) else text

    index = value("index")
    states = {name: state for name, text in fields.items() if (state := cell_state(text))}
    if untold:
        states.setdefault("memory.used", "not told")
    return {
        "index": int(index) if index is not None else None,
        "uuid": words("uuid") or words("gpu_uuid"),
        "bus_id": words("pci.bus_id") or words("gpu_bus_id"),
        "name": words("name") or words("gpu_name"),
        "memory_total_mib": value("memory.total"),
        "memory_used_mib": value("memory.used"),
        "memory_free_mib": value("memory.free"),
        "utilization_percent": value("utilization.gpu"),
        "power_w": value("power.draw", "power.draw.instant", "power.draw.average"),
        "temperature_c": value("temperature.gpu"),
        "states": states,
        "fields": dict(fields),
    }


def _guess_fields(cells: Sequence[str]) -> list[str]:
    """Names for a row without a header, by what the cells themselves show; where an order is in doubt, the one that
    has more memory in use."""
    names = [f"column {position}" for position in range(1, len(cells) + 1)]
    if len(cells) > 1 and re.fullmatch(r"\d|[1-5]\d", cells[0]):
        names[0] = "index"
    percent = next((at for at, cell in enumerate(cells) if cell.endswith("%") and number(cell) is not None), None)
    if percent is not None:
        names[percent] = "utilization.gpu"
    sized = [at for at, cell in enumerate(cells) if number(cell) is not None and _SIZE.search(cell)]
    plain = [at for at, cell in enumerate(cells) if re.fullmatch(r"\d+(?:\.\d+)?", cell) and names[at] != "index"]
    sizes = {at: number(cells[at]) or 0.0 for at in sized or plain}
    total = max(sizes, key=lambda at: sizes[at], default=None)
    if total is None or (not sized and len(cells) > 2 and sizes[total] < _SMALLEST_MIB):
        return names
    if len(sizes) == 1:
        names[total] = "memory.used"
        return names
    names[total] = "memory.total"
    for first, second in zip(sizes, list(sizes)[1:]):
        if total not in (first, second) and 0 <= sizes[total] - sizes[first] - sizes[second] <= 0.08 * sizes[total]:
            # Used, then free, as nvidia-smi lists them; but no board has nothing free.
            used, free = (first, second) if sizes[second] else (second, first)
            names[used], names[free] = "memory.used", "memory.free"
            return names
    order = list(sizes)
    beside = [at for at in (order if sized else order[max(0, order.index(total) - 1) :][:3]) if at != total]
    names[max(beside, key=lambda at: sizes[at])] = "memory.used"
    return names


def _process(fields: Sequence[str], cells: Sequence[str]) -> dict[str, Any]:
    row = dict(zip(fields, cells))
    used = row.get("used_gpu_memory", row.get("used_memory", ""))
    pid = number(row.get("pid", ""))
    return {
        "gpu": row.get("gpu_uuid") or row.get("gpu_bus_id"),
        "pid": int(pid) if pid is not None else None,
        "name": row.get("process_name"),
        "used_mib": number(used),
        "state": cell_state(used),
    }


def parse_csv(text: str, fields: Sequence[str] | None = None) -> dict[str, Any]:
    """Read ``--query-gpu`` and ``--query-compute-apps`` output, with units or without, with a header or not.

    `fields` names the columns of output without a header. Returns ``{"gpus", "processes", "notices",
    "processes_known"}``; lines that are no row become notices, wherever they stand.
    """
    report: dict[str, Any] = {"gpus": [], "processes": [], "notices": [], "processes_known": False}
    names = list(fields) if fields else None
    for line in _told_lines(text):
        if not line or _listed(report, line):
            continue
        cells = _cells(line)
        header = _header(cells)
        if header:
            names = header
            report["processes_known"] |= "pid" in names
            continue
        notice = _notice(line)
        # A cell may say "[GPU requires reset]" too: a row has as many cells as the header.
        if notice and not (names and len(cells) == len(names) and len(cells) > 1) and not _is_row(cells):
            report["notices"].append(notice)
            report["processes_known"] |= notice["state"] == "no processes"
            continue
        if names and len(cells) == len(names) and ("uuid" in names[0] or not _UUID.match(cells[0])):
            _take_row(report, names, cells)
        elif _UUID.match(cells[0]) and len(cells) >= 4:
            report["processes_known"] = True
            middle = ", ".join(cells[2:-1])  # a command may hold commas
            report["processes"].append(_process(PROCESS_QUERY, [cells[0], cells[1], middle, cells[-1]]))
        elif not names and _is_process(cells):
            report["processes"].append(_process(PROCESS_QUERY[1:], [cells[0], ", ".join(cells[1:-1]), cells[-1]]))
        elif names and "name" in names and len(cells) > len(names):
            at = names.index("name")
            extra = len(cells) - len(names)
            _take_row(report, names, [*cells[:at], ", ".join(cells[at : at + extra + 1]), *cells[at + extra + 1 :]])
        elif _is_row(cells):
            guessed = names[: len(cells)] if names else _guess_fields(cells)
            report["gpus"].append(_gpu(dict(zip(guessed, cells)), untold=not names and "memory.used" not in guessed))
        else:
            report["notices"].append(
                {"text": line, "state": "unrecognised", "weight": "warning", "remedy": "Read that line."}
            )
    return report


def _told_lines(text: str) -> Iterator[str]:
    """The lines of an output that tell something: of the traceback of a wrapper in Python, its exception."""
    in_traceback = False
    for line in split_lines(unquote(strip_ansi(text))):
        if "Traceback (most recent call last)" in line:
            in_traceback = True
        elif not in_traceback or (line.strip() and line[:1] not in {" ", "\t"}):
            in_traceback = False
            yield line.strip()


def _listed(report: dict[str, Any], line: str) -> bool:
    """Take a line of ``nvidia-smi -L``, which tells no memory."""
    match = _LISTED.match(line)
    if match:
        report["gpus"].append(_gpu(match.groupdict(), untold=True))
    elif _LISTED_SLICE.match(line) and report["gpus"]:
        report["gpus"][-1]["fields"]["mig.mode.current"] = "Enabled"
    else:
        return False
    return True


def _is_process(cells: Sequence[str]) -> bool:
    """A pid, a name, an amount: a row of a query for processes without the GPU."""
    return (
        len(cells) >= 3
        and re.fullmatch(r"[6-9]\d|\d{3,7}", cells[0]) is not None
        and number(cells[1]) is None
        and not cell_state(cells[1])
        and (number(cells[-1]) is not None or cell_state(cells[-1]) is not None)
        and not cells[-1].endswith(("%", "W", "C"))
    )


def _is_row(cells: Sequence[str]) -> bool:
    readable = sum(1 for cell in cells if number(cell) is not None or cell_state(cell))
    alone = len(cells) == 1 and _SIZE.search(cells[0])
    return bool(alone or len(cells) > 1) and readable >= 1 and readable * 3 >= len(cells)


def _take_row(report: dict[str, Any], names: Sequence[str], cells: Sequence[str]) -> None:
    if "pid" in names:
        report["processes"].append(_process(names, cells))
    else:
        report["gpus"].append(_gpu(dict(zip(names, cells))))


_BUS = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d"
_TABLE_NAME = re.compile(
    rf"^\|\s*(?P<index>\d+)\s+(?P<name>.+?)\s+(?P<persistence>On|Off|N/A|ERR!)?\s*\|"
    rf"\s*(?P<bus>{_BUS})\s+(?P<display>On|Off)?[^|]*?\|\s*(?P<ecc>[^|]*?)\s*\|"
)
_TABLE_MEMORY = re.compile(
    r"(?P<used>\d+)\s*MiB\s*/\s*(?P<total>\d+)\s*MiB"
    r"|(?<=\|)\s*(?P<none>Not Supported|N/A|ERR!|Unknown Error)(?:\s*/[^|]*)?\s*(?=\|.*(?:%|Default))"
)
_TABLE_PROCESS = re.compile(
    r"^\|\s*(?P<gpu>\d+)\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(?P<pid>\d+)\s+(?P<type>M?\+?[CG](?:\+G)?)\s+(?P<name>.*?)\s+(?P<used>\d+MiB|N/A)\s*\|"
)
_TABLE_MIG = re.compile(
    r"^\|\s*(?P<gpu>\d+)\s+(?P<gi>\d+)\s+(?P<ci>\d+)\s+(?P<dev>\d+)\s*\|\s*(?P<used>\d+)MiB\s*/\s*(?P<total>\d+)MiB"
)
_TABLE_HEAD = re.compile(r"Fan +Temp|Memory-Usage|Bus-Id|Persistence-M|NVIDIA-SMI \d|Driver Version")
_OBSERVED: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("utilization.gpu", re.compile(r"(?i)\butili[sz]ation\b[^:]*:\s*(?P<value>\d+(?:\.\d+)?\s*%)")),
    ("power.draw", re.compile(r"(?i)\bpower\b[^:]*:\s*(?:approximately|about|~)?\s*(?P<value>\d+(?:\.\d+)?\s*W)")),
    (
        "memory.used",
        re.compile(r"(?i)\bmemory\b[^:]*:\s*(?:approximately|about|~)?\s*(?P<value>\d+(?:\.\d+)?\s*[MG]iB)"),
    ),
)
_OBSERVED_NO_PROCESS = re.compile(r"(?i)\bprocess(?:es)?\b[^:]*:\s*(?:none|no\b|0\b)")


def parse_table(text: str) -> dict[str, Any]:
    """Read the table that plain ``nvidia-smi`` prints, whole or in pieces.

    Same shape as `parse_csv`, and ``mig_devices``: ``[{"gpu", "device", "memory_used_mib", "memory_total_mib"}]``.
    """
    table = _Table()
    for raw in split_lines(unquote(strip_ansi(text))):
        line = raw.strip()
        if not line or set(line) <= set("+-=|"):
            table.end_row()
        else:
            table.take(line)
    table.end_row()
    return table.report


class _Table:
    """Collects the rows of a table; one GPU has up to three lines."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {
            "gpus": [],
            "processes": [],
            "notices": [],
            "processes_known": False,
            "mig_devices": [],
        }
        self._fields: dict[str, str] = {}
        self._in_mig = False

    def end_row(self) -> None:
        """A rule or an empty line: the GPU before it is complete."""
        if self._fields:
            self.report["gpus"].append(_gpu(self._fields, untold="memory.used" not in self._fields))
            self._fields = {}

    def take(self, line: str) -> None:
        """One line that is neither empty nor a rule."""
        if "MIG devices" in line:
            self._in_mig = True
        elif "Processes:" in line:
            self._in_mig = False
        elif not (self._mig(line) or self._process(line) or self._gpu_line(line) or _TABLE_HEAD.search(line)):
            self._other(line)

    def _mig(self, line: str) -> bool:
        mig = _TABLE_MIG.match(line)
        if mig:
            used, whole = float(mig["used"]), float(mig["total"])
            self.report["mig_devices"].append(
                {"gpu": int(mig["gpu"]), "device": int(mig["dev"]), "memory_used_mib": used, "memory_total_mib": whole}
            )
        return bool(mig) or self._in_mig

    def _process(self, line: str) -> bool:
        match = _TABLE_PROCESS.match(line)
        if match:
            self.report["processes_known"] = True
            used = match["used"].replace("MiB", " MiB")
            row = {"gpu": int(match["gpu"]), "pid": int(match["pid"]), "name": match["name"]}
            self.report["processes"].append({**row, "used_mib": number(used), "state": cell_state(used)})
        return bool(match)

    def _gpu_line(self, line: str) -> bool:
        name = _TABLE_NAME.match(line)
        memory = None if name else _TABLE_MEMORY.search(line)
        if name:
            self.end_row()
            self._fields = {"index": name["index"], "name": name["name"], "pci.bus_id": name["bus"], "ecc": name["ecc"]}
            if name["display"]:
                self._fields["display_active"] = {"On": "Enabled", "Off": "Disabled"}[name["display"]]
            if name["persistence"]:
                self._fields["persistence_mode"] = name["persistence"]
        elif memory:
            _table_values(self._fields, line, memory)
        return bool(name or memory)

    def _other(self, line: str) -> None:
        notice = _notice(line)
        if notice:
            self.report["notices"].append(notice)
            self.report["processes_known"] |= notice["state"] == "no processes"
        elif self._fields and "|" in line:
            for cell in line.strip("|").split("|"):
                plain = cell.strip()
                if plain.rstrip("*") in {"Enabled", "Disabled"}:
                    self._fields["mig.mode.current"] = plain
                elif plain and cell_state(plain):
                    self._fields.setdefault("last row", plain)


def _table_values(fields: dict[str, str], line: str, memory: re.Match[str]) -> None:
    if memory["none"]:
        fields["memory.used"] = fields["memory.total"] = memory["none"].strip()
    else:
        fields["memory.used"], fields["memory.total"] = memory["used"] + " MiB", memory["total"] + " MiB"
    before, after = line[: memory.start()], line[memory.end() :]
    health = before.strip("| ").split()
    for name, text in zip(("fan.speed", "temperature.gpu", "pstate"), health):
        fields[name] = text.rstrip("C") if re.fullmatch(r"\d+C", text) else text
    power = re.search(r"(\d+(?:\.\d+)?W|N/A|ERR!)\s*/\s*(?:\d+(?:\.\d+)?W|N/A|ERR!)", before)
    if power:
        fields["power.draw"] = power[1].replace("W", " W")
    use = re.search(r"(\d+)%|ERR!|N/A", after)
    if use:
        fields["utilization.gpu"] = use[0].replace("%", " %")


# ``nvidia-smi -q`` prints sections by indentation: section above the key, key, field of a query.
_LONG_GPU = re.compile(rf"^GPU (?P<bus>{_BUS})\s*$")
_LONG_FIELDS = {
    ("", "product name"): "name",
    ("", "gpu uuid"): "uuid",
    ("", "persistence mode"): "persistence_mode",
    ("", "display active"): "display_active",
    ("", "performance state"): "pstate",
    ("", "compute mode"): "compute_mode",
    ("", "gpu recovery action"): "gpu_recovery_action",
    ("mig mode", "current"): "mig.mode.current",
    ("mig mode", "pending"): "mig.mode.pending",
    ("ecc mode", "current"): "ecc.mode.current",
    ("ecc mode", "pending"): "ecc.mode.pending",
    ("fb memory usage", "total"): "memory.total",
    ("fb memory usage", "used"): "memory.used",
    ("fb memory usage", "free"): "memory.free",
    ("utilization", "gpu"): "utilization.gpu",
    ("temperature", "gpu current temp"): "temperature.gpu",
    ("retired pages", "pending page blacklist"): "retired_pages.pending",
    ("retired pages", "pending"): "retired_pages.pending",
    ("remapped rows", "pending"): "remapped_rows.pending",
    ("remapped rows", "remapping failure occurred"): "remapped_rows.failure",
    ("fabric", "state"): "fabric.state",
    ("fabric", "status"): "fabric.status",
}
_LONG_PROCESS = {"process id": "pid", "name": "process_name", "used gpu memory": "used_gpu_memory"}


def is_long(text: str) -> bool:
    """Whether the text is what ``nvidia-smi -q`` prints."""
    return "NVSMI LOG" in text or bool(re.search(rf"^GPU {_BUS}\s*$", text, re.MULTILINE) and " : " in text)


def parse_long(text: str) -> dict[str, Any]:
    """Read the output of ``nvidia-smi -q``. Same shape as `parse_csv`."""
    report: dict[str, Any] = {"gpus": [], "processes": [], "notices": [], "processes_known": False}
    fields: dict[str, str] = {}
    process: dict[str, str] = {}
    path: list[tuple[int, str]] = []

    def end_process() -> None:
        if process:
            row = _process(tuple(process), tuple(process.values()))
            report["processes"].append({**row, "gpu": fields.get("uuid")})
            process.clear()

    def end_gpu() -> None:
        end_process()
        if fields:
            report["gpus"].append(_gpu(fields, untold="memory.used" not in fields))

    for raw in split_lines(unquote(strip_ansi(text))):
        line = raw.rstrip()
        start = _LONG_GPU.match(line)
        indent = len(line) - len(line.lstrip())
        key, colon, value = (part.strip() for part in line.partition(" : "))
        while path and path[-1][0] >= indent:
            path.pop()
        section = path[-1][1] if path else ""
        if start:
            end_gpu()
            fields = {"index": str(len(report["gpus"])), "pci.bus_id": start["bus"]}
            path = []
        elif not colon:
            path.append((indent, key.lower()))
            if (notice := _notice(line.strip())) and not fields:
                report["notices"].append(notice)
        elif key == "Processes":
            report["processes_known"] |= value == "None"
        elif key.lower() in _LONG_PROCESS and any(name == "processes" for _indent, name in path):
            if key == "Process ID":
                end_process()
                report["processes_known"] = True
            process[_LONG_PROCESS[key.lower()]] = value
        elif fields:
            _long_field(fields, section, key.lower(), value, [name for _indent, name in path])
    end_gpu()
    return report


def _long_field(fields: dict[str, str], section: str, key: str, value: str, path: Sequence[str]) -> None:
    """One line of a GPU; of counts of errors those of the whole board and of each kind."""
    name = _LONG_FIELDS.get((section, key))
    if name and not (name.endswith((".pending", ".failure")) and value == "No"):
        fields[name] = value
    elif section == "gpu reset status" and key == "reset required" and value == "Yes":
        fields["reset"] = "[GPU requires reset]"
    elif "ecc errors" in path and ("uncorrectable" in key or "double bit" in path) and section != "ecc errors":
        span = "aggregate" if any(part.startswith("aggregate") for part in path) else "volatile"
        fields[f"ecc.errors.uncorrected.{span}.{key.replace(' ', '_')}"] = value
    elif key in {"power draw", "average power draw"}:
        fields.setdefault("power.draw", value)


def parse_observation(text: str) -> dict[str, Any]:
    """Read an observation written by hand ("Memory: approximately 624 MiB per GPU"). Same shape as `parse_csv`."""
    fields = {name: match["value"] for name, pattern in _OBSERVED if (match := pattern.search(text))}
    fields = {name: re.sub(r"(?<=\d)\s*(?=[A-Za-z%])", " ", value) for name, value in fields.items()}
    return {
        "gpus": [_gpu(fields)] if fields else [],
        "processes": [],
        "notices": [],
        "processes_known": bool(_OBSERVED_NO_PROCESS.search(text)),
    }


def parse(text: str) -> dict[str, Any]:
    """Read any of the four: table, -q, observation or csv, told apart by their marks."""
    plain = unquote(strip_ansi(text))
    if is_long(plain):
        return parse_long(plain)
    if _TABLE_MEMORY.search(plain) or re.search(rf"^\|.*{_BUS}", plain, re.MULTILINE) or "MIG devices" in plain:
        return parse_table(plain)
    if sum(1 for _name, pattern in _OBSERVED if pattern.search(plain)) >= 2:
        return parse_observation(plain)
    return parse_csv(plain)


_SEVERITY = ("accept", "accept-with-warning", "reject-as-unknown-memory", "reject-as-unknown", "reject")


class _Verdict:
    """Collects reasons; the gravest decides."""

    def __init__(self) -> None:
        self.verdict, self.state, self.remedy = "accept", "ok", "Nothing to do."
        self.reasons: list[str] = []
        self._found: list[tuple[str, str, str]] = []  # each reason's verdict, the reason as a sentence, its own remedy

    def add(self, verdict: str, state: str, reason: str, remedy: str, quoted: bool = False) -> None:
        """One reason; ``quoted``: in the words of nvidia-smi."""
        self.reasons.append(reason)
        said = f'nvidia-smi says "{reason}".' if quoted else f"{reason[:1].upper()}{reason[1:]}."
        self._found.append((verdict, said, remedy))
        self._weigh(verdict, state, remedy)

    def take(self, other: _Verdict) -> None:
        """All reasons of another one."""
        self.reasons += other.reasons
        self._found += other._found
        self._weigh(other.verdict, other.state, other.remedy)

    def _weigh(self, verdict: str, state: str, remedy: str) -> None:
        graver = _SEVERITY.index(verdict) - _SEVERITY.index(self.verdict)
        # Of equally grave states the one that says what to do is named: ERR! in a row is how a reset shows too.
        if graver > 0 or (
            graver == 0 and state in {"requires reset", "lost"} and self.state not in {"requires reset", "lost"}
        ):
            self.verdict, self.state, self.remedy = verdict, state, remedy

    def sentences(self, refusing: bool) -> list[str]:
        """What refuses (or only warns) and what to do about it: one text for each remedy, with all that asks for it."""
        by_remedy: dict[str, list[str]] = {}
        for verdict, said, remedy in self._found:
            if refusing is not verdict.startswith("accept"):
                by_remedy.setdefault(remedy, []).append(said)
        return [" ".join([*said, remedy]) for remedy, said in by_remedy.items()]


class _Rules(NamedTuple):
    """What a GPU is judged by: whether all processes are known, whether MIG is wanted, and from where on it is busy."""

    processes_known: bool
    allow_mig: bool
    busy_mib: float


def judge(
    report: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    expected: int | None = None,
    allow_mig: bool = False,
    busy_mib: float = BUSY_MIB,
) -> dict[str, Any]:
    """Whether an engine may be started on these GPUs: a report of `parse`, or a list of its GPUs.

    `expected` is the number of GPUs that must be there. Returns ``verdict`` (accept, accept-with-warning, reject,
    reject-as-unknown, reject-as-unknown-memory), ``state`` (its short name), ``class`` ("host" or None), ``reasons``,
    ``remedy`` (of the gravest), ``faults`` and ``warnings`` (the reasons that refuse, and the others, each with its own
    remedy in whole sentences) and ``gpus``: ``[{"gpu", "state", "reasons"}]``.
    """
    whole = report if isinstance(report, Mapping) else {"gpus": list(report)}
    gpus: Sequence[Mapping[str, Any]] = whole.get("gpus", [])
    processes: Sequence[Mapping[str, Any]] = whole.get("processes", [])
    names = {name for gpu in gpus for name in (gpu.get("index"), gpu.get("uuid")) if name is not None}
    placed = len(gpus) == 1 or all(process.get("gpu") in names for process in processes)
    # "Nobody holds it" may only be said where every process could be put to its GPU.
    rules = _Rules(bool(whole.get("processes_known")) and placed, allow_mig, busy_mib)
    total = _Verdict()
    each = []
    for position, gpu in enumerate(gpus):
        name = f"GPU {gpu['index']}" if gpu.get("index") is not None else f"GPU in row {position + 1}"
        own = [process for process in processes if process.get("gpu") in {None, gpu.get("index"), gpu.get("uuid")}]
        verdict = _judge_gpu(name, gpu, own or (processes if len(gpus) == 1 else ()), rules)
        each.append({"gpu": gpu.get("index"), "state": verdict.state, "reasons": verdict.reasons})
        total.take(verdict)
    # What rejects is the first reason, not a shell's prompt above it.
    for notice in sorted(whole.get("notices", []), key=lambda item: item["weight"] not in {"bad", "unknown"}):
        verdict_name = {"bad": "reject", "unknown": "reject-as-unknown", "warning": "accept-with-warning"}.get(
            notice["weight"]
        )
        if verdict_name:
            total.add(verdict_name, notice["state"], notice["text"], notice["remedy"], quoted=True)
    # A process whose GPU cannot be matched to a row still holds memory on this host.
    held = [process for process in processes if (process.get("used_mib") or 0) >= busy_mib]
    if held and total.verdict != "reject":
        total.add(
            "reject", "busy", "; ".join(_held(process) for process in held), "End the processes, or wait for them."
        )
    blind = not gpus or all(gpu.get("memory_used_mib") is None for gpu in gpus)
    if blind and any(process.get("used_mib") is None for process in processes):
        total.add(
            "reject-as-unknown-memory",
            "memory not reported",
            "a process holds a GPU, and nothing tells how much of its memory",
            "Query the memory in use (nvidia-smi --query-gpu=memory.used).",
        )
    if not gpus and not processes and total.verdict.startswith("accept") and not whole.get("processes_known"):
        total.add(
            "reject-as-unknown",
            "nothing read",
            "no GPU row in the output",
            "Run nvidia-smi again and look at its exit status.",
        )
    if expected is not None and len(gpus) != expected:
        total.add(
            "reject",
            "gpu count",
            f"{len(gpus)} GPUs found, {expected} expected",
            "Read the kernel log for a GPU that dropped out, or correct the host's GPU list if it changed.",
        )
    return {
        "verdict": total.verdict,
        "state": total.state,
        "class": None if total.verdict.startswith("accept") else "host",
        "reasons": total.reasons,
        "remedy": total.remedy,
        "faults": total.sentences(refusing=True),
        "warnings": total.sentences(refusing=False),
        "gpus": each,
    }


def _held(process: Mapping[str, Any]) -> str:
    return f"{process.get('used_mib'):.0f} MiB held by pid {process.get('pid')} ({process.get('name')})"


def _judge_gpu(
    name: str,
    gpu: Mapping[str, Any],
    processes: Sequence[Mapping[str, Any]],
    rules: _Rules,
) -> _Verdict:
    known, allow_mig, busy_mib = rules
    found = _Verdict()
    states: Mapping[str, str] = gpu.get("states", {})
    fields: Mapping[str, str] = gpu.get("fields", {})
    for field, state in states.items():
        if state in _BROKEN:
            found.add(
                "reject",
                state,
                f"{name}: {field} reads {fields.get(field, state)}",
                "Reset the GPU or reboot before any start.",
            )
        elif state in _UNKNOWN:
            found.add(
                "reject-as-unknown",
                state,
                f"{name}: {field} reads {fields.get(field, state)}",
                "Run nvidia-smi again. Unknown is not healthy.",
            )
    _judge_fields(found, name, fields, allow_mig)
    _judge_xids(found, name, gpu)
    used, use = gpu.get("memory_used_mib"), gpu.get("utilization_percent")
    held = [process for process in processes if (process.get("used_mib") or 0) >= busy_mib]
    if used is not None and used >= busy_mib:
        if known and not processes:
            found.add(
                "reject",
                "held by nobody",
                f"{name}: {used:.0f} MiB in use, and no process is listed",
                f"{_LOOK}. Only if nobody holds it there either: reset the GPU or reboot.",
            )
        else:
            holders = "; ".join(_held(process) for process in held) or "its holder is not listed"
            remedy = "Wait for the holder, or end it." if held else f"{_LOOK}, then wait for it or end it."
            found.add("reject", "busy", f"{name}: {used:.0f} MiB in use ({holders})", remedy)
    elif held:
        found.add(
            "reject",
            "busy",
            f"{name}: " + "; ".join(_held(process) for process in held),
            "Wait for the holder, or end it.",
        )
    elif used is None and any(
        field.startswith("memory.") and states.get(field) for field in ("memory.used", "memory.total", "memory.free")
    ):
        found.add(
            "reject-as-unknown-memory",
            "memory not reported",
            f"{name}: memory reads {fields.get('memory.used', 'nothing')}",
            "Query the processes (nvidia-smi --query-compute-apps=pid,used_memory) and the free memory of the system.",
        )
    # Whatever counts as busy for the caller: an engine that computes holds memory, or is among the processes.
    empty = (used is None or used < min(busy_mib, BUSY_MIB)) and not processes
    threshold = WORKING_PERCENT if fields.get("display_active") == "Disabled" else SPINNING_PERCENT
    if use is not None and use >= threshold and empty:
        if known and use >= SPINNING_PERCENT:
            found.add(
                "reject",
                "wedged",
                f"{name}: {use:.0f} % busy, with little memory in use and no process listed",
                "A killed collective still spins on it: reset the GPU or reboot.",
            )
        else:
            found.add(
                "reject",
                "busy",
                f"{name}: {use:.0f} % busy with little memory in use",
                "Query the processes (nvidia-smi --query-compute-apps=pid): the GPU is in use, or wedged if nobody is "
                "there.",
            )
    return found


def _judge_xids(found: _Verdict, name: str, gpu: Mapping[str, Any]) -> None:
    """Xids of this boot, as a caller put them to the GPU: a driver that asks for no recovery has had it since."""
    recovered = str(gpu.get("fields", {}).get("gpu_recovery_action", "")).strip() == "None"
    for xid, line in dict(gpu.get("xids", ())).items():
        if xid in _XID_FAULTS and not recovered:
            found.add("reject", f"xid {xid}", f"{name}: the kernel's log says: {line}", "Reset the GPU or reboot.")
        else:
            found.add("accept-with-warning", f"xid {xid}", f"{name}: since boot: {line}", "Watch this GPU.")


def _judge_fields(found: _Verdict, name: str, fields: Mapping[str, str], allow_mig: bool) -> None:
    def plain(field: str) -> str:
        text = fields.get(field, "").strip()
        return "" if cell_state(text) else text

    action = plain("gpu_recovery_action")
    if action not in {"", "None"}:
        found.add(
            "reject",
            "recovery action",
            f"{name}: driver asks for {action}",
            f"Do that ({action.lower()}) before any start.",
        )
    fabric = plain("fabric.state")
    if fabric not in {"", "Completed"}:
        found.add(
            "reject",
            "fabric not ready",
            f"{name}: fabric state {fabric}",
            "Start the fabric manager of the driver's version, and wait for it.",
        )
    if plain("fabric.status") not in {"", "Success"}:
        found.add(
            "reject",
            "fabric not ready",
            f"{name}: fabric status {plain('fabric.status')}",
            "Read the fabric manager's log.",
        )
    if plain("mig.mode.current").rstrip("*") == "Enabled" and not allow_mig:
        found.add(
            "reject",
            "mig enabled",
            f"{name}: MIG mode is on, its memory belongs to slices",
            "Turn MIG off, or serve from a slice on purpose.",
        )
    if plain("compute_mode") == "Prohibited":
        found.add(
            "reject",
            "compute prohibited",
            f"{name}: compute mode Prohibited",
            "Set the compute mode back: nvidia-smi -c DEFAULT.",
        )
    for field, text in fields.items():
        value = number(text)
        if field.startswith("ecc.errors.uncorrected.volatile") and value:
            found.add(
                "reject",
                "uncorrectable ecc",
                f"{name}: {field} {value:.0f}",
                "Reset the GPU and check it before any start.",
            )
        elif field.startswith("ecc.errors.uncorrected.aggregate") and value:
            found.add("accept-with-warning", "old ecc errors", f"{name}: {field} {value:.0f}", "Watch this GPU.")
        elif field in {"retired_pages.pending", "remapped_rows.pending", "remapped_rows.failure"} and text.strip() in {
            "Yes",
            "1",
        }:
            found.add(
                "reject",
                "memory repair pending",
                f"{name}: {field} {text.strip()}",
                "Reboot if it is pending, exchange the board if it failed.",
            )
    if number(plain("ecc").rstrip("*")):
        found.add(
            "reject",
            "uncorrectable ecc",
            f"{name}: uncorrected ECC errors {plain('ecc')}",
            "Reset the GPU and check it before any start.",
        )
    for what in ("ecc", "mig"):
        now, pending = plain(f"{what}.mode.current"), plain(f"{what}.mode.pending")
        # The table marks a mode that is to change with an asterisk.
        if (now and pending and now != pending) or (plain("ecc") if what == "ecc" else now).endswith("*"):
            found.add(
                "accept-with-warning",
                "reboot due",
                f"{name}: {what.upper()} mode {now.rstrip('*') or 'now'}, pending {pending or 'another'}",
                "Reset the GPU or reboot when convenient.",
            )
    width, widest = number(fields.get("pcie.link.width.current", "")), number(fields.get("pcie.link.width.max", ""))
    if width and widest and width < widest:
        found.add(
            "accept-with-warning",
            "narrow link",
            f"{name}: PCIe x{width:.0f} of x{widest:.0f}",
            "Reseat the board, or check the riser.",
        )


def pace(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a PACE_QUERY answered, per GPU: {"index", "driver", "sm_mhz", "mem_mhz", "temperature_c", "power_w",
    "throttled": [reason, ...], "power_capped": bool | None}; None where the driver does not say."""
    found = []
    for gpu in report["gpus"]:
        fields = gpu["fields"]
        text = fields.get(PACE_QUERY[-1]) or fields.get(THROTTLE_FIELD) or ""
        bits = int(text, 16) if re.fullmatch(r"0x[0-9A-Fa-f]+", text) else None
        found.append(
            {
                "index": gpu["index"],
                "driver": None if cell_state(fields.get("driver_version", "n/a")) else fields["driver_version"],
                "sm_mhz": number(fields.get("clocks.sm") or fields.get("clocks.current.sm") or ""),
                "mem_mhz": number(fields.get("clocks.mem") or fields.get("clocks.current.memory") or ""),
                "temperature_c": gpu["temperature_c"],
                "power_w": gpu["power_w"],
                "throttled": [reason for bit, reason in _THROTTLING.items() if bits is not None and bits & bit],
                "power_capped": None if bits is None else bool(bits & _POWER_CAP),
            }
        )
    return found


def paces(samples: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Samples of `pace` over some time as one: {"driver", "clocks": {index: {"sm_mhz": [lowest, highest], "mem_mhz"}},
    "temperatures": {index: [lowest, highest]}, "throttle_reasons": ["GPU 0: reason", ...], "power_capped": [index]}."""
    found: dict[str, Any] = {
        "driver": None,
        "clocks": {},
        "temperatures": {},
        "throttle_reasons": [],
        "power_capped": [],
    }
    for sample in samples:
        for gpu in sample:
            found["driver"] = found["driver"] or gpu["driver"]
            index = str(gpu["index"])
            clocks = found["clocks"].setdefault(index, {})
            for into, key, value in (
                (clocks, "sm_mhz", gpu["sm_mhz"]),
                (clocks, "mem_mhz", gpu["mem_mhz"]),
                (found["temperatures"], index, gpu["temperature_c"]),
            ):
                if value is not None:
                    low, high = into.get(key, (value, value))
                    into[key] = [min(low, value), max(high, value)]
            for reason in gpu["throttled"]:
                if (said := f"GPU {index}: {reason}") not in found["throttle_reasons"]:
                    found["throttle_reasons"].append(said)
            if gpu["power_capped"] and gpu["index"] not in found["power_capped"]:
                found["power_capped"].append(gpu["index"])
    return found
