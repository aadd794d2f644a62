"""Cutting blocks, the moving bar of Draft & Verify, and the fixed confidence threshold."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from pydantic import ValidationError

from specflow.law import Dense, PointMass
from specflow.length import Confidence, Threshold
from specflow.length_confidence import cut
from specflow.noise import RoundNoise
from specflow.sampling import TargetLaw
from specflow.tree import chain, from_parents
from specflow.types import PAD, DraftBlock, DraftBudget
from specflow.verify import BlockRule, Match, Rejection, Rule

CPU, VOCAB = torch.device("cpu"), 5
From = Literal["context", "prefix", "self"]


def block_of(rows: list[list[int]], point: bool = False) -> DraftBlock:
    tokens = torch.tensor(rows)
    q = torch.full((*tokens.shape, VOCAB), 1 / VOCAB)
    law = PointMass(tokens, VOCAB) if point else Dense(tokens, q)
    return DraftBlock(tokens, tuple(sum(t != PAD for t in row) for row in rows), chain(tokens.shape[1], CPU), law)


def sure(block: DraftBlock, confidence: list[list[float]], source: From) -> DraftBlock:
    return replace(block, confidence=torch.tensor(confidence), confidence_from=source)


def test_a_cut_ends_each_row_and_narrows_the_block() -> None:
    block = block_of([[1, 2, 3, 4], [1, 2, PAD, PAD]])
    left = cut(block, torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]]).bool(), "prefix")
    assert left.tokens.tolist() == [[1, 2], [PAD, PAD]]
    assert (left.lengths, left.num_nodes, left.lengths_from) == ((2, 0), 2, "prefix")
    assert left.topology is chain(2, CPU)
    assert left.law.prob().shape == (2, 2)


def test_a_cut_may_leave_nothing() -> None:
    left = cut(block_of([[1, 2]]), torch.tensor([[False, True]]), "context")
    assert (left.num_nodes, left.lengths) == (0, (0,))
    p = torch.tensor([[[0.1, 0.2, 0.3, 0.4, 0.0]]])
    law, noise = TargetLaw(p.log(), p.log(), [False]), RoundNoise([1], [1], CPU)
    plain = Match().verify(left, law, noise).tokens
    assert all(rule.verify(left, law, noise).tokens.equal(plain) for rule in (Rejection(), BlockRule()))


@pytest.mark.parametrize("before", ["context", "prefix", "self"])
@pytest.mark.parametrize("because", ["context", "prefix", "self"])
def test_a_cut_never_hides_what_decided_before_it(before: From, because: From) -> None:
    order = ["context", "prefix", "self"]
    left = cut(replace(block_of([[1, 2]]), lengths_from=before), torch.tensor([[True, False]]), because)
    assert left.lengths_from == max(before, because, key=order.index)


def test_trees_are_not_cut() -> None:
    tree = replace(block_of([[1, 2]]), topology=from_parents(torch.tensor([[-1, -1]])))
    assert cut(tree, torch.tensor([[False, False]]), "prefix") is tree


@pytest.mark.parametrize("rule", [Match(), Rejection(), BlockRule()])
def test_a_narrowed_block_has_the_verdict_of_the_masked_one(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(0)
    for seed in range(20):
        tokens = torch.randint(VOCAB, (2, 4), generator=draws)
        q = torch.randn(2, 4, VOCAB, generator=draws).softmax(-1)
        block = DraftBlock(tokens, (4, 4), chain(4, CPU), Dense(tokens, q))
        keep = torch.rand(2, 4, generator=draws) < 0.7
        with monkeypatch.context() as patch:
            patch.setattr("specflow.length_confidence.asking_is_free", lambda device: False)
            masked = cut(block, keep, "prefix")
        narrow, p = cut(block, keep, "prefix"), torch.randn(2, 5, VOCAB, generator=draws)
        noise = RoundNoise([seed, seed + 50], [3, 9], CPU)
        few = p[:, : narrow.num_nodes + 1]
        one = rule.verify(masked, TargetLaw(p, p, [False] * 2), noise).tokens
        other = rule.verify(narrow, TargetLaw(few, few, [False] * 2), noise).tokens
        assert one[:, : other.shape[1]].equal(other)
        assert bool((one[:, other.shape[1] :] == PAD).all())


@pytest.mark.parametrize(
    ("source", "point", "lengths", "told"),
    [
        ("context", False, (2, 0, 3), "context"),
        ("prefix", False, (2, 0, 3), "prefix"),
        ("self", False, (3, 1, 3), "prefix"),  # the unsure token stays
        ("self", True, (2, 0, 3), "self"),  # it follows from the context, so it may go
    ],
)
def test_confidence_cuts_before_a_token_or_after_it(
    source: From, point: bool, lengths: tuple[int, ...], told: str
) -> None:
    block = sure(block_of([[1, 2, 3]] * 3, point), [[0.9, 0.8, 0.1], [0.4, 0.9, 0.9], [0.5, 0.5, 0.5]], source)
    left = Confidence(3, 0.5).trim(block)
    assert (left.lengths, left.lengths_from) == (lengths, told)


def test_confidence_may_count_the_chance_of_the_whole_beginning() -> None:
    block = sure(block_of([[1, 2, 3]]), [[0.9, 0.8, 0.6]], "prefix")  # .9, .72, .432
    assert Confidence(3, 0.5).trim(block).lengths == (3,)
    assert Confidence(3, 0.5, cumulative=True).trim(block).lengths == (2,)
    assert Confidence(3, 0.8, cumulative=True).trim(block).lengths == (1,)
    assert Confidence(3).budget([2, 9]) == DraftBudget((2, 3))


def bar(policy: Threshold) -> float:
    budget = policy.budget([99])
    assert budget.stop_below is not None
    return budget.stop_below[0]


def started(**options: float) -> Threshold:
    policy = Threshold(4, **options)
    policy.reset(1)
    return policy


def test_the_bar_follows_the_published_rule() -> None:
    """m: .9 -> .7 -> .85 -> .925; the bar moves a tenth of a step, and stays where the block was as long as allowed."""
    policy = started(target=0.9, start=0.6, step=0.01)
    assert policy.budget([99]) == DraftBudget((4,), stop_below=(0.6,))
    policy.observe([4], [2])
    assert bar(policy) == pytest.approx(0.601)
    policy.observe([2], [2])
    assert bar(policy) == pytest.approx(0.602)
    policy.observe([4], [4])
    assert bar(policy) == pytest.approx(0.602)
    policy.observe([3], [3])
    assert bar(policy) == pytest.approx(0.601)


def test_a_block_as_long_as_its_row_may_be_was_not_ended_by_the_bar() -> None:
    policy = started()
    policy.budget([2])
    policy.observe([2], [2])
    assert bar(policy) == 0.6
    policy.observe([2], [2])
    assert bar(policy) < 0.6


@pytest.mark.parametrize(("accepted", "end"), [(0, 1.0), (1, 0.0)])
def test_the_bar_stays_a_probability(accepted: int, end: float) -> None:
    policy = started(step=1.0)
    for _ in range(30):
        policy.budget([99])
        policy.observe([1], [accepted])
    assert bar(policy) == end


def test_bars_are_their_rows_own() -> None:
    policy = started()
    policy.reset(3)
    policy.budget([9, 9, 9])
    policy.observe([4, 1, 0], [0, 1, 0])
    budget = policy.budget([9, 0, 1])
    assert budget.tokens == (4, 0, 1)
    assert budget.stop_below == pytest.approx((0.601, 0.599, 0.6))
    policy.select([2, 0])
    assert policy.budget([9, 9]).stop_below == pytest.approx((0.6, 0.601))
    policy.start(1)
    assert policy.budget([9, 9]).stop_below == (0.6, 0.6)


@pytest.mark.parametrize("options", [{"target": 0.0}, {"start": 1.5}, {"step": -0.1}])
def test_senseless_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Threshold(4, **options)
    with pytest.raises(ValidationError):
        Confidence(4, threshold=-0.1)
