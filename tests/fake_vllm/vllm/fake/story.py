"""The recorded start of a real engine, laid out over a load time: which line, bar or phase comes when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.fake import release

# Share of a load per phase. Recordings are of a small model, where importing Python takes most of the time; a large one
# spends it on weights, compiling and graphs, and that is the load that a watcher has to be tested on.
SHARES = {
    "start": 0.02,
    "arguments": 0.01,
    "config": 0.05,
    "engine": 0.08,
    "distributed": 0.06,
    "weights": 0.42,
    "postload": 0.03,
    "compile": 0.14,
    "kv_cache": 0.03,
    "graphs": 0.1,
    "warmup": 0.05,
    "api": 0.01,
}
BAR_SHARE = 0.8  # of its phase
GRAPHS = 51
WEIGHTS = "Loading safetensors checkpoint shards"
BLOCKS = " ▏▎▍▌▋▊▉"


@dataclass
class Beat:
    """One thing that happens: `at` seconds after the start.

    `who` and `text` as in record_log.py; `raw` text is written as it stands.
    """

    at: float
    phase: str
    who: str
    text: str
    raw: bool = False
    opens: bool = False  # the first beat of its phase


def clock(seconds: float) -> str:
    """tqdm's mm:ss."""
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def rate(done: int, seconds: float) -> str:
    """tqdm's speed: iterations per second, or seconds per iteration when slower than one."""
    if done == 0 or seconds <= 0:
        return "?it/s"
    per = done / seconds
    return f"{per:5.2f}it/s" if per >= 1 else f"{1 / per:5.2f}s/it"


def shard_lines(total: int, spent: float) -> Iterator[tuple[float, str]]:
    """(share of the bar, text) of a shard bar: each update is a carriage return, the bar and a newline."""
    for done in range(total + 1):
        share = done / total
        left = "?" if done == 0 else clock(spent * (1 - share))
        times = f"[{clock(spent * share)}<{left}, {rate(done, spent * share)}]"
        yield share, f"\r{WEIGHTS}: {100 * share:3.0f}% Completed | {done}/{total} {times}\n"


def graph_updates(name: str, total: int, spent: float) -> Iterator[tuple[float, str]]:
    """(share, text) of a graph bar: updates follow each other by carriage returns on one line; the newline comes at
    the end.
    """
    for done in range(0, total + 1, 3 if total % 3 == 0 else 1):
        share = done / total
        full, part = divmod(int(share * 80), 8)
        bar = ("█" * full + (BLOCKS[part] if full < 10 else "")).ljust(10)
        left = "?" if done == 0 else clock(spent * (1 - share))
        times = f"[{clock(spent * share)}<{left}, {rate(done, spent * share)}]"
        yield share, f"\r{name}: {100 * share:3.0f}%|{bar}| {done}/{total} {times}" + ("\n" if done == total else "")


def read(profile: str) -> list[dict[str, Any]]:
    """The lines of a recording, in order. Raises FileNotFoundError for a profile that is not recorded."""
    file = release.DATA / f"load-{profile}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def profiles() -> list[str]:
    """The recorded profiles."""
    return sorted(file.name[len("load-") : -len(".jsonl")] for file in release.DATA.glob("load-*.jsonl"))


def lay_out(profile: str, load_s: float, shards: int, shard_s: float | None) -> list[Beat]:
    """All beats of a start.

    `shard_s` seconds for each shard stretch the weights phase, and so the load, beyond `load_s`.
    """
    lines = read(profile)
    present = list(dict.fromkeys(line["phase"] for line in lines))
    scale = load_s / sum(SHARES[name] for name in present)
    beats: list[Beat] = []
    begin = 0.0
    for phase in present:
        mine = [line for line in lines if line["phase"] == phase]
        length = SHARES[phase] * scale
        bars = [line for line in mine if line["text"].startswith("{bar:")]
        bar_length = BAR_SHARE * length / len(bars) if bars else 0.0
        if shard_s is not None and any(WEIGHTS in line["text"] for line in bars):
            bar_length = shard_s * shards
            length = bar_length / BAR_SHARE
        gap = (length - bar_length * len(bars)) / len(mine)
        at = begin
        for number, line in enumerate(mine):
            first = number == 0
            if line in bars:
                name = line["text"][len("{bar:") : -1]
                updates = (
                    shard_lines(shards, bar_length) if name == WEIGHTS else graph_updates(name, GRAPHS, bar_length)
                )
                for share, text in updates:
                    beats.append(Beat(at + share * bar_length, phase, line["who"], text, raw=True, opens=first))
                    first = False
                at += bar_length
            else:
                beats.append(Beat(at, phase, line["who"], line["text"], opens=first))
            at += gap
        begin += length
    return beats


def length_of(beats: list[Beat]) -> float:
    """Seconds from the start to the last beat."""
    return beats[-1].at if beats else 0.0
