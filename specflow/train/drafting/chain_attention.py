"""Attention of draft rows that go on along their own output, for all chains of all texts at once.

Row s of a chain with base i sees the texts' first rows up to i and the chain's rows 2 to s: two parts of one softmax.
On a CPU the first part is torch's flash attention, causal, with each chain's query in the row of its base; what joins
the parts is its log-sum-exp. Its backward pass, given the joint output and log-sum-exp, is that of the joint softmax:
softmax weights exp(score - lse), and the product of output and gradient, are all it knows of the other part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from specflow.draft.nn.block import Rooms

__all__ = ["ChainRows", "TextRows", "attend_densely", "attend_in_flashes"]


class TextRows:
    """Causal attention over whole texts. Padding is on the right, so no row of a text sees it.

    Args:
        batch: B.
        needed: Flat positions whose attention is asked for; None: all.  # [N]
    """

    def __init__(self, batch: int, needed: Tensor | None) -> None:
        self._batch, self._needed = batch, needed
        self.keys: Tensor  # [B, Hk, T, Dh]
        self.values: Tensor

    def write(self, layer: int, fresh: Tensor) -> None:
        """See `Rooms`.  # [B * T, 2, Hk, Dh]"""
        rows = fresh.view(self._batch, -1, *fresh.shape[1:])
        self.keys, self.values = rows.permute(2, 0, 3, 1, 4).unbind(0)

    def attend(self, queries: Tensor, rooms: Rooms, layer: int, scale: float) -> Tensor:
        """See `Sighted`.  # [B * T, Hq, Dh] -> [N, Hq * Dh]"""
        heads = queries.view(self._batch, -1, *queries.shape[1:]).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            heads, self.keys, self.values, is_causal=True, scale=scale, enable_gqa=True
        )
        rows = mixed.transpose(1, 2).reshape(queries.shape[0], -1)
        return rows if self._needed is None else rows[self._needed]


class ChainRows:
    """Attention of chains' later rows.

    Args:
        texts: The first step's rows.
        bases: Flat base position of each chain.  # [n]
    """

    def __init__(self, texts: TextRows, bases: Tensor) -> None:
        self._texts, self._bases = texts, bases
        self._own: list[Tensor] = []  # [n, 2, Hk, Dh] a step

    def write(self, layer: int, fresh: Tensor) -> None:
        """See `Rooms`.  # [n, 2, Hk, Dh]"""
        self._own.append(fresh)

    def attend(self, queries: Tensor, rooms: Rooms, layer: int, scale: float) -> Tensor:
        """See `Sighted`.  # [n, Hq, Dh] -> [n, Hq * Dh]"""
        own = torch.stack(self._own, dim=3)  # [n, 2, Hk, S, Dh]
        num_groups = own.shape[2]
        heads = (queries * scale).view(len(queries), num_groups, queries.shape[1] // num_groups, own.shape[4])
        attend = attend_in_flashes if queries.device.type == "cpu" else attend_densely
        return attend(heads, own, self._texts.keys, self._texts.values, self._bases).flatten(1)


def attend_densely(heads: Tensor, own: Tensor, keys: Tensor, values: Tensor, bases: Tensor) -> Tensor:
    """One softmax over a text's rows and a chain's own, scores written out.

    Args:
        heads: Scaled queries.  # [n, Hk, G, Dh]
        own: Keys and values of each chain.  # [n, 2, Hk, S, Dh]
        keys: Of the texts.  # [B, Hk, T, Dh]
        values: # [B, Hk, T, Dh]
        bases: Flat base position of each chain.  # [n]

    Returns:
        # [n, Hk, G, Dh]
    """
    num_keys = keys.shape[2]
    size = (keys.shape[0], *heads.shape[1:3], num_keys, -1)
    queries = _spread(heads, keys, bases).reshape(size)
    ahead = torch.ones(num_keys, num_keys, dtype=torch.bool, device=keys.device).triu(1)
    far = (queries @ keys.unsqueeze(2).transpose(3, 4)).masked_fill(ahead, -torch.inf)
    near = _spread(heads @ own[:, 0].transpose(2, 3), keys, bases).reshape(size)
    weights = torch.cat((far, near), dim=-1).softmax(-1)  # [B, Hk, G, T, T + S]
    mixed = (weights[..., :num_keys] @ values.unsqueeze(2)).flatten(1, 2)
    weights = _picked(weights[..., num_keys:].flatten(1, 2), heads, bases)
    return _picked(mixed, heads, bases) + weights @ own[:, 1]


def attend_in_flashes(heads: Tensor, own: Tensor, keys: Tensor, values: Tensor, bases: Tensor) -> Tensor:
    """The same on a CPU, without scores of texts in memory; see `attend_densely`."""
    mixed: Tensor = _Flashes.apply(heads, own, keys, values, bases)  # type: ignore[no-untyped-call]
    return mixed


class _Flashes(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, own: Tensor, keys: Tensor, values: Tensor, bases: Tensor) -> Tensor:
        queries = _spread(heads, keys, bases)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        far, far_total = flash(queries, keys, values, 0.0, True, scale=1.0)  # [B, Hq, T, Dh], [B, Hq, T]
        near = heads @ own[:, 0].transpose(2, 3)  # [n, Hk, G, S]
        total = _picked(far_total.unsqueeze(-1), heads, bases)  # [n, Hk, G, 1]
        joint = torch.logaddexp(total, near.logsumexp(-1, keepdim=True))
        weights = (near - joint).exp()
        mixed = (total - joint).exp() * _picked(far, heads, bases) + weights @ own[:, 1]
        ctx.save_for_backward(heads, own, keys, values, bases, weights, joint, mixed)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        heads, own, keys, values, bases, weights, joint, mixed = ctx.saved_tensors
        grad = grads[0]
        queries, grad_rows, mixed_rows = (_spread(each, keys, bases) for each in (heads, grad, mixed))
        total = _spread(joint, keys, bases).squeeze(-1)
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        arguments = (grad_rows, queries, keys, values, mixed_rows, total, 0.0, True)
        to_queries, to_keys, to_values = back(*arguments, scale=1.0)
        change = grad @ own[:, 1].transpose(2, 3) - (grad * mixed).sum(-1, keepdim=True)
        change = weights * change  # [n, Hk, G, S] of the scores
        to_heads = _picked(to_queries, heads, bases) + change @ own[:, 0]
        to_own = torch.stack((change.transpose(2, 3) @ heads, weights.transpose(2, 3) @ grad), dim=1)
        return to_heads, to_own, to_keys, to_values, None


def _spread(rows: Tensor, keys: Tensor, bases: Tensor) -> Tensor:
    """Rows of chains in the places of their bases, zeros elsewhere.  # [n, Hk, G, X] -> [B, Hq, T, X]"""
    batch, _, width, _ = keys.shape
    grid = rows.new_zeros(batch * width, rows.shape[1] * rows.shape[2], rows.shape[3])
    grid[bases] = rows.flatten(1, 2)
    return grid.view(batch, width, *grid.shape[1:]).transpose(1, 2)


def _picked(grid: Tensor, like: Tensor, bases: Tensor) -> Tensor:
    """What lies in the places of bases.  # [B, Hq, T, X] -> [n, Hk, G, X]"""
    rows = grid.transpose(1, 2).flatten(0, 1)[bases]
    return rows.view(*like.shape[:3], grid.shape[-1])
