#!/usr/bin/env python3
"""Say what a vLLM log (or an nvidia-smi output) shows: the first true cause of a failed start, or that nothing failed.

    python scripts/diagnose.py FILE          a log, an nvidia-smi output (csv, table, topo), or a case file with one
    journalctl -u UNIT | python scripts/diagnose.py -
    python scripts/diagnose.py --unit UNIT   the journal of the unit's latest start

Exit codes by verdict:

    0  benign   nothing failed (for nvidia-smi: an engine may be started; warnings are printed)
    1  fatal    the start failed (or: do not start on these GPUs); the cause is printed
    2           the input could not be read, or the call was wrong
    3  alive    a load that goes on, slowly or not
    4  unknown  too little to tell
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.swapgate.core.plugins.module_utils import (  # noqa: E402
    diagnosis,
    log_text,
    nvidia_smi,
    signatures,
    topology,
    unit_text,
)

SIGNATURES = ROOT / "roles" / "vllm_service" / "files" / "signatures.yml"
EXIT = {"benign": 0, "fatal": 1, "alive": 3, "unknown": 4}
# An nvidia-smi output or a case file is small; anything longer is a log and is never held in memory.
SMALL = 256 * 1024
_MOST_ROWS = 400  # more GPUs and processes than any host has
_SMI_WORDS = {
    "driver mismatch",
    "no devices",
    "driver not loaded",
    "gpu not answering",
    "nvml failed",
    "nvidia-smi missing",
    "driver library missing",
    "field not known",
    "no processes",
    "requires reset",
    "lost",
    "library version",
}
_SYSTEMCTL, _JOURNALCTL = "systemctl", "journalctl"  # wherever the distribution has them
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_VERDICTS = {"accept": "benign", "accept-with-warning": "benign", "reject": "fatal"}


class InputError(Exception):
    """The input cannot be read; the text says what, where and what to do."""


def load_signatures(path: Path = SIGNATURES) -> signatures.Signatures:
    """The checked signatures of a YAML or JSON file."""
    try:
        with path.open("rb") as stream:
            return signatures.load_signatures(yaml.load(stream, Loader=_LOADER))
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise InputError(f"{path}: cannot use the signatures: {error}") from error


def case_of(text: str) -> dict[str, Any] | None:
    """The mapping of a case file (keys `log` or `input`), or None where the text is none."""
    if not re.search(r"^(?:log|input):", text, re.MULTILINE) and not text.lstrip().startswith("{"):
        return None
    try:
        case = yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError):  # ValueError: a date that is none
        return None
    if not isinstance(case, dict) or not ("log" in case or "input" in case):
        return None
    return case


def _is_csv(text: str, lines: list[str]) -> bool:
    """Whether nearly all lines are rows or words of nvidia-smi, and none is a line of a log."""
    if any(
        log_text.parse(line).level or log_text.parse(line).tag or "Error: " in line or "NVRM: " in line
        for line in lines
    ):
        return False
    if nvidia_smi.is_header(lines[0]) or re.match(r"\d+, GPU-[0-9a-f]{8}-", lines[0]):
        return True
    report = nvidia_smi.parse_csv(text)
    rows = len(report["gpus"]) + len(report["processes"])
    notices = [notice for notice in report["notices"] if notice["state"] in _SMI_WORDS]
    odd = len(report["notices"]) - len(notices)
    shaped = re.search(r"\d MiB|\d %|\[(?:N/A|Not Supported|GPU|Unknown)|^GPU-|^[\d.,\s]+$", text, re.MULTILINE)
    return bool((rows and shaped) or notices) and odd * 2 <= rows + len(report["notices"])


def _unprefixed(text: str) -> str:
    """The text without the name of a container that compose put before each of its lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    named = re.match(r"([\w.-]+) +\| ?", lines[0]) if lines else None
    if named is None or not all(re.match(re.escape(named[1]) + r" +\|", line) for line in lines):
        return text
    return re.sub(r"^" + re.escape(named[1]) + r" +\| ?", "", text, flags=re.MULTILINE)


def kind_of(text: str) -> str:
    """What a small text is: "topology", "nvidia-smi", "unit" or "log"."""
    plain = _unprefixed(log_text.unquote(log_text.strip_ansi(text)))
    lines = [line for line in plain.splitlines() if line.strip()]
    if topology.is_matrix(plain):
        return "topology"
    if re.search(r"^\[(?:Service|Unit)\]\s*$", plain, re.MULTILINE) and re.search(r"^Exec\w+ *=", plain, re.MULTILINE):
        return "unit"
    if re.fullmatch(r"\s*\[(?:Unknown Error|N/A|Not Supported|GPU [\w ]+)\]\s*", plain):
        return "nvidia-smi"  # the answer to a query of one field
    if nvidia_smi.is_long(plain) or re.search(
        r"^GPU \d+: .*\(UUID: GPU-|^\+-{20,}"
        r"|^.*ERR!.*\d+MiB / +\d+MiB|^\| NVIDIA-SMI |^\|.*[0-9A-F]{8}:[0-9A-F]{2}:|^\| *MIG devices",
        plain,
        re.MULTILINE,
    ):
        return "nvidia-smi"
    if lines and len(lines) <= _MOST_ROWS and _is_csv(plain, lines):
        return "nvidia-smi"
    return "log"


def diagnose_text(text: str, kind: str, known: signatures.Signatures, ended: bool) -> dict[str, Any]:
    """Diagnose a small text of a known kind."""
    if kind == "topology":
        found = topology.parse(_unprefixed(text))
        judged = topology.judge(found)
        return _judged(
            kind,
            {**judged, "reasons": judged["warnings"], "class": None},
            {"topology": found, "notes": topology.nic_lines(found)},
        )
    if kind == "nvidia-smi":
        text = _unprefixed(text)
        report = nvidia_smi.parse(text)
        judged = nvidia_smi.judge(report)
        more = {"gpus": judged["gpus"], "gpu_values": report["gpus"], "processes": report["processes"]}
        result = _judged(kind, judged, {"state": judged["state"], **more})
        result["root_cause"] = _line_of(text, judged["reasons"]) if judged["class"] else None
        return result
    if kind == "unit":
        judged = unit_text.lint(text)
        judged["reasons"] = judged["errors"] + judged["warnings"]
        judged["class"] = "config" if judged["errors"] else None
        judged["remedy"] = "correct the lines named, then systemd-analyze verify"
        return _judged(kind, judged, {})
    return {"kind": "log", **diagnosis.diagnose(text, known, ended)}


def _judged(kind: str, judged: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A judgement (verdict, reasons, class, remedy) in the shape of a diagnosis."""
    cls, reasons = judged["class"], judged["reasons"]
    return {
        "kind": kind,
        "verdict": _VERDICTS.get(judged["verdict"], "unknown"),
        "judgement": judged["verdict"],
        "phase": None,
        "root_cause": reasons[0] if reasons and cls else None,
        "signature": f"{kind}: {more['state']}" if cls and more.get("state") else None,
        "class": cls,
        "remedy": judged["remedy"],
        "reasons": reasons,
        **more,
    }


def _line_of(text: str, reasons: list[str]) -> str | None:
    """The line of the output that a judgement rests on: a notice, or the row of the first GPU that was refused."""
    lines = [line for line in log_text.split_lines(log_text.strip_ansi(text)) if line.strip()]
    for reason in reasons:
        gpu = re.match(r"GPU (\d+): ", reason)
        for line in lines:
            row = re.match(r"[|\s]*(\d+)\b", line)
            if line.strip() == reason or (gpu and row and row[1] == gpu[1]):
                return line
    return reasons[0] if reasons else None


def diagnose_case(case: dict[str, Any], known: signatures.Signatures, ended: bool = True) -> dict[str, Any]:
    """Diagnose the log or input that a case file holds."""
    log = case.get("log")
    if isinstance(log, list):
        return {
            "kind": "log",
            **diagnosis.diagnose((piece for line in log for piece in str(line).split("\n")), known, ended),
        }
    if isinstance(log, str):
        return {"kind": "log", **diagnosis.diagnose(log, known, ended)}
    text = str(case.get("input"))
    named = str(case.get("input_type", ""))
    if named.startswith(("speculative", "vllm arg")):
        return {
            "kind": "engine config",
            "verdict": "unknown",
            "phase": "arguments",
            "root_cause": None,
            "signature": None,
            "class": None,
            "remedy": "an engine must read this: python scripts/cases.py --engine VENV (its import alone takes 30 s)",
            "reasons": [],
        }
    kind = next(
        (
            kind
            for word, kind in (
                ("topo", "topology"),
                ("nvidia-smi", "nvidia-smi"),
                ("GPU state", "nvidia-smi"),
                ("unit", "unit"),
            )
            if word in named
        ),
        None,
    )
    return diagnose_text(text, kind or kind_of(text), known, ended)


def journal_of(unit: str) -> Iterator[str]:
    """Journal lines of the unit's latest start, by its InvocationID: older starts and other units stay out."""
    try:
        shown = subprocess.run(
            [_SYSTEMCTL, "show", "-p", "InvocationID", "--value", unit],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(
            f"unit {unit}: cannot ask systemd for its InvocationID: {error}; give a log file instead"
        ) from error
    invocation = shown.stdout.strip()
    if not re.fullmatch(r"[0-9a-f]{32}", invocation):
        raise InputError(
            f"unit {unit}: InvocationID found {invocation!r}, expected 32 hex digits: it was not started since boot; "
            f"look at systemctl status {unit}"
        )
    command = [
        _JOURNALCTL,
        "--no-pager",
        "-o",
        "json",
        "--output-fields=MESSAGE,SYSLOG_IDENTIFIER,_PID",
        f"_SYSTEMD_INVOCATION_ID={invocation}",
        "+",
        f"INVOCATION_ID={invocation}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        if process.stdout is not None:
            yield from log_text.journal_lines(process.stdout)


def lines_of(first: str, stream: TextIO) -> Iterator[str]:
    """Lines of a stream whose beginning was already read."""
    rest = first + stream.readline()
    yield from rest.splitlines()
    for line in stream:
        yield line.rstrip("\n")


def read(path: str, known: signatures.Signatures, ended: bool) -> dict[str, Any]:
    """Diagnose a file, or standard input for "-". Long input is streamed."""
    try:
        if path == "-":
            sys.stdin.reconfigure(errors="replace", encoding="utf-8")  # type: ignore[union-attr]
            return _read_stream(sys.stdin, known, ended)
        with Path(path).open(encoding="utf-8", errors="replace") as stream:
            return _read_stream(stream, known, ended)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror or error}; expected a log, or - for standard input"
        ) from error


def _read_stream(stream: TextIO, known: signatures.Signatures, ended: bool) -> dict[str, Any]:
    first = stream.read(SMALL)
    if len(first) < SMALL:
        case = case_of(first)
        if case is not None:
            return diagnose_case(case, known, ended)
        kind = kind_of(first)
        if kind != "log":
            return diagnose_text(first, kind, known, ended)
    return {"kind": "log", **diagnosis.diagnose(log_text.journal_lines(lines_of(first, stream)), known, ended)}


def report(result: dict[str, Any]) -> str:
    """The result for a reader."""
    head = ", ".join(str(part) for part in (result["class"], result["phase"] and f"phase {result['phase']}") if part)
    out = [f"verdict: {result.get('judgement') or result['verdict']}" + (f" ({head})" if head else "")]
    if result["root_cause"] is not None:
        by = f" printed by {result['printed_by']}" if result.get("printed_by") else ""
        out.append(f"cause:   {result['root_cause'].strip()}")
        if result.get("line"):
            named = f"signature {result['signature']}" if result.get("recognised") else "no signature knows it"
            out.append(f"         line {result['line']}{by}; {named}")
    out += [f"because: {reason}" for reason in result.get("reasons", [])]
    out += [f"also:    {note}" for note in result.get("notes", [])]
    out.append(f"do:      {result['remedy']}")
    if result.get("context"):
        out.append("around it:")
        out += [("  > " if line == result["root_cause"] else "    ") + line for line in result["context"]]
    return "\n".join(out)


def main(arguments: Iterable[str] | None = None) -> int:
    """Command line; returns the exit code that the module's text lists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="file to read, or - for standard input")
    parser.add_argument("--unit", help="read the journal of this unit's latest start")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--running", action="store_true", help="the log is still being written: its end is no hang")
    parser.add_argument("--signatures", type=Path, default=SIGNATURES, help="other signature file (YAML or JSON)")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    if (options.file is None) == (options.unit is None):
        parser.error("give a file (or -), or --unit UNIT")
    try:
        known = load_signatures(options.signatures)
        if options.unit:
            result = {"kind": "log", **diagnosis.diagnose(journal_of(options.unit), known, not options.running)}
        else:
            result = read(options.file, known, not options.running)
    except InputError as error:
        print(f"diagnose: {error}", file=sys.stderr)
        return 2
    try:
        print(json.dumps(result, ensure_ascii=False) if options.json else report(result), flush=True)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT[result["verdict"]]


if __name__ == "__main__":
    raise SystemExit(main())
