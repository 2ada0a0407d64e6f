"""The one way to run an engine's code outside its unit: a preflight, a load generator, a check of the links.

A transient unit with the sandbox lines of the variant's own unit, and more: what the engine could have written (its
home and caches) is not there, there is no network unless it is asked for, and time, memory and output have limits. When
its command ends, or when the time is over, everything that it started ends too.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..module_utils import unit_text
from . import systemd

# Beginnings of what a unit's [Service] says about an engine's server, and not about what its processes may do.
SERVER_ONLY = (
    *("CacheDirectory", "Environment", "ExecStart", "KillMode", "LoadCredential", "LogRateLimit", "NotifyAccess"),
    *("OOMScoreAdjust", "Restart", "RuntimeDirectory", "StateDirectory", "SyslogIdentifier", "TimeoutSt", "Type"),
    *("UMask", "Watchdog", "WorkingDirectory"),
)
# Places that the engine writes: empty here, and gone afterwards.
EMPTIED = ("/var/lib/vllm", "/var/cache/vllm")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MEMORY = "75%"
OUTPUT_LIMIT = 16 << 20
GRACE_S = 10.0


class Ended(NamedTuple):
    """How a command ended: its exit status (negative: the signal that ended it, None: it was ended by us), and what it
    printed."""

    code: int | None
    out: str
    err: str

    @property
    def how(self) -> str:
        """In words."""
        if self.code is None:
            return "had not ended in time, or printed too much"
        return f"was killed by signal {-self.code}" if self.code < 0 else f"ended with status {self.code}"

    @property
    def last(self) -> str:
        """The last line of what it had to say."""
        return (self.err.strip().splitlines() or ["nothing was printed"])[-1]


def run(
    text: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    given: str = "",
    network: bool = False,
    more: Iterable[str] = (),
) -> Ended:
    """Run ``argv`` as the unit whose ``text`` this is would, once, with ``given`` on standard input.

    ``more`` are further lines of a [Service] section. Where no systemd runs this host there is no sandbox either, and
    the command runs as a plain child. OSError when it cannot be started at all.
    """
    environment = {"PATH": PATH, **environment}
    unit = f"swapgate-aside-{uuid.uuid4().hex[:8]}.service"
    command = list(argv)
    if _booted():
        lines = [*_sandbox(text), *more, f"RuntimeMaxSec={limit_s:.0f}", f"MemoryMax={MEMORY}"]
        lines += [] if network else ["PrivateNetwork=yes"]
        command = ["systemd-run", "--quiet", "--pipe", "--wait", "--service-type=exec", f"--unit={unit}"]
        command += [f"--property={line}" for line in lines]
        command += [f"--setenv={name}={value}" for name, value in environment.items()]
        command += ["--", *(word.replace("$", "$$") for word in argv)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment if not _booted() else None,
        cwd="/",
        start_new_session=True,
    )
    try:
        whole, out, err = _gather(process, given.encode(), time.monotonic() + limit_s + GRACE_S)
    finally:
        _end(process, unit)
    code: int | None = process.returncode
    if _booted() and code:
        code = _status(unit, code)
    return Ended(code if whole else None, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def _booted() -> bool:
    return os.path.isdir("/run/systemd/system")


def _sandbox(text: str) -> list[str]:
    kept = [
        f"{key}={value.replace('%%', '%')}"
        for section, key, value in unit_text.parse(text)
        if section == "Service" and not key.startswith(SERVER_ONLY)
    ]
    emptied = [f"TemporaryFileSystem={place}:mode=1777" for place in EMPTIED]
    return [*kept, *emptied, "PrivateTmp=yes", "KillMode=control-group", "WorkingDirectory=/", "UMask=0077"]


def _gather(process: subprocess.Popen[bytes], given: bytes, deadline: float) -> tuple[bool, bytes, bytes]:
    """(whether it ended by itself within time and limits, standard output, standard error)."""
    assert process.stdin and process.stdout and process.stderr
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(given)  # less than a pipe holds, or read at once
    found: dict[Any, list[bytes]] = {process.stdout: [], process.stderr: []}
    size = 0
    with selectors.DefaultSelector() as selector:
        for pipe in found:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and size <= OUTPUT_LIMIT and time.monotonic() < deadline:
            for ready, _ in selector.select(max(0.0, min(1.0, deadline - time.monotonic()))):
                chunk = os.read(ready.fd, 1 << 16)
                if not chunk:
                    selector.unregister(ready.fileobj)
                size += len(chunk)
                found[ready.fileobj].append(chunk)
        whole = not selector.get_map()
    return whole, b"".join(found[process.stdout]), b"".join(found[process.stderr])


def _end(process: subprocess.Popen[bytes], unit: str) -> None:
    """Nothing of it is left, whatever became of it."""
    if process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    if process.poll() is None:
        if _booted():
            systemd.systemctl("kill", "--signal=KILL", unit, check=False)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def _status(unit: str, code: int) -> int | None:
    """A failed unit's exit status, the signal that ended it as a negative number, or None where its time was over; the
    unit is forgotten then."""
    now = systemd.show(unit, "Result", "ExecMainStatus")
    systemd.systemctl("reset-failed", unit, check=False)
    if now.get("Result") == "timeout":
        return None
    if now.get("Result") in ("signal", "core-dump") and now.get("ExecMainStatus", "").isdigit():
        return -int(now["ExecMainStatus"])
    return code
