"""Tiny targets and drafts given as tables, and the exact law of the text that verifying all their blocks makes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from specflow.law import Dense, DraftVocabulary, PointMass, Reduced, Sparse
from specflow.tree import chain, valid_nodes
from specflow.types import PAD, DraftBlock, Law
from specflow.verify import block_odds, residual, token_odds

VOCAB, GAMMA = 3, 3
CPU = torch.device("cpu")
KINDS = ("dense", "point", "reduced", "sparse")
Outcome = tuple[Tensor, Tensor]  # P(a) [B, N + 1], factors of p in the residuals [B, N]


class Models:
    """Target and draft tables: a random law for every prefix. Prefixes of one length are numbered in base VOCAB."""

    def __init__(self, seed: int, kind: str = "dense", gamma: int = GAMMA) -> None:
        draws = torch.Generator().manual_seed(seed)

        def table(length: int) -> Tensor:
            return (torch.randn(VOCAB**length, VOCAB, generator=draws, dtype=torch.float64) * 1.5).softmax(-1)

        self.kind, self.gamma = kind, gamma
        self.p = [table(length) for length in range(gamma + 1)]
        self.q = [self._narrowed(table(length)) for length in range(gamma)]
        self.tokens = torch.tensor(list(product(range(VOCAB), repeat=gamma)))  # every block  # [B, N]
        prefixes = [torch.zeros(len(self.tokens), dtype=torch.int64)]
        for column in self.tokens.unbind(1):
            prefixes.append(prefixes[-1] * VOCAB + column)
        self.prefixes = prefixes
        self.target_rows = torch.stack([p[at] for p, at in zip(self.p, prefixes, strict=True)], 1)  # [B, M, V]
        self.draft_rows = torch.stack([q[at] for q, at in zip(self.q, prefixes[:-1], strict=True)], 1)  # [B, N, V]

    def _narrowed(self, q: Tensor) -> Tensor:
        if self.kind == "point":
            return torch.zeros_like(q).scatter(1, q.argmax(1, keepdim=True), 1.0)
        if self.kind == "dense":
            return q
        q = q.scatter(1, torch.tensor([[1]]).expand(len(q), 1), 0.0)  # neither small vocabulary has token 1
        return q / q.sum(1, keepdim=True)

    def law(self, tokens: Tensor, q: Tensor) -> Law:
        if self.kind == "point":
            return PointMass(tokens, VOCAB)
        if self.kind == "dense":
            return Dense(tokens, q)
        ids = torch.tensor([2, 0])
        if self.kind == "reduced":
            return Reduced(tokens, q[..., ids], DraftVocabulary(ids, VOCAB))
        return Sparse(tokens, ids.expand(*tokens.shape, 2), q[..., ids], VOCAB)

    def block(self, lengths: Tensor, q: Tensor | None = None) -> DraftBlock:
        """Every possible block, the first `lengths` tokens of each; optionally with a wrong claim about q."""
        tokens = self.tokens.masked_fill(torch.arange(self.gamma) >= lengths.unsqueeze(1), PAD)
        law = self.law(tokens, self.draft_rows if q is None else q)
        return DraftBlock(tokens, tuple(lengths.tolist()), chain(self.gamma, CPU), law)

    def fixed(self, length: int) -> Tensor:
        return torch.full((len(self.tokens),), length)

    def weights(self) -> Tensor:
        """Probability of every block.  # [B]"""
        return self.draft_rows.gather(2, self.tokens.unsqueeze(-1)).squeeze(-1).prod(1)

    def joint(self) -> Tensor:
        """The target's law of gamma + 1 tokens."""
        mass = torch.ones(1, dtype=torch.float64)
        for p in self.p:
            mass = (mass.unsqueeze(1) * p).flatten()
        return mass


def token_outcome(block: DraftBlock, p: Tensor) -> Outcome:
    h = chance(*token_odds(block, p)) * valid_nodes(block)
    passed = torch.cat((torch.ones_like(h[:, :1]), h.cumprod(1)), 1)
    return passed - torch.cat((passed[:, 1:], torch.zeros_like(h[:, :1])), 1), torch.ones_like(h)


def block_outcome(block: DraftBlock, p: Tensor) -> Outcome:
    bar, weight, reach = block_odds(block, p)
    h = torch.cat((torch.ones(len(p), 1, dtype=p.dtype), chance(bar, weight) * valid_nodes(block)), 1)
    later_fail = (1 - h).flip(1).cumprod(1).flip(1)[:, 1:]
    return h * torch.cat((later_fail, torch.ones_like(h[:, :1])), 1), reach


def chance(bar: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight > bar, bar / weight, 1.0)


RULES_BY_NAME: dict[str, Callable[[DraftBlock, Tensor], Outcome]] = {"rejection": token_outcome, "block": block_outcome}


def law_error(models: Models, block: DraftBlock, outcome: Outcome) -> float:
    """Largest error of the joint law of gamma + 1 tokens, all drafts weighed and all texts completed."""
    reached, reach = outcome
    gamma, rows = models.gamma, models.target_rows
    mass = [torch.zeros(VOCAB**length, dtype=torch.float64) for length in range(gamma + 2)]
    for accepted in range(gamma + 1):
        weight = models.weights() * reached[:, accepted]
        over, _ = residual(block, rows, reach, torch.full((len(rows),), accepted))
        following = over / over.sum(1, keepdim=True)
        for token in range(VOCAB):
            share = torch.where(weight > 0, weight * following[:, token], 0.0)
            mass[accepted + 1].index_add_(0, models.prefixes[accepted] * VOCAB + token, share)
    for length in range(1, gamma + 1):
        mass[length + 1] += (mass[length].unsqueeze(1) * models.p[length]).flatten()
    assert abs(float(mass[-1].sum()) - 1) < 1e-12
    return float((mass[-1] - models.joint()).abs().sum())
