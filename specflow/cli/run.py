"""`specflow run`: decode prompts with one recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    messages: tuple[dict[str, str], ...] = ()
    error: str = ""


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

    Of `turns` the first one is answered. Exit code 1 if a prompt failed; the others are decoded. With runtime.batch
    above 1 the rows of a file are decoded together, and texts come when all are finished.
    """
    from specflow.recipe import load_recipe

    prompts = _prompts(prompt, data, raw)
    loaded = load_recipe(recipe, [*(overrides or ()), *([] if seed is None else [f"sampling.seed={seed}"])])
    from specflow.build import build_engine  # after the checks above, which need no torch

    engine = build_engine(loaded)
    facts = _facts(engine, loaded)
    rows = _open_output(output_dir, loaded, facts, data) if output_dir else None
    together = loaded.runtime.batch > 1 and len(prompts) > 1
    output = _Output(as_json, not (no_stream or as_json or together), rows, facts)
    job = _Job(engine, loaded.sampling, prompts, raw, output)
    results = _decode_together(job) if together else _decode_in_turn(job)
    failures = sum(not _report(job, *each) for each in zip(prompts, results, strict=True))
    if failures:
        raise typer.Exit(1)


def _facts(engine: Engine, recipe: Recipe) -> dict[str, Any]:
    from specflow.bench.methods import target_facts

    return {**target_facts(engine.target.info), "lossy": recipe.verify.lossy}


def _prompts(prompt: str | None, data: Path | None, raw: bool) -> list[_Prompt]:
    if (prompt is None) == (data is None):
        raise typer.BadParameter("give a prompt, - for stdin, or --data FILE", param_hint="PROMPT")
    if data is None:
        text = sys.stdin.read() if prompt == "-" else str(prompt)
        return [_Prompt("prompt", ({"role": "user", "content": text},))]
    return list(_rows(data, raw))


def _rows(data: Path, raw: bool) -> Iterator[_Prompt]:
    from specflow.bench import BadRow, read_prompts

    for row in read_prompts(data):
        if isinstance(row, BadRow):
            yield _Prompt(row.key, error=row.reason)
        elif raw and row.opening:
            yield _Prompt(row.key, error="messages have roles, which --raw has no place for; expected prompt or turns")
        else:
            yield _Prompt(row.id, tuple(row.messages(0, ())))


def _encode(job: _Job, prompt: _Prompt) -> Sequence[int]:
    if prompt.error:
        raise DataError(prompt.id, prompt.error)
    text = prompt.messages[-1]["content"]
    if not text.strip():
        raise DataError(prompt.id, "an empty prompt", "at least one character that is not blank")
    return job.engine.codec.encode(text) if job.raw else job.engine.codec.encode_chat(prompt.messages)


def _decode_in_turn(job: _Job) -> Iterator[Generation | SpecFlowError]:
    """Results as they come, one prompt at a time; text is shown while it grows."""

    def show(_: int, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    for prompt in job.prompts:
        try:
            ids = _encode(job, prompt)
            _announce(job, prompt)
            (made,) = job.engine.generate([ids], job.sampling, show if job.output.stream else None)
            yield made
        except SpecFlowError as error:
            yield error


def _decode_together(job: _Job) -> Iterator[Generation | SpecFlowError]:
    """Results of one call that fills the batch. What would refuse the whole call is found first, row by row."""
    from specflow.request import make_requests

    ready: dict[int, Sequence[int]] = {}
    results: dict[int, Generation | SpecFlowError] = {}
    for index, prompt in enumerate(job.prompts):
        try:
            ids = _encode(job, prompt)
            make_requests([ids], job.sampling)[0].check(job.engine.target.info.vocab_size, job.engine.context_length)
            ready[index] = ids
        except SpecFlowError as error:
            results[index] = error
    try:
        results.update(zip(ready, job.engine.generate(list(ready.values()), job.sampling), strict=True))
    except SpecFlowError as error:
        results.update(dict.fromkeys(ready, error))
    for index, prompt in enumerate(job.prompts):
        if index in ready:
            _announce(job, prompt)
        yield results[index]


def _announce(job: _Job, prompt: _Prompt) -> None:
    if len(job.prompts) > 1 and not job.output.as_json:
        typer.echo(f"--- {prompt.id}", err=True)


def _report(job: _Job, prompt: _Prompt, result: Generation | SpecFlowError) -> bool:
    """Print and keep one result; whether it is one."""
    output = job.output
    if isinstance(result, SpecFlowError):
        typer.echo(f"error: {result}", err=True)
        _emit({"id": prompt.id, "error": str(result)}, output)
        return False
    if not output.as_json:
        typer.echo("" if output.stream else result.text)
        typer.echo(_figures(result, output.facts), err=True)
    _emit({**_row(prompt.id, result), **output.facts}, output)
    return True


def _figures(made: Generation, facts: dict[str, Any]) -> str:
    from specflow.bench.methods import outcome_of
    from specflow.measure import metrics

    outcome, figures = outcome_of(made), metrics(made.counts)
    parts = [f"{len(made.prompt_tokens)} + {len(made.tokens)} tokens", f"finish {made.finish}"]
    if outcome.output_tps is not None:
        parts.append(f"{outcome.output_tps:.1f} tokens/s")
    parts.append(f"first token {1000 * made.timings.ttft_s:.0f} ms")
    if figures["mean_acceptance_length"] is not None:
        parts.append(f"acceptance length {figures['mean_acceptance_length']:.2f}")
    if figures["draft_acceptance_rate"] is not None:
        parts.append(f"{100 * figures['draft_acceptance_rate']:.0f} % of {figures['num_draft_tokens']} drafts accepted")
    parts += [f"{facts['exactness']} in {facts['dtype']}", *(["lossy"] if facts["lossy"] else [])]
    return " · ".join([*parts, f"seed {made.seed}"])


def _row(name: str, made: Generation) -> dict[str, Any]:
    from specflow.bench.methods import outcome_of
    from specflow.measure import metrics

    return {
        "id": name,
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
