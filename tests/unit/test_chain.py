"""Chains: where they end, row by row, and how sure they say they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fake_steps import TableModel, TableSteps, cache_of, context_of, noise_of

from specflow.draft.base import Draw
from specflow.draft.chain import ChainDrafter
from specflow.types import PAD, DraftBlock, DraftBudget, Sampling

ANCHORS, STARTS = [3, 11, 40], [9, 4, 30]
COLD, WARM = Sampling(), Sampling(temperature=0.8)
DEPTH = 6


def propose(
    rows: Sequence[int], samplings: Sequence[Sampling], budget: DraftBudget, draw: Draw = "sampled"
) -> DraftBlock:
    """One round of some of the requests, each with the numbers it has alone."""
    drafter = ChainDrafter(TableModel(61, seed=4), replace(context_of(61, DEPTH, draw), confidence=True))
    starts = [STARTS[row] for row in rows]
    drafter.reset(len(rows), cache_of(starts))
    for place, sampling in enumerate(samplings):
        drafter.start(place, [1], sampling)
    block = drafter.propose([ANCHORS[row] for row in rows], budget, noise_of(starts))
    assert block is not None
    return block


@pytest.mark.parametrize("draw", ["sampled", "coupled"])
def test_a_greedy_row_is_as_sure_beside_a_sampled_one_as_alone(draw: Draw) -> None:
    alone = propose([0], [COLD], DraftBudget((DEPTH,)), draw)
    beside = propose([0, 1], [COLD, WARM], DraftBudget((DEPTH, DEPTH)), draw)
    assert alone.tokens[0].equal(beside.tokens[0])
    assert alone.confidence is not None
    assert beside.confidence is not None
    assert float(alone.confidence.max()) < 1.0
    torch.testing.assert_close(alone.confidence[0], beside.confidence[0].to(alone.confidence.dtype))


def test_a_greedy_row_ends_after_the_same_unsure_token_beside_a_sampled_one() -> None:
    sure = propose([0], [COLD], DraftBudget((DEPTH,))).confidence
    assert sure is not None
    bar = float(sure[0, :-1].min()) * 1.0001
    kept = int((sure[0] < bar).long().argmax()) + 1
    assert kept < DEPTH
    alone = propose([0], [COLD], DraftBudget((DEPTH,), stop_below=(bar,)))
    beside = propose([0, 1], [COLD, WARM], DraftBudget((DEPTH, DEPTH), stop_below=(bar, 0.0)))
    assert alone.num_nodes == kept
    assert beside.tokens[0].tolist() == alone.tokens[0].tolist() + [PAD] * (DEPTH - kept)
    assert (beside.tokens[1] != PAD).all()


def test_rows_that_may_not_go_on_keep_no_other_row_going(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row is unsure at once; the second is sure, and out of budget after two tokens."""
    passes, plain = [], TableSteps.extend
    monkeypatch.setattr(TableSteps, "extend", lambda *given: (passes.append(1), plain(*given))[1])
    block = propose([0, 1], [COLD, COLD], DraftBudget((DEPTH, 2), stop_below=(1.1, 0.0)))
    assert block.num_nodes == 2
    assert len(passes) == 1
    assert (block.tokens != PAD).tolist() == [[True, False], [True, True]]


def test_it_says_what_its_lengths_follow_from() -> None:
    plain = propose([0, 1, 2], [WARM] * 3, DraftBudget((2, 0, DEPTH)))
    assert (plain.tokens != PAD).sum(1).tolist() == list(plain.lengths) == [2, 0, DEPTH]
    assert plain.lengths_from == "context"
    assert propose([0], [WARM], DraftBudget((DEPTH,), stop_below=(0.0,))).lengths_from == "prefix"


@pytest.mark.parametrize("rows", [[WARM], [COLD, WARM]])
def test_logits_that_overflowed_draft_a_certain_token(monkeypatch: pytest.MonkeyPatch, rows: list[Sampling]) -> None:
    plain = TableSteps.extend
    monkeypatch.setattr(TableSteps, "extend", lambda *given: plain(*given) * float("nan"))
    block = propose(list(range(len(rows))), rows, DraftBudget((DEPTH,) * len(rows)))
    assert block.tokens[-1, 1:].tolist() == [0] * (DEPTH - 1)
    assert block.law.prob()[-1, 1:].tolist() == [1.0] * (DEPTH - 1)


def test_a_chain_that_ends_with_its_first_token_follows_from_it() -> None:
    block = propose([0], [WARM], DraftBudget((DEPTH,), stop_below=(1.1,)))
    assert (block.num_nodes, block.lengths_from) == (1, "prefix")
