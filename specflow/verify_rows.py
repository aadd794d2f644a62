"""What the verification rules share: rows of the target pass, paths through a block, and the layout of a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specflow.tree import path_to, scoring_rows
from specflow.types import PAD, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.types import DraftBlock

__all__ = ["along_chain", "chosen", "deepest", "row_of", "verdict_for"]


def row_of(values: Tensor, row: Tensor) -> Tensor:
    """One row of each batch row.  # [B, R, V], [B] -> [B, V]"""
    first = torch.arange(len(row), device=row.device) * values.shape[1]
    return values.flatten(0, 1).index_select(0, first + row)


def chosen(block: DraftBlock, p: Tensor) -> Tensor:
    """p of every drafted token, at its parent's row.  # [B, M, V] -> [B, N]"""
    index = scoring_rows(block.topology, len(p)) * p.shape[-1] + block.tokens.clamp_min(0)
    return p.flatten(1).gather(1, index)


def deepest(block: DraftBlock, stands: Tensor, score: Tensor | None = None) -> Tensor:
    """Row that ends the longest path on which every node stands; the anchor's row 0 if none does.

    Args:
        block: Chain or tree.
        stands: Verdict about each node alone; false for PAD.  # [B, N] bool
        score: Decides between paths of one length by its sum; without it the lowest row wins.  # [B, N]
    """
    ancestors, depth = block.topology.ancestors, block.topology.depth
    missed = F.pad(~stands, (1, 0))  # the anchor always stands
    reached = depth.masked_fill((ancestors & missed.unsqueeze(1)).any(-1), -1)  # [B, M]
    if score is not None:
        summed = torch.where(ancestors[:, :, 1:], score.unsqueeze(1), 0.0).sum(-1)
        return summed.masked_fill(reached < reached.amax(1, keepdim=True), -torch.inf).argmax(1)
    return reached.argmax(1)


def along_chain(block: DraftBlock, said: Tensor) -> Verdict:
    """The verdict where nodes of a chain stand as long as they are what was said: then the text is what was said.

    Plain decoding goes through here once a token, so it takes few operators.

    Args:
        block: A chain.
        said: The token that follows each row of the pass.  # [B, M]
    """
    stands = block.tokens == said[:, :-1]
    accepted = stands.long().cumprod(1).sum(1)
    rows = block.topology.depth  # of a chain: 0, 1, ...
    kept = rows <= accepted.unsqueeze(1)
    return Verdict(torch.where(kept, said, PAD), torch.where(kept, rows, PAD), accepted)


def verdict_for(block: DraftBlock, last: Tensor, following: Tensor) -> Verdict:
    """Lay out the path to a row and the token that follows it.

    Args:
        block: Chain or tree.
        last: Row that ends the accepted path.  # [B]
        following: Recovered or bonus token.  # [B, 1]
    """
    path = path_to(block.topology, last)
    accepted = block.topology.depth.expand(len(last), -1).gather(1, last.unsqueeze(1))  # [B, 1]
    with_anchor = F.pad(block.tokens, (1, 0), value=PAD)  # [B, M]
    along = with_anchor.gather(1, path.clamp_min(0)).masked_fill(path < 0, PAD)
    tokens = F.pad(along[:, 1:], (0, 1), value=PAD).scatter(1, accepted, following)
    return Verdict(tokens, path, accepted.squeeze(1))
