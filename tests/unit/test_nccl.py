"""NCCL profiles: what a unit's environment becomes, what a topology asks for, and where they disagree."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible_collections.swapgate.core.plugins.module_utils import nccl, progress, topology, variants

ROOT = Path(__file__).resolve().parents[2]
SPEC = yaml.safe_load((ROOT / "roles/vllm_service/meta/argument_specs.yml").read_text())["argument_specs"]
PCIE = {name: value for name, (value, _) in nccl.PROFILES["pcie"].items()}


def environment(host=None, base=None, own=None, **more):
    """NCCL's part of the environment of variant `own` on a host; each argument is an `nccl` value, or absent."""
    table = {
        "baseline": {"description": "x", **({} if base is None else {"nccl": base})},
        "own": {"extends": "baseline", "description": "x", **({} if own is None else {"nccl": own}), **more},
    }
    machine = {"engine": {"package": "vllm", "version": "0.32.0"}, "nccl": host}
    model = {"path": "/srv/tiny", "served_name": "tiny"}
    found = variants.resolve("own", table, {"tiny": model}, "tiny", machine, SPEC)
    return {name: value for name, value in found["env"].items() if name.startswith(nccl.PREFIXES)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"host": "pcie"}, PCIE),
        ({"host": "nvlink"}, {}),
        ({"host": "none"}, {}),
        ({"host": "pcie", "own": "none"}, {}),
        ({"host": "nvlink", "own": "pcie"}, PCIE),
        ({"host": "pcie", "own": {"NCCL_ALGO": "Tree"}}, {**PCIE, "NCCL_ALGO": "Tree"}),
        (
            {"host": "pcie", "own": {"NCCL_MAX_NCHANNELS": 8, "NCCL_PROTO": None}},
            {**{k: v for k, v in PCIE.items() if k != "NCCL_PROTO"}, "NCCL_MAX_NCHANNELS": "8"},
        ),
        # What the base overrides, a variant can override again; another profile starts anew.
        (
            {"host": "pcie", "base": {"NCCL_ALGO": "Tree"}, "own": {"NCCL_DEBUG": "WARN"}},
            {**PCIE, "NCCL_ALGO": "Tree", "NCCL_DEBUG": "WARN"},
        ),
        ({"host": {"NCCL_ALGO": "Tree"}, "own": {"profile": "pcie"}}, PCIE),
        ({"host": {"profile": "pcie", "NCCL_P2P_LEVEL": "PHB"}}, {**PCIE, "NCCL_P2P_LEVEL": "PHB"}),
    ],
)
def test_the_environment_is_the_profile(given, expected):
    assert environment(**given) == expected


def test_null_in_a_variant_forces_nothing_and_in_a_map_removes_one():
    assert environment(host="pcie", nccl=None) == {}
    assert environment(host="pcie", nccl={"NCCL_PROTO": None}).keys() == PCIE.keys() - {"NCCL_PROTO"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host": "pci"}, "swapgate_host: nccl profile 'pci' does not exist, expected one of none, nvlink, pcie"),
        ({"own": {"profile": "fast"}}, "variant 'own': nccl profile 'fast'"),
        ({"own": {"HOME": "/x"}}, "Other variables belong into `env`"),
        ({"own": {"NCCL_P2P_LEVEL": "NODE"}}, "NODE is nvidia-smi's, say PHB"),
        ({"own": 3}, "`nccl` is 3, expected a profile's name, a map or null"),
        ({"own": {"NCCL_ALGO": True}}, "NCCL_ALGO is True; expected a string or a number"),
        ({"host": "pcie", "env": {"NCCL_ALGO": "Tree"}}, "NCCL_ALGO stands in `env` and comes from `nccl` too"),
    ],
)
def test_a_bad_entry_is_an_error_that_says_what_to_write(given, said):
    with pytest.raises(variants.VariantError) as caught:
        environment(**given)
    assert said in str(caught.value)


def matrix(name):
    """A public matrix by its case."""
    return topology.parse(yaml.safe_load((ROOT / f"tests/cases/topo-{name}.yml").read_text())["input"])


def peers(word, count=2):
    """A P2P table with the same word everywhere."""
    names = [f"GPU{number}" for number in range(count)]
    rows = [" ".join([row, *("X" if row == column else word for column in names)]) for row in names]
    return topology.parse("\n".join([" " + " ".join(names), *rows]), "p2p")


@pytest.mark.parametrize(
    ("name", "gpus", "profile", "level"),
    [
        ("8x-h100-nv18", 8, "nvlink", None),
        ("2x-nv12-8nic-no-affinity", 2, "nvlink", None),
        ("8x-nv18-fused-columns", 8, "nvlink", None),
        ("2x-rtxpro6000-phb-hang", 2, "pcie", "PHB"),
        ("8x-pcie-pix-pxb-node", 8, "pcie", "PHB"),
        ("8x-pcie-pix-pxb-node", 4, "pcie", "PXB"),
        ("8x-pcie-pix-pxb-node", 2, "pcie", "PIX"),
        ("8x-pcie-node-sys-nic-ansi", 8, "pcie", "SYS"),
        ("8x-pcie-node-sys-nic-ansi", 1, "none", None),
        ("4x-l40s-node-sys-nic", 4, "pcie", "SYS"),
    ],
)
def test_a_topology_asks_for_a_profile(name, gpus, profile, level):
    found = nccl.derive(matrix(name), None, list(range(gpus)))
    assert found["profile"] == profile
    assert found["settings"].get("NCCL_P2P_LEVEL", {}).get("value") == level
    assert all(item["reason"] for item in found["settings"].values()) and found["reason"]
    assert any("nccl_check" in notice for notice in found["notices"]) == (level in ("PHB", "SYS"))
    settings = {key: item["value"] for key, item in found["settings"].items()}
    assert nccl.compare(settings, [], matrix(name), None, list(range(gpus))) == [], "its own advice does not fit"


@pytest.mark.parametrize(
    ("text", "profile", "reason"),
    [
        ("GPU0 X NV4 N/A\nGPU1 NV4 X N/A\nGPU2 N/A N/A X", "none", "NVLink joins 1 of 3 pairs"),
        ("GPU0 X NV4 N/A\nGPU1 NV4 X PHB\nGPU2 N/A PHB X", "pcie", "1 of 3 pairs have NVLink"),
        ("GPU0 X N/A N/A\nGPU1 N/A X N/A\nGPU2 N/A N/A X", "none", "tells nothing of GPUs 0, 1, 2"),
    ],
)
def test_nothing_is_claimed_for_a_pair_that_no_cell_tells(text, profile, reason):
    links = topology.parse(text)
    found = nccl.derive(links, None, [0, 1, 2])
    assert found["profile"] == profile and reason in found["reason"]
    assert "run nvidia-smi topo -m again" in found["notices"][0]
    assert nccl.link_gbps(links["links"], 5, 16, peers=True) is None
    assert nccl.derive(links, None, [0, 1, 2, 3])["profile"] != "nvlink"


def test_without_peer_access_no_level_is_asked_for():
    found = nccl.derive(matrix("2x-rtxpro6000-phb-hang"), peers("GNS"), [0, 1])
    assert "NCCL_P2P_LEVEL" not in found["settings"] and "GNS" in found["notices"][0]


@pytest.mark.parametrize(
    ("env", "argv", "case", "table", "said"),
    [
        (PCIE, [], "8x-h100-nv18", None, "Set `nccl: nvlink`"),
        ({}, [], "8x-pcie-node-sys-nic-ansi", None, "the unit forces nothing"),
        ({"NCCL_P2P_DISABLE": "1"}, [], "2x-rtxpro6000-phb-hang", None, "without --disable-custom-all-reduce"),
        (
            {"NCCL_P2P_LEVEL": "PIX"},
            [],
            "8x-pcie-pix-pxb-node",
            None,
            "leaves 24 of 28 pairs without peer access",
        ),
        ({"NCCL_P2P_LEVEL": "3"}, [], "8x-pcie-node-sys-nic-ansi", None, "leaves 16 of 28 pairs"),
        (PCIE, [], "2x-rtxpro6000-phb-hang", "GNS", "peer access that the driver refuses (GPU0-GPU1 GNS)"),
        (PCIE, ["--gpu-memory-utilization", "0.95"], "8x-pcie-node-sys-nic-ansi", None, "256 MiB"),
    ],
)
def test_what_does_not_fit_is_said(env, argv, case, table, said):
    links = matrix(case)
    found = nccl.compare(env, argv, links, peers(table) if table else None, list(range(links["gpus"])))
    assert len(found) == 1 and said in found[0], found


def test_what_fits_is_not_spoken_of():
    links = matrix("8x-pcie-node-sys-nic-ansi")
    assert nccl.compare(PCIE, [], links, peers("OK", 8), list(range(8))) == []
    assert nccl.compare(PCIE, [], links, None, [0]) == [], "one GPU has no collective"
    off = {"NCCL_P2P_DISABLE": "1"}
    assert nccl.compare(off, ["--disable-custom-all-reduce"], matrix("2x-rtxpro6000-phb-hang"), None, [0, 1]) == []


def test_the_table_for_people_gives_each_setting_with_its_reason():
    links = matrix("8x-pcie-node-sys-nic-ansi")
    gpus = [{"index": number, "numa": number // 4} for number in range(8)]
    report = {
        "picture": {"gpus": gpus, "topology": links, "verdict": topology.judge(links)},
        "derived": nccl.derive(links, None, list(range(8))),
        "variants": {"baseline": ["does not fit."]},
    }
    text = "\n".join(progress.topology_table("gpu1", report))
    assert "gpu1: 8 GPUs, links NODE, SYS, NUMA 0: GPU 0, 1, 2, 3; NUMA 1: GPU 4, 5, 6, 7" in text
    assert "NCCL_P2P_LEVEL=SYS: the farthest pair is joined by SYS" in text
    assert "variant 'baseline': does not fit." in text
    assert ": NODE to GPU0, GPU1, GPU2, GPU3\n" in text
