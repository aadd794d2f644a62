"""`specflow tune`: which method, how deep, with which length policy; or plain decoding."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specflow.cli.progress import working

if TYPE_CHECKING:
    from specflow.build import LoadedTarget
    from tuner.recipes import Chosen
    from tuner.session import Order

__all__ = ["seconds_of", "tune"]

OBJECTIVE = (
    "what decides: throughput (tokens/s of all requests together); latency (seconds from a request's first token to "
    "its last, 95th percentile, the prompt's pass left out); memory (the least beyond plain decoding's, of what beats "
    "its throughput). Several, such as latency,memory: each decides among those the one before cannot tell apart"
)
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def tune(
    more: Annotated[list[str] | None, typer.Argument(help="more recipes, as a shell expands a pattern")] = None,
    data: Annotated[list[Path] | None, typer.Option("--data", help="JSONL of prompts like yours; repeatable")] = None,
    target: Annotated[str | None, typer.Option("--target", help="model of all recipes; else what they name")] = None,
    recipes: Annotated[list[str] | None, typer.Option("--recipes", help="files or names; else all shipped")] = None,
    objective: Annotated[str, typer.Option(help=OBJECTIVE)] = "throughput",
    concurrency: Annotated[str, typer.Option(help="requests at once, such as 1,4,16; the first decides")] = "1",
    budget: Annotated[str, typer.Option(help="such as 20m; else as long as it takes")] = "",
    storage: Annotated[str, typer.Option(help="journal file or Optuna URL that workers share; else in -o")] = "",
    output_dir: Annotated[Path | None, typer.Option("-o", "--output-dir", help="new directory of the run")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with a stopped run in --output-dir")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="most rows of each file")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="length cap of every answer")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="answers of fixed length")] = False,
    trials: Annotated[int, typer.Option(min=1, help="candidates of a space too large to go through")] = 300,
    finalists: Annotated[int, typer.Option(min=1, help="predicted candidates that are run for real")] = 4,
    passes: Annotated[int, typer.Option(min=1, help="most times that finalists run all prompts")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="of the search, and of the first prompt's answer")] = 0,
    trust_noise: Annotated[bool, typer.Option("--trust-noise", help="take timings however they spread")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.key=value of all recipes")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the result as JSON on stdout")] = False,
) -> None:
    """Measure the machine and the workload, and choose how to decode.

    Writes tuned.yaml (a recipe that runs as it stands), report.html (one page that works offline), tuned.json, the
    trace and the study. Never tune on prompts that you report results on.
    """
    from tuner.recipes import read_recipes
    from tuner.scoring import check_objectives
    from tuner.session import Order
    from tuner.workload import Asked

    if not data:
        raise typer.BadParameter("give a JSONL file of prompts", param_hint="--data")
    if resume and output_dir is None:
        raise typer.BadParameter("--resume needs --output-dir", param_hint="--resume")
    asked = Asked(tuple(data), limit, max_new_tokens, seed)
    where = output_dir or Path("runs") / f"tune-{datetime.now():%Y%m%d-%H%M%S}"
    objectives, loads = tuple(dict.fromkeys(_parts(objective))), _numbers(concurrency)
    check_objectives(objectives)
    order = Order(asked, where, objectives, loads, seconds_of(budget) if budget else None, storage)
    order = replace(order, trials=trials, finalists=finalists, passes=passes)
    order = replace(order, ignore_eos=ignore_eos, trust_noise=trust_noise)
    chosen = read_recipes([*(recipes or ()), *(more or ())], target, overrides or ())
    _carry_out(order, chosen, resume, as_json)


def _carry_out(order: Order, chosen: Chosen, resume: bool, as_json: bool) -> None:
    from specflow.errors import SpecFlowError
    from tuner.explain import explain
    from tuner.session import carry_out, claim, give_back
    from tuner.storage import check_storage
    from tuner.workload import read_rows

    rows = read_rows(order.asked)
    if order.storage:
        check_storage(order.storage)
    claim(order.directory, order, resume)
    try:
        result = carry_out(order, chosen, rows, lambda: _load(chosen), _Lines())
    except SpecFlowError as error:
        give_back(order.directory, error)
        raise
    typer.echo(result.model_dump_json() if as_json else explain(result), nl=as_json)
    typer.echo(f"results in {order.directory}", err=True)


def seconds_of(text: str) -> float:
    """A length of time such as 90, 90s, 20m or 1.5h."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if found is None or float(found[1]) <= 0:
        raise typer.BadParameter(f"{text!r} is no length of time such as 90s, 20m or 1h", param_hint="--budget")
    return float(found[1]) * UNITS[found[2]]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(dict.fromkeys(int(part) for part in _parts(text)))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers", param_hint="--concurrency") from error
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{text!r} holds no number of requests", param_hint="--concurrency")
    return found


def _load(chosen: Chosen) -> LoadedTarget:
    with working(f"loading {chosen.plain.target.model}"):
        from specflow.build import load_target

        return load_target(chosen.plain.target)


class _Lines:
    """A line on stderr at most every few seconds."""

    def __init__(self) -> None:
        from time import monotonic

        self._clock, self._said, self._count = monotonic, monotonic(), 0

    def __call__(self, what: str) -> None:
        from specflow.cli.progress import EVERY_S

        self._count += 1
        now = self._clock()
        if now - self._said >= EVERY_S:
            self._said = now
            typer.echo(f"{self._count} {what}", err=True)
