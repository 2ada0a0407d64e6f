"""Who holds a port or a GPU, what a process tree is doing, and which shared memory is in use, read from /proc.

``proc`` is a folder, another one in tests.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

LISTEN = "0A"


class Holder(NamedTuple):
    """A process: its pid, command name, and systemd unit (empty outside one)."""

    pid: int
    command: str
    unit: str

    def __str__(self) -> str:
        return "pid {} ({}){}".format(self.pid, self.command, " of " + self.unit if self.unit else "")


class Owner(NamedTuple):
    """Whose a process is: its pid, command name, systemd unit (empty outside one), user, and start."""

    pid: int
    command: str
    unit: str
    user: str
    since_unix: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(self.since_unix))
        return "pid {} ({}) of {}, user {}, since {}".format(
            self.pid, self.command, self.unit or "no unit", self.user, since
        )


class Work(NamedTuple):
    """What a process tree has done so far: CPU seconds and bytes read from storage."""

    cpu_s: float
    read_bytes: int


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _stat_fields(pid: int, proc: str) -> list[str]:
    # The command name may hold spaces and brackets; the fields start after the last bracket.
    return _read(f"{proc}/{pid}/stat").rpartition(")")[2].split()


def pids(proc: str = "/proc") -> list[int]:
    """Every process that can be seen."""
    return [int(name) for name in os.listdir(proc) if name.isdigit()]


def descendants(pid: int, proc: str = "/proc") -> list[int]:
    """All processes below ``pid``, not itself."""
    children: dict[int, list[int]] = {}
    for one in pids(proc):
        fields = _stat_fields(one, proc)
        if len(fields) > 1:
            children.setdefault(int(fields[1]), []).append(one)
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def listening_inodes(port: int, proc: str = "/proc") -> set[str]:
    """Socket inodes that listen on TCP ``port``, on any address."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in _read(f"{proc}/net/{table}").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _opened(pid: int, proc: str) -> Iterator[str]:
    """What the open files of a process are links to; nothing where it has ended or may not be looked into."""
    folder = f"{proc}/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed since
                yield os.readlink(os.path.join(folder, name))


def holds_socket(pid: int, inodes: Iterable[str], proc: str = "/proc") -> bool:
    """Whether ``pid`` has one of these sockets open (needs the same user, or root)."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return any(link in wanted for link in _opened(pid, proc))


def unit_of(pid: int, proc: str = "/proc") -> str:
    """The systemd unit of a process, from its control group; empty outside one."""
    match = re.search(r"/([^/\n]+\.(?:service|scope))(?:/|$)", _read(f"{proc}/{pid}/cgroup"), re.M)
    return match.group(1) if match else ""


def owner(pid: int, proc: str = "/proc", ticks: int | None = None) -> Owner | None:
    """Whose a process is; None when it is gone, or belongs to a PID namespace that cannot be seen from here."""
    fields = _stat_fields(pid, proc)
    try:
        uid = os.stat(f"{proc}/{pid}").st_uid
    except OSError:
        return None
    if len(fields) < 20 or fields[0] == "Z":
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    boot = re.search(r"^btime (\d+)", _read(f"{proc}/stat"), re.M)
    since = (int(boot.group(1)) if boot else 0) + int(fields[19]) / (ticks or os.sysconf("SC_CLK_TCK"))
    return Owner(pid, _read(f"{proc}/{pid}/comm").strip(), unit_of(pid, proc), user, since)


def runs_from(pid: int, folder: str, proc: str = "/proc") -> bool:
    """Whether a process was started from below ``folder`` or has a file from there mapped.

    An interpreter is a link to one elsewhere and a title can overwrite the command line, but the libraries of an
    engine stay mapped as long as it runs.
    """
    below = folder.rstrip("/") + "/"
    with contextlib.suppress(OSError):
        if os.readlink(f"{proc}/{pid}/exe").startswith(below):
            return True
    return _read(f"{proc}/{pid}/cmdline").startswith(below) or f" {below}" in _read(f"{proc}/{pid}/maps")


def inodes_in_use(names: Iterable[str], proc: str = "/proc") -> set[tuple[int, int]]:
    """(device, inode) of every mapped file, and of every open one that bears one of these names.

    OSError when a process may not be looked into: what it uses is then not known.
    """
    wanted = set(names)
    used: set[tuple[int, int]] = set()
    for pid in pids(proc):
        try:
            with open(f"{proc}/{pid}/maps", encoding="utf-8", errors="replace") as file:
                for line in file:
                    fields = line.split(None, 5)
                    if len(fields) > 5 and fields[4] != "0":
                        major, _, minor = fields[3].partition(":")
                        used.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
            for name in os.listdir(f"{proc}/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    # By name first: to look at each open file could wait for a dead network share.
                    link = f"{proc}/{pid}/fd/{name}"
                    if os.path.basename(os.readlink(link)) in wanted:
                        seen = os.stat(link)
                        used.add((seen.st_dev, seen.st_ino))
        except (FileNotFoundError, ProcessLookupError):  # it has ended since
            continue
    return used


def port_holders(port: int, proc: str = "/proc") -> list[Holder]:
    """The processes that listen on ``port`` (those of other users only when run as root)."""
    inodes = listening_inodes(port, proc)
    if not inodes:
        return []
    found = []
    for pid in pids(proc):
        if holds_socket(pid, inodes, proc):
            command = _read(f"{proc}/{pid}/comm").strip()
            found.append(Holder(pid, command, unit_of(pid, proc)))
    return found


def device_holders(prefix: str, proc: str = "/proc") -> list[Owner]:
    """The processes that have a device file open whose path begins with ``prefix`` (those of others only as root)."""
    held = [pid for pid in pids(proc) if any(link.startswith(prefix) for link in _opened(pid, proc))]
    return [holder for pid in held if (holder := owner(pid, proc))]


def members(units: Iterable[str], proc: str = "/proc") -> list[Holder]:
    """The processes of these systemd units, and of what they started: whoever left its parent is still of its unit."""
    wanted = set(units)
    found = [Holder(pid, _read(f"{proc}/{pid}/comm").strip(), unit_of(pid, proc)) for pid in pids(proc)]
    return [holder for holder in found if holder.unit in wanted]


def work(members: Iterable[int], proc: str = "/proc", ticks: int | None = None) -> Work:
    """The work of a set of processes so far. Processes that ended in between count no more."""
    per_second = ticks or os.sysconf("SC_CLK_TCK")
    cpu, read = 0, 0
    for pid in members:
        fields = _stat_fields(pid, proc)
        if len(fields) > 12:
            cpu += int(fields[11]) + int(fields[12])
        match = re.search(r"^rchar: (\d+)", _read(f"{proc}/{pid}/io"), re.M)
        read += int(match.group(1)) if match else 0
    return Work(cpu / per_second, read)
