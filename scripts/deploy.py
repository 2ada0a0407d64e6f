#!/usr/bin/env python3
"""Deploy a variant through ansible-runner, with a live view of every host.

    scripts/deploy.py ngram
    scripts/deploy.py ngram -i inventory/mine --limit gpu1 --allow-disruption
    scripts/deploy.py ngram -e @settings.yml -- --vault-password-file ~/.vault --forks 20

The playbook is playbooks/deploy.yml; this adds the view, one JSON line of results (--json), and exit codes.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "collections")]

from ansible_collections.swapgate.core.plugins.module_utils import progress, text  # noqa: E402

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
# From this one on a swap goes on without us.
SWAP_TASK = "Ensure the host's swap is under way"
# Those of role vllm_benchmark.
BENCH_TASKS = (
    "Say how long the benchmark will take",
    "Show what was measured",
    "Say the verdict and what became of it",
)
# The table of variants tells which names there are; this only keeps a template or a path from being taken for one.
NAME = re.compile(r"[A-Za-z0-9._-]+")

EPILOG = """exit codes:
  0    every host serves the variant (or would, with --check), be it only until it is confirmed (confirm_within_s);
       with -e keep_if_faster=true: it was measured, and kept or not as the verdict says
  1    a host went back to its last good variant: the one asked for failed there
  2    refused: bad input, a failed preflight, or no consent; nothing that serves was touched. Consent is asked for
       at a terminal; without one it is --allow-disruption
  3    a host has no service: the variant and the way back failed
  4    a host could not be reached; a swap that had begun there goes on without us
  130  interrupted; a swap that had begun goes on: run the same command again to look at it

%(options)s
"""


class View:
    """What the hosts do, gathered from runner events."""

    def __init__(self, console: Console, title: str, variant: str = "", tells: str = PLAN_TASK) -> None:
        self.console = console
        self.title, self.variant = title, variant
        self.tells = (tells, *BENCH_TASKS)
        self.started = time.monotonic()
        self.rows: dict[str, list[str]] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.planned: set[str] = set()
        self.questions: dict[str, dict[str, Any]] = {}
        self.begun: set[str] = set()  # hosts whose swap goes on without us
        self.moving: set[str] = set()  # hosts that tell of their own progress
        self.said: set[str] = set()

    def __rich__(self) -> Group:
        """The current state: what runs and for how long, and a row a host."""
        table = Table(expand=False)
        for column in ("host", "variant", "phase", "progress"):
            table.add_column(column, overflow="fold")
        for host, row in sorted(self.rows.items()):
            table.add_row(*(Text(text.printable(cell)) for cell in (host, *row)))
        heading = Text(f"{self.title}, {progress.seconds(time.monotonic() - self.started)}")
        return Group(heading, table) if self.rows else Group(heading)

    def say(self, said: object) -> None:
        """Lines above the live view."""
        playbooks.show(self.console, str(said))

    def play(self, playbook: str, args: argparse.Namespace, **what: Any) -> str:
        """Run one of our playbooks with ``args``' inventory, limit and options, seen by this view; its status."""
        file = str(ROOT / "playbooks" / playbook)
        status, said = playbooks.run(self.handle, args.inventory, playbook=file, limit=args.limit, **what)
        if status not in ("successful", "canceled") and not self.failures:
            self.failures["playbook"] = said or "ansible-playbook failed"
        for host, result in self.results.items():
            self.rows[host] = [self.rows.get(host, [self.variant])[0], str(result["outcome"]), ""]
        return status

    def handle(self, event: dict[str, Any]) -> None:
        """Take one event of ansible-runner."""
        data = event.get("event_data") or {}
        kind, host, task = event.get("event"), data.get("host"), str(data.get("task") or "")
        if kind == "runner_on_start" and host:
            if task.endswith(SWAP_TASK):
                self.begun.add(host)
            if host not in self.moving:
                self.rows[host] = [self.variant, "preparing", task]
        elif kind == "verbose":
            for said in str(event.get("stdout", "")).splitlines():
                line = progress.parse(said)
                if line:
                    self.moving.add(line["host"])
                    self.rows[line["host"]] = [line["variant"], line["phase"], line["rest"]]
                    if not self.console.is_terminal:
                        self.say(said.strip())
        elif kind == "runner_on_unreachable" and host:
            self.results[host] = {"outcome": "unreachable"}
            self.failures[host] = str((data.get("res") or {}).get("msg", "unreachable"))
        elif kind in ("runner_on_ok", "runner_on_failed") and host:
            if kind == "runner_on_ok" and task.endswith(self.tells):
                told = (data.get("res") or {}).get("msg", "")
                for said in told if isinstance(told, list) else [told]:
                    self.once(said)
                self.planned.add(host)
            self._result(host, kind, data.get("res") or {}, bool(data.get("ignore_errors")))

    def once(self, said: object) -> None:
        """A line that is not said again when the play runs on after a question."""
        if str(said) not in self.said:
            self.said.add(str(said))
            self.say(said)

    def _result(self, host: str, kind: str, result: dict[str, Any], ignored: bool) -> None:
        facts = result.get("ansible_facts") or {}
        decision, question = facts.get("vllm_benchmark_decision"), facts.get("vllm_swap_question")
        if question and question["variants"]:
            self.questions[host] = question
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
            self.moving.add(host)
            self.rows[host] = [swap["to"]["variant"], self.results[host]["outcome"], ""]
            if not swap["outcome"]:
                for said in progress.waiting(host, swap):
                    self.say(said)
        if kind == "runner_on_failed" and not ignored:
            # Of a command that failed, what it said tells more than that it did.
            self.failures[host] = str(result.get("stderr") or result.get("msg", result))
            self.results.setdefault(host, {"outcome": "refused"})


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        epilog=EPILOG % {"options": playbooks.OPTIONS_HELP},
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("variant", help="name of a variant in group_vars/all/variants.yml")
    parser.add_argument("-i", "--inventory", action="append", metavar="PATH", help="default: ansible.cfg's")
    parser.add_argument("-l", "--limit", metavar="HOSTS", help="only these hosts")
    parser.add_argument("--check", action="store_true", help="show the plan, change nothing")
    parser.add_argument("--preflight", action="store_true", help="check the variant, swap nothing")
    parser.add_argument("--allow-disruption", action="store_true", help="consent to stopping what serves")
    parser.add_argument(
        "-e",
        "--extra-vars",
        action="append",
        default=[],
        metavar="VARS",
        help="as ansible-playbook -e: KEY=VALUE, @FILE or a JSON object",
    )
    parser.add_argument("--json", action="store_true", help="print {host: {outcome, ...}} as the last line")
    return parser


def problem_of(args: argparse.Namespace, options: Sequence[str]) -> str | None:
    """What is wrong with the call, as far as it can be seen without a host."""
    if not NAME.fullmatch(args.variant):
        return f"found {args.variant!r}, expected the name of a variant, as in group_vars/all/variants.yml"
    for given in args.extra_vars:
        if given.startswith("@") and not Path(given[1:]).expanduser().is_file():
            return f"-e {given}: found no such file; name another one"
        if "=" not in given and not given.startswith(("@", "{")):
            return f"-e: found {given!r}, expected KEY=VALUE, @FILE or a JSON object"
    return playbooks.hidden_question(options) or playbooks.missing(args.inventory)


def run(args: argparse.Namespace, options: Sequence[str], view: View) -> str:
    """Run the playbook; returns ansible-runner's status."""
    given = [word for value in args.extra_vars for word in ("-e", value)]
    extra: dict[str, Any] = {"variant": args.variant}
    if args.allow_disruption:
        extra["allow_disruption"] = True
    if view.questions:
        extra["vllm_swap_agreed_to_stop"] = {host: asked["releases"] for host, asked in view.questions.items()}
        view.questions = {}
    check = ["--check"] if args.check else []
    playbook = "preflight.yml" if args.preflight else "deploy.yml"
    return view.play(playbook, args, extravars=extra, options=[*given, *check, *options])


def agreed(view: View) -> bool:
    """Whether the person at the terminal agrees to what the hosts would stop; one question for all of them."""
    for question in view.questions.values():
        view.once(question["plan"])
    stops = ", ".join(asked["stops"] for _, asked in sorted(view.questions.items()))
    return playbooks.agreed(f"This stops {stops}.")


def deployed(args: argparse.Namespace, options: Sequence[str], view: View) -> str:
    """The status of the play; where hosts want consent, none has begun: it is asked for, and the play runs again.

    The second run says anew what serves, so that an answer given late is not taken for more than was asked.
    """
    status = playbooks.watched(view, view.console, lambda: run(args, options, view))
    while status != "canceled" and view.questions and playbooks.can_ask():
        if not agreed(view):
            view.failures = dict.fromkeys(view.questions, "nobody agreed. Nothing was touched.")
            break
        view.results, view.failures = {}, {}
        status = playbooks.watched(view, view.console, partial(run, args, options, view))
    return status


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
    words, options = playbooks.split(argv)
    args = build_parser().parse_args(words)
    wrong = problem_of(args, options)
    if wrong:
        print(f"deploy.py: {wrong}", file=sys.stderr)
        return REFUSED
    console = Console(stderr=True)
    title = f"{'preflight of' if args.preflight else 'plan for' if args.check else 'deploying'} {args.variant}"
    view = View(console, title, args.variant, REPORT_TASK if args.preflight else PLAN_TASK)
    try:
        status = deployed(args, options, view)
    except KeyboardInterrupt:  # at the question
        status = "canceled"
    if status == "canceled":
        on = ", ".join(sorted(view.begun))
        view.say(
            f"interrupted; the swap on {on} goes on: run the same command again to look at it"
            if on
            else "interrupted; no swap had begun, and nothing that serves was touched"
        )
        return INTERRUPTED
    if status == "successful":
        for host in view.planned - set(view.results):
            view.results[host] = {"outcome": "planned"}
    for host, result in sorted(view.results.items()):
        view.say(f"{host}: {result['outcome']}")
    playbooks.tell(view, console, args.json)
    return exit_code(view, status)


if __name__ == "__main__":
    sys.exit(main())
