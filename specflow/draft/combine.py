"""Combinations of drafters: the first that has something to say, or a tree of what all of them say.

Blocks of combinations carry no `entry`: rows of one batch come from different drafters, and verification runs all
layers. Scratch rows that a drafter left in the target's cache are overwritten by that pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from specflow.draft.base import Needs
from specflow.law import ByRow, PointMass
from specflow.tree import chain, from_parents, valid_nodes
from specflow.types import PAD, DraftBlock, DraftBudget, Topology

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import Drafter, Uniforms
    from specflow.target.base import Cache
    from specflow.types import Law, Observation, Sampling

__all__ = ["FirstOf", "Merge", "Part"]

Kind = Literal["context", "prefix", "self"]
SAFEST_FIRST: tuple[Kind, ...] = ("context", "prefix", "self")


@dataclass(frozen=True, slots=True)
class Part:
    """One of several drafters."""

    drafter: Drafter
    k: int  # deepest draft position of its blocks

    def propose(
        self, anchors: Sequence[int], budget: DraftBudget, asked: Sequence[bool], uniforms: Uniforms
    ) -> DraftBlock | None:
        """Draft for the rows asked for, within both budgets; None where nothing comes of it."""
        tokens = tuple(min(most, self.k) if wanted else 0 for most, wanted in zip(budget.tokens, asked, strict=True))
        if not any(tokens):
            return None
        block = self.drafter.propose(anchors, replace(budget, tokens=tokens), uniforms)
        return block if block is not None and block.num_nodes and any(block.lengths) else None


class _Parts:
    """What goes to all drafters alike. A drafter's own chain is its own only in rows it served.

    Args:
        parts: In order of priority.
        vocab_size: V.
        device: Where blocks live.
    """

    def __init__(self, parts: Sequence[Part], vocab_size: int, device: torch.device) -> None:
        self._parts, self._vocab_size, self._device = tuple(parts), vocab_size, device
        self._served: list[int | None] = []  # [B] number of the part whose chain each row's block was

    @property
    def needs(self) -> Needs:
        each = [part.drafter.needs for part in self._parts]
        return Needs(
            taps=tuple(sorted({tap for needs in each for tap in needs.taps})),
            hidden_pre=any(needs.hidden_pre for needs in each),
            hidden_post=any(needs.hidden_post for needs in each),
        )

    def reset(self, batch: int, cache: Cache) -> None:
        self._served = [None] * batch
        for part in self._parts:
            part.drafter.reset(batch, cache)

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self._served[row] = None
        for part in self._parts:
            part.drafter.start(row, prompt, sampling)

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        for number, part in enumerate(self._parts):
            seen = observation
            if observation.own:
                each = zip(observation.own, rows, strict=True)
                seen = replace(observation, own=tuple(own * (self._served[row] == number) for own, row in each))
            part.drafter.observe(seen, rows)

    def select(self, rows: Sequence[int]) -> None:
        self._served = [self._served[row] for row in rows]
        for part in self._parts:
            part.drafter.select(rows)


class FirstOf(_Parts):
    """Each row's block comes from the first drafter that has something to propose for it.

    A drafter is asked for the rows that those before it left empty. Where chains and trees meet in a batch, chains are
    drawn as trees of one path.
    """

    @property
    def num_nodes(self) -> int:
        return max(part.drafter.num_nodes for part in self._parts)

    @property
    def branches(self) -> bool:
        return any(part.drafter.branches for part in self._parts)

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        self._served = [None] * len(anchors)
        found: list[DraftBlock] = []
        serves = [0] * len(anchors)  # place in `found` of each row's block
        for number, part in enumerate(self._parts):
            block = part.propose(anchors, budget, [served is None for served in self._served], uniforms)
            if block is None:
                continue
            for row, length in enumerate(block.lengths):
                if length:
                    self._served[row], serves[row] = number, len(found)
            found.append(replace(block, entry=None))
        if len(found) < 2:
            return found[0] if found else None
        return self._mixed(found, serves)

    def _mixed(self, blocks: Sequence[DraftBlock], serves: Sequence[int]) -> DraftBlock:
        """One block, each row from its own.

        Args:
            blocks: What was proposed, at least two.
            serves: Which of them each row takes.  # [B]
        """
        width = max(block.num_nodes for block in blocks)
        index = torch.tensor(serves, device=self._device)
        tokens = _by_row([_padded(block.tokens, width, PAD) for block in blocks], index)
        unsure = [block for block in blocks if block.confidence is not None]  # the others' rows are never cut
        return DraftBlock(
            tokens=tokens,
            lengths=tuple(blocks[number].lengths[row] for row, number in enumerate(serves)),
            topology=_mixed_topology(blocks, index, width),
            law=self._law(blocks, index, tokens),
            confidence=_by_row([_confidence(block, width) for block in blocks], index) if unsure else None,
            confidence_from=max((block.confidence_from for block in unsure), key=SAFEST_FIRST.index, default="context"),
            lengths_from=max((block.lengths_from for block in blocks), key=SAFEST_FIRST.index),
            structure_from="sampled" if any(block.structure_from == "sampled" for block in blocks) else "context",
            # A row of single children, or of children that nobody drew, is one without replacement, too.
            without_replacement=all(
                block.without_replacement or block.topology.is_chain or block.law.is_point for block in blocks
            ),
            match_lengths=_match_lengths(blocks, serves),
        )

    def _law(self, blocks: Sequence[DraftBlock], index: Tensor, tokens: Tensor) -> Law:
        if all(block.law.is_point for block in blocks):
            return PointMass(tokens, self._vocab_size)
        return ByRow([block.law for block in blocks], [block.num_nodes for block in blocks], index, tokens.shape[1])


class Merge(_Parts):
    """One tree of what all drafters propose; they must choose their tokens without chance of their own.

    A node that several propose is one node. Shallow nodes come first, and of one depth those of the first drafter, up
    to the most nodes a tree may have; a node therefore never comes without its parent.

    Args:
        parts: In order of priority.
        nodes: Most nodes of the tree.
        vocab_size: V.
        device: Where blocks live.
    """

    branches = True

    def __init__(self, parts: Sequence[Part], nodes: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(parts, vocab_size, device)
        self._nodes = nodes

    @property
    def num_nodes(self) -> int:
        """Those of the tree, or of a drafter that uses the target's scratch rows for more."""
        return max(self._nodes, *(part.drafter.num_nodes for part in self._parts))

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        everyone = [True] * len(anchors)
        found = [part.propose(anchors, budget, everyone, uniforms) for part in self._parts]
        blocks = [block for block in found if block is not None]
        if not blocks:
            return None
        assert all(block.law.is_point for block in blocks), "merged tokens must follow from their prefix"
        tokens, parents = _merged(blocks, self._nodes)
        return DraftBlock(
            tokens=tokens,
            lengths=tuple(min(sum(each), tokens.shape[1]) for each in zip(*(b.lengths for b in blocks), strict=True)),
            topology=from_parents(parents, max(block.topology.max_depth for block in blocks)),
            law=PointMass(tokens, self._vocab_size),
            lengths_from=max((block.lengths_from for block in blocks), key=SAFEST_FIRST.index),
        )


def _padded(values: Tensor, width: int, spare: float) -> Tensor:
    """# [B or 1, N] -> [B or 1, width]"""
    return F.pad(values, (0, width - values.shape[1]), value=spare)


def _confidence(block: DraftBlock, width: int) -> Tensor:
    """1 where nobody doubts a node.  # [B, width]"""
    if block.confidence is None:
        return torch.ones(len(block.tokens), width, device=block.tokens.device)
    return _padded(block.confidence, width, 1.0)


def _by_row(values: Sequence[Tensor], index: Tensor) -> Tensor:
    """Each row from the tensor of its number.  # [B or 1, N] each, [B] -> [B, N]"""
    found = values[0].expand(len(index), -1)
    for number, other in enumerate(values[1:], start=1):
        found = torch.where((index == number).unsqueeze(1), other, found)
    return found


def _mixed_topology(blocks: Sequence[DraftBlock], index: Tensor, width: int) -> Topology:
    shapes = [block.topology for block in blocks]
    if all(shape.is_chain for shape in shapes):
        return chain(width, index.device)
    siblings = [1 if shape.is_chain else shape.max_siblings for shape in shapes]
    known = [each for each in siblings if each is not None]
    return from_parents(
        _by_row([_padded(shape.parents, width, -1) for shape in shapes], index),
        max(shape.max_depth for shape in shapes),
        max(known) if len(known) == len(siblings) else None,
    )


def _match_lengths(blocks: Sequence[DraftBlock], serves: Sequence[int]) -> tuple[int, ...] | None:
    """0 for rows whose drafter copies nothing; None where none of them does."""
    if all(block.match_lengths is None for block in blocks):
        return None
    each = (blocks[number].match_lengths for number in serves)
    return tuple(0 if lengths is None else lengths[row] for row, lengths in enumerate(each))


def _merged(blocks: Sequence[DraftBlock], nodes: int) -> tuple[Tensor, Tensor]:
    """Tokens and parents of the common tree.  # [B, N] twice

    All nodes of all blocks are numbered in a row. The first of those that say the same token after the same prefix
    stands for the others; by induction over the depth that is known of a node once it is known of its parent.
    """
    batch = len(blocks[0].tokens)
    tokens, valid = (torch.cat(each, 1) for each in zip(*((b.tokens, valid_nodes(b)) for b in blocks), strict=True))
    depth = torch.cat([b.topology.depth[:, 1:].expand(batch, -1) for b in blocks], dim=1)  # [B, T]
    total = tokens.shape[1]
    parents = torch.cat(
        [_shifted(block, first).expand(batch, -1) for block, first in zip(blocks, _firsts(blocks), strict=True)], dim=1
    )
    numbers = torch.arange(total, device=tokens.device).expand(batch, -1)
    first = numbers
    alike = (tokens.unsqueeze(2) == tokens.unsqueeze(1)) & valid.unsqueeze(2) & valid.unsqueeze(1)  # [B, T, T]
    for _ in range(max(block.topology.max_depth for block in blocks)):
        above = first.gather(1, parents.clamp_min(0)).masked_fill(parents < 0, -1)
        same = alike & (above.unsqueeze(2) == above.unsqueeze(1))
        first = torch.where(valid, same.byte().argmax(2), numbers)
    kept = valid & (first == numbers)
    rank = torch.where(kept, depth * total + numbers, total * (total + 2))  # depth is at most T
    order = rank.argsort(dim=1, stable=True)
    place = torch.empty_like(order).scatter_(1, order, numbers)  # [B, T] where each node went
    chosen = order[:, : min(nodes, total)]
    there = kept.gather(1, chosen)
    above = parents.gather(1, chosen)
    moved = place.gather(1, first.gather(1, above.clamp_min(0)))
    return (
        tokens.gather(1, chosen).masked_fill(~there, PAD),
        moved.masked_fill((above < 0) | ~there, -1),
    )


def _firsts(blocks: Sequence[DraftBlock]) -> list[int]:
    """Number of each block's first node where all are numbered in a row."""
    return [sum(block.num_nodes for block in blocks[:place]) for place in range(len(blocks))]


def _shifted(block: DraftBlock, first: int) -> Tensor:
    """Parents by their numbers among the nodes of all blocks.  # [B or 1, N]"""
    parents = block.topology.parents
    return torch.where(parents < 0, parents, parents + first)
