"""Pictures: complete, well-formed, and in SVG without overlaps."""

from __future__ import annotations

import json
import re
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from specflow.cli.app import app
from specflow.draft.registry import SourceInfo, discover
from specflow.draw import FORMATS, arrows, dot, mermaid, tree_text
from specflow.graph import DecodeGraph
from specflow.recipe import load_recipe, shipped_recipes
from specflow.svg import draw_svg

SVG = "{http://www.w3.org/2000/svg}"
Rect = tuple[float, float, float, float]


class HeadOptions(BaseModel):
    taps: tuple[int, ...] = (2, 15, 28)
    heads: int = 4


HEADS = SourceInfo(
    "heads",
    HeadOptions,
    ("parallel",),
    build=lambda config, context: pytest.fail("not built here"),
    axis="target_features",
    offers=("marginals",),
    reads=("tokens", "features"),
)


def hybrid() -> DecodeGraph:
    """Two sources, long names, many options: more than any recipe holds."""
    graph = DecodeGraph(
        'a "b" <c> & d', "History first; heads where the text does not repeat.", sources={**discover(), "heads": HEADS}
    )
    graph.target("some-organisation/a-model-with-a-very-long-name-1.5b", dtype="bfloat16", threads=3, device="cuda:0")
    graph.source("history", node="copied", min_match=3).source("heads", node="drawn", heads=5, taps=(1, 5, 9))
    graph.dependency("copy", node="copy").dependency("parallel", node="heads").combine().length("additive").verify(
        "block"
    )
    graph.connect("copied", "copy", "combine", "target", "verify", "commit").connect(
        "drawn", "heads", "combine", "verify"
    )
    graph.connect("length", "copy").connect("length", "heads").connect("target", "commit").carry("verify", "length")
    graph.carry("commit", "target").carry("commit", "copied").carry("commit", "drawn").carry("target", "drawn")
    return graph.check()


GRAPHS = {
    **{name: DecodeGraph.from_recipe(load_recipe(name)) for name in shipped_recipes()},
    "hybrid": hybrid(),
}
every_graph = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)


def number(element: ElementTree.Element, key: str) -> float:
    return float(element.attrib[key])


def rectangle(element: ElementTree.Element) -> Rect:
    x, y = number(element, "x"), number(element, "y")
    return x, y, x + number(element, "width"), y + number(element, "height")


def text_rectangle(element: ElementTree.Element) -> Rect:
    """Where a text may reach, by the width of an ordinary sans-serif font."""
    size = number(element, "font-size")
    width = len(element.text or "") * size * (0.58 if "font-weight" in element.attrib else 0.53)
    left = number(element, "x") - (width / 2 if element.attrib["text-anchor"] == "middle" else 0.0)
    return left, number(element, "y") - 0.8 * size, left + width, number(element, "y") + 0.2 * size


def overlap(one: Rect, other: Rect) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def inside(one: Rect, other: Rect) -> bool:
    return other[0] <= one[0] and one[2] <= other[2] and other[1] <= one[1] and one[3] <= other[3]


def segments(path: str) -> list[Rect]:
    """Straight pieces of a lane's path, as thin rectangles."""
    points = [tuple(map(float, pair.split(","))) for pair in re.findall(r"-?[\d.]+,-?[\d.]+", path)]
    return [
        (min(a[0], b[0]), min(a[1], b[1]), max(a[0], b[0]) + 0.01, max(a[1], b[1]) + 0.01) for a, b in pairwise(points)
    ]


@every_graph
def test_svg_has_no_overlaps(graph: DecodeGraph) -> None:
    root = ElementTree.fromstring(draw_svg(graph))
    page = (0.0, 0.0, number(root, "width"), number(root, "height"))
    boxes = [rectangle(e) for e in root.iter(f"{SVG}rect") if "rx" in e.attrib]
    texts = [text_rectangle(e) for e in root.iter(f"{SVG}text")]
    assert len(boxes) == len(graph.nodes())
    assert all(inside(thing, page) for thing in boxes + texts)
    for one, other in combinations(boxes, 2):
        assert not overlap(one, other)
    for one, other in combinations(texts, 2):
        assert not overlap(one, other)
    for text in texts:
        assert all(inside(text, box) or not overlap(text, box) for box in boxes)
    lines = [e.attrib["d"] for e in root.iter(f"{SVG}path") if e.attrib["fill"] == "none"]
    assert len(lines) == len(arrows(graph))
    for line in lines:
        inner = [(left + 1, top + 1, right - 1, bottom - 1) for left, top, right, bottom in boxes]
        assert not any(overlap(piece, box) for piece in segments(line) if " C" not in line for box in inner)


@every_graph
def test_svg_says_everything_and_dashes_what_is_carried(graph: DecodeGraph) -> None:
    root = ElementTree.fromstring(draw_svg(graph))
    texts = {e.text for e in root.iter(f"{SVG}text")}
    assert {node.name for node in graph.nodes()} <= texts
    assert {flows for *_, flows in arrows(graph)} <= texts
    dashed = [e for e in root.iter(f"{SVG}path") if "stroke-dasharray" in e.attrib]
    assert len(dashed) == sum(carry for _, _, carry, _ in arrows(graph))


@every_graph
def test_text_formats_hold_every_node_and_edge(graph: DecodeGraph) -> None:
    ends = arrows(graph)
    assert len(re.findall(r" (?:-->|-\.->)\|", mermaid(graph))) == len(ends)
    assert mermaid(graph).count("-.->") == dot(graph).count("style=dashed") == sum(carry for _, _, carry, _ in ends)
    assert len(re.findall(r'^  "[^"]+" -> "', dot(graph), flags=re.MULTILINE)) == len(ends)
    text = tree_text(graph, colour=False)
    for number_, name in enumerate(graph.order(), start=1):
        assert f"{number_} {name}" in text
    for writer, _, carry, flows in ends:
        assert f"{flows} from {writer}" + (" (round before)" if carry else "") in text
    assert "\x1b" not in text


def test_names_are_escaped() -> None:
    graph = DecodeGraph('say "hi" [bold]').target('a"b\\c<d>').verify().wire()
    assert 'label="say \\"hi\\" [bold]"' in dot(graph)
    assert 'target\\na\\"b\\\\c<d>' in dot(graph)
    assert "a&quot;b\\c&lt;d&gt;" in mermaid(graph)
    assert ElementTree.fromstring(draw_svg(graph)) is not None
    assert 'say "hi" [bold]' in tree_text(graph)


def test_show_verb(tmp_path: Path) -> None:
    runner = CliRunner()
    assert "1 source  history" in runner.invoke(app, ["show", "ngram"]).stdout
    assert "k 3" in runner.invoke(app, ["show", "ngram", "--set", "draft.k=3"]).stdout
    for form, draw in FORMATS.items():
        path = tmp_path / f"round.{form}"
        result = runner.invoke(app, ["show", "suffix", "--format", form, "-o", str(path)])
        assert (result.exit_code, result.stdout) == (0, "")
        assert path.read_text(encoding="utf-8") == draw(GRAPHS["suffix"])
        assert runner.invoke(app, ["show", "suffix", "--format", form]).stdout == draw(GRAPHS["suffix"])
    assert json.dumps(runner.invoke(app, ["show", "ngram", "-o", str(tmp_path / "no" / "x")]).exit_code) == "1"
