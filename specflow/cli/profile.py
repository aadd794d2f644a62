"""`specflow profile`: the cost model of a target and a drafter on this device, measured, kept and shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specflow.cli.output import deliver
from specflow.cli.progress import counted, working

if TYPE_CHECKING:
    from rich.table import Table

    from specflow.build import LoadedTarget
    from specflow.cost import CostModel, ProfileKey, Timing
    from specflow.engine import EngineParts
    from specflow.profiling import Plan
    from specflow.recipe import Recipe

__all__ = ["profile"]

SHOWN_ROWS = 8
SHOWN_DOUBTS = 5
LEAST_WIDTH = 100
DOUBT = "~"


def profile(
    recipe: Annotated[str, typer.Argument(help="a recipe file, or the name of a shipped recipe")],
    contexts: Annotated[
        str, typer.Option(help="committed tokens, such as 64,512; else 64,512,1024 as far as they fit")
    ] = "",
    batches: Annotated[str, typer.Option(help="requests decoded together, such as 1,4; else 1 and runtime.batch")] = "",
    rows: Annotated[str, typer.Option(help="rows of a target pass, such as 1,2,4,8; else a grid from 1 to 64")] = "",
    repeat: Annotated[int, typer.Option(min=1, help="timings of every point; fewer than 3 are not trusted")] = 5,
    budget: Annotated[float | None, typer.Option(min=0.0, help="seconds after which no timing begins")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the profile here too")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw it as SVG")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the profile as JSON on stdout")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.key=value")] = None,
) -> None:
    """Measure what target passes, drafts and rounds cost here; length policies that weigh costs read the result.

    The profile is kept in the cache directory, for this target, this draft section (of any k) and this machine.
    """
    from specflow.profiling import CONTEXTS, ROWS, Plan
    from specflow.recipe import load_recipe

    loaded_recipe = load_recipe(recipe, overrides or ())
    asked = Plan(
        rows=_numbers(rows, "--rows") or ROWS,
        contexts=_numbers(contexts, "--contexts") or CONTEXTS,
        batches=_numbers(batches, "--batches") or (1, loaded_recipe.runtime.batch),
        repeat=repeat,
        budget_s=budget,
    )
    key, model, data = _measure(loaded_recipe, asked, stretch=not contexts)
    try:
        _keep(key, data, output)
    finally:  # what took minutes to measure is shown whatever a disk says
        _report(model, data, f"{loaded_recipe.name or Path(recipe).stem} on {key.target['name']}", plot, as_json)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers", param_hint=option) from error
    if any(number < 1 for number in found):
        raise typer.BadParameter(f"{min(found)} is below 1", param_hint=option)
    return found


def _measure(recipe: Recipe, asked: Plan, stretch: bool) -> tuple[ProfileKey, CostModel, dict[str, Any]]:
    """Load, measure, and put the profile together."""
    from specflow.cost import ProfileKey, profile_data

    with working(f"loading {recipe.target.model}"):
        from specflow.build import load_target

        loaded = load_target(recipe.target)
    from specflow.profiling import Profiler, make_plan
    from specflow.provenance import Provenance

    parts = _parts(recipe, loaded)
    plan = make_plan(parts, recipe.draft.k if recipe.draft else 0, asked, stretch)
    provenance = asdict(Provenance.collect(str(loaded.target.info.device)))
    with counted(plan.num_points * plan.repeat) as advance:
        model = Profiler(parts, plan, recipe.sampling).measure(advance)
    key = ProfileKey.of(recipe, loaded.target.info)
    conditions = {"plan": asdict(plan), "verify": recipe.verify.rule, "temperature": recipe.sampling.temperature}
    data = profile_data(key, model, {**provenance, **conditions})
    return key, model, data


def _parts(recipe: Recipe, loaded: LoadedTarget) -> EngineParts:
    """The parts of a round. The recipe's own length policy may need the very profile that is measured here."""
    from specflow.build import build_drafter, build_rule, threads_beside
    from specflow.engine import EngineParts
    from specflow.graph import DecodeGraph
    from specflow.length import Fixed

    DecodeGraph.from_recipe(recipe).check(loaded.facts)
    return EngineParts(
        target=loaded.target,
        codec=loaded.codec,
        rule=build_rule(recipe),
        length=Fixed(recipe.draft.k if recipe.draft else 0),
        drafter=build_drafter(recipe, loaded),
        torch_threads=threads_beside(recipe, loaded),
    )


def _keep(key: ProfileKey, data: dict[str, Any], output: Path | None) -> None:
    from specflow.cost import profiles_dir, save_profile

    for path in (*([output] if output is not None else []), profiles_dir() / key.file_name):
        save_profile(path, data)
        typer.echo(f"wrote {path}", err=True)


def _report(model: CostModel, data: dict[str, Any], title: str, plot: Path | None, as_json: bool) -> None:
    caption = _caption(data["target"], data["machine"])
    doubts = list(model.doubts())
    for doubt in doubts[:SHOWN_DOUBTS]:
        typer.echo(f"not trusted: {doubt}", err=True)
    if more := len(doubts[SHOWN_DOUBTS:]):
        typer.echo(f"not trusted: {more} more of {len(doubts)}; the profile names them all", err=True)
    if as_json:
        typer.echo(json.dumps(data, ensure_ascii=False))
    else:
        _show(model, f"{title}\n{caption}")
    if plot is not None:
        from specflow.plot import draw_profile

        deliver(draw_profile(model, title, caption), plot)


def _caption(target: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    device = facts.get("gpu") or f"{facts['cpu_model']}, {facts['threads']} threads"
    return f"{target['dtype']}, {target['runtime']} runtime, {device}, torch {facts['torch']}"


def _show(model: CostModel, title: str) -> None:
    from rich.console import Console

    console = Console(width=max(Console().width, LEAST_WIDTH))
    console.print(title, markup=False, highlight=False)
    for batch in sorted({timing.batch for timing in model.target}):
        console.print(_target_table(model, batch))
        if model.draft:
            console.print(_round_table(model, batch))
        for line in _in_words(model, batch):
            console.print(line, markup=False, highlight=False)
    if not model.trusted:
        console.print(f"{DOUBT} spread too wide, or too few repeats, to be trusted", markup=False)


def _target_table(model: CostModel, batch: int) -> Table:
    """Milliseconds by rows and context, as measured; and in passes of one row."""
    timings = _by_place(model.target, batch)
    contexts = sorted({context for _, context in timings})
    table = _table(f"target pass, batch {batch}", "rows")
    for context in contexts:
        table.add_column(f"ms\nat {context}", justify="right")
        table.add_column("times\n1 row", justify="right")
    for rows in sorted({size for size, _ in timings}):
        cells = []
        for context in contexts:
            share = model.target_s(rows, batch, context) / model.target_s(1, batch, context)
            cells += [_cell(timings.get((rows, context))), f"{share:.2f}"]
        table.add_row(str(rows), *cells)
    return table


def _round_table(model: CostModel, batch: int) -> Table:
    """By depth and context: the draft, the whole round in plain steps, and from which acceptance on it pays."""
    timings = _by_place(model.draft, batch)
    contexts = sorted({context for _, context in timings})
    table = _table(f"rounds, batch {batch}", "depth")
    if model.nodes:
        table.add_column("nodes", justify="right")
    for context in contexts:
        for name in (f"draft ms\nat {context}", "plain\nsteps", "pays\nabove"):
            table.add_column(name, justify="right")
    for depth in sorted({size for size, _ in timings}):
        cells = [str(model.rows(depth) - 1)] if model.nodes else []
        for context in contexts:
            chance = model.break_even(depth, batch, context)
            price = f"{model.plain_steps(depth, batch, context):.2f}"
            cells += [_cell(timings.get((depth, context))), price, "never" if chance is None else f"{chance:.2f}"]
        table.add_row(str(depth), *cells)
    return table


def _in_words(model: CostModel, batch: int) -> list[str]:
    context = min(timing.context for timing in model.target)
    share = model.target_s(SHOWN_ROWS, batch, context) / model.target_s(1, batch, context)
    lines = [f"verifying {SHOWN_ROWS} rows costs {share:.2f} passes of one row (context {context})"]
    deepest = max((timing.size for timing in model.overhead if timing.batch == batch), default=0)
    spent = [f"{1e3 * model.overhead_s(depth, batch):.2f} ms at depth {depth}" for depth in sorted({0, deepest})]
    doubt = any(not timing.trusted for timing in model.overhead if timing.batch == batch)
    lines.append(f"a round spends {', '.join(spent)} outside draft and target{DOUBT if doubt else ''}")
    if model.draft:
        lines.append("pays above: the chance of each token, given the ones before, from which on the depth pays")
    return lines


def _by_place(timings: tuple[Timing, ...], batch: int) -> dict[tuple[int, int], Timing]:
    return {(timing.size, timing.context): timing for timing in timings if timing.batch == batch}


def _cell(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    return f"{1e3 * timing.seconds.median:.2f}{'' if timing.trusted else DOUBT}"


def _table(title: str, first: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, justify="right")
    return table
