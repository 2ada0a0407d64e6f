"""The argument parser under the real engine's name: dashes and underscores are the same, dotted keys build JSON,
unknown flags end it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from vllm.fake import log

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_readable_int(value: str) -> int:
    """An integer with an optional suffix: 2k is 2000, 2K is 2048. Raises argparse.ArgumentTypeError or ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", value.strip())
    if not match:
        return int(value)
    number, suffix = match.groups()
    if suffix.isupper() and "." in number:
        raise argparse.ArgumentTypeError(
            f"Decimals are not allowed with binary suffixes like {suffix}. "
            f"Did you mean to use {number}{suffix.lower()} instead?"
        )
    return int(float(number) * SUFFIXES[suffix])


def human_readable_int_or_auto(value: str) -> int:
    """The same, where `auto` means -1."""
    return -1 if value.strip().lower() in ("-1", "auto") else human_readable_int(value)


def dashed(argument: str) -> str:
    """--max_model_len=1 becomes --max-model-len=1; what follows the first dot of a dotted key, and the value, stay."""
    head, equals, value = argument.partition("=")
    name, dot, keys = head[2:].partition(".")
    return "--" + name.replace("_", "-") + dot + keys + equals + value


def merge(target: dict[str, Any], keys: list[str], value: Any) -> None:
    """Puts a value at a path of keys, making the dicts on the way."""
    for key in keys[:-1]:
        target = target.setdefault(key, {})
    target[keys[-1]] = value


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse with the engine's liberties. Errors are argparse's own: message on standard error, exit status 2."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parses after rewriting: `serve --model X`, underscores, -O3, and dotted keys gathered into one JSON
        argument.
        """
        given = list(sys.argv[1:] if args is None else args)
        if given[:1] == ["serve"]:
            given = self._model_first(given)
        rewritten: list[str] = []
        dotted: dict[str, dict[str, Any]] = {}
        rest = iter(given)
        for given_argument in rest:
            argument = given_argument
            if not argument.startswith("--"):
                short = re.fullmatch(r"-O=?([0-3])", argument)
                rewritten += ["--optimization-level", short.group(1)] if short else [argument]
                continue
            argument = dashed(argument)
            head, equals, value = argument.partition("=")
            if "." not in head:
                rewritten.append(argument)
                continue
            if not equals:
                value = next(rest, "")
            flag, *keys = head.split(".")
            try:
                parsed = json.loads(value)
            except ValueError:
                parsed = value
            merge(dotted.setdefault(flag, {}), keys, parsed)
        for flag, content in dotted.items():
            rewritten += [flag, json.dumps(content)]
        return super().parse_args(rewritten, namespace)

    @staticmethod
    def _model_first(given: list[str]) -> list[str]:
        """Moves `--model X` of `serve` to the front, with the engine's warning."""
        for index, argument in enumerate(given):
            if argument != "--model" and not argument.startswith("--model="):
                continue
            log.warning(
                "argparse_utils.py:300",
                "With `vllm serve`, you should provide the model as a positional argument or in a config file "
                "instead of "
                "via the `--model` option. The `--model` option will be removed in a future version.",
            )
            if argument == "--model":
                return ["serve", *given[index + 1 : index + 2], *given[1:index], *given[index + 2 :]]
            return ["serve", argument.partition("=")[2], *given[1:index], *given[index + 1 :]]
        return given
