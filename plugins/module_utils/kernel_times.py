"""Where the time of decode steps goes: kernels of a torch profiler's trace, summed by kind.

With a GPU its kernels are counted. On a CPU the operators are, each without what it calls; what an attention, MoE or
all-reduce operator calls belongs to it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

JsonDict = dict[str, Any]

ALL_REDUCE, GEMM, MOE, ATTENTION, OTHER = KINDS = ("all-reduce", "GEMM", "MoE", "attention", "other")
# The first that matches decides: a grouped GEMM of experts is MoE, a fused all-reduce is communication.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (
            ALL_REDUCE,
            r"nccl|all_?reduce|cross_device_reduce|(?:one|two)_?shot|multimem|all_?gather|reduce_?scatter|all_?to_?all",
        ),
        (MOE, r"moe|expert|grouped_?gemm|group_?gemm|topk_?(?:softmax|sigmoid|gating)|grouped_topk"),
        (
            ATTENTION,
            r"attention|attn|flash|fmha|paged|mla(?![a-z])|reshape_and_cache|concat_and_cache|kv_?cache|BatchDecode|BatchPrefill",
        ),
        (
            GEMM,
            r"gemm|gemv|cutlass|cublas|nvjet|marlin|machete|splitK|wgmma|matmul|scaled_mm|onednn_mm|aten::(?:mm|addmm|bmm)"
            r"|aten::(?:linear|_addmm_activation)|weight_packed_linear",
        ),
    )
)
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CPU = ("cpu_op",)
# How vLLM marks a step of its worker; absent in old releases.
_STEP = re.compile(r"^execute_")


class TraceError(ValueError):
    """A file that is no trace of the torch profiler; the text says which and what was found."""


def kind(name: str) -> str:
    """The KIND of a kernel or operator, by its name."""
    return next((found for found, pattern in _PATTERNS if pattern.search(name)), OTHER)


def read(path: str | Path) -> list[JsonDict]:
    """The events of a trace file, gzipped or not. Raises TraceError, OSError."""
    raw = Path(path).read_bytes()
    try:
        found = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = found["traceEvents"] if isinstance(found, dict) else found
        return [event for event in events if isinstance(event, dict)]
    except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
        raise TraceError(f"{path}: expected a Chrome trace of the torch profiler, found: {error}") from error


def _timed(events: Iterable[Mapping[str, Any]], categories: Sequence[str]) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("ph") == "X" and event.get("cat") in categories and "dur" in event]


def _own_times(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, float]]:
    """(kind, name, own microseconds) of nested operators: a caller's time is without that of what it calls."""
    threads: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for event in events:
        threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    found: list[tuple[str, str, float]] = []
    for thread in threads.values():
        open_: list[list[Any]] = []  # end, own time, name, kind
        for event in sorted(thread, key=lambda one: (float(one["ts"]), -float(one["dur"]))):
            start, length = float(event["ts"]), float(event["dur"])
            while open_ and open_[-1][0] <= start:
                found.append((open_[-1][3], open_[-1][2], open_.pop()[1]))
            mine = kind(event["name"])
            if open_:
                open_[-1][1] -= length
                # What attention copies and adds is attention's.
                if open_[-1][3] in (ATTENTION, MOE, ALL_REDUCE):
                    mine = open_[-1][3]
            open_.append([start + length, length, event["name"], mine])
        while open_:
            found.append((open_[-1][3], open_[-1][2], open_.pop()[1]))
    return found


def _covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """Microseconds that at least one of these (start, end) covers."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def shares(events: Sequence[Mapping[str, Any]], most_names: int = 4) -> JsonDict:
    """Time by kind of one rank's trace.

    {"device": "gpu" | "cpu", "steps": count | null (the trace marks none), "seconds": kernel time,
     "span_s": first start to last end, "busy_share": of the span with a kernel running,
     "kinds": {KIND: {"seconds", "share", "calls", "names": [{"name", "seconds", "calls"}]}},
     "collectives": [name, microseconds] of each all-reduce kernel, in their order}
    Raises TraceError when the trace holds no kernel and no operator.
    """
    kernels = _timed(events, _GPU)
    timed = kernels or _timed(events, _CPU)
    if not timed:
        raise TraceError("no kernel and no operator in the trace. Was a request running while the profiler was on?")
    rows = [(kind(one["name"]), one["name"], float(one["dur"])) for one in kernels] if kernels else _own_times(timed)
    whole = sum(length for _, _, length in rows) or 1.0
    spans = [(float(one["ts"]), float(one["ts"]) + float(one["dur"])) for one in timed]
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    kinds: JsonDict = {}
    for wanted in KINDS:
        names: dict[str, list[float]] = {}
        for found, name, length in rows:
            if found == wanted:
                names.setdefault(name, []).append(length)
        seconds = sum(sum(lengths) for lengths in names.values())
        longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:most_names]
        kinds[wanted] = {
            "seconds": seconds / 1e6,
            "share": seconds / whole,
            "calls": sum(len(lengths) for lengths in names.values()),
            "names": [{"name": name, "seconds": sum(one) / 1e6, "calls": len(one)} for name, one in longest],
        }
    steps = sum(1 for one in _timed(events, ("user_annotation",)) if _STEP.match(one["name"]))
    return {
        "device": "gpu" if kernels else "cpu",
        "steps": steps or None,
        "seconds": whole / 1e6,
        "span_s": span / 1e6,
        "busy_share": _covered_us(spans) / span if span else 1.0,
        "kinds": kinds,
        "collectives": [
            [one["name"], float(one["dur"])] for one in sorted(kernels, key=_start) if kind(one["name"]) == ALL_REDUCE
        ],
    }


def _start(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def combine(ranks: Sequence[JsonDict]) -> JsonDict:
    """Several ranks' `shares` as one: times added, and under "ranks" the shares of each.

    "waiting_s": how much of the all-reduce time was spent waiting for another rank, since the last one to come to a
    collective waits for nobody. The traces must hold the same calls, from the same step on; null for one rank, or where
    number or names of the calls differ.
    """
    calls = [rank["collectives"] for rank in ranks]
    matched = len(calls) > 1 and bool(calls[0]) and len({tuple(name for name, _ in one) for one in calls}) == 1
    spent = [[length for _, length in together] for together in zip(*calls)]
    waiting = sum(sum(one) - len(one) * min(one) for one in spent) / 1e6 if matched else None
    whole = sum(rank["seconds"] for rank in ranks)
    kinds: JsonDict = {}
    for name in KINDS:
        parts = [rank["kinds"][name] for rank in ranks]
        seconds = sum(part["seconds"] for part in parts)
        names: dict[str, JsonDict] = {}
        for item in (item for part in parts for item in part["names"]):
            sum_ = names.setdefault(item["name"], {"name": item["name"], "seconds": 0.0, "calls": 0})
            sum_["seconds"] += item["seconds"]
            sum_["calls"] += item["calls"]
        kinds[name] = {
            "seconds": seconds,
            "share": seconds / whole,
            "calls": sum(part["calls"] for part in parts),
            "names": sorted(names.values(), key=lambda item: -float(item["seconds"]))[:4],
        }
    return {
        "device": ranks[0]["device"],
        "steps": ranks[0]["steps"],
        "seconds": whole,
        "span_s": max(rank["span_s"] for rank in ranks),
        "busy_share": sum(rank["busy_share"] for rank in ranks) / len(ranks),
        "kinds": kinds,
        "waiting_s": waiting,
        "ranks": [{name: rank["kinds"][name]["share"] for name in KINDS} for rank in ranks],
    }


def table(report: Mapping[str, Any]) -> list[str]:
    """A combined report for people, the largest share first."""
    steps = "" if report["steps"] is None else f" of {report['steps']} steps"
    lines = [
        "{:.1f} ms of {} time{} on {} rank{}, {:.0f} % of {:.1f} ms busy".format(
            report["seconds"] * 1e3,
            "kernel" if report["device"] == "gpu" else "operator",
            steps,
            len(report["ranks"]),
            "" if len(report["ranks"]) == 1 else "s",
            report["busy_share"] * 100,
            report["span_s"] * 1e3,
        )
    ]
    for name, item in sorted(report["kinds"].items(), key=lambda pair: -float(pair[1]["seconds"])):
        if not item["calls"]:
            continue
        spread = [rank[name] * 100 for rank in report["ranks"]]
        between = f" ({min(spread):.1f} to {max(spread):.1f} by rank)" if len(spread) > 1 else ""
        lines.append(
            f"{name:>10} {item['share'] * 100:5.1f} %{between} {item['seconds'] * 1e3:10.2f} ms {item['calls']:7} x  "
            + ", ".join(one["name"][:60] for one in item["names"][:2])
        )
    if report.get("waiting_s"):
        lines.append(
            "of the all-reduce time {:.0f} % is waiting for the slower rank, which no faster link shortens".format(
                100 * report["waiting_s"] / report["kinds"][ALL_REDUCE]["seconds"]
            )
        )
    return lines


_COLOURS = {ALL_REDUCE: "#c0392b", GEMM: "#2c6fbb", MOE: "#8e5ea2", ATTENTION: "#3c9d4e", OTHER: "#8a8a8a"}


def chart(report: Mapping[str, Any], title: str) -> str:
    """The shares as an SVG of horizontal bars."""
    rows = sorted(report["kinds"].items(), key=lambda pair: -float(pair[1]["seconds"]))
    height = 34 + 26 * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}" viewBox="0 0 640 {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<text x="8" y="20" font-weight="bold">{_escape(title)}</text>',
    ]
    for number, (name, item) in enumerate(rows):
        y = 34 + 26 * number
        width = max(1.0, 400 * item["share"])
        parts += [
            f'<text x="96" y="{y + 15}" text-anchor="end">{_escape(name)}</text>',
            f'<rect x="104" y="{y}" width="{width:.1f}" height="20" fill="{_COLOURS[name]}"/>',
            f'<text x="{110 + width:.1f}" y="{y + 15}">{item["share"] * 100:.1f} %</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
