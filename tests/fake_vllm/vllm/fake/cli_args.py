"""Builds the `vllm serve` parser from the recorded flags, and makes the checks that the real engine makes right after
parsing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from vllm.fake import release
from vllm.fake.errors import ValidationError, problem
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_readable_int_or_auto


def converter(flag: dict[str, Any]) -> Callable[[str], Any]:
    """The flag's type as a function; it refuses a value in the recorded words of the real one."""
    convert: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "human_int": human_readable_int_or_auto,
        "json": json.loads,
        "config": json.loads,
        "str": str,
    }

    def take(value: str) -> Any:
        if value == "None" and flag["default"] is None and flag["type"] != "str":
            return None
        try:
            result = convert[flag["type"]](value)
        except ValueError as error:
            words = flag["refusal"] or f"invalid {flag['type']} value: '{{value}}'"
            text = words.replace("{value}", value).replace("{address}", hex(id(json.loads)))
            raise argparse.ArgumentTypeError(text) from error
        check_keys(flag, result)
        return result

    return take


def check_keys(flag: dict[str, Any], value: Any) -> None:
    """Raises argparse.ArgumentTypeError for a key that the flag's config class does not have."""
    unknown = [key for key in value if key not in flag["keys"]] if flag.get("keys") and isinstance(value, dict) else []
    if unknown:
        title = flag["refusal"].split("\n")[0].rsplit(" ", 1)[-1]
        kind = "unexpected_keyword_argument"
        problems = [problem(key, "Unexpected keyword argument", kind, value[key]) for key in unknown]
        raise argparse.ArgumentTypeError(str(ValidationError(title, problems)))


def add_flag(parser: argparse.ArgumentParser, flag: dict[str, Any]) -> None:
    """Adds one recorded flag. An unknown kind is an error in the recording and raises KeyError."""
    names, kind = flag["names"], flag["kind"]
    if kind == "help":
        return
    if not names[0].startswith("-"):
        parser.add_argument(names[0], nargs=flag["nargs"], default=flag["default"])
        return
    # argparse knows its own SUPPRESS by identity, which a recording cannot keep
    default = argparse.SUPPRESS if flag["default"] == argparse.SUPPRESS else flag["default"]
    common: dict[str, Any] = {"dest": flag["dest"], "default": default}
    if kind in ("store_true", "store_false"):
        parser.add_argument(*names, action=kind, **common)
    elif kind == "boolean":
        positive = [name for name in names if not name.startswith("--no-")]
        parser.add_argument(*positive, action=argparse.BooleanOptionalAction, **common)
    else:
        action = {"store": "store", "append": "append"}[kind]
        extra = {} if action == "append" else {"nargs": flag["nargs"]}
        parser.add_argument(*names, action=action, type=converter(flag), choices=flag["choices"], **extra, **common)


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Adds all flags of this release to the parser and returns it."""
    for flag in release.flags():
        add_flag(parser, flag)
    return parser


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """The real engine's quick checks. Raises TypeError or ValueError in its words."""
    if getattr(args, "subparser", "serve") not in ("serve", "launch"):
        return
    if args.enable_auto_tool_choice and not args.tool_call_parser:
        raise TypeError("Error: --enable-auto-tool-choice requires --tool-call-parser")
    if args.enable_log_outputs and not args.enable_log_requests:
        raise TypeError("Error: --enable-log-outputs requires --enable-log-requests")
