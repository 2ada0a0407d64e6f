#!/usr/bin/env python3
"""Share of time by kind of kernel (all-reduce, GEMM, MoE, attention, other) in traces of the torch profiler.

    scripts/profile_trace.py TRACE.json.gz [TRACE of each further rank ...] [--json] [--svg FILE]
    scripts/profile_trace.py --report FILE [--svg FILE]      what playbooks/profile.yml kept

Take the trace around decode steps only: a prefill has other shares. Exit codes: 0 printed, 1 a file is no such trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.swapgate.core.plugins.module_utils import kernel_times  # noqa: E402 - the path comes first


def main(argv: Sequence[str] | None = None) -> int:
    """Read, sum, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="one file a rank, gzipped or not")
    parser.add_argument("--report", help="a report that is there already, instead of traces")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    parser.add_argument("--svg", help="draw the shares into this file")
    parser.add_argument("--title", default="Share of decode time", help="of the chart")
    args = parser.parse_args(argv)
    if bool(args.traces) == bool(args.report):
        parser.error("give traces, or --report FILE")
    try:
        if args.report:
            report = json.loads(Path(args.report).read_text(encoding="utf-8"))
        else:
            report = kernel_times.combine([kernel_times.shares(kernel_times.read(path)) for path in args.traces])
    except (OSError, ValueError) as error:
        print(f"profile_trace.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=1) if args.json else "\n".join(kernel_times.table(report)))
    if args.svg:
        Path(args.svg).write_text(kernel_times.chart(report, args.title), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
