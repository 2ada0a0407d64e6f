"""What an engine release no longer takes, and which releases are refused."""

import re

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import versions

RELEASES = [f"0.{minor}.0" for minor in range(16, 33)]
# Each row: the flag, the first release without it among those that swapgate drives, a word of what takes its place.
REMOVED_FLAGS = [
    ("--speculative-model", "0.16.0", "speculative_config: {method, model}"),
    ("--num-speculative-tokens", "0.16.0", "speculative_config: {num_speculative_tokens}"),
    ("--ngram-prompt-lookup-max", "0.16.0", "speculative_config: {prompt_lookup_max}"),
    ("--ngram-prompt-lookup-min", "0.16.0", "speculative_config: {prompt_lookup_min}"),
    ("--speculative-draft-tensor-parallel-size", "0.16.0", "draft_tensor_parallel_size"),
    ("--speculative-disable-by-batch-size", "0.16.0", "num_speculative_tokens_per_batch_size"),
    ("--use-v2-block-manager", "0.16.0", "nothing"),
    ("--num-scheduler-steps", "0.16.0", "asynchronous scheduling"),
    ("--swap-space", "0.16.0", "kv-transfer-config"),
    ("--max-seq-len-to-capture", "0.16.0", "max-cudagraph-capture-size"),
    ("--guided-decoding-backend", "0.16.0", "structured-outputs-config: {backend}"),
    ("--disable-frontend-multiprocessing", "0.16.0", "nothing"),
    ("--enable-reasoning", "0.16.0", "reasoning_parser"),
    ("--task", "0.16.0", "runner"),
    ("--disable-log-requests", "0.17.0", "no-enable-log-requests"),
]
REMOVED_VARIABLES = [("TRANSFORMERS_CACHE", "0.16.0", "HF_HOME"), ("VLLM_USE_V1", "0.16.0", "V1 is the only engine")]


def test_the_rows_here_are_those_of_the_tables():
    assert {row[0] for row in REMOVED_FLAGS} == {item.name for item in versions.FLAGS}
    assert {row[0] for row in REMOVED_VARIABLES} == {item.name for item in versions.VARIABLES}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("flag", "since", "successor"), REMOVED_FLAGS)
def test_a_removed_flag_is_named_with_its_successor(flag, since, successor, release):
    found = versions.removed_settings(["/bin/vllm", "serve", "/m", flag, "5"], {}, release)
    if int(release.split(".")[1]) < int(since.split(".")[1]):
        assert found == []
    else:
        (line,) = found
        assert line.startswith(f"{flag} is gone since vLLM ")
        assert f"(this host has {release})" in line
        assert successor in line.split("Instead: ", 1)[1]


@pytest.mark.parametrize(("name", "since", "successor"), REMOVED_VARIABLES)
def test_a_removed_variable_is_named_with_its_successor(name, since, successor):
    for release in RELEASES:
        (line,) = versions.removed_settings([], {name: "1"}, release)
        assert line.startswith(f"{name} is gone since vLLM ") and successor in line


@pytest.mark.parametrize(
    ("argv", "count"),
    [
        (["--disable-log-requests"], 1),
        (["--disable_log_requests"], 1),
        (["--swap-space=4"], 1),
        (["--swap_space=4"], 1),
        (["--swap-space", "4", "--task", "embed"], 2),
        (["--swap-space", "4", "--swap-space", "5"], 1),
        (["--swap-spaces", "4"], 0),
        (["--chat-template", "/srv/--task"], 0),
        (["--no-enable-log-requests", "--port", "8000"], 0),
        ([], 0),
    ],
)
def test_spellings_of_a_removed_flag(argv, count):
    assert len(versions.removed_settings(argv, {"HF_HOME": "/x"}, "0.32.0")) == count


def test_flags_come_before_variables_and_each_has_a_line():
    lines = versions.removed_settings(["--task", "--swap-space", "1"], {"TRANSFORMERS_CACHE": "/x"}, "0.32.0")
    assert [line.split()[0] for line in lines] == ["--swap-space", "--task", "TRANSFORMERS_CACHE"]


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.32.0", (0, 32, 0)),
        ("0.32", (0, 32)),
        ("v0.32.0", (0, 32, 0)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("0.32.0rc1", (0, 32, 0)),
        ("0.32.0.dev12+gabc", (0, 32, 0)),
        (" 0.16.1 ", (0, 16, 1)),
    ],
)
def test_release(version, numbers):
    assert versions.release(version) == numbers


@pytest.mark.parametrize("version", ["", "latest", "x0.32", "v"])
def test_no_version_is_an_error_that_shows_it(version):
    with pytest.raises(ValueError, match=re.escape(repr(version))):
        versions.release(version)


@pytest.mark.parametrize(
    ("version", "floor", "newer"),
    [
        ("0.32.0", "0.32.0", True),
        ("0.32", "0.32.0", True),
        ("0.32.0", "0.32", True),
        ("0.9.2", "0.16", False),
        ("0.16.0", "0.9", True),
        ("0.31.9", "0.32", False),
        ("1.0", "0.32.0", True),
        ("0.32.0+cpu", "0.32.0", True),
    ],
)
def test_at_least(version, floor, newer):
    assert versions.at_least(version, floor) is newer


# Each row: a release and the holes that it has.
HOLES = [
    ("0.13.0", 7),
    ("0.14.0", 6),
    ("0.14.1", 5),
    ("0.16.0", 5),
    ("0.17.0", 4),
    ("0.18.0", 3),
    ("0.19.0", 2),
    ("0.19.1", 1),
    ("0.21.9", 1),
    ("0.22.0", 0),
    ("0.32.0", 0),
]


@pytest.mark.parametrize(("version", "count"), HOLES)
def test_a_release_below_the_floor_is_told_every_hole_by_name(version, count):
    lines = versions.known_vulnerabilities(version)
    open_ones = [hole for hole in versions.VULNERABILITIES if not versions.at_least(version, hole.fixed_in)]
    assert len(lines) == len(open_ones) == count
    for hole, line in zip(open_ones, lines):
        assert line.startswith(f"vLLM {version} has {hole.id} ")
        assert f"Use 0.22.0 or newer, or accept it: `swapgate_host: {{accepted_risks: [{hole.id}]}}`." in line


def test_an_accepted_risk_is_accepted_by_its_name_alone():
    every = [hole.id for hole in versions.VULNERABILITIES]
    assert versions.known_vulnerabilities("0.16.0", every) == []
    (left,) = versions.known_vulnerabilities("0.21.0", ["CVE-2026-9540", "cve-2026-48746"])
    assert "CVE-2026-48746" in left
    assert len(versions.known_vulnerabilities("0.16.0", ["CVE-2026-27893"])) == 4


def test_the_hole_of_the_original_model_is_in_the_table():
    assert any("Kimi-K2.5" in line for line in versions.known_vulnerabilities("0.16.0"))
    assert not any("Kimi-K2.5" in line for line in versions.known_vulnerabilities("0.18.0"))


def test_the_floor_has_no_hole_and_the_release_before_has_one():
    assert versions.floor() == "0.22.0"
    assert versions.known_vulnerabilities(versions.floor()) == []
    assert versions.known_vulnerabilities("0.21.99")


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, "the engine's version cannot be read"),
        ("0.15.9", "vLLM 0.15.9 is older than 0.16"),
        ("0.16.0", None),
        ("0.32.0+cpu", None),
    ],
)
def test_what_swapgate_does_not_drive(version, why):
    found = versions.unsupported(version)
    assert found is None if why is None else found.startswith(why)


def test_every_row_has_a_known_release_a_successor_and_a_source():
    table = versions.table()
    for row in table["flags"] + table["variables"]:
        assert versions.release(row["since"]) and row["successor"] and row["source"]
    for row in table["flags"]:
        assert re.fullmatch("--[a-z0-9]+(-[a-z0-9]+)*", row["name"])
    for hole in table["vulnerabilities"]:
        assert re.fullmatch(r"CVE-\d{4}-\d+|GHSA(-[a-z0-9]{4}){3}", hole["id"]) and versions.release(hole["fixed_in"])
    assert len({row["name"] for row in table["flags"]}) == len(table["flags"])
