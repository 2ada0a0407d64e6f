"""The processes behind the API server: an engine core, its workers, their shared memory; and the API server's view of
them.

The API server forks the engine core before it starts any thread. Commands go down one pipe, one per line: `workers`,
`ready`, `kill RANK SIGNAL`, `die`, `quit`. The names of what was made come back on another, whose end tells that the
engine core is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from vllm.fake import log
from vllm.fake.knobs import Knobs
from vllm.fake.title import set_title

SHM = Path("/dev/shm")
ORPHAN_LIMIT_S = 900  # orphans of a test that was interrupted end by themselves
MIB = 1 << 20


def worker_name(rank: int, ranks: int) -> str:
    """Worker, or Worker_TPn with several ranks."""
    return "Worker" if ranks == 1 else f"Worker_TP{rank}"


def make_segment(prefix: str, size: int) -> str:
    """Makes an object in /dev/shm, all pages touched, and returns its name. Errors are those of open and ftruncate."""
    name = prefix + secrets.token_hex(4)
    with (SHM / name).open("xb") as file:
        file.write(b"\0" * size)
    (SHM / name).chmod(0o600)
    return name


def hold(name: str) -> mmap.mmap:
    """Maps a segment, as the workers of the real engine do."""
    with (SHM / name).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def drop(names: list[str]) -> None:
    """Removes segments; one that is gone already is fine."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (SHM / name).unlink()


def wait_signal(pipe: int, timeout: float | None) -> bytes:
    """Bytes of a pipe, b"" at its end; raises TimeoutError after `timeout` seconds without any."""
    ready, _, _ = select.select([pipe], [], [], timeout)
    if not ready:
        raise TimeoutError
    return os.read(pipe, 4096)


def run_worker(rank: int, ranks: int, parent: int, segment: str, knobs: Knobs) -> NoReturn:
    """A worker: holds its segment and memory until its engine core is gone; an orphan by knob stays in a session of
    its own.
    """
    set_title(f"VLLM::{worker_name(rank, ranks)}")
    stubborn = knobs.orphan_workers or knobs.ignore_sigterm
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if stubborn or number == signal.SIGINT else signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if knobs.orphan_workers:
        os.setsid()
    held = hold(segment)
    ballast = mmap.mmap(-1, knobs.memory_mib * MIB) if knobs.memory_mib else None
    if ballast is not None:
        for page in range(0, len(ballast), mmap.PAGESIZE):
            ballast[page] = 1
    with contextlib.suppress(TimeoutError):
        while wait_signal(parent, None):
            pass
    if knobs.orphan_workers:
        time.sleep(ORPHAN_LIMIT_S)
    held.close()
    os._exit(0)


@dataclass
class Core:
    """The engine core's own state, in its own process."""

    commands: int
    reports: int
    ranks: int
    knobs: Knobs
    workers: dict[int, int] = field(default_factory=dict)  # pid -> rank
    segments: list[str] = field(default_factory=list)
    lifelines: list[int] = field(default_factory=list)
    ready: bool = False
    asked: int = 0

    def report(self, text: str) -> None:
        """One line to the API server, which may be gone."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.reports, (text + "\n").encode())

    def start_workers(self) -> None:
        """Makes the segments and forks the workers, each with a pipe whose end tells it that the core is gone."""
        for prefix in ("psm_", "psm_", "sem.mp-"):
            self.segments.append(make_segment(prefix, 4096))
        for rank in range(self.ranks):
            segment = make_segment("psm_", self.knobs.shm_mib * MIB)
            self.segments.append(segment)
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                for number in (self.commands, self.reports, writer, *self.lifelines):
                    os.close(number)
                run_worker(rank, self.ranks, reader, segment, self.knobs)
            os.close(reader)
            self.lifelines.append(writer)
            self.workers[pid] = rank
        self.report("workers " + " ".join(str(pid) for pid in self.workers))
        self.report("segments " + " ".join(self.segments))

    def end_workers(self, patience: float) -> None:
        """Ends the workers: closed pipes, SIGTERM, and SIGKILL when they do not go (a stopped one cannot).

        Orphans by knob stay.
        """
        if self.knobs.orphan_workers:
            return
        for writer in self.lifelines:
            os.close(writer)
        self.lifelines.clear()
        limit = time.monotonic() + patience
        number = signal.SIGTERM
        while self.workers:
            for pid in list(self.workers):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.02)
            self.reap()
            if time.monotonic() > limit:
                number = signal.SIGKILL
        drop(self.segments)

    def reap(self) -> list[tuple[int, int]]:
        """(rank, exit code) of workers that ended; a signal is a negative code."""
        gone = []
        for pid in list(self.workers):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                gone.append((self.workers.pop(pid), os.waitstatus_to_exitcode(status)))
        return gone

    def leave(self, code: int, patience: float = 0.3) -> NoReturn:
        """Ends the workers and this process."""
        self.end_workers(patience)
        os._exit(code)

    def worker_died(self, rank: int, code: int) -> NoReturn:
        """A worker that nobody asked to end takes the engine with it, in the real engine's words."""
        name = "EngineCore"
        if not self.ready:
            self.report(f"died {rank} {code}")
            self.leave(1)
        text = f"Worker proc VllmWorker-{rank} died unexpectedly (exit code: {code}), shutting down executor."
        log.line("ERROR", "multiproc_executor.py:315", text, name)
        left = len(self.workers)
        log.line(
            "INFO", "multiproc_executor.py:479", f"[shutdown] Executor: waiting for worker exit count={left}", name
        )
        log.line("ERROR", "core.py:1512", "EngineCore encountered a fatal error.", name)
        log.line("ERROR", "core.py:1512", "Traceback (most recent call last):", name)
        log.line("ERROR", "core.py:1512", "RuntimeError: cancelled", name)
        self.leave(1)

    def stopped(self) -> NoReturn:
        """SIGTERM: at once during a load, with the real engine's lines afterwards."""
        if self.ready:
            name = "EngineCore"
            log.line("INFO", "core.py:1454", "[shutdown] EngineCore: trigger received signal=SIGTERM", name)
            log.line("INFO", "core.py:1499", "[shutdown] EngineCore: exiting busy loop", name)
        self.leave(0)

    def obey(self, command: str) -> None:
        """One command of the API server."""
        word, *rest = command.split()
        if word == "workers":
            self.start_workers()
        elif word == "ready":
            self.ready = True
        elif word == "kill":
            pids = [pid for pid, rank in self.workers.items() if rank == int(rest[0])]
            for pid in pids:
                os.kill(pid, int(rest[1]))
        elif word == "die":
            self.leave(1)
        elif word == "quit":
            self.stopped()
        else:
            raise ValueError(f"unknown command {command!r} from the API server")

    def run(self) -> NoReturn:
        """Sleeps until a command, a signal or a worker's end.

        An API server that was killed leaves this process behind, as the real one.
        """
        set_title("VLLM::EngineCore")
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self.knobs.ignore_sigterm else self.note_term)
        sources = [self.commands, reader]
        limit: float | None = None
        pending = b""
        while True:
            left = None if limit is None else max(0.0, limit - time.monotonic())
            ready, _, _ = select.select(sources, [], [], left)
            if reader in ready:
                os.read(reader, 64)
            if self.asked:
                self.stopped()
            for rank, code in self.reap():
                self.worker_died(rank, code)
            if self.commands in ready:
                content = os.read(self.commands, 4096)
                if not content:
                    sources, limit = [reader], time.monotonic() + ORPHAN_LIMIT_S
                *whole, pending = (pending + content).split(b"\n")
                for command in whole:
                    self.obey(command.decode())
            if limit is not None and time.monotonic() >= limit:
                self.leave(1)

    def note_term(self, *_: object) -> None:
        """SIGTERM is handled by the loop."""
        self.asked += 1


class Engine:
    """The API server's handle on the engine core."""

    def __init__(self, ranks: int, knobs: Knobs, close_in_child: list[int]):
        """Forks at once; `close_in_child` are descriptors that the real engine core would not inherit, such as the
        server's socket.
        """
        self.ranks, self.knobs = ranks, knobs
        self.workers: list[int] = []
        self.segments: list[str] = []
        self.death: tuple[int, int] | None = None  # rank and exit code of a worker that died during the load
        self.code: int | None = None
        self.pending = b""
        command_reader, self.commands = os.pipe()
        self.reports, report_writer = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for number in (self.commands, self.reports, *close_in_child):
                os.close(number)
            try:
                Core(command_reader, report_writer, ranks, knobs).run()
            except BaseException as error:
                log.line(
                    "ERROR",
                    "core.py:1510",
                    f"EngineCore failed to start.\n{type(error).__name__}: {error}",
                    "EngineCore",
                )
            os._exit(1)
        os.close(command_reader)
        os.close(report_writer)
        os.set_blocking(self.reports, False)

    def tell(self, command: str) -> None:
        """Sends a command; an engine core that is gone is noticed by `alive`, not here."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.commands, (command + "\n").encode())

    def alive(self) -> bool:
        """Whether the engine core runs; reads its reports, and its exit code once it is gone."""
        with contextlib.suppress(BlockingIOError):
            while content := os.read(self.reports, 4096):
                *whole, self.pending = (self.pending + content).split(b"\n")
                for text in whole:
                    self.note(text.decode())
        if self.code is None:
            try:
                done, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                done, status = self.pid, 0
            if done:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def note(self, report: str) -> None:
        """One report of the engine core."""
        word, *rest = report.split()
        if word == "workers":
            self.workers = [int(pid) for pid in rest]
        elif word == "segments":
            self.segments = rest
        elif word == "died":
            self.death = (int(rest[0]), int(rest[1]))

    def wait_workers(self, limit: float = 5.0) -> None:
        """Waits until the workers run. Raises TimeoutError after `limit` seconds."""
        end = time.monotonic() + limit
        while not self.workers and self.alive():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"no workers after {limit} s from engine core {self.pid}; is the machine overloaded?"
                )
            time.sleep(0.005)

    def suspended(self) -> bool:
        """Whether the engine core or a worker is stopped (SIGSTOP): then no step is computed, though everything looks
        alive.
        """
        for pid in [self.pid, *self.workers]:
            try:
                state = (
                    Path(f"/proc/{pid}/stat")
                    .read_text(encoding="utf-8", errors="replace")
                    .rpartition(")")[2]
                    .split()[0]
                )
            except (OSError, IndexError):
                continue
            if state in "Tt":
                return True
        return False

    def stop(self, patience: float) -> None:
        """Ends the engine core: asked, then killed after `patience` seconds, and what it could not remove itself is
        removed.
        """
        self.tell("quit")
        end = time.monotonic() + patience
        while self.alive():
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.code = -signal.SIGKILL
                self.kill_workers()
                break
            time.sleep(0.01)
        if not self.knobs.orphan_workers:
            drop(self.segments)

    def kill_workers(self) -> None:
        """Kills workers that are left; orphans by knob stay."""
        if self.knobs.orphan_workers:
            return
        for pid in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
