"""Lines in the engine's own shape: (Process pid=N) LEVEL MM-DD HH:MM:SS [file.py:line] text."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

MAIN = "APIServer"


def stamp() -> str:
    """The wall clock as the engine prints it; only ever printed, never compared."""
    return time.strftime("%m-%d %H:%M:%S")


def write(text: str, stream: TextIO | None = None) -> None:
    """Writes at once: a reader of the pipe must see a line when it is printed.

    A closed reader ends the printing, not the engine.
    """
    target = stream if stream is not None else sys.stdout
    try:
        target.write(text)
        target.flush()
    except (BrokenPipeError, ValueError):
        return


def line(level: str, where: str, text: str, process: str = MAIN, pid: int | None = None) -> None:
    """Prints one log line on standard output. `where` is `file.py:number`."""
    for part in text.split("\n"):
        write(f"({process} pid={pid if pid is not None else os.getpid()}) {level} {stamp()} [{where}] {part}\n")


def warning(where: str, text: str) -> None:
    """One WARNING line of the process that parses arguments."""
    line("WARNING", where, text)
