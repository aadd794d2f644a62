"""What the losses of a draft position have in common, made in one pass over its logits.

Every loss of q against p or against the text's token x follows from three numbers a row: log q(x), sum_v p log q and
sum_v min(p, q). A row of logits has thousands of entries, a batch has thousands of rows, and nothing here but memory
bandwidth is slow: so rows are read in blocks that stay in the cache, q is not stored but made again for the gradient,
and the gradient of all losses together is written once, in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["RowTerms", "row_blocks", "row_terms"]

_BLOCK = {"cpu": 2**18}
"""Elements of a block of rows, by device."""
_LARGE_BLOCK = 2**27
"""The same for devices that want few, large kernels."""


class RowTerms(NamedTuple):
    """What losses are made from."""

    label: Tensor  # [n] log q(x)
    cross: Tensor  # [n] sum_v p log q; 0 without a law
    overlap: Tensor  # [n] sum_v min(p, q); 0 without a law


def row_blocks(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Rows of a matrix in blocks that suit a device."""
    size = max(_BLOCK.get(device.type, _LARGE_BLOCK) // max(shape[1], 1), 1)
    return (slice(start, min(start + size, shape[0])) for start in range(0, shape[0], size))


def row_terms(logits: Tensor, labels: Tensor, probs: Tensor | None = None, at: Tensor | None = None) -> RowTerms:
    """Terms of all rows, through which gradients reach the logits.

    Args:
        logits: Of q.  # [n, Vd]
        labels: Draft id of the text's token.  # [n]
        probs: p at some positions, each of which sums to 1; None where no loss asks for it.  # [m, Vd]
        at: Row of p that belongs to each row.  # [n]
    """
    law = None if probs is None else probs.to(_wide(logits))
    return RowTerms(*_RowTerms.apply(logits, labels, law, at))  # type: ignore[no-untyped-call]


class _RowTerms(torch.autograd.Function):
    """Gradients by the logit of v, p fixed: 1[v = x] - q_v of log q(x), p_v - q_v of sum p log q, and

    q_v (1[q_v < p_v] - b) of sum min(p, q), where b is the mass of q where q < p.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, probs: Tensor | None, at: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale = logits.new_empty(len(logits), dtype=_wide(logits))  # log sum_v exp(logit)
        cross, overlap = torch.zeros_like(scale), torch.zeros_like(scale)
        spare = _spare(logits, 2)
        for rows in row_blocks(logits.shape, logits.device):
            block = logits[rows].to(scale.dtype)
            if probs is None or at is None:
                scale[rows] = block.logsumexp(-1)
                continue
            q, p = spare[:, : len(block)]
            torch.softmax(block, -1, out=q)
            # The largest entry says it without a second exponential of the block.
            scale[rows] = block.amax(-1) - q.amax(-1).log_()
            torch.index_select(probs, 0, at[rows], out=p)
            cross[rows] = torch.linalg.vecdot(p, block) - scale[rows]
            overlap[rows] = torch.minimum(p, q, out=q).sum(-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, labels, probs, at, scale)
        label = logits.gather(1, labels.unsqueeze(1)).squeeze(1).to(scale.dtype) - scale
        return label, cross, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, label: Tensor | None, cross: Tensor | None, overlap: Tensor | None) -> tuple[Any, ...]:
        logits, labels, probs, at, scale = ctx.saved_tensors
        zero = torch.zeros_like(scale)
        of_label, of_cross, of_overlap = (
            (zero if each is None else each).unsqueeze(1) for each in (label, cross, overlap)
        )
        gradient = torch.empty_like(logits, dtype=scale.dtype)
        spare = _spare(logits, 2)
        for rows in row_blocks(logits.shape, logits.device):
            q = torch.sub(logits[rows], scale[rows].unsqueeze(1), out=gradient[rows]).exp_()
            p, below = spare[:, : len(q)]
            fall = of_label[rows] + of_cross[rows]
            if cross is not None or overlap is not None:
                torch.index_select(probs, 0, at[rows], out=p)
            if overlap is None:
                q.mul_(-fall)
            else:
                torch.lt(q, p, out=below)  # as numbers: filling by a mask is slow
                fall += of_overlap[rows] * torch.linalg.vecdot(below, q).unsqueeze(1)
                q.mul_(below.mul_(of_overlap[rows]).sub_(fall))
            if cross is not None:
                q.addcmul_(p, of_cross[rows])
            q.scatter_add_(1, labels[rows].unsqueeze(1), of_label[rows])
        return gradient.to(logits.dtype), None, None, None


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _spare(logits: Tensor, count: int) -> Tensor:
    """Room for blocks of rows, made once: small arrays that come and go return their pages every time."""
    most = max((rows.stop - rows.start for rows in row_blocks(logits.shape, logits.device)), default=0)
    return logits.new_empty(count, most, logits.shape[1], dtype=_wide(logits))
