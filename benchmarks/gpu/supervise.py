#!/usr/bin/env python3
"""`swapgate supervise` with its files below another root than `/`: the main process of an engine where no systemd is.

    supervise.py ROOT VARIANT -- ARGV...

ROOT holds what role vllm_service puts on a host: etc/swapgate/variants/UNIT.json and the signatures. The exit codes
are those of plugins/host_program/supervisor.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "collections"))

from ansible_collections.swapgate.core.plugins.host_program import installed, supervisor  # noqa: E402
from ansible_collections.swapgate.core.plugins.module_utils import records, signatures  # noqa: E402


def main(words: list[str]) -> int:
    """Run the engine to its end; returns the supervisor's exit code."""
    if len(words) < 4 or words[2] != "--":
        print(f"supervise: found {words}, expected ROOT VARIANT -- ARGV...", file=sys.stderr)
        return 2
    layout = records.Layout(words[0])
    variant = installed.named(layout, words[1])
    known = signatures.load_signatures(records.read_json(layout.signatures))
    return supervisor.supervise(variant, words[3:], layout, known)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
