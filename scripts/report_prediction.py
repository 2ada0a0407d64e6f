"""Predicted beside measured, where a run folder has a prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import charts, report_runs
from scripts.report_figures import UNKNOWN, Figure, figure, interval, named, ratio
from scripts.report_runs import Folder

# The settings of a prediction's grid, by (k, min, max).
Cells = dict[tuple[int, int, int] | None, dict[str, Any]]


def foretold(cell: object) -> dict[str, float | None] | None:
    """A predicted speed-up {"value", "low", "high"}, None where there is none that can be drawn."""
    if not isinstance(cell, dict):
        return None
    told = {key: cell.get(key) for key in ("speedup", "low", "high")}
    if not all(v is None or (isinstance(v, (int, float)) and math.isfinite(v) and v > 0) for v in told.values()):
        return None
    if told["speedup"] is None:
        return None
    bounds = told["low"] is not None and told["high"] is not None
    return {
        "value": float(told["speedup"]),
        "low": float(told["low"]) if bounds else None,  # type: ignore[arg-type]
        "high": float(told["high"]) if bounds else None,  # type: ignore[arg-type]
    }


def agrees(told: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> str:
    """Whether prediction and measurement allow the same speed-up."""
    if told is None or found is None or told["low"] is None or found["low"] is None:
        return UNKNOWN
    return "yes" if told["low"] <= found["high"] and found["low"] <= told["high"] else "no"


def failed_terms(folder: Folder) -> list[str]:
    """A sentence for each setting that was measured beyond its prediction: which term of the prediction failed."""
    found = []
    for row in (folder.checked or {}).get("settings") or []:
        terms = row.get("failed_terms") if isinstance(row, dict) else None
        if isinstance(terms, list) and terms and not row.get("agree"):
            found.append(f"{row.get('setting')}: {', '.join(map(str, terms))}")
    return found


def _table(told: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object of the prediction, empty where there is none."""
    value = told.get(key)
    return value if isinstance(value, dict) else {}


def _setting(cell: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(k, min, max) of a cell of the grid, None where one of them is no whole number."""
    k, least, most = cell.get("k"), cell.get("min"), cell.get("max")
    return (k, least, most) if type(k) is int and type(least) is int and type(most) is int else None


def predicted_of(folder: Folder) -> dict[str, Any] | None:
    """Predicted beside measured: {"rows", "figures", "worth", "caveats", "arm", "failed"}; None without a prediction.

    The prediction's own overall, classes and prompts are of its best setting. An arm measured with that setting is put
    beside them; else the report's first arm beside what was predicted for its setting, or where nothing was, beside the
    best, and that is said."""
    told, lead = folder.prediction, folder.lead
    if told is None:
        return None
    settings = [one for one in told.get("settings") or [] if isinstance(one, dict)]
    level = folder.levels[0] if folder.levels else 1
    by_setting = {
        report_runs.setting_of(folder, r["variant"]["arm"]): r for r in folder.results if r["concurrency"] == level
    }
    cells: Cells = {key: one for one in settings if (key := _setting(one))}
    best = _setting(_table(told, "best"))
    found = by_setting.get(best) if best else None
    beside = found or lead
    own = cells.get(report_runs.setting_of(folder, lead["variant"]["arm"])) if lead and not found else None
    about = own or {**told, **_table(told, "overall")}
    classes = _table(about, "classes")
    measured = {row["class"]: row["speedup"] for row in beside["classes"]} if beside else {}
    names = list(dict.fromkeys([*measured, *(str(name) for name in classes)]))
    pairs = [("all prompts", foretold(about), beside["speedup"] if beside else None)]
    pairs += [(name, foretold(classes.get(name)), measured.get(name)) for name in names]
    rows = [[name, interval(a), interval(b), agrees(a, b)] for name, a, b in pairs]
    figures = []
    prompts = _table(about, "prompts")
    dots = [
        charts.Point(
            guess["value"] or 1.0,
            row["speedup"],
            title=f"{row['prompt_id']}: predicted {guess['value']:.2f}x, measured {row['speedup']:.2f}x",
        )
        for row in (beside["by_prompt"] if beside else [])
        if (guess := foretold(prompts.get(row["prompt_id"])))
    ]
    if len(dots) > 1:
        title = "Predicted and measured, prompt by prompt"
        ends = [min(min(p.x, p.y) for p in dots), max(max(p.x, p.y) for p in dots)]
        right = sum((p.x > 1) == (p.y > 1) for p in dots)
        svg = charts.plot(
            title,
            f"{len(dots)} prompts, {right} with the right sign",
            [
                charts.Series("equal", [charts.Point(end, end) for end in ends], 6, joined=True),
                charts.Series("prompts", dots, 0),
            ],
            charts.Axis("predicted speed-up", log=True),
            charts.Axis("measured speed-up", log=True),
            mark=1.0,
        )
        figures.append(figure(title, f"On the line both agree; the direction is right on {right} of {len(dots)}.", svg))
    grid = heat_figure(cells, by_setting)
    figures += [grid] if grid else []
    caveats = [str(text) for text in told.get("caveats") or []] if isinstance(told.get("caveats"), list) else []
    if beside and best and not found and not own:
        caveats.append("predicted for k={} min={} max={}, which is not what this arm was measured with".format(*best))
    arm = named(beside["variant"]["arm"], beside["variant"]["variant"]) if beside else UNKNOWN
    failed = "; ".join(failed_terms(folder))
    if not failed and rows[0][-1] == "no":
        failed = "not known here: a trial beside the prediction's own folder, or scripts/predict.py check, tells"
    worth = ": ".join(str(about[name]) for name in ("worth", "why") if about.get(name))
    return {"worth": worth, "rows": rows, "figures": figures, "caveats": caveats, "arm": arm, "failed": failed}


def heat_figure(grid: Cells, measured: Mapping[Any, Mapping[str, Any]]) -> Figure | None:
    """The predicted grid, with what was measured in each cell; None without a grid."""
    found = {key: (cell, one.get("worth")) for key, one in grid.items() if key and (cell := foretold(one))}
    if len(found) < 2:
        return None
    ks = sorted({k for k, _, _ in found})
    spans = sorted({(low, high) for _, low, high in found})
    cells = []
    for span in spans:
        row: list[tuple[float | None, Sequence[str]]] = []
        for k in ks:
            cell, worth = found.get((k, *span), (None, None))
            result = measured.get((k, *span))
            real = result["speedup"]["value"] if result and result["speedup"] else None
            texts = ([ratio(cell["value"], 2)] if cell else []) + ([f"[{ratio(real, 2)}]"] if real else [])
            row.append((cell["value"] if cell else None, [*texts, *([str(worth)] if worth else [])]))
        cells.append(row)
    title = "Predicted speed-up of the grid"
    what = "; ".join(f"k={k} min={low} max={high} {cell['value']:.2f}x" for (k, low, high), (cell, _) in found.items())
    svg = charts.heat(title, what, [f"k = {k}" for k in ks], [f"{low} to {high}" for low, high in spans], cells)
    return figure(
        title,
        "Draft tokens (k) across, n-gram lengths (min to max) down. In brackets what was measured, below it whether it "
        "is worth a try. The best of a grid is an optimistic figure.",
        svg,
    )
