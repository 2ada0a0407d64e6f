"""Topology matrices: links by table, whatever became of the affinity columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible_collections.swapgate.core.plugins.module_utils import topology
from hypothesis import given, settings
from hypothesis import strategies as st

CASES = [
    case
    for path in sorted((Path(__file__).resolve().parents[1] / "cases").glob("topo-*.yml"))
    if "input" in (case := yaml.safe_load(path.read_text()))
]
BRIDGED = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV12\tSYS\tSYS\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \t32-63\t1\t\tN/A

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_public_case(case):
    """Verdict, counts and links as the case states them."""
    found = topology.parse(case["input"])
    assert topology.judge(found)["verdict"] == case["expected"]["verdict"]
    why = case["expected"]["why"]
    stated = {
        "gpus": "gpus",
        "gpus_in_header": "gpus",
        "gpus_rows": "rows",
        "nics": "nics",
        "nvlink": "nvlink",
        "worst_link": "worst_link",
        "worst_gpu_link": "worst_link",
        "levels": "levels",
    }
    for key, mine in stated.items():
        if key in why:
            assert found[mine] == why[key], key
    if isinstance(why.get("sockets"), int):
        assert found["sockets"] == why["sockets"]


def test_bridged_pairs_are_told_from_a_full_mesh():
    """NVLink bridges of two join pairs; the rest crosses sockets."""
    found = topology.parse(BRIDGED)
    assert found["links"]["GPU0-GPU1"] == "NV12"
    assert (found["nvlink"], found["worst_link"], found["sockets"]) == (False, "SYS", 2)
    assert found["groups"] == [["GPU0", "GPU1"], ["GPU2", "GPU3"]]
    assert found["numa"] == {"0": ["GPU0", "GPU1"], "1": ["GPU2", "GPU3"]}
    assert topology.judge(found)["verdict"] == "accept-with-warning"


def test_one_gpu_needs_no_link():
    """A host with one GPU is accepted."""
    found = topology.parse("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-13\t0")
    assert (found["gpus"], found["worst_link"]) == (1, None)
    assert topology.judge(found)["verdict"] == "accept"


def test_cells_that_differ_both_ways_are_an_oddity():
    """A matrix that contradicts itself is said to."""
    found = topology.parse(" GPU0 GPU1\nGPU0 X PIX\nGPU1 SYS X")
    assert "GPU0-GPU1 reads PIX one way and SYS the other" in found["oddities"]


def test_p2p_tables():
    """OK everywhere is accepted, every other word is named."""
    good = topology.parse(" \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX")
    assert (good["kind"], topology.judge(good)["verdict"]) == ("p2p", "accept")
    bad = topology.parse(" \tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX")
    assert topology.judge(bad)["warnings"] == ["peer access CNS: chipset not supported"]


def test_text_without_a_matrix_is_unknown():
    """No row, no verdict."""
    assert topology.judge(topology.parse("No devices were found"))["verdict"] == "reject-as-unknown"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "GPU0",
                "GPU1",
                "GPU12",
                "NIC0",
                "X",
                "NV18",
                "PIX",
                "SYS",
                "OK",
                "GNS",
                "N/A",
                "0-13",
                "0N/A",
                "\n",
                "\t",
                " ",
                "CPU Affinity",
                "Legend:",
                "\x1b[4m",
            ]
        ),
        max_size=60,
    ).map("".join)
    | st.text()
)
def test_no_text_can_crash_it(text):
    """Any text can be read and judged."""
    assert topology.judge(topology.parse(text))["verdict"]
