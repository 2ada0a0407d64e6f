#!/usr/bin/env python3
"""The fault matrix: put faults into swaps on a throwaway host and hold what comes of them against what must.

    scripts/faults.py                      all rows, then the random swaps; writes docs/faults.md
    scripts/faults.py --subset ci          the rows that are part of `make test`
    scripts/faults.py --row ID [--row ID]  these rows
    scripts/faults.py --list               ids and faults
    scripts/faults.py --swaps 50 --seed 7  only swaps with random faults
    scripts/faults.py --page               only write docs/faults.md from what is kept

The results are kept in benchmarks/results/faults.json: the last one of each row, and the last random swaps. With
SWAPGATE_FAULTS_PORT=PORT and another --host a second run goes on beside the first. Exit code 0 when every row met its
expectation, 1 when one did not, 2 for wrong usage, 3 when the throwaway host cannot be had.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "collections")]

from scripts import sandbox  # noqa: E402 - the path comes first
from tests.faults import bed, host, random_swaps, report, rows, runner  # noqa: E402
from tests.faults.row import Row  # noqa: E402

RESULTS = REPO / "benchmarks/results/faults.json"
PAGE = REPO / "docs/faults.md"
ENGINE = REPO / ".artifacts/engine-faults.json"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", default=[], metavar="ID", help="run this row; may be given again")
    parser.add_argument("--from", dest="start", metavar="ID", help="run all rows from this one on")
    parser.add_argument("--subset", choices=["ci"], help="run the rows of `make test`")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--swaps", type=int, metavar="N", help="run N swaps with random faults, and no rows")
    parser.add_argument(
        "--page", action="store_true", help="write docs/faults.md from the kept results, and run nothing"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the random swaps (default: 1)")
    parser.add_argument("--host", default="faults", help="name of the throwaway host (default: faults)")
    return parser.parse_args(argv)


def chosen(options: argparse.Namespace) -> list[Row]:
    """The rows that the command line asks for. KeyError for an unknown id."""
    if options.row:
        return [rows.find(row_id) for row_id in options.row]
    if options.start:
        return rows.ROWS[rows.ROWS.index(rows.find(options.start)) :]
    if options.swaps is not None:
        return []
    return [row for row in rows.ROWS if row.ci or not options.subset]


def say(text: str) -> None:
    """One line of progress."""
    print(text, flush=True)


def head() -> str:
    """The commit of this checkout."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def keep(results: list[runner.Result], swaps: dict[str, Any] | None, commit: str) -> dict[str, Any]:
    """Lay the results of a run that began at ``commit`` over the kept ones; returns all."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    run = {"commit": commit, "ended_unix": round(time.time())}
    with open(RESULTS, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a second run may go on beside this one
        file.seek(0)
        kept: dict[str, Any] = {"rows": {}, "swaps": None, "engine": None, **json.loads(file.read() or "{}")}
        kept["rows"].update({one.id: {**one.as_json(), **run} for one in results})
        if swaps:
            kept["swaps"] = {**swaps, **run}
        if ENGINE.is_file():
            kept["engine"] = json.loads(ENGINE.read_text())
        file.truncate(0)
        file.write(json.dumps(kept, indent=1) + "\n")
    return kept


def write_page() -> None:
    """docs/faults.md from the kept results, in the order of the matrix."""
    kept = keep([], None, "")
    rest = {field.name for field in dataclasses.fields(runner.Result)}
    there = [kept["rows"][row.id] for row in rows.ROWS if row.id in kept["rows"]]
    told = [runner.Result(**{key: value for key, value in one.items() if key in rest}) for one in there]
    never = [row.id for row in rows.ROWS if row.id not in kept["rows"]]
    PAGE.write_text(report.page(told, kept["swaps"], kept["engine"], never))


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write the results."""
    options = parse(argv)
    if options.list:
        for row in rows.ROWS:
            say(f"{row.id:24} {'ci ' if row.ci else '   '} {' or '.join(row.expect):24} {row.fault}")
        return 0
    try:
        wanted = chosen(options)
    except KeyError as error:
        print(f"faults: {error.args[0]}", file=sys.stderr)
        return 2
    if options.page:
        write_page()
        return 0
    begun, commit = time.monotonic(), head()
    try:
        place = bed.prepare(options.host, lambda text: say(f"faults: {text}"))
    except (host.HostError, sandbox.SandboxError) as error:
        print(f"faults: the host cannot be prepared: {error}", file=sys.stderr)
        return 3
    say(f"faults: host ready after {time.monotonic() - begun:.0f} s, {len(wanted)} rows")
    results: list[runner.Result] = []
    for row in wanted:
        result = runner.run(place, row)
        results.append(result)
        keep([result], None, commit)
        say(report.line(result))
        for miss in result.misses:
            say(f"       {miss}")
    whole = not (options.row or options.subset or options.start or options.swaps is not None)
    swaps: dict[str, Any] | None = None
    count = options.swaps if options.swaps is not None else random_swaps.MANY if whole else 0
    if count:
        swaps = random_swaps.run(place, count, options.seed, say)
    minutes = (time.monotonic() - begun) / 60
    figures = report.summary(results)
    keep([], swaps, commit)
    if whole:
        write_page()
    say(f"faults: {json.dumps(figures)}; {minutes:.1f} minutes")
    missed = figures["missed"] or (swaps and swaps["misses"])
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
