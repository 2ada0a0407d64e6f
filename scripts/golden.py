#!/usr/bin/env python3
"""Write tests/golden anew: the unit of every variant of every inventory, as the real Ansible renders it.

    make golden

Read the diff before you commit it: it is what your change does to the units. Contacts no host. Exit codes: 0 written,
1 Ansible could not render (its words are shown; nothing was written).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

import yaml

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden"
LIMIT_S = 120


class Rendered(TypedDict):
    """One variant: the resolved dict, and its unit's text."""

    variant: dict[str, Any]
    text: str


class RenderError(Exception):
    """Ansible could not render an inventory; the text names it and ends with what Ansible said."""


def inventories() -> list[str]:
    """The names of the inventories that ship."""
    return sorted(folder.name for folder in (ROOT / "inventory").iterdir() if folder.is_dir())


def render(inventory: str, extra: Mapping[str, Any] | None = None) -> dict[str, Rendered]:
    """Unit file name to what was rendered, for every variant of ``inventory``; ``extra`` are variables laid over it.

    Raises RenderError.
    """
    with tempfile.TemporaryDirectory(prefix="swapgate-golden-") as folder:
        out = Path(folder) / "rendered.json"
        variables = Path(folder) / "variables.json"
        shipped = yaml.safe_load((ROOT / "group_vars/all/variants.yml").read_text(encoding="utf-8"))[
            "swapgate_shipped_variants"
        ]
        names = list({**shipped, **(extra or {}).get("swapgate_variants", {})})
        given = {"rendered_names": names, **(extra or {}), "rendered_file": str(out)}
        variables.write_text(json.dumps(given), encoding="utf-8")
        done = subprocess.run(
            [
                str(Path(sys.executable).parent / "ansible-playbook"),
                "-i",
                f"inventory/{inventory}",
                str(GOLDEN / "render.yml"),
                "-e",
                f"@{variables}",
            ],
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode != 0 or not out.exists():
            said = (done.stdout + done.stderr).strip() or f"exit {done.returncode}"
            first = re.search(r"^\[ERROR\]: .*", said, re.MULTILINE)  # Ansible repeats it several times
            raise RenderError(
                f"inventory/{inventory}: no units were rendered, expected one a variant. Ansible said:\n"
                f"{first.group() if first else said[-2000:]}\nNext: correct the entry that it names, then make golden."
            )
        found: list[Rendered] = json.loads(out.read_text(encoding="utf-8"))
    return {item["variant"]["unit"]: item for item in found}


def golden_files(inventory: str) -> dict[str, Path]:
    """Unit file name to golden file, as they lie in the repository."""
    return {path.name: path for path in sorted((GOLDEN / inventory).glob("*")) if path.is_file()}


def write(inventory: str, units: Mapping[str, Rendered]) -> list[str]:
    """Make the golden folder of ``inventory`` hold exactly ``units``; returns the relative paths that changed."""
    folder = GOLDEN / inventory
    folder.mkdir(exist_ok=True)
    have = golden_files(inventory)
    changed = []
    for name, item in units.items():
        text = item["text"].encode()
        if name not in have or have[name].read_bytes() != text:
            (folder / name).write_bytes(text)
            changed.append(f"{inventory}/{name}")
    for name in sorted(set(have) - set(units)):
        have[name].unlink()
        changed.append(f"{inventory}/{name} (removed)")
    return changed


def main() -> int:
    """Render all inventories, then write."""
    names = inventories()
    try:
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(render, names))
    except RenderError as error:
        print(f"golden.py: {error}", file=sys.stderr)
        return 1
    changed = [path for name, units in zip(names, found) for path in write(name, units)]
    print("\n".join(f"tests/golden/{path}" for path in changed) or "tests/golden is current")
    return 0


if __name__ == "__main__":
    sys.exit(main())
