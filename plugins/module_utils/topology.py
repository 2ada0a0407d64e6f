"""How the GPUs of a host are connected: reads ``nvidia-smi topo -m`` and ``topo -p2p``, and says what that means for
serving.

Only the link cells between GPUs decide. Affinity columns may be missing, blank or glued together, network cards have
columns and rows of their own, a copy from a terminal may have lost its header, and a cell may tell nothing. No table
proves that peer traffic works: only a collective does.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

from .log_text import split_lines, strip_ansi, unquote

# From near to far, NVLink apart.
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")
UNKNOWN = "unknown"  # the link of a pair that no cell tells
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|X")
_P2P = re.compile(r"OK|CNS|GNS|TNS|NS|DR|U|X")
_NOT_TOLD = re.compile(r"N/A|ERR!|\[[^\]]*\]|Unknown")
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
_WORD = re.compile(r"\[[^\]]*\]|\S+")
_NAME = re.compile(rf"(?!(?:{_LINK.pattern})$)[A-Za-z][\w.-]*\d\w*")
_AFFINITY_HEAD = re.compile(r"\s*(?:CPU|NUMA|GPU) *(?:Affinity|NUMA)")
_CPUS = re.compile(r"^\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*$")


def parse(text: str, kind: str | None = None) -> dict[str, Any]:
    """Read a topology or P2P matrix; ``kind`` ("topo" or "p2p") is what was asked for, where that is known.

    Without it the cells tell which one it is, and with one GPU, whose only cell is X, header and legend do. Returns
    ``kind`` ("topo", "p2p" or None where the text is neither), ``gpus`` (the count that header and rows show),
    ``rows`` (GPU rows seen), ``nics``, ``nic_links`` ({"mlx5_0": {"GPU0": "PIX"}}, by the legend's names), ``header``
    (seen), ``links`` ({"GPU0-GPU1": "NV18"}, each pair once, UNKNOWN where no cell tells), ``nvlink`` (all pairs),
    ``worst_link``, ``levels`` (nearest first), ``numa`` ({"0": ["GPU0"]}), ``sockets`` (None = not told),
    ``affinity`` ("ok", "absent": no NUMA node is told, "unparseable": columns are glued), ``pix_pairs``, ``groups``
    and ``oddities``.
    """
    lines = [line for line in split_lines(unquote(strip_ansi(text))) if line.strip()]
    header: list[str] = []
    rows: dict[str, list[str]] = {}
    for line in lines:
        if re.match(r"\s*(?:NIC )?Legend", line):
            break
        names = _AFFINITY_HEAD.split(line)[0].split()
        if not header and all(_NAME.fullmatch(name) for name in names) and any(map(_is_gpu, names[:1])):
            header = names if len(names) > 1 or "Affinity" in line else []
            continue
        name, *words = _WORD.findall(line)
        if words and name not in rows and (name in header or _NAME.fullmatch(name)) and _is_cell(words[0]):
            rows[name] = words
    gpu_rows = [name for name in rows if _is_gpu(name)]
    p2p = kind == "p2p" or (kind is None and _is_p2p(lines, [rows[name] for name in gpu_rows], len(header or gpu_rows)))
    width = len(header) or max([len(gpu_rows), *(_told_width(words, p2p) for words in rows.values())])
    cells = {name: _cells(words[:width], p2p) for name, words in rows.items()}
    columns = header or _columns_without_header(rows, cells)
    gpus = sorted({name for name in [*columns, *gpu_rows] if _is_gpu(name)}, key=_number)
    links, oddities = _pairs(gpu_rows, gpus, columns, cells)
    legend = dict(re.findall(r"^\s*(NIC\d+)\s*[:=]\s*(\S+)", "\n".join(lines), re.MULTILINE))
    nics = list(dict.fromkeys(name for name in [*columns, *rows] if not _is_gpu(name)))
    result: dict[str, Any] = {
        "kind": ("p2p" if p2p else "topo") if gpu_rows else None,
        "gpus": len(gpus),
        "rows": len(gpu_rows),
        "nics": len(nics),
        "nic_links": {legend.get(nic, nic): _links_of(nic, gpu_rows, columns, cells) for nic in nics},
        "header": bool(header),
        "links": links,
        "oddities": oddities,
    }
    result.update(_summary(links, p2p))
    affinity, numa = ("absent", {}) if p2p else _affinity({name: rows[name][len(cells[name]) :] for name in gpu_rows})
    result["affinity"], result["numa"] = affinity, numa
    result["sockets"] = (len(numa) if all(node.isdigit() for node in numa) else 0) or None
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
    unknown = [pair for pair, link in links.items() if link == UNKNOWN]
    if unknown and gpu_rows:
        shown = ", ".join(unknown[:4]) + (" and others" if len(unknown) > 4 else "")
        oddities.append(f"the link of {len(unknown)} of {len(links)} GPU pairs is not told: {shown}")
    return result


def is_matrix(text: str) -> bool:
    """Whether a text holds the row of a GPU in such a matrix."""
    return any(
        _is_gpu(words[0]) and _is_cell(words[1])
        for line in split_lines(unquote(text))
        if len(words := _WORD.findall(line)) > 1
    )


def nic_lines(topology: dict[str, Any]) -> list[str]:
    """Per network card the GPUs that it is nearest to: "NIC mlx5_0: PIX to GPU0"."""
    lines = []
    for nic, links in topology["nic_links"].items():
        nearest = min((link for link in links.values() if link in _PCIE), key=_PCIE.index, default=UNKNOWN)
        members = [gpu for gpu, link in links.items() if link == nearest]
        everyone = "every GPU" if len(members) == len(links) > 1 else ", ".join(members)
        lines.append(f"NIC {nic}: {nearest} to {everyone}" if members else f"NIC {nic}: not told")
    return lines


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"GPU\d+", name) is not None


def _number(name: str) -> int:
    return int(name[3:])


def _is_cell(word: str) -> bool:
    return any(pattern.fullmatch(word) for pattern in (_LINK, _P2P, _NOT_TOLD))


def _told_width(words: list[str], p2p: bool) -> int:
    """Without a header the link cells of a row end with the last one that tells a link: N/A may be an affinity."""
    width = 0
    for position, word in enumerate(words, 1):
        if (_P2P if p2p else _LINK).fullmatch(word):
            width = position
        elif not _NOT_TOLD.fullmatch(word):
            break
    return width


def _cells(words: list[str], p2p: bool) -> list[str]:
    """Link cells of a row up to the first word that is none."""
    pattern = _P2P if p2p else _LINK
    end = next((at for at, word in enumerate(words) if not _is_cell(word)), len(words))
    return [("SYS" if word == "SOC" else word) if pattern.fullmatch(word) else UNKNOWN for word in words[:end]]


def _links_of(nic: str, gpu_rows: list[str], columns: list[str], cells: dict[str, list[str]]) -> dict[str, str]:
    """{GPU: link word} of a network card, from the GPUs' rows or its own."""
    own = dict(zip(columns, cells.get(nic, [])))
    return {gpu: dict(zip(columns, cells[gpu])).get(nic, own.get(gpu, UNKNOWN)) for gpu in gpu_rows}


def _is_p2p(lines: list[str], gpu_rows: list[list[str]], columns: int) -> bool:
    if any(cell in _PCIE or cell.startswith("NV") for row in gpu_rows for cell in row):
        return False
    if any(cell in _P2P_ONLY for row in gpu_rows for cell in row[: columns + 1]):
        return True
    # Nothing but X: topo -m always has affinity columns, and topo -p2p explains OK.
    return any(re.match(r"\s*OK\s*=", line) for line in lines) and not any("Affinity" in line for line in lines)


def _columns_without_header(rows: dict[str, list[str]], cells: dict[str, list[str]]) -> list[str]:
    """Without a header a GPU's own column is where its X stands; one more GPU than rows shows as one more NVLink
    column. Network cards follow."""
    gpu_rows = [name for name in rows if _is_gpu(name)]
    count = 0
    for name in gpu_rows:
        own = cells[name]
        at = own.index("X") if "X" in own else -1
        nvlinks = [position for position, cell in enumerate(own) if cell.startswith("NV")]
        count = max(count, at + 1, (max(nvlinks) + 1) if nvlinks else 0)
    gpus = [f"GPU{number}" for number in range(count)] or gpu_rows
    nics = [name for name in rows if not _is_gpu(name)]
    more = max((len(own) for own in cells.values()), default=0) - len(gpus) - len(nics)
    return [*gpus, *nics, *(f"NIC{len(nics) + number}" for number in range(more))]


def _pairs(
    gpu_rows: list[str], gpus: list[str], columns: list[str], cells: dict[str, list[str]]
) -> tuple[dict[str, str], list[str]]:
    """Every pair of ``gpus`` with its link."""
    told: dict[tuple[str, str], str] = {}
    oddities: list[str] = []
    for row in gpu_rows:
        for column, cell in zip(columns, cells[row]):
            if cell in {"X", UNKNOWN} or row == column or not _is_gpu(column):
                continue
            first, second = sorted((row, column), key=_number)
            if told.setdefault((first, second), cell) != cell:
                oddities.append(f"{first}-{second} reads {told[first, second]} one way and {cell} the other")
    return {"-".join(pair): told.get(pair, UNKNOWN) for pair in combinations(gpus, 2)}, oddities


def _split(links: dict[str, str]) -> dict[tuple[str, str], str]:
    return {(pair.partition("-")[0], pair.partition("-")[2]): link for pair, link in links.items()}


def _summary(links: dict[str, str], p2p: bool) -> dict[str, Any]:
    found = [link for link in links.values() if link != UNKNOWN]
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
        "nvlink": bool(found) and len(nvlinks) == len(links),
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


def _affinity(rest: dict[str, list[str]]) -> tuple[str, dict[str, list[str]]]:
    """What stands behind the link cells of each GPU: its CPUs, then its NUMA nodes where they are told."""
    numa: dict[str, list[str]] = {}
    for name, words in rest.items():
        if _glued(words):
            return "unparseable", {}
        told = [word for word in words if _CPUS.match(word)]
        if len(told) > 1:
            numa.setdefault(told[1], []).append(name)
    return ("ok" if numa else "absent"), numa


def _glued(words: list[str]) -> bool:
    """Whether a column ran into its neighbour: "0-55,112-167 0N/A", "0-7132-3", and "56-111,168-2231" with no node
    behind it, whose ranges are as long as each other once the last digit is off."""
    numbers = [word for word in words if re.search(r"\d", word)]
    if any(not _CPUS.match(word) or _descending(word) for word in numbers):
        return True
    ends = [[int(end) for end in part.split("-")] for part in numbers[0].split(",")] if len(numbers) == 1 else []
    if len(ends) < 2 or any(len(pair) != 2 for pair in ends):
        return False
    length, last = ends[0][1] - ends[0][0], ends[-1]
    return last[1] - last[0] != length and last[1] // 10 - last[0] == length


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
        bad = sorted(set(topology["links"].values()) - {"OK", UNKNOWN})
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
        "NODE": "NCCL_P2P_LEVEL=PHB suffices (NODE is no word of NCCL's, it would be ignored)",
    }.get(worst or "", "no PCIe tuning needed" if topology["nvlink"] else "nothing to do")
    return {"verdict": "accept-with-warning" if warnings else "accept", "warnings": warnings, "remedy": remedy}


def _any_nvlink(topology: dict[str, Any]) -> bool:
    return any(link.startswith("NV") for link in topology["links"].values())
