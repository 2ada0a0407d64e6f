"""What the recorded engine knew (flags, speculative methods, parsers), adapted to the release that this copy claims
to be.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm._version import __version__

DATA = Path(__file__).resolve().parent.parent / "data"


def version_key(version: str) -> tuple[int, int]:
    """(major, minor) of a release such as 0.32.0 or 0.32.0+cpu."""
    major, minor = version.split("+", maxsplit=1)[0].split(".")[:2]
    return int(major), int(minor)


@lru_cache(maxsize=1)
def record() -> dict[str, Any]:
    """The recording of the real engine: see record_flags.py for its shape."""
    content: dict[str, Any] = json.loads((DATA / "flags-0.32.json").read_text(encoding="utf-8"))
    return content


@lru_cache(maxsize=4)
def flags(version: str = __version__) -> list[dict[str, Any]]:
    """The flags of `vllm serve` in the given release, in the shape of record_flags.py."""
    mine = version_key(version)
    found = {tuple(flag["names"]): flag for flag in record()["flags"]}
    for change in json.loads((DATA / "flag_changes.json").read_text(encoding="utf-8"))["changes"]:
        since = version_key(change["added_in"]) if "added_in" in change else (0, 0)
        until = version_key(change["removed_in"]) if "removed_in" in change else (1 << 30, 0)
        names = tuple(change["names"])
        if not since <= mine < until:
            found.pop(names, None)
        elif names not in found:
            empty = {
                "nargs": None,
                "choices": None,
                "type": "str",
                "refusal": None,
                "default": None,
                "const": None,
                "deprecated": False,
            }
            found[names] = {**empty, **change}
    return list(found.values())
