"""`specflow trace`: decode a workload once, plainly, and note what every drafter would have drafted everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specflow.recipe import Recipe
    from tuner.recorded import Trace

__all__ = ["trace"]


def trace(
    recipes: Annotated[list[str], typer.Argument(help="recipe files, or names of shipped recipes")],
    data: Annotated[list[Path], typer.Option("--data", help="JSONL with prompt, messages or turns; may be repeated")],
    output_dir: Annotated[Path, typer.Option("-o", "--output-dir", help="the trace: a new directory, or one to go on")],
    limit: Annotated[int | None, typer.Option(min=1, help="most rows of each file")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="length cap of every answer")] = 128,
    k: Annotated[
        int | None, typer.Option(min=1, max=256, help="deepest draft position; else each recipe's own")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="requests decoded, and written, together")] = 4,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="answers of fixed length")] = False,
    seed: Annotated[int, typer.Option(min=0, help="seed of the first prompt; the next ones count up")] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key.key=value; draft, verify, length only where a draft is")
    ] = None,
) -> None:
    """Record a trace, or go on with one: prompts and drafters that are there already are left as they are.

    Exit code 1 if rows of the data cannot be used (the others are traced), 130 if interrupted (run it again to go on).
    """
    from specflow.bench import load_prompts
    from specflow.cli.progress import counted, working
    from specflow.errors import DataError

    rows, bad = load_prompts(data, limit)
    for row in bad:
        typer.echo(f"{row.key}: {row.reason}", err=True)
    if not rows:
        raise DataError(", ".join(map(str, data)), "no usable row", "at least one prompt")
    chosen = _load(recipes, overrides or ())
    first = next(iter(chosen.values()))
    with working(f"loading {first.target.model}"):
        from specflow.build import load_target

        loaded = load_target(first.target)
    from tuner.trace import TracePlan, record, workload

    plan = TracePlan(max_new_tokens, ignore_eos, seed, k, batch)
    with counted(len(rows)) as advance:
        made = record(chosen, workload(rows, loaded.codec), output_dir, loaded, plan, advance)
    _report(made, output_dir)
    if bad:
        raise typer.Exit(1)


def _load(names: Sequence[str], settings: Sequence[str]) -> dict[str, Recipe]:
    """Recipes by name; settings of drafts go to those that draft."""
    from specflow.errors import RecipeError
    from specflow.recipe import load_recipe

    found: dict[str, Recipe] = {}
    for name in names:
        plain = load_recipe(name).draft is None
        fitting = [each for each in settings if not plain or each.split(".")[0] not in ("draft", "verify", "length")]
        recipe = load_recipe(name, fitting)
        label = recipe.name or Path(name).stem
        if label in found:
            raise RecipeError(name, f"a second recipe named '{label}'", "names that tell the drafters apart")
        found[label] = recipe.model_copy(update={"name": label})
    return found


def _report(made: Trace, path: Path) -> None:
    info = made.info
    typer.echo(f"{info.num_requests} requests, {info.num_tokens} tokens, in {path}")
    for name, drafter in info.drafters.items():
        agree = made.drafts[name].agree
        reach = float((agree[:, -1] if agree.ndim > 1 else agree).mean()) if made.num_positions else 0.0
        typer.echo(f"{name}: up to k = {drafter.k}, of which {reach:.2f} tokens agree with the text on average")
