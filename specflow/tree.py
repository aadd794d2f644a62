"""Tensor algebra on draft trees: depth, ancestors, the path to a row. A chain is a tree with one path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from specflow.types import PAD, Topology

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.types import DraftBlock

__all__ = ["chain", "extents", "from_parents", "from_paths", "path_to", "scoring_rows", "valid_nodes"]


@lru_cache(maxsize=1024)
def chain(num_nodes: int, device: torch.device) -> Topology:
    """The topology of `num_nodes` tokens in a row; 0 is the empty block. Cached, so never write into it."""
    rows = torch.arange(num_nodes + 1, device=device).unsqueeze(0)
    ancestors = torch.ones(1, num_nodes + 1, num_nodes + 1, dtype=torch.bool, device=device).tril()
    return Topology(rows[:, :-1] - 1, rows, ancestors, max_depth=num_nodes, is_chain=True, max_siblings=1)


def from_parents(parents: Tensor, max_depth: int | None = None, max_siblings: int | None = None) -> Topology:
    """The topology of a tree given by its parents, computed without asking the device anything.

    Args:
        parents: Node index of each node's parent, -1 for the anchor; parents precede children.  # [B or 1, N] int64
        max_depth: Longest path from the anchor where the caller knows it; None takes N, which is always enough
            and makes verdicts that wide.
        max_siblings: Most children of one row where the caller knows it; sampled trees are verified faster for it.
    """
    batch, num_nodes = parents.shape
    deepest = num_nodes if max_depth is None else max_depth
    rows = torch.arange(num_nodes + 1, device=parents.device)
    above = torch.cat((parents.new_zeros(batch, 1), parents + 1), dim=1)  # [B or 1, M] row of the parent
    reach = ((rows == above.unsqueeze(-1)) | (rows == rows.unsqueeze(-1))).float()  # itself and one step up
    for _ in range(max(deepest - 1, 0).bit_length()):  # each product doubles the steps
        reach = (reach @ reach).clamp_max_(1.0)
    return Topology(parents, reach.sum(-1).long() - 1, reach > 0, deepest, False, max_siblings)


def from_paths(paths: Sequence[tuple[int, ...]], device: torch.device) -> Topology:
    """The topology of a tree given by its paths, nodes in their order.

    Args:
        paths: Each node as the ranks that lead to it, as in Medusa's choices; parents precede children.  # [N]
        device: Where the pass runs.
    """
    node: dict[tuple[int, ...], int] = {(): -1}
    for index, path in enumerate(paths):
        node[path] = index
    parents = [node[path[:-1]] for path in paths]
    siblings = max(Counter(parents).values(), default=0)
    tensor = torch.tensor([parents], dtype=torch.int64, device=device)
    return from_parents(tensor, max(map(len, paths), default=0), siblings)


def scoring_rows(topology: Topology, batch: int) -> Tensor:
    """Row of the target pass that scores each node: its parent's.  # [B, N] int64"""
    return (topology.parents + 1).expand(batch, -1)


def path_to(topology: Topology, row_index: Tensor) -> Tensor:
    """Rows from the anchor to a row of each batch row, PAD padded.

    Args:
        topology: A tree or chain.
        row_index: Where the paths end.  # [B] int64

    Returns:
        Row 0 first.  # [B, D + 1] int64
    """
    batch, num_rows = len(row_index), topology.depth.shape[1]
    on_path = topology.ancestors.expand(batch, -1, -1).gather(1, row_index.view(-1, 1, 1).expand(-1, 1, num_rows))
    spare = topology.max_depth + 1  # rows off the path are written to a column past the end
    columns = torch.where(on_path.squeeze(1), topology.depth, spare)  # [B, M]
    rows = torch.arange(num_rows, device=row_index.device).expand(batch, -1)
    return rows.new_full((batch, spare + 1), PAD).scatter_(1, columns, rows)[:, :spare]


def valid_nodes(block: DraftBlock) -> Tensor:
    """Which nodes of a ragged block hold a token.  # [B, N] bool"""
    return block.tokens >= 0


def extents(block: DraftBlock) -> Tensor:
    """How many nodes each row has, and how deep they go.  # [B, 2] int64"""
    if not block.num_nodes:
        return block.tokens.new_zeros(len(block.tokens), 2)
    there = valid_nodes(block)
    nodes = there.sum(1, keepdim=True)
    if block.topology.is_chain:
        return nodes.expand(-1, 2)
    return torch.cat((nodes, (block.topology.depth[:, 1:] * there).amax(1, keepdim=True)), dim=1)
