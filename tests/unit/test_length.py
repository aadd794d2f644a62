"""Length policies: what they allow, and what they learn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
from pydantic import ValidationError

from specflow.length import Additive, ByMatch, Fixed, LengthPolicy, Until
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
    """Before anything is seen matches of 2, 3, 4 tokens go on with 0.56, 0.66, 0.78.

    So 1, 2, 3 tokens yield 1.56, 1.93, 2.22 for 1.2, 1.4, 1.6 plain steps, or for 1.35, 1.7, 2.05.
    """
    assert started(ByMatch(16, row_price=0.2, fixed_price=0.0)).budget([999]).most(0, 2) == 3
    assert started(ByMatch(16, row_price=0.35, fixed_price=0.0)).budget([999]).most(0, 2) == 1
    assert started(ByMatch(16, row_price=0.6, fixed_price=0.0)).budget([999]).most(0, 2) == 0


def test_by_match_drafts_long_copies_at_full_length_from_the_first_round() -> None:
    policy = started(ByMatch(48))
    one, sixteen, many = (policy.budget([999]).most(0, length) for length in (1, 16, 64))
    assert one <= 2 < 16 <= sixteen < 32 <= many


def test_by_match_learns_from_long_drafts_what_short_matches_are_worth() -> None:
    """A draft after 2 tokens that stands shows also what matches of 4 do."""
    policy = started(ByMatch(16, row_price=0.25, fixed_price=0.0))
    before = policy.budget([999]).most(0, 4)
    play(policy, 2, lambda drafted: drafted, 8)
    assert policy.budget([999]).most(0, 4) > before


class Prices:
    """Seconds of rounds by draft tokens: a list, times what batch and context make of it."""

    def __init__(self, *seconds: float, per_context: float = 0.0) -> None:
        self.seconds, self.per_context = seconds, per_context

    def round_s(self, depth: int, batch: int, context: int) -> float:
        return self.seconds[depth] + depth * context * self.per_context

    def verify_s(self, depth: int, batch: int, context: int) -> float:
        raise AssertionError("a whole round is what counts")


def test_by_match_decides_by_measured_costs_where_there_are_any() -> None:
    policy = ByMatch(4, row_price=9.0)
    assert started(policy).budget([999]).tokens == (0,)
    policy.use(Prices(2.0, 2.1, 9.0, 9.0, 9.0))
    assert policy.budget([999]).tokens == (1,)
    policy.use(Prices(2.0, 2.1, 2.1, 2.2, 2.3))
    assert policy.budget([999]).tokens == (4,)


def test_by_match_reads_its_prices_again_as_the_text_grows() -> None:
    policy = ByMatch(4)
    policy.use(Prices(1.0, 1.01, 1.02, 1.03, 1.04, per_context=0.0005))
    assert started(policy).budget([999], [0]).tokens == (4,)
    assert policy.budget([999], [4000]).tokens == (0,)


def test_by_match_goes_to_k_where_everything_is_accepted() -> None:
    policy = started(ByMatch(16))
    assert play(policy, 40, lambda drafted: drafted, 30)[-1] == (16, 16)


def test_by_match_parks_a_match_length_that_never_pays_and_probes_it_ever_more_rarely() -> None:
    policy = started(ByMatch(16))
    rounds = play(policy, 2, lambda drafted: 0, 1000)
    tried = [index for index, (drafted, _) in enumerate(rounds) if drafted]
    parked = tried.index(next(b for a, b in pairwise(tried) if b > a + 1))
    assert parked <= 20
    assert all(rounds[index][0] == 1 for index in tried[parked:])
    gaps = [b - a for a, b in zip(tried[parked - 1 :], tried[parked:], strict=False)]
    assert gaps == [16, 32, 64, 128, 256, 256]
    assert cost(policy, rounds) < 1.02


def test_by_match_wakes_up_when_the_text_starts_repeating() -> None:
    policy = started(ByMatch(16))
    play(policy, 2, lambda drafted: 0, 40)
    rounds = play(policy, 2, lambda drafted: drafted, 120)
    assert [drafted for drafted, _ in rounds[-10:]] == [4] * 10


def test_by_match_lengths_are_judged_apart() -> None:
    policy = started(ByMatch(16))
    play(policy, 2, lambda drafted: 0, 40)
    budget = policy.budget([999])
    assert budget.most(0, 2) == 0
    assert budget.most(0, 3) > 0
    play(policy, 16, lambda drafted: drafted, 10)
    assert policy.budget([999]).most(0, 2) == 0


def test_by_match_asks_for_nothing_where_no_length_pays() -> None:
    policy = started(ByMatch(16, probe=500))
    for length in (1, 2, 3, 4, 8, 16, 32, 64):
        play(policy, length, lambda drafted: 0, 40)
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
    """One token right and the next wrong says the same however many were submitted."""
    tables = []
    for submitted in (2, 9):
        policy = started(ByMatch(16))
        for _ in range(10):
            policy.trim(matched(4))
            policy.observe([submitted], [1])
        tables.append(policy.budget([999]).by_match)
    assert tables[0] == tables[1]


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
    for _ in range(20):
        policy.trim(matched(2, 2))
        policy.observe([2, 2], [0, 2])
    assert [policy.budget([99, 99]).most(row, 2) for row in (0, 1)] == [0, 4]
    policy.select([1, 0])
    assert [policy.budget([99, 99]).most(row, 2) for row in (0, 1)] == [4, 0]
    policy.start(1)
    assert policy.budget([99, 1]).most(1, 2) == 1
    assert policy.budget([99, 99]).most(1, 2) > 1


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


def test_until_drafts_up_to_a_length_of_context_whatever_the_policy() -> None:
    policy = started(Until(Fixed(4), 100), 3)
    assert policy.k == 4
    assert policy.budget([9, 9, 2], [99, 100, 50]).tokens == (4, 0, 2)
    assert policy.budget([9, 9, 9]).tokens == (4, 4, 4)  # who asks without contexts has none to stop at
    learns = started(Until(Additive(8, start=2, up=3), 100), 1)
    learns.observe([2], [2])
    assert learns.budget([99], [0]).tokens == (5,)
    learns.select([0])
    learns.start(0)
    assert learns.budget([99], [0]).tokens == (2,)
