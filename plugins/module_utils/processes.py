"""Who holds a port and what a process tree is doing, read from /proc. ``proc`` is a folder, another one in tests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

LISTEN = "0A"


class Holder(NamedTuple):
    """A process that listens on a port: its pid, command name, and systemd unit (empty outside one)."""

    pid: int
    command: str
    unit: str

    def __str__(self) -> str:
        return "pid {} ({}){}".format(self.pid, self.command, " of " + self.unit if self.unit else "")


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


def holds_socket(pid: int, inodes: Iterable[str], proc: str = "/proc") -> bool:
    """Whether ``pid`` has one of these sockets open (needs the same user, or root)."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    folder = f"{proc}/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(os.path.join(folder, name)) in wanted:
                return True
        except OSError:
            continue
    return False


def unit_of(pid: int, proc: str = "/proc") -> str:
    """The systemd unit of a process, from its control group; empty outside one."""
    match = re.search(r"/([^/\n]+\.(?:service|scope))(?:/|$)", _read(f"{proc}/{pid}/cgroup"), re.M)
    return match.group(1) if match else ""


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
