"""A prediction's grid as a heat map in SVG: k across, min and max down, a line around what gains."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

CELL, ROW, LEFT, TOP = 92, 34, 120, 64


def colour(speedup: float) -> str:
    """Red below 1, white at 1, green above; full at 0.5 and 2."""
    depth = min(1.0, abs(speedup - 1) / (1.0 if speedup > 1 else 0.5))
    fade = round(255 - 130 * depth)
    return f"rgb({fade},{round(255 - 30 * depth)},{fade})" if speedup >= 1 else f"rgb(255,{fade},{fade})"


def svg(found: Mapping[str, Any]) -> str:
    """The heat map; the break-even line runs between cells whose speed-up lies above and below 1."""
    settings = found["settings"]
    columns = sorted({row["k"] for row in settings})
    rows = sorted({(row["min"], row["max"]) for row in settings})
    cells = {(columns.index(row["k"]), rows.index((row["min"], row["max"]))): row for row in settings}
    width, height = LEFT + CELL * len(columns) + 20, TOP + ROW * len(rows) + 46
    overall = found["overall"]
    fixed = "" if found["fixed_cost"] else ", fixed cost not included"
    title = f"Predicted decode speed-up, semantics {found['semantics']}{fixed}"
    interval = f"({overall['low']:.2f} to {overall['high']:.2f})"
    best = f"worth a reload: {overall['worth']}; best {overall['speedup']:.2f}x {interval}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 560)}" height="{height}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="20" font-weight="bold">{escape(title)}</text>',
        f'<text x="10" y="38">{escape(best)}</text>',
    ]
    for x, k in enumerate(columns):
        parts.append(f'<text x="{LEFT + CELL * x + CELL / 2}" y="{TOP - 8}" text-anchor="middle">k={k}</text>')
    for y, (low, high) in enumerate(rows):
        parts.append(f'<text x="10" y="{TOP + ROW * y + 22}">min={low} max={high}</text>')
    lines = []
    for (x, y), row in sorted(cells.items()):
        left, top = LEFT + CELL * x, TOP + ROW * y
        middle = left + CELL / 2
        parts.append(
            f'<rect x="{left}" y="{top}" width="{CELL}" height="{ROW}" fill="{colour(row["speedup"])}" stroke="#ddd">'
            f"<title>{escape(row['why'])}</title></rect>"
            f'<text x="{middle}" y="{top + 15}" text-anchor="middle">{row["speedup"]:.2f} {row["worth"]}</text>'
            f'<text x="{middle}" y="{top + 29}" text-anchor="middle" font-size="10" fill="#444">'
            f"{row['low']:.2f} to {row['high']:.2f}</text>"
        )
        right, below = cells.get((x + 1, y)), cells.get((x, y + 1))
        gains = row["speedup"] >= 1
        if right is not None and (right["speedup"] >= 1) != gains:
            lines.append(f"M{left + CELL} {top}v{ROW}")
        if below is not None and (below["speedup"] >= 1) != gains:
            lines.append(f"M{left} {top + ROW}h{CELL}")
    if lines:
        parts.append(f'<path d="{"".join(lines)}" stroke="black" stroke-width="3" fill="none"/>')
        note = "thick line: break-even"
    else:
        note = "no break-even line: every setting lies on one side of 1"
    parts.append(f'<text x="10" y="{height - 14}" font-size="11" fill="#444">{note}</text></svg>')
    return "\n".join(parts) + "\n"
