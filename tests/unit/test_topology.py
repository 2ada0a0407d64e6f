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


def test_the_p2p_table_of_one_gpu_is_told_from_its_matrix():
    """Both hold an X and nothing else; what was asked for wins, then header and legend tell."""
    raw = Path(__file__).resolve().parents[2] / "benchmarks/results/gpu/raw"
    table, matrix = ((raw / f"nvidia-smi-topo-{name}.txt").read_text() for name in ("p2p", "m"))
    assert (topology.parse(table)["kind"], topology.parse(matrix)["kind"]) == ("p2p", "topo")
    assert topology.parse(" \tGPU0\n GPU0\tX", "p2p")["kind"] == "p2p"


def test_text_without_a_matrix_is_unknown():
    """No row, no verdict."""
    assert topology.judge(topology.parse("No devices were found"))["verdict"] == "reject-as-unknown"


HEAD2 = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"


@pytest.mark.parametrize(
    ("text", "affinity", "numa"),
    [
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tNV1\t0-19\nGPU1\tNV1\tX\t0-19", "absent", {}),
        ("GPU0 X NV1 0-19\nGPU1 NV1 X 0-19", "absent", {}),
        (
            "\tGPU0\tGPU1\tmlx4_0\tmlx5_1\tCPU Affinity\nGPU0\tX\tNV1\tSYS\tPIX\t0-19\nGPU1\tNV1\tX\tPHB\tSYS\t20-39",
            "absent",
            {},
        ),
        (f"{HEAD2}GPU0 X PHB 0-71 N/A N/A\nGPU1 PHB X 0-71 N/A N/A", "absent", {}),
        (f"{HEAD2}GPU0 X PHB N/A N/A N/A\nGPU1 PHB X N/A N/A N/A", "absent", {}),
        ("GPU0 X PHB N/A N/A N/A\nGPU1 PHB X N/A N/A N/A", "absent", {}),
        (f"{HEAD2}GPU0 X PHB 0-15 0-1 N/A\nGPU1 PHB X 0-15 0-1 N/A", "ok", {"0-1": ["GPU0", "GPU1"]}),
        (f"{HEAD2}GPU0 X PIX 0-31,64-95 0 N/A\nGPU1 PIX X 0,2,4 1 N/A", "ok", {"0": ["GPU0"], "1": ["GPU1"]}),
        (f"{HEAD2}GPU0 X PIX 0-31,64-95\nGPU1 PIX X 0-31,64-95", "absent", {}),
        (f"{HEAD2}GPU0 X PIX 0-31 0N/A\nGPU1 PIX X 0-31 0N/A", "unparseable", {}),
        (f"{HEAD2}GPU0 X PIX 0-7132-3 N/A\nGPU1 PIX X 0-7132-3 N/A", "unparseable", {}),
        (f"{HEAD2}GPU0 X PIX 71-0 N/A\nGPU1 PIX X 71-0 N/A", "unparseable", {}),
        (f"{HEAD2}GPU0 X PIX 56-111,168-2231 N/A\nGPU1 PIX X 56-111,168-2231 N/A", "unparseable", {}),
    ],
)
def test_affinity_is_glued_only_where_a_mark_shows_it(text, affinity, numa):
    found = topology.parse(text)
    assert (found["affinity"], found["numa"], found["gpus"]) == (affinity, numa, 2)
    refused = topology.judge(found)["verdict"] == "reject-as-unparseable-affinity"
    assert refused == (affinity == "unparseable")


THREE = "\tGPU0\tGPU1\tGPU2\n"


@pytest.mark.parametrize(
    ("text", "links"),
    [
        *(
            (f"GPU0 X NV4 {word}\nGPU1 NV4 X {word}\nGPU2 {word} {word} X", ["NV4", "unknown", "unknown"])
            for word in ("N/A", "ERR!", "[Unknown Error]", "[N/A]")
        ),
        (f"{THREE}GPU0 X NV4 N/A\nGPU1 NV4 X N/A\nGPU2 N/A N/A X", ["NV4", "unknown", "unknown"]),
        (f"{THREE}GPU0 X N/A NV4\nGPU1 N/A X NV4\nGPU2 NV4 NV4 X", ["unknown", "NV4", "NV4"]),
        (f"{THREE}GPU0 X N/A NV4\nGPU1 NV4 X NV4\nGPU2 NV4 NV4 X", ["NV4", "NV4", "NV4"]),
        (f"{THREE}GPU0 X NV4 SOC\nGPU1 NV4 X SOC\nGPU2 SOC SOC X", ["NV4", "SYS", "SYS"]),
        (f"{THREE}GPU0 X NV4 NV4", ["NV4", "NV4", "unknown"]),
    ],
)
def test_every_pair_has_a_link_or_is_said_to_be_unknown(text, links):
    found = topology.parse(text)
    assert list(found["links"].values()) == links
    assert found["nvlink"] == all(link == "NV4" for link in links)
    untold = [pair for pair, link in found["links"].items() if link == "unknown"]
    assert all(pair in found["oddities"][-1] for pair in untold)
    assert topology.judge(found)["verdict"].startswith("accept")
    assert (topology.judge(found)["verdict"] == "accept") == found["nvlink"]


@pytest.mark.parametrize("name", ["mlx5_0", "mlx5_bond_0", "bnxt_re0", "rocep1s0f0", "ibp65s0", "NIC0"])
@pytest.mark.parametrize("head", ["\tGPU0\tGPU1\t{}\tCPU Affinity\n", ""])
def test_network_cards_are_named_with_the_gpus_near_them(name, head):
    rows = f"GPU0\tX\tNV4\tPIX\t0-19\nGPU1\tNV4\tX\tSYS\t0-19\n{name}\tPIX\tSYS\tX\n"
    found = topology.parse(head.format(name) + rows + "\nNIC Legend:\n\n  NIC0: mlx5_7\n")
    shown = "mlx5_7" if name == "NIC0" else name
    assert (found["gpus"], found["nics"]) == (2, 1)
    assert found["nic_links"] == {shown: {"GPU0": "PIX", "GPU1": "SYS"}}
    assert topology.nic_lines(found) == [f"NIC {shown}: PIX to GPU0"]


def test_a_quoted_matrix_is_read():
    quoted = "\n".join("> " + line for line in BRIDGED.splitlines())
    assert topology.is_matrix(quoted) and topology.parse(quoted) == topology.parse(BRIDGED)


def test_words_behind_a_gpus_name_are_no_matrix():
    assert topology.judge(topology.parse("GPU0 is lost"))["verdict"] == "reject-as-unknown"


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
