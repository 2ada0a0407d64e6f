"""Measuring jobs of this host: one at a time, by a lock that names it, and ended before an engine is stopped.

The lock's file
    {"kind": one of KINDS, "by": who asked, "since_unix", "pid", "unit": its systemd unit, or "" outside one}
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from ..module_utils import processes, records
from . import systemd

JsonDict = dict[str, Any]

KINDS = {"benchmark", "record", "probe", "profile", "links"}
# The kernel frees the lock with the process; who looks at it holds it for a moment.
LOCK_LIMIT_S = 1.0
# For a job's own record once it was told to end, while the engine still serves.
END_LIMIT_S = 10.0
POLL_S = 0.05


class JobRuns(Exception):
    """Another job measures on this host; the text says which, whose and since when."""


class Ended(Exception):
    """This job was told to end; the text says why."""


def _held(layout: records.Layout) -> JsonDict | None:
    """What the holder of the lock wrote about itself; None when nobody holds it."""
    try:
        with layout.job.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                with contextlib.suppress(ValueError):  # a job that begins this very moment
                    found: JsonDict = json.loads(file.read())
                    return found
    except (FileNotFoundError, PermissionError):  # only root starts jobs
        pass
    return None


def under_way(layout: records.Layout) -> list[JsonDict]:
    """[{"unit", "kind", "by", "since_unix"}] of the measuring job that runs now; empty when none does."""
    job = _held(layout)
    return [{key: job.get(key) for key in ("unit", "kind", "by", "since_unix")}] if job else []


def refuse_beside(layout: records.Layout) -> None:
    """JobRuns when a job runs: two would measure each other."""
    for job in under_way(layout):
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(job["since_unix"]))
        end = f", or end it: systemctl stop {job['unit']}" if str(job["unit"]).startswith("swapgate-") else ""
        raise JobRuns(
            f"a {job['kind']} job by {job['by']} has run on this host since {since}, and two jobs would measure each "
            f"other. Wait for it{end}."
        )


@contextlib.contextmanager
def running(layout: records.Layout, kind: str, owner: str) -> Iterator[None]:
    """Be this host's one measuring job. JobRuns beside another one; Ended inside once somebody ends this one."""
    layout.job.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_LIMIT_S
    # Nobody else may hold it.
    with open(layout.job, "a+", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                refuse_beside(layout)
                if time.monotonic() > deadline:
                    raise JobRuns("another measuring job is beginning on this host. Run it again.") from error
                time.sleep(POLL_S)
        job = {"kind": kind, "by": owner, "since_unix": time.time(), "pid": os.getpid()}
        file.truncate(0)
        file.write(json.dumps({**job, "unit": processes.unit_of(os.getpid())}))
        file.flush()

        def told(_number: int, _frame: Any) -> NoReturn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its own record is not cut off
            why = records.read_if_there(layout.job_end) or {}
            raise Ended(str(why["why"]) if why.get("pid") == os.getpid() else "it was stopped before its end")

        before = signal.signal(signal.SIGTERM, told)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def end(layout: records.Layout, why: str) -> JsonDict | None:
    """End the job that runs, so that it says ``why`` in its own record; returns what it was, or None.

    It has a few seconds for its record; then its unit is stopped like any other.
    """
    job = _held(layout)
    if job is None:
        return None
    records.write_json(layout.job_end, {"pid": job["pid"], "why": why})
    with contextlib.suppress(ProcessLookupError):
        os.kill(job["pid"], signal.SIGTERM)
    deadline = time.monotonic() + END_LIMIT_S
    while time.monotonic() < deadline:
        if _held(layout) is None:
            return job
        time.sleep(POLL_S)
    if str(job["unit"]).startswith("swapgate-"):
        systemd.systemctl("kill", "--signal=KILL", job["unit"], check=False)
    return job
