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
    """Where text and figures go."""

    as_json: bool
    stream: bool
    rows: Path | None


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

    Of `turns` the first one is answered. Exit code 1 if a prompt failed; the others are decoded.
    """
    from specflow.recipe import load_recipe

    prompts = _prompts(prompt, data, raw)
    loaded = load_recipe(recipe, [*(overrides or ()), *([] if seed is None else [f"sampling.seed={seed}"])])
    from specflow.build import build_engine  # after the checks above, which need no torch

    engine = build_engine(loaded)
    rows = _open_output(output_dir, engine, loaded.sampling.seed, data) if output_dir else None
    output = _Output(as_json, not no_stream and not as_json, rows)
    failed = False
    for each in prompts:
        try:
            if each.error:
                raise DataError(each.id, each.error)
            if len(prompts) > 1 and not as_json:
                typer.echo(f"--- {each.id}", err=True)
            _decode(engine, each, _encode(engine, each, raw), loaded.sampling, output)
        except SpecFlowError as error:
            failed = True
            typer.echo(f"error: {error}", err=True)
            _emit({"id": each.id, "error": str(error)}, output)
    if failed:
        raise typer.Exit(1)


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


def _encode(engine: Engine, prompt: _Prompt, raw: bool) -> Sequence[int]:
    text = prompt.messages[-1]["content"]
    if not text.strip():
        raise DataError(prompt.id, "an empty prompt", "at least one character that is not blank")
    return engine.codec.encode(text) if raw else engine.codec.encode_chat(prompt.messages)


def _decode(engine: Engine, prompt: _Prompt, ids: Sequence[int], sampling: Sampling, output: _Output) -> None:
    def show(_: int, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    (made,) = engine.generate([ids], sampling, show if output.stream else None)
    if not output.as_json:
        typer.echo("" if output.stream else made.text)
        typer.echo(_figures(made), err=True)
    _emit(_row(prompt.id, made), output)


def _figures(made: Generation) -> str:
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


def _open_output(path: Path, engine: Engine, seed: int | None, data: Path | None) -> Path:
    from specflow.measure import Provenance, write_json_atomic

    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(str(path), "holds files already; output is never overwritten", "a new or empty directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(str(path), f"cannot create: {error.strerror or error}", "a writable directory") from error
    device = str(engine.target.info.device)
    provenance = Provenance.collect(device, [] if seed is None else [seed], [data] if data else [])
    write_json_atomic(path / "manifest.json", asdict(provenance))
    return path / "generations.jsonl"


def _emit(row: dict[str, Any], output: _Output) -> None:
    from specflow.measure import append_jsonl

    if output.as_json:
        typer.echo(json.dumps(row, ensure_ascii=False))
    if output.rows is not None:
        append_jsonl(output.rows, row)
