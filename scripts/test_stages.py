#!/usr/bin/env python3
"""Every test of the repository, stage by stage, with the minutes of each against the last run's.

    scripts/test_stages.py            all stages, in two lanes side by side; the first failure ends the run
    scripts/test_stages.py STAGE...   only these

Exit code 0 when all of them passed, 1 when one failed, 2 for an unknown stage, 130 when interrupted. What a stage
printed is shown at its end and kept in .artifacts/stages; a stage that runs alone prints as it goes.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import sandbox  # noqa: E402 - the path comes first

BIN = Path(sys.executable).parent
LOGS = ROOT / ".artifacts/stages"
MINUTES = ROOT / ".artifacts/stage-minutes.json"
# By far the longest, as long as the others together: with two at a time it must begin first.
LONGEST = "nvidia_stack"
ROLES = sorted(
    (folder.parent.parent.name for folder in ROOT.glob("roles/*/molecule/default")),
    key=lambda role: (role != LONGEST, role),
)
END_LIMIT_S = 15

Command = tuple[list[str], Path]


def tool(name: str, *words: str, folder: Path = ROOT) -> Command:
    """A command of the virtualenv and the folder that it runs in."""
    return [str(BIN / name), *words], folder


def pytest(*words: str) -> Command:
    """pytest over some tests; the slowest are named, since minutes are what this suite costs."""
    return tool("python", "-m", "pytest", "-q", "--durations=5", *words)


# Most tests wait for a host or a program, so two at a time take little more than half the minutes.
TWO = ("-n", "2", "--dist", "loadfile")
STAGES: dict[str, list[Command]] = {
    "lint": [
        tool("ruff", "check", "."),
        tool("ruff", "format", "--check", "."),
        tool("mypy"),
        tool("yamllint", "--strict", "."),
        tool("ansible-lint", "--offline", "-q"),
    ],
    "unit": [pytest(*TWO, "tests/unit", "tests/golden")],
    "engine": [pytest("tests/engine")],
    "molecule": [tool("molecule", "test", folder=ROOT / "roles" / role) for role in ROLES],
    "e2e": [pytest(*TWO, "tests/e2e")],
    "faults": [pytest("tests/faults")],
}
# The first lane computes, the second mostly waits for its hosts.
LANES = (("lint", "unit", "engine"), ("molecule", "e2e", "faults"))
# Its commands share nothing, so that two can run at a time.
PAIRED = "molecule"
# The throwaway hosts of a stage, which one that was cut off leaves behind.
HOSTS = {"unit": "unit-*", "engine": "engine", "molecule": "molecule-*", "e2e": "e2e-*", "faults": "faults"}


def tree(pid: int) -> dict[int, int]:
    """A process and all that descend from it, whatever session they are in: process id to start time."""
    found = {pid: sandbox.process_start(pid)}
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in file.read_text().split():
                found.update(tree(int(child)))
    return found


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """End commands with all that they started: asked first, killed when that takes too long."""
    left: dict[int, int] = {}
    for process in processes:
        left.update(tree(process.pid))
    until = time.monotonic() + END_LIMIT_S
    number = signal.SIGTERM
    while left:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGKILL:
            return
        while left and time.monotonic() < until:
            left = {pid: start for pid, start in left.items() if start and sandbox.process_start(pid) == start}
            time.sleep(0.1)
        number = signal.SIGKILL


class Suite:
    """A run of some stages. The first failure, or whoever interrupts it, ends all commands that are under way."""

    def __init__(self, stages: list[str]) -> None:
        self.lanes = [[name for name in lane if name in stages] for lane in LANES]
        self.aside = all(self.lanes)
        self.passed: dict[str, float] = {}
        self.failed = ""
        self.stopped = False
        self._cut: list[str] = []
        self._running: dict[subprocess.Popen[bytes], str] = {}
        self._lock = threading.RLock()

    def say(self, text: str) -> None:
        """Print a text in one piece."""
        with self._lock:
            print(text, flush=True)

    def stop(self, failed: str = "") -> None:
        """End all that runs, because a stage failed or somebody interrupts; the first reason counts."""
        with self._lock:
            if self.stopped:
                return
            self.stopped, self.failed = True, failed
            running = dict(self._running)
        self._cut = sorted(set(running.values()))
        end_all(list(running))

    def command(self, stage: str, number: int) -> bool:
        """Run one command of a stage to its end; whether it passed."""
        argv, folder = STAGES[stage][number]
        title = f"[{stage}] {' '.join(argv).replace(f'{BIN}/', '')} ({folder.relative_to(ROOT)})"
        environment = {
            **os.environ,
            # Molecule and ansible-runner look for Ansible's programs on the PATH.
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            # Molecule's own choice is one folder for all checkouts, and what an interrupted test of another left there.
            "MOLECULE_EPHEMERAL_DIRECTORY": str(ROOT / ".artifacts/molecule" / folder.name),
        }
        aside = self.aside or stage == PAIRED
        log = LOGS / f"{stage}-{number + 1}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        if not aside:
            self.say(f"\n{title}")
        with log.open("wb") if aside else contextlib.nullcontext() as out:
            with self._lock:
                if self.stopped:
                    return False
                process = subprocess.Popen(
                    argv,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT if aside else None,
                    start_new_session=True,
                )
                self._running[process] = stage
            code = process.wait()
        with self._lock:
            del self._running[process]
            cut = self.stopped
        if aside:
            told = log.read_text(errors="replace").rstrip()
            # That failure is what to read, so it comes last.
            self.say(f"\n{title}: cut off, see {log.relative_to(ROOT)}" if cut else f"\n{title}\n{told}")
        return code == 0 and not cut

    def stage(self, name: str) -> None:
        """Run the commands of a stage; a failure stops the suite."""
        started = time.monotonic()
        if self.aside:
            self.say(f"[{name}] begins")
        numbers = range(len(STAGES[name]))
        if name == PAIRED:
            with ThreadPoolExecutor(2) as pool:
                passed = all([*pool.map(lambda number: self._one(name, number), numbers)])
        else:
            passed = all(self._one(name, number) for number in numbers)
        if passed:
            self.passed[name] = (time.monotonic() - started) / 60
            if self.aside:
                self.say(f"[{name}] passed after {self.passed[name]:.1f} minutes")

    def _one(self, name: str, number: int) -> bool:
        passed = self.command(name, number)
        if not passed:
            self.stop(name)
        return passed

    def lane(self, names: list[str]) -> None:
        """Run the stages of a lane one after the other, as long as none fails anywhere."""
        for name in names:
            if not self.stopped:
                self.stage(name)

    def run(self) -> None:
        """Run the lanes side by side; KeyboardInterrupt ends them. No host of a stage that was cut off stays."""
        with ThreadPoolExecutor(len(LANES)) as pool:
            ends = [pool.submit(self.lane, lane) for lane in self.lanes]
            try:
                for end in ends:
                    end.result()
            except BaseException:
                self.stop()
                raise
            finally:
                pool.shutdown()
                for stage in self._cut:
                    destroy_hosts(stage)


def destroy_hosts(stage: str) -> None:
    """Remove the throwaway hosts of a stage, unless the next run was to find them."""
    if os.environ.get(f"SWAPGATE_{stage.upper()}_KEEP"):
        return
    for name in fnmatch.filter(sandbox.known_names(), HOSTS.get(stage, "")):
        sandbox.main(["destroy", name])


def minutes_against_the_last(passed: dict[str, float], whole_s: float) -> str:
    """The line of minutes, each against the last run's in brackets; and keep these."""
    last: dict[str, float] = json.loads(MINUTES.read_text()) if MINUTES.is_file() else {}
    now = {**passed, **({"all": whole_s / 60} if len(passed) == len(STAGES) else {})}
    MINUTES.parent.mkdir(parents=True, exist_ok=True)
    MINUTES.write_text(json.dumps({**last, **{name: round(spent, 2) for name, spent in now.items()}}, indent=1) + "\n")
    told = [f"{name} {now[name]:.1f}" + (f" (last {last[name]:.1f})" if name in last else "") for name in now]
    return f"minutes: {', '.join(told) or 'no stage ended'}"


def interrupt(_number: int, _frame: object) -> None:
    """SIGTERM is what CI sends when somebody cancels; it ends as Ctrl-C does."""
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run the stages that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [STAGE ...]"
    )
    parser.add_argument("stages", nargs="*", choices=[[], *STAGES], help=", ".join(STAGES))
    suite = Suite(parser.parse_args(argv).stages or list(STAGES))
    started = time.monotonic()
    signal.signal(signal.SIGTERM, interrupt)
    try:
        suite.run()
    except KeyboardInterrupt:
        print("interrupted: all stages were ended", file=sys.stderr)
        return 130
    print(f"\n{minutes_against_the_last(suite.passed, time.monotonic() - started)}", flush=True)
    if suite.failed:
        print(f"stage {suite.failed} FAILED", flush=True)
    print(f"{len(suite.passed)} passed, {1 if suite.failed else 0} failed", flush=True)
    return 1 if suite.failed else 0


if __name__ == "__main__":
    sys.exit(main())
