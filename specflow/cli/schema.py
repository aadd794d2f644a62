"""`specflow schema`: JSON Schema of recipes, for editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specflow.cli.output import deliver

__all__ = ["schema"]


def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write to this file, not to stdout")] = None,
) -> None:
    """Print JSON Schema of recipes. `recipes/schema.json` is this text."""
    import json

    from specflow.recipe import recipe_schema

    text = json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n"
    deliver(text, output)
