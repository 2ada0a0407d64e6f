"""The charts of a report, and the words for its figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from markupsafe import Markup

from scripts import charts, report_runs
from scripts.report_runs import Folder
from scripts.verdict_intervals import FLOOR

UNKNOWN = "not measured"
Figure = dict[str, Any]


def ratio(value: float | None, digits: int = 3) -> str:
    """A speed-up."""
    return UNKNOWN if value is None else f"{value:.{digits}f}x"


def interval(cell: Mapping[str, Any] | None) -> str:
    """A speed-up with its interval."""
    if cell is None:
        return UNKNOWN
    bounds = "too few prompts for an interval" if cell["low"] is None else f"{cell['low']:.3f} to {cell['high']:.3f}"
    return f"{cell['value']:.3f}x ({bounds})"


def number(value: float | None, unit: str = "", digits: int = 1, factor: float = 1.0) -> str:
    """A figure with its unit."""
    return UNKNOWN if value is None else f"{value * factor:,.{digits}f}{unit}"


def when(seconds: object) -> str:
    """A time in UTC."""
    try:
        return datetime.fromtimestamp(float(str(seconds)), timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return UNKNOWN


def plain(value: object) -> str:
    """Any value of run.json for a reader."""
    if value in (None, "", [], {}):
        return UNKNOWN
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value):
        return ", ".join(str(item) for item in value)
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def named(arm: str, variant: str) -> str:
    """An arm for a reader."""
    return f"{arm} ({variant})"


def arm_of(load: Mapping[str, Any]) -> str:
    """The arm of a load for a reader."""
    return named(str(load.get("arm", "?")), str(load.get("variant", "?")))


def figure(title: str, caption: str, svg: Markup | None, legend: Markup | str = "") -> Figure:
    """One chart, or what is missing for it."""
    return {"title": title, "caption": caption, "svg": svg, "legend": legend}


def tpot_figure(folder: Folder, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """TPOT by arm with intervals."""
    title = "Time per output token by arm"
    lines = [
        charts.Row(
            named(row["arm"], row["variant"])
            + (f", concurrency {row['concurrency']}" if len(folder.levels) > 1 else ""),
            row["ms_per_token"],
            row["low"],
            row["high"],
            folder.run.arms.index(row["arm"]),
            list(row["by_boot"].values()) if len(row["by_boot"]) > 1 else (),
        )
        for row in rows
        if row["ms_per_token"] is not None
    ]
    if not lines:
        return figure(title, UNKNOWN, None)
    what = "; ".join(f"{line.label} {line.value:.2f} ms" for line in lines)
    return figure(
        title,
        "Geometric mean over prompts with its 95 % interval from prompts and loads; pale marks are single loads. Arms "
        "share their prompts, so the interval of their ratio is narrower than these.",
        charts.rows(title, what, lines, charts.Axis("milliseconds per output token")),
    )


def prompts_figure(result: Mapping[str, Any]) -> Figure:
    """Speed-up per prompt, sorted, coloured by class."""
    title = "Speed-up per prompt"
    found = sorted(result["by_prompt"], key=lambda row: row["speedup"])
    if len(found) < 2:
        return figure(title, UNKNOWN, None)
    kinds = [row["class"] for row in result["classes"]]
    series = [
        charts.Series(
            kind,
            [
                charts.Point(place, row["speedup"], title=f"{row['prompt_id']} ({kind}): {row['speedup']:.3f}x")
                for place, row in enumerate(found, 1)
                if row["class"] == kind
            ],
            tone,
        )
        for tone, kind in enumerate(kinds)
    ]
    d = result["d"]
    what = f"{len(found)} prompts from {found[0]['speedup']:.2f}x to {found[-1]['speedup']:.2f}x"
    svg = charts.plot(
        title,
        what,
        series,
        charts.Axis("prompts, slowest first", [(1, "1"), (len(found), str(len(found)))]),
        charts.Axis("speed-up", log=True),
        mark=1.0,
        band=(1 - d, 1 + d),
    )
    below = sum(row["speedup"] < 1 for row in found)
    return figure(
        title,
        f"{below} of {len(found)} prompts are slower than the base. Within the shaded band (d, {d:.1%}) a difference "
        "is not worth a word.",
        svg,
        charts.legend(series),
    )


def positions_figure(folder: Folder, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Acceptance by position."""
    title = "Acceptance by position"
    series = [
        charts.Series(
            named(row["arm"], row["variant"]),
            [
                charts.Point(place, 100 * share, title=f"position {place}: {share:.0%}")
                for place, share in enumerate(row["by_position"], 1)
            ],
            folder.run.arms.index(row["arm"]),
            joined=True,
        )
        for row in rows
        if row["by_position"] and row["concurrency"] == folder.levels[0]
    ]
    if not series:
        return figure(title, UNKNOWN, None)
    places = range(1, max(len(one.points) for one in series) + 1)
    svg = charts.plot(
        title,
        "; ".join(f"{one.name}: {', '.join(f'{p.y:.0f} %' for p in one.points)}" for one in series),
        series,
        charts.Axis("position of the draft token", [(place, str(place)) for place in places]),
        charts.Axis("% of drafting steps", [(share, str(share)) for share in (0, 25, 50, 75, 100)]),
    )
    return figure(
        title,
        "Share of the steps with a draft in which the draft was accepted up to this position.",
        svg,
        charts.legend(series),
    )


def concurrency_figure(folder: Folder) -> Figure:
    """Gain against concurrency."""
    title = "Speed-up against concurrency"
    arms = list(dict.fromkeys(r["variant"]["arm"] for r in folder.results))
    series = [
        charts.Series(
            named(arm, next(r["variant"]["variant"] for r in folder.results if r["variant"]["arm"] == arm)),
            [
                charts.Point(
                    math.log2(r["concurrency"]),
                    r["speedup"]["value"],
                    r["speedup"]["low"],
                    r["speedup"]["high"],
                    f"concurrency {r['concurrency']}: {interval(r['speedup'])}",
                )
                for r in folder.results
                if r["variant"]["arm"] == arm and r["speedup"]
            ],
            folder.run.arms.index(arm),
            joined=True,
        )
        for arm in arms
    ]
    series = [one for one in series if one.points]
    if len(folder.levels) < 2 or not series:
        return figure(title, f"{UNKNOWN}: one concurrency only", None)
    svg = charts.plot(
        title,
        "; ".join(f"{one.name}: {', '.join(p.title for p in one.points)}" for one in series),
        series,
        charts.Axis("requests at once", [(math.log2(level), str(level)) for level in folder.levels]),
        charts.Axis("speed-up", log=True),
        mark=1.0,
        band=(1 - FLOOR, 1 + FLOOR),
    )
    return figure(
        title,
        "With its 95 % interval. What speculation gains shrinks as the engine fills up.",
        svg,
        charts.legend(series),
    )


def drift_figure(folder: Folder) -> Figure:
    """Drift history of the base."""
    title = "Drift of the base"
    loads = report_runs.drift(folder) if folder.results else []
    if len(loads) < 2:
        return figure(title, f"{UNKNOWN}: one load of the base only", None)
    now = str(folder.about.get("id") or folder.path.name)
    series = [
        charts.Series(
            name,
            [
                charts.Point(
                    place, load.ms_per_token, title=f"{load.run}, boot {load.boot}: {load.ms_per_token:.2f} ms"
                )
                for place, load in enumerate(loads, 1)
                if (load.run == now) is own
            ],
            0 if own else 5,
        )
        for name, own in (("earlier runs", False), ("this run", True))
    ]
    series = [one for one in series if one.points]
    values = [load.ms_per_token for load in loads]
    spread = max(values) / min(values) - 1
    svg = charts.plot(
        title,
        f"{len(loads)} loads from {min(values):.2f} to {max(values):.2f} ms per token",
        series,
        charts.Axis("loads of the base, oldest first", [(1, "1"), (len(loads), str(len(loads)))]),
        charts.Axis("ms per output token"),
    )
    return figure(
        title,
        f"{len(loads)} loads of the same release on the same prompts; they differ by {spread:.1%} at most.",
        svg,
        charts.legend(series),
    )
