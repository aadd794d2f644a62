"""`specflow search`: which sub-layers drafts do without, by measured speed."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specflow.cli.progress import counted, working

if TYPE_CHECKING:
    from specflow.bench import RunDirectory
    from specflow.build import LoadedTarget
    from specflow.recipe import Recipe
    from specflow.search import Found, SearchPlan

__all__ = ["search"]

SHOWN = 5


def search(
    recipe: Annotated[str, typer.Argument(help="recipe file or shipped name, of a source that skips sub-layers")],
    data: Annotated[list[Path], typer.Option("--data", help="JSONL of prompts to tune on; may be repeated")],
    limit: Annotated[int, typer.Option(min=1, help="most rows of each file")] = 8,
    trials: Annotated[int, typer.Option(min=1, help="skip sets to measure, earlier runs included")] = 60,
    budget: Annotated[float | None, typer.Option(min=0, help="begin no trial after this many seconds")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="tokens of every measured answer")] = 48,
    seed: Annotated[int, typer.Option(min=0, help="seed of the sampler and of the answers")] = 0,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.key=value of the recipe")] = None,
    output_dir: Annotated[Path | None, typer.Option("-o", "--output-dir", help="new directory of the search")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue a stopped search in --output-dir")] = False,
) -> None:
    """Search for the skip set that decodes fastest, against plain decoding measured in turns.

    Never give it prompts that you report results on. Writes best.yaml (a recipe), results.jsonl (one row a trial),
    study.journal and manifest.json. Exit code 130 if interrupted: what was measured is kept, and --resume goes on.
    """
    from specflow.recipe import load_recipe
    from specflow.search import SearchPlan, check_recipe

    if resume and output_dir is None:
        raise typer.BadParameter("--resume needs --output-dir", param_hint="--resume")
    chosen = _in_torch(check_recipe(load_recipe(recipe, overrides or ())))
    prompts = _read_prompts(data, limit)
    plan = SearchPlan(trials, budget, seed, max_new_tokens)
    with working(f"loading {chosen.target.model}"):
        from specflow.build import load_target

        target = load_target(chosen.target)
    tokens = [target.codec.encode_chat(messages) for messages in prompts]
    path = output_dir or Path("runs") / f"search-{datetime.now():%Y%m%d-%H%M%S}"
    store = _open(path, chosen, target, plan, data, resume)
    found, interrupted = _run(chosen, target, tokens, plan, store)
    for each in found[:SHOWN]:
        typer.echo(_line(each))
    if found and (found[0].ratio <= 1.0 or not (found[0].skip.attention or found[0].skip.mlp)):
        typer.echo("leaving sub-layers out was not faster than plain decoding: do not speculate with this source here")
    typer.echo(f"results in {store.path}", err=True)
    if interrupted:
        typer.echo(f"interrupted; continue with --resume -o {store.path}", err=True)
        raise typer.Exit(130)


def _in_torch(recipe: Recipe) -> Recipe:
    """The recipe with its target in torch, where a set of layers costs nothing to try.

    Raises:
        RecipeError: It asks for ONNX graphs, where every set would be written and opened as a model of its own.
    """
    from specflow.errors import RecipeError

    target = recipe.target
    if target.runtime in ("onnx", "openvino") or target.quantization:
        found = f"{target.runtime}, dtype {target.dtype}: every set of layers would be a graph of its own"
        raise RecipeError("target.runtime", found, "torch", "search in torch; what it finds runs anywhere")
    return recipe.model_copy(update={"target": target.model_copy(update={"runtime": "torch"})})


def _read_prompts(data: list[Path], limit: int) -> list[list[dict[str, str]]]:
    from specflow.bench import load_prompts
    from specflow.errors import DataError

    rows, bad = load_prompts(data, limit)
    for row in bad:
        typer.echo(f"{row.key}: {row.reason}", err=True)
    if not rows:
        raise DataError("--data", "no usable row", "prompts to tune on")
    return [row.messages(0, ()) for row in rows]


def _open(
    path: Path, recipe: Recipe, target: LoadedTarget, plan: SearchPlan, data: list[Path], resume: bool
) -> RunDirectory:
    """The directory of the study, new or continued; how long to search may change between sessions."""
    from specflow.bench import RunDirectory
    from specflow.bench.methods import target_facts
    from specflow.files import file_sha256
    from specflow.provenance import Provenance
    from specflow.recipe import recipe_data

    decides: dict[str, Any] = asdict(plan)
    for name in ("trials", "budget_s"):
        del decides[name]
    settings = {
        "recipe": recipe_data(recipe, full=True),
        "target": target_facts(target.target.info),
        "data": {str(file): file_sha256(file) for file in data},
        "plan": decides,
    }
    provenance = Provenance.collect(str(target.target.info.device), [plan.seed], data)
    return RunDirectory(path, settings, provenance, resume)


def _run(
    recipe: Recipe, target: LoadedTarget, prompts: list[list[int]], plan: SearchPlan, store: RunDirectory
) -> tuple[list[Found], bool]:
    """All sets measured, the fastest first; and whether the user interrupted."""
    from specflow.search import SkipSearch

    study = SkipSearch(recipe, target, prompts, plan, store)
    try:
        if not store.rows:
            with counted(4 * target.target.info.num_layers) as advance:
                study.prepare(advance)
        with counted(plan.trials - len(store.rows)) as advance:
            study.run(advance)
    except KeyboardInterrupt:
        store.close("interrupted")
        return study.ranked(), True
    store.close("complete")
    return study.ranked(), False


def _line(found: Found) -> str:
    trials = f"{found.num_trials} trial{'s' * (found.num_trials > 1)}"
    return (
        f"{found.ratio:.3f} of plain speed, acceptance length {found.acceptance_length:.2f}, "
        f"{trials}: attention {sorted(found.skip.attention)}, MLP {sorted(found.skip.mlp)}"
    )
