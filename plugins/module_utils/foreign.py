"""Files that somebody else could have written: the engine's user, a load generator, whoever made a model's folder.

They are opened without following a link and without waiting, read up to a limit, and taken only in the shape that is
expected. Anything else that is there counts as nothing.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from .text import printable

LIMIT = 1 << 20
# Of a list; what comes after them is left out.
ITEMS = 400

JsonDict = dict[str, Any]


class ForeignError(OSError):
    """A file that is not read; the text says which and why."""


class Misfit(ValueError):
    """A value that has not the shape that is expected; the text says where."""


def read_bytes(path: str | Path, limit: int = LIMIT) -> bytes:
    """What a regular file holds. ForeignError for a link, a folder, a FIFO, a device, and more than ``limit`` bytes;
    FileNotFoundError where there is nothing."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ForeignError(f"{path}: not read: {error.strerror}") from error
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ForeignError(f"{path}: not read: expected a regular file")
        found = file.read(limit + 1)
    if len(found) > limit:
        raise ForeignError(f"{path}: not read: more than {limit} bytes")
    return found


def read_object(path: str | Path, shape: JsonDict, limit: int = LIMIT) -> JsonDict | None:
    """The JSON object of a file as ``fit`` makes it, or None where the file holds no such object or is not there."""
    try:
        found: JsonDict = fit(json.loads(read_bytes(path, limit)), shape)
    except (OSError, ValueError, RecursionError):
        return None
    return found


def fit(value: Any, shape: Any, where: str = "value") -> Any:
    """``value`` reduced to ``shape``; Misfit where it is of another kind.

    A shape is ``str`` (made printable and cut), ``int``, ``float`` (any finite number), ``bool``; ``{key: shape}``, all
    of them there and nothing else kept; ``[shape]``, a list of at most ITEMS; or ``(shape,)``, that or null.
    """
    if isinstance(shape, tuple):
        return None if value is None else fit(value, shape[0], where)
    if isinstance(shape, dict) and isinstance(value, dict):
        return {key: fit(value.get(key), one, f"{where}.{key}") for key, one in shape.items()}
    if isinstance(shape, list) and isinstance(value, list):
        return [fit(item, shape[0], where + "[]") for item in value[:ITEMS]]
    if shape is str and isinstance(value, str):
        return printable(value)
    if shape is float and isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf:
        return value
    if shape in (int, bool) and type(value) is shape:
        return value
    kind = getattr(shape, "__name__", type(shape).__name__)
    raise Misfit(f"{where}: found {printable(repr(value), 60)}, expected {kind}")
