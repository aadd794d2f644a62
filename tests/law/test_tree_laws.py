"""Exact laws of rejection on trees: every tree that could be drawn, every way down it, every recovered token.

Acceptance probabilities are read off the real walk: the accept number at which a node's fate turns, found by bisection
with its ancestors accepted and its earlier siblings refused. So which child is tried, when, with which number and
against what is all the walk's own doing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from specflow.law import Dense, DraftVocabulary, PointMass, Reduced, Sparse
from specflow.tree import from_parents
from specflow.types import PAD, DraftBlock, Law
from specflow.verify_tree import Descent, descend_points, descend_samples

CPU = torch.device("cpu")
ACCEPT, REFUSE = 2.0**-60, 1.0 - 2.0**-53
EXACT, BIASED = 1e-8, 1e-3
CONTROL = 2  # tables with which a second sibling's odds matter: a refused first one leaves two tokens of p

Walk = Callable[[DraftBlock, Tensor, Tensor], Descent]
SHAPES = {
    "one": [-1],
    "two": [-1, -1],
    "three": [-1, -1, -1],
    "two, two": [-1, -1, 0, 0, 1, 1],
    "two, two, depth first": [-1, 0, 0, -1, 3, 3],
    "two, one, one": [-1, -1, 0, 1, 2, 3],
    "uneven": [-1, -1, 0, -1, 2, 2],
    "a chain": [-1, 0, 1],
}
shapes = pytest.mark.parametrize("parents", [pytest.param(parents, id=name) for name, parents in SHAPES.items()])


class Tables:
    """A random law for every prefix, of the target and of the draft."""

    def __init__(self, seed: int, vocab: int, depth: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.vocab, self.depth = vocab, depth
        self.p, self.q = (
            [
                (torch.randn(vocab**n, vocab, generator=draws, dtype=torch.float64) * 1.5).softmax(-1)
                for n in range(most)
            ]
            for most in (depth + 1, depth)
        )

    def joint(self) -> Tensor:
        """The target's law of depth + 1 tokens."""
        mass = torch.ones(1, dtype=torch.float64)
        for p in self.p:
            mass = (mass.unsqueeze(1) * p).flatten()
        return mass


@dataclass(frozen=True)
class Trees:
    """All trees of one shape, and how likely each is drawn."""

    tables: Tables
    block: DraftBlock
    weights: Tensor  # [B]
    p: Tensor  # [B, M, V]
    prefixes: Tensor  # [B, M] number of each row's prefix, in base V
    depth: list[int]  # [M]

    @property
    def parents(self) -> list[int]:
        found: list[int] = self.block.topology.parents[0].tolist()
        return found

    def row_children(self, row: int) -> list[int]:
        return [node for node, parent in enumerate(self.parents) if parent + 1 == row]


Draw = Callable[[Tensor, Sequence[int]], Tensor]
"""(q, tokens of the earlier siblings) -> what the next sibling is drawn from"""


def without_replacement(q: Tensor, before: Sequence[int]) -> Tensor:
    """q without the earlier siblings; once nothing is left of it, the lowest other token."""
    left = q.clone()
    left[list(before)] = 0.0
    if left.sum() > 0:
        return left / left.sum()
    spare = min(set(range(len(q))) - set(before), default=0)
    return torch.zeros_like(q).index_fill(0, torch.tensor([spare]), 1.0)


def with_replacement(q: Tensor, before: Sequence[int]) -> Tensor:
    return q


def best_first(q: Tensor, before: Sequence[int]) -> Tensor:
    """The most likely token that no earlier sibling has: what follows from the context alone."""
    left = q.clone()
    left[list(before)] = -1.0
    return torch.zeros_like(q).index_fill(0, left.argmax().unsqueeze(0), 1.0)


def drawn(tables: Tables, parents: Sequence[int], draw: Draw) -> Iterator[tuple[list[int], float]]:
    """Every tree with its probability; siblings are drawn in the order of their indices."""

    def grow(tokens: list[int], weight: float) -> Iterator[tuple[list[int], float]]:
        node = len(tokens)
        if node == len(parents):
            yield tokens, weight
            return
        before = [tokens[other] for other in range(node) if parents[other] == parents[node]]
        chances = draw(tables.q[_depth(parents, node) - 1][_prefix(tables.vocab, parents, tokens, node)], before)
        for token, chance in enumerate(chances.tolist()):
            if chance > 0:
                yield from grow([*tokens, token], weight * chance)

    return grow([], 1.0)


def _path(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the anchor's child down to this one."""
    return [] if node < 0 else [*_path(parents, parents[node]), node]


def _depth(parents: Sequence[int], node: int) -> int:
    return len(_path(parents, node))


def _prefix(vocab: int, parents: Sequence[int], tokens: Sequence[int], node: int) -> int:
    """Number of the tokens above a node, itself excluded."""
    number = 0
    for above in _path(parents, parents[node]):
        number = number * vocab + tokens[above]
    return number


def all_trees(tables: Tables, parents: Sequence[int], draw: Draw, law: str = "dense") -> Trees:
    found = list(drawn(tables, parents, draw))
    tokens, weights = (
        torch.tensor([each for each, _ in found]),
        torch.tensor([w for _, w in found], dtype=torch.float64),
    )
    depth = [0, *(_depth(parents, node) for node in range(len(parents)))]
    prefixes = torch.zeros(len(tokens), len(parents) + 1, dtype=torch.int64)
    for node, parent in enumerate(parents):
        prefixes[:, node + 1] = prefixes[:, parent + 1] * tables.vocab + tokens[:, node]
    p = torch.stack([tables.p[at][prefixes[:, row]] for row, at in enumerate(depth)], 1)
    q = [tables.q[depth[node + 1] - 1][prefixes[:, parent + 1]] for node, parent in enumerate(parents)]
    topology = from_parents(torch.tensor([list(parents)]), max(depth))
    named = law_of(law, tokens, torch.stack(q, 1))
    block = DraftBlock(tokens, (len(parents),) * len(tokens), topology, named, without_replacement=True)
    return Trees(tables, block, weights, p, prefixes, depth)


def law_of(kind: str, tokens: Tensor, q: Tensor) -> Law:
    vocab = q.shape[-1]
    if kind == "point":
        return PointMass(tokens, vocab)
    if kind == "dense":
        return Dense(tokens, q)
    ids = torch.arange(vocab - 1, -1, -1)
    if kind == "reduced":
        return Reduced(tokens, q[..., ids], DraftVocabulary(ids, vocab))
    return Sparse(tokens, ids.expand(*tokens.shape, vocab), q[..., ids], vocab)


def forced(trees: Trees, row: int) -> Tensor:
    """Accept numbers with which the walk ends in this row wherever it can.  # [B, N]"""
    u = torch.full(trees.block.tokens.shape, REFUSE, dtype=torch.float64)
    u[:, _path(trees.parents, row - 1)] = ACCEPT
    return u


def odds(walk: Walk, trees: Trees) -> Tensor:
    """Chance that a node stands, where its ancestors do and its earlier siblings do not.  # [B, N]"""
    num_nodes, batch = trees.block.num_nodes, len(trees.weights)
    low, high = (torch.full((num_nodes, batch), edge, dtype=torch.float64) for edge in (0.0, 1.0))
    reach = torch.stack([forced(trees, node + 1) for node in range(num_nodes)])  # [N, B, N]
    below = trees.block.topology.ancestors[0]  # [M, M]
    for _ in range(36):
        middle = (low + high) / 2
        for node in range(num_nodes):
            u = reach[node].clone()
            u[:, node] = middle[node]
            stands = below[walk(trees.block, trees.p, u).last, node + 1]
            low[node] = torch.where(stands, middle[node], low[node])
            high[node] = torch.where(stands, high[node], middle[node])
    return low.T


def ends(trees: Trees, h: Tensor, shared: bool = False) -> Tensor:
    """Chance that the walk ends in each row.  # [B, M]"""
    reached = torch.ones_like(trees.p[..., 0])
    ended = torch.ones_like(reached)
    for row in range(trees.block.num_nodes + 1):
        refused, bar = torch.ones_like(h[:, 0]), torch.zeros_like(h[:, 0])
        for child in trees.row_children(row):
            stands = (h[:, child] - bar).clamp_min(0.0) if shared else refused * h[:, child]
            bar = torch.maximum(bar, h[:, child])
            reached[:, child + 1] = reached[:, row] * stands
            refused = 1.0 - bar if shared else refused * (1.0 - h[:, child])
        ended[:, row] = reached[:, row] * refused
    return ended


def law_error(walk: Walk, trees: Trees, shared: bool = False) -> float:
    """Largest error of the joint law of depth + 1 tokens, all trees weighed and all texts completed."""
    tables = trees.tables
    mass = [torch.zeros(tables.vocab**n, dtype=torch.float64) for n in range(tables.depth + 2)]
    ended = ends(trees, odds(walk, trees), shared)
    for row, depth in enumerate(trees.depth):
        found = walk(trees.block, trees.p, forced(trees, row))
        there = found.last == row
        share = torch.where(there, trees.weights * ended[:, row], 0.0)
        assert float((trees.weights * ended[:, row])[~there].sum()) < 1e-9
        following = found.weights[:, : tables.vocab] / found.weights.sum(1, keepdim=True)
        for token in range(tables.vocab):
            mass[depth + 1].index_add_(0, trees.prefixes[:, row] * tables.vocab + token, share * following[:, token])
    for length in range(1, tables.depth + 1):
        mass[length + 1] += (mass[length].unsqueeze(1) * tables.p[length]).flatten()
    assert float(mass[-1].sum()) == pytest.approx(1.0, abs=1e-9)
    return float((mass[-1] - tables.joint()).abs().sum())


def tables_for(parents: Sequence[int], seed: int = 0, vocab: int = 3) -> Tables:
    return Tables(seed, vocab, max(_depth(parents, node) for node in range(len(parents))))


@shapes
def test_sampled_siblings_without_replacement_keep_the_law(parents: list[int]) -> None:
    trees = all_trees(tables_for(parents), parents, without_replacement)
    assert float(trees.weights.sum()) == pytest.approx(1.0)
    assert law_error(descend_samples, trees) < EXACT


@pytest.mark.parametrize("parents", [SHAPES["three"], [-1, -1, 1], [-1, -1, -1, -1]])
def test_wider_vocabularies_keep_it_too(parents: list[int]) -> None:
    assert law_error(descend_samples, all_trees(tables_for(parents, 3, vocab=4), parents, without_replacement)) < EXACT


@pytest.mark.parametrize("law", ["dense", "reduced", "sparse"])
def test_small_laws_give_the_rows_that_dense_ones_give(law: str) -> None:
    parents = SHAPES["two, one, one"]
    assert law_error(descend_samples, all_trees(tables_for(parents, 1), parents, without_replacement, law)) < EXACT


@pytest.mark.parametrize("law", ["dense", "reduced", "sparse"])
def test_a_draft_that_goes_on_after_its_law_is_used_up_keeps_the_law(law: str) -> None:
    """The draft knows two of three tokens and offers a third child, by rank."""
    tables = tables_for(SHAPES["three"])
    tables.q = [q.scatter(1, torch.tensor([[1]]), 0.0) for q in tables.q]
    tables.q = [q / q.sum(1, keepdim=True) for q in tables.q]
    trees = all_trees(tables, SHAPES["three"], without_replacement, law)
    assert float(trees.weights.sum()) == pytest.approx(1.0)
    assert law_error(descend_samples, trees) < EXACT


@shapes
@pytest.mark.parametrize("walk", [descend_points, descend_samples])
def test_deterministic_trees_keep_the_law(walk: Walk, parents: list[int]) -> None:
    for seed in range(3):
        trees = all_trees(tables_for(parents, seed), parents, best_first, "point")
        assert len(trees.weights) == 1
        assert law_error(walk, trees) < EXACT


@pytest.mark.parametrize("walk", [descend_points, descend_samples])
def test_deterministic_twins_keep_the_law(walk: Walk) -> None:
    """Two children of one token: the second has nothing to be accepted with."""
    parents, choice = [-1, -1, -1, 0, 1], torch.eye(3, dtype=torch.float64)[[2, 2, 0]]
    trees = all_trees(tables_for(parents), parents, lambda q, before: choice[len(before)], "point")
    assert trees.block.tokens.tolist() == [[2, 2, 0, 2, 2]]
    assert law_error(walk, trees) < EXACT


@pytest.mark.parametrize("draw", [without_replacement, best_first])
def test_a_tree_whose_width_depends_on_earlier_tokens_keeps_the_law(draw: Draw) -> None:
    """Below token 1 there is one child, below the others two: ragged rows, decided by the path above."""
    parents = SHAPES["two, two"]
    trees = all_trees(tables_for(parents), parents, draw, "point" if draw is best_first else "dense")
    tokens = trees.block.tokens.clone()
    for second, parent in ((3, 0), (5, 1)):
        tokens[:, second] = tokens[:, second].masked_fill(tokens[:, parent] == 1, PAD)
    law = PointMass(tokens, 3) if trees.block.law.is_point else Dense(tokens, trees.block.law.probs)  # type: ignore[attr-defined]
    ragged = replace(trees, block=replace(trees.block, tokens=tokens, law=law))
    assert bool((tokens == PAD).any())
    assert law_error(descend_points if draw is best_first else descend_samples, ragged) < EXACT


def test_both_walks_say_the_same_of_deterministic_trees() -> None:
    draws = torch.Generator().manual_seed(0)
    for parents in SHAPES.values():
        trees = all_trees(tables_for(parents), parents, best_first, "point")
        many = torch.zeros(400, dtype=torch.int64)
        tokens = trees.block.tokens[many]
        block = replace(trees.block, tokens=tokens, lengths=(len(parents),) * 400, law=PointMass(tokens, 3))
        u = torch.rand(tokens.shape, generator=draws, dtype=torch.float64)
        one, other = descend_points(block, trees.p[many], u), descend_samples(block, trees.p[many], u)
        assert one.last.equal(other.last)
        assert one.bonus.equal(other.bonus)
        assert len(set(one.last.tolist())) > 1
        shares = [each.weights / each.weights.sum(1, keepdim=True) for each in (one, other)]
        assert torch.allclose(shares[0].double(), shares[1].double(), atol=1e-12)


def test_a_sampled_child_beside_a_ranked_one_keeps_the_law() -> None:
    """Two sources at one row: the best token of one, and a draw from the other's q that is left out where it is alike.

    The draw knew nothing of its sibling; given that it is another token, it came from q without that token.
    """
    for seed in range(6):
        tables, best = tables_for(SHAPES["two"], seed, vocab=4), 1
        q = tables.q[0][0]
        point = torch.zeros_like(q).index_fill(0, torch.tensor([best]), 1.0)
        trees = all_trees(tables, SHAPES["two"], lambda q, before, point=point: q if before else point)  # type: ignore[misc]
        tokens = trees.block.tokens.clone()
        tokens[:, 1] = tokens[:, 1].masked_fill(tokens[:, 1] == best, PAD)
        law = Dense(tokens, torch.stack((point, q)).expand(len(tokens), -1, -1))
        assert law_error(descend_samples, replace(trees, block=replace(trees.block, tokens=tokens, law=law))) < EXACT


def turned(trees: Trees) -> Trees:
    """Siblings verified in the opposite of the order in which they were drawn (shape "two")."""
    back = torch.tensor([1, 0])
    tokens = trees.block.tokens[:, back]
    rows = torch.tensor([0, 2, 1])
    law = Dense(tokens, trees.block.law.probs[:, back])  # type: ignore[attr-defined]
    return replace(
        trees, block=replace(trees.block, tokens=tokens, law=law), p=trees.p[:, rows], prefixes=trees.prefixes[:, rows]
    )


def test_control_siblings_tried_in_another_order_than_drawn_are_biased() -> None:
    trees = all_trees(tables_for(SHAPES["two"], CONTROL), SHAPES["two"], without_replacement)
    assert law_error(descend_samples, turned(turned(trees))) < EXACT
    assert law_error(descend_samples, turned(trees)) > BIASED


@pytest.mark.parametrize("parents", [SHAPES["two"], SHAPES["two, two"]])
def test_control_siblings_drawn_with_replacement_are_biased(parents: list[int]) -> None:
    assert law_error(descend_samples, all_trees(tables_for(parents, CONTROL), parents, with_replacement)) > BIASED


@pytest.mark.parametrize("parents", [SHAPES["two"], SHAPES["three"]])
def test_control_one_accept_number_for_all_siblings_is_biased(parents: list[int]) -> None:
    trees = all_trees(tables_for(parents, CONTROL), parents, without_replacement)
    assert law_error(descend_samples, trees, shared=True) > BIASED


def test_control_q_that_is_not_renormalised_is_biased() -> None:
    """What earlier siblings had of q goes to a token that nobody draws, so the rest keeps its size."""
    trees = all_trees(tables_for(SHAPES["two"], CONTROL), SHAPES["two"], without_replacement)
    q = trees.block.law.probs.clone()  # type: ignore[attr-defined]
    tried = trees.block.tokens[:, :1]
    spilt = q[:, 1].gather(1, tried)
    q[:, 1] = q[:, 1].scatter(1, tried, 0.0)
    wide = torch.cat((q, torch.stack((torch.zeros_like(spilt), spilt), 1)), 2)
    p = torch.cat((trees.p, torch.zeros_like(trees.p[..., :1])), 2)
    lied = replace(trees, block=replace(trees.block, law=Dense(trees.block.tokens, wide)), p=p)
    assert law_error(descend_samples, lied) > BIASED
