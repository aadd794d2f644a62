"""Charts as SVG text: lines, points and bars. Offline, no program but this one.

Series differ in colour (Okabe and Ito's, told apart by every eye) and in the shape of their marks; their names stand in
a column beside the chart, so that long ones never run into each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from specflow.svg import FONT, GREY, INK, svg_text

__all__ = ["COLOURS", "Axes", "bar_chart", "line_chart", "point_chart"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#6b5b95", "#8c564b")
WIDTH, HEIGHT = 400.0, 240.0  # of the axes
LEFT, TOP, BOTTOM, LEGEND = 58.0, 52.0, 46.0, 230.0
BAR, GAP, NAME, ROOM = 20.0, 12.0, 250.0, 420.0  # bar charts: height, distance, room for names, longest bar
GRID = "#e3e6eb"
TICKS = 5
LONGEST = 32  # characters of a name

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axes:
    """What a chart says of itself."""

    title: str
    x_label: str
    y_label: str = ""
    counts: bool = False  # x is a number of something: no tick stands between two of them


@dataclass(frozen=True, slots=True)
class _Frame:
    """Scales from 0 to the largest value."""

    most_x: float
    most_y: float

    def x(self, value: float) -> float:
        return LEFT + WIDTH * value / self.most_x

    def y(self, value: float) -> float:
        return TOP + HEIGHT * (1.0 - value / self.most_y)


def line_chart(axes: Axes, series: Mapping[str, Points], level: float | None = None) -> str:
    """Lines with marks.

    Args:
        axes: Its words.
        series: Name -> points in the order of the line, at least one each.
        level: A dashed line across, such as plain decoding; None: none.
    """
    frame = _frame([point for points in series.values() for point in points], level, axes.counts)
    parts = [] if level is None else [_dashed((0.0, level), (frame.most_x, level), frame)]
    for number, points in enumerate(series.values()):
        places = " L".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
        parts.append(f'<path d="M{places}" fill="none" stroke="{_colour(number)}" stroke-width="1.8"/>')
        parts += [_mark(number, frame.x(x), frame.y(y)) for x, y in points]
    return _plot(axes, frame, list(series), parts)


def point_chart(axes: Axes, series: Mapping[str, Points], diagonal: bool = False, joined: Points = ()) -> str:
    """Points alone.

    Args:
        axes: Its words.
        series: Name -> points, at least one each.
        diagonal: Draw the line on which both values are equal.
        joined: Corners of a dashed line, such as a front.
    """
    points = [point for group in series.values() for point in group]
    if diagonal:
        most = max(max(point) for point in points)
        points = [*points, (most, most)]
    frame, parts = _frame(points, None), []
    if diagonal:
        end = min(frame.most_x, frame.most_y)
        parts.append(_dashed((0.0, 0.0), (end, end), frame))
    parts += [_dashed(one, other, frame) for one, other in itertools.pairwise(joined)]
    for number, group in enumerate(series.values()):
        parts += [_mark(number, frame.x(x), frame.y(y)) for x, y in group]
    return _plot(axes, frame, list(series), parts)


def bar_chart(axes: Axes, rows: Mapping[str, Sequence[float]], names: Sequence[str] = ()) -> str:
    """Horizontal bars, each a stack of parts.

    Args:
        axes: Its words; x is the value.
        rows: Name -> sizes of the parts, none below 0.
        names: Of the parts; () for bars of one part.
    """
    most = max((sum(parts) for parts in rows.values()), default=0.0) or 1.0
    top = TOP + (24.0 if names else 0.0)
    height = top + len(rows) * (BAR + GAP) + 34.0
    width = NAME + ROOM + 90.0
    drawn = [svg_text((0.0, 18.0), axes.title, 14, INK, bold=True)]
    offset = 0.0
    for number, name in enumerate(names):
        drawn.append(f'<rect x="{offset:.1f}" y="32" width="12" height="12" fill="{_colour(number)}"/>')
        drawn.append(svg_text((offset + 17.0, 42.0), name, 12, INK))
        offset += 34.0 + 7.0 * len(name)
    for number, (name, parts) in enumerate(rows.items()):
        y = top + number * (BAR + GAP)
        drawn.append(svg_text((NAME - 10.0, y + 14.5), _short(name), 12, INK, anchor="end"))
        x = NAME
        for place, size in enumerate(parts):
            long = ROOM * size / most
            box = f'x="{x:.1f}" y="{y:.1f}" width="{max(long, 0.0):.1f}" height="{BAR:.0f}"'
            drawn.append(f'<rect {box} fill="{_colour(place)}"><title>{escape(name)}: {size:.3g}</title></rect>')
            x += long
        drawn.append(svg_text((x + 8.0, y + 14.5), f"{sum(parts):.3g}", 12, GREY))
    drawn.append(svg_text((NAME, height - 10.0), axes.x_label, 12, GREY))
    return _svg(axes.title, (width, height), drawn)


def _plot(axes: Axes, frame: _Frame, names: Sequence[str], parts: Sequence[str]) -> str:
    height = max(TOP + HEIGHT + BOTTOM, TOP + 20.0 * len(names) + 20.0)
    drawn = [svg_text((0.0, 18.0), axes.title, 14, INK, bold=True)]
    for tick in _ticks(frame.most_y):
        y = frame.y(tick)
        drawn.append(f'<path d="M{LEFT:.1f},{y:.1f} h{WIDTH:.1f}" stroke="{GREY if tick == 0 else GRID}"/>')
        drawn.append(svg_text((LEFT - 8.0, y + 4.0), f"{tick:g}", 11, GREY, anchor="end"))
    for tick in _ticks(frame.most_x, 1.0 if axes.counts else 0.0):
        drawn.append(svg_text((frame.x(tick), TOP + HEIGHT + 17.0), f"{tick:g}", 11, GREY, anchor="middle"))
    drawn.append(svg_text((LEFT + WIDTH / 2, TOP + HEIGHT + 36.0), axes.x_label, 12, GREY, anchor="middle"))
    drawn.append(svg_text((LEFT, TOP - 8.0), axes.y_label, 12, GREY))
    drawn += parts
    for number, name in enumerate(names):
        x, y = LEFT + WIDTH + 24.0, TOP + 8.0 + 20.0 * number
        drawn += [_mark(number, x, y), svg_text((x + 12.0, y + 4.0), _short(name), 12, INK)]
    return _svg(axes.title, (LEFT + WIDTH + LEGEND, height), drawn)


def _svg(title: str, size: tuple[float, float], parts: Sequence[str]) -> str:
    width, height = size
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" {box} font-family="{FONT}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])


def _frame(points: Points, level: float | None, counts: bool = False) -> _Frame:
    most_x = max((x for x, _ in points), default=1.0)
    most_y = max([y for _, y in points] + ([] if level is None else [level]), default=1.0)
    return _Frame(_ticks(most_x, 1.0 if counts else 0.0)[-1], _ticks(most_y)[-1])


def _dashed(one: tuple[float, float], other: tuple[float, float], frame: _Frame) -> str:
    places = f"M{frame.x(one[0]):.1f},{frame.y(one[1]):.1f} L{frame.x(other[0]):.1f},{frame.y(other[1]):.1f}"
    return f'<path d="{places}" fill="none" stroke="{GREY}" stroke-width="1.2" stroke-dasharray="5 4"/>'


def _mark(number: int, x: float, y: float) -> str:
    """A circle, a square, a triangle or a diamond."""
    look = f'fill="{_colour(number)}"'
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" {look}/>',
        f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4" {look}/>',
        f'<path d="M{x:.1f},{y - 4.4:.1f} l4.2,7.4 h-8.4 z" {look}/>',
        f'<path d="M{x:.1f},{y - 4.6:.1f} l4.6,4.6 l-4.6,4.6 l-4.6,-4.6 z" {look}/>',
    )
    return shapes[number % len(shapes)]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _ticks(most: float, least: float = 0.0) -> list[float]:
    """Round numbers from 0 to the first that is not below `most`, at least `least` apart."""
    rough = max(most / TICKS, least, 1e-12)
    scale = 10.0 ** floor(log10(rough))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough * (1 - 1e-9))
    return [round(step * number, 12) for number in range(max(1, ceil(most / step - 1e-9)) + 1)]
