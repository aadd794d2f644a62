"""`specflow validate`: check recipes and their graphs without loading torch or weights."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["validate"]


def validate(
    recipes: Annotated[list[str], typer.Argument(help="recipe files, or names of shipped recipes")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.key=value, for all of them")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a recipe on stdout")] = False,
) -> None:
    """Check recipes: every key, every value, and whether the parts fit together. Exit code 1 if one is wrong."""
    failed = False
    for name in recipes:
        problem = _problem(name, overrides or [])
        failed = failed or problem is not None
        if as_json:
            _print_json(name, problem)
        elif problem is None:
            typer.echo(f"{name}: valid")
        else:
            typer.echo(f"error: {problem}", err=True)
    if failed:
        raise typer.Exit(1)


def _problem(name: str, overrides: list[str]) -> Exception | None:
    from specflow.errors import SpecFlowError
    from specflow.graph import DecodeGraph
    from specflow.recipe import load_recipe

    try:
        DecodeGraph.from_recipe(load_recipe(name, overrides)).check()
    except SpecFlowError as error:
        return error
    return None


def _print_json(name: str, problem: Exception | None) -> None:
    import json

    row: dict[str, object] = {"recipe": name, "valid": problem is None}
    if problem is not None:
        row |= {key: getattr(problem, key) for key in ("where", "found", "expected", "hint")}
    typer.echo(json.dumps(row, ensure_ascii=False))
