"""Length policies: what they allow, and what they learn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
from pydantic import ValidationError

from specflow.length import Additive, ByMatch, Fixed, LengthPolicy
from specflow.types import DraftBlock, DraftBudget


def started(policy: LengthPolicy, batch: int = 1) -> LengthPolicy:
    policy.reset(batch)
    for row in range(batch):
        policy.start(row)
    return policy


def matched(*lengths: int) -> DraftBlock:
    return cast(DraftBlock, SimpleNamespace(match_lengths=lengths))


def play(policy: ByMatch, length: int, accept: Callable[[int], int], rounds: int) -> list[tuple[int, int]]:
    """Draft and accepted tokens of rounds that all find a match of one length."""
    history = []
    for _ in range(rounds):
        drafted = policy.budget([999]).most(0, length)
        if drafted:
            policy.trim(matched(length))
        accepted = accept(drafted)
        policy.observe([drafted], [accepted])
        history.append((drafted, accepted))
    return history


def cost(policy: ByMatch, rounds: Sequence[tuple[int, int]]) -> float:
    """Plain steps spent for each token, as the policy prices them; 1 is plain decoding."""
    prices = policy.config
    spent = sum(1 + (prices.fixed_price if n else 0) + n * prices.row_price for n, _ in rounds)
    return spent / sum(1 + accepted for _, accepted in rounds)


def geometric(rng: random.Random, first: float, later: float) -> Callable[[int], int]:
    def accept(drafted: int) -> int:
        accepted = 0
        while accepted < drafted and rng.random() < (later if accepted else first):
            accepted += 1
        return accepted

    return accept


def test_budgets_say_the_smallest_of_their_limits() -> None:
    budget = DraftBudget((9, 9), 1.5, ((1, 2, 8), (0, 9, 4)))
    assert [budget.most(0, length) for length in (1, 2, 3, 30)] == [1, 2, 5, 8]
    assert [budget.most(1, length) for length in (1, 2, 3, 30)] == [0, 3, 4, 4]
    assert DraftBudget((7,), 0.1).most(0, 30) == 3
    assert DraftBudget((7,)).most(0, 1) == 7


def test_fixed_is_k_within_each_rows_limit() -> None:
    assert started(Fixed(5), 4).budget([9, 3, 0, -1]) == DraftBudget((5, 3, 0, 0))
    assert started(Fixed(0)).budget([9]).widest == 0


def test_additive_grows_after_whole_blocks_and_shrinks_after_others() -> None:
    policy = started(Additive(k=8, start=4))
    lengths = []
    for accept_all in (True, True, True, False, False, True):
        drafted = policy.budget([99]).tokens[0]
        lengths.append(drafted)
        policy.observe([drafted], [drafted if accept_all else drafted - 1])
    assert lengths == [4, 6, 8, 8, 7, 6]
    assert policy.budget([99]).tokens == (8,)


def test_additive_never_leaves_1_to_k() -> None:
    assert started(Additive(k=6)).budget([99]).tokens == (6,)
    policy = started(Additive(k=3, start=9))
    assert policy.budget([99]).tokens == (3,)
    for _ in range(5):
        policy.observe([1], [0])
    assert policy.budget([99]).tokens == (1,)


def test_additive_ignores_rounds_that_drafted_nothing() -> None:
    policy = started(Additive(k=8, start=4))
    policy.observe([0], [0])
    assert policy.budget([99]).tokens == (4,)


def test_additive_rows_are_their_own() -> None:
    policy = started(Additive(k=8, start=4), 3)
    policy.observe([4, 4, 0], [4, 0, 0])
    assert policy.budget([99, 99, 99]).tokens == (6, 3, 4)
    policy.select([1, 0])
    assert policy.budget([99, 99]).tokens == (3, 6)
    policy.start(1)
    assert policy.budget([99, 99]).tokens == (3, 4)
    assert policy.budget([99, 2]).tokens == (3, 2)


def test_by_match_drafts_more_after_longer_matches_up_to_k() -> None:
    policy = started(ByMatch(16, per_match=1.0, row_price=0.0))
    budget = policy.budget([999])
    assert [budget.most(0, length) for length in (1, 2, 3, 8, 16, 64)] == [1, 2, 3, 8, 16, 16]


def test_by_match_takes_the_length_that_yields_most_for_its_cost() -> None:
    """Before anything is seen p is 1/2 and r 4/5: 1.5 / 1.3, 1.9 / 1.6, 2.22 / 1.9 tokens a plain step."""
    policy = started(ByMatch(16, row_price=0.3, fixed_price=0.0))
    assert policy.budget([999]).most(0, 16) == 2


def test_by_match_goes_to_k_where_everything_is_accepted() -> None:
    policy = started(ByMatch(16))
    assert play(policy, 40, lambda drafted: drafted, 30)[-1] == (16, 16)


def test_by_match_parks_a_match_length_that_never_pays_and_probes_it_ever_more_rarely() -> None:
    policy = started(ByMatch(16))
    rounds = play(policy, 2, lambda drafted: 0, 1000)
    tried = [index for index, (drafted, _) in enumerate(rounds) if drafted]
    parked = tried.index(next(b for a, b in pairwise(tried) if b > a + 1))
    assert parked <= 10
    assert all(rounds[index][0] == 1 for index in tried[parked:])
    gaps = [b - a for a, b in zip(tried[parked - 1 :], tried[parked:], strict=False)]
    assert gaps == [16, 32, 64, 128, 256, 256]
    assert cost(policy, rounds) < 1.02


def test_by_match_wakes_up_when_the_text_starts_repeating() -> None:
    policy = started(ByMatch(16))
    play(policy, 2, lambda drafted: 0, 40)
    rounds = play(policy, 2, lambda drafted: drafted, 80)
    assert [drafted for drafted, _ in rounds[-10:]] == [4] * 10


def test_by_match_lengths_are_judged_apart() -> None:
    policy = started(ByMatch(16))
    play(policy, 2, lambda drafted: 0, 40)
    budget = policy.budget([999])
    assert budget.most(0, 3) == 0
    assert budget.most(0, 4) > 0
    play(policy, 16, lambda drafted: drafted, 10)
    assert policy.budget([999]).most(0, 2) == 0


def test_by_match_asks_for_nothing_where_no_length_pays() -> None:
    policy = started(ByMatch(16, probe=500))
    for length in (1, 2, 4, 8, 16):
        play(policy, length, lambda drafted: 0, 12)
    assert policy.budget([999]).tokens == (0,)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("first", "later"), [(0.0, 0.0), (0.05, 0.5), (0.1, 0.3), (0.15, 0.5), (0.3, 0.6), (0.9, 0.95)]
)
def test_by_match_never_costs_much_more_than_plain_decoding(first: float, later: float, seed: int) -> None:
    policy = started(ByMatch(16))
    assert cost(policy, play(policy, 2, geometric(random.Random(seed), first, later), 500)) < 1.02


def test_by_match_earns_what_acceptance_offers() -> None:
    policy = started(ByMatch(16))
    accept = geometric(random.Random(0), 0.9, 0.95)
    assert cost(policy, play(policy, 30, accept, 500)) < 0.25


def test_by_match_learns_nothing_from_tokens_after_a_rejection() -> None:
    """With the first token right and the second wrong, one token is worth drafting however many were submitted."""
    policy = started(ByMatch(16))
    rounds = play(policy, 30, lambda drafted: min(drafted, 1), 60)
    assert rounds[-1] == (1, 1)


def test_dearer_rows_mean_shorter_drafts() -> None:
    lengths = []
    for price in (0.0, 0.02, 0.1, 0.4):
        policy = started(ByMatch(16, row_price=price, per_match=9.0))
        rounds = play(policy, 30, geometric(random.Random(1), 0.8, 0.8), 300)
        lengths.append(sum(drafted for drafted, _ in rounds) / len(rounds))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[-1]


def test_by_match_rows_are_their_own() -> None:
    policy = started(ByMatch(16), 2)
    for _ in range(12):
        policy.trim(matched(2, 2))
        policy.observe([2, 2], [0, 2])
    assert [policy.budget([99, 99]).most(row, 2) for row in (0, 1)] == [0, 4]
    policy.select([1, 0])
    assert [policy.budget([99, 99]).most(row, 2) for row in (0, 1)] == [4, 0]
    policy.start(1)
    assert policy.budget([99, 1]).most(1, 2) == 1
    assert policy.budget([99, 99]).most(1, 2) == 4


def test_by_match_ignores_plain_rounds_and_rows_without_a_match() -> None:
    policy = started(ByMatch(16), 2)
    before = policy.budget([99, 99])
    policy.observe([0, 0], [0, 0])
    policy.trim(matched(0, 2))
    policy.observe([3, 0], [0, 0])
    assert policy.budget([99, 99]) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: Additive(8, start=0),
        lambda: Additive(8, up=-1),
        lambda: ByMatch(16, per_match=0),
        lambda: ByMatch(16, probe=0),
    ],
)
def test_senseless_options_are_refused(make: Callable[[], LengthPolicy]) -> None:
    with pytest.raises(ValidationError):
        make()
