"""Rejection on trees: which child of each row stands, and what is left of p where none does.

Both functions walk down from the anchor. At a row the children are tried in the order of their indices; the first one
accepted is the next row, and after the last refusal the recovered token comes from what is left of p there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specflow.device import asking_is_free
from specflow.tree import scoring_rows, valid_nodes
from specflow.verify_rows import chosen, deepest, row_of

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.types import DraftBlock

__all__ = ["Descent", "descend_points", "descend_samples"]


@dataclass(frozen=True, slots=True)
class Descent:
    """Where a walk from the anchor ended."""

    last: Tensor  # [B] row that ends the accepted path
    weights: Tensor  # [B, V] what the token after it is drawn from, up to a factor
    bonus: Tensor  # [B] bool: that row had no child, so nothing was refused there


def descend_points(block: DraftBlock, p: Tensor, u: Tensor) -> Descent:
    """Children that follow from the context: q is one-hot on each.

    A child x is accepted with p'(x); a refusal sets p'(x) to 0 and renormalises. So child j stands with probability
    p(x_j) / (1 - sum of the earlier siblings' p), for all nodes at once. A sibling with the token of an earlier one
    has nothing left to be accepted with.

    Args:
        block: A chain or tree with a one-hot law.
        p: Target probabilities.  # [B, M, V]
        u: Accept numbers.  # [B, N] float64
    """
    valid, parents, tokens = valid_nodes(block), block.topology.parents, block.tokens
    before = torch.ones(block.num_nodes, block.num_nodes, dtype=torch.bool, device=tokens.device).tril(-1)
    earlier = (parents.unsqueeze(2) == parents.unsqueeze(1)) & before & valid.unsqueeze(1)  # [B, N, N] siblings
    repeated = (earlier & (tokens.unsqueeze(2) == tokens.unsqueeze(1))).any(2)
    bar = chosen(block, p).double().masked_fill(repeated, 0.0)
    weight = 1.0 - (earlier * bar.unsqueeze(1)).sum(2)
    stands = valid & (bar > 0) & (u * weight <= bar)
    first = stands & ~(earlier & stands.unsqueeze(1)).any(2)
    last = deepest(block, first)
    children = (scoring_rows(block.topology, len(p)) == last.unsqueeze(1)) & valid  # [B, N]
    whole = row_of(p, last)
    spare = whole.shape[1]  # nodes that are no children are written past the end
    left = F.pad(whole, (0, 1)).scatter(1, torch.where(children, tokens, spare), 0.0)[:, :spare]
    return Descent(last, torch.where(left.amax(1, keepdim=True) > 0, left, whole), ~children.any(1))


def descend_samples(block: DraftBlock, p: Tensor, u: Tensor) -> Descent:
    """Siblings sampled one after another, each from what the ones before left of q (2402.14160, recursive rejection).

    A child x is accepted with probability min(1, p'(x) / q'(x)); a refusal makes p' <- norm(max(p' - q', 0)), and q'
    is the next sibling's q without the tokens that were tried. No path has more trials than there are nodes.

    Args:
        block: A tree whose law holds q of each node as it was before any sibling was removed.
        p: Target probabilities.  # [B, M, V]
        u: Accept numbers.  # [B, N] float64
    """
    shape, valid = block.topology, valid_nodes(block)
    rows, order = scoring_rows(shape, len(p)), torch.arange(block.num_nodes, device=p.device)
    last = torch.zeros(len(p), dtype=torch.int64, device=p.device)
    tried = last - 1  # [B] latest node tried; children of the current row before it were refused
    weights, gone = row_of(p, last), torch.zeros_like(p[:, 0], dtype=torch.bool)  # [B, V] p', and the tokens tried
    untouched = gone[:, 0].logical_not()
    trials = min(block.num_nodes, shape.max_depth * (shape.max_siblings or block.num_nodes))
    for _ in range(trials):
        waiting = (rows == last.unsqueeze(1)) & (order > tried.unsqueeze(1)) & valid  # [B, N]
        trying = waiting.any(1)
        if asking_is_free(p.device) and not bool(trying.any()):
            break
        node = torch.where(waiting, order, block.num_nodes - 1).amin(1)
        token = block.tokens.gather(1, node.unsqueeze(1)).clamp_min(0)  # [B, 1]
        q = _left_of(block.law.row(node), gone, token)
        bar = weights.gather(1, token).squeeze(1)
        stands = trying & (bar > 0) & (u.gather(1, node.unsqueeze(1)).squeeze(1) * q.gather(1, token).squeeze(1) <= bar)
        refused = trying & ~stands
        weights = torch.where(refused.unsqueeze(1), _without(weights, q), weights)
        gone = gone.scatter(1, token, refused.unsqueeze(1) | gone.gather(1, token)) & ~stands.unsqueeze(1)
        last = torch.where(stands, node + 1, last)
        weights = torch.where(stands.unsqueeze(1), row_of(p, last).to(weights.dtype), weights)
        tried = torch.where(trying, node, tried)
        untouched = stands | (untouched & ~refused)
    return Descent(last, weights, untouched)


def _left_of(q: Tensor, gone: Tensor, token: Tensor) -> Tensor:
    """q without the tokens tried before; one-hot where they were all of it.  # [B, V], [B, V], [B, 1] -> [B, V]

    A drafter that goes on after q is exhausted (a greedy row, a tiny draft vocabulary) picks by rank, not by chance.
    """
    left = q.masked_fill(gone, 0.0)
    mass = left.sum(1, keepdim=True, dtype=torch.float64)
    point = torch.zeros_like(left).scatter(1, token, 1.0)
    return torch.where(mass > 0, left / mass.clamp_min(torch.finfo(q.dtype).tiny), point).to(q.dtype)


def _without(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)); p itself where nothing is over, for then the refusal was a rounding error.  # [B, V]"""
    over = (p - q).clamp_min_(0.0)
    mass = over.sum(1, keepdim=True, dtype=torch.float64)
    return torch.where(mass > 0, over / mass.clamp_min(torch.finfo(over.dtype).tiny), p).to(over.dtype)
