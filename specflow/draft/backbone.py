"""The drafter's side of a block backbone: requests, their context rows, and blocks of an anchor and mask tokens.

What computes the rows is in `nn.context_block` (torch) and `onnx_backbone` (graphs).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specflow.draft.backbone_options import spread_taps
from specflow.draft.base import Needs
from specflow.draft.nn.context_block import BlockLayers
from specflow.draft.pending import TOGETHER, Pending
from specflow.errors import GraphError

if TYPE_CHECKING:
    from pathlib import Path

    from specflow.draft.backbone_options import BackboneOptions
    from specflow.draft.base import SourceContext
    from specflow.draft.nn.context_block import BlockNetwork
    from specflow.draft.nn.weights import WeightReader
    from specflow.draft.onnx_parallel import MarginalGraphs
    from specflow.draft.parallel import Marginals
    from specflow.onnx.session import Place
    from specflow.target.base import Cache
    from specflow.target.cache import KVCache
    from specflow.types import Features, Observation

__all__ = ["ContextBackbone", "mask_token_of"]

log = logging.getLogger(__name__)


class ContextBackbone:
    """A `MarginalModel`. The anchor's features do not exist before it is verified, so it is never context.

    Args:
        options: Its shape.
        reader: Its tensors; what is left of them belongs to heads on top of it.
        context: Target and depth.

    Raises:
        CheckpointError: A tensor is missing or has the wrong shape.
        GraphError: k is more than a block holds, the mask token is no row of the embedding, or the heads do not fit
            each other.
    """

    def __init__(self, options: BackboneOptions, reader: WeightReader, context: SourceContext) -> None:
        info = context.target.info
        self._slots = _checked_slots(options, context.k)
        self._mask_token = mask_token_of(options, info.vocab_size)
        self._taps = options.taps or spread_taps(options.num_layers, info.num_layers)
        self.layers = layers = BlockLayers(options, self._taps, reader, context.target)
        self._network: BlockNetwork = layers
        self.needs = Needs(taps=tuple(dict.fromkeys(self._taps)))
        self.vocabulary = layers.vocabulary
        self.most_depth = self._slots - options.first_slot
        self.most_positions = min(info.context_length, options.max_positions or info.context_length)
        self._device = info.device
        self._pending = Pending(self._pick)
        self._cache: KVCache
        self._committed: Cache

    @property
    def trained(self) -> BlockLayers:
        """The layers with their weights."""
        return self.layers

    def graphs(self) -> MarginalGraphs:
        """Its layers, as they are written into graphs."""
        from specflow.draft.onnx_backbone import BlockGraphs

        positions = self.most_positions + self._slots
        return BlockGraphs(self.layers, self._taps, self._mask_token, self._slots, positions)

    def take_graphs(self, folder: Path, place: Place) -> None:
        """Let the graphs of a folder compute it; its layers are dropped."""
        from specflow.draft.onnx_backbone import OnnxBlock

        self._network = OnnxBlock(folder, place, self.layers)
        del self.layers

    def reset(self, batch: int, num_nodes: int, cache: Cache) -> None:
        # Short rows are written padded to each other, and the block stands above the last committed row.
        capacity = cache.capacity + max(self._slots, TOGETHER)
        self._cache = self._network.new_cache(batch, capacity)
        self._committed = cache
        self._pending.reset(batch)

    def start(self, row: int, prompt: Sequence[int]) -> None:
        self._cache.clear(row)
        self._pending.start(row)

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        self._pending.add(observation, rows)

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)
        self._pending.select(rows)

    def marginals(self, anchors: Sequence[int], active: Sequence[bool]) -> Marginals:
        """One pass over [anchor, MASK, ...]; all rows of the batch ride along."""
        for rows in self._pending.take():
            cache = self._cache if rows.row is None else self._cache.row(rows.row)
            self._network.inject(rows.features, rows.positions, cache)
            cache.keep(rows.counts)
        lengths = tuple(self._cache.lengths)
        assert lengths == tuple(self._committed.lengths), "context rows are not those of the committed tokens"
        slots = [[anchor, *[self._mask_token] * (self._slots - 1)] for anchor in anchors]
        return self._network.fill(torch.tensor(slots, device=self._device), self._cache)

    def _pick(self, features: Features) -> Tensor:
        """# [B, R, T H]"""
        return torch.cat([features.taps[tap] for tap in self._taps], dim=-1)


def _checked_slots(options: BackboneOptions, k: int) -> int:
    """Slots of a block. Its width is part of what the network was trained for: other widths spoil every position."""
    slots = options.slots(k)
    room = slots - options.first_slot
    if k > room:
        hint = f"use k: {room}, or a drafter trained on blocks of {k + options.first_slot}"
        found = f"k is {k}, and a block of {slots} slots holds {room} draft tokens (layout {options.layout})"
        raise GraphError("draft.k", found, f"at most {room}", hint)
    if k < room and options.weights is not None:
        log.warning("draft.k is %d of a block that holds %d: all of it is drafted, then cut", k, room)
    return slots


def mask_token_of(options: BackboneOptions, vocab_size: int) -> int:
    """The id that stands in the unknown slots of a block.

    Raises:
        GraphError: The vocabulary has no such id.
    """
    token = vocab_size - 1 if options.mask_token is None else options.mask_token
    if token >= vocab_size:
        hint = "a mask token that was added to the embedding is in neither the target nor its checkpoint"
        raise GraphError("draft.mask_token", f"id {token} of a vocabulary of {vocab_size}", "a row it has", hint)
    return token
