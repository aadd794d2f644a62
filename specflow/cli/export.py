"""`specflow export`: what runs without SpecFlow. `onnx` writes graphs and proves them; `export_engine` has `engine`."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specflow.cli.export_engine import export_engine
from specflow.cli.progress import working

if TYPE_CHECKING:
    from rich.table import Table

    from specflow.export.manifest import GraphEntry, Manifest, Part
    from specflow.export.onnx import Exported
    from specflow.recipe import Recipe

__all__ = ["app", "export"]

app = typer.Typer(help="Write what a recipe is made of for use elsewhere.", no_args_is_help=True)

WHAT = ("drafter", "target")
DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")

app.command("engine")(export_engine)


@app.callback()
def exports() -> None:
    """Write what a recipe is made of for use elsewhere."""


@app.command("onnx")
def export(
    recipe: Annotated[str, typer.Argument(help="recipe file, or name of a shipped recipe")],
    output: Annotated[Path, typer.Option("-o", "--output", help="new or empty directory")],
    what: Annotated[str, typer.Option(help="drafter, target, or both with a comma between")] = "drafter,target",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; int8 and int4: weights only")] = DTYPES[0],
    proof_rounds: Annotated[int, typer.Option(min=0, help="rounds decoded with torch and with the graphs")] = 200,
    force: Annotated[bool, typer.Option("--force", help="let out what predicts worse than its threshold")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.key=value of the recipe")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="manifest and seconds of each step on stdout")] = False,
) -> None:
    """Write a recipe's target and drafters as ONNX graphs, and prove that they compute what torch computes.

    Every graph is checked and compared with torch in float32 on random and real inputs; then rounds of real prompts are
    decoded with both. A failed proof leaves nothing. manifest.json says what every input and output is.
    """
    from specflow.recipe import load_recipe

    wanted = _wanted(what)
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(DTYPES)}", param_hint="--dtype")
    loaded = load_recipe(recipe, overrides or ())
    kept = _without_drafters(loaded, wanted)
    if not kept:
        return
    with working("loading torch"):
        from specflow.export.onnx import ExportPlan, export_onnx

    if (asked := loaded.target.dtype) not in ("auto", dtype):
        typer.echo(f"the recipe decodes in {asked}; the graphs are {dtype}, as --dtype says", err=True)
    plan = ExportPlan(loaded, frozenset(kept), dtype, proof_rounds, force)
    with _said_once():
        done = export_onnx(plan, output, working)
    if as_json:
        typer.echo(json.dumps({"manifest": done.manifest.model_dump(mode="json"), "seconds": done.seconds}))
    else:
        chosen = [] if asked == "auto" and dtype == DTYPES[0] else [f"target.dtype={dtype}"]
        _report(done, _run_again(recipe, [*(overrides or []), *chosen, "target.runtime=onnx"]))


@contextmanager
def _said_once() -> Iterator[None]:
    """The same drafter is opened several times, and need not say every time what it is."""
    handlers, once = list(logging.getLogger().handlers), _Once()
    for handler in handlers:
        handler.addFilter(once)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(once)


class _Once(logging.Filter):
    """Lets a message through the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self._said
        self._said.add(message)
        return new


def _wanted(what: str) -> list[str]:
    words = [word.strip() for word in what.split(",")]
    strange = [word for word in words if word not in WHAT]
    if strange:
        raise typer.BadParameter(f"{strange[0]!r} is not one of {', '.join(WHAT)}", param_hint="--what")
    return words


def _without_drafters(recipe: Recipe, wanted: list[str]) -> list[str]:
    """What of it there is to export; what there is not is said."""
    if "drafter" not in wanted:
        return wanted
    parts = () if recipe.draft is None or recipe.draft.k == 0 else recipe.draft.parts
    for part in parts:
        if part.info.graphs is None:
            typer.echo(f"{part.method or part.source} has no network: there is no drafter to export", err=True)
    if not parts:
        typer.echo(f"{recipe.name} decodes plainly: there is no drafter to export", err=True)
    has_network = any(part.info.graphs is not None for part in parts)
    return wanted if has_network else [word for word in wanted if word != "drafter"]


def _run_again(recipe: str, settings: list[str]) -> str:
    """The command that decodes with what was exported."""
    return shlex.join(["specflow", "run", recipe, *(word for each in settings for word in ("--set", each))])


def _report(done: Exported, run_again: str) -> None:
    from rich.console import Console

    manifest, console = done.manifest, Console(highlight=False, soft_wrap=True, markup=False)
    console.print(_table(done))
    if (rounds := manifest.proof.rounds) is not None:
        drafted = f"{rounds.same_blocks} of {rounds.blocks} drafts and " if rounds.blocks else ""
        precise = manifest.precision.name == "float32"
        ties = f", {len(rounds.near_ties)} near-ties" if rounds.near_ties and precise else ""
        console.print(
            f"{rounds.rounds} rounds with torch and with the graphs: {drafted}{rounds.same_choices} of "
            f"{rounds.choices} tokens the same{ties}"
        )
    if (quality := manifest.quality) is not None:
        console.print(
            f"quality against float32: {quality.agreement:.1%} of {quality.positions} next tokens agree (at least "
            f"{quality.least_agreement:.0%}), perplexity {quality.perplexity_change:+.1%} (at most "
            f"{quality.most_perplexity_change:+.0%}){', forced' if manifest.forced else ''}"
        )
    console.print(_seconds(done), style="dim")
    console.print(f"next: {_next(done, run_again)}")


def _seconds(done: Exported) -> str:
    """What took its time, by the first word of each step."""
    spent: dict[str, float] = {}
    for step, seconds in done.seconds.items():
        verb = step.partition(" ")[0]
        spent[verb] = spent.get(verb, 0.0) + seconds
    return ", ".join(f"{verb} {seconds:.1f} s" for verb, seconds in spent.items())


def _table(done: Exported) -> Table:
    from rich import box
    from rich.table import Table

    precision = done.manifest.precision.name
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=f"in {done.folder}", caption_justify="left")
    table.add_column("graph")
    for name in ("MB", f"largest relative error, {precision}", "s"):
        table.add_column(name, justify="right")
    for part in done.manifest.parts:
        words = ("the target",) if part.kind == "target" else (f"the {part.folder}",)
        took = sum(done.seconds.get(f"{verb} {words[0]}", 0.0) for verb in ("writing", "checking", "comparing"))
        for index, (name, graph) in enumerate(part.graphs.items()):
            seconds = f"{took:.1f}" if index == 0 else ""
            table.add_row(f"{part.folder}/{name}", _size(graph), _error(done.manifest, part, name), seconds)
    return table


def _size(graph: GraphEntry) -> str:
    return f"{graph.weight_bytes / 1e6:.1f}"


def _error(manifest: Manifest, part: Part, graph: str) -> str:
    rows = [row.relative for row in manifest.proof.errors if (row.folder, row.graph) == (part.folder, graph)]
    return f"{max(rows):.1e}" if rows else "-"


def _next(done: Exported, run_again: str) -> str:
    """What to do with it."""
    part = next((part for part in done.manifest.parts if part.example is not None), None)
    if part is None:
        return run_again
    return shlex.join(
        ["python", str(done.folder / part.folder / "run_drafter.py"), str(done.folder / str(part.example))]
    )
