"""Records the flags of a real engine's `vllm serve` parser, for the fake engine to accept and refuse the same ones.

Run with the real engine's own interpreter: ENGINE/bin/python record_flags.py OUT.json

The output is {"version": str,
"flags": [FLAG, ...], "speculative": {"methods": [str], "mtp_methods": [str], "fields": {name: {"type", "gt", "ge"}}},
"tool_parsers": [str], "reasoning_parsers": [str]}; a FLAG is {"names": [str], "dest": str, "kind": str, "nargs":
int|str|None, "choices": [str]|None, "type": str, "default": JSON value or null, "keys": [str]|None, "const": JSON
value or null, "deprecated": bool}. `kind` is one of store, store_true, store_false, boolean (a --x / --no-x pair),
append, help; `type` is str, int, float, json, human_int or config (a JSON object checked against a config class),
found by feeding the parser's own converter a few values, because the converters have no names of their own; `refusal`
is how the converter words its refusal of the value `abc`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

PROBES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    # (type, values it must take, values it must refuse); the first that fits wins
    ("int", ("1", "-7"), ("1.5", "1k", "abc", '{"a": 1}')),
    ("human_int", ("1", "1k"), ("abc", '{"a": 1}')),
    ("float", ("1", "1.5"), ("abc", "1k", '{"a": 1}')),
    ("json", ('{"a": 1}',), ("{a",)),
    ("str", ("abc", "1.5", "{a"), ()),
)


def takes(convert: Callable[[str], Any], value: str) -> bool:
    """Whether the converter accepts the value."""
    try:
        convert(value)
    except (argparse.ArgumentTypeError, ValueError, TypeError, KeyError, AttributeError):
        return False
    return True


def type_of(convert: Callable[[str], Any] | None) -> str:
    """The name in PROBES of what a converter accepts, or `config` for a class that takes its own keys only."""
    if convert is None:
        return "str"
    for name, good, bad in PROBES:
        if all(takes(convert, value) for value in good) and not any(takes(convert, value) for value in bad):
            return name
    return "config"


def refusal_of(convert: Callable[[str], Any] | None) -> str | None:
    """How argparse would word the refusal of the value `abc`, or None when the converter takes it."""
    if convert is None:
        return None
    try:
        convert("abc")
    except argparse.ArgumentTypeError as error:
        return re.sub(r" at 0x[0-9a-f]+", " at {address}", str(error)).replace("abc", "{value}")
    except (TypeError, ValueError) as error:
        if type(error).__name__ == "ValidationError":  # pydantic's is a ValueError that argparse shows by its text
            return str(error).replace("abc", "{value}")
        return f"invalid {getattr(convert, '__name__', repr(convert))} value: '{{value}}'"
    return None


def config_keys(refusal: str | None) -> list[str] | None:
    """The keys of the config class that a refusal names ("1 validation error for X"), or None for other flags."""
    named = re.match(r"1 validation error for (\w+)", refusal or "")
    cls = getattr(import_module("vllm.config"), named.group(1), None) if named else None
    return [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else None


def plain(value: Any) -> Any:
    """The value where JSON can hold it, else null (a default that is an object is of no use to the fake)."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return None
    return value


def kind_of(action: argparse.Action) -> str:
    """The behaviour of an argparse action, by its class."""
    by_class = (
        (argparse._StoreTrueAction, "store_true"),
        (argparse._StoreFalseAction, "store_false"),
        (argparse._AppendAction, "append"),
        (argparse._HelpAction, "help"),
        (argparse.BooleanOptionalAction, "boolean"),
    )
    for cls, name in by_class:
        if isinstance(action, cls):
            return name
    return "store"


def speculative_fields() -> dict[str, Any]:
    """Names, plain types and bounds of what --speculative-config takes, from the engine's own class."""
    module = import_module("vllm.config.speculative")
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(module.SpeculativeConfig):
        entry: dict[str, Any] = {
            "type": re.split(r"[\s|\[]", str(field.type).replace("<class '", ""))[0].strip("'>") or "other"
        }
        for bound in getattr(field.default, "metadata", ()):
            for name in ("gt", "ge"):
                if hasattr(bound, name):
                    entry[name] = getattr(bound, name)
        fields[field.name] = entry
    method_type = module.SpeculativeMethod
    names = [name for part in get_args(method_type) for name in (get_args(part) or (part,))]
    return {"methods": flatten(names), "mtp_methods": list(get_args(module.MTPModelTypes)), "fields": fields}


def flatten(parts: list[Any]) -> list[str]:
    """Strings of nested Literal types, in their order, each once."""
    found: list[str] = []
    for part in parts:
        for name in [part] if isinstance(part, str) else flatten(list(get_args(part))):
            if name not in found:
                found.append(name)
    return found


def main() -> int:
    """Writes the flags of the engine in this interpreter; the exit status is 0, or 2 for wrong usage."""
    if len(sys.argv) != 2:
        print("usage: ENGINE/bin/python record_flags.py OUT.json", file=sys.stderr)
        return 2
    here = str(
        Path(__file__).resolve().parent
    )  # Python puts the script's folder first, and the fake package lies in it
    sys.path[:] = [entry for entry in sys.path if str(Path(entry).resolve()) != here]
    import vllm
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        cli_args = import_module("vllm.entrypoints.launchers.cli_args")
    except ModuleNotFoundError:  # engines before the launchers package
        cli_args = import_module("vllm.entrypoints.openai.cli_args")
    parser = cli_args.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    flags = []
    for action in parser._actions:
        refusal = refusal_of(action.type if callable(action.type) else None)
        flags.append(
            {
                "names": list(action.option_strings) or [action.dest],
                "dest": action.dest,
                "kind": kind_of(action),
                "nargs": action.nargs,
                "choices": [plain(choice) for choice in action.choices] if action.choices else None,
                "type": type_of(action.type if callable(action.type) else None),
                "refusal": refusal,
                "keys": config_keys(refusal),
                "default": plain(action.default),
                "const": plain(action.const),
                "deprecated": action in parser._deprecated,
                "action": type(action).__name__,
            }
        )
    record = {
        "version": vllm.__version__,
        "flags": flags,
        "speculative": speculative_fields(),
        "tool_parsers": import_module("vllm.tool_parsers").ToolParserManager.list_registered(),
        "reasoning_parsers": import_module("vllm.reasoning").ReasoningParserManager.list_registered(),
    }
    text = json.dumps(record, indent=0, sort_keys=True)
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
