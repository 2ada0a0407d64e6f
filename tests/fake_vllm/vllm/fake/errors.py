"""Exceptions under the names that the real engine's tracebacks show."""

from __future__ import annotations

from typing import Any


class ValidationError(ValueError):
    """Worded like pydantic's, which is what a bad engine config raises."""

    def __init__(self, title: str, problems: list[str]):
        """`problems` are the texts under the heading, already with their [type=...] and documentation lines."""
        count = len(problems)
        super().__init__("\n".join([f"{count} validation error{'s' if count > 1 else ''} for {title}", *problems]))


ValidationError.__module__ = "pydantic_core._pydantic_core"


class HFValidationError(ValueError):
    """What the hub client raises for a path that is neither a folder nor a repository id."""


class LocalEntryNotFoundError(FileNotFoundError):
    """What the hub client raises offline for a model that is not in its cache."""


HFValidationError.__module__ = LocalEntryNotFoundError.__module__ = "huggingface_hub.errors"

DOCS = "    For further information visit https://errors.pydantic.dev/2.14/v/"


def problem(field: str, text: str, kind: str, value: Any) -> str:
    """One field's problem in pydantic's layout."""
    return f"{field}\n  {text} [type={kind}, input_value={value!r}, input_type={type(value).__name__}]\n{DOCS}{kind}"


def value_problem(text: str, given: str, tail: str) -> str:
    """A problem of the whole object. `given` is the start of the shown arguments, `tail` their last characters."""
    shown = (f"ArgsKwargs((), {given}")[:25] + "..." + tail[-24:]
    return f"  Value error, {text} [type=value_error, input_value={shown}, input_type=ArgsKwargs]\n{DOCS}value_error"
