"""`specflow selftest`: whether a drafter's weights are read as they were trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specflow.cli.demo import PROMPTS
from specflow.cli.progress import working

if TYPE_CHECKING:
    from rich.table import Table

    from specflow.build import LoadedTarget
    from specflow.recipe_draft import SourceSection
    from specflow.train.reference import Reference
    from specflow.train.selftest import SelfTest

__all__ = ["selftest"]


def selftest(
    recipe: Annotated[str, typer.Argument(help="recipe file or shipped name, of a drafter with trained weights")],
    data: Annotated[Path | None, typer.Option("--data", help="prompts (JSONL); without it three of the demo's")] = None,
    tokens: Annotated[int, typer.Option(min=10, help="greedy tokens of the target, about")] = 200,
    record: Annotated[bool, typer.Option("--record", help="keep the agreement beside the weights")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="figures as JSON on stdout")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.key=value of the recipe")] = None,
) -> None:
    """Test the conventions of a checkpoint: slots, layer numbers, norms, who sees whom.

    The text is right whatever is loaded; a wrong reading only costs speed. So the first draft token is compared with
    the target's own greedy one, as the recipe reads the weights and as others might. Exit code 1 if another reading is
    clearly better (10 points of 100 or more), if hardly a token agrees (less than 10 of 100), or if clearly fewer agree
    than were recorded beside the weights for these prompts.
    """
    import json

    from specflow.recipe import load_recipe
    from specflow.train.reference import Reference
    from specflow.train.selftest import greedy_texts, parts_to_test, run_selftest

    asked = load_recipe(recipe, overrides or ())
    parts = parts_to_test(asked)
    with working(f"loading {asked.target.model}"):
        from specflow.build import load_target

        loaded = load_target(asked.target)
    prompts = _prompts(data or PROMPTS, loaded)
    with working("decoding greedily"):
        texts = greedy_texts(loaded, prompts, tokens)
    with working("trying readings"):
        found = [run_selftest(part, loaded, texts) for part in parts]
    if as_json:
        typer.echo(json.dumps([each.data() for each in found], ensure_ascii=False))
    else:
        for each in found:
            _show(each)
    kept = [
        _compared(part, Reference.of(each, prompts, tokens), record) for part, each in zip(parts, found, strict=True)
    ]
    if not all(kept) or not all(each.healthy for each in found):
        raise typer.Exit(1)


def _compared(part: SourceSection, now: Reference, record: bool) -> bool:
    """Whether as many agree as were recorded beside the weights; recorded now, if that is asked for."""
    from specflow.draft.shipped import drafter_path

    folder = drafter_path(part.options.weights)  # type: ignore[attr-defined]
    if not folder.is_dir():
        return True  # of a hub: nothing of ours lies there
    if record:
        now.write(folder)
        return True
    before = type(now).read(folder)
    if before is None or not before.fallen(now):
        return True
    found = f"{now.agreement:.0%} agree, and {before.agreement:.0%} did when it was recorded"
    typer.echo(f"warning: {found}. Another target, chat template or reading than then?", err=True)
    return False


def _prompts(path: Path, loaded: LoadedTarget) -> list[list[int]]:
    """The first turns of a file's rows; rows that cannot be used are named."""
    from specflow.bench.data import PromptRow, read_prompts
    from specflow.errors import DataError

    prompts = []
    for row in read_prompts(path):
        if isinstance(row, PromptRow):
            talk = row.messages(0, [])
            codec = loaded.codec
            prompts.append(codec.encode_chat(talk) if codec.has_chat_template else codec.encode(talk[-1]["content"]))
        else:
            typer.echo(f"{row.key}: {row.reason}", err=True)
    if not prompts:
        raise DataError(str(path), "no usable row", "prompts")
    return prompts


def _show(found: SelfTest) -> None:
    """The table on stdout, the verdict on stderr where something is wrong."""
    from rich.console import Console

    from specflow.train.selftest import HEALTHY, LOW

    Console(highlight=False).print(_table(found))
    declared, better = found.declared, found.better
    if better is not None:
        typer.echo(f"warning: '{better.name}' agrees clearly better. To read the weights so: {better.change}", err=True)
    elif declared.agreement < LOW:
        typer.echo(
            f"warning: {declared.agreement:.0%} agree; below {LOW:.0%} nothing useful is drafted. Is this the target, "
            "and the chat template, that the weights were trained for?",
            err=True,
        )
    elif declared.agreement < HEALTHY:
        typer.echo(f"the declared reading is the best; strong drafters agree in {HEALTHY:.0%} or more", err=True)


def _table(found: SelfTest) -> Table:
    from rich.markup import escape
    from rich.table import Table

    title = f"{found.source}: {found.weights}, first draft token at {found.count} positions"
    table = Table("reading", "agreement", "in the recipe", title=escape(title))
    for reading in found.readings:
        table.add_row(reading.name, f"{reading.agreement:.1%}", escape(reading.change))
    return table
