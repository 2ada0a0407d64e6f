"""The command line of the host program: `swapgate COMMAND`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from ..module_utils import records, signatures
from . import installed, preflight, status, supervisor, systemd, transaction

EPILOG = """exit codes:
  0  done (for `preflight`: the release may be swapped to)
  1  the swap failed, or the preflight found a problem
  2  bad usage, or a record that cannot be read
  3  another swap is running
`supervise` is the main process of an engine's unit; its exit codes are documented in supervisor.py.
"""


def _say(line: str) -> None:
    print(line, flush=True)


def _answer(value: Any) -> int:
    _say(json.dumps(value, sort_keys=True, ensure_ascii=False))
    return 0


def _supervise(layout: records.Layout, args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    variant = records.read_json(layout.variants / (args.variant + ".json"))
    known = signatures.load_signatures(records.read_json(layout.signatures))
    return supervisor.supervise(variant, argv, layout, known)


def _preflight(layout: records.Layout, args: argparse.Namespace) -> int:
    report = preflight.check(layout, args.release, installed.managed_units(layout), lambda _: None)
    _answer(report)
    return 0 if report["ok"] else 1


def _verify_unit(_layout: records.Layout, args: argparse.Namespace) -> int:
    lines = systemd.verify(args.path)
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and what they take."""
    parser = argparse.ArgumentParser(
        prog="swapgate",
        description="Run, swap and inspect the engines of this host.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    supervise = commands.add_parser("supervise", help="the main process of an engine's unit")
    supervise.add_argument("variant", help="name of an installed variant")
    supervise.add_argument("argv", nargs=argparse.REMAINDER, help="-- and the engine's exact command")
    supervise.set_defaults(run=_supervise)

    check = commands.add_parser("preflight", help="check a staged release while the old variant serves; prints JSON")
    check.add_argument("release", help="the release's content hash")
    check.set_defaults(run=_preflight)

    ask = commands.add_parser("ask", help="ask for a swap to a staged release and return at once; prints JSON")
    ask.add_argument("release", help="the release's content hash")
    ask.add_argument("--by", default=os.environ.get("SUDO_USER") or "root", help="who asks, for the record")
    ask.add_argument(
        "--confirm-within",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="go back unless `swapgate confirm` is run within this time after the soak (default: no wait)",
    )
    ask.set_defaults(
        run=lambda layout, args: _answer(transaction.ask(layout, args.release, args.by, args.confirm_within))
    )

    confirm = commands.add_parser("confirm", help="say that the swap which waits for it is wanted")
    confirm.set_defaults(run=lambda layout, _args: _answer(transaction.confirm(layout)))

    swap = commands.add_parser("swap", help="carry out the request; the ExecStart of swapgate-swap.service")
    swap.set_defaults(run=lambda layout, _args: transaction.run_request(layout, _say))

    resolve = commands.add_parser("resolve", help="finish a swap that was cut off: bring the last good variant back")
    resolve.set_defaults(run=lambda layout, _args: transaction.resolve(layout, _say))

    recover = commands.add_parser("recover", help="settle at boot what the last boot cut off")
    recover.set_defaults(run=lambda layout, _args: transaction.recover(layout, _say))

    show = commands.add_parser("status", help="what serves, what was last good, what a swap does; prints JSON")
    show.set_defaults(run=lambda layout, _args: _answer(status.status(layout)))

    back = commands.add_parser("way-back", help="the release that a roll back would go to; prints JSON")
    back.set_defaults(run=lambda layout, _args: _answer(status.way_back(layout)))

    history = commands.add_parser("history", help="all ended swaps, oldest first; prints a JSON list")
    history.set_defaults(run=lambda layout, _args: _answer(records.read_history(layout)))

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
    except (records.RecordError, systemd.SystemdError, FileNotFoundError) as error:
        print(f"swapgate: {error}", file=sys.stderr)
        return 2
