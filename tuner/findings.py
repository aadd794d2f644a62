"""From scores and races to the lists of a result. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from specflow.cost import CostModel
from specflow.measure import acceptance_length
from tuner.aims import EVEN, Aims, gain_of, sort_key
from tuner.analysis import break_even_of, pareto
from tuner.choose import Effort, Verdict, choose
from tuner.confirm import Race
from tuner.interval import FEWEST_PROMPTS, Work, latency_s, ratio_of_latencies, ratio_of_rates
from tuner.result import BreakEven, CategoryAnswer, Choice, Confirmed, Predicted
from tuner.scoring import Score
from tuner.space import Candidate

__all__ = ["break_evens", "category_answers", "confirmed_of", "divergences", "predictions_of"]

Scores = Mapping[Candidate, Score]
SHOWN = (1, 2, 4, 8, 16, 32)
"""Depths whose break-even is told, beside those that were run or promise most."""


def predictions_of(scores: Scores, plain: Score | None, concurrency: int, objectives: Sequence[str]) -> list[Predicted]:
    """Predictions, the best in the objectives first."""
    front = pareto(scores, objectives) if len(objectives) > 1 else set()
    base = plain.throughput if plain is not None else 0.0
    return [
        Predicted(
            choice=Choice.of(each),
            concurrency=concurrency,
            throughput=score.throughput,
            speed_up=score.throughput / base if base else 0.0,
            acceptance_length=score.acceptance_length,
            latency_p95_s=score.latency_p95_s,
            memory_bytes=score.memory_bytes,
            pareto=each in front,
        )
        for each, score in sorted(scores.items(), key=lambda pair: sort_key(pair[1], objectives))
    ]


def confirmed_of(race: Race, scores: Scores, plain: Score | None, concurrency: int, aims: Aims) -> list[Confirmed]:
    """What every contestant did, the best in what has to be beaten first."""
    measured = race.measured()
    found = []
    for each, work in measured.items():
        whole = sum(work.values(), Work(0.0, 0.0))
        up = EVEN if each == race.plain else ratio_of_rates(work, measured[race.plain])
        if up is None or not whole.tokens:
            continue
        score = plain if each == race.plain else scores.get(each)
        runs = race.all_runs(each)
        found.append(
            Confirmed(
                choice=Choice.of(each),
                concurrency=concurrency,
                throughput=whole.rate,
                speed_up=up,
                acceptance_length=acceptance_length(race.counts(each)),
                rounds=sum(run.num_rounds for run in runs),
                runs=len(runs),
                split=race.split(each),
                predicted_speed_up=_ratio(score, plain),
                predicted_throughput=score.throughput if score is not None else None,
                predicted_split=score.split if score is not None else None,
                latency_p95_s=latency_s(work),
                latency_gain=EVEN if each == race.plain else ratio_of_latencies(work, measured[race.plain]),
                predicted_latency_p95_s=score.latency_p95_s if score is not None else None,
                memory_bytes=aims.memory.get(each, 0),
            )
        )
    front = _front(found, aims.objectives)
    marked = [row.model_copy(update={"pareto": row in front}) for row in found]
    return sorted(marked, key=lambda row: -_gained(row, aims))


def _gained(row: Confirmed, aims: Aims) -> float:
    gain = row.speed_up if aims.hurdle == "throughput" else row.latency_gain
    return gain.value if gain is not None else 0.0


def _front(rows: Sequence[Confirmed], objectives: Sequence[str]) -> list[Confirmed]:
    """Contestants that no other one beats in one objective without losing in another; () of a single objective."""
    figures = {
        Candidate(str(number)): Score(row.throughput, row.latency_p95_s or 0.0, row.memory_bytes or 0, 1.0)
        for number, row in enumerate(rows)
    }
    front = pareto(figures, objectives) if len(objectives) > 1 else set()
    return [row for number, row in enumerate(rows) if Candidate(str(number)) in front]


def _ratio(score: Score | None, plain: Score | None) -> float | None:
    return None if score is None or plain is None else score.throughput / plain.throughput


def category_answers(
    race: Race, verdict: Verdict, efforts: Mapping[Candidate, Effort], aims: Aims
) -> list[CategoryAnswer]:
    """The answer for every class of requests: that for all, unless another is better there beyond the noise."""
    if len(race.categories) < 2:
        return []
    found = []
    for category in race.categories:
        measured = race.measured(category)
        base = measured.get(race.plain, {})
        if len(base) < FEWEST_PROMPTS or not measured.get(verdict.winner):
            continue
        own = choose(measured, race.plain, efforts, aims).winner
        ahead = aims.ahead(measured[own], measured[verdict.winner])
        differs = own != verdict.winner and ahead is not None and ahead.low > 1.0
        chosen = own if differs else verdict.winner
        up = EVEN if chosen == race.plain else ratio_of_rates(measured[chosen], base)
        found.append(
            CategoryAnswer(
                category=category,
                prompts=len(base),
                choice=Choice.of(chosen),
                speed_up=up or EVEN,
                acceptance_length=acceptance_length(race.counts(chosen, category)),
                differs=differs,
                latency_gain=aims.ahead(measured[chosen], base) if aims.hurdle == "latency" else None,
            )
        )
    return found


def break_evens(
    costs: Mapping[str, CostModel],
    scores: Scores,
    confirmed: Sequence[Confirmed],
    plain: Score | None,
    judged: tuple[tuple[int, int], str],
) -> list[BreakEven]:
    """For every recipe and depth that was predicted or measured, from which acceptance on it pays.

    Args:
        costs: By recipe.
        scores: Predictions.
        confirmed: Measurements at the same batch size.
        plain: The prediction of plain decoding.
        judged: Batch and context; and the objective in which plain decoding has to be beaten.
    """
    place, hurdle = judged
    measured = {each.choice.candidate: each for each in confirmed if each.choice.settings}
    best = {(each.recipe, each.k): each for each in sorted({*scores, *measured}, key=lambda e: _order(e, measured))}
    ahead = {each.recipe: each.k for each in sorted(scores, key=lambda each: sort_key(scores[each], (hurdle,)))[::-1]}
    found = []
    for each in sorted(best.values(), key=lambda each: (each.recipe, each.k)):
        shown = each in measured or each.k in SHOWN or ahead.get(each.recipe) == each.k
        if each.k and each.recipe in costs and shown:
            told = break_even_of(each, costs[each.recipe], place, _reached(each, measured, scores, plain))
            shorter = _shorter(each, measured, scores, plain) if hurdle == "latency" else None
            found.append(told.model_copy(update={"latency_gain": shorter}))
    return found


def _shorter(
    each: Candidate, measured: Mapping[Candidate, Confirmed], scores: Scores, plain: Score | None
) -> float | None:
    """How many times shorter the latency is, measured where it was, else predicted."""
    if each in measured:
        gain = measured[each].latency_gain
        return gain.value if gain is not None else None
    return gain_of(scores[each], plain, "latency") if plain is not None else None


def _order(each: Candidate, measured: Mapping[Candidate, Confirmed]) -> tuple[bool, bool, str]:
    """What stands for a depth comes last: what was measured, else a fixed length, which always drafts that deep."""
    return each in measured, each.policy == "fixed", each.label


def _reached(
    each: Candidate, measured: Mapping[Candidate, Confirmed], scores: Scores, plain: Score | None
) -> tuple[float | None, float | None, bool]:
    if each in measured:
        return measured[each].acceptance_length, measured[each].speed_up.value, True
    score = scores[each]
    return score.acceptance_length, _ratio(score, plain), False


def divergences(race: Race, exactness: str) -> Iterator[str]:
    """Contestants whose texts are not plain decoding's."""
    for each in race.runs:
        compared = [run.equal for run in race.all_runs(each) if run.equal is not None]
        others = compared.count(False)
        if others and each != race.plain:
            why = "the target is tie-exact" if exactness == "tie-exact" else "which a bit-exact target should not show"
            yield f"{each.label}: {others} of {len(compared)} texts are not plain decoding's, {why}"
