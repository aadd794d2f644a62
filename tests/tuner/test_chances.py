"""The law of acceptance along a text, against the verification rules enumerated on three tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from specflow.law import Dense
from specflow.tree import chain
from specflow.types import DraftBlock
from specflow.verify import block_odds, residual, token_odds
from tuner.chances import along_text, stand_chances

V, K = 3, 2
Table = dict[tuple[int, ...], torch.Tensor]


def tables(seed: int) -> Table:
    """A distribution after every prefix."""
    draw = torch.Generator().manual_seed(seed)
    prefixes = [prefix for length in range(K + 1) for prefix in product(range(V), repeat=length)]
    return {each: torch.softmax(1.5 * torch.randn(V, generator=draw, dtype=torch.float64), 0) for each in prefixes}


def joint(p: Table, q: Table, rule: str) -> dict[tuple[int, tuple[int, ...]], float]:
    """Mass of every number of accepted tokens with every text of K + 1 tokens, by the rule's own code."""
    mass: dict[tuple[int, tuple[int, ...]], float] = {}
    for x in product(range(V), repeat=K):
        tokens = torch.tensor([x])
        law = Dense(tokens, torch.stack([q[x[:i]] for i in range(K)]).unsqueeze(0))
        block = DraftBlock(tokens, (K,), chain(K, tokens.device), law)
        rows = torch.stack([p[x[:i]] for i in range(K + 1)]).unsqueeze(0)
        drawn = float(torch.stack([q[x[:i]][x[i]] for i in range(K)]).prod())
        odds, reach = chances(block, rows, rule)
        for accepted in range(K + 1):
            weights, _ = residual(block, rows, reach, torch.tensor([accepted]))
            after = weights[0] / weights[0].sum()
            for rest in product(range(V), repeat=K + 1 - accepted):
                y = (*x[:accepted], *rest)
                follows = [float(p[y[:i]][y[i]]) for i in range(accepted + 1, K + 1)]
                value = drawn * odds[accepted] * float(after[rest[0]]) * float(np.prod(follows))
                mass[accepted, y] = mass.get((accepted, y), 0.0) + value
    return mass


def chances(block: DraftBlock, rows: torch.Tensor, rule: str) -> tuple[list[float], torch.Tensor]:
    """The chance of each number of accepted tokens of a block, and the reach of its rows."""
    if rule == "rejection":
        bar, weight = token_odds(block, rows)
        each = (bar / weight).clamp_max(1.0)[0].tolist()
        return [float(np.prod(each[:j])) * (1.0 - (each[j] if j < K else 0.0)) for j in range(K + 1)], torch.ones(1, K)
    bar, weight, reach = block_odds(block, rows)
    h = [1.0, *(bar / weight).clamp_max(1.0)[0].tolist()]
    return [h[j] * float(np.prod([1.0 - each for each in h[j + 1 :]])) for j in range(K + 1)], reach


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("seed", range(4))
def test_every_text_and_every_number_of_accepted_tokens(rule: str, seed: int) -> None:
    p, q = tables(2 * seed), tables(2 * seed + 1)
    mass = joint(p, q, rule)
    assert sum(mass.values()) == pytest.approx(1.0)
    for y in product(range(V), repeat=K + 1):
        said = [float(p[y[:i]][y[i]]) for i in range(K + 1)]
        assert sum(mass.get((j, y), 0.0) for j in range(K + 1)) == pytest.approx(float(np.prod(said)))  # lossless
        drawn = [[float(q[y[:i]][y[i]]) for i in range(K)]]
        found = stand_chances(np.array([said[:K]]), np.array(drawn), rule)[0]
        for j in range(1, K + 1):
            stood = sum(mass.get((accepted, y), 0.0) for accepted in range(j, K + 1))
            assert found[j - 1] == pytest.approx(stood / float(np.prod(said)), abs=1e-9), (y, j)


def test_block_accepts_more() -> None:
    draw: Callable[..., np.ndarray] = np.random.default_rng(0).random
    p, q = draw((50, 6)), draw((50, 6))
    block, rejection = stand_chances(p, q, "block"), stand_chances(p, q, "rejection")
    assert (block >= rejection - 1e-12).all()
    assert (block > rejection + 1e-3).any()
    assert (np.diff(block) <= 1e-12).all()


def test_what_the_draft_cannot_say_never_stands() -> None:
    found = stand_chances(np.array([[0.5, 0.5, 0.5]]), np.array([[0.9, 0.0, 0.9]]), "block")
    assert found.tolist() == [[1.0, 0.0, 0.0]]


def test_probabilities_end_with_their_text() -> None:
    found = along_text(np.array([0.1, 0.2, 0.3]), np.array([2, 1, 1]), 2)
    assert found.tolist() == [[0.1, 0.2], [0.2, 1.0], [0.3, 1.0]]
