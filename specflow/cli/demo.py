"""`specflow demo`: three real prompts, plain and speculative, on the embedded model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specflow.cli.progress import working

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from specflow.bench import Outcome, PromptRow
    from specflow.engine import Engine
    from specflow.types import Sampling

__all__ = ["demo"]

PROMPTS = Path(__file__).resolve().parents[1] / "data" / "demo.jsonl"
RECIPES = ("vanilla", "ngram")
WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Shown:
    """One text of the demo. The plain text of the same prompt is its own `plain`."""

    prompt: str
    method: str  # with the word, where its rule is lossy
    made: Outcome
    plain: Outcome

    @property
    def speedup(self) -> float | None:
        mine, base = self.made.output_tps, self.plain.output_tps
        return mine / base if mine and base else None

    @property
    def same(self) -> bool:
        return self.made.tokens == self.plain.tokens


def demo(
    overrides: Annotated[list[str] | None, typer.Option("--set", help="target.key=value or sampling.key=value")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="length cap of every answer")] = 160,
    as_json: Annotated[bool, typer.Option("--json", help="figures as JSON on stdout, texts on stderr")] = False,
) -> None:
    """Decode a code edit, an extraction and an open question with and without drafting from history."""
    from rich.console import Console

    from specflow.bench import PromptRow, read_prompts
    from specflow.bench.methods import target_facts
    from specflow.bench.table import label, target_line
    from specflow.recipe import load_recipe

    console = Console(stderr=as_json, highlight=False)
    settings = [*(overrides or ()), f"sampling.max_new_tokens={max_new_tokens}"]
    recipes = {name: load_recipe(name, settings) for name in RECIPES}
    plain = recipes[RECIPES[0]]
    with working(f"loading {plain.target.model}"):
        from specflow.build import build_engine, load_target

        target = load_target(plain.target)
        engines = {label(name, recipe.verify.lossy): build_engine(recipe, target) for name, recipe in recipes.items()}
    prompts = [row for row in read_prompts(PROMPTS) if isinstance(row, PromptRow)]
    with working("warming up"):
        _warm_up(engines, prompts[0], plain.sampling)
    shown = [text for row in prompts for text in _show_prompt(console, engines, row, plain.sampling)]
    console.print()
    facts = target_facts(target.target.info)
    console.print(_table(shown, target_line(facts)))
    console.print("one run each; `specflow bench` interleaves, repeats and gives the spread", style="dim")
    if as_json:
        typer.echo(json.dumps([{**_row(text), **facts} for text in shown], ensure_ascii=False))


def _warm_up(engines: dict[str, Engine], row: PromptRow, sampling: Sampling) -> None:
    brief = sampling.model_copy(update={"max_new_tokens": WARMUP_TOKENS})
    for engine in engines.values():
        engine.generate([engine.codec.encode_chat(row.messages(0, ()))], brief)


def _show_prompt(console: Console, engines: dict[str, Engine], row: PromptRow, sampling: Sampling) -> list[_Shown]:
    """Stream the answer of every method to one prompt."""
    from specflow.bench.methods import outcome_of

    def show(_: int, text: str) -> None:
        console.out(text, end="", highlight=False)

    shown: list[_Shown] = []
    for name, engine in engines.items():
        console.print()
        console.rule(f"{row.category.replace('_', ' ')} · {name}", align="left")
        if not shown:
            console.print(row.turns[0].splitlines()[0], style="dim", markup=False)
        (made,) = engine.generate([engine.codec.encode_chat(row.messages(0, ()))], sampling, show)
        console.print(f" (cut at {len(made.tokens)} tokens)" if made.finish == "length" else "", style="dim")
        outcome = outcome_of(made)
        shown.append(_Shown(row.category.replace("_", " "), name, outcome, shown[0].plain if shown else outcome))
    return shown


def _table(shown: list[_Shown], caption: str) -> Table:
    from rich import box
    from rich.table import Table

    from specflow.bench.table import figure

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for name in ("prompt", "method"):
        table.add_column(name)
    for name in ("tokens", "tokens/s", "acceptance length", "speed-up", "same text"):
        table.add_column(name, justify="right")
    for index, text in enumerate(shown):
        last = index + 1 == len(shown) or shown[index + 1].prompt != text.prompt
        same = "yes" if text.same else "no"
        table.add_row(
            text.prompt,
            text.method,
            str(len(text.made.tokens)),
            figure(text.made.output_tps, 1),
            figure(text.made.tokens_per_round, 2),
            figure(text.speedup, 2),
            "" if text.made is text.plain else same,
            end_section=last,
        )
    for method in dict.fromkeys(text.method for text in shown):
        table.add_row("all", method, *_overall([text for text in shown if text.method == method]), style="bold")
    return table


def _overall(texts: list[_Shown]) -> list[str]:
    """Cells of one method over all prompts: all tokens over all time."""
    from specflow.bench.table import figure
    from specflow.measure import pooled

    made, plain = [text.made for text in texts], [text.plain for text in texts]
    rate, base = (pooled((each.later_tokens, each.decode_s) for each in outcomes) for outcomes in (made, plain))
    return [
        str(sum(len(outcome.tokens) for outcome in made)),
        figure(rate, 1),
        figure(pooled((outcome.later_tokens, outcome.rounds or 0) for outcome in made), 2),
        figure(rate / base if rate and base else None, 2),
        "" if made == plain else f"{sum(text.same for text in texts)} of {len(texts)}",
    ]


def _row(text: _Shown) -> dict[str, Any]:
    return {
        "prompt": text.prompt,
        "method": text.method,
        "new_tokens": len(text.made.tokens),
        "output_tps": text.made.output_tps,
        "acceptance_length": text.made.tokens_per_round,
        "speedup": text.speedup,
        "same_text": text.same,
        "text": text.made.text,
    }
