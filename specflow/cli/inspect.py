"""`specflow inspect`: what a drafter's checkpoint is, for which target, and the recipe that uses it."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["inspect"]


def inspect(
    path: Annotated[str, typer.Argument(help="drafter: a directory, a shipped drafter's name or a hub id")],
    target: Annotated[str | None, typer.Option("--target", help="model to compare it with")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Say what a checkpoint is: layout, target, layers it reads, sizes, missing tensors, and a recipe.

    Nothing is computed. Exit code 1 if tensors are missing, left over or of another shape, or the target does not fit.
    """
    import json
    from dataclasses import replace

    from specflow.checkpoint.report import inspect_checkpoint
    from specflow.draft.shipped import drafter_path

    place = drafter_path(path)
    report = replace(inspect_checkpoint(place if place.is_dir() else path, target), weights=path)
    if as_json:
        typer.echo(json.dumps(report.data(), ensure_ascii=False))
    else:
        rows = list(report.rows())
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            typer.echo(f"{name:<{width}}  {text}")
        if report.layout.method:
            typer.echo(f"\n{report.recipe()}", nl=False)
    if not report.is_whole:
        raise typer.Exit(1)
