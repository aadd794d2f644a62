"""Pictures of a decode graph as text: terminal tree, mermaid, graphviz dot; SVG comes from `specflow.svg`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from specflow.graph_parts import Kind, Node

if TYPE_CHECKING:
    from rich.tree import Tree

    from specflow.graph import DecodeGraph

__all__ = ["COLOURS", "FORMATS", "arrows", "details", "dot", "mermaid", "svg", "tree", "tree_text"]

UNWRAPPED = 1000  # columns of a file or a pipe

# Fill and line of each kind: what drafts is blue, what scores violet, what decides amber, what commits green.
COLOURS: Mapping[Kind, tuple[str, str]] = {
    Kind.SOURCE: ("#e8f1fb", "#2f6fb2"),
    Kind.LENGTH: ("#e6f5f3", "#2b8a7e"),
    Kind.DEPENDENCY: ("#e8f1fb", "#2f6fb2"),
    Kind.COMBINE: ("#e8f1fb", "#2f6fb2"),
    Kind.TARGET: ("#f0eafa", "#6b46b8"),
    Kind.VERIFY: ("#fdf2e0", "#b9770e"),
    Kind.COMMIT: ("#e9f6ea", "#3a8a44"),
}


def arrows(graph: DecodeGraph) -> list[tuple[str, str, bool, str]]:
    """Writer, reader, carried or not, and the flows between them, in the order of a round."""
    place = {name: i for i, name in enumerate(graph.order())}
    flows: dict[tuple[str, str, bool], list[str]] = {}
    for edge in graph.edges():
        flows.setdefault((edge.writer, edge.reader, edge.carry), []).append(edge.flow.replace("_", " "))
    ordered = sorted(flows, key=lambda key: (key[2], place[key[0]], place[key[1]]))
    return [(*key, ", ".join(sorted(flows[key], reverse=True))) for key in ordered]


def details(graph: DecodeGraph, node: Node) -> list[str]:
    """Where a source gets its information, and options that differ from their defaults, one `key value` each.

    Of what drafts, k and options that are names are always shown: they say which kind of draft it is.
    """
    named, origin = {}, []
    if node.kind in (Kind.SOURCE, Kind.DEPENDENCY, Kind.COMBINE):
        named = {key: value for key, value in node.settings if key == "k" or isinstance(value, str)}
    if node.kind is Kind.SOURCE and (axis := graph.sources[node.part].axis) != node.part:
        origin = [f"from {axis.replace('_', ' ')}"]
    shown = {key: value for key, value in {**named, **node.changed}.items() if value != node.part}
    return [*origin, *(f"{key} {_plain(value)}" for key, value in shown.items())]


def tree(graph: DecodeGraph) -> Tree:
    """The round as a tree for the terminal: parts in order, below each what it reads and from whom."""
    from rich.markup import escape
    from rich.tree import Tree

    title = escape(graph.name or "decode graph")
    root = Tree(f"[bold]{title}[/bold]" + (f"  [dim]{escape(graph.description)}[/dim]" if graph.description else ""))
    ends = arrows(graph)
    for number, name in enumerate(graph.order(), start=1):
        node = graph.node(name)
        label = f"{number} [bold {COLOURS[node.kind][1]}]{escape(name)}[/]"
        label += "" if node.part == name else f"  {escape(node.part)}"
        options = ", ".join(details(graph, node))
        branch = root.add(label + (f"  [dim]{escape(options)}[/dim]" if options else ""))
        for writer, reader, carry, flows in ends:
            if reader == name:
                branch.add(f"{flows} from {escape(writer)}" + (" [dim](round before)[/dim]" if carry else ""))
    return root


def tree_text(graph: DecodeGraph, colour: bool = True) -> str:
    """The tree as text; in colour only where stdout is a terminal that shows it, and only there wrapped."""
    from rich.console import Console

    console = Console(force_terminal=None if colour else False, highlight=False)
    if not console.is_terminal:
        console.width = UNWRAPPED
    with console.capture() as capture:
        console.print(tree(graph))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def mermaid(graph: DecodeGraph) -> str:
    """A mermaid flowchart, as GitHub and many editors render it."""
    lines = ["flowchart LR"]
    for node in graph.nodes():
        text = "<br/>".join(_mermaid_text(line) for line in _lines(graph, node))
        lines.append(f'  {_id(node.name)}["{text}"]')
    for writer, reader, carry, flows in arrows(graph):
        line = "-.->" if carry else "-->"
        lines.append(f'  {_id(writer)} {line}|"{flows}"| {_id(reader)}')
    for node in graph.nodes():
        fill, stroke = COLOURS[node.kind]
        lines.append(f"  style {_id(node.name)} fill:{fill},stroke:{stroke},color:#1f2430")
    return "\n".join(lines) + "\n"


def dot(graph: DecodeGraph) -> str:
    """A graphviz digraph."""
    lines = ["digraph round {", "  rankdir=LR;", '  node [shape=box, style="rounded,filled", fontname="Helvetica"];']
    lines.append('  edge [fontname="Helvetica", fontsize=10, color="#5b6270"];')
    if graph.name:
        lines.append(f"  label={_quoted(graph.name)}; labelloc=t;")
    for node in graph.nodes():
        fill, stroke = COLOURS[node.kind]
        label = _quoted("\n".join(_lines(graph, node)))
        lines.append(f'  {_quoted(node.name)} [label={label}, fillcolor="{fill}", color="{stroke}"];')
    for writer, reader, carry, flows in arrows(graph):
        # A carried edge must not push its reader to the right of its writer.
        style = ", style=dashed, constraint=false" if carry else ""
        lines.append(f"  {_quoted(writer)} -> {_quoted(reader)} [label={_quoted(flows)}{style}];")
    return "\n".join([*lines, "}"]) + "\n"


def svg(graph: DecodeGraph) -> str:
    """A picture for documents."""
    from specflow.svg import draw_svg

    return draw_svg(graph)


FORMATS: Mapping[str, Callable[[DecodeGraph], str]] = {"mermaid": mermaid, "dot": dot, "svg": svg}


def _lines(graph: DecodeGraph, node: Node) -> list[str]:
    head = [node.name] if node.part == node.name else [node.name, node.part]
    return [*head, *details(graph, node)]


def _id(name: str) -> str:
    """A name mermaid takes: `end` and the like are words of its own, signs are none."""
    return "n_" + re.sub(r"\W", "_", name)


def _mermaid_text(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


def _quoted(text: str) -> str:
    """A dot string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    return str(value)
