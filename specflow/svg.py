"""Draws a decode graph as SVG, with no program but this one.

Layered, from left to right: a part stands one column right of the last part it waits for. Edges between neighbours
cross the gap between them; longer ones climb to lanes above the parts, carried ones dive to lanes below. Vertical
pieces run in the gaps only, so no line ever crosses a box.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from specflow.draw import COLOURS, arrows, details
from specflow.graph_parts import Kind, Node

if TYPE_CHECKING:
    from specflow.graph import DecodeGraph

__all__ = ["FONT", "GREY", "INK", "draw_svg", "svg_text"]

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK, GREY, LINE, CARRY = "#1f2430", "#646b78", "#4a5160", "#a0527a"
MARGIN = 36.0
PAD = 14.0  # inside a box
STACK = 34.0  # between boxes of a column
LANE = 30.0  # between lanes
SLOT = 11.0  # between vertical pieces in a gap
CORNER = 9.0
HEAD = 9.0  # length of an arrow head
MOST_LINES = 4  # option lines of a box
LONGEST = 30  # characters of a line in a box


@dataclass
class _Box:
    """A part on the page."""

    node: Node
    column: int
    lines: list[str]
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass
class _Wire:
    """An edge on the page. `side` is 0 across a gap, -1 over the lanes above, 1 over those below."""

    writer: _Box
    reader: _Box
    carry: bool
    text: str
    side: int
    lane: int = 0
    out_y: float = 0.0
    in_y: float = 0.0
    out_x: float = 0.0  # of the vertical piece beside the writer
    in_x: float = 0.0  # of the one beside the reader
    label: tuple[float, float] = (0.0, 0.0)  # middle of its text

    @property
    def colour(self) -> str:
        return CARRY if self.carry else LINE


@dataclass
class _Page:
    boxes: dict[str, _Box]
    wires: list[_Wire]
    top: float = 0.0  # of the parts
    bottom: float = 0.0
    width: float = 0.0
    height: float = 0.0
    columns: list[list[_Box]] = field(default_factory=list)


def draw_svg(graph: DecodeGraph) -> str:
    """The picture as text of an SVG file."""
    page = _lay_out(graph)
    caption = "solid: within a round      dashed: from one round to the next"
    parts = [_head(page, graph.name or "decode graph", graph.description)]
    parts += [_wire(wire, page) for wire in page.wires]
    parts += [_label(wire) for wire in page.wires]
    parts += [_box(box) for box in page.boxes.values()]
    parts.append(svg_text((MARGIN, page.height - MARGIN / 2), caption, 12, GREY))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text_width(text: str, size: float, bold: bool = False) -> float:
    """Generous: a wide font must not spill out of a box."""
    return len(text) * size * (0.64 if bold else 0.6)


def _lay_out(graph: DecodeGraph) -> _Page:
    """Columns, ports, gaps, lanes: each step needs only the ones before."""
    page = _Page({}, [])
    for name, column in _columns(graph).items():
        page.boxes[name] = _sized(graph, graph.node(name), column)
    for writer, reader, carry, text in arrows(graph):
        one, other = page.boxes[writer], page.boxes[reader]
        side = 1 if carry else 0 if other.column == one.column + 1 else -1
        page.wires.append(_Wire(one, other, carry, text, side))
    page.columns = [[box for box in page.boxes.values() if box.column == c] for c in range(1 + _last(page))]
    _untangle(page)
    for side in (-1, 1):
        _choose_lanes([wire for wire in page.wires if wire.side == side])
    _place(page, graph)
    for box in page.boxes.values():
        _choose_ports(box, page.wires)
    _choose_slots(page)
    _spread_labels(page)
    return page


def _last(page: _Page) -> int:
    return max(box.column for box in page.boxes.values())


def _columns(graph: DecodeGraph) -> dict[str, int]:
    """Longest path from a part without predecessors, in the order of the round."""
    columns: dict[str, int] = {}
    for name in graph.order():
        before = [columns[edge.writer] for edge in graph.edges(carry=False) if edge.reader == name]
        columns[name] = 1 + max(before, default=-1)
    return columns


def _untangle(page: _Page) -> None:
    """Order each column by the mean place of its neighbours (barycentre), there and back, so that few edges cross."""
    place = {id(box): i - (len(column) - 1) / 2 for column in page.columns for i, box in enumerate(column)}
    inside = [wire for wire in page.wires if wire.side <= 0]
    for column in (*page.columns, *reversed(page.columns)):
        means = {}
        for box in column:
            near = [place[id(w.writer)] for w in inside if w.reader is box]
            near += [place[id(w.reader)] for w in inside if w.writer is box]
            means[id(box)] = sum(near) / max(len(near), 1)
        column.sort(key=lambda box: means[id(box)])
        place.update({id(box): i - (len(column) - 1) / 2 for i, box in enumerate(column)})


def _sized(graph: DecodeGraph, node: Node, column: int) -> _Box:
    lines = [_short(line) for line in details(graph, node)]
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], f"and {len(lines) - MOST_LINES + 1} more"]
    widths = [_text_width(node.name, 11), _text_width(_short(node.part), 15, True)]
    width = max([*widths, *(_text_width(line, 12) for line in lines), 76.0]) + 2 * PAD
    return _Box(node, column, lines, width=width, height=58.0 + 17.0 * len(lines) + (4.0 if lines else 0.0))


def _short(text: str) -> str:
    """The end of a long text: of paths and model ids it says most."""
    return text if len(text) <= LONGEST else "…" + text[1 - LONGEST :]


def _choose_lanes(wires: list[_Wire]) -> None:
    """Short wires next to the parts, long ones outside; two wires share a lane only where they do not meet."""
    taken: list[list[tuple[int, int]]] = []
    for wire in sorted(wires, key=lambda w: (abs(w.reader.column - w.writer.column), w.writer.column)):
        # Twice the column is its left gap, one more its right gap.
        ends = sorted((2 * wire.writer.column + 1, 2 * wire.reader.column))
        low, high = ends[0], ends[1]
        free = (
            i
            for i, lane in enumerate(taken)
            if all(high < other_low or other_high < low for other_low, other_high in lane)
        )
        wire.lane = next(free, len(taken))
        taken[wire.lane : wire.lane + 1] = [[*(taken[wire.lane] if wire.lane < len(taken) else []), (low, high)]]


def _place(page: _Page, graph: DecodeGraph) -> None:
    """Columns side by side around one middle line, with gaps as wide as their labels and vertical pieces need."""
    lanes = {side: 1 + max((w.lane for w in page.wires if w.side == side), default=-1) for side in (-1, 1)}
    page.top = MARGIN + (62.0 if graph.description else 40.0) + lanes[-1] * LANE
    tallest = max(sum(box.height for box in column) + STACK * (len(column) - 1) for column in page.columns)
    page.bottom = page.top + tallest
    x = MARGIN + _gap(page, -1) - 30.0
    for number, column in enumerate(page.columns):
        width = max(box.width for box in column)
        y = page.top + (tallest - sum(box.height for box in column) - STACK * (len(column) - 1)) / 2
        for box in column:
            box.x, box.y, box.width = x, y, width
            y += box.height + STACK
        x += width + _gap(page, number)
    page.width = max(x - 44.0 + MARGIN, 2 * MARGIN + _text_width(graph.description, 13))
    page.height = page.bottom + lanes[1] * LANE + 2 * MARGIN - 4.0


def _gap(page: _Page, number: int) -> float:
    """Width of the gap right of a column (-1: left of the first)."""
    labels = [_text_width(w.text, 12) for w in page.wires if w.side == 0 and w.writer.column == number]
    outs = max(sum(w.side == side and w.writer.column == number for w in page.wires) for side in (-1, 1))
    ins = max(sum(w.side == side and w.reader.column == number + 1 for w in page.wires) for side in (-1, 1))
    return max(max(labels, default=0.0) + 30.0 + SLOT * (outs + ins) + HEAD, 44.0)


def _choose_ports(box: _Box, wires: list[_Wire]) -> None:
    """Spread the ends over both sides: lanes above on top, neighbours in the middle, lanes below at the bottom.

    The wire of the outermost lane above gets the top port, and of the outermost below the one nearest the middle:
    with `_choose_slots` that keeps wires of one part from crossing each other.
    """

    def order(wire: _Wire, far: _Box) -> tuple[float, float]:
        return wire.side, far.middle if wire.side == 0 else -wire.lane

    outs = sorted((w for w in wires if w.writer is box), key=lambda w: order(w, w.reader))
    ins = sorted((w for w in wires if w.reader is box), key=lambda w: order(w, w.writer))
    for number, wire in enumerate(outs, start=1):
        wire.out_y = box.y + box.height * number / (len(outs) + 1)
    for number, wire in enumerate(ins, start=1):
        wire.in_y = box.y + box.height * number / (len(ins) + 1)
    for group, attribute in ((outs, "out_y"), (ins, "in_y")):
        if len(group) > 1 and sum(w.side == 0 for w in group) == 1:
            _keep_middle(box, group, attribute)


def _keep_middle(box: _Box, group: list[_Wire], attribute: str) -> None:
    """A single neighbour's wire runs along the middle line, so that a chain of parts is drawn straight."""
    above = [w for w in group if w.side < 0]
    below = [w for w in group if w.side > 0]
    half = box.height / 2
    for wires, start in ((above, box.y), (below, box.middle)):
        for number, wire in enumerate(wires, start=1):
            setattr(wire, attribute, start + half * number / (len(wires) + 1))
    for wire in group:
        if wire.side == 0:
            setattr(wire, attribute, box.middle)


def _choose_slots(page: _Page) -> None:
    """Where vertical pieces run. Above, an outer lane's piece is nearer to its part; below, farther from it."""
    for side in (-1, 1):
        for column in range(_last(page) + 1):
            edge = page.columns[column][0]
            outs = [w for w in page.wires if w.side == side and w.writer.column == column]
            ins = [w for w in page.wires if w.side == side and w.reader.column == column]
            for number, wire in enumerate(sorted(outs, key=lambda w: side * w.lane), start=1):
                wire.out_x = edge.right + 4.0 + SLOT * number
            for number, wire in enumerate(sorted(ins, key=lambda w: side * w.lane), start=1):
                wire.in_x = edge.x - HEAD - 4.0 - SLOT * number


def _spread_labels(page: _Page) -> None:
    """A label stands at the middle of its wire, or off it where another label of the gap stands there already."""
    taken: list[tuple[float, float]] = []
    for wire in page.wires:
        if wire.side:
            wire.label = _free_of_verticals(wire, page), _lane_y(wire, page)
            continue
        spots = [_along(wire, share) for share in (0.5, 0.66, 0.34, 0.75, 0.25)]
        free = (spot for spot in spots if all(abs(spot[1] - y) > 17.0 for x, y in taken if abs(spot[0] - x) < 90.0))
        wire.label = next(free, spots[0])
        taken.append(wire.label)


def _free_of_verticals(wire: _Wire, page: _Page) -> float:
    """The place on a lane nearest its middle where no piece of an outer lane's wire runs through the text."""
    outer = [other for other in page.wires if other.side == wire.side and other.lane > wire.lane]
    near = _text_width(wire.text, 12) / 2 + 8.0
    spots = [wire.out_x + (wire.in_x - wire.out_x) * share for share in (0.5, 0.4, 0.6, 0.3, 0.7)]
    free = (x for x in spots if all(abs(x - end) > near for other in outer for end in (other.out_x, other.in_x)))
    return next(free, spots[0])


def _along(wire: _Wire, share: float) -> tuple[float, float]:
    """A point of a wire across a gap: cubic, level at both ends."""
    rest = 1.0 - share
    start, end = wire.writer.right, wire.reader.x - HEAD
    x = start + (end - start) * (1.5 * rest * share + share**3)
    return x, wire.out_y + (wire.in_y - wire.out_y) * (3.0 * rest * share**2 + share**3)


def _lane_y(wire: _Wire, page: _Page) -> float:
    distance = 22.0 + LANE * wire.lane
    return page.top - distance if wire.side < 0 else page.bottom + distance


def _wire(wire: _Wire, page: _Page) -> str:
    """Line and arrow head."""
    start, end = (wire.writer.right, wire.out_y), (wire.reader.x - HEAD + 1.0, wire.in_y)
    if wire.side == 0:
        bend = (end[0] - start[0]) / 2
        path = f"M{start[0]:.1f},{start[1]:.1f} C{start[0] + bend:.1f},{start[1]:.1f} {end[0] - bend:.1f},{end[1]:.1f} "
        path += f"{end[0]:.1f},{end[1]:.1f}"
    else:
        lane = _lane_y(wire, page)
        path = _rounded(
            [start, (wire.out_x, start[1]), (wire.out_x, lane), (wire.in_x, lane), (wire.in_x, end[1]), end]
        )
    dash = ' stroke-dasharray="6 4"' if wire.carry else ""
    tip, y = wire.reader.x, wire.in_y
    head = f"M{tip:.1f},{y:.1f} l{-HEAD},-4.5 v9 z"
    return (
        f'<path d="{path}" fill="none" stroke="{wire.colour}" stroke-width="1.5"{dash}/>'
        f'<path d="{head}" fill="{wire.colour}"/>'
    )


def _rounded(points: list[tuple[float, float]]) -> str:
    """A path of straight pieces with round corners."""
    path = [f"M{points[0][0]:.1f},{points[0][1]:.1f}"]
    for before, at, after in zip(points, points[1:], points[2:], strict=False):
        one, other = _towards(at, before), _towards(at, after)
        path.append(f"L{one[0]:.1f},{one[1]:.1f} Q{at[0]:.1f},{at[1]:.1f} {other[0]:.1f},{other[1]:.1f}")
    return " ".join([*path, f"L{points[-1][0]:.1f},{points[-1][1]:.1f}"])


def _towards(at: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """The point a corner's radius away from `at`, or half way where the piece is short."""
    length = abs(other[0] - at[0]) + abs(other[1] - at[1])
    share = 0.0 if length == 0 else min(CORNER, length / 2) / length
    return at[0] + (other[0] - at[0]) * share, at[1] + (other[1] - at[1]) * share


def _label(wire: _Wire) -> str:
    """What flows, on a patch of background so that a line never runs through letters."""
    x, y = wire.label
    width = 0.9 * _text_width(wire.text, 12) + 4.0
    patch = f'<rect x="{x - width / 2:.1f}" y="{y - 8:.1f}" width="{width:.1f}" height="16" fill="#ffffff"/>'
    return patch + svg_text((x, y + 4.2), wire.text, 12, wire.colour, anchor="middle")


def _box(box: _Box) -> str:
    fill, stroke = COLOURS[box.node.kind]
    shape = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="9"'
    parts = [f'<rect {shape} fill="{fill}" stroke="{stroke}" stroke-width="1.6"/>']
    parts.append(svg_text((box.x + PAD, box.y + 22.0), box.node.name, 11, stroke))
    part = "next round" if box.node.kind is Kind.COMMIT else _short(box.node.part)
    parts.append(svg_text((box.x + PAD, box.y + 42.0), part, 15, INK, bold=True))
    for number, line in enumerate(box.lines):
        parts.append(svg_text((box.x + PAD, box.y + 62.0 + 17.0 * number), line, 12, GREY))
    return "".join(parts)


def svg_text(
    at: tuple[float, float], text: str, size: int, colour: str, bold: bool = False, anchor: str = "start"
) -> str:
    """One line of text; `at` is its baseline at the anchor."""
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{at[0]:.1f}" y="{at[1]:.1f}" font-size="{size}"{weight} fill="{colour}" text-anchor="{anchor}"'
    return f'<text {place} xml:space="preserve">{escape(text)}</text>'


def _head(page: _Page, title: str, description: str) -> str:
    size = f'width="{page.width:.0f}" height="{page.height:.0f}" viewBox="0 0 {page.width:.0f} {page.height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        svg_text((MARGIN, MARGIN + 8.0), title, 19, INK, bold=True),
    ]
    return "\n".join([*lines, *([svg_text((MARGIN, MARGIN + 30.0), description, 13, GREY)] if description else [])])
