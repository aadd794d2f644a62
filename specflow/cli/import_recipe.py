"""`specflow import`: a recipe from the configuration of a serving engine, and what is wrong about it."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specflow.cli.output import deliver

if TYPE_CHECKING:
    from specflow.export.engines.base import Given, Imported

__all__ = ["import_recipe"]


def import_recipe(
    engine: Annotated[str, typer.Argument(help="vllm, sglang, tensorrt_llm, llama_cpp, transformers, ...")],
    words: Annotated[list[str], typer.Argument(help="a file, or -- and the words of a command line")],
    version: Annotated[str | None, typer.Option("--engine-version", help="its version; the newest known one")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the recipe here, not to stdout")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="recipe and findings as one JSON object on stdout")] = False,
) -> None:
    """Read a command line or a configuration file of an engine as a recipe, and say what is wrong about it.

    Findings go to stderr, the worst first: what the engine refuses, what costs speed or quality, what is good to know.
    """
    from specflow.export.engines.base import choose_dialect, find_engine

    found = find_engine(engine)
    done = found.read(_given(words), choose_dialect(found, version))
    if as_json:
        findings = [asdict(finding) for finding in done.findings]
        row = {"engine": done.engine, "versions": done.versions, "recipe": done.data, "findings": findings}
        typer.echo(json.dumps(row, ensure_ascii=False))
    else:
        for finding in done.findings:
            typer.echo(str(finding), err=True)
    text = _checked(done)
    if output is not None or not as_json:
        deliver(text, output)


def _given(words: list[str]) -> Given:
    """A file where one word names one, else a command line; a single word may hold a whole line."""
    from specflow.export.engine_input import read_file
    from specflow.export.engines.base import Given

    if len(words) > 1:
        return Given(argv=tuple(words))
    word = words[0]
    if " " in word.strip() and not Path(word).is_file():
        try:
            return Given(argv=tuple(shlex.split(word)))
        except ValueError as error:
            raise typer.BadParameter(f"{word!r}: {error}", param_hint="WORDS") from error
    return Given(text=read_file(word), name=word)


def _checked(done: Imported) -> str:
    """The recipe as YAML, once its parts fit together."""
    from specflow.graph import DecodeGraph
    from specflow.length import POLICIES
    from specflow.recipe import dump_recipe

    recipe = done.recipe()
    DecodeGraph.from_recipe(recipe).check()
    head = [f"# read from {done.engine} {done.versions}"]
    if POLICIES[recipe.length.policy].needs_costs:
        head.append(f"# {recipe.length.policy} weighs measured costs: `specflow profile` with this file measures them")
    return "\n".join([*head, dump_recipe(recipe)])
