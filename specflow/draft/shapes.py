"""Shapes of a block: a chain, or a tree grown in one of four ways. Options and static trees on the host, no torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import Drafter, SourceContext
    from specflow.draft.chain import ConfidenceHead
    from specflow.draft.steps import StepModel

__all__ = ["RankPath", "ShapeOptions", "generic_accuracies", "greedy_paths", "make_drafter", "rank_accuracies"]

log = logging.getLogger(__name__)

RankPath = tuple[int, ...]
"""A node by the ranks that lead to it: (1, 0) is the likeliest child of the anchor's second likeliest child."""


_OF_SHAPES = {
    "accuracies": ("static",),
    "branch": ("beam", "static"),
    "nodes": ("static", "beam", "best_first", "sampled"),
    "widths": ("sampled",),
}
"""Options that mean nothing in other shapes."""


class ShapeOptions(BaseModel):
    """What a drafted block looks like. A source that drafts with a network inherits these options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: Literal["chain", "static", "beam", "best_first", "sampled"] = Field(
        "chain",
        description="chain: one token after another. Trees: static (always the same ranks), beam (EAGLE-2: the best "
        "nodes of a beam search), best_first (DDTree: the best nodes of all), sampled (siblings drawn without "
        "replacement, for rule rejection)",
    )
    nodes: int = Field(24, ge=1, le=1024, description="most nodes of a tree; a chain has draft.k")
    branch: int = Field(
        8,
        ge=1,
        le=256,
        description="beam: children tried per node, and nodes it carries on with; static: ranks of the generic tree",
    )
    paths: tuple[RankPath, ...] | None = Field(
        None,
        description="static tree: each node as the ranks that lead to it, e.g. [[0], [0, 0], [1]]; null builds one "
        "from generic rank accuracies",
    )
    accuracies: tuple[tuple[float, ...], ...] | None = Field(
        None,
        description="static tree: how often the true token is the draft's one of each rank, a list for each depth, as "
        "measured; the tree of most expected tokens is built from it; null takes a generic table",
    )
    widths: tuple[int, ...] = Field((3, 2, 1, 1), description="sampled tree: children of every node, level by level")

    @field_validator("paths")
    @classmethod
    def _is_a_tree(cls, paths: tuple[RankPath, ...] | None) -> tuple[RankPath, ...] | None:
        if paths is None:
            return None
        if not paths:
            raise ValueError("the static tree has no nodes; leave `paths` out for a generic one")
        known: set[RankPath] = {()}
        for path in sorted(paths, key=len):
            if not path:
                raise ValueError("a path is empty; the anchor itself is not a node")
            if min(path) < 0:
                raise ValueError(f"path {list(path)} has a negative rank; ranks count from 0, the likeliest")
            if path in known:
                raise ValueError(f"path {list(path)} is there twice")
            if path[:-1] not in known:
                raise ValueError(f"path {list(path)} hangs from {list(path[:-1])}, which is not in the tree")
            known.add(path)
        return paths

    @field_validator("accuracies")
    @classmethod
    def _are_chances(cls, table: tuple[tuple[float, ...], ...] | None) -> tuple[tuple[float, ...], ...] | None:
        if table is not None:
            if not table or not all(table):
                raise ValueError("accuracies lack ranks; each depth needs at least one")
            if any(not 0.0 <= each <= 1.0 for level in table for each in level):
                raise ValueError("accuracies are probabilities, between 0 and 1")
        return table

    @field_validator("widths")
    @classmethod
    def _has_levels(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if not widths or min(widths) < 1:
            raise ValueError(f"widths are {list(widths)}; every level needs at least one child a node")
        return widths

    @model_validator(mode="after")
    def _fits(self) -> ShapeOptions:
        if self.paths is not None:
            if self.shape != "static":
                raise ValueError(f"paths describe a static tree, and shape is {self.shape}; set shape: static")
            _check_size("paths", len(self.paths), self.nodes)
            if self.branch != ShapeOptions.model_fields["branch"].default:
                raise ValueError("branch is of the generic tree, and there are paths; leave one of them out")
            if self.accuracies is not None:
                raise ValueError("paths and accuracies both describe the static tree; leave one of them out")
        for name, shapes in _OF_SHAPES.items():
            if getattr(self, name) != ShapeOptions.model_fields[name].default and self.shape not in shapes:
                raise ValueError(f"{name} goes with shape {' or '.join(shapes)}, and shape is {self.shape}")
        if self.shape == "sampled":
            _check_size("widths", sum(accumulate(self.widths, mul)), self.nodes)
        return self

    def static_paths(self, depth: int, num_ranks: int) -> tuple[RankPath, ...]:
        """The nodes of the static tree, or of the sampled one, within a depth and a number of ranks.

        Parents precede children, level by level. An explicit tree loses what goes beyond: draft.k says how deep a
        block may be, and a vocabulary has no more children than tokens.

        Args:
            depth: Most levels.
            num_ranks: Tokens of the draft vocabulary.
        """
        paths: Sequence[RankPath]
        if self.shape == "sampled":
            paths = _full_tree(self.widths[:depth])
        elif self.paths is not None:
            paths = self.paths
        else:
            table = self.accuracies or generic_accuracies(depth, min(self.branch, num_ranks))
            paths = greedy_paths([level[:num_ranks] for level in table[:depth]], self.nodes)
        kept = (path for path in paths if len(path) <= depth and max(path) < num_ranks)
        return tuple(sorted(kept, key=lambda path: (len(path), path)))


def greedy_paths(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[RankPath, ...]:
    """The static tree of most expected accepted tokens (Medusa, 2401.10774, section 2.3.3).

    A node is worth the product of the accuracies along its path, a tree the sum of its nodes. A child is worth no more
    than its parent, so taking the best node again and again is optimal, and every prefix of the result is optimal too.

    Args:
        accuracies: Chance that the true token is the draft's one of this rank.  # [depth][ranks], each in 0 .. 1
        nodes: Most nodes; nodes that are worth nothing are left out.

    Returns:
        Paths in the order they were taken.
    """
    if any(not 0.0 <= each <= 1.0 for level in accuracies for each in level):
        raise ValueError("rank accuracies are probabilities, between 0 and 1")
    taken: list[RankPath] = []
    waiting: list[tuple[float, int, RankPath]] = []  # negative worth, depth, path: equals go to the shallow, low ranks

    def offer_children(path: RankPath, worth: float) -> None:
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                if worth * accuracy > 0.0:
                    heappush(waiting, (-worth * accuracy, len(path) + 1, (*path, rank)))

    offer_children((), 1.0)
    while waiting and len(taken) < nodes:
        worth, _, path = heappop(waiting)
        taken.append(path)
        offer_children(path, -worth)
    return tuple(taken)


def generic_accuracies(depth: int, num_ranks: int) -> list[list[float]]:
    """A guess for drafts nobody has measured: 0.6 for the first token's first rank, falling with depth and rank.

    The numbers are made up, and decay as measured ones do: by 8 % a level, with the square of the rank. Measure a
    drafter's own with `rank_accuracies`.

    Returns:
        # [depth][num_ranks]
    """
    return [[0.6 * 0.92**level / (rank + 1) ** 2 for rank in range(num_ranks)] for level in range(depth)]


def rank_accuracies(logits: Sequence[Tensor], truth: Sequence[Tensor], num_ranks: int) -> list[list[float]]:
    """How often the true token was the draft's one of each rank: what `greedy_paths` builds a tree from.

    Args:
        logits: Of each draft position, at the places it was tried.  # [depth] of [T, Vd]
        truth: The token that came, as a draft id, negative where the draft vocabulary lacks it.  # [depth] of [T]
        num_ranks: Ranks told apart; equal logits count as found last.

    Returns:
        # [depth][num_ranks]
    """
    table = []
    for scores, tokens in zip(logits, truth, strict=True):
        known = tokens >= 0
        own = scores.gather(1, tokens.clamp_min(0).unsqueeze(1))
        ranks = ((scores >= own).sum(1) - 1).masked_fill(~known, num_ranks).clamp_max(num_ranks)
        counts = ranks.bincount(minlength=num_ranks + 1)[:num_ranks]
        table.append([count / max(1, len(tokens)) for count in counts.tolist()])
    return table


def make_drafter(
    options: ShapeOptions, model: StepModel, context: SourceContext, head: ConfidenceHead | None = None
) -> Drafter:
    """The drafter of the wanted shape on a network. Every source that drafts with one builds its drafter so.

    Args:
        options: The shape.
        model: The network.
        context: Target, depth, and how tokens are chosen.
        head: Confidence of a chain's tokens; trees carry none.
    """
    if model.most_depth < context.k:
        log.warning(
            "draft.k is %d, and the drafter goes %d positions deep: blocks end there", context.k, model.most_depth
        )
    if options.shape == "chain":
        from specflow.draft.chain import ChainDrafter

        return ChainDrafter(model, context, head)
    from specflow.draft.trees import TreeDrafter

    return TreeDrafter(model, context, options)


def _full_tree(widths: Sequence[int]) -> list[RankPath]:
    """Every node with as many children as its level says."""
    level: list[RankPath] = [()]
    paths: list[RankPath] = []
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return paths


def _check_size(name: str, size: int, nodes: int) -> None:
    if size > nodes:
        raise ValueError(f"{name} make a tree of {size} nodes, more than nodes: {nodes}; raise it or cut the tree")
