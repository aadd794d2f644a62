"""`specflow show`: draw the decode graph of a recipe."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from specflow.cli.output import deliver

__all__ = ["Format", "show"]


class Format(str, Enum):
    """How a graph is drawn."""

    TREE = "tree"
    MERMAID = "mermaid"
    DOT = "dot"
    SVG = "svg"


def show(
    recipe: Annotated[str, typer.Argument(help="recipe file, or name of a shipped recipe")],
    form: Annotated[Format, typer.Option("--format", "-f", help="what to draw")] = Format.TREE,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write to this file, not to stdout")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.key=value")] = None,
) -> None:
    """Draw what a round of this recipe does: parts in order, and what flows between them."""
    from specflow.draw import FORMATS, tree_text
    from specflow.graph import DecodeGraph
    from specflow.recipe import load_recipe

    graph = DecodeGraph.from_recipe(load_recipe(recipe, overrides or ())).check()
    text = tree_text(graph, colour=output is None) if form is Format.TREE else FORMATS[form.value](graph)
    deliver(text, output)
