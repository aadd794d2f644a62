"""`specflow train`: the drafter of a recipe, trained for its target."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specflow.cli.convert import LayoutChoice
from specflow.cli.features import show_capture
from specflow.cli.progress import EVERY_S, working
from specflow.train.options import TrainOptions

if TYPE_CHECKING:
    from specflow.recipe import Recipe
    from specflow.train.processes import Processes
    from specflow.train.run import Progress, Session, TrainingRun

__all__ = ["train"]


def _option(name: str, *flags: str) -> Any:
    """An option of the command line that is one of `TrainOptions`, described there."""
    field = TrainOptions.model_fields[name]
    default = "" if field.default is None else f" [default: {field.default}]"
    return typer.Option(*flags, help=f"{field.description}{default}", show_default=False)


def train(
    recipe: Annotated[str, typer.Argument(help="recipe file or shipped name, of a drafter with weights")],
    output_dir: Annotated[Path, typer.Option("-o", "--output-dir", help="directory of the run, new or begun")],
    corpus: Annotated[Path | None, typer.Option("--corpus", help="answers of the target (specflow corpus)")] = None,
    data: Annotated[list[Path] | None, typer.Option("--data", help="prompts to draw answers to first (JSONL)")] = None,
    text: Annotated[list[Path] | None, typer.Option("--text", help="plain text beside the answers; repeatable")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="with --data: most response tokens to draw")] = None,
    steps: Annotated[int | None, _option("steps")] = None,
    epochs: Annotated[float | None, _option("epochs")] = None,
    batch_tokens: Annotated[int | None, _option("batch_tokens")] = None,
    accumulate: Annotated[int | None, _option("accumulate")] = None,
    max_length: Annotated[int | None, _option("max_length")] = None,
    lr: Annotated[float | None, _option("lr")] = None,
    warmup: Annotated[float | None, _option("warmup")] = None,
    clip: Annotated[float | None, _option("clip")] = None,
    weight_decay: Annotated[float | None, _option("weight_decay")] = None,
    seed: Annotated[int | None, _option("seed")] = None,
    held_out: Annotated[float | None, _option("held_out")] = None,
    evaluate_tokens: Annotated[int | None, _option("evaluate_tokens")] = None,
    depth: Annotated[int | None, _option("depth")] = None,
    anchors: Annotated[int | None, _option("anchors")] = None,
    draft_vocab: Annotated[int | None, _option("draft_vocab")] = None,
    start: Annotated[str | None, _option("start")] = None,
    calibration_rounds: Annotated[int | None, _option("calibration_rounds")] = None,
    dtype: Annotated[str | None, _option("dtype")] = None,
    objective: Annotated[list[str] | None, typer.Option(help="a published one, or key=value: rate=0.7")] = None,
    features: Annotated[str, typer.Option(help="online, or a directory of features that is made once")] = "online",
    checkpoint: Annotated[Path | None, typer.Option("--from", help="trained weights to begin with")] = None,
    evaluate_every: Annotated[int, typer.Option(min=1, help="steps between measurements on held-out texts")] = 250,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="steps between checkpoints")] = 100,
    minutes: Annotated[float | None, typer.Option(min=0, help="stop after so long; call again to go on")] = None,
    layout: Annotated[LayoutChoice | None, typer.Option(help="write it in this layout too (specflow convert)")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.key=value of the recipe")] = None,
) -> None:
    """Train the drafter of a recipe on its target's own answers.

    Called again with the same options, it goes on where it stopped, bit for bit. Writes model.safetensors, config.json,
    recipe.yaml, training.json, log.jsonl and curve.svg; with --layout also a folder for other engines.
    `torchrun --nproc-per-node 2 -m specflow train ...` trains in several processes, which share the batches of a step
    (--accumulate). Exit code 130 if interrupted.
    """
    given = locals()
    if (corpus is None) == (not data):
        raise typer.BadParameter("give --corpus DIR, or --data PROMPTS.jsonl to make one", param_hint="--corpus")
    if not _train(given, _options(given)):
        typer.echo(f"not all steps are made; call it again to go on in {output_dir}", err=True)
        raise typer.Exit(130)


def _train(given: Mapping[str, Any], options: TrainOptions) -> bool:
    """Whether the run came to its end."""
    from specflow.recipe import load_recipe
    from specflow.train.opening import trained_part
    from specflow.train.plain_text import check_text_files

    overrides, text = list(given["overrides"] or ()), tuple(given["text"] or ())
    check_text_files(text)
    recipe = load_recipe(given["recipe"], overrides)
    trained_part(recipe)
    with _processes(recipe) as processes:
        answers = given["corpus"] or _draw(recipe, given, processes)
        with working(f"loading {recipe.target.model}", processes.is_first):
            from specflow.build import load_target
            from specflow.train.run import RunPlan, Session, TrainingRun

            loaded = load_target(_placed(recipe, processes).target)
            features = None if given["features"] == "online" else Path(given["features"])
            plan = RunPlan(recipe, answers, given["output_dir"], options, features, given["checkpoint"], text)
            run = TrainingRun(plan, loaded, processes)
        session = Session(given["evaluate_every"], given["checkpoint_every"], given["minutes"])
        done = _go(run, session, processes)
        if done and processes.is_first and given["layout"] is not None:
            _lay_out(given["output_dir"], given["layout"])
        return done


def _lay_out(path: Path, layout: LayoutChoice) -> None:
    """Write the drafter of a finished run for others, unless that was done."""
    from specflow.cli.convert import convert

    place = path / layout.value
    if (place / "config.json").exists():
        typer.echo(f"{place} is there already", err=True)
    else:
        convert(str(path), layout, place)


def _options(given: Mapping[str, Any]) -> TrainOptions:
    from pydantic import ValidationError

    from specflow.errors import DataError

    set_here = {name: given[name] for name in TrainOptions.model_fields if given.get(name) is not None}
    if given["objective"]:
        set_here["objective"] = _objective(given["objective"])
    try:
        return TrainOptions.model_validate(set_here)
    except ValidationError as error:
        raise DataError(*_problem(error.errors()[0])) from error


def _problem(first: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Where, found, expected and what to do of a fault of pydantic's, without its own words for it."""
    from specflow.train.objective_options import ObjectiveOptions

    place = first["loc"]
    where = "--" + str(place[0]).replace("_", "-") if place else "the options"
    reason, help_hint = str(first["msg"]).removeprefix("Value error, "), "specflow train --help lists the options"
    key = ".".join(map(str, place[1:])).removesuffix(".[key]")
    if first["type"] == "extra_forbidden":
        keys = ", ".join(ObjectiveOptions.model_fields)
        return where, f"unknown key {key!r}", f"one of {keys}", f"{where} KEY=VALUE with one of these"
    if first["type"] == "value_error":
        return where, f"{key}: {reason}" if key else reason, "options that fit together", help_hint
    found, expected = f"{first['input']!r}", reason.removeprefix("Input should be ")
    return where, f"{key} is {found}" if key else found, expected, help_hint


def _objective(settings: list[str]) -> dict[str, Any]:
    """A published objective, changed by `key=value` settings."""
    from specflow.errors import DataError
    from specflow.recipe_yaml import Document
    from specflow.train.objective_options import OBJECTIVES

    names = [name for name in settings if "=" not in name]
    unknown = [name for name in names if name not in OBJECTIVES]
    if unknown or len(names) > 1:
        found = f"{unknown[0]!r}" if unknown else f"several: {', '.join(names)}"
        raise DataError("--objective", found, f"one of {', '.join(OBJECTIVES)}, and key=value")
    document = Document("--objective", OBJECTIVES[names[0]].model_dump() if names else {})
    for setting in settings:
        if "=" in setting:
            document.override(setting)
    if "losses" not in document.data:
        hint = f"--objective eagle3 --objective {settings[0]}"
        expected = f"one of {', '.join(OBJECTIVES)} to change, or losses.NAME=FACTOR"
        raise DataError("--objective", f"{settings[0]}, and no losses", expected, hint)
    return document.data


def _processes(recipe: Recipe) -> Processes:
    from specflow.device import find_device
    from specflow.train.processes import Processes

    return Processes(on_cpu=find_device(recipe.target.device, "target.device").type == "cpu")


def _placed(recipe: Recipe, processes: Processes) -> Recipe:
    """The recipe on this process's own device, where there are several."""
    from specflow.device import find_device

    device = processes.device(find_device(recipe.target.device, "target.device"))
    return recipe.model_copy(update={"target": recipe.target.model_copy(update={"device": str(device)})})


def _draw(recipe: Recipe, given: Mapping[str, Any], processes: Processes) -> Path:
    """Make the run's own corpus, in the first process while the others wait."""
    from specflow.cli.corpus import corpus

    path: Path = given["output_dir"] / "corpus"
    if processes.is_first:
        overrides = [setting for setting in given["overrides"] or () if setting.startswith("target.")]
        corpus(recipe.target.model, given["data"], path, tokens=given["tokens"], overrides=overrides)
    processes.wait()
    return path


def _go(run: TrainingRun, session: Session, processes: Processes) -> bool:
    """Capture, train and finish; whether all steps are made."""
    if run.store is not None:
        show_capture(run.store, run.lacking if processes.is_first else [], run.capture())
    with _asked() as asked, _progress(processes.is_first) as show:
        for progress in run.go(session, asked):
            show(progress)
    with working("measuring on all held-out texts", processes.is_first):
        figures = run.finish()
    if processes.is_first:
        typer.echo(_figures(figures) or "no text is held out: nothing was measured")
        typer.echo(f"step {run.step} of {run.steps} in {run.folder.path}", err=True)
    return run.done


@contextmanager
def _asked() -> Iterator[Callable[[], bool]]:
    """Whether the user interrupted: the step is then finished and kept. Interrupted again, the run ends at once."""
    stop = False

    def note(number: int, frame: object) -> None:
        nonlocal stop
        if stop:
            raise KeyboardInterrupt
        stop = True

    before = {kind: signal.signal(kind, note) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[Progress], None]]:
    """A status line on terminals, lines now and then elsewhere; nothing from processes beside the first."""
    from rich.console import Console

    console = Console(stderr=True)
    if not shown:
        yield lambda progress: None
    elif console.is_terminal:
        with console.status("training ...") as status:
            yield lambda progress: status.update(_line(progress))
    else:
        said = -EVERY_S

        def show(progress: Progress) -> None:
            nonlocal said
            if monotonic() - said >= EVERY_S or progress.step == progress.steps:
                said = monotonic()
                typer.echo(_line(progress), err=True)

        yield show


def _line(progress: Progress) -> str:
    made = progress.made
    left = progress.seconds / made * (progress.steps - progress.step)
    rate = progress.positions / progress.seconds
    seen = _figures(progress.held_out)
    parts = [f"step {progress.step}/{progress.steps}", f"loss {progress.loss:.4f}", *([seen] if seen else [])]
    return ", ".join([*parts, f"{rate:.0f} tokens/s", f"{left / 60:.0f} min left"])


def _figures(held_out: Mapping[str, Any] | None) -> str:
    """Acceptance on held-out texts, in a few words."""
    if not held_out:
        return ""
    rates = " ".join(map(_two_digits, held_out["accept_rate"]))
    length, greedy = _two_digits(held_out["length"]), _two_digits(held_out["greedy_length"])
    return f"accept@k {rates}, tau {length}, greedy {greedy}"


def _two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
