"""Failure signatures: what a line means, as data, checked when loaded.

Each is a mapping with these keys (docs/diagnosis.md has the whole account):

    id        name, unique
    role      cause    names why a start failed
              effect   shows that it failed and is what a deeper cause leaves behind
              wrapper  only says that it failed
              benign   looks like a failure and is none
              alive    work that takes long
              stop     somebody asked the engine to stop
    class     config | model | host | transient (cause and effect only)
    phase     phase in which it usually strikes, used where the log does not show one
    contains  one string or several: one of them must be in the message
    pattern   optional regular expression that must be found as well
    without   optional regular expression that must not be found
    level     optional: "any" also looks at INFO and WARNING lines, "warning" at WARNING lines, as a suspect only
    rank      optional number that orders causes of one log, higher first (defaults in RANKS)
    certain   optional true: the engine ends with this line, so that a live wait may be given up at once
    hang      optional, for role alive: "last" is a hang where a finished log ends with the line, "served" where it goes
              on for minutes after the KV cache was sized, "served" and "waited" also where nothing else comes for
              minutes before the weights are read
    remedy    what to change (cause and effect)
    source    where the text was seen
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

ROLES = ("cause", "effect", "wrapper", "benign", "alive", "stop")
CLASSES = ("config", "model", "host", "transient")
LEVELS = ("any", "warning")
_SHORTEST = 2
# Patterns see this much of a message: a line may be some kB long, and a pattern must stay fast on any text.
_SEARCHED = 4096
HANGS = ("last", "served", "waited")
# An exception without a signature ranks at 80, what only quotes source code lower: see diagnosis.py.
RANKS = {"cause": 100, "effect": 60, "wrapper": 40, "benign": 0, "alive": 0, "stop": 0}
_KEYS = {
    "id",
    "role",
    "class",
    "phase",
    "contains",
    "pattern",
    "without",
    "level",
    "rank",
    "remedy",
    "source",
    "certain",
    "hang",
}


class Signature(NamedTuple):
    """One checked signature; `cls` is its class."""

    id: str
    role: str
    cls: str | None
    phase: str | None
    contains: tuple[str, ...]
    pattern: re.Pattern[str] | None
    without: re.Pattern[str] | None
    level: str | None
    rank: int
    remedy: str
    certain: bool
    hang: str | None


class Signatures(NamedTuple):
    """Signatures arranged for look-up: (string, signature) pairs for lines of ERROR or no level, of WARNING, of
    INFO."""

    all: tuple[Signature, ...]
    errors: tuple[tuple[str, Signature], ...]
    warnings: tuple[tuple[str, Signature], ...]
    infos: tuple[tuple[str, Signature], ...]


def load_signatures(obj: Any) -> Signatures:
    """Check the parsed signature file (a list, or a mapping with the list under "signatures").

    ValueError names the entry, the key, what was found and what was expected.
    """
    entries = obj.get("signatures") if isinstance(obj, Mapping) else obj
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"signatures: found {type(entries).__name__}, expected a list of mappings under the key 'signatures'; "
            "restore roles/vllm_service/files/signatures.yml"
        )
    found = [_signature(number, entry) for number, entry in enumerate(entries, 1)]
    ids = [signature.id for signature in found]
    for name in ids:
        if ids.count(name) > 1:
            raise ValueError(f"signatures: id {name!r} found {ids.count(name)} times, expected once")
    pairs = tuple((text, signature) for signature in found for text in signature.contains)
    warnings = tuple(pair for pair in pairs if pair[1].level or pair[1].role in {"benign", "alive", "stop"})
    infos = tuple(pair for pair in pairs if pair[1].level == "any" or pair[1].role in {"alive", "stop"})
    return Signatures(tuple(found), pairs, warnings, infos)


def _signature(number: int, entry: Any) -> Signature:
    where = f"signatures: entry {number}"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: found {type(entry).__name__}, expected a mapping")
    where += f" ({entry.get('id', 'without id')})"
    unknown = sorted(set(map(str, entry)) - _KEYS)
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}, expected some of {', '.join(sorted(_KEYS))}")
    role = entry.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}: role: found {role!r}, expected one of {', '.join(ROLES)}")
    contains = entry.get("contains")
    strings = (contains,) if isinstance(contains, str) else tuple(contains or ())
    if not strings or not all(isinstance(text, str) and len(text) >= _SHORTEST for text in strings):
        raise ValueError(
            f"{where}: contains: found {contains!r}, expected one or more strings of {_SHORTEST} characters and more"
        )
    for key in ("id", "source", *(("remedy",) if role in {"cause", "effect"} else ())):
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            raise ValueError(f"{where}: {key}: found {entry.get(key)!r}, expected some text")
    cls = entry.get("class")
    if (role in {"cause", "effect"} or cls is not None) and cls not in CLASSES:
        raise ValueError(f"{where}: class: found {cls!r}, expected one of {', '.join(CLASSES)}")
    level = entry.get("level")
    if level is not None and level not in LEVELS:
        raise ValueError(f"{where}: level: found {level!r}, expected one of {', '.join(LEVELS)} or none")
    rank = entry.get("rank", RANKS[role])
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise ValueError(f"{where}: rank: found {rank!r}, expected a whole number")
    certain, hang = entry.get("certain", False), entry.get("hang")
    if not isinstance(certain, bool):
        raise ValueError(f"{where}: certain: found {certain!r}, expected true or false")
    if hang is not None and (hang not in HANGS or role != "alive" or cls is None):
        raise ValueError(
            f"{where}: hang: found {hang!r}, expected one of {', '.join(HANGS)}, with role alive and a class"
        )
    return Signature(
        str(entry["id"]),
        str(role),
        cls,
        entry.get("phase"),
        strings,
        _regex(where, "pattern", entry.get("pattern")),
        _regex(where, "without", entry.get("without")),
        level,
        rank,
        " ".join(str(entry.get("remedy", "")).split()),
        certain,
        hang,
    )


def _regex(where: str, key: str, text: Any) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(str(text))
    except re.error as error:
        raise ValueError(f"{where}: {key}: {text!r} is no regular expression: {error}") from error


def find(pairs: tuple[tuple[str, Signature], ...], message: str) -> Signature | None:
    """The signature of the highest rank that fits the message; of equals the first in the file."""
    best: Signature | None = None
    head = message if len(message) <= _SEARCHED else message[:_SEARCHED]
    for text, signature in pairs:
        if text in message and (best is None or signature.rank > best.rank or signature.role in {"benign", "stop"}):
            if signature.pattern and not signature.pattern.search(head):
                continue
            if signature.without and signature.without.search(head):
                continue
            if signature.role in {"benign", "stop"}:
                return signature  # what is known to be harmless is harmless whatever else it quotes
            best = signature
    return best
