"""Drift history: what the baseline measured in earlier loads, and the spread between loads that this shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.json_files import InputError
from scripts.verdict_intervals import BootSpread
from scripts.verdict_runs import json_lines, seconds_of, text_of

# Loads are compared with each other only where all of this is the same.
SAME = ("host", "model", "variant", "release", "engine_version", "prompts_sha256", "cache", "concurrency")
ENOUGH = 8  # degrees of freedom from which a host's own figure replaces the public one


@dataclass(frozen=True)
class BaseLoad:
    """One load of a baseline. `ms_per_token`: geometric mean over the prompts; `started_unix` None: unknown."""

    same: tuple[object, ...]
    run: str
    boot: int
    started_unix: float | None
    ms_per_token: float


def read_history(lines: Iterable[bytes], name: str, without: str | None = None) -> list[BaseLoad]:
    """Earlier loads, one JSON object a line: {"run", "boot", "ms_per_token", "started_unix" and those of SAME}.

    `without`: the run whose own loads must not count twice. Raises InputError.
    """
    loads = []
    seen: dict[tuple[object, ...], str] = {}
    for where, line in json_lines(lines, name):
        same = tuple(line.get(key) for key in SAME)
        load = BaseLoad(
            same=same,
            run=text_of(line, "run", where),
            boot=int(line["boot"]) if isinstance(line.get("boot"), int) else 0,
            started_unix=None if line.get("started_unix") is None else seconds_of(line, "started_unix", where, True),
            ms_per_token=seconds_of(line, "ms_per_token", where, True),
        )
        key = (load.run, load.boot, line.get("concurrency"))
        if key in seen:
            raise InputError(
                f"{where}: run {load.run}, boot {load.boot}: found twice, first at {seen[key]}; expected once: "
                "the same load counted twice would make the host look quieter; remove a line"
            )
        seen[key] = where
        if load.run != without:
            loads.append(load)
    hosts = sorted({str(load.same[0]) for load in loads})
    if len(hosts) > 1:
        raise InputError(f"{name}: found loads of {', '.join(hosts)}, expected those of one host")
    return loads


def spread_of(loads: Sequence[BaseLoad]) -> BootSpread:
    """Spread from load to load within each group of like loads.

    With fewer than ENOUGH degrees of freedom it is pooled with the public figure, as if that came from 8.
    """
    groups: dict[tuple[object, ...], list[float]] = {}
    for load in loads:
        groups.setdefault(load.same, []).append(math.log(load.ms_per_token))
    squares, df = 0.0, 0
    for values in groups.values():
        mean = sum(values) / len(values)
        squares += sum((value - mean) ** 2 for value in values)
        df += len(values) - 1
    if df < ENOUGH:
        public = BootSpread()
        squares, df = squares + public.sd**2 * public.df, df + public.df
    return BootSpread(math.sqrt(squares / df), df)


def base_loads(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A run's own loads of the base, in the shape of the history. `about`: its run.json; `results`: its verdicts."""
    known = {load.get("boot"): load for load in about.get("loads", [])}
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    for result in results:
        for row in result["boots"]:
            load = known.get(row["boot"], {})
            if row["arm"] == result["base"]["arm"]:
                lines[result["concurrency"], row["boot"]] = {
                    "run": about.get("id"),
                    "boot": row["boot"],
                    "started_unix": load.get("started_unix"),
                    "ms_per_token": row["ms_per_token"],
                    "host": about.get("host"),
                    "model": about.get("model"),
                    "variant": result["base"]["variant"],
                    "release": load.get("release"),
                    "engine_version": load.get("engine_version"),
                    "prompts_sha256": (about.get("prompts") or {}).get("sha256"),
                    "cache": (about.get("settings") or {}).get("cache"),
                    "concurrency": result["concurrency"],
                }
    return list(lines.values())
