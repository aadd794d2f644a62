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
    "level_lines",
    "machine_line",
    "nearest_round",
    "round_lines",
    "span",
]

CONVENTION = (
    "K counts draft tokens, the bonus token excluded; acceptance lengths count the bonus token, so plain decoding has "
    "1; speed-ups are to plain decoding measured in turns in the same run; intervals hold with 95 % confidence"
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
    if not answer.speculate:
        return (
            "Do not speculate: plain decoding is the fastest here. That is a good result: nothing to deploy or to tune."
        )
    return f"Use {answer.choice.label}: {span(answer.speed_up)} times the throughput of plain decoding."


def break_even_line(each: BreakEven) -> str:
    """The break-even sentence of a depth."""
    start = f"{each.recipe}: a round of K = {each.k} costs {each.plain_steps:.2f} plain steps"
    if each.chance is None:
        said = f"{start}, more than the {each.k + 1} tokens it can yield, so it cannot pay at any acceptance"
    elif each.plain_steps <= 1.0:
        said = f"{start}, so it pays whatever is accepted"
    else:
        said = f"{start}, so it pays above acceptance length {each.plain_steps:.2f}"
    if each.acceptance_length is None:
        return said
    verb = "measured" if each.measured else "predicted"
    said = f"{said}; {verb} {each.acceptance_length:.2f}"
    return said if each.speed_up is None else f"{said}, speed-up {each.speed_up:.2f}"


def category_line(each: CategoryAnswer) -> str:
    """The answer for a class of requests."""
    said = f"{each.category} ({each.prompts} prompts): {each.choice.label}"
    if each.choice.settings:
        said = f"{said}, {span(each.speed_up)}"
    return f"{said}{'; differs from the answer for all' if each.differs else ''}"


def confirmed_line(each: Confirmed) -> str:
    """What a contestant did, and what was said of it before."""
    said = f"{each.choice.label}: {each.throughput:.1f} tokens/s, speed-up {span(each.speed_up)}"
    if each.acceptance_length is not None:
        said = f"{said}, acceptance length {each.acceptance_length:.2f}"
    if each.concurrency > 1:
        said = f"{said}, {each.concurrency} requests at once"
    if each.error is not None and each.choice.settings:
        return f"{said}; predicted {each.predicted_speed_up:.2f} ({each.error:+.1%})"
    return said


def level_lines(levels: Sequence[Level]) -> list[str]:
    """The batch schedule, a line a level."""
    return [_level(level, levels[place + 1 : place + 2]) for place, level in enumerate(levels)]


def _level(level: Level, after: Sequence[Level]) -> str:
    start = f"from {level.enter} requests on" if level.leave else "at first"
    leave = f", left again below {level.leave}" if level.leave else ""
    end = f", until {after[0].enter}" if after else ""
    said = f"{start}{leave}{end}: {level.choice.label}"
    if level.k:
        said = f"{said}, {level.speed_up:.2f} times plain speed {'measured' if level.measured else 'predicted'}"
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
