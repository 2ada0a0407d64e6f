"""Headers, offsets and indexes of safetensors files: each damage gives one line that names it."""

import json
import struct
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import safetensors
from hypothesis import given
from hypothesis import strategies as st

SOUND = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
    "c": {"dtype": "U8", "shape": [0], "data_offsets": [16, 16]},
}
SOUND_BYTES = 16


def file_bytes(header: object, data: int = SOUND_BYTES) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def entry(**change: object) -> dict:
    return {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12], **change}}


def read(tmp_path: Path, content: bytes) -> safetensors.Header:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return safetensors.read_header(str(path))


def test_a_sound_file_has_its_tensors_and_no_problem(tmp_path):
    assert read(tmp_path, file_bytes(SOUND)) == safetensors.Header(("a", "b", "c"), ())


@pytest.mark.parametrize(
    ("content", "found", "expected"),
    [
        (b"", "a file of 0 bytes", "at least 8"),
        (b"\x10\0\0", "a file of 3 bytes", "at least 8"),
        (file_bytes(SOUND)[:100], "a file of 100 bytes", "more than"),
        (struct.pack("<Q", 2**63) + bytes(100), f"a header length of {2**63} bytes", "at most 100000000"),
        (struct.pack("<Q", 500) + b"{}", "a file of 10 bytes", "more than 508"),
        (file_bytes(SOUND)[:-1], "15 bytes of tensors (1 bytes too short)", "16, where its last tensor ends"),
        (file_bytes(SOUND) + b"\0", "17 bytes of tensors (1 bytes too long)", "16, where its last tensor ends"),
        (file_bytes(b"{not json"), "no JSON", "a JSON object"),
        (file_bytes(b"\xff\xfe{}"), "no JSON (UnicodeDecodeError", "a JSON object"),
        (file_bytes(b"[" * 200_000), "no JSON (RecursionError", "a JSON object"),
        (file_bytes([1]), "a JSON list", "a JSON object"),
        (file_bytes(b'{"a": 1, "a": 1}'), "the key 'a' twice", "each tensor once"),
        (file_bytes({"a": 7}), "int for an entry", "dtype, shape and data_offsets"),
        (file_bytes({"a": {"dtype": "F32"}}), "no data_offsets, shape", "dtype, shape and data_offsets"),
        (file_bytes(entry(dtype=4)), "dtype 4", "dtype, shape and data_offsets"),
        (file_bytes(entry(shape=[2, -3])), "shape [2, -3]", "dtype, shape and data_offsets"),
        (file_bytes(entry(shape=[True])), "shape [True]", "dtype, shape and data_offsets"),
        (file_bytes(entry(data_offsets=[12])), "data_offsets [12]", "[begin, end]"),
        (file_bytes(entry(data_offsets=[12, 0])), "data_offsets [12, 0]", "[begin, end]"),
        (file_bytes(entry(data_offsets=[-1, 11])), "data_offsets [-1, 11]", "[begin, end]"),
        (file_bytes(entry(shape=[2, 4]), 12), "12 bytes", "16 for BF16 [2, 4]"),
        (file_bytes(entry(shape=[10**400]), 12), "12 bytes", "for BF16"),
        (
            file_bytes({**entry(), "b": {"dtype": "U8", "shape": [4], "data_offsets": [10, 14]}}, 14),
            "an overlap: begin 10",
            "12, where the tensor before it ends",
        ),
        (
            file_bytes({**entry(), "b": {"dtype": "U8", "shape": [4], "data_offsets": [13, 17]}}, 17),
            "a gap: begin 13",
            "12, where the tensor before it ends",
        ),
    ],
)
def test_each_damage_is_one_line(tmp_path, content, found, expected):
    problems = read(tmp_path, content).problems
    assert len(problems) == 1
    line = problems[0]
    assert "\n" not in line
    assert str(tmp_path) in line
    assert "next: " in line
    said, wanted = line.split(", expected ", 1)
    assert found in said
    assert expected in wanted


def test_an_unreadable_file_is_a_problem_not_an_exception(tmp_path):
    path = tmp_path / "none.safetensors"
    assert f"{path}: found No such file or directory" in safetensors.read_header(str(path)).problems[0]


def test_four_bit_tensors_count_half_a_byte_each(tmp_path):
    header = {"a": {"dtype": "F4", "shape": [3, 2], "data_offsets": [0, 3]}}
    assert read(tmp_path, file_bytes(header, 3)).problems == ()


def test_a_dtype_of_a_later_format_is_taken_as_it_says(tmp_path):
    header = {"a": {"dtype": "F3_NEW", "shape": [5], "data_offsets": [0, 7]}}
    assert read(tmp_path, file_bytes(header, 7)).problems == ()


@given(st.binary(max_size=400), st.integers(0, 10_000))
def test_no_header_makes_it_raise(header, size):
    result = safetensors.parse_header("f", header, size)
    assert result.problems or 8 + len(header) <= size


@given(st.integers(0, len(file_bytes(SOUND)) - 1))
def test_every_truncation_is_found(length):
    content = file_bytes(SOUND)[:length]
    problem = safetensors.length_problem("f", content[:8], length)
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    assert problem or safetensors.parse_header("f", header, length).problems


@pytest.mark.parametrize(
    ("index", "found", "expected"),
    [
        (
            {"weight_map": {"a": "1.safetensors", "z": "9.safetensors"}},
            "no such file",
            "9.safetensors, which holds 1 t",
        ),
        (
            {"weight_map": {"b": "1.safetensors"}},
            "1 tensors not in 1.safetensors (first: b)",
            "each tensor in the file",
        ),
        ({"weight_map": ["a"]}, "no weight_map", "weight_map"),
        ({"weight_map": {"a": 1}}, "no weight_map", "weight_map"),
        ([], "no weight_map", "weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files(index, found, expected):
    tensors = {"1.safetensors": ("a",)}
    problems = safetensors.index_problems("i.json", index, tensors, lambda name: name in tensors)
    assert len(problems) == 1
    said, wanted = problems[0].split(", expected ", 1)
    assert found in said
    assert expected in wanted


def test_a_fitting_index_and_a_damaged_file_reported_elsewhere_give_no_line():
    index = {"weight_map": {"a": "1.safetensors", "b": "damaged.safetensors"}}
    assert safetensors.index_problems("i", index, {"1.safetensors": ("a",)}, lambda _name: True) == []
