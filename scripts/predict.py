#!/usr/bin/env python3
"""Predict whether speculation will help, from answers that were recorded without it.

    python scripts/predict.py replay FILE.jsonl --grid "k=5 min=4 max=4; k=2 min=1 max=4" --semantics v1

Exit codes:

    0  done
    1  the output could not be written
    2  the input, the grid or the call was wrong; the message says where, what was found and what was expected
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import replay  # noqa: E402

# A table is read in a pager or a log as well as in a terminal; without a terminal there is no width to ask for.
PLAIN_WIDTH = 120

REPLAY_HELP = """
Replay the n-gram proposer over recorded answers: exact drafts and accepted tokens per step, no engine needed.

Input, one JSON object a line (other keys are ignored, blank lines skipped):

    {"id": string or number, "class": string, "prompt_token_ids": [...], "output_token_ids": [...]}

--json prints a list, one object per request and setting, in the order of the input, then of the grid:

    {"id", "class", "k", "min", "max",
     "steps":            decode steps; the first output token comes from the prefill, not from a step
     "drafted":          draft tokens verified, one number per step
     "accepted":         those accepted, one number per step, at most the tokens that the answer still holds
     "tokens_per_step":  (output tokens - 1) / steps, null without a step}

--json --summary prints one object instead, with the sums per class (class null: all classes):

    {"semantics", "checked": what the rule was compared with, "max_model_len",
     "summary": [{"class", "k", "min", "max", "requests", "tokens", "steps", "tokens_per_step",
                  "draft_step_share":        share of the steps that had a draft, 0..1
                  "drafted", "accepted":     tokens
                  "drafted_by_position", "accepted_by_position":  tokens, positions 1..k
                  "acceptance_by_position":  accepted / drafted at that position, 0..1, null where none was drafted}]}

Without --json: the summary as a table. Tokens per step is also the free-verify bound: the decode speed-up if verifying
k + 1 tokens cost no more than computing one. No host can do better with that setting on these answers.
"""
REPLAY_END = """
semantics: choose by the runner that will serve.
    v1  earliest match, 0..k drafts a step    V1 runner: CPU builds; GPUs in 0.26, where n-gram turns the V2 runner off
    v2  latest match, always k drafts a step  V2 runner: GPUs in 0.32; unverified: no GPU run has been compared yet

exit codes: 0 done, 1 the output could not be written, 2 the input, the grid or the call was wrong
"""


def share(value: float | None) -> str:
    """A share 0..1 in whole per cent."""
    return "-" if value is None else f"{100 * value:.0f}"


def table_of(rows: Sequence[dict[str, Any]], rule: replay.Rule) -> Table:
    """The summary's rows for a reader."""
    limit = "" if rule.max_model_len is None else f", max_model_len {rule.max_model_len}"
    table = Table(
        title=f"Replayed acceptance, semantics {rule.semantics}{limit}",
        caption=f"tokens/step is the free-verify bound; {rule.semantics} is {replay.CHECKED[rule.semantics]}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("class", overflow="fold")
    for name in ("k", "min", "max", "requests", "tokens", "steps", "tokens/step", "steps with\ndrafts, %"):
        table.add_column(name, justify="right")
    table.add_column("accepted by position, %", overflow="fold")
    for i, row in enumerate(rows):
        bound = row["tokens_per_step"]
        table.add_row(
            # Text, not a string: a class may hold brackets, which rich would take for markup.
            Text("all" if row["class"] is None else row["class"], style="bold" if row["class"] is None else ""),
            *(str(row[key]) for key in ("k", "min", "max", "requests", "tokens", "steps")),
            "-" if bound is None else f"{bound:.3f}",
            share(row["draft_step_share"]),
            " ".join(share(value) for value in row["acceptance_by_position"]),
            end_section=i + 1 < len(rows) and rows[i + 1]["class"] != row["class"],
        )
    return table


def read(path: str, max_model_len: int | None) -> list[replay.Transcript]:
    """Transcripts of a file, or of standard input for "-"."""
    if path == "-":
        return replay.read_transcripts(sys.stdin.buffer, "standard input", max_model_len)
    try:
        with Path(path).open("rb") as stream:
            return replay.read_transcripts(stream, path, max_model_len)
    except OSError as error:
        raise replay.InputError(
            f"{path}: cannot be read: {error.strerror or error}; expected a JSONL file of "
            "transcripts, or - for standard input"
        ) from error


def command_replay(options: argparse.Namespace) -> int:
    """The command `replay`."""
    if options.summary and not options.json:
        raise replay.InputError("--summary: found without --json; a table is a summary already: add --json or drop it")
    settings = replay.parse_grid(options.grid)
    rule = replay.Rule(options.semantics, options.max_model_len)
    transcripts = read(options.file, options.max_model_len)
    if options.json and not options.summary:
        # The rows have no place for it, and their shape is fixed.
        if rule.latest:
            print(f"predict replay: semantics {rule.semantics} is {replay.CHECKED[rule.semantics]}", file=sys.stderr)
        out = sys.stdout.buffer
        for i, transcript in enumerate(transcripts):
            out.write(b",\n" if i else b"[")
            out.write(replay.replay(transcript, settings, rule).rows_json())
        out.write(b"]\n")
        return 0
    summary = replay.Summary(settings)
    for transcript in transcripts:
        summary.add(replay.replay(transcript, settings, rule))
    if options.json:
        print(
            json.dumps(
                {
                    "semantics": rule.semantics,
                    "checked": replay.CHECKED[rule.semantics],
                    "max_model_len": rule.max_model_len,
                    "summary": summary.rows(),
                }
            )
        )
    else:
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        Console(width=width).print(table_of(summary.rows(), rule))
    return 0


def length(text: str) -> int:
    """A max_model_len of the command line, in tokens."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number of tokens from 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    one = commands.add_parser(
        "replay",
        help="replay acceptance over recorded answers",
        description=REPLAY_HELP,
        epilog=REPLAY_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("file", metavar="FILE.jsonl", help="transcripts, one a line, or - for standard input")
    one.add_argument(
        "--grid",
        required=True,
        help=f'settings with ";" between: "k=5 min=4 max=4; k=2 min=1 max=4", in tokens, each 1..{replay.LARGEST}',
    )
    one.add_argument("--semantics", required=True, choices=replay.SEMANTICS, help="rule of the runner that will serve")
    one.add_argument(
        "--max-model-len",
        type=length,
        metavar="TOKENS",
        help="limit of the server, prompt and answer together: cuts the last drafts as the engine does",
    )
    one.add_argument("--json", action="store_true", help="print JSON instead of a table")
    one.add_argument("--summary", action="store_true", help="with --json: sums per class instead of steps per request")
    one.set_defaults(run=command_replay)
    return top


def main(arguments: Iterable[str] | None = None) -> int:
    """Command line; returns the exit code that the module's text lists."""
    options = parser().parse_args(list(arguments) if arguments is not None else None)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except replay.InputError as error:
        print(f"predict {options.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # Else the interpreter, flushing once more at its end, would print a second, unclear error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(
            f"predict {options.command}: standard output cannot be written: {error.strerror or error}; expected a "
            "reader that takes all of it, or a file with room",
            file=sys.stderr,
        )
        return 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
