"""`specflow corpus`: answers of a target to training prompts, as token ids, for all its drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from specflow.cli.progress import EVERY_S, working

if TYPE_CHECKING:
    from specflow.bench import PromptRow
    from specflow.build import LoadedTarget
    from specflow.recipe import Recipe
    from specflow.train.answers import Answering
    from specflow.train.corpus import Corpus, SamplingMix

__all__ = ["corpus"]


def corpus(
    target: Annotated[str, typer.Option("--target", help="model whose answers are drawn, as recipes name it")],
    data: Annotated[list[Path], typer.Option("--data", help="JSONL of training prompts; may be repeated")],
    output_dir: Annotated[Path, typer.Option("-o", "--output-dir", help="directory of the corpus, new or begun")],
    include: Annotated[list[Path] | None, typer.Option("--include", help="records to import (.jsonl or .gz)")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="stop at so many response tokens in all")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="most rows of each prompt file")] = None,
    most_of_one: Annotated[float, typer.Option(min=0, max=1, help="largest share of one category's rows")] = 0.3,
    greedy_share: Annotated[float, typer.Option(min=0, max=1, help="share of rows answered greedily")] = 0.33,
    temperature: Annotated[float, typer.Option(min=0, help="of the other rows")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="of the other rows")] = 0.9,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="seeds every row, together with its id")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="requests decoded together")] = 32,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key.key=value, such as target.threads=2")
    ] = None,
) -> None:
    """Draw a target's own answers to prompts: the corpus its drafters are trained on.

    Prompts are taken from their categories in turns; evaluation sets are refused. Writes corpus.jsonl and corpus.json.
    Exit code 130 if interrupted: called again it goes on where it stopped, and draws no answer twice.
    """
    from specflow.train.corpus import SamplingMix
    from specflow.train.prompts import refuse_evaluation_file

    for file in include or ():
        refuse_evaluation_file(file)
    rows = _read_prompts(data, limit, most_of_one)
    mix = SamplingMix(greedy_share, temperature, top_p, max_new_tokens, seed)
    recipe = _recipe(target, batch, mix, overrides or [])
    with working(f"loading {target}"):
        from specflow.build import load_target

        loaded = load_target(recipe.target)
    with closing(_open(output_dir, loaded, mix, data)) as kept:
        for file in include or ():
            typer.echo(f"{file}: {kept.include(file)} new records", err=True)
        interrupted = _draw(kept, _answering(recipe, loaded, kept, mix), rows, tokens)
    typer.echo(f"{len(kept.ids)} records, {kept.num_tokens} response tokens in {output_dir}")
    if interrupted:
        typer.echo("interrupted; call it again to go on", err=True)
        raise typer.Exit(130)


def _read_prompts(data: list[Path], limit: int | None, most: float) -> list[PromptRow]:
    from specflow.errors import DataError
    from specflow.train.prompts import balance, load_training_prompts

    rows, bad = load_training_prompts(data, limit)
    for row in bad:
        typer.echo(f"{row.key}: {row.reason}", err=True)
    if not rows:
        raise DataError("--data", "no usable row", "prompts to train on")
    return balance(rows, most)


def _recipe(target: str, batch: int, mix: SamplingMix, overrides: list[str]) -> Recipe:
    """Plain decoding of the target. The sampling is in it to be checked, not to be used: rows have their own.

    Raises:
        RecipeError: An option is out of range, or the recipe would change the law of the answers.
    """
    from specflow.errors import RecipeError
    from specflow.recipe import load_recipe

    sampling = {"temperature": mix.temperature, "top_p": mix.top_p, "max_new_tokens": mix.max_new_tokens}
    settings = [f"sampling.{name}={value}" for name, value in sampling.items()]
    recipe = load_recipe("vanilla", [f"target.model={target}", f"runtime.batch={batch}", *settings, *overrides])
    if recipe.verify.lossy:
        found = f"{recipe.verify.rule}, which changes the law of the answers"
        raise RecipeError("--set verify.rule", found, "a lossless rule: a corpus holds what the target says")
    return recipe


def _open(path: Path, loaded: LoadedTarget, mix: SamplingMix, data: list[Path]) -> Corpus:
    from specflow.provenance import Provenance
    from specflow.train.answers import target_of
    from specflow.train.corpus import Corpus

    provenance = Provenance.collect(str(loaded.target.info.device), [mix.seed], data)
    return Corpus(path, target_of(loaded), mix, provenance)


def _answering(recipe: Recipe, loaded: LoadedTarget, kept: Corpus, mix: SamplingMix) -> Answering:
    from specflow.build import build_engine
    from specflow.train.answers import Answering

    return Answering(build_engine(recipe, loaded), kept, mix)


def _draw(kept: Corpus, answering: Answering, rows: list[PromptRow], tokens: int | None) -> bool:
    """Draw what is missing; whether the user interrupted."""
    if tokens is not None and kept.num_tokens >= tokens:
        return False
    missing = sum(row.id not in kept.ids for row in rows)
    try:
        with _progress(_Pace(kept, missing, tokens)) as advance:
            for _ in answering.run(rows, tokens):
                advance()
    except KeyboardInterrupt:
        return True
    return False


@contextmanager
def _progress(pace: _Pace) -> Iterator[Callable[[], None]]:
    """How far it is: one line that changes on terminals, lines now and then elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda: status.update(pace.line())
        return
    said = monotonic()

    def advance() -> None:
        nonlocal said
        if monotonic() - said >= EVERY_S:
            said = monotonic()
            typer.echo(pace.line(), err=True)

    yield advance
    typer.echo(pace.line(), err=True)


class _Pace:
    """How fast a corpus grows in this session, and when it will be done.

    Args:
        kept: The corpus as it is.
        missing: Rows that are not answered yet.
        most: Response tokens to stop at.
    """

    def __init__(self, kept: Corpus, missing: int, most: int | None) -> None:
        self._kept, self._missing, self._most = kept, missing, most
        self._tokens, self._records, self._began = kept.num_tokens, len(kept.ids), monotonic()

    def line(self) -> str:
        """Records and tokens so far, tokens a second, minutes left."""
        passed, tokens = max(monotonic() - self._began, 1e-9), self._kept.num_tokens - self._tokens
        shares = [(len(self._kept.ids) - self._records) / max(self._missing, 1)]
        if self._most is not None:
            shares.append(tokens / (self._most - self._tokens))
        share = min(max(shares), 1.0)
        left = f", {passed * (1 / share - 1) / 60:.0f} min left" if share else ""
        total = f"{len(self._kept.ids)} records, {self._kept.num_tokens} tokens"
        return f"{total}, {tokens / passed:.0f} tokens/s{left}"
