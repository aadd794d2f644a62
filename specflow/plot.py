"""Draws a cost model, or lines of one's own, as SVG, with no program but this one.

Of a cost model, a panel a batch size shows the target pass by rows, one line a context; and one panel the parts of a
round by draft depth. Lines are what the model reads, marks are medians with the middle half of their repeats, hollow
where these spread too wide. Lines differ in colour (Okabe and Ito's, told apart by every eye) and in the shape of
their marks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from specflow.cost import CostModel, Timing
from specflow.svg import FONT, GREY, INK, svg_text

__all__ = ["draw_lines", "draw_profile"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
WIDTH, HEIGHT = 430.0, 270.0  # of a panel's axes
LEFT, TOP, GAP, MARGIN = 52.0, 104.0, 44.0, 28.0
TICKS = 5
GRID = "#e3e6eb"


@dataclass(frozen=True, slots=True)
class _Series:
    """A line, and the measured points it was fitted to. x is rows or depth, y milliseconds."""

    label: str
    line: Sequence[tuple[float, float]]
    marks: Sequence[Timing] = ()
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    x_label: str
    series: list[_Series]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where a panel stands, and its scales."""

    left: float
    most_x: float
    most_y: float

    def x(self, value: float) -> float:
        return self.left + WIDTH * value / self.most_x

    def y(self, value: float) -> float:
        return TOP + HEIGHT * (1.0 - value / self.most_y)


def draw_profile(model: CostModel, title: str, caption: str = "") -> str:
    """The picture as text of an SVG file.

    Args:
        model: What to draw.
        title: First line.
        caption: Second line, such as the machine.
    """
    panels = [_target_panel(model, batch) for batch in sorted({timing.batch for timing in model.target})]
    if model.draft:
        panels.append(_round_panel(model))
    note = "marks: median and middle half of the repeats; hollow: spread too wide to trust; lines: the cost model"
    return _page(panels, title, caption, note)


def draw_lines(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], x_label: str, title: str, caption: str = ""
) -> str:
    """Lines in panels beside each other, as text of an SVG file.

    Args:
        panels: Title of a panel -> label of a line -> its points, at least one each.
        x_label: What all panels have below.
        title: First line.
        caption: Second line.
    """
    made = [
        _Panel(name, x_label, [_Series(label, points) for label, points in lines.items()])
        for name, lines in panels.items()
    ]
    return _page(made, title, caption)


def _page(panels: Sequence[_Panel], title: str, caption: str, note: str = "") -> str:
    width = 2 * MARGIN + len(panels) * (LEFT + WIDTH) + (len(panels) - 1) * GAP
    height = TOP + HEIGHT + 68.0
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        svg_text((MARGIN, 30.0), title, 17, INK, bold=True),
        svg_text((MARGIN, 49.0), caption, 12, GREY),
    ]
    for number, panel in enumerate(panels):
        parts.append(_panel(panel, MARGIN + LEFT + number * (LEFT + WIDTH + GAP)))
    parts.append(svg_text((MARGIN, height - 12.0), note, 12, GREY))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _target_panel(model: CostModel, batch: int) -> _Panel:
    timings = [timing for timing in model.target if timing.batch == batch]
    series = []
    for context in sorted({timing.context for timing in timings}):
        marks = [timing for timing in timings if timing.context == context]
        line = [(timing.size, 1e3 * model.target_s(timing.size, batch, context)) for timing in marks]
        series.append(_Series(f"context {context}", line, marks))
    return _Panel(f"target pass, ms, batch {batch}", "rows of each request", series)


def _round_panel(model: CostModel) -> _Panel:
    """At the smallest batch and the shortest context."""
    batch, context = min((timing.batch, timing.context) for timing in model.draft)
    marks = [timing for timing in model.draft if (timing.batch, timing.context) == (batch, context)]
    depths = [0, *(timing.size for timing in marks)]

    def line(seconds: Callable[[int], float]) -> list[tuple[int, float]]:
        return [(depth, 1e3 * seconds(depth)) for depth in depths]

    plain = model.round_s(0, batch, context)
    series = [
        _Series("round", line(lambda depth: model.round_s(depth, batch, context))),
        _Series("target pass", line(lambda depth: model.verify_s(depth, batch, context))),
        _Series("draft", line(lambda depth: model.draft_s(depth, batch, context)), marks),
        _Series("overhead", line(lambda depth: model.overhead_s(depth, batch))),
        _Series("plain step", [(0, 1e3 * plain), (depths[-1], 1e3 * plain)], dashed=True),
    ]
    return _Panel(f"parts of a round, ms, batch {batch}, context {context}", "draft depth", series)


def _panel(panel: _Panel, left: float) -> str:
    points = [point for series in panel.series for point in series.line]
    tops = [1e3 * timing.seconds.p75 for series in panel.series for timing in series.marks]
    most_x = max(max(x for x, _ in points), 1.0)
    ticks = _ticks(max([y for _, y in points] + tops) or 1.0)
    frame = _Frame(left, most_x, ticks[-1])
    parts = [svg_text((left - LEFT, TOP - 32.0), panel.title, 13, INK, bold=True)]
    parts += [_grid_line(frame, tick) for tick in ticks]
    whole = [tick for tick in _ticks(most_x) if tick <= most_x and tick == int(tick)]
    parts += [svg_text((frame.x(tick), TOP + HEIGHT + 17.0), f"{tick:g}", 11, GREY, anchor="middle") for tick in whole]
    parts.append(svg_text((left + WIDTH / 2, TOP + HEIGHT + 34.0), panel.x_label, 12, GREY, anchor="middle"))
    offset = 0.0
    for number, series in enumerate(panel.series):
        parts.append(_legend(series, number, (left - LEFT + offset, TOP - 14.0)))
        offset += 30.0 + 6.6 * len(series.label)
        parts.append(_series(series, number, frame))
    return "\n".join(parts)


def _grid_line(frame: _Frame, tick: float) -> str:
    y = frame.y(tick)
    line = f'<path d="M{frame.left:.1f},{y:.1f} h{WIDTH:.1f}" stroke="{GREY if tick == 0 else GRID}"/>'
    return line + svg_text((frame.left - 8.0, y + 4.0), f"{tick:g}", 11, GREY, anchor="end")


def _legend(series: _Series, number: int, at: tuple[float, float]) -> str:
    x, y = at
    colour = _colour(series, number)
    stroke = _stroke(series, colour)
    line = f'<path d="M{x:.1f},{y - 4:.1f} h18" {stroke}/>'
    mark = _mark(number, (x + 9.0, y - 4.0), colour, True) if series.marks else ""
    return line + mark + svg_text((x + 22.0, y), series.label, 12, INK)


def _series(series: _Series, number: int, frame: _Frame) -> str:
    colour = _colour(series, number)
    places = " L".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in series.line)
    parts = [f'<path d="M{places}" fill="none" {_stroke(series, colour)}/>']
    for timing in series.marks:
        x, low, high = frame.x(timing.size), frame.y(1e3 * timing.seconds.p25), frame.y(1e3 * timing.seconds.p75)
        parts.append(f'<path d="M{x:.1f},{low:.1f} V{high:.1f}" stroke="{colour}" stroke-width="1.2"/>')
        parts.append(_mark(number, (x, frame.y(1e3 * timing.seconds.median)), colour, timing.trusted))
    return "".join(parts)


def _colour(series: _Series, number: int) -> str:
    return GREY if series.dashed else COLOURS[number % len(COLOURS)]


def _stroke(series: _Series, colour: str) -> str:
    return f'stroke="{colour}" stroke-width="1.8"' + (' stroke-dasharray="5 4"' if series.dashed else "")


def _mark(number: int, at: tuple[float, float], colour: str, solid: bool) -> str:
    """A circle, a square, a triangle or a diamond."""
    x, y = at
    look = f'fill="{colour if solid else "#ffffff"}" stroke="{colour}" stroke-width="1.3"'
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" {look}/>',
        f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" {look}/>',
        f'<path d="M{x:.1f},{y - 4:.1f} l3.8,6.6 h-7.6 z" {look}/>',
        f'<path d="M{x:.1f},{y - 4.2:.1f} l4.2,4.2 l-4.2,4.2 l-4.2,-4.2 z" {look}/>',
    )
    return shapes[number % len(shapes)]


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to the first that is not below `most`."""
    rough = most / TICKS
    scale = 10.0 ** floor(log10(rough))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough * (1 - 1e-9))
    return [round(step * number, 12) for number in range(ceil(most / step - 1e-9) + 1)]
