"""Shared-memory segments that dead engines left in the host's /dev/shm: only where a unit has none of its own."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Callable

from ..module_utils import processes

FOLDER = "/dev/shm"


def stale(uid: int, folder: str = FOLDER, proc: str = "/proc") -> list[str]:
    """The segments of user ``uid`` that no process has open or mapped: whoever made them is dead.

    OSError when a process may not be looked into (needs root).
    """
    mine: dict[str, tuple[int, int]] = {}
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            seen = entry.stat(follow_symlinks=False)
            if seen.st_uid == uid and stat.S_ISREG(seen.st_mode):
                mine[entry.path] = (seen.st_dev, seen.st_ino)
    used = processes.inodes_in_use((os.path.basename(path) for path in mine), proc) if mine else set()
    return sorted(path for path, inode in mine.items() if inode not in used)


def remove_stale(uid: int, say: Callable[[str], None], folder: str = FOLDER, proc: str = "/proc") -> None:
    """Remove them, and say so. What cannot be removed is said too: the start that follows shows whether it matters."""
    try:
        for path in stale(uid, folder, proc):
            size = os.stat(path).st_size >> 20
            os.unlink(path)
            say(f"removed {path} ({size} MiB): its creator is dead")
    except OSError as error:
        say(f"stale shared memory in {folder} stays: {error}")
