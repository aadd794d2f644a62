"""`specflow explain`: a result in words, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from tuner.result import TuneResult
from tuner.words import (
    CONVENTION,
    answer_line,
    break_even_line,
    category_line,
    confirmed_line,
    error_line,
    judged_line,
    level_lines,
    machine_line,
    nearest_round,
    round_lines,
)

__all__ = ["explain"]


def explain(result: TuneResult) -> str:
    """The whole result in words."""
    return "\n".join(chain.from_iterable(_sections(result))) + "\n"


def _sections(result: TuneResult) -> Iterator[list[str]]:
    work = result.workload
    head = [answer_line(result.answer), result.answer.reason, f"{judged_line(result)}."]
    if result.answer.ties:
        head.append(f"Could not be told from it: {', '.join(result.answer.ties)}.")
    facts = f"{work.prompts} prompts, up to {work.max_new_tokens} tokens each, through the {work.path}"
    yield [*head, "", f"Measured on {machine_line(result)}; {facts}.", f"{CONVENTION}."]
    measured = [confirmed_line(each, result.objectives) for each in result.confirmed]
    yield _section("Measured", [*measured, error_line(result)])
    nearest = nearest_round(result)
    yield _section("Where the time goes", list(round_lines(nearest)) if nearest is not None else [])
    yield _section("Break-even", [break_even_line(each) for each in result.break_even])
    yield _section("By class of requests", [category_line(each) for each in result.categories])
    yield _section("By load", level_lines(result.schedule))
    yield _section("What matters", [f"{each.scope} {each.key}: {each.share:.0%}" for each in result.importance[:8]])
    hints = [f"{each.choice.label}: {hint}" for each in result.acceptance for hint in each.hints]
    yield _section("Look at", [*hints, *result.warnings])
    yield _section("Left out", [f"{each.recipe} ({each.phase}): {each.reason}" for each in result.refused])
    yield _section("Rows that could not be used", list(work.bad_rows))
    yield _section("Drafters", [f"{name}: {said}" for name, said in result.drafters.items()])
    tried = f"{result.trials} candidates replayed, {result.hopeless} ruled out by their price alone"
    spent = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in result.seconds.items())
    yield _section("Search", [tried, spent])


def _section(title: str, lines: list[str]) -> list[str]:
    kept = [line for line in lines if line]
    return ["", f"{title}:", *(f"  {line}".replace("\n", "\n  ") for line in kept)] if kept else []
