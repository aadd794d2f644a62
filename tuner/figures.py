"""The figures of a report, each drawn from a result; a figure without data is None and left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from tuner.chart import Axes, bar_chart, line_chart, point_chart
from tuner.result import Predicted, TuneResult

__all__ = [
    "acceptance_figure",
    "context_figure",
    "importance_figure",
    "latency_figure",
    "pareto_figure",
    "predicted_figure",
    "round_figure",
    "schedule_figure",
    "throughput_figure",
]

MOST_SERIES = 8
PARTS = ("draft", "target pass", "verification", "other", "unexplained")
MEMORY = 1e6  # bytes of the unit on the axis
UNITS = {"throughput": "tokens/s", "latency": "p95 latency, s", "memory": "memory, MB"}


def predicted_figure(result: TuneResult) -> str | None:
    """Predicted against measured speed-up; on the dashed line both are equal."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in result.confirmed:
        if each.predicted_speed_up is not None and each.choice.settings:
            groups[each.choice.recipe].append((each.predicted_speed_up, each.speed_up.value))
    if not groups:
        return None
    axes = Axes("Predicted against measured speed-up", "predicted", "measured")
    return point_chart(axes, _few(groups), diagonal=True)


def round_figure(result: TuneResult) -> str | None:
    """Where the time of a mean round goes, by contestant."""
    first = result.concurrency[0]
    rows = {
        each.choice.label: [
            1e3 * spent
            for spent in (
                each.split.draft_s,
                each.split.target_s,
                each.split.verify_s,
                each.split.other_s,
                each.split.unexplained_s,
            )
        ]
        for each in result.confirmed
        if each.concurrency == first and each.split.total_s > 0
    }
    return bar_chart(Axes("A mean round", "milliseconds"), rows, PARTS) if rows else None


def throughput_figure(result: TuneResult, concurrency: int) -> str | None:
    """Predicted throughput by K, the best length policy of each; the dashed line is plain decoding."""
    best = _by_depth(result, concurrency, lambda each: each.throughput)
    if not best:
        return None
    lines = {name: [(float(k), by_k[k].throughput) for k in sorted(by_k)] for name, by_k in best.items()}
    ranked = dict(sorted(lines.items(), key=lambda pair: -max(rate for _, rate in pair[1])))
    some = next(iter(next(iter(best.values())).values()))
    plain = some.throughput / some.speed_up if some.speed_up > 0 else None
    title = f"Predicted throughput by K{_at_once(concurrency)}"
    return line_chart(Axes(title, "K", "tokens/s", counts=True), _few(ranked), plain)


def latency_figure(result: TuneResult, concurrency: int) -> str | None:
    """Predicted p95 latency by K, the best length policy of each; the dashed line is plain decoding, measured."""
    best = _by_depth(result, concurrency, lambda each: -(each.latency_p95_s or 0.0))
    if not best:
        return None
    lines = {name: [(float(k), by_k[k].latency_p95_s or 0.0) for k in sorted(by_k)] for name, by_k in best.items()}
    ranked = dict(sorted(lines.items(), key=lambda pair: min(span for _, span in pair[1])))
    rows = [each for each in result.confirmed if each.concurrency == concurrency and not each.choice.settings]
    plain = rows[0].latency_p95_s if rows else None
    title = f"Predicted p95 latency by K{_at_once(concurrency)}"
    return line_chart(Axes(title, "K", "seconds, first token to last", counts=True), _few(ranked), plain)


def _by_depth(
    result: TuneResult, concurrency: int, worth: Callable[[Predicted], float]
) -> dict[str, dict[int, Predicted]]:
    """The best prediction of each recipe and K."""
    best: dict[str, dict[int, Predicted]] = defaultdict(dict)
    for each in result.predictions:
        k = each.choice.candidate.k
        if each.concurrency == concurrency and k:
            known = best[each.choice.recipe].get(k)
            if known is None or worth(each) > worth(known):
                best[each.choice.recipe][k] = each
    return best


def _at_once(concurrency: int) -> str:
    return "" if concurrency == 1 else f", {concurrency} requests at once"


def acceptance_figure(result: TuneResult, conditional: bool) -> str | None:
    """Acceptance by draft position; positions that were not reached are unobserved and left out."""
    name = "conditional" if conditional else "unconditional"
    lines = {}
    for each in result.acceptance:
        pairs = [(float(spot.position), getattr(spot, name)) for spot in each.positions]
        points = [(position, rate) for position, rate in pairs if rate is not None]
        if points:
            lines[each.choice.label] = points
    if not lines:
        return None
    said = "given that all before it held" if conditional else "of all rounds that drafted"
    return line_chart(Axes(f"Acceptance by position, {said}", "draft position", "share", counts=True), _few(lines))


def context_figure(result: TuneResult) -> str | None:
    """Acceptance length by context; each point stands at the upper end of its range."""
    lines = {
        each.choice.label: [(float(rate.context_to), rate.acceptance_length) for rate in each.contexts]
        for each in result.acceptance
        if each.contexts
    }
    axes = Axes("Acceptance length by context (bonus included)", "committed tokens, upper end of the range", "tokens")
    return line_chart(axes, _few(lines), 1.0) if lines else None


def pareto_figure(result: TuneResult) -> str | None:
    """Candidates in the first two objectives; the dashed line joins those that no other beats in all objectives."""
    if len(result.objectives) < 2:
        return None
    across, up = result.objectives[:2]
    rows = [each for each in result.predictions if each.concurrency == result.concurrency[0]]
    groups = {
        "on the front": [(_figure(each, across), _figure(each, up)) for each in rows if each.pareto],
        "beaten": [(_figure(each, across), _figure(each, up)) for each in rows if not each.pareto],
    }
    some = {name: group for name, group in groups.items() if group}
    if not some:
        return None
    return point_chart(Axes("Pareto front", UNITS[across], UNITS[up]), some, joined=sorted(groups["on the front"]))


def _figure(each: Predicted, objective: str) -> float:
    if objective == "memory":
        return (each.memory_bytes or 0) / MEMORY
    return each.throughput if objective == "throughput" else each.latency_p95_s or 0.0


def importance_figure(result: TuneResult) -> str | None:
    """How much each choice matters."""
    rows = {f"{each.scope}: {each.key}": [each.share] for each in result.importance[:12]}
    axes = Axes("What matters", f"share of the variance of predicted {result.objectives[0]}")
    return bar_chart(axes, rows) if rows else None


def schedule_figure(result: TuneResult) -> str | None:
    """K by load as it rises and as it falls."""
    levels = result.schedule
    if not levels:
        return None
    last = max(levels[-1].enter + 1, *result.concurrency)
    up: list[tuple[float, float]] = []
    down: list[tuple[float, float]] = []
    for level, after in zip(levels, [*levels[1:], None], strict=True):
        up += [(float(level.enter), float(level.k)), (float(after.enter if after else last), float(level.k))]
        down += [(float(max(level.leave, 1)), float(level.k)), (float(after.leave if after else last), float(level.k))]
    axes = Axes("K by load", "requests at once", "K", counts=True)
    return line_chart(axes, {"while the load rises": up, "while it falls": down})


def _few(lines: dict[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    return dict(list(lines.items())[:MOST_SERIES])
