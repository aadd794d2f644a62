"""Expected gain: the depth it chooses, what it cuts, and what it costs where drafting does not pay."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError

from specflow.law import Dense
from specflow.length import ExpectedGain
from specflow.tree import chain
from specflow.types import DraftBlock, DraftBudget

K, VOCAB = 8, 5
From = Literal["context", "prefix", "self"]


class Line:
    """Costs on a line: a plain step takes 1, and so on."""

    def __init__(self, row: float = 0.05, token: float = 0.05, fixed: float = 0.05, slope: float = 0.0) -> None:
        self.row, self.token, self.fixed, self.slope = row, token, fixed, slope

    def verify_s(self, depth: int, batch: int, context: int) -> float:
        return 1.0 + depth * (self.row * batch + self.slope * context)

    def round_s(self, depth: int, batch: int, context: int) -> float:
        return self.verify_s(depth, batch, context) + (self.fixed + depth * self.token if depth else 0.0)


def started(costs: object = None, batch: int = 1, **options: Any) -> ExpectedGain:
    policy = ExpectedGain(K, **options)
    if costs is not None:
        policy.use(costs)  # type: ignore[arg-type]
    policy.reset(batch)
    for row in range(batch):
        policy.start(row)
    return policy


def play(policy: ExpectedGain, chance: float, rounds: int, seed: int = 0, context: int = 0) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of rounds whose draft tokens stand with this chance each."""
    draws, history = random.Random(seed), []
    for _ in range(rounds):
        drafted = policy.budget([99], [context]).tokens[0]
        accepted = 0
        while accepted < drafted and draws.random() < chance:
            accepted += 1
        policy.observe([drafted], [accepted])
        history.append((drafted, accepted))
    return history


def speed(costs: Line, rounds: list[tuple[int, int]], context: int = 0) -> float:
    """Tokens a second; plain decoding has 1."""
    return sum(1 + accepted for _, accepted in rounds) / sum(costs.round_s(n, 1, context) for n, _ in rounds)


def best_speed(costs: Line, chance: float) -> float:
    """Of all fixed depths, expected."""
    return max(sum(chance**i for i in range(depth + 1)) / costs.round_s(depth, 1, 0) for depth in range(K + 1))


def test_without_costs_every_budget_is_k() -> None:
    """As a replay without costs counts it; `build_engine` lets no recipe run so (test_build)."""
    policy = started()
    policy.reset(2)
    for _ in range(50):
        assert policy.budget([99, 3]) == DraftBudget((K, 3))
        policy.observe([K, 3], [0, 0])


def test_it_stops_drafting_where_acceptance_has_faded_with_the_context() -> None:
    """Drafts that stand at 2k tokens and fall at 20k (speculators PR 684): there rounds become plain by themselves."""
    policy, chance = started(Line(row=0.1)), {2_000: 0.8, 20_000: 0.07}
    dice = random.Random(7)
    drafted: dict[int, list[int]] = {}
    for context in (2_000, 20_000, 2_000):
        rounds = drafted[context] = []
        for _ in range(300):
            depth = policy.budget([99], [context]).tokens[0]
            stood = next((n for n in range(depth) if dice.random() >= chance[context]), depth)
            policy.observe([depth], [stood])
            rounds.append(depth)
    assert min(drafted[2_000][-100:]) > 0  # it comes back where it pays again
    assert sum(depth > 0 for depth in drafted[20_000][-200:]) < 200 / 8  # probes, the lucky ones twice


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("costs", [Line(), Line(0.2, 0.1), Line(0.0, 0.3), Line(0.02, 0.0, 0.4)])
def test_it_comes_close_to_the_best_fixed_depth(costs: Line, chance: float) -> None:
    found = speed(costs, play(started(costs), chance, 1500))
    assert found > 0.88 * best_speed(costs, chance)
    assert found > 0.97


def test_it_parks_where_nothing_is_accepted_and_probes_ever_more_rarely() -> None:
    rounds = play(started(Line(), probe=8), 0.0, 1000)
    tried = [index for index, (drafted, _) in enumerate(rounds) if drafted]
    gaps = [after - before for before, after in pairwise(tried)]
    parked = next(index for index, gap in enumerate(gaps) if gap > 1)
    assert parked <= 8
    assert gaps[parked:] == [9, 17, *[33] * (len(gaps) - parked - 2)]


def test_it_wakes_up_when_drafts_become_good() -> None:
    policy = started(Line(), probe=4)
    play(policy, 0.0, 60)
    rounds = play(policy, 1.0, 200)
    assert [drafted for drafted, _ in rounds[-5:]] == [K] * 5


def test_a_probe_that_paid_is_followed_by_another_at_once() -> None:
    """It is the next round's draft, though what earlier rounds taught still speaks against it."""
    policy = started(Line(), probe=8)
    play(policy, 0.0, 60)
    while not (drafted := policy.budget([99], [0]).widest):
        policy.observe([0], [0])
    policy.observe([drafted], [drafted])
    again = policy.budget([99], [0]).widest
    assert again > 0
    policy.observe([again], [0])
    idle = play(policy, 0.0, 17)
    assert [length > 0 for length, _ in idle] == [False] * 16 + [True]


def test_dearer_contexts_and_batches_mean_shorter_drafts() -> None:
    costs = Line(row=0.02, slope=1e-4)
    depth = {context: play(started(costs), 0.8, 400, context=context)[-1][0] for context in (0, 1000, 20000)}
    assert depth[0] > depth[1000] > depth[20000] == 0
    wide = started(costs, batch=64)
    for _ in range(60):
        drafted = wide.budget([99] * 64, [0] * 64).tokens
        wide.observe(drafted, [min(most, 1) for most in drafted])
    assert wide.budget([99] * 64, [0] * 64).widest == 0


def test_a_depth_is_left_only_for_a_better_one() -> None:
    """Equal costs for all depths up to noise: with hysteresis the depth moves far less often."""
    moves = []
    for hysteresis in (1.0, 1.03):
        rounds = play(started(Line(0.1, 0.1), hysteresis=hysteresis), 0.7, 600, seed=4)
        moves.append(sum(a[0] != b[0] for a, b in pairwise(rounds)))
    assert moves[1] < 0.6 * moves[0]


def test_rows_share_the_pass_and_so_the_depth() -> None:
    policy = started(Line(), batch=3)
    for _ in range(60):
        drafted = policy.budget([99, 99, 1], [0, 0, 0]).tokens
        policy.observe(drafted, [drafted[0], 0, drafted[2]])
    budget = policy.budget([99, 99, 1], [0, 0, 0]).tokens
    assert budget[0] == budget[1] > budget[2] == 1
    policy.select([1])
    assert policy.budget([99], [0]).widest == 0
    policy.start(0)
    assert policy.budget([99], [0]).widest > 0


def sure(rows: list[list[float]], source: From) -> DraftBlock:
    confidence = torch.tensor(rows)
    tokens = torch.ones(confidence.shape, dtype=torch.int64)
    law = Dense(tokens, torch.full((*confidence.shape, VOCAB), 1 / VOCAB))
    block = DraftBlock(tokens, (confidence.shape[1],) * len(rows), chain(confidence.shape[1], tokens.device), law)
    return replace(block, confidence=confidence, confidence_from=source)


class Stairs(Line):
    """A pass of up to 3 rows costs 1, of more 1.8."""

    def verify_s(self, depth: int, batch: int, context: int) -> float:
        return 1.0 if depth < 3 else 1.8


def trimmed(costs: Line, rows: list[list[float]], source: From) -> tuple[int, str]:
    policy = started(costs, batch=len(rows))
    policy.budget([99] * len(rows), [0] * len(rows))
    left = policy.trim(sure(rows, source))
    return left.num_nodes, left.lengths_from


def test_columns_are_added_while_they_pay() -> None:
    """Drafting 4 took .25; rates by width: 1/1.25, 1.9/1.45, 2.71/1.65, 2.95/1.85, 2.98/2.05."""
    costs = Line(row=0.2)
    assert trimmed(costs, [[0.9, 0.9, 0.3, 0.1]], "prefix") == (2, "prefix")
    assert trimmed(costs, [[0.1, 0.9, 0.9, 0.9]], "prefix") == (0, "prefix")


def test_what_drafting_took_is_spent_either_way() -> None:
    """With free drafts .15 a row is worth waiting for a chance of .15; the dearer the draft, the more so."""
    chances = [[0.15, 0.9, 0.9, 0.9]]
    assert trimmed(Line(row=0.16, token=0.0, fixed=0.0), chances, "prefix")[0] == 0
    assert trimmed(Line(row=0.16, token=0.0, fixed=1.0), chances, "prefix")[0] == 4


def test_a_step_of_the_stairs_ends_it_unless_all_confidences_are_known() -> None:
    chances = [[0.9, 0.9, 0.8, 0.95, 0.95, 0.95, 0.95]]
    assert trimmed(Stairs(), chances, "prefix") == (2, "prefix")
    assert trimmed(Stairs(), chances, "context") == (7, "context")


def test_rows_of_a_batch_are_cut_together() -> None:
    costs = Line(row=0.15)
    sure_row, unsure_row = [0.95] * 4, [0.1] * 4
    assert trimmed(costs, [sure_row], "prefix")[0] == 4
    assert trimmed(costs, [unsure_row], "prefix")[0] == 0
    assert trimmed(costs, [unsure_row] * 3 + [sure_row], "prefix")[0] == 0
    assert trimmed(costs, [sure_row] * 3 + [unsure_row], "prefix")[0] > 0


def test_a_confidence_that_comes_with_the_token_counts_for_the_next_one() -> None:
    """The first token is judged by its row's own rate, .7 at first; after an unsure token comes nothing more."""
    costs = Line(row=0.2)
    assert trimmed(costs, [[0.1, 0.9, 0.9]], "self") == (1, "prefix")
    assert trimmed(costs, [[0.9, 0.1, 0.9]], "self") == (2, "prefix")
    assert trimmed(costs, [[0.99, 0.99, 0.99]], "self") == (3, "prefix")


def test_trimming_can_be_left_out() -> None:
    policy = started(Line(row=0.5), trim=False)
    policy.budget([99], [0])
    block = sure([[0.1, 0.1]], "prefix")
    assert policy.trim(block) is block


def test_a_drafter_that_doubts_itself_is_parked_and_probes_are_not_cut() -> None:
    """Its blocks are cut to nothing, so drafting yields nothing, and is not asked for every round."""
    policy, asked, probed = started(Line(row=0.2), probe=4), 0, 0
    for _ in range(200):
        drafted = policy.budget([99], [0]).widest
        left = policy.trim(sure([[0.01] * drafted], "prefix")).num_nodes if drafted else 0
        policy.observe([left], [0])
        asked, probed = asked + (drafted > 0), probed + (left > 0)
    assert asked < 25
    assert 0 < probed < asked


@pytest.mark.parametrize("options", [{"hysteresis": 0.9}, {"probe": 0}])
def test_senseless_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        started(**options)
