"""Clocks, acceptance figures and spread."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow import measure
from specflow.types import Counts, Timings


def counts_of(rounds: list[tuple[int, int]]) -> Counts:
    """Counts of a chain from (drafted, accepted) of each round."""
    width = max((drafted for drafted, _ in rounds), default=0)
    return Counts(
        num_rounds=len(rounds),
        num_spec_steps=sum(drafted > 0 for drafted, _ in rounds),
        num_draft_calls=len(rounds),
        num_draft_tokens=sum(drafted for drafted, _ in rounds),
        num_accepted_draft_tokens=sum(accepted for _, accepted in rounds),
        num_generated_tokens=1 + sum(accepted + 1 for _, accepted in rounds),
        drafted_at=[sum(drafted > i for drafted, _ in rounds) for i in range(width)],
        reached_at=[sum(drafted > i and accepted >= i for drafted, accepted in rounds) for i in range(width)],
        accepted_at=[sum(accepted > i for _, accepted in rounds) for i in range(width)],
    )


some_rounds = st.lists(
    st.integers(0, 8).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))), max_size=20
)


def test_laps_do_not_overlap_and_lose_nothing() -> None:
    timings = Timings()
    clock = measure.Clock(timings)
    begin = clock.mark()
    time.sleep(0.002)
    clock.lap("draft_s")
    clock.lap("target_s")
    time.sleep(0.001)
    end = clock.lap("draft_s")
    assert timings.draft_s >= 0.003
    assert timings.draft_s + timings.target_s == pytest.approx(end - begin)


def test_mark_charges_nobody() -> None:
    timings = Timings()
    clock = measure.Clock(timings)
    time.sleep(0.005)
    clock.mark()
    clock.lap("other_s")
    assert timings.other_s < 0.004


def test_acceptance_is_conditional_and_unconditional_with_counts() -> None:
    first, second, third = measure.acceptance_by_position(counts_of([(3, 3), (3, 1), (1, 0), (0, 0), (2, 0)]))
    assert (first.drafted, first.reached, first.accepted) == (4, 4, 2)
    assert (first.conditional, first.unconditional) == (0.5, 0.5)
    assert (second.drafted, second.reached, second.accepted) == (3, 2, 1)
    assert (second.conditional, second.unconditional) == (0.5, 0.25)
    assert (third.reached, third.conditional) == (1, 1.0)


def test_a_position_that_was_never_reached_is_unobserved_and_not_rejected() -> None:
    second = measure.acceptance_by_position(counts_of([(2, 0), (2, 0)]))[1]
    assert (second.drafted, second.conditional, second.unconditional) == (2, None, 0.0)


@given(some_rounds)
def test_rates_stay_within_zero_and_one_and_figures_agree(rounds: list[tuple[int, int]]) -> None:
    counts = counts_of(rounds)
    figures = measure.metrics(counts)
    for rate in measure.acceptance_by_position(counts):
        assert rate.conditional is None or 0 <= rate.conditional <= 1
        assert rate.unconditional is None or 0 <= rate.unconditional <= 1
    rate = figures["draft_acceptance_rate"]
    assert rate is None or 0 <= rate <= 1
    histogram = {int(j): number for j, number in figures["acceptance_histogram"].items()}
    assert sum(histogram.values()) == counts.num_spec_steps
    assert sum(j * number for j, number in histogram.items()) == counts.num_accepted_draft_tokens
    expected: dict[int, int] = {}
    for drafted, accepted in rounds:
        if drafted:
            expected[accepted] = expected.get(accepted, 0) + 1
    assert histogram == expected


@given(some_rounds, some_rounds)
def test_merged_counts_are_the_counts_of_both(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> None:
    merged = measure.merge_counts([counts_of(one), counts_of(two)])
    both = counts_of(one + two)
    both.num_generated_tokens += 1  # each request has a first token from its prefill
    assert merged == both


def test_merging_leaves_its_inputs_alone() -> None:
    counts = counts_of([(2, 1)])
    measure.merge_counts([counts, counts])
    assert counts == counts_of([(2, 1)])


def test_acceptance_length_counts_plain_rounds_and_the_bonus_token() -> None:
    figures = measure.metrics(counts_of([(4, 3), (0, 0), (0, 0)]))
    assert figures["mean_acceptance_length"] == 2.0
    assert figures["mean_acceptance_length_when_drafted"] == 4.0
    assert measure.acceptance_length(Counts()) is None
    assert measure.metrics(Counts())["draft_acceptance_rate"] is None


def test_counts_that_cannot_be_are_refused() -> None:
    counts = counts_of([(2, 1), (2, 2)])
    counts.accepted_at[0] += 1
    counts.num_accepted_draft_tokens += 1
    with pytest.raises(AssertionError):
        measure.metrics(counts)


def test_spread_has_median_and_quartiles() -> None:
    found = measure.spread([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found == measure.Spread(3.0, 2.0, 4.0, 5)
    assert measure.spread([1.0, 2.0]) == measure.Spread(1.5, 1.25, 1.75, 2)
    assert measure.spread([7.0]) == measure.Spread(7.0, 7.0, 7.0, 1)
    assert measure.spread([]) is None


def test_pooled_figures_weigh_by_size_and_are_unobserved_without_a_denominator() -> None:
    assert measure.pooled([(10, 1.0), (2, 1.0)]) == 6.0
    assert measure.pooled([(3, 0)]) is None
    assert measure.pooled([]) is None


def test_quantiles_lie_between_order_statistics() -> None:
    assert measure.quantile([3.0, 1.0, 2.0], 0.95) == pytest.approx(2.9)
    assert measure.quantile([], 0.5) is None


def test_context_ranges_double_from_512() -> None:
    assert [measure.context_bucket(length) for length in (0, 511, 512, 1023, 1024, 2047, 2048)] == [0, 0, 1, 1, 2, 2, 3]


def test_acceptance_by_context_tells_ranges_apart_and_leaves_out_empty_ones() -> None:
    counts = Counts(rounds_by_context=[4, 0, 2], accepted_by_context=[8, 0, 1])
    assert measure.acceptance_by_context(counts) == [
        measure.ContextRate(0, 512, 4, 3.0),
        measure.ContextRate(1024, 2048, 2, 1.5),
    ]
    both = measure.merge_counts([counts, Counts(rounds_by_context=[1], accepted_by_context=[1])])
    assert both.rounds_by_context == [5, 0, 2]


def positions(*accepted: int, reached: int = 100) -> Counts:
    """Counts of a chain whose positions were accepted this often."""
    ladder = [reached, *accepted[:-1]]
    return Counts(
        num_rounds=reached,
        num_spec_steps=reached,
        num_draft_tokens=sum(ladder),
        num_accepted_draft_tokens=sum(accepted),
        drafted_at=[reached] * len(accepted),
        reached_at=ladder,
        accepted_at=list(accepted),
    )


def test_a_cliff_is_a_sudden_end_that_was_seen_often_enough() -> None:
    assert measure.cliff(positions(80, 60, 45, 0, 0)) == 3
    assert measure.cliff(positions(80, 60, 45, 30, 20)) is None
    assert measure.cliff(positions(80, 15, 0)) is None  # the third position was reached 15 times
    assert measure.cliff(positions(2, 0)) is None  # nothing held before
    assert measure.cliff(positions(50, 6)) is None  # a quarter of what held before
