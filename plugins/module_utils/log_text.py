"""Log lines as an engine host prints them: escape codes off, carriage returns apart, prefixes told from the message.

One line can carry, from the outside in: a syslog or ISO time with host and program (journald), a container name, one
or more process tags such as ``(Worker_TP0 pid=97)`` or ``[rank0]:``, and a logger's level, time and place. Every
reader of a log in this package works on the `Line` that is left, so a new prefix is taught here once.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_BYTE = range(256)

# Where a line comes from, deepest first: a worker knows why it died, systemd only knows that something did.
KERNEL, WORKER, NATIVE, CORE, API, SYSTEMD = 6, 5, 4, 3, 2, 1

_CSI = r"\[[0-9;?]*[ -/]*[@-~]"
ANSI = re.compile(r"\x1b(?:" + _CSI + r"|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[()][A-Za-z0-9]|[=>])?")
# The same codes after a pager, rsyslog or a JSON encoder made them visible.
_WRITTEN_ANSI = re.compile(r"(?:\^\[|#033|\\x1b|\\u001b|\\033|\\e)" + _CSI)
# Colours whose escape byte was lost, as a log has them that was copied from a browser: around a tag only.
_EATEN_ANSI = re.compile(r"(?<![\w\]])\[[01];\d\dm(?=\()|(?<=\))\[0;0m")
# A collector's severity: it tells the stream, not what the program meant.
_COLLECTED = re.compile(
    r"(?P<level>DEFAULT|DEBUG|INFO|NOTICE|WARNING|ERROR|CRITICAL) "
    r"(?=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d) )"
)
_SEVERITY_HEADS = frozenset("DINWEC")
_NCCL_INFO = re.compile(r".{0,160}?\bNCCL (?:INFO|TRACE) ")

_JOURNAL = re.compile(
    r"(?:- )?(?:[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)?"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?) +"
    r"(?:(?:[\w.-]+ +)?(?P<ident>\([^()\s]+\)|[\w.@/:-]+?)\[(?P<pid>\d+)\]: ?"
    r"|[\w.-]+ +(?P<kernel>kernel): ?|(?:stdout|stderr) [FP](?: |$)|)"
)
_IDENT = re.compile(r"(?:[\w.-]+ )?(?P<ident>systemd(?:-\w+)?|kernel)(?:\[\d+\])?: ")
_DMESG = re.compile(r"\[(?: *\d+\.\d+|[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d \d{4})\] ")
_CONTAINER = re.compile(r"(?:\[[\w./-]+\]: |\[pod/[\w./-]+\] |[\w.-]+ +\| )")
_TAG = re.compile(
    r"\((?P<name>[A-Za-z_][\w.:-]*)(?:,? [^()]*?)?(?: |, )?pid=(?P<pid>\d+)[^()]*\) ?|(?:\[|^)(?P<rank>rank\d+)\]: ?"
)
_LEVEL = re.compile(
    r"(?:\[(?P<klevel>[IWEF])(?:\d{3,4} [\d:.]+)? ?(?P<cfile>[\w./-]+\.(?:cpp|cc|hpp|h|cu)):\d+\] ?"
    r"|(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL):? +"
    r"(?:(?:\d{4}-)?(?P<time>\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)? )?(?:(?P<place>\[?[\w./-]+\.py:\d+\]) ?)?"
    r"|(?P<place2>\[[\w./-]+\.py:\d+\]) "
    r"|(?:(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? )?"
    r"(?:- |\| )(?P<level2>DEBUG|INFO|WARNING|ERROR|CRITICAL)\b *(?:- |\| )?)"
)
_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL"}
_KLEVEL = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_WARNING_CLASS = re.compile(r"(?:^ *|: )\w*Warning: ")
# What is left of a prefix whose beginning was cut off.
_CUT_PREFIX = re.compile(
    r"[^\n]{0,240}?\b(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d)[.,\d]* "
    r"(?P<place>\[?[\w./-]+\.py:\d+\]) ?)"
)
# The engine's own prefix behind that of a program which passes its output on; its level is what the engine meant.
_INNER = re.compile(
    r"(?:[\w.-]+: )?(?:\((?P<name>[A-Za-z_][\w.:-]*) pid=(?P<pid>\d+)\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"(?P<time>\d\d-\d\d \d\d:\d\d:\d\d)[.,\d]* (?P<place>\[?[\w./-]+\.py:\d+\]) ?"
)
_CUT_TAG = re.compile(r"[\w.: ]*\bpid=\d+\) ?")

_WORKER_FILES = (
    "multiproc_executor",
    "multiproc_worker_utils",
    "worker",
    "ProcessGroupNCCL",
    "ray_utils",
    "ray_executor",
)
_CORE_FILES = ("core", "engine", "async_llm_engine", "llm_engine", "mp_engine")
_API_FILES = ("api_server", "launcher", "async_llm", "core_client", "serve", "entry", "client")


class Line(NamedTuple):
    """One line: `shown` as it stands without escape codes, `message` without any prefix; `tier` says how deep it
    comes from."""

    shown: str
    message: str
    level: str  # DEBUG, INFO, WARNING, ERROR, CRITICAL or "" where the line has none
    place: str  # "core.py:935", or "" ; the folder is cut off, since releases differ in it
    tag: str  # "Worker_TP0", "rank0", "systemd", "kernel", or ""
    pid: str
    tier: int
    time: str  # "MM-DD HH:MM:SS" as the engine prints it, or ""


def unquote(text: str) -> str:
    """The text without a byte order mark and without the marks of a quotation (``> ``) before its lines."""
    return re.sub(r"^(?:[ \t]*>)+ ?", "", text.lstrip("\ufeff"), flags=re.MULTILINE)


def strip_ansi(text: str) -> str:
    """The text without terminal escape codes."""
    return ANSI.sub("", text) if "\x1b" in text else text


def split_lines(text: str) -> list[str]:
    """Lines of a text; each state of a carriage-return progress bar is a line of its own, empty ones are dropped."""
    if "\r" not in text:
        return text.split("\n")
    return [
        piece
        for line in text.split("\n")
        for piece in (line.rstrip("\r").split("\r") if "\r" in line else (line,))
        if piece
    ]


# The first that fits a lower-case tag decides.
_TAG_TIERS: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"kernel$"), KERNEL),
    (re.compile(r"systemd|\(.*\)$"), SYSTEMD),
    (re.compile(r".*worker|rank"), WORKER),
    (re.compile(r".*enginecore|engine|dpcoordinator"), CORE),
    (re.compile(r"api_?server|frontend"), API),
)


@functools.lru_cache(maxsize=1024)  # a log has few tags and places, each many times
def _tier(tag: str, place: str) -> int:
    if tag:
        name = tag.lower()
        for pattern, tier in _TAG_TIERS:
            if pattern.match(name):
                return tier
    stem = place.partition(".")[0]
    if not stem:
        return NATIVE
    if stem in _API_FILES:
        return API
    if stem in _CORE_FILES:
        return CORE
    return WORKER if any(part in stem for part in _WORKER_FILES) else NATIVE


def _outer(text: str) -> tuple[int, str, str]:
    """Where the journal's, kernel's and container's prefixes end, and the tag and pid that they give."""
    pos = 0
    tag = pid = ""
    head = text[:1]
    if head == "[":
        kernel = _DMESG.match(text)
        match = kernel or _CONTAINER.match(text)
        inner = _JOURNAL.match(text, match.end()) if match and not kernel else None
        return (inner or match).end() if match else 0, "kernel" if kernel else "", ""
    if not (head.isalnum() or head == "-"):
        return 0, "", ""
    while True:  # a container's log inside a journal has two
        match = _JOURNAL.match(text, pos)
        if not match:
            break
        pos = match.end()
        ident = match["ident"] or ""
        pid = match["pid"] or pid
        if match["kernel"]:
            tag = "kernel"
        elif ident.startswith(("systemd", "(", "kernel")):
            tag = ident
    if pos:
        return pos, tag, pid
    match = _IDENT.match(text)
    if match:
        return match.end(), match["ident"], ""
    match = _CONTAINER.match(text)
    if match:
        inner = _JOURNAL.match(text, match.end())
        return (inner or match).end(), "", ""
    return 0, "", ""


def _logger(text: str, pos: int, tag: str) -> tuple[str, str, str, int]:
    """Level, place and time that a logger put before the message, and where the message begins."""
    match = _LEVEL.match(text, pos)
    if match:
        klevel, cfile, level, time, place, other_place, other_level = match.groups()
        level = level or other_level or _KLEVEL.get(klevel or "", "")
        place = (place or other_place or cfile or "").strip("[]").rpartition("/")[2]
        return _LEVELS.get(level, level), place, time or "", match.end()
    if not tag and (".py:" in text[pos : pos + 320] or "pid=" in text[pos : pos + 60]):
        match = _CUT_PREFIX.match(text, pos)
        if match:
            return match["level"], match["place"].strip("[]").rpartition("/")[2], match["time"], match.end()
        match = _CUT_TAG.match(text, pos)
        return "", "", "", match.end() if match else pos
    return "", "", "", pos


def parse(raw: str) -> Line:
    """Take one line apart (no line end in it). Never raises: what is not understood stays in the message."""
    shown = ANSI.sub("", raw) if "\x1b" in raw else raw
    text = shown
    if "[" in text and ("^[" in text or "#033" in text or "\\" in text):
        text = _WRITTEN_ANSI.sub("", text)
    if "[0;0m" in text:
        text = _EATEN_ANSI.sub("", text)
    collected = _COLLECTED.match(text) if text[:1] in _SEVERITY_HEADS else None
    if collected:
        text = text[collected.end() :]
    pos, tag, pid = _outer(text)
    while text[pos : pos + 1] in {"(", "["}:
        match = _TAG.match(text, pos)
        if not match:
            break
        tag = match["name"] or match["rank"]
        pid = match["pid"] or pid
        pos = match.end()
    level, place, time, pos = _logger(text, pos, tag)
    if level and not place and ".py:" in text[pos : pos + 120]:
        match = _INNER.match(text, pos)
        if match:
            level, time, place = match["level"], match["time"], match["place"].strip("[]").rpartition("/")[2]
            tag, pid, pos = match["name"] or tag, match["pid"] or pid, match.end()
    message = text[pos:]
    if not level and ("Warning: " in message or "CUDA initialization: " in message):
        warned = _WARNING_CLASS.search(message) or ("CUDA initialization: " in message and "Error: " not in message)
        level = "WARNING" if warned else ""
    if not level and "NCCL " in message and _NCCL_INFO.match(message):
        level = "INFO"
    if collected and not level and not tag and collected["level"] in {"DEBUG", "INFO", "WARNING"}:
        level = collected["level"]
    return Line(shown, message, level, place, tag, pid, _tier(tag, place), time)


def journal_lines(lines: Iterable[str]) -> Iterator[str]:
    """Messages of ``journalctl -o json`` (one with control bytes comes as a list of byte values) and of docker's
    json-file.

    A line that is not such an object is passed through, so that a mixed or cut export still reads.
    """
    for line in lines:
        text = _journal_message(line) if line.startswith("{") and ('"MESSAGE"' in line or '"log"' in line) else None
        if text is None:
            yield line
        else:
            yield from split_lines(text)


def _journal_message(line: str) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    message = entry.get("MESSAGE")
    if message is None and isinstance(entry.get("log"), str) and "stream" in entry:  # docker's json-file
        return str(entry["log"]).rstrip("\n")
    if isinstance(message, list) and all(isinstance(value, int) and value in _BYTE for value in message):
        message = bytes(message).decode("utf-8", "replace")
    if not isinstance(message, str):
        return None
    ident = entry.get("SYSLOG_IDENTIFIER")
    if isinstance(ident, str) and ident.startswith(("systemd", "(", "kernel")):
        return f"{ident}[{entry.get('_PID', '1')}]: {message}" if ident != "kernel" else f"kernel: {message}"
    return message
