"""The layers of a block backbone (DFlash, 2602.06036; DSpark, 2607.05147), without the state of requests.

Target features enter as keys and values of every layer. One fused row a committed token, c = norm(W_fc [taps]), goes
through the key and value projections of all layers; it never goes through the layers themselves. So each layer's
context rows follow from the token alone: they are written once, and a round costs the rows of its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specflow.draft.borrowed import draft_head
from specflow.draft.checkpoint import draft_vocabulary
from specflow.draft.nn.attention import AttentionPlan, KeyRooms, Sight, plan_attention
from specflow.draft.nn.block import Pass
from specflow.draft.nn.rope import RotaryTable
from specflow.draft.nn.weights import BlockForm, WeightReader
from specflow.draft.parallel import Marginals
from specflow.target.cache import KVCache

if TYPE_CHECKING:
    from specflow.draft.backbone_options import BackboneOptions
    from specflow.draft.nn.block import DecoderBlock
    from specflow.target.base import Target

__all__ = ["BlockLayers", "BlockNetwork", "block_positions", "block_sights", "scale_logits"]


class BlockNetwork(Protocol):
    """What computes a backbone: its layers in torch, or graphs of them."""

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Room for the rows of so many positions in every layer."""

    def inject(self, features: Tensor, positions: Tensor, cache: KVCache) -> None:
        """Write the context rows of tokens above the committed rows of every layer.

        Args:
            features: Of the target, at those tokens.  # [B, R, T H]
            positions: # [B, R]
            cache: The backbone's own; the caller keeps what is real.
        """

    def fill(self, tokens: Tensor, cache: KVCache) -> Marginals:
        """One pass over blocks that stand above the committed rows.

        Args:
            tokens: The anchor and mask tokens of each row.  # [B, slots]
            cache: The backbone's own.
        """


class BlockLayers(nn.Module):
    """A `BlockNetwork` in torch.

    Args:
        options: Its shape.
        taps: Target layers it reads.
        reader: Its tensors.
        target: The model it drafts for; its embedding and head serve where the reader has none.

    Raises:
        CheckpointError: A tensor is missing or has the wrong shape.
    """

    def __init__(self, options: BackboneOptions, taps: Sequence[int], reader: WeightReader, target: Target) -> None:
        super().__init__()
        info = target.info
        self.options, self.target, self.taps = options, target, tuple(taps)
        self.shape = shape = options.shape_for(info.shape)
        width = shape.hidden_size
        self.fusion = reader.linear("fc", width, len(taps) * info.hidden_size, bias=False)
        self.fusion_norm = reader.norm("hidden_norm.weight", width, shape.eps)
        blocks = [
            reader.block(f"layers.{index}", shape, BlockForm(windowed=windowed, head_norms=True))
            for index, windowed in enumerate(options.windowed)
        ]
        self.layers: Sequence[DecoderBlock] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.norm = reader.norm("norm.weight", width, shape.eps)
        own = reader.has("embed_tokens.weight")
        self.embedding = reader.take("embed_tokens.weight", (info.vocab_size, width)) if own else None
        self.vocabulary = draft_vocabulary(reader, options.draft_vocab_size, target)
        self.head = draft_head(reader, options.own_head, self.vocabulary, target, width)
        self.rotary = RotaryTable.shaped(shape, info.dtype, info.device)
        self._like = torch.empty(0, dtype=info.dtype, device=info.device)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """See `BlockNetwork.new_cache`."""
        shape = self.shape
        cache = KVCache(len(self.layers), batch, shape.num_kv_heads, capacity, shape.head_width, self._like)
        self.rotary.grow(cache.capacity)
        return cache

    @torch.inference_mode()
    def inject(self, features: Tensor, positions: Tensor, cache: KVCache) -> None:
        """See `BlockNetwork.inject`."""
        context = self.fusion_norm(self.fusion(features.flatten(0, 1)))
        # No query attends in this pass, so there is no bias to lay out.
        plan = AttentionPlan(tuple(cache.lengths), positions.shape[1], False, (self._like,))
        shared = self._pass(positions, KeyRooms(cache.data, plan))
        for index, layer in enumerate(self.layers):
            layer.write_context(context, index, shared)

    @torch.inference_mode()
    def fill(self, tokens: Tensor, cache: KVCache) -> Marginals:
        """See `BlockNetwork.fill`."""
        batch, slots = tokens.shape
        hidden = self.embed(tokens).flatten(0, 1)
        shared = self._share(slots, cache)
        for index, layer in enumerate(self.layers):
            hidden = hidden + layer.attend(hidden, index, shared)
            hidden = hidden + layer.feed(hidden, shared)
        normed = self.norm(hidden.view(batch, slots, -1)[:, self.options.first_slot :])
        return Marginals(self.score(normed), normed)

    def _share(self, slots: int, cache: KVCache) -> Pass:
        """What the layers share in a block's pass."""
        lengths = cache.lengths
        positions = block_positions(lengths, slots, self._like.device)
        plans: dict[bool, AttentionPlan] = {}
        for windowed, sight in block_sights(self.options, lengths, slots, self._like.device).items():
            layout = sight.mask, sight.window, False, self._like.dtype
            plans[windowed] = plan_attention(lengths, sight.positions, *layout)
        shared = self._pass(positions, KeyRooms(cache.data, next(iter(plans.values()))))
        return replace(shared, full=plans.get(False), windowed=plans.get(True))

    def _pass(self, positions: Tensor, rooms: KeyRooms) -> Pass:
        rotated, kept = self.shape.num_heads + self.shape.num_kv_heads, self.shape.num_kv_heads
        cos, sin = self.rotary.at(positions.flatten(), rotated, kept)
        return Pass(cos, sin, rooms, None, None, split=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """# [B, R] -> [B, R, H]"""
        return self.target.embed(tokens) if self.embedding is None else F.embedding(tokens, self.embedding)

    def score(self, normed: Tensor) -> Tensor:
        """The head.  # [B, K, H] -> [B, K, Vd]"""
        if self.head is None:
            logits = self.target.score(normed)
        else:
            logits = self.head(normed.flatten(0, 1)).view(*normed.shape[:2], self.head.out_features)
        return scale_logits(self.options, logits)


def scale_logits(options: BackboneOptions, logits: Tensor) -> Tensor:
    """Logits as the options scale and cap those of the head."""
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    cap = options.logit_cap
    return logits if cap is None else torch.tanh(logits / cap) * cap


def block_positions(lengths: Sequence[int], slots: int, device: torch.device) -> Tensor:
    """Positions of the slots of blocks that stand above so many committed rows.  # [B] -> [B, slots]"""
    return torch.tensor(lengths, device=device).unsqueeze(1) + torch.arange(slots, device=device)


def block_sights(
    options: BackboneOptions, lengths: Sequence[int], slots: int, device: torch.device
) -> dict[bool, Sight]:
    """What slots see in layers without and with a sliding window, as far as there are such layers.

    Args:
        options: Of the backbone.
        lengths: Committed rows.  # [B]
        slots: Of a block.
        device: Where masks go.

    Returns:
        By whether a layer is windowed.
    """
    positions = block_positions(lengths, slots, device)
    sights = {}
    if not all(options.windowed):
        sights[False] = Sight(lengths, positions, _block_mask(options, slots, False, device))
    if options.window is not None:
        # A window that ends before the anchor is that of a row at the anchor which does not count itself.
        ends, reach = (positions, 0) if options.window_from == "row" else (positions[:, :1].expand_as(positions), 1)
        mask = _block_mask(options, slots, True, device)
        sights[True] = Sight(lengths, ends, mask, options.window + reach)
    return sights


def _block_mask(options: BackboneOptions, slots: int, windowed: bool, device: torch.device) -> Tensor:
    """Which slots each slot of the block sees.  # [1, slots, slots] bool"""
    order = torch.arange(slots, device=device)
    ahead = order - order.unsqueeze(1)  # [i, j] how far j is past i
    causal = windowed if options.causal is None else options.causal
    most = 0 if causal else slots
    if windowed and options.window is not None and options.window_from == "row":
        most = min(most, options.window - 1)
    return (ahead <= most).unsqueeze(0)
