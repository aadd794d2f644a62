"""`specflow export engine`: a recipe as the configuration of a serving engine."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from specflow.cost import CostModel
    from specflow.export.engines.base import Exported
    from specflow.export.recipe_view import RecipeView
    from specflow.recipe import Recipe

__all__ = ["export_engine"]

ACCEPTANCE = 0.7
GAINS = "expected_gain"
"""The policy by which measured costs decide; what another one says is not overruled."""


def export_engine(
    engine: Annotated[str, typer.Argument(help="vllm, sglang, tensorrt_llm, llama_cpp, transformers, ...")],
    recipe: Annotated[str, typer.Argument(help="recipe file, or name of a shipped recipe")],
    version: Annotated[str | None, typer.Option("--engine-version", help="its version; the newest known one")] = None,
    profile: Annotated[Path | None, typer.Option(help="what `specflow profile -o` measured")] = None,
    acceptance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="with a profile: chance that a draft token stands (specflow bench)")
    ] = ACCEPTANCE,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="new or empty directory for all files")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.key=value of the recipe")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything as one JSON object on stdout")] = False,
) -> None:
    """Write a recipe as a launch command and files of an engine, with a list of what the engine cannot do.

    A profile, or the costs that a tuned recipe carries, becomes a batch schedule or a cost table where there is one.
    """
    from specflow.export.engines.base import choose_dialect, find_engine
    from specflow.recipe import load_recipe

    found = find_engine(engine)
    dialect = choose_dialect(found, version)
    view, notes = _view(load_recipe(recipe, overrides or ()), profile, acceptance)
    done = found.export(view, dialect)
    if version is not None and _is_newer(version, dialect.until):
        notes.append(f"{found.name} {version} is newer than {dialect.until}, the last version that was checked")
    if output is not None:
        _write(done, output, notes)
    if as_json:
        typer.echo(json.dumps({**asdict(done), "notes": [*notes, *done.notes]}, ensure_ascii=False))
    else:
        _report(done, output, notes)


def _is_newer(version: str, checked: str) -> bool:
    from specflow.export.engines.base import version_key

    return version_key(version) > version_key(checked)


def _view(recipe: Recipe, profile: Path | None, acceptance: float) -> tuple[RecipeView, list[str]]:
    """The recipe as engines see it, and what was assumed about it."""
    from specflow.export.batch_schedule import batch_schedule
    from specflow.export.recipe_view import view_of

    costs = _costs(recipe, profile)
    if costs is None or recipe.draft is None or not recipe.draft.k:
        return view_of(recipe, costs), []
    if recipe.length.policy != GAINS:
        said = f"length.policy {recipe.length.policy}: draft lengths do not follow the profile"
        return view_of(recipe, costs), [f"{said}; --set length.policy={GAINS} does"] if profile is not None else []
    contexts = sorted({timing.context for timing in costs.target})
    context = contexts[len(contexts) // 2]
    schedule = batch_schedule(costs, recipe.draft.k, acceptance, context)
    notes = [
        f"draft lengths by batch size: as measured at {context} committed tokens, if a draft token stands with chance "
        f"{acceptance:g} (--acceptance; `specflow bench` measures it)"
    ]
    if doubts := list(costs.doubts()):
        notes.append(f"{len(doubts)} timings of the profile spread too wide to be trusted, such as {doubts[0]}")
    return view_of(recipe, costs, schedule, context), notes


def _costs(recipe: Recipe, profile: Path | None) -> CostModel | None:
    """Measured costs: of a profile, else those that the recipe carries."""
    if profile is not None:
        from specflow.cost import load_profile

        return load_profile(profile)
    if (carried := recipe.runtime.costs) is None:
        return None
    from specflow.cost_table import model_of

    return model_of(carried)


def _write(done: Exported, output: Path, notes: list[str]) -> None:
    from specflow.export.folder import building, release

    about = {**asdict(done), "notes": [*notes, *done.notes]}
    del about["files"]
    script = f'#!/bin/sh\n# {done.engine} {done.versions}\ncd "$(dirname "$0")"\nexec {shlex.join(done.command)} "$@"\n'
    with building(output) as work:
        for name, text in {**done.files, "launch.sh": script}.items():
            (work / name).write_text(text, encoding="utf-8")
        (work / "export.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (work / "launch.sh").chmod(0o755)
        release(work, output)


def _report(done: Exported, output: Path | None, notes: list[str]) -> None:
    typer.echo(f"# {done.engine} {done.versions}")
    typer.echo(shlex.join(done.command))
    for name, text in done.files.items():
        typer.echo(f"\n# {output / name if output is not None else name}")
        if output is None:
            typer.echo(text.rstrip("\n"))
    for note in (*notes, *done.notes):
        typer.echo(f"note: {note}", err=True)
    for gap in done.not_expressible:
        typer.echo(f"not expressible: {gap.what}: {gap.instead}", err=True)
    if output is not None:
        typer.echo(f"wrote {output}; start with {output / 'launch.sh'}", err=True)
