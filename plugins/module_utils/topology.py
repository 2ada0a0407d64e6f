"""How the GPUs of a host are connected: reads ``nvidia-smi topo -m`` and ``topo -p2p``, and says what that means for
serving.

Only the link cells between GPUs decide. Affinity columns may be missing, blank or glued together, network cards have
rows of their own, a copy from a terminal may have lost its header. No table proves that peer traffic works: only a
collective does.
"""

from __future__ import annotations

import re
from typing import Any

from .log_text import split_lines, strip_ansi

# From near to far, NVLink apart.
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS|X|N/A")
_P2P = re.compile(r"OK|CNS|GNS|TNS|NS|DR|U|X")
_P2P_ONLY = {"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"}
P2P_WORDS = {
    "OK": "works as far as the driver knows",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a registry key",
    "U": "unknown",
}
_ROW = re.compile(r"^\s*(?P<name>(?:GPU|NIC|mlx\d+_|CX)\d+)\b(?P<rest>.*)$")
_CPUS = re.compile(r"^\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*$")


def parse(text: str) -> dict[str, Any]:
    """Read a topology or P2P matrix.

    Returns ``kind`` ("topo", "p2p" or None where the text is neither), ``gpus`` (the count that header and rows
    show), ``rows`` (GPU rows seen), ``nics``, ``header`` (seen), ``links`` ({"GPU0-GPU1": "NV18"}, each pair once),
    ``nvlink`` (all pairs), ``worst_link``, ``levels`` (nearest first), ``numa`` ({"0": ["GPU0"]}), ``sockets`` (None
    = not told), ``affinity`` ("ok", "absent", "unparseable"), ``pix_pairs``, ``groups`` and ``oddities``.
    """
    lines = [line for line in split_lines(strip_ansi(text)) if line.strip()]
    header: list[str] = []
    rows: dict[str, list[str]] = {}
    for line in lines:
        if re.match(r"\s*(?:NIC )?Legend", line):
            break
        names = re.findall(r"\b(?:GPU\d+|NIC\d+|mlx\d+_\d+)\b", line)
        if not header and len(names) >= 1 and (len(names) > 1 or "Affinity" in line) and not _has_cells(line):
            header = names
            continue
        match = _ROW.match(line)
        if match and match["name"] not in rows and match["rest"].strip():
            rows[match["name"]] = match["rest"].split()
    gpu_rows = [name for name in rows if name.startswith("GPU")]
    columns = header or gpu_rows
    cells = {name: _link_cells(rows[name]) for name in rows}
    p2p = any(cell in _P2P_ONLY for name in gpu_rows for cell in rows[name][: len(columns) + 1]) and not any(
        cell in _PCIE or cell.startswith("NV") for name in gpu_rows for cell in rows[name]
    )
    if p2p:
        cells = {name: [cell for cell in rows[name] if _P2P.fullmatch(cell)] for name in rows}
    gpu_columns = (
        [name for name in columns if name.startswith("GPU")] if header else _columns_without_header(gpu_rows, cells)
    )
    links, oddities = _pairs(gpu_rows, gpu_columns, cells)
    result: dict[str, Any] = {
        "kind": ("p2p" if p2p else "topo") if gpu_rows else None,
        "gpus": max(len(gpu_rows), len(gpu_columns)),
        "rows": len(gpu_rows),
        "nics": len({name for name in [*header, *rows] if not name.startswith("GPU")}),
        "header": bool(header),
        "links": links,
        "oddities": oddities,
    }
    result.update(_summary(links, p2p))
    affinity, numa = ("absent", {}) if p2p else _affinity(lines, header, gpu_rows, rows, cells)
    result["affinity"], result["numa"] = affinity, numa
    result["sockets"] = len(numa) or None
    if affinity == "unparseable":
        oddities.append("affinity columns are glued together: take them from sysfs (numa_node of each PCI device)")
    near = {name: node for node, members in numa.items() for name in members}
    if any(
        link == "SYS" and near.get(a) is not None and near.get(a) == near.get(b)
        for (a, b), link in _split(links).items()
    ):
        oddities.append("SYS between GPUs of one NUMA node: a virtual machine, or every GPU on a root of its own")
    if result["rows"] < result["gpus"]:
        oddities.append(f"{result['rows']} of {result['gpus']} GPU rows given")
    return result


def _has_cells(line: str) -> bool:
    words = line.split()
    return any(_LINK.fullmatch(word) or word in _P2P_ONLY for word in words if word != "N/A")


def _link_cells(words: list[str]) -> list[str]:
    """The leading link cells of a row; the affinity columns follow them."""
    found = []
    for word in words:
        if not _LINK.fullmatch(word) or word == "N/A":
            break
        found.append(word)
    return found


def _columns_without_header(gpu_rows: list[str], cells: dict[str, list[str]]) -> list[str]:
    """Without a header a GPU's own column is where its X stands; one more GPU than rows shows as one more NVLink
    column."""
    count = 0
    for name in gpu_rows:
        own = cells[name]
        at = own.index("X") if "X" in own else -1
        nvlinks = [position for position, cell in enumerate(own) if cell.startswith("NV")]
        count = max(count, at + 1, (max(nvlinks) + 1) if nvlinks else 0)
    return [f"GPU{number}" for number in range(count)] or gpu_rows


def _pairs(gpu_rows: list[str], columns: list[str], cells: dict[str, list[str]]) -> tuple[dict[str, str], list[str]]:
    links: dict[str, str] = {}
    oddities: list[str] = []
    for row in gpu_rows:
        for column, cell in zip(columns, cells[row]):
            if cell == "X" or row == column:
                continue
            first, second = sorted((row, column), key=lambda name: int(name[3:]))
            pair = f"{first}-{second}"
            if links.setdefault(pair, cell) != cell:
                oddities.append(f"{pair} reads {links[pair]} one way and {cell} the other")
    return links, oddities


def _split(links: dict[str, str]) -> dict[tuple[str, str], str]:
    return {(pair.partition("-")[0], pair.partition("-")[2]): link for pair, link in links.items()}


def _summary(links: dict[str, str], p2p: bool) -> dict[str, Any]:
    found = list(links.values())
    if p2p:
        bad = sorted({link for link in found if link != "OK"})
        return {
            "nvlink": None,
            "worst_link": bad[0] if bad else ("OK" if found else None),
            "levels": sorted(set(found)),
            "pix_pairs": [],
            "groups": [],
        }
    nvlinks = sorted((link for link in found if link.startswith("NV")), key=lambda link: int(link[2:]))
    pcie = [level for level in _PCIE if level in found]
    pix = [pair for pair, link in links.items() if link == "PIX"]
    return {
        "nvlink": bool(found) and len(nvlinks) == len(found),
        "worst_link": pcie[-1] if pcie else (nvlinks[0] if nvlinks else None),
        "levels": [*dict.fromkeys(reversed(nvlinks)), *pcie],
        "pix_pairs": pix,
        "groups": _groups(links),
    }


def _groups(links: dict[str, str]) -> list[list[str]]:
    """GPUs that reach each other through switches or NVLink alone."""
    names = sorted({name for pair in _split(links) for name in pair}, key=lambda name: int(name[3:]))
    group = {name: name for name in names}
    for (first, second), link in _split(links).items():
        if link in {"PIX", "PXB"} or link.startswith("NV"):
            old, new = group[second], group[first]
            group = {name: new if root == old else root for name, root in group.items()}
    return [[name for name in names if group[name] == root] for root in dict.fromkeys(group.values())]


def _affinity(
    lines: list[str], header: list[str], gpu_rows: list[str], rows: dict[str, list[str]], cells: dict[str, list[str]]
) -> tuple[str, dict[str, list[str]]]:
    rest = {name: rows[name][len(cells[name]) :] for name in gpu_rows}
    promised = any("Affinity" in line for line in lines[:3])
    numa: dict[str, list[str]] = {}
    told = False
    for name, all_words in rest.items():
        words = [word for word in all_words if word != "N/A"]
        if not words:
            continue
        told = True
        # "0-55,112-167 0N/A" and "56-111,168-2231 N/A": the NUMA column ran into a neighbour.
        if not _CPUS.match(words[0]) or len(words) < 2 or not words[1].isdigit() or _descending(words[0]):
            return "unparseable", {}
        numa.setdefault(words[1], []).append(name)
    if not told:
        return "absent", {}
    return ("ok" if promised or numa else "unparseable"), numa


def _descending(cpus: str) -> bool:
    ranges = [tuple(int(end) for end in part.split("-")) for part in cpus.split(",")]
    return any(len(pair) == 2 and pair[0] > pair[1] for pair in ranges)


def judge(topology: dict[str, Any]) -> dict[str, Any]:
    """What a topology means for a tensor-parallel engine.

    Returns ``verdict`` (accept, accept-with-warning, reject-as-unparseable-affinity, reject-as-unknown), ``warnings``
    and ``remedy``.
    """
    if topology["kind"] is None or not topology["gpus"]:
        return {
            "verdict": "reject-as-unknown",
            "warnings": ["no GPU row found"],
            "remedy": "run nvidia-smi topo -m again",
        }
    warnings = list(topology["oddities"])
    worst: str | None = topology["worst_link"]
    if topology["kind"] == "p2p":
        bad = sorted({link for link in topology["links"].values() if link != "OK"})
        warnings += [f"peer access {link}: {P2P_WORDS.get(link, 'not known')}" for link in bad]
        remedy = (
            "do not force NCCL_P2P_LEVEL; NCCL uses shared memory"
            if bad
            else "test with a collective before relying on it"
        )
        return {"verdict": "accept-with-warning" if warnings else "accept", "warnings": warnings, "remedy": remedy}
    if worst == "SYS":
        warnings.append("GPU pairs are connected across sockets (SYS)")
    elif (
        worst in {"PHB", "NODE"}
        and not topology["pix_pairs"]
        and "PXB" not in topology["levels"]
        and not _any_nvlink(topology)
    ):
        warnings.append(
            f"all peer traffic passes the host bridge ({worst}): such a host hung with IOMMU or ACS on, "
            "although topo -p2p said OK"
        )
    if topology["affinity"] == "unparseable":
        return {
            "verdict": "reject-as-unparseable-affinity",
            "warnings": warnings,
            "remedy": "use the link cells only, take the NUMA node of each GPU from sysfs",
        }
    remedy = {
        "SYS": "keep a smaller tensor-parallel group inside one socket; for all GPUs NCCL_P2P_LEVEL=SYS, after a look "
        "at ACS and IOMMU",
        "PHB": "check ACS and IOMMU; NCCL_P2P_DISABLE=1 with --disable-custom-all-reduce is the way out",
        "NODE": "NCCL_P2P_LEVEL=NODE suffices",
    }.get(worst or "", "no PCIe tuning needed" if topology["nvlink"] else "nothing to do")
    return {"verdict": "accept-with-warning" if warnings else "accept", "warnings": warnings, "remedy": remedy}


def _any_nvlink(topology: dict[str, Any]) -> bool:
    return any(link.startswith("NV") for link in topology["links"].values())
