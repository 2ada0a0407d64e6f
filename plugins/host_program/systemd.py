"""Talking to systemd: the notify socket, and the few systemctl calls of a swap."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Sequence

SYSTEMCTL_LIMIT_S = 30.0
SHOW_PATIENCE_S = 6.0
SHOW_POLL_S = 0.3
ENABLED = ("enabled", "enabled-runtime")
# States of a unit that has processes.
ALIVE = ("active", "activating", "deactivating", "reloading")


class SystemdError(Exception):
    """A systemctl call that failed; the text is the command and what it said."""


def notify(message: str) -> None:
    """Send ``message``, a line a setting, to the service manager; silently nothing outside a unit of Type=notify.

    Texts of others in it must be printable: a line of theirs would be a setting.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    # A message that systemd does not take (it may be re-executing itself) must not end what serves.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock, contextlib.suppress(OSError):
        sock.sendto(message.encode(), address)


def systemctl(*words: str, limit_s: float | None = SYSTEMCTL_LIMIT_S, check: bool = True) -> str:
    """Standard output of ``systemctl WORDS``; SystemdError when it fails or takes longer than ``limit_s``."""
    command = ["systemctl", "--no-pager", *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False, text=True)
    except subprocess.TimeoutExpired as error:
        raise SystemdError("{}: no answer in {:.0f} s".format(" ".join(command), limit_s or 0)) from error
    if check and done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise SystemdError("{}: exit {}: {}".format(" ".join(command), done.returncode, said[-1] if said else ""))
    return done.stdout


def show(unit: str, *properties: str) -> dict[str, str]:
    """The named properties of a unit, as systemd prints them. Asked again while systemd re-executes itself."""
    return _show([unit], properties)[0]


def states(units: Sequence[str]) -> dict[str, str]:
    """The ActiveState of each unit, in one call."""
    found = _show(units, ("ActiveState",)) if units else []
    return {unit: each["ActiveState"] for unit, each in zip(units, found)}


def _show(units: Sequence[str], properties: Sequence[str]) -> list[dict[str, str]]:
    deadline = time.monotonic() + SHOW_PATIENCE_S
    while True:
        try:
            text = systemctl("show", *units, "--property=" + ",".join(properties))
            break
        except SystemdError:
            if time.monotonic() > deadline:
                raise
            time.sleep(SHOW_POLL_S)
    return [dict(line.split("=", 1) for line in part.splitlines() if "=" in line) for part in text.split("\n\n")]


def is_enabled(unit: str) -> bool:
    """Whether the unit starts at boot."""
    return systemctl("is-enabled", unit, check=False).strip() in ENABLED


def enabled(units: Sequence[str]) -> list[str]:
    """Those of these units that start at boot, in one call."""
    answers = systemctl("is-enabled", *units, check=False).split() if units else []
    if len(answers) != len(units):  # a unit whose file has gone has no answer
        return [unit for unit in units if is_enabled(unit)]
    return [unit for unit, answer in zip(units, answers) if answer in ENABLED]


def stale(units: Sequence[str]) -> bool:
    """Whether the files of one of these units changed since systemd read them."""
    return any(each["NeedDaemonReload"] == "yes" for each in _show(units, ("NeedDaemonReload",))) if units else False


def going_down() -> bool:
    """Whether the host shuts down: no unit can be started any more."""
    return systemctl("is-system-running", check=False).strip() == "stopping"


def verify(path: str) -> list[str]:
    """What systemd-analyze says about a unit file. It exits 0 on an unknown key, so its text counts, not its code.

    Lines about other units of the host are left out: they are not this file's fault.
    """
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
    )
    name = os.path.basename(path)
    lines = [line for line in done.stdout.splitlines() if name in line]
    if done.returncode != 0 and not lines:
        lines = done.stdout.splitlines() or [f"systemd-analyze verify: exit {done.returncode}"]
    return lines


def _journalctl(*words: str) -> list[str]:
    done = subprocess.run(
        ["journalctl", "--no-pager", "--output=cat", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
        text=True,
        errors="replace",
        timeout=SYSTEMCTL_LIMIT_S,
    )
    return done.stdout.splitlines()


def journal(unit: str, since_unix: float, most: int = 200) -> list[str]:
    """The last lines of a unit's journal since a time: its own output and what systemd said about it."""
    return _journalctl("--unit", unit, "--lines", str(most), "--since", f"@{since_unix - 1:.0f}")


def kernel_log() -> list[str]:
    """The kernel's messages since boot; empty where they cannot be read."""
    try:
        return _journalctl("--dmesg", "--boot")
    except (OSError, subprocess.TimeoutExpired):
        return []


def enable_only(unit: str, others: Sequence[str]) -> None:
    """Make ``unit`` the only one of these units that starts at boot. systemd reads that at its next daemon-reload."""
    systemctl("enable", "--quiet", "--no-reload", unit)
    gone = enabled([other for other in others if other != unit])
    if gone:
        systemctl("disable", "--quiet", "--no-reload", *gone)
