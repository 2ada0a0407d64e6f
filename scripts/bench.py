#!/usr/bin/env python3
"""Measure what serves, through ansible-runner, with a live view of every host.

    scripts/bench.py                                          the variant that serves, one stream
    scripts/bench.py --concurrency 1,4,16 --prompts MY.jsonl
    scripts/bench.py --run runs/ID --arm B                    one more load of an existing run: the other variant

The playbook is playbooks/benchmark.yml. A run folder under runs/ keeps all of it; scripts/verdict.py RUN/raw.jsonl
judges a run of two arms, scripts/report.py RUN makes a page of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import playbooks, run_folder  # noqa: E402
from scripts.deploy import View  # noqa: E402
from scripts.json_files import InputError  # noqa: E402

MEASURED, FAILED, REFUSED, UNREACHABLE, INTERRUPTED = 0, 1, 2, 4, 130
SEVERITY = (MEASURED, FAILED, REFUSED, UNREACHABLE)

EPILOG = """exit codes:
  0    every host was measured
  1    a host's benchmark failed: the engine was restarted, its load generator failed, or no time was left
  2    refused: bad input, unfit prompts, or nothing that serves; nothing was measured
  4    a host could not be reached; its benchmark ends by itself when nobody looks at it
  130  interrupted; the same

%(options)s
"""


class BenchView(View):
    """What the hosts measure, gathered from runner events."""

    def _result(self, host: str, kind: str, result: dict[str, Any], ignored: bool) -> None:
        found = (result.get("ansible_facts") or {}).get("vllm_benchmark_result")
        if found:
            load = found["load"]
            keys = ("variant", "arm", "boot", "outcome", "cause")
            self.results[host] = {"run": found["run"], **{key: load[key] for key in keys}}
            self.rows[host] = [load["variant"], load["outcome"], ""]
        super()._result(host, kind, result, ignored)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        epilog=EPILOG % {"options": playbooks.OPTIONS_HELP},
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-i", "--inventory", action="append", metavar="PATH", help="default: ansible.cfg's")
    parser.add_argument("-l", "--limit", metavar="HOSTS", help="only these hosts")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="default: benchmarks/prompts/mixed.jsonl")
    parser.add_argument(
        "--concurrency", type=run_folder.whole_numbers, default=[1], metavar="N,N", help="streams at a time (default 1)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measured passes at each of them (default 3)")
    parser.add_argument("--cache", choices=("cold", "warm"), default="cold", help="the prefix cache (default cold)")
    parser.add_argument("--run", type=Path, metavar="DIR", help="add to this run (default: begin one under runs/)")
    parser.add_argument("--arm", default="A", help="arm of the comparison; A is the one to compare with (default)")
    parser.add_argument("--json", action="store_true", help="print {host: {run, arm, boot, outcome, ...}} as last line")
    return parser


def problem_of(args: argparse.Namespace) -> str | None:
    """What is wrong with the call, as far as it can be seen without a host."""
    if min(args.concurrency) < 1:
        return f"--concurrency: found {min(args.concurrency)}, expected whole numbers of at least 1, as in 1,4"
    if args.repeats < 1:
        return f"--repeats: found {args.repeats}, expected at least 1"
    if not run_folder.ARM.fullmatch(args.arm):
        return f"--arm: found {args.arm!r}, expected a name like A or B"
    try:
        if args.prompts:
            run_folder.prompts_of(args.prompts, [])
        if args.run:
            run_folder.read_run(args.run)
    except InputError as error:
        return str(error)
    return playbooks.missing(args.inventory)


def run(args: argparse.Namespace, options: Sequence[str], view: View) -> str:
    """Run the playbook; returns ansible-runner's status."""
    extra: dict[str, Any] = {"repeats": args.repeats, "cache": args.cache, "arm": args.arm}
    extra["concurrency"] = args.concurrency
    for key in ("prompts", "run"):
        if getattr(args, key):
            extra[key] = playbooks.literal(str(getattr(args, key).resolve()))
    return view.play("benchmark.yml", args, extravars=extra, options=options)


def exit_code(view: View, status: str) -> int:
    """The worst of the hosts' outcomes; REFUSED when no host had one."""
    codes = {"measured": MEASURED, "failed": FAILED, "refused": REFUSED, "unreachable": UNREACHABLE}
    found = [codes[result["outcome"]] for result in view.results.values()]
    if status != "successful" and max(found, default=MEASURED) == MEASURED:
        found.append(REFUSED)
    return max(found, key=SEVERITY.index, default=REFUSED)


def main(argv: list[str] | None = None) -> int:
    """Measure and report."""
    words, options = playbooks.split(argv)
    args = build_parser().parse_args(words)
    problem = problem_of(args) or playbooks.hidden_question(options)
    if problem:
        print(f"bench.py: {problem}", file=sys.stderr)
        return REFUSED
    console = Console(stderr=True)
    view = BenchView(console, "measuring what serves")
    status = playbooks.watched(view, console, lambda: run(args, options, view))
    if status == "canceled":
        console.print("interrupted; the host ends its benchmark when nobody looks at it for five minutes")
        return INTERRUPTED
    if not view.results and not view.failures:
        view.failures["bench.py"] = (
            f"found no host for --limit {args.limit}, expected one of the inventory's vllm_hosts"
        )
    playbooks.tell(view, console, args.json)
    return exit_code(view, status)


if __name__ == "__main__":
    sys.exit(main())
