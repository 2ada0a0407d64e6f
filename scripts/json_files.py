"""The files of a command line: whatever is wrong with one is one InputError that names it and what was expected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS: dict[Any, str] = {dict: "an object", list: "a list"}


class InputError(ValueError):
    """The input cannot be used; the text says what, where, found against expected, and what to do."""


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
        int: "a number",
        float: "a number with a fraction",
    }
    return names.get(type(value), type(value).__name__)


def _text(path: str, expected: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read: {why}; expected {expected}") from error
    if not text.strip():
        raise InputError(f"{path}: the file is empty; expected {expected}")
    return text


def _value(text: str, kind: type, where: str, expected: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}); expected {expected}") from error
    if not isinstance(value, kind):
        raise InputError(f"{where}: found {kind_of(value)}, expected {KINDS[kind]}: {expected}")
    return value


def read_json(path: str, kind: type, expected: str) -> Any:
    """The one JSON value of a file, a dict or a list. ``expected`` says what the file should be and who writes it."""
    return _value(_text(path, expected), kind, path, expected)


def read_lines(path: str, expected: str, keys: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The objects of a JSONL file, each with these keys."""
    found = []
    for number, line in enumerate(_text(path, expected).splitlines(), 1):
        if line.strip():
            row = _value(line, dict, f"{path}:{number}", expected)
            absent = [key for key in keys if row.get(key) is None]
            if absent:
                names = ", ".join(sorted(row)) or "no keys"
                raise InputError(f"{path}:{number}: found {names}, expected {' and '.join(absent)} too: {expected}")
            found.append(row)
    return found


def write(path: str, text: str, option: str, mode: str = "w") -> None:
    """Write (mode "a": append) a file that ``option`` of the command line names."""
    try:
        with Path(path).open(mode, encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        why = error.strerror or error
        raise InputError(
            f"{option} {path}: cannot be written: {why}; expected a folder that is there, with room"
        ) from error
