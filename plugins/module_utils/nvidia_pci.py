"""What the PCI bus says of NVIDIA's boards: generation, NVSwitch, and whether peer traffic is sent through the root.

Device ids are compared with the public pci.ids list. What that list does not know yet is newer than what it knows.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

VENDOR = 0x10DE
# First device id of each run of one generation, ascending.
_RUNS = (
    (0x0000, "kepler or older"),
    (0x1340, "maxwell"),
    (0x15C0, "pascal"),
    (0x1600, "maxwell"),
    (0x1725, "pascal"),
    (0x1730, "maxwell"),
    (0x1B00, "pascal"),
    (0x1D80, "volta"),
    (0x1E00, "turing"),
    (0x2080, "ampere"),
    (0x2180, "turing"),
    (0x2200, "ampere"),
    (0x2300, "hopper"),
    (0x2400, "ampere"),
    (0x2600, "ada"),
    (0x2900, "blackwell"),
    (0x3000, "newer than blackwell"),
    (0x3180, "blackwell"),
    (0x3400, "newer than blackwell"),
)
BEFORE_TURING = ("kepler or older", "maxwell", "pascal", "volta")
OPEN_ONLY = ("blackwell", "newer than blackwell")
# Data-centre Blackwell: no PCIe boards, and its NVSwitches (NVLink 5) are not on this bus under NVIDIA's vendor id.
_NVLINK5 = ((0x2900, 0x2B00), (0x3180, 0x3400))
_ACS, _ACS_REDIRECT = 0x000D, 0x0004 | 0x0008


def generation(device: int) -> str:
    """The generation of a GPU by its PCI device id."""
    return [name for first, name in _RUNS if first <= device][-1]


def acs_redirects(config: bytes) -> bool | None:
    """Whether a PCI function sends peer requests or completions through the root (Access Control Services).

    ``config`` is the function's configuration space. None: it has no ACS, or only its first 256 bytes could be read.
    """
    at = 0x100
    for _ in range(48):
        if at < 0x100 or at + 8 > len(config):
            return None
        header = struct.unpack_from("<I", config, at)[0]
        if header & 0xFFFF == _ACS:
            return bool(struct.unpack_from("<H", config, at + 6)[0] & _ACS_REDIRECT)
        at = header >> 20
    return None


def boards(devices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """GPUs and switches among PCI functions of {"address", "vendor", "device", "class": numbers as sysfs has them}.

    Returns ``gpus`` ([{"address", "id": "10de:2bb1", "generation"}] by address), ``nvswitch`` (NVSwitches are there)
    and ``nvlink5`` (of the kind that data-centre Blackwell has).
    """
    own = sorted((found for found in devices if found["vendor"] == VENDOR), key=lambda found: str(found["address"]))
    gpus = [
        {
            "address": found["address"],
            "id": "10de:{:04x}".format(found["device"]),
            "generation": generation(found["device"]),
        }
        for found in own
        if found["class"] >> 8 in (0x0300, 0x0302)
    ]
    nvlink5 = any(first <= int(gpu["id"][5:], 16) < end for gpu in gpus for first, end in _NVLINK5)
    return {
        "gpus": gpus,
        "nvswitch": nvlink5 or any(found["class"] >> 8 == 0x0680 for found in own),
        "nvlink5": nvlink5,
    }
