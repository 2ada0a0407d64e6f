"""The command line of the host program: `swapgate COMMAND`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Callable

from ..module_utils import processes, progress, records, signatures
from . import (
    bench,
    collective_check,
    decode_profile,
    engine_api,
    gpus,
    installed,
    jobs,
    preflight,
    probes,
    recorder,
    status,
    supervisor,
    systemd,
    transaction,
)

EPILOG = """exit codes:
  0  done (for `preflight`: the release may be swapped to)
  1  the swap failed, the preflight found a problem, or what was to be measured could not be
  2  bad usage, or a record that cannot be read
  3  another swap is running, or another job measures
Commands that show something print words on a terminal, and JSON when piped or with --json.
`supervise` is the main process of an engine's unit; its exit codes are documented in supervisor.py.
"""


def _say(line: str) -> None:
    print(line, flush=True)


def _answer(value: Any) -> int:
    _say(json.dumps(value, sort_keys=True, ensure_ascii=False))
    return 0


def _show(args: argparse.Namespace, value: Any, words: Callable[[str, Any], list[str]]) -> int:
    """The value in words for a person at a terminal; JSON for everybody else."""
    if args.json or not sys.stdout.isatty():
        return _answer(value)
    host = os.uname().nodename
    for line in words(host, value) or [f"{host}: nothing to show"]:
        _say(line)
    return 0


def _supervise(layout: records.Layout, args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    try:
        variant = installed.supervised(layout, args.variant, processes.unit_of(os.getpid()))
    except records.RecordError as error:
        _tell(f"swapgate: {error}")
        return supervisor.RETRY_IS_USELESS
    known = signatures.load_signatures(records.read_json(layout.signatures))
    return supervisor.supervise(variant, argv, layout, known)


def _preflight(layout: records.Layout, args: argparse.Namespace) -> int:
    report = preflight.check(layout, args.release, installed.managed_units(layout), lambda _: None)
    _show(args, report, lambda _host, found: progress.preflight_report(found))
    return 0 if report["ok"] else 1


def _collective(layout: records.Layout, args: argparse.Namespace) -> int:
    with transaction.locked(layout, "the collective check"), jobs.running(layout, "links", args.by):
        report = collective_check.check(layout, args.name, args.limit_s)
    _show(args, report, progress.collective_table)
    return 0 if report["verdict"] == "ok" else 1


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _record(layout: records.Layout, args: argparse.Namespace) -> int:
    request = records.read_json(args.request)
    try:
        with jobs.running(layout, "record", args.by):
            failed = recorder.record(layout, request, args.out, _tell, args.limit_s)
    except (recorder.RecordingFailed, engine_api.EngineError) as error:
        _tell(f"swapgate record: {error}. Look at `swapgate status`; what was recorded is in {args.out}.")
        return 1
    _answer({"failed": failed, "out": str(args.out)})
    return 1 if failed else 0


def _probe(layout: records.Layout, args: argparse.Namespace) -> int:
    with jobs.running(layout, "probe", args.by):
        return probes.command(layout, args.request, args.out, _tell) or _answer({"out": args.out})


def _profile(layout: records.Layout, args: argparse.Namespace) -> int:
    with jobs.running(layout, "profile", args.by):
        return _answer(decode_profile.profile(layout, args.steps, args.keep))


def _bench_serving(layout: records.Layout, _args: argparse.Namespace) -> int:
    jobs.refuse_beside(layout)
    return _answer(bench.what_serves(layout))


def _end_orphans(layout: records.Layout, _args: argparse.Namespace) -> int:
    with transaction.locked(layout, "the end of orphans"):
        ended = gpus.end_orphans(layout)
    _answer(ended)
    return 0 if all(one["ended"] for one in ended) else 1


def _bench(layout: records.Layout, args: argparse.Namespace) -> int:
    asked = bench.Bench(layout, records.read_json(args.request), args.out, _tell, args.unless_watched_s)
    try:
        if args.plan:
            return _answer(asked.plan())
    except engine_api.EngineError as error:
        _tell(f"swapgate bench: {error}. Look at `swapgate status`.")
        return 1
    with jobs.running(layout, "benchmark", args.by):
        load = asked.run()
    _answer(load)
    return 0 if load["outcome"] == "measured" else 1


def _verify_unit(_layout: records.Layout, args: argparse.Namespace) -> int:
    lines = systemd.verify(args.path)
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


def _who(parser: argparse.ArgumentParser) -> None:
    # A measuring unit has no SUDO_USER; what starts it says in its environment for whom.
    owner = os.environ.get("SWAPGATE_BY") or os.environ.get("SUDO_USER") or "root"
    parser.add_argument("--by", default=owner, help="who asks, for the record")


def build_parser() -> argparse.ArgumentParser:
    """All commands and what they take."""
    parser = argparse.ArgumentParser(
        prog="swapgate",
        description="Run, swap and inspect the engines of this host.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    words = argparse.ArgumentParser(add_help=False)
    words.add_argument("--json", action="store_true", help="print JSON on a terminal too")

    supervise = commands.add_parser("supervise", help="the main process of an engine's unit")
    supervise.add_argument("variant", help="name of an installed variant")
    supervise.add_argument("argv", nargs=argparse.REMAINDER, help="-- and the engine's exact command")
    supervise.set_defaults(run=_supervise)

    check = commands.add_parser(
        "preflight", parents=[words], help="check a staged release while the old variant serves"
    )
    check.add_argument("release", help="the release's content hash")
    check.set_defaults(run=_preflight)

    ask = commands.add_parser("ask", help="ask for a swap to a staged release and return at once; prints JSON")
    ask.add_argument("release", help="the release's content hash")
    _who(ask)
    ask.add_argument("--because", metavar="TEXT", help="why, for the record")
    ask.add_argument("--kind", choices=("deploy", "rollback"), default="deploy", help="what it is, for the record")
    ask.add_argument(
        "--confirm-within",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="go back unless `swapgate confirm` is run within this time after the soak (default: no wait)",
    )
    ask.set_defaults(
        run=lambda layout, args: _answer(
            transaction.ask(layout, args.release, args.by, args.confirm_within, args.because, args.kind)
        )
    )

    confirm = commands.add_parser("confirm", help="say that the swap which waits for it is wanted; prints JSON")
    _who(confirm)
    confirm.set_defaults(run=lambda layout, args: _answer(transaction.confirm(layout, args.by)))

    decline = commands.add_parser("decline", help="say that it is not: the old variant comes back; prints JSON")
    decline.add_argument("--because", required=True, metavar="TEXT", help="why, for the record")
    _who(decline)
    decline.set_defaults(run=lambda layout, args: _answer(transaction.decline(layout, args.because, args.by)))

    swap = commands.add_parser("swap", help="carry out the request; the ExecStart of swapgate-swap.service")
    swap.set_defaults(run=lambda layout, _args: transaction.run_request(layout, _say))

    resolve = commands.add_parser("resolve", help="finish a swap that was cut off: bring the last good variant back")
    resolve.set_defaults(run=lambda layout, _args: transaction.resolve(layout, _say))

    recover = commands.add_parser("recover", help="settle at boot what the last boot cut off")
    recover.set_defaults(run=lambda layout, _args: transaction.recover(layout, _say))

    show = commands.add_parser("status", parents=[words], help="what serves, what was last good, what a swap does")
    show.set_defaults(run=lambda layout, args: _show(args, status.status(layout), progress.status_table))

    text = commands.add_parser("show-release", help="a release's data and unit text; prints JSON, null for nothing")
    text.add_argument(
        "release", help=f"its content hash, or `{status.SERVING}` for what serves (else the last good one)"
    )
    text.set_defaults(run=lambda layout, args: _answer(status.show_release(layout, args.release)))

    joined = commands.add_parser(
        "topology", parents=[words], help="how the GPUs are joined, and which NCCL settings fit"
    )
    joined.set_defaults(run=lambda layout, args: _show(args, status.topology(layout), progress.topology_table))

    whose = commands.add_parser("gpus", parents=[words], help="who holds each GPU, and orphans of dead engines")
    whose.set_defaults(run=lambda layout, args: _show(args, gpus.ownership(layout), progress.gpu_table))

    end = commands.add_parser("end-orphans", help="end processes of engines whose unit is dead; prints JSON")
    end.set_defaults(run=_end_orphans)

    proof = commands.add_parser(
        "collective",
        parents=[words],
        help="an all-reduce on idle GPUs in a variant's own environment; exit 1 unless ok",
    )
    proof.add_argument("name", nargs="?", help="an installed variant or a staged release (default: the last good one)")
    proof.add_argument("--limit-s", type=float, default=60.0, help="seconds until what still runs is a hang")
    _who(proof)
    proof.set_defaults(run=_collective)

    where = commands.add_parser("profile", help="share of decode time by kind of kernel, of what serves; prints JSON")
    where.add_argument("--steps", type=int, default=32, help="decode steps to profile (default 32)")
    where.add_argument("--keep", action="store_true", help="leave the traces on the host")
    _who(where)
    where.set_defaults(run=_profile)

    back = commands.add_parser("way-back", parents=[words], help="the release that a roll back would go to")
    back.set_defaults(run=lambda layout, args: _show(args, status.way_back(layout), progress.way_back_lines))

    record = commands.add_parser("record", help="ask the serving engine every prompt of a file, one stream at a time")
    record.add_argument("request", type=Path, metavar="REQUEST.json", help="its shape is in recorder.py")
    record.add_argument("out", type=Path, metavar="OUT.jsonl", help="a line an answer; replaced if it is there")
    record.add_argument("--limit-s", type=float, default=14_400.0, metavar="SECONDS", help="end by then (default 4 h)")
    _who(record)
    record.set_defaults(run=_record)

    measure = commands.add_parser("bench", help="measure what serves with the engine's own load generator; prints JSON")
    measure.add_argument("request", type=Path, metavar="REQUEST.json", help="its shape is in bench.py")
    measure.add_argument("out", type=Path, metavar="FOLDER", help="for what comes of it, and FOLDER.tar.gz beside it")
    measure.add_argument("--plan", action="store_true", help="only time one answer and say how long it will take")
    measure.add_argument(
        "--unless-watched-s",
        type=float,
        metavar="SECONDS",
        help="end when nobody ran `swapgate bench-status` for so long (default: never)",
    )
    _who(measure)
    measure.set_defaults(run=_bench)

    found = commands.add_parser("bench-serving", help="what a measuring job would measure now; prints JSON")
    found.set_defaults(run=_bench_serving)

    watch = commands.add_parser("bench-status", help="how far a benchmark is; prints JSON")
    watch.add_argument("out", type=Path, metavar="FOLDER")
    watch.set_defaults(run=lambda _layout, args: _answer(bench.status(args.out)))

    history = commands.add_parser("history", parents=[words], help="all ended swaps, oldest first")
    history.set_defaults(
        run=lambda layout, args: _show(
            args, records.read_history(layout), lambda _host, swaps: progress.history_table(swaps)
        )
    )

    probe = commands.add_parser(
        "probe", help="measure what steps that verify drafts cost on a plain engine that serves"
    )
    probe.add_argument("request", help="a file; its shape is in probes.py")
    probe.add_argument("out", help="where the timings go, as JSON, readable by its owner only")
    _who(probe)
    probe.set_defaults(run=_probe)

    verify = commands.add_parser("verify-unit", help="systemd-analyze verify, where a warning is an error too")
    verify.add_argument("path", help="a unit file")
    verify.set_defaults(run=_verify_unit)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; errors are one line on standard error."""
    args = build_parser().parse_args(argv)
    layout = records.Layout()
    try:
        return int(args.run(layout, args))
    except transaction.Busy as error:
        print(f"swapgate: {error}. Wait for it, or look at `swapgate status`.", file=sys.stderr)
        return 3
    except jobs.JobRuns as error:
        print(f"swapgate: {error}", file=sys.stderr)
        return 3
    except jobs.Ended as error:
        print(f"swapgate {args.command}: {error}", file=sys.stderr)
        return 1
    except (records.RecordError, systemd.SystemdError, OSError) as error:
        print(f"swapgate: {error}", file=sys.stderr)
        return 2
