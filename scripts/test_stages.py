#!/usr/bin/env python3
"""Every test of the repository, stage by stage, with the minutes of each.

    scripts/test_stages.py            all stages, cheapest first; the first failure ends the run
    scripts/test_stages.py STAGE...   only these

Exit code 0 when all of them passed, 1 when one failed, 2 for an unknown stage.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ROLES = sorted(folder.parent.parent.name for folder in ROOT.glob("roles/*/molecule/default"))

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
    "cases": [tool("python", "scripts/cases.py")],
    "molecule": [tool("molecule", "test", folder=ROOT / "roles" / role) for role in ROLES],
    "e2e": [pytest(*TWO, "tests/e2e")],
    "faults": [pytest("tests/faults")],
    "engine": [pytest("tests/engine")],
}


def run(stage: str, command: list[str], folder: Path, environment: Mapping[str, str], aside: bool) -> bool:
    """Run one command, its output shown at its end when others run beside it; whether it passed."""
    title = f"\n[{stage}] {' '.join(command).replace(f'{BIN}/', '')} ({folder.relative_to(ROOT)})"
    # Molecule's own choice is one folder for all checkouts, and what an interrupted test of another one left there.
    own = {**environment, "MOLECULE_EPHEMERAL_DIRECTORY": str(ROOT / ".artifacts/molecule" / folder.name)}
    if not aside:
        print(title, flush=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env=own,
        check=False,
        stdout=subprocess.PIPE if aside else None,
        stderr=subprocess.STDOUT if aside else None,
        text=True,
        errors="replace",
    )
    if aside:
        print(f"{title}\n{done.stdout}", flush=True)
    return done.returncode == 0


def run_stage(name: str) -> bool:
    """Run the commands of a stage, the roles' two at a time; whether all of them passed."""
    # Molecule and ansible-runner look for Ansible's programs on the PATH.
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = dict(os.environ, PATH=path, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"))
    if name == "molecule":
        with ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(run, name, command, folder, environment, True) for command, folder in STAGES[name]]
        return all(end.result() for end in ends)
    return all(run(name, command, folder, environment, False) for command, folder in STAGES[name])


def main(argv: list[str] | None = None) -> int:
    """Run the stages that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [STAGE ...]"
    )
    parser.add_argument("stages", nargs="*", choices=[[], *STAGES], help=", ".join(STAGES))
    stages = parser.parse_args(argv).stages or list(STAGES)
    minutes: list[str] = []
    failed = None
    for name in stages:
        started = time.monotonic()
        passed = run_stage(name)
        minutes.append(f"{name} {(time.monotonic() - started) / 60:.1f}")
        if not passed:
            failed = name
            break
    print(f"\nminutes: {', '.join(minutes)}", flush=True)
    if failed:
        print(f"stage {failed} FAILED", flush=True)
        return 1
    print(f"{len(stages)} passed, 0 failed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
