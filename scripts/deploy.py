#!/usr/bin/env python3
"""Deploy a variant through ansible-runner, with a live view of every host.

    scripts/deploy.py ngram
    scripts/deploy.py ngram -i inventory/mine --limit gpu1 --allow-disruption

The playbook is playbooks/deploy.yml; this adds the view, one JSON line of results (--json), and exit codes.
"""

from __future__ import annotations

import argparse
import getpass
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "collections")]

from ansible_collections.swapgate.core.plugins.module_utils import progress  # noqa: E402

from scripts import playbooks  # noqa: E402

OK, ROLLED_BACK, REFUSED, NO_SERVICE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130
# From best to worst: with several hosts the worst counts.
CODES = {
    "swapped": OK,
    "unchanged": OK,
    "planned": OK,
    "waits": OK,
    "kept": OK,
    "not kept": OK,
    "rolled_back": ROLLED_BACK,
    "recovered": ROLLED_BACK,
    "refused": REFUSED,
    "unreachable": UNREACHABLE,
    "failed": NO_SERVICE,
}
SEVERITY = (OK, ROLLED_BACK, REFUSED, UNREACHABLE, NO_SERVICE)

# The task of role vllm_swap whose words are shown: the plan, or with --preflight the report.
PLAN_TASK, REPORT_TASK = "Say what the swap would do", "Ensure nothing was found against the release"
# Those of role vllm_benchmark.
BENCH_TASKS = (
    "Say how long the benchmark will take",
    "Show what was measured",
    "Say the verdict and what became of it",
)

EPILOG = """exit codes:
  0    every host serves the variant (or would, with --check), be it only until it is confirmed (confirm_within_s);
       with -e keep_if_faster=true: it was measured, and kept or not as the verdict says
  1    a host went back to its last good variant: the one asked for failed there
  2    refused: bad input, a failed preflight, or no consent; nothing that serves was touched
  3    a host has no service: the variant and the way back failed
  4    a host could not be reached; a swap that had begun there goes on without us
  130  interrupted; a swap that had begun goes on: run the same command again to look at it
"""


class View:
    """What the hosts do, gathered from runner events."""

    def __init__(self, console: Console, tells: str = PLAN_TASK) -> None:
        self.console = console
        self.tells = (tells, *BENCH_TASKS)
        self.started = time.monotonic()
        self.task = "starting"
        self.rows: dict[str, list[str]] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.planned: set[str] = set()

    def table(self) -> Table:
        """The current state as a table."""
        elapsed = progress.seconds(time.monotonic() - self.started)
        table = Table(title=f"{self.task} ({elapsed})", title_justify="left", expand=False)
        for column in ("host", "variant", "phase", "progress"):
            table.add_column(column, overflow="fold")
        for host, row in sorted(self.rows.items()):
            table.add_row(host, *row)
        return table

    def __rich__(self) -> Table:
        return self.table()

    def play(self, playbook: str, args: argparse.Namespace, **what: Any) -> str:
        """Run one of our playbooks with ``args``' inventory and limit, seen by this view; ansible-runner's status."""
        file = str(ROOT / "playbooks" / playbook)
        status, said = playbooks.run(self.handle, args.inventory, playbook=file, limit=args.limit, **what)
        if status not in ("successful", "canceled") and not self.failures:
            self.failures["playbook"] = said or "ansible-playbook failed"
        return status

    def handle(self, event: dict[str, Any]) -> None:
        """Take one event of ansible-runner."""
        data = event.get("event_data") or {}
        kind, host = event.get("event"), data.get("host")
        if kind == "playbook_on_task_start":
            self.task = str(data.get("task") or self.task)
        elif kind == "verbose":
            for text in str(event.get("stdout", "")).splitlines():
                line = progress.parse(text)
                if line:
                    self.rows[line["host"]] = [line["variant"], line["phase"], line["rest"]]
                    if not self.console.is_terminal:
                        self.console.print(text.strip(), highlight=False, markup=False, soft_wrap=True)
        elif kind == "runner_on_unreachable" and host:
            self.results[host] = {"outcome": "unreachable"}
            self.failures[host] = str((data.get("res") or {}).get("msg", "unreachable"))
        elif kind in ("runner_on_ok", "runner_on_failed") and host:
            if kind == "runner_on_ok" and str(data.get("task", "")).endswith(self.tells):
                told = (data.get("res") or {}).get("msg", "")
                for said in told if isinstance(told, list) else [told]:
                    self.console.print(str(said), highlight=False, markup=False, soft_wrap=True)
                self.planned.add(host)
            self._result(host, kind, data.get("res") or {}, bool(data.get("ignore_errors")))

    def _result(self, host: str, kind: str, result: dict[str, Any], ignored: bool) -> None:
        decision = (result.get("ansible_facts") or {}).get("vllm_benchmark_decision")
        if decision:
            self.results[host] = {key: decision[key] for key in ("outcome", "variant", "sentence", "run")}
        swap = (result.get("status") or {}).get("swap")
        if swap:
            self.results[host] = {
                "outcome": swap["outcome"] or "waits",  # to be confirmed
                "variant": swap["to"]["variant"],
                "release": swap["to"]["release"],
                "seconds_without_service": swap["seconds_without_service"],
                "cause": swap["cause"],
            }
            self.rows[host] = [swap["to"]["variant"], self.results[host]["outcome"], ""]
            if not swap["outcome"]:
                for said in progress.waiting(host, swap):
                    self.console.print(said, highlight=False, markup=False, soft_wrap=True)
        if kind == "runner_on_failed" and not ignored:
            # Of a command that failed, what it said tells more than that it did.
            self.failures[host] = str(result.get("stderr") or result.get("msg", result))
            self.results.setdefault(host, {"outcome": "refused"})


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variant", help="name of a variant in group_vars/all/variants.yml")
    parser.add_argument("-i", "--inventory", action="append", metavar="PATH", help="default: ansible.cfg's")
    parser.add_argument("-l", "--limit", metavar="HOSTS", help="only these hosts")
    parser.add_argument("--check", action="store_true", help="show the plan, change nothing")
    parser.add_argument("--preflight", action="store_true", help="check the variant, swap nothing")
    parser.add_argument("--allow-disruption", action="store_true", help="consent to stopping what serves")
    parser.add_argument(
        "-e", "--extra-var", action="append", default=[], metavar="KEY=VALUE", help="as ansible-playbook -e"
    )
    parser.add_argument("--json", action="store_true", help="print {host: {outcome, ...}} as the last line")
    return parser


def run(args: argparse.Namespace, view: View) -> str:
    """Run the playbook; returns ansible-runner's status."""
    extra: dict[str, Any] = {"variant": args.variant, "vllm_swap_by": getpass.getuser()}
    extra.update(dict(pair.split("=", 1) for pair in args.extra_var))
    if args.allow_disruption:
        extra["allow_disruption"] = True
    options = ["--check"] if args.check else []
    return view.play(
        "preflight.yml" if args.preflight else "deploy.yml", args, extravars=extra, cmdline=" ".join(options)
    )


def exit_code(view: View, status: str) -> int:
    """The worst of the hosts' outcomes; REFUSED when the run failed before any host had one."""
    codes = [CODES.get(result["outcome"], NO_SERVICE) for result in view.results.values()]
    if status == "successful":
        codes.append(OK)
    elif not codes or max(codes) == OK:
        codes.append(REFUSED)
    return max(codes, key=SEVERITY.index)


def main(argv: list[str] | None = None) -> int:
    """Deploy and report."""
    args = build_parser().parse_args(argv)
    broken = [pair for pair in args.extra_var if "=" not in pair]
    wrong = f"-e: found {broken[0]!r}, expected K=V" if broken else playbooks.missing(args.inventory)
    if wrong:
        print(f"deploy.py: {wrong}", file=sys.stderr)
        return REFUSED
    console = Console(stderr=True)
    view = View(console, REPORT_TASK if args.preflight else PLAN_TASK)
    status = playbooks.watched(view, console, lambda: run(args, view))
    if status == "canceled":
        console.print("interrupted; a swap that had begun goes on: run the same command again to look at it")
        return INTERRUPTED
    if status == "successful":
        for host in view.planned - set(view.results):
            view.results[host] = {"outcome": "planned"}
    for host, result in sorted(view.results.items()):
        console.print(f"{host}: {result['outcome']}", highlight=False)
    playbooks.tell(view, console, args.json)
    return exit_code(view, status)


if __name__ == "__main__":
    sys.exit(main())
