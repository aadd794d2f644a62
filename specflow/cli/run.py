"""`specflow run`: decode prompts with one recipe."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specflow.cli.progress import working
from specflow.errors import DataError, SpecFlowError

if TYPE_CHECKING:
    from specflow.engine import Engine
    from specflow.recipe import Recipe
    from specflow.types import Generation, Sampling

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One thing to continue, or the reason why it cannot be."""

    id: str
    where: str  # file and line, if it is a row of one
    messages: tuple[dict[str, str], ...] = ()
    error: str = ""


_Result = tuple[_Prompt, "Generation | SpecFlowError"]


@dataclass(frozen=True, slots=True)
class _Output:
    """Where text and figures go, and what every figure says of its origin."""

    as_json: bool
    stream: bool
    rows: Path | None
    facts: dict[str, Any]  # of the target, and whether the recipe is lossy


@dataclass(frozen=True, slots=True)
class _Job:
    """Prompts and what decodes them."""

    engine: Engine
    sampling: Sampling
    prompts: list[_Prompt]
    raw: bool
    output: _Output


def run(
    recipe: Annotated[str, typer.Argument(help="recipe file, or name of a shipped recipe")],
    prompt: Annotated[str | None, typer.Argument(help="the prompt; - reads it from stdin")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="JSONL with prompt, messages or turns")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.key=value")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="same as --set sampling.seed=...")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text itself, without chat template")] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="print each text when it is finished")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a prompt on stdout")] = False,
    output_dir: Annotated[Path | None, typer.Option(help="also write generations.jsonl and manifest.json")] = None,
) -> None:
    """Decode a prompt: text on stdout as it comes, one line of figures on stderr.

    Of `turns` the first one is answered. Exit code 1 if a prompt failed; the others are decoded; 130 if interrupted.
    With runtime.batch above 1 the rows of a file are decoded together, and each text comes when it is finished.
    """
    from specflow.recipe import load_recipe

    prompts = _prompts(prompt, data, raw)
    loaded = load_recipe(recipe, [*(overrides or ()), *([] if seed is None else [f"sampling.seed={seed}"])])
    with working(f"loading {loaded.target.model}"):
        from specflow.build import build_engine  # after the checks above, which need no torch

        engine = build_engine(loaded)
    facts = _facts(engine, loaded)
    rows = _open_output(output_dir, loaded, facts, data) if output_dir else None
    together = loaded.runtime.batch > 1 and len(prompts) > 1
    output = _Output(as_json, not (no_stream or as_json or together), rows, facts)
    job = _Job(engine, loaded.sampling, prompts, raw, output)
    results = _decode_together(job) if together else _decode_in_turn(job)
    failures = [prompt for prompt, result in results if not _report(job, prompt, result)]
    if failures:
        raise typer.Exit(1)


def _facts(engine: Engine, recipe: Recipe) -> dict[str, Any]:
    from specflow.bench.methods import engine_facts

    return {**engine_facts(engine, recipe.verify.lossy), "greedy_head": engine.target.info.greedy_head}


def _prompts(prompt: str | None, data: Path | None, raw: bool) -> list[_Prompt]:
    if (prompt is None) == (data is None):
        raise typer.BadParameter("give a prompt, - for stdin, or --data FILE", param_hint="PROMPT")
    if data is None:
        text = sys.stdin.read() if prompt == "-" else str(prompt)
        return [_Prompt("prompt", "prompt", ({"role": "user", "content": text},))]
    return list(_rows(data, raw))


def _rows(data: Path, raw: bool) -> Iterator[_Prompt]:
    from specflow.bench import BadRow, read_prompts

    for row in read_prompts(data):
        if isinstance(row, BadRow):
            yield _Prompt(row.key, row.key, error=row.reason)
        elif raw and row.opening:
            reason = "messages have roles, which --raw has no place for; expected prompt or turns"
            yield _Prompt(row.id, row.key, error=reason)
        else:
            yield _Prompt(row.id, row.key, tuple(row.messages(0, ())))


def _encode(job: _Job, prompt: _Prompt) -> Sequence[int]:
    if prompt.error:
        raise DataError(prompt.where, prompt.error)
    text = prompt.messages[-1]["content"]
    if not text.strip():
        raise DataError(prompt.where, "an empty prompt", "at least one character that is not blank")
    return job.engine.codec.encode(text) if job.raw else job.engine.codec.encode_chat(prompt.messages)


def _decode_in_turn(job: _Job) -> Iterator[_Result]:
    """Results as they come, one prompt at a time; text is shown while it grows."""
    for prompt in job.prompts:
        try:
            ids = _encode(job, prompt)
            _announce(job, prompt)
            (made,) = job.engine.generate([ids], job.sampling, _show if job.output.stream else None)
            yield prompt, made
        except SpecFlowError as error:
            yield prompt, _placed(error, prompt)


def _show(_: int, text: str) -> None:
    typer.echo(text, nl=False)


def _decode_together(job: _Job) -> Iterator[_Result]:
    """Results of one call that fills the batch, as they finish. What would refuse the whole call is found first."""
    from specflow.request import make_requests

    ready: list[tuple[_Prompt, Sequence[int]]] = []
    for prompt in job.prompts:
        try:
            ids = _encode(job, prompt)
            make_requests([ids], job.sampling)[0].check(job.engine.target.info.vocab_size, job.engine.context_length)
            ready.append((prompt, ids))
        except SpecFlowError as error:
            yield prompt, _placed(error, prompt)
    left = {index: prompt for index, (prompt, _) in enumerate(ready)}
    try:
        for event in job.engine.events([ids for _, ids in ready], job.sampling):
            if event.done is not None:
                prompt = left.pop(event.index)
                _announce(job, prompt)
                yield prompt, event.done
    except SpecFlowError as error:
        for prompt in left.values():
            yield prompt, _placed(error, prompt)


def _placed(error: SpecFlowError, prompt: _Prompt) -> SpecFlowError:
    """The error under the name of the user's row, not the engine's number of it."""
    if error.where == prompt.where:
        return error
    numbered = re.fullmatch(r"prompt \d+", error.where)
    where = prompt.where if numbered else f"{prompt.where}: {error.where}"
    return type(error)(where, error.found, error.expected, error.hint)


def _announce(job: _Job, prompt: _Prompt) -> None:
    if len(job.prompts) > 1 and not job.output.as_json:
        typer.echo(f"--- {prompt.id}", err=True)


def _report(job: _Job, prompt: _Prompt, result: Generation | SpecFlowError) -> bool:
    """Print and keep one result; whether it is one."""
    output = job.output
    if isinstance(result, SpecFlowError):
        typer.echo(f"error: {result}", err=True)
        _emit({"id": prompt.id, "row": prompt.where, "error": str(result)}, output)
        return False
    if not output.as_json:
        typer.echo("" if output.stream else result.text)
        typer.echo(_figures(job, result), err=True)
    _emit({"id": prompt.id, "row": prompt.where, **_row(result), **output.facts}, output)
    return True


def _figures(job: _Job, made: Generation) -> str:
    from specflow.bench.methods import outcome_of
    from specflow.measure import metrics

    outcome, figures, facts = outcome_of(made), metrics(made.counts), job.output.facts
    parts = [f"{len(made.prompt_tokens)} + {len(made.tokens)} tokens", f"finish {made.finish}"]
    if outcome.output_tps is not None:
        parts.append(f"{outcome.output_tps:.1f} tokens/s")
    parts.append(f"first token {1000 * made.timings.ttft_s:.0f} ms")
    if figures["mean_acceptance_length"] is not None:
        parts.append(f"acceptance length {figures['mean_acceptance_length']:.2f}")
    if figures["draft_acceptance_rate"] is not None:
        parts.append(
            f"{100 * figures['draft_acceptance_rate']:.0f} % of {figures['num_draft_tokens']} draft tokens accepted"
        )
    parts += [f"{facts['exactness']} in {facts['dtype']}", *(["lossy"] if facts["lossy"] else [])]
    if job.sampling.temperature > 0.0:
        parts.append(f"seed {made.seed}")
    return " · ".join(parts)


def _row(made: Generation) -> dict[str, Any]:
    from specflow.bench.methods import outcome_of
    from specflow.measure import metrics

    return {
        "text": made.text,
        "tokens": list(made.tokens),
        "prompt_tokens": len(made.prompt_tokens),
        "finish": made.finish,
        "stopped_by": made.stopped_by,
        "seed": made.seed,
        "logprobs": list(made.logprobs) if made.logprobs is not None else None,
        "output_tps": outcome_of(made).output_tps,
        "timings": asdict(made.timings),
        "metrics": metrics(made.counts),
    }


def _open_output(path: Path, recipe: Recipe, facts: dict[str, Any], data: Path | None) -> Path:
    from specflow.files import claim_directory, write_json_atomic
    from specflow.provenance import Provenance
    from specflow.recipe import recipe_data

    claim_directory(path)
    seed = recipe.sampling.seed
    provenance = Provenance.collect(facts["device"], [] if seed is None else [seed], [data] if data else [])
    manifest = {"recipe": recipe_data(recipe, full=True), "target": facts, **asdict(provenance)}
    write_json_atomic(path / "manifest.json", manifest)
    return path / "generations.jsonl"


def _emit(row: dict[str, Any], output: _Output) -> None:
    from specflow.files import append_jsonl

    if output.as_json:
        typer.echo(json.dumps(row, ensure_ascii=False))
    if output.rows is not None:
        append_jsonl(output.rows, row)
