"""Process titles: what ps shows (argv) and what the kernel calls the process (comm), as the real engine sets both."""

from __future__ import annotations

import ctypes
from pathlib import Path

PR_SET_NAME = 15
ARG_START, ARG_END = 47, 48  # of /proc/PID/stat, counted from 0


def argument_area() -> tuple[int, int]:
    """Address and size in bytes of this process's argument strings, or (0, 0) where the kernel does not tell."""
    # the command name may hold spaces and brackets, so count from behind the last bracket
    after = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    values = [*["", ""], *after]
    if len(values) <= ARG_END:
        return 0, 0
    start, end = int(values[ARG_START]), int(values[ARG_END])
    return (start, end - start) if end > start > 0 else (0, 0)


def set_title(title: str) -> None:
    """Sets comm (first 15 bytes) and overwrites argv; a title longer than the old command line is cut."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NAME, ctypes.c_char_p(title.encode()[:15]), 0, 0, 0)
    start, size = argument_area()
    if size > 1:
        ctypes.memset(start, 0, size)
        ctypes.memmove(start, title.encode()[: size - 1], min(len(title.encode()), size - 1))
