"""Text of somebody else's, made fit to be shown: on a terminal, in a journal, in a table. Pure functions."""

from __future__ import annotations

import unicodedata
from typing import Any

# Longer pieces of an engine's or a client's text tell nobody more.
SHOWN = 500


def _shown(sign: str) -> str:
    number = ord(sign)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def printable(text: Any, limit: int = SHOWN) -> str:
    r"""``text`` on one line without a sign that a terminal acts on: controls, escapes, bidirectional and other format
    signs, surrogates and separators of lines become ``\xNN`` or ``\uNNNN``. Cut after ``limit`` signs.
    """
    cut = str(text)[:limit]
    return "".join(
        sign if sign.isprintable() or unicodedata.category(sign) == "Zs" else _shown(sign)
        for sign in cut.replace("\t", " ")
    )
