"""The backbone of DFlash (2602.06036) and DSpark (2607.05147): a small decoder that fills a block in one pass.

Target features enter it as keys and values of every layer. One fused row a committed token, c = norm(W_fc [taps]),
goes through the key and value projections of all layers; it never goes through the layers themselves. So each layer's
context rows follow from the token alone: they are written once, and a round costs the rows of its block.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specflow.draft.backbone_options import spread_taps
from specflow.draft.base import Needs
from specflow.draft.checkpoint import draft_vocabulary
from specflow.draft.nn.attention import AttentionPlan, KeyRooms, plan_attention
from specflow.draft.nn.block import Pass
from specflow.draft.nn.rope import RotaryTable
from specflow.draft.nn.weights import BlockForm, WeightReader
from specflow.draft.parallel import Marginals
from specflow.draft.pending import TOGETHER, Pending, PendingRows
from specflow.errors import GraphError
from specflow.target.cache import KVCache

if TYPE_CHECKING:
    from specflow.draft.backbone_options import BackboneOptions
    from specflow.draft.base import SourceContext
    from specflow.target.base import Cache
    from specflow.types import Features, Observation

__all__ = ["ContextBackbone"]

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
        self._target, info = context.target, context.target.info
        self._options, self._first = options, options.first_slot
        self._slots = _checked_slots(options, context.k)
        self._mask_token = _checked_mask(options, info.vocab_size)
        self._taps = options.taps or spread_taps(options.num_layers, info.num_layers)
        self._shape = shape = options.shape_for(info.shape)
        width = shape.hidden_size
        self.needs = Needs(taps=tuple(dict.fromkeys(self._taps)))
        self.most_depth = self._slots - self._first
        self.most_positions = min(info.context_length, options.max_positions or info.context_length)
        self.fusion = reader.linear("fc", width, len(self._taps) * info.hidden_size, bias=False)
        self.fusion_norm = reader.norm("hidden_norm.weight", width, shape.eps)
        self.layers = [
            reader.block(f"layers.{index}", shape, BlockForm(windowed=windowed, head_norms=True))
            for index, windowed in enumerate(options.windowed)
        ]
        self.norm = reader.norm("norm.weight", width, shape.eps)
        own = reader.has("embed_tokens.weight")
        self.embedding = reader.take("embed_tokens.weight", (info.vocab_size, width)) if own else None
        self.vocabulary = draft_vocabulary(reader, options.draft_vocab_size, context.target)
        rows = info.vocab_size if self.vocabulary is None else len(self.vocabulary.to_target)
        own = self.vocabulary is not None or reader.has("lm_head.weight")
        self.head = reader.linear("lm_head", rows, width, bias=False) if own else None
        self._like = torch.empty(0, dtype=info.dtype, device=info.device)
        self._rotary = RotaryTable.plain(shape.rope_theta, shape.head_width, info.dtype, info.device)
        self._mask = _block_mask(options, self._slots, windowed=False).to(info.device)
        self._windowed_mask = _block_mask(options, self._slots, windowed=True).to(info.device)
        self._pending = Pending(self._pick)
        self._cache: KVCache
        self._committed: Cache

    def reset(self, batch: int, num_nodes: int, cache: Cache) -> None:
        # Short rows are written padded to each other, and the block stands above the last committed row.
        capacity = cache.capacity + max(self._slots, TOGETHER)
        shape = self._shape
        self._cache = KVCache(len(self.layers), batch, shape.num_kv_heads, capacity, shape.head_width, self._like)
        self._rotary.grow(self._cache.capacity)
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

    @torch.inference_mode()
    def marginals(self, anchors: Sequence[int], active: Sequence[bool]) -> Marginals:
        """One pass over [anchor, MASK, ...]; all rows of the batch ride along."""
        for rows in self._pending.take():
            self._inject(rows, self._cache if rows.row is None else self._cache.row(rows.row))
        lengths = tuple(self._cache.lengths)
        assert lengths == tuple(self._committed.lengths), "context rows are not those of the committed tokens"
        slots = [[anchor, *[self._mask_token] * (self._slots - 1)] for anchor in anchors]
        hidden = self._embed(torch.tensor(slots, device=self._like.device)).flatten(0, 1)
        shared = self._share(lengths)
        for index, layer in enumerate(self.layers):
            hidden = hidden + layer.attend(hidden, index, shared)
            hidden = hidden + layer.feed(hidden, shared)
        used = hidden.view(len(anchors), self._slots, -1)[:, self._first :]
        normed = self.norm(used)
        return Marginals(self._score(normed), normed)

    def _pick(self, features: Features) -> Tensor:
        """# [B, R, T H]"""
        return torch.cat([features.taps[tap] for tap in self._taps], dim=-1)

    def _inject(self, rows: PendingRows, cache: KVCache) -> None:
        """Write the context rows of committed tokens into every layer."""
        width = rows.positions.shape[1]
        context = self.fusion_norm(self.fusion(rows.features.flatten(0, 1)))
        # No query attends in this pass, so there is no bias to lay out.
        plan = AttentionPlan(tuple(cache.lengths), width, False, (self._like,))
        shared = self._pass(rows.positions, KeyRooms(cache.data, plan))
        for index, layer in enumerate(self.layers):
            layer.write_context(context, index, shared)
        cache.keep(rows.counts)

    def _share(self, lengths: Sequence[int]) -> Pass:
        """What the layers share in a block's pass."""
        options, dtype = self._options, self._like.dtype
        starts = torch.tensor(lengths, device=self._like.device).unsqueeze(1)
        positions = starts + torch.arange(self._slots, device=self._like.device)
        full = windowed = None
        if not all(options.windowed):
            full = plan_attention(lengths, positions, self._mask, None, False, dtype)
        if options.window is not None:
            # A window that ends before the anchor is that of a row at the anchor which does not count itself.
            ends, reach = (positions, 0) if options.window_from == "row" else (starts.expand_as(positions), 1)
            windowed = plan_attention(lengths, ends, self._windowed_mask, options.window + reach, False, dtype)
        plan = full or windowed
        assert plan is not None
        shared = self._pass(positions, KeyRooms(self._cache.data, plan))
        return replace(shared, full=full, windowed=windowed)

    def _pass(self, positions: Tensor, rooms: KeyRooms) -> Pass:
        rotated, kept = self._shape.num_heads + self._shape.num_kv_heads, self._shape.num_kv_heads
        cos, sin = self._rotary.at(positions.flatten(), rotated, kept)
        return Pass(cos, sin, rooms, None, None, split=False)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._target.embed(tokens) if self.embedding is None else F.embedding(tokens, self.embedding)

    def _score(self, normed: Tensor) -> Tensor:
        """# [B, K, H] -> [B, K, Vd]"""
        if self.head is None:
            logits = self._target.score(normed)
        else:
            logits = self.head(normed.flatten(0, 1)).view(*normed.shape[:2], -1)
        if self._options.logit_scale != 1.0:
            logits = logits * self._options.logit_scale
        cap = self._options.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap


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


def _checked_mask(options: BackboneOptions, vocab_size: int) -> int:
    token = vocab_size - 1 if options.mask_token is None else options.mask_token
    if token >= vocab_size:
        hint = "a mask token that was added to the embedding is in neither the target nor its checkpoint"
        raise GraphError("draft.mask_token", f"id {token} of a vocabulary of {vocab_size}", "a row it has", hint)
    return token


def _block_mask(options: BackboneOptions, slots: int, windowed: bool) -> Tensor:
    """Which slots each slot of the block sees.  # [1, slots, slots] bool"""
    ahead = torch.arange(slots) - torch.arange(slots).unsqueeze(1)  # [i, j] how far j is past i
    causal = windowed if options.causal is None else options.causal
    most = 0 if causal else slots
    if windowed and options.window is not None and options.window_from == "row":
        most = min(most, options.window - 1)
    return (ahead <= most).unsqueeze(0)
