"""NCCL's settings as a named profile, what a host's topology would ask for, and where the two disagree.

A profile is data: PROFILES. An inventory names one in ``swapgate_host.nccl``, a variant names another one or overrides
single variables, and the unit's environment is exactly the result. `derive` says from a topology which settings it
would choose and why; `compare` holds a unit's settings against the host. Neither proves a link: only a collective does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .topology import UNKNOWN

JsonDict = dict[str, Any]

# Variable to (value, reason). PCIe boards without NVLink: every AllReduce of a decode step crosses PCIe.
_PCIE: dict[str, tuple[str, str]] = {
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "1",
        "one hardware queue keeps kernels and AllReduces in the order of their launch",
    ),
    "NCCL_ALGO": ("Ring", "inside one host a ring needs each PCIe link once; trees pay off over networks"),
    "NCCL_BUFFSIZE": ("16777216", "larger chunks for the long AllReduces of a prefill"),
    "NCCL_MAX_NCHANNELS": ("16", "more channels than PCIe can feed only cost memory and GPU time"),
    "NCCL_NTHREADS": ("512", "the full width of a NCCL block hides PCIe's latency"),
    "NCCL_P2P_LEVEL": ("SYS", "peer access for every pair, also across sockets, instead of a copy through host memory"),
    "NCCL_PROTO": ("LL", "the AllReduce of a decode step is small: latency decides, not bandwidth"),
}
PROFILES: dict[str, dict[str, tuple[str, str]]] = {
    "none": {},  # nothing forced
    "nvlink": {},  # nothing forced either: NCCL's own choice is right where NVLink joins all pairs
    "pcie": _PCIE,
}
PREFIXES = ("NCCL_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS")
# NCCL's own words, from near to far. nvidia-smi's NODE is not among them: NCCL ignores a word that it does not know.
LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
# How far NCCL must reach for a link that nvidia-smi calls so.
_LEVEL_OF_LINK = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "PHB", "SYS": "SYS"}
# Levels of old, by number.
_NUMBERED = ("LOC", "PIX", "PXB", "PHB", "SYS")
# What an engine usually leaves to NCCL, beside its own share.
_TIGHT_MEMORY = 0.95
_LARGE_BUFFERS_MIB = 256


class NcclError(ValueError):
    """A ``nccl`` entry that is no profile; the text says what was found, what is expected, and what to do."""


def settings(layers: Mapping[str, Any]) -> JsonDict:
    """The settings of ``layers``: the ``nccl`` values of host, base and variant in this order, by where each stands.

    A value is a profile's name, null (nothing forced), or a map: ``profile`` starts anew from that profile, other keys
    are variables laid over what came before, and null removes one. Returns {"profile": the last one named,
    "settings": {variable: value as it stands in the entry}}. Raises NcclError.
    """
    profile, found = "none", {}  # type: str, JsonDict
    for where, value in layers.items():
        entry: JsonDict = dict(value) if isinstance(value, Mapping) else {"profile": value or "none"}
        if "profile" in entry:
            profile = entry.pop("profile") or "none"
            if profile not in PROFILES:
                raise NcclError(
                    "{}: nccl profile {!r} does not exist, expected one of {}. Correct `nccl`.".format(
                        where, profile, ", ".join(PROFILES)
                    )
                )
            found = {name: setting[0] for name, setting in PROFILES[profile].items()}
        for name, setting in entry.items():
            if not str(name).startswith(PREFIXES):
                raise NcclError(
                    "{}: nccl key {!r}: expected `profile` or a variable that starts with {}. Other variables belong "
                    "into `env`.".format(where, name, ", ".join(PREFIXES))
                )
            if name == "NCCL_P2P_LEVEL" and setting is not None and _level(str(setting)) is None:
                raise NcclError(
                    "{}: NCCL_P2P_LEVEL is {!r}, expected one of {}: NCCL silently ignores another word{}.".format(
                        where,
                        setting,
                        ", ".join(LEVELS),
                        "; NODE is nvidia-smi's, say PHB" if setting == "NODE" else "",
                    )
                )
            if setting is None:
                found.pop(name, None)
            else:
                found[str(name)] = setting
    return {"profile": profile, "settings": found}


def _level(word: str) -> str | None:
    """NCCL's level for a value of NCCL_P2P_LEVEL; None where NCCL would ignore it."""
    if word in LEVELS:
        return word
    return _NUMBERED[min(int(word), len(_NUMBERED) - 1)] if word.isdigit() else None


def select(topology: Mapping[str, Any], indices: Sequence[int]) -> dict[str, str]:
    """The links between the GPUs with these indices, of a matrix that topology.parse read; UNKNOWN ones too."""
    names = {f"GPU{index}" for index in indices}
    return {pair: link for pair, link in topology["links"].items() if set(pair.split("-")) <= names}


def derive(topology: Mapping[str, Any], peers: Mapping[str, Any] | None, indices: Sequence[int]) -> JsonDict:
    """The profile that fits the GPUs ``indices``, with the reason for each setting.

    ``topology`` and ``peers`` are what topology.parse read from `topo -m` and `topo -p2p`. Returns {"profile",
    "reason", "settings": {variable: {"value", "reason"}}, "notices": [what a matrix cannot tell]}.
    """
    links = select(topology, indices)
    if len(indices) < 2:
        return {"profile": "none", "reason": "fewer than two GPUs: no collective", "settings": {}, "notices": []}
    joined = sum(link.startswith("NV") for link in links.values())
    wanted = len(indices) * (len(indices) - 1) // 2
    untold = wanted - sum(link != UNKNOWN for link in links.values())
    again = f"the matrix does not tell the links of {untold} of {wanted} pairs: run nvidia-smi topo -m again"
    if untold == wanted:
        reason = f"the matrix tells nothing of GPUs {', '.join(map(str, indices))}"
        return {"profile": "none", "reason": reason, "settings": {}, "notices": ["run nvidia-smi topo -m again"]}
    if untold and joined + untold == wanted:
        return {
            "profile": "none",
            "reason": f"NVLink joins {joined} of {wanted} pairs, of the others nothing is told",
            "settings": {},
            "notices": [again],
        }
    if joined == wanted:
        reason = f"NVLink joins all {len(links)} pairs: NCCL chooses by itself, and PCIe settings would slow it down"
        return {"profile": "nvlink", "reason": reason, "settings": {}, "notices": []}
    notices = [again] if untold else []
    worst = _worst(links)
    chosen = {name: {"value": value, "reason": reason} for name, (value, reason) in _PCIE.items()}
    refused = _no_peers(peers, indices)
    if refused:
        del chosen["NCCL_P2P_LEVEL"]
        notices.append(
            f"topo -p2p says {', '.join(sorted(set(refused.values())))}: no NCCL_P2P_LEVEL, NCCL uses host memory"
        )
    else:
        level = _LEVEL_OF_LINK[worst]
        chosen["NCCL_P2P_LEVEL"] = {
            "value": level,
            "reason": f"the farthest pair is joined by {worst}: {_PCIE['NCCL_P2P_LEVEL'][1]}"
            if level == "SYS"
            else f"the farthest pair is joined by {worst}, which is NCCL's {level}",
        }
    if worst in ("PHB", "NODE", "SYS"):
        notices.append(
            f"peer traffic passes the host bridge ({worst}): with IOMMU translation or ACS on it can hang although "
            "every table says OK; run playbooks/nccl_check.yml"
        )
    reason = f"{joined} of {len(links)} pairs have NVLink" if joined else f"no NVLink: the farthest pair is {worst}"
    return {"profile": "pcie", "reason": reason, "settings": chosen, "notices": notices}


def _worst(links: Mapping[str, str]) -> str:
    order = list(_LEVEL_OF_LINK)
    return max((link for link in links.values() if link in order), key=order.index, default="SYS")


def _no_peers(peers: Mapping[str, Any] | None, indices: Sequence[int]) -> dict[str, str]:
    return {pair: word for pair, word in select(peers, indices).items() if word not in ("OK", UNKNOWN)} if peers else {}


# GB/s of one lane each way, by PCIe generation, and of one NVLink (fourth generation; the fifth has twice as much).
_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_NVLINK_GBPS = 25.0
# What a path over host bridges, or through host memory, may lose against the bare link.
_BRIDGED, _THROUGH_MEMORY = 0.5, 0.25


def link_gbps(links: Mapping[str, str], generation: float | None, width: float | None, peers: bool) -> float | None:
    """GB/s each way that the slowest of these links can carry; None where nothing tells it.

    ``generation`` and ``width`` are the PCIe link's, ``peers`` whether GPUs reach each other without host memory.
    """
    if not links or UNKNOWN in links.values():
        return None
    if all(link.startswith("NV") for link in links.values()):
        return _NVLINK_GBPS * min(int(link[2:]) for link in links.values())
    if not generation or not width or int(generation) not in _LANE_GBPS:
        return None
    bare = _LANE_GBPS[int(generation)] * width
    if not peers:
        return bare * _THROUGH_MEMORY
    return bare * (_BRIDGED if _worst(links) in ("PHB", "NODE", "SYS") else 1.0)


def compare(
    environment: Mapping[str, str],
    argv: Sequence[str],
    topology: Mapping[str, Any],
    peers: Mapping[str, Any] | None,
    indices: Sequence[int],
) -> list[str]:
    """What of a unit's environment does not fit the host's picture, one sentence each; never a reason to refuse."""
    links = select(topology, indices)
    if len(indices) < 2 or not links:
        return []
    wanted = derive(topology, peers, indices)
    have = {name: value for name, value in environment.items() if name.startswith(PREFIXES)}
    forced = sorted(name for name in have if name in _PCIE)
    found = []
    if wanted["profile"] == "nvlink" and forced:
        found.append(f"{wanted['reason']}; the unit forces {', '.join(forced)}. Set `nccl: nvlink`.")
    if wanted["profile"] == "pcie" and not forced and have.get("NCCL_P2P_DISABLE") != "1":
        found.append(f"{wanted['reason']}, and the unit forces nothing; profile `pcie` is made for such a board.")
    level = _level(have["NCCL_P2P_LEVEL"]) if "NCCL_P2P_LEVEL" in have else None
    if level is not None and wanted["profile"] == "pcie":
        beyond = [
            pair
            for pair, link in links.items()
            if link in _LEVEL_OF_LINK and LEVELS.index(_LEVEL_OF_LINK[link]) > LEVELS.index(level)
        ]
        refused = _no_peers(peers, indices)
        if beyond:
            found.append(
                f"NCCL_P2P_LEVEL={have['NCCL_P2P_LEVEL']} leaves {len(beyond)} of {len(links)} pairs without peer "
                f"access ({', '.join(beyond[:4])}): they go through host memory."
            )
        if refused:
            found.append(
                f"NCCL_P2P_LEVEL={have['NCCL_P2P_LEVEL']} asks for peer access that the driver refuses "
                f"({', '.join(f'{pair} {word}' for pair, word in list(refused.items())[:4])}). Remove it with null."
            )
    if have.get("NCCL_P2P_DISABLE") == "1" and "--disable-custom-all-reduce" not in argv and len(indices) == 2:
        found.append(
            "NCCL_P2P_DISABLE=1 without --disable-custom-all-reduce: its own all-reduce still uses peer access."
        )
    return found + _memory(have, argv)


def _memory(have: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    share = _number(dict(zip(argv, argv[1:])).get("--gpu-memory-utilization", ""))
    buffer, channels = _number(have.get("NCCL_BUFFSIZE", "")), _number(have.get("NCCL_MAX_NCHANNELS", ""))
    if share is None or buffer is None or channels is None or share < _TIGHT_MEMORY:
        return []
    mib = buffer * channels / 2**20
    if mib < _LARGE_BUFFERS_MIB:
        return []
    return [
        f"NCCL_BUFFSIZE x NCCL_MAX_NCHANNELS is {mib:.0f} MiB for each connection of a ring, outside the engine's "
        f"share of {share:g}: boards ran out of memory so. Lower one if the load ends in `Failed to CUDA calloc`."
    ]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
