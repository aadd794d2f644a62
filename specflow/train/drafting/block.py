"""Block backbones (DFlash, 2602.06036; DSpark, 2607.05147) over whole texts: many blocks of a text in one pass.

A block stands at an anchor somewhere in the answer. It sees the context rows of the positions before its anchor, which
are made once for all blocks of the text, and its own slots; blocks do not see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specflow.draft.backbone import mask_token_of
from specflow.draft.nn.block import Pass
from specflow.draft.nn.context_block import BlockLayers, block_sights
from specflow.draft.nn.rope import RotaryTable
from specflow.errors import GraphError
from specflow.train.batch import Batch, Drafting, Slot
from specflow.train.drafting.base import DraftingOptions, drafting_of
from specflow.train.drafting.corrected import Chains, SlotHeads

if TYPE_CHECKING:
    from specflow.draft.nn.attention import Sight
    from specflow.draft.nn.block import Rooms
    from specflow.draft.trainable import Trainable

__all__ = ["BlockDrafting"]

_TOGETHER = 16
"""Blocks of a text that attend in one call. More of them score each other's slots in vain, fewer cost calls: on a CPU 8
and 16 take 0.5 to 0.85 of the time of all 32 or 64 at once."""


class BlockDrafting(Drafting):
    """A block backbone over whole texts.

    Args:
        trainable: Its layers, and what stands on them.
        options: How deep it drafts, and how many blocks of each text.

    Raises:
        GraphError: A block holds fewer positions than are to be drafted.
    """

    def __init__(self, trainable: Trainable, options: DraftingOptions) -> None:
        super().__init__()
        layers = trainable.network
        assert isinstance(layers, BlockLayers)
        self.layers, self.over = layers, SlotHeads(trainable)
        self._slots = layers.options.slots(options.depth)
        self._depth = self._slots - layers.options.first_slot
        if self._depth < options.depth:
            found, expected = f"{options.depth} draft positions to train", f"at most the {self._depth} of its blocks"
            raise GraphError("draft.block_size", found, expected, "raise block_size, or train fewer positions")
        self._mask_token = mask_token_of(layers.options, layers.target.info.vocab_size)
        self._most_blocks = options.anchors
        weight = layers.fusion.weight
        self._like = torch.empty(0, dtype=weight.dtype, device=weight.device)
        self._rotary = RotaryTable.shaped(layers.shape, weight.dtype, weight.device)

    def forward(self, batch: Batch) -> Sequence[Slot]:
        """See `Drafting.forward`."""
        self._rotary.grow(batch.tokens.shape[1] + self._slots)
        blocks = _Blocks.drawn(batch, self._most_blocks)
        text, index = blocks.real.nonzero(as_tuple=True)
        order = torch.arange(self._depth, device=text.device).unsqueeze(1) + self.layers.options.first_slot
        picked = (text * blocks.anchors.shape[1] + index) * self._slots + order  # [K, n]
        normed = self.layers.norm(self._fill(batch, blocks, picked.flatten())).tensor_split(self._depth)
        marginals = ((self.layers.score(rows.unsqueeze(0))[0], rows) for rows in normed)
        chains = Chains.of(batch, text, blocks.anchors[text, index], self._depth)
        slots: Sequence[Slot] = self.over(batch, chains, marginals)
        return slots

    def _fill(self, batch: Batch, blocks: _Blocks, picked: Tensor) -> Tensor:
        """What the layers make of some slots, before the last norm.

        Args:
            batch: The texts.
            blocks: Of the texts.
            picked: Flat numbers of the slots that predict something.  # [N]

        Returns:
            # [N, H]
        """
        layers, anchors = self.layers, blocks.anchors
        tokens = anchors.new_full((*anchors.shape, self._slots), self._mask_token)
        tokens[..., 0] = batch.tokens.gather(1, anchors)
        hidden = layers.embed(tokens.flatten(1)).flatten(0, 1).to(self._like)
        shared = self._share(batch, anchors)
        for index, layer in enumerate(layers.layers):
            hidden = hidden + layer.attend(hidden, index, shared)
            if index == len(layers.layers) - 1:
                hidden = hidden[picked]
            hidden = hidden + layer.feed(hidden, shared)
        return hidden

    def _share(self, batch: Batch, anchors: Tensor) -> Pass:
        """What the layers share in the pass over all blocks, with the context rows of every layer.  # [B, A]"""
        device, num_texts = anchors.device, len(anchors)
        lengths = anchors.flatten().tolist()
        seen = max(1, *lengths)  # operators refuse to reshape no rows at all
        taps = [batch.features.taps[tap][:, :seen] for tap in self.layers.taps]
        context = _Rows(num_texts)
        self._write_context(torch.cat(taps, dim=-1).to(self._like), context)
        sights = block_sights(self.layers.options, lengths, self._slots, device)
        plans = {windowed: _BlockPlan(context, _groups(anchors, sight)) for windowed, sight in sights.items()}
        positions = anchors.unsqueeze(-1) + torch.arange(self._slots, device=device)
        shape = self.layers.shape
        cos, sin = self._rotary.at(positions.flatten(), shape.num_heads + shape.num_kv_heads, shape.num_kv_heads)
        return Pass(cos, sin, _Rows(num_texts), plans.get(False), plans.get(True), split=False)

    def _write_context(self, features: Tensor, rows: _Rows) -> None:
        """# [B, S, T H]"""
        num_texts, seen, _ = features.shape
        context = self.layers.fusion_norm(self.layers.fusion(features.flatten(0, 1)))
        positions = torch.arange(seen, device=features.device).repeat(num_texts)
        kept = self.layers.shape.num_kv_heads
        cos, sin = self._rotary.at(positions, kept, kept)
        shared = Pass(cos, sin, rows, None, None, split=False)
        for index, layer in enumerate(self.layers.layers):
            layer.write_context(context, index, shared)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Where the blocks of each text stand."""

    anchors: Tensor  # [B, A] positions, ascending; 0 behind the real ones
    real: Tensor  # [B, A] bool

    @classmethod
    def drawn(cls, batch: Batch, most: int) -> _Blocks:
        """Some of the positions of each text that are of the answer and are followed by a token of it."""
        begins = batch.begins
        width = min(most, max(1, int(begins.sum(1).max())))
        numbers = torch.rand(begins.shape, generator=torch.Generator().manual_seed(batch.key)).to(begins.device)
        found = numbers.masked_fill(~begins, -1.0).topk(width, dim=1).indices
        beyond = begins.shape[1]
        anchors = found.masked_fill(~begins.gather(1, found), beyond).sort(dim=1).values
        real = anchors < beyond
        return cls(anchors.masked_fill(~real, 0), real)


class _Rows:
    """Key and value rows of every layer of one pass.

    Args:
        num_texts: B.
    """

    def __init__(self, num_texts: int) -> None:
        self._num_texts = num_texts
        self._layers: dict[int, Tensor] = {}

    def write(self, layer: int, fresh: Tensor) -> None:
        """See `Rooms`.  # [B * R, 2, Hk, Dh]"""
        self._layers[layer] = fresh.view(self._num_texts, -1, *fresh.shape[1:]).permute(2, 0, 3, 1, 4)

    def read(self, layer: int) -> Tensor:
        """# [2, B, Hk, R, Dh]"""
        return self._layers[layer]


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring blocks of each text."""

    rows: int  # R: slots of the group in each text
    seen: int  # context rows that any of them sees
    bias: Tensor  # [B, 1, R, seen + R]; 0 where a row sees a key, -inf where not


@dataclass(frozen=True, slots=True)
class _BlockPlan:
    """Attention of blocks over the context before their anchors and their own slots; see `Sighted`."""

    context: _Rows
    groups: Sequence[_Group]

    def attend(self, queries: Tensor, rooms: Rooms, layer: int, scale: float) -> Tensor:
        """# [B * A * slots, Hq, Dh] -> [B * A * slots, Hq * Dh]"""
        assert isinstance(rooms, _Rows)
        far, near = self.context.read(layer), rooms.read(layer)
        heads = queries.reshape(far.shape[1], -1, *queries.shape[1:]).transpose(1, 2)
        sizes, mixed = [group.rows for group in self.groups], []
        parts = zip(self.groups, torch.split(heads, sizes, dim=2), torch.split(near, sizes, dim=-2), strict=True)
        for group, own, slots in parts:
            keys, values = torch.cat((far[..., : group.seen, :], slots), dim=-2).unbind(0)
            part = F.scaled_dot_product_attention(own, keys, values, group.bias, scale=scale, enable_gqa=True)
            mixed.append(part.transpose(1, 2))
        return torch.cat(mixed, dim=1).flatten(0, 1).flatten(1)


def _groups(anchors: Tensor, sight: Sight) -> list[_Group]:
    """Blocks that attend together, and what their rows see.

    Args:
        anchors: # [B, A]
        sight: Of all blocks of all texts, one behind the other.
    """
    assert sight.mask is not None
    num_texts, slots = len(anchors), sight.positions.shape[1]
    inside = sight.mask[0]  # [slots, slots]; the same for all blocks, for all that counts is how far apart slots are
    ends = sight.positions.view(*anchors.shape, slots, 1)  # [B, A, slots, 1]
    if sight.window is not None:
        held = sight.positions[0]
        inside = inside & (held > held.unsqueeze(1) - sight.window)
    groups = []
    for start in range(0, anchors.shape[1], _TOGETHER):
        part = anchors[:, start : start + _TOGETHER]
        count, seen = part.shape[1], int(part.max())
        keys = torch.arange(seen, device=anchors.device)
        far = keys < part[..., None, None]
        if sight.window is not None:
            far = far & (keys > ends[:, start : start + count] - sight.window)
        far = far.expand(-1, -1, slots, -1).flatten(1, 2)
        apart = torch.eye(count, dtype=torch.bool, device=anchors.device)
        near = torch.kron(apart, inside).expand(num_texts, -1, -1)
        visible = torch.cat((far, near), dim=-1).unsqueeze(1)
        bias = torch.zeros(visible.shape, device=anchors.device).masked_fill_(~visible, -torch.inf)
        groups.append(_Group(count * slots, seen, bias))
    return groups


@drafting_of.register(BlockLayers)
def _of_block_layers(network: BlockLayers, trainable: Trainable, options: DraftingOptions) -> BlockDrafting:
    return BlockDrafting(trainable, options)
