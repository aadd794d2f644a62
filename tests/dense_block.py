"""The formulas of a block backbone (methods 7.1) written out densely for one row: no cache, a mask made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tiny import tiny_target
from torch import Tensor

from specflow.draft.backbone import ContextBackbone
from specflow.draft.backbone_options import BackboneOptions
from specflow.draft.base import SourceContext
from specflow.draft.checkpoint import open_weights
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.parallel import MarginalModel
from specflow.target.transformer import NativeTarget
from specflow.types import Features, Observation

TARGET = tiny_target()
INFO = TARGET.info
WIDTH = INFO.hidden_size
TAPS = (-1, 0)
SPAN = 200
FEATURES = torch.randn(4, SPAN, len(TAPS), WIDTH, dtype=INFO.dtype, generator=torch.Generator().manual_seed(1))
"""Features of four requests at every position."""


def network(k: int, **options: object) -> ContextBackbone:
    config = BackboneOptions(**{"taps": TAPS, "num_layers": 2, **options})  # type: ignore[arg-type]
    return ContextBackbone(config, open_weights(None, config.seed, TARGET), SourceContext(TARGET, k))


@dataclass
class Stage:
    """A backbone, with the target's side acted out: features of a request at a position are always the same."""

    model: MarginalModel
    requests: list[int]  # which request each row decodes
    target: NativeTarget = TARGET

    def __post_init__(self) -> None:
        self.cache = self.target.new_cache(len(self.requests), SPAN)
        self.model.reset(len(self.requests), self.model.most_depth, self.cache)

    @property
    def lengths(self) -> list[int]:
        return list(self.cache.lengths)

    def commit(self, counts: Sequence[int]) -> None:
        """Tokens become true: so many a row, their feature rows padded to each other with nonsense."""
        starts, width = self.lengths, max(counts) + 1
        rows = torch.full((len(counts), width, len(TAPS), WIDTH), torch.nan, dtype=self.target.info.dtype)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            rows[row, :count] = FEATURES[self.requests[row], start : start + count]
        taps = {tap: rows[:, :, index] for index, tap in enumerate(TAPS)}
        tokens = tuple((3,) * count for count in counts)
        self.model.observe(Observation(tokens, tuple(starts), tuple(counts), Features(taps)), range(len(counts)))
        self.cache.keep(counts)

    def draft(self, anchors: Sequence[int]) -> Tensor:
        """# [B, K, Vd]"""
        return self.model.marginals(anchors, [True] * len(anchors)).logits

    def select(self, rows: Sequence[int]) -> None:
        self.model.select(rows)
        self.cache.select(rows)
        self.requests = [self.requests[row] for row in rows]

    def restart(self, row: int, request: int) -> None:
        self.model.start(row, [3])
        self.cache.clear(row)
        self.requests[row] = request


def visible(options: BackboneOptions, context: int, slots: int, windowed: bool) -> Tensor:
    """Which of context and block each slot sees, by the words of methods 7.1.  # [slots, context + slots] bool"""
    seen = torch.zeros(slots, context + slots, dtype=torch.bool)
    causal = windowed if options.causal is None else options.causal
    for slot in range(slots):
        for position in range(context + slots):
            inside = position >= context
            ok = not (inside and causal and position > context + slot)
            if windowed and options.window is not None:
                if options.window_from == "row":
                    ok = ok and abs(context + slot - position) < options.window
                elif not inside:
                    ok = ok and position >= context - options.window
            seen[slot, position] = ok
    return seen


def dense_hidden(options: BackboneOptions, slots: int, context: Tensor, anchor: int) -> Tensor:
    """Output of the final norm at every slot.

    Args:
        options: With all sizes of the block set, or the target's.
        context: Features of the committed positions.  # [S, T, H]
    """
    shape, tensors = INFO.shape, SeededTensors(options.seed)
    heads, groups = options.num_heads or shape.num_heads, options.num_kv_heads or shape.num_kv_heads
    wide, mlp = options.head_width or shape.head_width, options.mlp_size or shape.mlp_size
    theta, eps = options.rope_theta or shape.rope_theta, options.eps or shape.eps

    def take(name: str, *size: int) -> Tensor:
        return tensors.draw(f"{name}.weight", size).to(INFO.dtype)

    def norm(rows: Tensor, name: str) -> Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * take(name, rows.shape[-1])

    def turn(rows: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions as products of complex numbers.  # [R, heads, Dh]"""
        half = wide // 2
        angles = positions.unsqueeze(1) * theta ** (-torch.arange(half, dtype=INFO.dtype) / half)
        spun = torch.complex(rows[..., :half], rows[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((spun.real, spun.imag), dim=-1)

    count = len(context)
    positions = torch.arange(count + slots, dtype=INFO.dtype)
    fused = norm(context.flatten(1) @ take("fc", WIDTH, context.shape[1] * WIDTH).T, "hidden_norm")
    mask_token = INFO.vocab_size - 1 if options.mask_token is None else options.mask_token
    rows = TARGET.embedding[torch.tensor([anchor, *[mask_token] * (slots - 1)])]
    for index, windowed in enumerate(options.windowed):
        name = f"layers.{index}"
        normed = norm(rows, f"{name}.input_layernorm")
        both = torch.cat((fused, normed))
        queries = (normed @ take(f"{name}.self_attn.q_proj", heads * wide, WIDTH).T).view(slots, heads, wide)
        keys = (both @ take(f"{name}.self_attn.k_proj", groups * wide, WIDTH).T).view(-1, groups, wide)
        values = (both @ take(f"{name}.self_attn.v_proj", groups * wide, WIDTH).T).view(-1, groups, wide)
        queries = turn(norm(queries, f"{name}.self_attn.q_norm"), positions[count:])
        keys = turn(norm(keys, f"{name}.self_attn.k_norm"), positions)
        keys, values = (part.repeat_interleave(heads // groups, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / wide**0.5
        scores = scores.masked_fill(~visible(options, count, slots, windowed), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
        rows = rows + mixed @ take(f"{name}.self_attn.o_proj", WIDTH, heads * wide).T
        normed = norm(rows, f"{name}.post_attention_layernorm")
        gate = normed @ take(f"{name}.mlp.gate_proj", mlp, WIDTH).T
        up = normed @ take(f"{name}.mlp.up_proj", mlp, WIDTH).T
        rows = rows + (gate * torch.sigmoid(gate) * up) @ take(f"{name}.mlp.down_proj", WIDTH, mlp).T
    return norm(rows, "norm")


def dense_logits(options: BackboneOptions, slots: int, context: Tensor, anchor: int) -> Tensor:
    """Logits of the draft positions with the target's head.  # [K, V]"""
    logits = dense_hidden(options, slots, context, anchor) @ TARGET.head.weight.T * options.logit_scale
    if options.logit_cap is not None:
        logits = options.logit_cap * torch.tanh(logits / options.logit_cap)
    return logits[options.first_slot :]
