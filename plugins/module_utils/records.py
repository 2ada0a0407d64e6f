"""What the host program keeps on disk: where it lies, its shapes, and how it is written without ever being half there.

Shapes (``schema`` is 1 in each file)

state.json
    {"schema", "last_good": RELEASE | null, "swap": SWAP | null}
RELEASE
    {"model", "variant", "slot", "unit", "release", "since_unix": s, "answer": str | null, "identity": {...}}: a release
    that passed its soak; ``answer`` is its text for the fixed greedy prompt, ``identity`` what it stood on (engine,
    model, driver). Records of older hosts name neither model nor slot.
SWAP
    {"id", "by", "started_unix", "boot_id", "from": RELEASE | null,
     "to": {"model", "variant", "slot", "unit", "release"}, "phase", "phase_since_unix",
     "phases": [{"name", "seconds"}], "stopped_old": bool, "outcome": null | OUTCOME,
     "cause": null | CAUSE, "rollback_cause": null | CAUSE, "service_lost_s": monotonic s of this boot | null,
     "seconds_without_service": s | null, "streams": null | {"running": at the stop, "lost": cut off by it},
     "ended_unix": null | s, "preflight": null | report of preflight,
     "confirm_within_s": null | s it may wait in phase `confirm`, which began at "phase_since_unix",
     "waits_for": who holds the port of the last good variant, while the way back waits for it; else null or not there,
     "kind": "deploy" | "rollback", "because": null | why, in the words of who asked,
     "changes": null | what changes from "from" to "to", in two or three words}
OUTCOME, a closed list
    swapped | unchanged | refused | rolled_back | recovered | failed
CAUSE
    {"what": str, "class": "config" | "model" | "host" | "transient" | "operator" | "unknown", "phase": str,
     "root_cause": str | null, "signature": str | null, "remedy": str | null, "context": [str, ...]}
history.jsonl
    one ended SWAP a line
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from . import foreign

SCHEMA = 1
# State and history hold lines of the engine's log, and those what clients asked.
PRIVATE = 0o640
# load.json, as `foreign.fit` takes it: the engine's user writes it. See supervisor.py for what it means.
LOAD: dict[str, Any] = {
    **{"unit": str, "variant": str, "state": str, "pid": (int,), "started_unix": float, "updated_unix": float},
    **{"ready_after_s": (float,), "changes": [str], "typical_load_s": (float,), "exit": (str,)},
    "load": {
        **{"phase": str, "percent": float, "elapsed_s": float, "remaining_s": (float,), "remaining_from": (str,)},
        **{"detail": str, "quiet_s": float, "stalled": bool, "evidence": str},
        "phases": [{"name": str, "seconds": float}],
    },
    "failure": (
        {
            **{"what": str, "class": (str,), "phase": (str,), "root_cause": (str,), "signature": (str,)},
            **{"remedy": (str,), "context": ([str],)},
        },
    ),
}
OUTCOMES = ("swapped", "unchanged", "refused", "rolled_back", "recovered", "failed")

JsonDict = dict[str, Any]


class RecordError(Exception):
    """A record that cannot be used: corrupt, empty, or written by a newer swapgate."""


class Layout:
    """Every path that swapgate uses on a host, below ``root`` (another one than ``/`` in tests)."""

    def __init__(self, root: str = "/") -> None:
        base = Path(root)
        self.signatures = base / "usr/local/lib/swapgate/signatures.json"
        self.api_key = base / "etc/swapgate/credentials/vllm_api_key"
        self.state_dir = base / "var/lib/swapgate"
        self.state = self.state_dir / "state.json"
        self.request = self.state_dir / "request.json"
        self.confirmation = self.state_dir / "confirmation.json"
        self.history = self.state_dir / "history.jsonl"
        self.releases = self.state_dir / "releases"
        self.preflights = self.state_dir / "preflight"
        self.manifests = self.state_dir / "manifests"
        self.variants = base / "etc/swapgate/variants"
        self.units = base / "etc/systemd/system"
        self.runtime = base / "run/swapgate"
        self.lock = base / "run/swapgate/swap.lock"
        self.job = base / "run/swapgate/job.lock"
        self.job_end = base / "run/swapgate/job-end.json"
        self.home = base / "var/lib/vllm"

    def release(self, release: str) -> Path:
        """The folder of one release."""
        return self.releases / release

    def data(self, unit: str) -> Path:
        """Where the data of the variant installed as ``unit`` belongs. To read it ask `installed`: on a host of an
        older swapgate it is named after the variant."""
        return self.variants / (unit[: -len(".service")] + ".json")

    def unit_runtime(self, unit: str) -> Path:
        """The folder where the supervisor of ``unit`` keeps its progress."""
        return self.runtime / unit[: -len(".service")]


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace ``path`` by ``text``: written beside it, synced, renamed, and the folder synced too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=str(path.parent), prefix="." + path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(beside, mode)
        os.replace(beside, str(path))
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk's own error names no file
        raise
    folder = os.open(str(path.parent), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """``value`` as JSON at ``path``, atomically."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", mode)


def read_json(path: Path) -> Any:
    """The JSON value at ``path``; RecordError names the file when it cannot be read as such."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: {error}") from error


def read_if_there(path: Path) -> JsonDict | None:
    """The JSON object at ``path``, or None when there is none or it is only half written."""
    try:
        value = read_json(path)
    except (FileNotFoundError, RecordError):
        return None
    return value if isinstance(value, dict) else None


def read_load(layout: Layout, unit: str) -> JsonDict | None:
    """What a unit's supervisor tells of its load, or None. The engine could have written it instead."""
    return foreign.read_object(layout.unit_runtime(unit) / "load.json", LOAD)


def remove(path: Path) -> None:
    """Whatever is at ``path`` is gone afterwards, a folder too. OSError where that cannot be."""
    try:
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError:
        shutil.rmtree(path)


def empty_state() -> JsonDict:
    """The state of a host on which nothing was ever swapped."""
    return {"schema": SCHEMA, "last_good": None, "swap": None}


def read_state(layout: Layout) -> JsonDict:
    """The state file. No file is the empty state; a file that cannot be trusted is a RecordError."""
    try:
        state = read_json(layout.state)
    except FileNotFoundError:
        return empty_state()
    if not isinstance(state, dict) or not {"schema", "last_good", "swap"} <= set(state):
        raise RecordError(f"{layout.state}: not a state file of swapgate (found {state!r:.60})")
    if state["schema"] != SCHEMA:
        raise RecordError(
            "{}: schema {!r}, expected {}. Another release of swapgate wrote it.".format(
                layout.state, state["schema"], SCHEMA
            )
        )
    return state


def append_history(layout: Layout, swap: JsonDict) -> None:
    """One ended swap as one line, synced."""
    with layout.history.open("a+b") as out:
        os.fchmod(out.fileno(), PRIVATE)
        if out.seek(0, os.SEEK_END):
            out.seek(-1, os.SEEK_END)
            if out.read() != b"\n":  # a line that a power failure cut; it must not swallow this one
                out.write(b"\n")
        out.write((json.dumps(swap, sort_keys=True, ensure_ascii=False) + "\n").encode())
        out.flush()
        os.fsync(out.fileno())


def read_history(layout: Layout) -> list[JsonDict]:
    """All ended swaps, oldest first; a line cut by a power failure is passed over."""
    swaps = []
    try:
        lines = layout.history.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError):
            swaps.append(json.loads(line))
    return swaps
