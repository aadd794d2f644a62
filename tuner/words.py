"""A result in words: what the report and `specflow explain` both say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from tuner.result import Answer, BreakEven, CategoryAnswer, Confirmed, Interval, Level, TuneResult

__all__ = [
    "CONVENTION",
    "answer_line",
    "between",
    "break_even_line",
    "category_line",
    "confirmed_line",
    "error_line",
    "judged_line",
    "level_lines",
    "machine_line",
    "nearest_round",
    "round_lines",
    "span",
]

CONVENTION = (
    "K counts draft tokens, the bonus token excluded; acceptance lengths count the bonus token, so plain decoding has "
    "1; speed-ups are to plain decoding measured in turns in the same run; intervals hold with 95 % confidence; p95 "
    "latency is the time from a request's first token to its last that 95 % of the requests stay within: the prompt's "
    "pass and any wait before it are not in it"
)


def between(interval: Interval) -> str:
    """The bounds of a figure; where nobody can narrow it down, that."""
    if interval.high > 100.0 * interval.value:
        return "too few prompts"
    return f"{interval.low:.2f} to {interval.high:.2f}"


def span(interval: Interval) -> str:
    """A figure with its bounds."""
    return f"{interval.value:.2f} ({between(interval)})"


def answer_line(answer: Answer) -> str:
    """What to run, in one sentence."""
    latency = answer.objective == "latency"
    if not answer.speculate:
        best = "has the shortest latency here" if latency else "is the fastest here"
        return f"Do not speculate: plain decoding {best}. That is a good result: nothing to deploy or to tune."
    if latency and answer.gain is not None:
        gain = f"a p95 latency {span(answer.gain)} times shorter than plain decoding's"
        return f"Use {answer.choice.label}: {gain}, {span(answer.speed_up)} times its throughput."
    return f"Use {answer.choice.label}: {span(answer.speed_up)} times the throughput of plain decoding."


def judged_line(result: TuneResult) -> str:
    """Which objective decided, and by how much, in one sentence."""
    answer, first = result.answer, result.concurrency[0]
    wanted = " before ".join(result.objectives)
    hurdle = "throughput" if answer.objective == "throughput" else "p95 latency of a request"
    if not answer.speculate:
        return f"Judged by {wanted}: no drafter beat plain decoding in {hurdle}"
    rows = [each for each in result.confirmed if each.concurrency == first]
    mine = next((each for each in rows if each.choice == answer.choice), None)
    plain = next((each for each in rows if not each.choice.settings), None)
    said = f"Judged by {wanted}: it beat plain decoding in {hurdle} {span(answer.gain or answer.speed_up)} times"
    if mine is not None and plain is not None:
        said = f"{said} ({_figures(mine, answer.objective)} against {_figures(plain, answer.objective)})"
    if answer.decided_by == "memory" and mine is not None:
        return f"{said}; memory decided among those that did: {_figures(mine, 'memory')}"
    return f"{said}; {answer.decided_by} decided" if answer.decided_by != answer.objective else said


def _figures(each: Confirmed, objective: str) -> str:
    """What one contestant has of an objective."""
    if objective == "memory":
        return f"{(each.memory_bytes or 0) / 1e6:,.0f} MB beyond plain decoding's"
    if objective == "latency":
        return f"{each.latency_p95_s or 0.0:.2f} s"
    return f"{each.throughput:.1f} tokens/s"


def break_even_line(each: BreakEven) -> str:
    """The break-even sentence of a depth."""
    start = f"{each.recipe}: a round of K = {each.k} costs {each.plain_steps:.2f} plain steps"
    if each.chance is None:
        said = f"{start}, more than the {each.k + 1} tokens it can yield, so it cannot pay at any acceptance"
    elif each.plain_steps <= 1.0:
        said = f"{start}, so it pays whatever is accepted"
    elif each.latency_gain is not None:
        said = f"{start}, so a request gets faster where its own acceptance length is above {each.plain_steps:.2f}"
    else:
        said = f"{start}, so it pays above acceptance length {each.plain_steps:.2f}"
    if each.acceptance_length is None:
        return said
    verb = "measured" if each.measured else "predicted"
    said = f"{said}; {verb} {each.acceptance_length:.2f}"
    said = said if each.speed_up is None else f"{said}, speed-up {each.speed_up:.2f}"
    if each.latency_gain is None:
        return said
    return f"{said}, p95 latency {_times(each.latency_gain)}"


def _times(shorter: float) -> str:
    """How a latency compares with plain decoding's."""
    return f"{shorter:.2f} times shorter" if shorter >= 1.0 else f"{1.0 / max(shorter, 1e-9):.2f} times longer"


def category_line(each: CategoryAnswer) -> str:
    """The answer for a class of requests."""
    said = f"{each.category} ({each.prompts} prompts): {each.choice.label}"
    if each.choice.settings:
        shorter = f"p95 latency {span(each.latency_gain)} times as short, speed-up " if each.latency_gain else ""
        said = f"{said}, {shorter}{span(each.speed_up)}"
    return f"{said}{'; differs from the answer for all' if each.differs else ''}"


def confirmed_line(each: Confirmed, objectives: Sequence[str] = ()) -> str:
    """What a contestant did in the objectives, and what was said of it before."""
    said = f"{each.choice.label}: {each.throughput:.1f} tokens/s, speed-up {span(each.speed_up)}"
    if "latency" in objectives and each.latency_p95_s is not None:
        said = f"{said}, p95 latency {each.latency_p95_s:.2f} s{_shorter(each)}"
    if "memory" in objectives:
        said = f"{said}, {_figures(each, 'memory')}"
    if each.pareto:
        said = f"{said}, on the Pareto front"
    if each.acceptance_length is not None:
        said = f"{said}, acceptance length {each.acceptance_length:.2f}"
    if each.concurrency > 1:
        said = f"{said}, {each.concurrency} requests at once"
    if each.error is not None and each.choice.settings:
        return f"{said}; predicted {each.predicted_speed_up:.2f} ({each.error:+.1%})"
    return said


def _shorter(each: Confirmed) -> str:
    """How its latency compares with plain decoding's, and with what was predicted."""
    if each.latency_gain is None or not each.choice.settings:
        return ""
    predicted = each.predicted_latency_p95_s
    said = f" (predicted {predicted:.2f} s)" if predicted is not None else ""
    return f"{said}, {span(each.latency_gain)} times as short as plain decoding's"


def level_lines(levels: Sequence[Level]) -> list[str]:
    """The batch schedule, a line a level."""
    return [_level(level, levels[place + 1 : place + 2]) for place, level in enumerate(levels)]


def _level(level: Level, after: Sequence[Level]) -> str:
    start = f"from {level.enter} requests on" if level.leave else "at first"
    leave = f", left again below {level.leave}" if level.leave else ""
    end = f", until {after[0].enter}" if after else ""
    said = f"{start}{leave}{end}: {level.choice.label}"
    if level.k:
        shorter = "" if level.latency_gain is None else f"p95 latency {_times(level.latency_gain)}, "
        verb = "measured" if level.measured else "predicted"
        said = f"{said}, {shorter}{level.speed_up:.2f} times plain speed {verb}"
    return said


def error_line(result: TuneResult) -> str:
    """How well predictions held; empty where nothing was predicted and confirmed."""
    errors = result.errors
    if not errors:
        return ""
    return (
        f"predicted against measured speed-up, {len(errors)} contestants: "
        f"median error {median(errors):.1%}, worst {errors[-1]:.1%}"
    )


def machine_line(result: TuneResult) -> str:
    """Where and how it was measured."""
    facts, target = result.machine, result.target
    device = facts.get("gpu") or f"{facts.get('cpu_model', 'unknown processor')}, {facts.get('threads', '?')} threads"
    return f"{target.get('name')} in {target.get('dtype')}, {target.get('runtime')} runtime, {device}"


def nearest_round(result: TuneResult) -> Confirmed | None:
    """The confirmed contestant that the answer is about, else the fastest that drafts."""
    drafting = [each for each in result.confirmed if each.choice.settings]
    chosen = [each for each in drafting if each.choice == result.answer.choice]
    return chosen[0] if chosen else max(drafting, key=lambda each: each.speed_up.value, default=None)


def round_lines(each: Confirmed) -> Iterator[str]:
    """Where the time of a mean round goes."""
    split = each.split
    total = split.total_s
    if total <= 0:
        return
    parts: Sequence[tuple[str, float]] = (
        ("draft", split.draft_s),
        ("target pass", split.target_s),
        ("verification", split.verify_s),
        ("other work of the host", split.other_s),
        ("unexplained", split.unexplained_s),
    )
    shares = ", ".join(f"{name} {1e3 * spent:.2f} ms ({spent / total:.0%})" for name, spent in parts)
    yield f"a round of {each.choice.label} takes {1e3 * total:.2f} ms: {shares}"
    if each.predicted_split is not None and each.predicted_split.total_s > 0:
        expected = each.predicted_split.total_s
        gap = 1e3 * (total - expected)
        yield f"the cost model expected {1e3 * expected:.2f} ms: {gap:+.2f} ms unexplained by it"
