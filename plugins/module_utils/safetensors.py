"""What a safetensors file says about itself, checked against what lies on the disk.

A safetensors file is an unsigned 64-bit little-endian length N, a JSON header of N bytes, and the tensors' bytes. The
header names each tensor with dtype, shape and the half-open range of its bytes, counted from the end of the header. The
ranges must cover the rest of the file without gap or overlap, so the header alone shows a truncated or overlong file:
no check in here reads a weight.

Every problem is one line that says what, where, found against expected, and the next command.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Callable, NamedTuple

LENGTH_BYTES = 8
# The format's own limit; a longer header is a damaged length field, and reading it could take all memory.
MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"
# Bits of one element. A dtype that is not listed (the format grows) is taken as the header gives it.
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}

_FETCH_AGAIN = "remove that file, fetch or copy it again, then deploy again"


class Header(NamedTuple):
    """What was read of one file: the names of its tensors, and the problems found (empty: the file is sound)."""

    tensors: tuple[str, ...]
    problems: tuple[str, ...]


class DuplicateKeyError(ValueError):
    """A JSON object names one key twice."""


def problem_line(what: str, where: str, found: str, expected: str, command: str) -> str:
    """One problem as the one line that the operator reads."""
    return f"{what}: {where}: found {found}, expected {expected}; next: {command}"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise DuplicateKeyError(f"the key {key!r} twice")
        seen[key] = value
    return seen


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_range(value: object) -> bool:
    return isinstance(value, list) and [type(end) for end in value] == [int, int] and 0 <= value[0] <= value[1]


def _entry_fault(entry: object) -> str | None:
    """Why a tensor's entry is unusable, or None. Only a usable entry has offsets worth comparing."""
    if not isinstance(entry, dict):
        return f"{type(entry).__name__} for an entry"
    missing = sorted({"dtype", "shape", "data_offsets"} - set(entry))
    if missing:
        return f"no {', '.join(missing)}"
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str):
        return f"dtype {entry['dtype']!r}"
    if not (isinstance(shape, list) and all(_is_count(size) for size in shape)):
        return f"shape {shape!r}"
    if not _is_range(offsets):
        return f"data_offsets {offsets!r}"
    return None


def _extent(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that a usable entry occupies, and bytes that its dtype and shape ask for (the former if unknown)."""
    begin, end = entry["data_offsets"]
    bits = DTYPE_BITS.get(entry["dtype"])
    if bits is None:
        return end - begin, end - begin
    return end - begin, -(-bits * math.prod(entry["shape"]) // 8)


def length_problem(where: str, prefix: bytes, file_size: int) -> str | None:
    """The problem with the length field `prefix` (the file's first 8 bytes, or fewer), or None."""
    what = "safetensors header"
    if len(prefix) < LENGTH_BYTES:
        return problem_line(
            what, where, f"a file of {file_size} bytes", f"at least {LENGTH_BYTES} (the header's length)", _FETCH_AGAIN
        )
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        return problem_line(
            what, where, f"a header length of {length} bytes", f"at most {MAX_HEADER_BYTES}", _FETCH_AGAIN
        )
    if LENGTH_BYTES + length > file_size:
        return problem_line(
            what, where, f"a file of {file_size} bytes", f"more than {LENGTH_BYTES + length} (its header)", _FETCH_AGAIN
        )
    return None


def parse_header(where: str, header: bytes, file_size: int) -> Header:
    """Check the JSON `header` (without the length field) of the file `where` of `file_size` bytes."""
    what = "safetensors header"
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except DuplicateKeyError as error:
        return Header((), (problem_line(what, where, str(error), "each tensor once", _FETCH_AGAIN),))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        found = f"no JSON ({error.__class__.__name__}: {error})"
        return Header((), (problem_line(what, where, found, "a JSON object", _FETCH_AGAIN),))
    if not isinstance(entries, dict):
        return Header(
            (), (problem_line(what, where, f"a JSON {type(entries).__name__}", "a JSON object", _FETCH_AGAIN),)
        )
    entries.pop(METADATA_KEY, None)
    problems: list[str] = []
    ranges: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        fault = _entry_fault(entry)
        if fault is not None:
            expected = "dtype, shape and data_offsets [begin, end]"
            problems.append(problem_line("safetensors tensor", f"{where} {name}", fault, expected, _FETCH_AGAIN))
            continue
        begin, end = entry["data_offsets"]
        ranges.append((begin, end, name))
        occupied, asked = _extent(entry)
        if occupied != asked:
            expected = f"{asked} for {entry['dtype']} {entry['shape']}"
            where_tensor = f"{where} {name}"
            problems.append(
                problem_line("safetensors tensor", where_tensor, f"{occupied} bytes", expected, _FETCH_AGAIN)
            )
    if not problems:
        problems = _range_problems(where, ranges, file_size - LENGTH_BYTES - len(header))
    return Header(tuple(entries), tuple(problems))


def _range_problems(where: str, ranges: list[tuple[int, int, str]], data_bytes: int) -> list[str]:
    """Problems of the tensors' byte `ranges` (begin, end, name) in a file with `data_bytes` bytes after its header."""
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            fault = "an overlap" if begin < position else "a gap"
            return [
                problem_line(
                    "safetensors offsets",
                    f"{where} {name}",
                    f"{fault}: begin {begin}",
                    f"{position}, where the tensor before it ends",
                    _FETCH_AGAIN,
                )
            ]
        position = end
    if position == data_bytes:
        return []
    difference = position - data_bytes
    amount = f"{abs(difference)} bytes too {'short' if difference > 0 else 'long'}"
    return [
        problem_line(
            "safetensors size",
            where,
            f"{data_bytes} bytes of tensors ({amount})",
            f"{position}, where its last tensor ends",
            _FETCH_AGAIN,
        )
    ]


def read_header(path: str, where: str | None = None) -> Header:
    """Read and check the header of the file at `path` (the header only: fast for any size).

    Messages name the file as `where` (default: its path). An unreadable file is a problem, not an exception.
    """
    where = path if where is None else where
    try:
        with Path(path).open("rb") as stream:
            file_size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(LENGTH_BYTES)
            problem = length_problem(where, prefix, file_size)
            if problem is not None:
                return Header((), (problem,))
            header = stream.read(int.from_bytes(prefix, "little"))
    except OSError as error:
        found = error.strerror or str(error)
        return Header((), (problem_line("safetensors file", where, found, "a readable file", f"ls -lL {path}"),))
    return parse_header(where, header, file_size)


def index_problems(
    where: str, index: object, tensors_of: Mapping[str, Collection[str]], exists: Callable[[str], bool]
) -> list[str]:
    """Problems of a parsed model.safetensors.index.json.

    `tensors_of` maps each sound safetensors file, named as in the index, to its tensors; `exists` tells of any name in
    the index whether the file is there. A file that is there and not in `tensors_of` has been reported already.
    """
    what = "safetensors index"
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        found = "no weight_map of tensor to file"
        return [problem_line(what, where, found, '{"weight_map": {TENSOR: FILE}}', _FETCH_AGAIN)]
    wanted: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        wanted.setdefault(name, []).append(tensor)
    problems = []
    for name, tensors in sorted(wanted.items()):
        if name not in tensors_of:
            if not exists(name):
                expected = f"{name}, which holds {len(tensors)} tensors"
                problems.append(problem_line(what, where, "no such file", expected, f"fetch or copy {name} again"))
            continue
        lacking = sorted(set(tensors) - set(tensors_of[name]))
        if lacking:
            found = f"{len(lacking)} tensors not in {name} (first: {lacking[0]})"
            command = f"fetch or copy {name} and the index again, from one revision"
            problems.append(problem_line(what, where, found, "each tensor in the file it names", command))
    return problems
