"""Charts as inline SVG: points with intervals, rows with intervals, a heat map. Colours come from the page's style.

Every text goes through Markup.format, which escapes it. A chart has a width of 420 units, so that it can be read on a
phone without being scaled down; colour never tells alone what a shape or a text does not tell too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH = 420
TONES = 7
RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
SHAPES = (
    "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z",
    "M-3.2-3.2h6.4v6.4h-6.4z",
    "M0-4.2L4.2 3.2H-4.2z",
    "M0-4.6L4.6 0L0 4.6L-4.6 0z",
    "M0 4.2L4.2-3.2H-4.2z",
    "M-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
    "M-4.4-1.6h8.8v3.2h-8.8z",
)


@dataclass(frozen=True)
class Point:
    """A value at `x`, with its interval where it has one. `title` is what a pointer over it says."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    title: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one colour and shape."""

    name: str
    points: Sequence[Point]
    tone: int = 0
    joined: bool = False


@dataclass(frozen=True)
class Row:
    """A value with its interval on a line of its own; `dots` are single measurements beside it."""

    label: str
    value: float
    low: float | None
    high: float | None
    tone: int = 0
    dots: Sequence[float] = ()


@dataclass(frozen=True)
class Axis:
    """What is along an axis. `ticks` None: chosen, else all are shown; `log` for ratios, whose ticks end in x."""

    label: str
    ticks: Sequence[tuple[float, str]] | None = None
    log: bool = False


class Scale:
    """Values to coordinates."""

    def __init__(self, values: Sequence[float], axis: Axis, first: float, last: float) -> None:
        self.log, self.first, self.last = axis.log, first, last
        values = [*values, *(value for value, _ in axis.ticks or ())]
        low, high = min(values), max(values)
        if self.log:
            low, high = math.log(low), math.log(high)
        pad = (high - low) * 0.06 or abs(high) * 0.05 or 0.05
        self.low, self.high = low - pad, high + pad
        self.ticks = list(axis.ticks) if axis.ticks is not None else self._ticks()

    def __call__(self, value: float) -> float:
        """Coordinate of a value."""
        share = ((math.log(value) if self.log else value) - self.low) / (self.high - self.low)
        return round(self.first + share * (self.last - self.first), 1)

    def _ticks(self) -> list[tuple[float, str]]:
        if self.log:
            inside = [ratio for ratio in RATIOS if self.low <= math.log(ratio) <= self.high]
            if len(inside) >= 2:
                every = math.ceil(len(inside) / 7)
                start = inside.index(1.0) % every if 1.0 in inside else 0
                return [(ratio, f"{ratio:g}x") for ratio in inside[start::every]]
            low, high, ends = math.exp(self.low), math.exp(self.high), "x"
        else:
            low, high, ends = self.low, self.high, ""
        rough = (high - low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        digits = max(0, -math.floor(math.log10(step)))
        values = [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [(value, f"{value:.{digits}f}{ends}") for value in values]


def _svg(title: str, what: str, height: float, parts: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title><desc>{}</desc>{}</svg>'
    ).format(WIDTH, round(height), f"{title}. {what}", title, what, Markup("").join(parts))


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(kind, x1, y1, x2, y2)


def _text(text: object, x: float, y: float, kind: str = "", anchor: str = "middle") -> Markup:
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, text)


def _shape(tone: int, x: float, y: float, title: str = "", kind: str = "") -> Markup:
    hint = Markup("<title>{}</title>").format(title) if title else ""
    return Markup('<path class="mark c{} {}" transform="translate({} {})" d="{}">{}</path>').format(
        tone % TONES, kind, x, y, SHAPES[tone % len(SHAPES)], hint
    )


def legend(series: Sequence[Series | Row]) -> Markup:
    """Shapes and names, as a list."""
    items = [
        Markup('<li><svg viewBox="-6 -6 12 12" aria-hidden="true">{}</svg>{}</li>').format(
            _shape(item.tone, 0, 0), item.name if isinstance(item, Series) else item.label
        )
        for item in series
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


def plot(
    title: str,
    what: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    mark: float | None = None,
    band: tuple[float, float] | None = None,
) -> Markup:
    """Points over two axes. `mark`: a line across at this value; `band`: a shaded range. `what` says it in words."""
    left, right, top, bottom = 48, WIDTH - 12, 20, 226
    points = [point for one in series for point in one.points]
    bounds = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    across = Scale([p.x for p in points], x, left + 4, right - 4)
    up = Scale([*bounds, *(band or ()), *([] if mark is None else [mark])], y, bottom, top)
    parts = []
    if band:
        high, low = up(band[1]), up(band[0])
        parts.append(
            Markup('<rect class="band" x="{}" y="{}" width="{}" height="{}"/>').format(
                left, high, right - left, round(low - high, 1)
            )
        )
    for value, label in up.ticks:
        parts += [_line("grid", left, up(value), right, up(value)), _text(label, left - 5, up(value) + 3.5, "", "end")]
    parts += [_text(label, across(value), bottom + 15) for value, label in across.ticks]
    if mark is not None:
        parts.append(_line("rule", left, up(mark), right, up(mark)))
    for one in series:
        if one.joined and len(one.points) > 1:
            path = "M" + "L".join(f"{across(p.x)} {up(p.y)}" for p in one.points)
            parts.append(Markup('<path class="join c{}" d="{}"/>').format(one.tone % TONES, path))
        for p in one.points:
            if p.low is not None and p.high is not None:
                parts.append(_line(f"bar c{one.tone % TONES}", across(p.x), up(p.low), across(p.x), up(p.high)))
            parts.append(_shape(one.tone, across(p.x), up(p.y), p.title))
    parts.append(_text(x.label, (left + right) / 2, bottom + 31, "label"))
    parts.append(_text(y.label, 2, 11, "label", "start"))
    return _svg(title, what, bottom + 38, parts)


def rows(
    title: str,
    what: str,
    lines: Sequence[Row],
    axis: Axis,
    mark: float | None = None,
    band: tuple[float, float] | None = None,
) -> Markup:
    """A value with its interval a line, the label above it."""
    left, right, each = 8, WIDTH - 12, 38
    bottom = 10 + each * len(lines)
    bounds = [v for row in lines for v in (row.value, row.low, row.high, *row.dots) if v is not None]
    across = Scale([*bounds, *(band or ()), *([] if mark is None else [mark])], axis, left + 4, right - 4)
    parts = []
    if band:
        low, high = across(band[0]), across(band[1])
        parts.append(
            Markup('<rect class="band" x="{}" y="4" width="{}" height="{}"/>').format(
                low, round(high - low, 1), bottom - 4
            )
        )
    for value, label in across.ticks:
        parts += [_line("grid", across(value), 4, across(value), bottom), _text(label, across(value), bottom + 15)]
    if mark is not None:
        parts.append(_line("rule", across(mark), 4, across(mark), bottom))
    for number, row in enumerate(lines):
        y = 10 + each * number + 26
        shown = row.label if len(row.label) <= 64 else row.label[:63] + "…"
        parts.append(_text(shown, left, y - 13, "name halo", "start"))
        if row.low is not None and row.high is not None:
            parts.append(_line(f"bar c{row.tone % TONES}", across(row.low), y, across(row.high), y))
        parts += [_shape(row.tone, across(dot), y, f"{dot:.3g}", "faint") for dot in row.dots]
        parts.append(_shape(row.tone, across(row.value), y, f"{row.label}: {row.value:.3g}"))
    parts.append(_text(axis.label, (left + right) / 2, bottom + 31, "label"))
    return _svg(title, what, bottom + 38, parts)


def heat(
    title: str,
    what: str,
    columns: Sequence[str],
    names: Sequence[str],
    cells: Sequence[Sequence[tuple[float | None, Sequence[str]]]],
) -> Markup:
    """A table of ratios, (value, lines of text) a cell: the further from 1, the darker, below 1 in another colour."""
    left, top, each = 74, 22, 54
    width = (WIDTH - left - 8) / max(len(columns), 1)
    parts = [_text(name, round(left + width * (i + 0.5), 1), 14, "name") for i, name in enumerate(columns)]
    for j, (name, row) in enumerate(zip(names, cells, strict=True)):
        y = top + each * j
        parts.append(_text(name, left - 8, y + each / 2 + 3, "name", "end"))
        for i, (value, texts) in enumerate(row):
            x = round(left + width * i, 1)
            depth = 0.0 if value is None or value <= 0 else min(abs(math.log(value)) / math.log(2), 1) * 0.5
            parts.append(
                Markup(
                    '<rect class="cell {}" x="{}" y="{}" width="{}" height="{}" rx="4" fill-opacity="{:.2f}"/>'
                ).format("gain" if (value or 1) >= 1 else "loss", x + 2, y + 2, round(width - 4, 1), each - 4, depth)
            )
            for line, text in enumerate(texts):
                middle = y + each / 2 + 4 + 15 * (line - (len(texts) - 1) / 2)
                parts.append(_text(text, round(x + width / 2, 1), round(middle, 1), "name" if line == 0 else ""))
    return _svg(title, what, top + each * len(names) + 6, parts)
