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


STAGES: dict[str, list[Command]] = {
    "lint": [
        tool("ruff", "check", "."),
        tool("ruff", "format", "--check", "."),
        tool("mypy"),
        tool("yamllint", "--strict", "."),
        tool("ansible-lint", "--offline", "-q"),
    ],
    "unit": [pytest("tests/unit", "tests/golden")],
    "cases": [tool("python", "scripts/cases.py")],
    "molecule": [tool("molecule", "test", folder=ROOT / "roles" / role) for role in ROLES],
    "e2e": [pytest("tests/e2e")],
    "faults": [pytest("tests/faults")],
    "engine": [pytest("tests/engine")],
}


def run_stage(name: str) -> bool:
    """Run the commands of a stage; whether all of them passed."""
    # Molecule and ansible-runner look for Ansible's programs on the PATH.
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = dict(os.environ, PATH=path, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"))
    for command, folder in STAGES[name]:
        print(f"\n[{name}] {' '.join(command).replace(f'{BIN}/', '')}", flush=True)
        if subprocess.run(command, cwd=folder, env=environment, check=False).returncode != 0:
            return False
    return True


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
