"""The report of a run: one HTML page that works offline, with its figures in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.recipe_yaml import write_yaml
from tuner import figures
from tuner.result import TuneResult
from tuner.words import (
    CONVENTION,
    answer_line,
    between,
    break_even_line,
    category_line,
    error_line,
    judged_line,
    level_lines,
    machine_line,
    nearest_round,
    round_lines,
)

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["report"]

TEMPLATE = "report.html.jinja"
SHOWN = ("started_at", "git_sha", "git_dirty", "platform", "cpu_model", "threads", "versions", "argv")
"""What the foot of the page says of the run's provenance; tuned.json has all of it."""


def report(result: TuneResult) -> str:
    """The page. Everything that comes from recipes, files or models is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(TEMPLATE)
    name = str(result.target.get("name"))
    nearest = nearest_round(result)
    return page.render(
        title=f"How to decode {name}",
        result=result,
        answer=answer_line(result.answer),
        judged=judged_line(result),
        machine=machine_line(result),
        convention=CONVENTION,
        between=between,
        errors=error_line(result),
        rounds=list(round_lines(nearest)) if nearest is not None else [],
        break_even=[break_even_line(each) for each in result.break_even],
        categories=[category_line(each) for each in result.categories],
        levels=level_lines(result.schedule),
        figures=_figures(result),
        recipe=write_yaml(_without_costs(result.recipe)),
        provenance={key: result.provenance[key] for key in SHOWN if result.provenance.get(key) is not None},
    )


def _figures(result: TuneResult) -> dict[str, Any]:
    """SVG by name; what has no data is empty."""
    return {
        "predicted": _safe(figures.predicted_figure(result)),
        "round": _safe(figures.round_figure(result)),
        "throughput": list(_throughput(result)),
        "conditional": _safe(figures.acceptance_figure(result, True)),
        "unconditional": _safe(figures.acceptance_figure(result, False)),
        "context": _safe(figures.context_figure(result)),
        "pareto": _safe(figures.pareto_figure(result)),
        "importance": _safe(figures.importance_figure(result)),
        "schedule": _safe(figures.schedule_figure(result)),
    }


def _throughput(result: TuneResult) -> Iterator[Markup | str]:
    for concurrency in result.concurrency:
        for draw in (figures.throughput_figure, *((figures.latency_figure,) if "latency" in result.objectives else ())):
            if figure := draw(result, concurrency):
                yield _safe(figure)


def _safe(svg: str | None) -> Markup | str:
    """A figure of ours, whose texts are escaped already."""
    from markupsafe import Markup

    return "" if svg is None else Markup(svg)


def _without_costs(recipe: dict[str, Any]) -> dict[str, Any]:
    runtime = {key: value for key, value in recipe.get("runtime", {}).items() if key != "costs"}
    kept = {key: value for key, value in recipe.items() if key != "runtime"}
    return {**kept, "runtime": runtime} if runtime else kept
