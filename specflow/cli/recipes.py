"""`specflow recipes`: what ships with SpecFlow."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["recipes"]


def recipes(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a recipe on stdout")] = False,
) -> None:
    """List the shipped recipes, those of trained drafters last; each runs as it stands: specflow run NAME."""
    import json

    from specflow.recipe import load_recipe, shipped_recipes, trained_recipes

    known = shipped_recipes() | trained_recipes()
    found = {name: (path, load_recipe(path)) for name, path in known.items()}
    if as_json:
        for name, (path, recipe) in found.items():
            row = {"name": name, "description": recipe.description, "path": str(path)}
            typer.echo(json.dumps(row, ensure_ascii=False))
        return
    width = max(map(len, found), default=0)
    for name, (_, recipe) in found.items():
        typer.echo(f"{name:<{width}}  {recipe.description}")
