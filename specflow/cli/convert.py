"""`specflow convert`: a drafter in the layout that other engines and converters read."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specflow.cli.progress import working

if TYPE_CHECKING:
    from specflow.checkpoint.write_drafter import StoredDrafter
    from specflow.checkpoint.write_parts import Written

__all__ = ["LayoutChoice", "convert"]

_RECIPE = "recipe.yaml"


class LayoutChoice(str, Enum):
    """Whose layout is written."""

    SPECULATORS = "speculators"
    OFFICIAL = "official"


def convert(
    path: Annotated[str, typer.Argument(help="drafter: a directory, a shipped drafter's name or a hub id")],
    to: Annotated[LayoutChoice, typer.Option("--to", help="speculators, or official: the method's authors' own")],
    output_dir: Annotated[Path, typer.Option("-o", "--output-dir", help="directory to write, new or empty")],
    target: Annotated[
        str | None, typer.Option("--target", help="model it drafts for; none: what recipe.yaml beside it says")
    ] = None,
    drop_confidence: Annotated[
        bool, typer.Option("--drop-confidence", help="leave the confidence head out, where the layout has none")
    ] = False,
) -> None:
    """Write a drafter for vLLM, SGLang, llama.cpp's converters and others.

    What the layout demands and the drafter borrows, rows of embedding or head, is written from the target. What the
    layout cannot say is refused with the reason.
    """
    from specflow.checkpoint.writing import convert as write

    with working(f"reading {path}"):
        stored, named = _open(path)
        stored = stored.without_confidence() if drop_confidence else stored
        chosen = target or named
        verifier = None
        if chosen is not None:
            from specflow.checkpoint.write_target import open_verifier

            verifier = open_verifier(chosen)
    with working(f"writing {output_dir}"):
        written = write(stored, to.value, output_dir, verifier)
    for line in _lines(stored, to, output_dir, chosen, written):
        typer.echo(line)
    for note in written.notes:
        typer.echo(f"note: {note}", err=True)


def _open(path: str) -> tuple[StoredDrafter, str | None]:
    """The drafter, and the model it was trained for where a recipe beside it says so."""
    from dataclasses import replace

    from specflow.checkpoint.detection import is_published
    from specflow.checkpoint.writing import open_drafter
    from specflow.draft.checkpoint import read_options
    from specflow.draft.shipped import drafter_path
    from specflow.errors import RecipeError
    from specflow.recipe import load_recipe

    place = drafter_path(path)
    stored = open_drafter(str(place))
    file = place / _RECIPE
    if not file.is_file():
        return stored, None
    try:
        recipe = load_recipe(str(file))
    except RecipeError as error:
        if not is_published(place) or "draft:" in file.read_text(encoding="utf-8", errors="replace"):
            raise
        typer.echo(f"note: {file} is no recipe of ours and is not read ({error.found})", err=True)
        return stored, None
    parts = recipe.draft.parts if recipe.draft is not None else ()
    mine = [part for part in parts if getattr(part.options, "weights", None) is not None]
    if len(mine) != 1:
        return stored, recipe.target.model
    options = read_options(mine[0].options, str(place))
    return replace(stored, source=mine[0].source, options=options, k=mine[0].k), recipe.target.model


def _lines(stored: StoredDrafter, to: LayoutChoice, output: Path, target: str | None, written: Written) -> list[str]:
    """What was written."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in written.tensors.values())
    kind = written.config.get("speculators_model_type") or ", ".join(written.config.get("architectures", ("Medusa",)))
    return [
        f"{stored.source} drafter from {stored.where}, for {target or 'a target that nobody named'}",
        f"layout: {to.value} ({kind})",
        f"{output / written.file}: {len(written.tensors)} tensors, {size / 1e6:.1f} MB",
        f"{output / 'config.json'}: {len(written.config)} keys",
    ]
