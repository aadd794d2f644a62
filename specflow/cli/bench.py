"""`specflow bench`: recipes and peers measured against each other in one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specflow.cli.progress import counted, working
from specflow.errors import DataError, RecipeError

if TYPE_CHECKING:
    from specflow.bench import BadRow, Method, Plan, PromptRow, RunDirectory
    from specflow.build import LoadedTarget
    from specflow.recipe import Recipe
    from specflow.types import Sampling

__all__ = ["bench"]

BASELINE = "vanilla"
LEAST_WIDTH = 100
DECIDED_BY_RUN = {"max_new_tokens", "ignore_eos", "seed"}


@dataclass(frozen=True, slots=True)
class _Job:
    """What the command line asked for, checked before any model is loaded."""

    recipes: dict[str, Recipe]  # the baseline among them
    baseline: str
    peers: tuple[str, ...]
    prompts: list[PromptRow]
    bad: list[BadRow]
    plan: Plan
    data: tuple[Path, ...]

    @property
    def first(self) -> Recipe:
        return next(iter(self.recipes.values()))


def bench(
    recipes: Annotated[list[str], typer.Argument(help="recipe files, or names of shipped recipes")],
    data: Annotated[list[Path], typer.Option("--data", help="JSONL with prompt, messages or turns; may be repeated")],
    peer: Annotated[list[str] | None, typer.Option("--peer", help="also measure: transformers")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="most rows of each file")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="length cap of every answer")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="measurements of every prompt and method")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="unmeasured generations of every method first")] = 1,
    dtype: Annotated[str | None, typer.Option(help="same as --set target.dtype=...")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key.key=value; draft, verify, length only where a draft is")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="answers of fixed length, for speed")] = False,
    turns: Annotated[str, typer.Option(help="first, or all: later turns follow vanilla's answers")] = "first",
    seed: Annotated[int, typer.Option(min=0, help="seed of the first prompt; the next ones count up")] = 0,
    output_dir: Annotated[Path | None, typer.Option("-o", "--output-dir", help="new directory of the run")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue an interrupted run in --output-dir")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="summary as JSON on stdout")] = False,
) -> None:
    """Measure recipes and peers, interleaved prompt by prompt, against plain decoding.

    Writes results.jsonl (one row a measurement, as they come), summary.csv, acceptance.csv,
    context.csv and manifest.json.
    Exit code 1 if anything failed (the rest is measured), 130 if interrupted (what was measured is kept).
    """
    from specflow.bench import Plan, load_prompts

    if turns not in ("first", "all"):
        raise typer.BadParameter("must be first or all", param_hint="--turns")
    if resume and output_dir is None:
        raise typer.BadParameter("--resume needs --output-dir", param_hint="--resume")
    settings = [*(overrides or ()), *([f"target.dtype={dtype}"] if dtype else [])]
    plan = Plan(max_new_tokens, repeat, warmup, ignore_eos, turns == "all", seed)
    prompts, bad = load_prompts(data, limit)
    for row in bad:
        typer.echo(f"{row.key}: {row.reason}", err=True)
    chosen, baseline = _load_recipes(recipes, settings)
    job = _Job(chosen, baseline, tuple(peer or ()), prompts, bad, plan, tuple(data))
    _check_peers(job)
    store, interrupted = _measure(job, output_dir or _fresh_directory(), resume)
    _report(store, baseline, as_json)
    if interrupted:
        typer.echo(f"interrupted; continue with --resume -o {store.path}", err=True)
        raise typer.Exit(130)
    if any("error" in row for row in store.rows):
        raise typer.Exit(1)


def _fresh_directory() -> Path:
    return Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"


def _load_recipes(names: Sequence[str], settings: Sequence[str]) -> tuple[dict[str, Recipe], str]:
    """Recipes by name, plain decoding first; and the name of plain decoding."""
    from specflow.recipe import Recipe, load_recipe

    loaded: dict[str, Recipe] = {}
    plain = {name: load_recipe(name).draft is None for name in names}
    unused = [setting for setting in settings if all(plain.values()) and not _applies_to_plain(setting)]
    if unused:
        key = unused[0].split("=")[0]
        raise RecipeError(f"--set {key}", "no recipe of this run drafts", "a key that one of them has")
    for name in names:
        fitting = [setting for setting in settings if not plain[name] or _applies_to_plain(setting)]
        recipe = load_recipe(name, fitting)
        label = recipe.name or Path(name).stem
        if label in loaded:
            raise RecipeError(name, f"a second recipe named '{label}'", "names that tell the results apart")
        if recipe.runtime.batch > 1:
            raise RecipeError(
                f"{name}: runtime.batch",
                f"{recipe.runtime.batch}; prompts are measured one at a time",
                "1",
                "add --set runtime.batch=1, or decode the file with `specflow run --data`",
            )
        loaded[label] = recipe
    first = next(iter(loaded.values()))
    for label, recipe in loaded.items():
        if recipe.target != first.target or _compared(recipe.sampling) != _compared(first.sampling):
            raise RecipeError(
                label, "another target or sampling than the recipe before", "one target and one sampling in a run"
            )
    for label, recipe in loaded.items():
        if recipe.draft is None or recipe.draft.k == 0:
            return {label: recipe, **loaded}, label
    if BASELINE in loaded:
        raise RecipeError(BASELINE, "a drafting recipe named like plain decoding", "another name")
    plain_recipe = Recipe(name=BASELINE, target=first.target, sampling=first.sampling, runtime=first.runtime)
    return {BASELINE: plain_recipe, **loaded}, BASELINE


def _applies_to_plain(setting: str) -> bool:
    return setting.split("=")[0].split(".")[0] not in ("draft", "verify", "length")


def _compared(sampling: Sampling) -> Sampling:
    """Sampling without what the run itself decides."""
    from specflow.types import Sampling

    return Sampling(**sampling.model_dump(exclude=DECIDED_BY_RUN))


def _check_peers(job: _Job) -> None:
    from specflow.bench.peers import PEERS
    from specflow.types import Sampling

    for name in job.peers:
        if name not in PEERS:
            raise DataError("--peer", f"'{name}' is not known", f"one of: {', '.join(PEERS)}")
    if job.peers and _compared(job.first.sampling) != Sampling():
        raise DataError("--peer", "the recipes do not decode greedily without processors", "default sampling")


def _measure(job: _Job, path: Path, resume: bool) -> tuple[RunDirectory, bool]:
    """Load models, open the run directory, measure; and whether the user interrupted it."""
    from specflow.bench import Bench, RunDirectory
    from specflow.bench.divergence import DivergenceJudge
    from specflow.provenance import Provenance

    with working(f"loading {job.first.target.model}"):
        from specflow.build import load_target

        target = load_target(job.first.target)
    seeds = range(job.plan.seed, job.plan.seed + len(job.prompts))
    provenance = Provenance.collect(str(target.target.info.device), seeds, job.data)
    store = RunDirectory(path, _settings(job, target), provenance, resume)
    with working(f"preparing {', '.join((*job.recipes, *job.peers))}"):
        methods = _methods(job, target)
    explain = DivergenceJudge(target.target, job.first.sampling).explain
    runner = Bench(methods, job.baseline, target.codec.encode_chat, job.plan, store, explain)
    try:
        with counted(job.plan.num_measurements(job.prompts, len(methods))) as advance:
            runner.run(job.prompts, job.bad, advance)
    except KeyboardInterrupt:
        store.close("interrupted")
        return store, True
    store.close("complete")
    return store, False


def _settings(job: _Job, target: LoadedTarget) -> dict[str, Any]:
    """Everything that decides what a row measures."""
    from specflow.bench.methods import target_facts
    from specflow.files import file_sha256
    from specflow.recipe import recipe_data

    return {
        "recipes": {name: recipe_data(recipe, full=True) for name, recipe in job.recipes.items()},
        "target": target_facts(target.target.info),
        "peers": job.peers,
        "data": {str(path): file_sha256(path) for path in job.data},
        "rows": [*(row.key for row in job.prompts), *(row.key for row in job.bad)],
        "plan": asdict(job.plan),
    }


def _methods(job: _Job, target: LoadedTarget) -> list[Method]:
    from specflow.bench import EngineMethod
    from specflow.bench.methods import engine_facts
    from specflow.bench.peers import PeerTarget, load_peers
    from specflow.build import build_engine
    from specflow.target.load import resolve_model

    methods: list[Method] = []
    for name, recipe in job.recipes.items():
        engine = build_engine(recipe, target)
        methods.append(EngineMethod(name, engine, recipe.sampling, engine_facts(engine, recipe.verify.lossy)))
    if job.peers:
        info, section = target.target.info, job.first.target
        directory = resolve_model(section.model, section.revision).directory
        methods.extend(
            load_peers(job.peers, PeerTarget(directory, info.dtype, info.device, info.stop_ids, target.codec.decode))
        )
    return methods


def _report(store: RunDirectory, baseline: str, as_json: bool) -> None:
    from rich.console import Console

    from specflow.bench import acceptance_rows, summarise
    from specflow.bench.summary import acceptance_csv, context_csv, context_rows, summary_csv
    from specflow.bench.table import summary_table

    summary, rates = summarise(store.rows, baseline), acceptance_rows(store.rows)
    failures = [row for row in store.rows if "error" in row]
    store.write_text("summary.csv", summary_csv(summary))
    store.write_text("acceptance.csv", acceptance_csv(rates))
    store.write_text("context.csv", context_csv(context_rows(store.rows)))
    for row in failures:
        what = " ".join(str(row[name]) for name in ("method", "repetition") if name in row)
        typer.echo(f"failed: {row['file']}:{row['line']} {what}: {row['error']}", err=True)
    for row in store.rows:
        if row.get("divergence") == "bug":
            _warn_of_bug(row)
    if as_json:
        acceptance = [{"subset": subset, "strategy": name, **asdict(rate)} for subset, name, rate in rates]
        report = {"output_dir": str(store.path), "summary": [asdict(row) for row in summary]}
        typer.echo(json.dumps({**report, "acceptance": acceptance, "failures": failures}, ensure_ascii=False))
        return
    if summary:
        console = Console(width=max(Console().width, LEAST_WIDTH))  # a cut figure is worse than a wrapped line
        console.print(summary_table(summary, baseline))
    typer.echo(f"results in {store.path}", err=True)


def _warn_of_bug(row: dict[str, Any]) -> None:
    margin = row["divergence_margin"]
    gap = f"logit gap {margin:.3g}" if margin is not None else "one text ends, or a token is impossible"
    control = f"{row['control_agrees']} of {row['control_scored']} tokens of plain decoding hold in passes of many rows"
    typer.echo(
        f"not a near-tie: {row['file']}:{row['line']} {row['method']} differs at token {row['first_divergence']}: "
        f"{gap}, tolerance {row['divergence_tolerance']:g}; {control}",
        err=True,
    )
