"""MTP, EAGLE-1 and EAGLE-3 written out densely, the way they are trained: no cache, one mask a step, one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tiny import VOCAB, tiny_target
from torch import Tensor

from specflow.draft.checkpoint import open_weights
from specflow.draft.feature_model import FeatureModel, complete
from specflow.draft.nn.feature_step import FeatureNetwork
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.sources import eagle, mtp
from specflow.draft.sources.eagle import EagleConfig
from specflow.draft.sources.mtp import MTPConfig
from specflow.types import BlockShape, Features, Observation

TARGET = tiny_target()
INFO = TARGET.info
WIDTH = INFO.hidden_size
SPAN = 160
NUM_TAPS = 3
TEXT = torch.randint(3, VOCAB, (4, SPAN), generator=torch.Generator().manual_seed(2))
"""Tokens of four requests at every position."""
FEATURES = torch.randn(4, SPAN, NUM_TAPS * WIDTH, dtype=INFO.dtype, generator=torch.Generator().manual_seed(1))
"""Their features; a network that reads one hidden state takes the first part."""

Config = EagleConfig | MTPConfig


def network_of(config: Config) -> FeatureNetwork:
    reader = open_weights(config.weights, config.seed, TARGET, config.offset_norms)
    if isinstance(config, MTPConfig):
        parts = mtp.read_network(config, reader, TARGET)
    else:
        parts = eagle.read_network(config, reader, TARGET)
    network = complete(parts, reader, TARGET)
    reader.close()
    return network


@dataclass
class Stage:
    """A model, with the target's side acted out: token and feature of a request at a position are always the same."""

    model: FeatureModel
    requests: list[int]  # which request each row decodes
    num_nodes: int = 24
    shift: int = 0  # added to all positions

    def __post_init__(self) -> None:
        self.cache = TARGET.new_cache(len(self.requests), SPAN)
        self.model.reset(len(self.requests), self.num_nodes, self.cache)

    @property
    def lengths(self) -> list[int]:
        return list(self.cache.lengths)

    def commit(self, counts: Sequence[int]) -> None:
        """Tokens become true: so many a row, their feature rows padded to each other with nonsense."""
        starts, taps = self.lengths, self.model.needs.taps
        rows = torch.full((len(counts), max(counts) + 1, NUM_TAPS, WIDTH), torch.nan, dtype=INFO.dtype)
        tokens = []
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            request = self.requests[row]
            rows[row, :count] = FEATURES[request, start : start + count].view(count, NUM_TAPS, WIDTH)
            tokens.append(tuple(TEXT[request, start + 1 : start + 1 + count].tolist()))
        tapped = {layer: rows[:, :, taps.index(layer)] for layer in taps}
        features = Features(tapped, hidden_pre=rows[:, :, 0], hidden_post=rows[:, :, 0])
        shifted = tuple(start + self.shift for start in starts)
        self.model.observe(Observation(tuple(tokens), shifted, tuple(counts), features), range(len(counts)))
        self.cache.keep(counts)

    def anchors(self) -> list[int]:
        return [int(TEXT[request, length]) for request, length in zip(self.requests, self.lengths, strict=True)]

    def draft(self, tokens: Tensor) -> Tensor:
        """Logits along a chain of the given tokens.  # [B, D] -> [B, D + 1, Vd]"""
        steps = self.model.open(self.anchors(), [True] * len(self.requests))
        logits = [steps.logits, *(steps.extend(tokens[:, j : j + 1]).squeeze(1) for j in range(tokens.shape[1]))]
        return torch.stack(logits, dim=1)

    def expected(self, config: Config, tokens: Tensor) -> Tensor:
        """The same from nothing."""
        rows = []
        for row, (request, length) in enumerate(zip(self.requests, self.lengths, strict=True)):
            text = torch.cat((TEXT[request, : length + 1], tokens[row]))
            rows.append(Dense(config).trained_logits(text, FEATURES[request, :length], tokens.shape[1])[:, -1])
        return torch.stack(rows)

    def select(self, rows: Sequence[int]) -> None:
        self.model.select(rows)
        self.cache.select(rows)
        self.requests = [self.requests[row] for row in rows]

    def restart(self, row: int, request: int) -> None:
        self.model.start(row, [3])
        self.cache.clear(row)
        self.requests[row] = request


def stage(config: Config, requests: Sequence[int] = (0, 1, 2, 3), shift: int = 0) -> Stage:
    return Stage(FeatureModel(network_of(config), TARGET), list(requests), shift=shift)


class Dense:
    """One member of the family, from its named tensors."""

    def __init__(self, config: Config, take: Callable[[str, tuple[int, ...]], Tensor] | None = None) -> None:
        seeded = SeededTensors(config.seed)
        self.config, self.shape = config, config.shape_for(INFO.shape)
        self.take = take or (lambda name, size: seeded.draw(name, size).to(INFO.dtype))

    def trained_logits(self, text: Tensor, features: Tensor, depth: int) -> Tensor:
        """Logits of every step at every position, teacher-forced: training unrolls all positions at once.

        Step j reads the token after i + j at position i. A module that goes on along its own output sees the first
        step's rows up to i and its own later rows at i (EAGLE-3's training-time test); modules with a chain of their
        own see the rows of their own step.

        Args:
            text: # [S + 1 + depth or more]
            features: # [S, F]

        Returns:
            # [depth + 1, S, Vd]
        """
        count, config = len(features), self.config
        serial = isinstance(config, MTPConfig) and (config.num_modules > 1 or config.unrolled is not None)
        rows, hidden = torch.arange(count), self.fuse(features)
        inputs, places, masks, out = [], [], [], []
        for step in range(depth + 1):
            embedded = TARGET.embedding[text[rows + 1 + step]]
            module = step if isinstance(config, MTPConfig) and config.num_modules > 1 else 0
            if isinstance(config, MTPConfig) and config.zero_first:
                embedded = embedded * ((rows + (0 if serial else step)) > 0).unsqueeze(1)
            pair, residual = self.enter(embedded, hidden, module)
            causal = rows.unsqueeze(1) >= rows
            if serial:
                inputs, places, masks = [pair], [rows], [causal]
            else:
                inputs, places = [*inputs, pair], [*places, rows + step]
                masks.append(causal if step == 0 else torch.eye(count, dtype=torch.bool))
            stream = self.block(pair, residual, places, torch.cat(inputs), torch.cat(masks, dim=1), module)
            hidden, scored = self.leave(stream, module)
            out.append(self.score(scored))
        return torch.stack(out)

    def block(
        self, pair: Tensor, residual: Tensor, places: Sequence[Tensor], seen: Tensor, mask: Tensor, module: int
    ) -> Tensor:
        """Attention of the latest rows over all rows so far, and the MLP."""
        shape, name, width = self.shape, self.prefix(module), seen.shape[1]
        inner, outer = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
        split = (-1, shape.head_width)
        queries = (pair @ self.weight(f"{name}.self_attn.q_proj", inner, width).T).unflatten(1, split)
        keys = (seen @ self.weight(f"{name}.self_attn.k_proj", outer, width).T).unflatten(1, split)
        values = (seen @ self.weight(f"{name}.self_attn.v_proj", outer, width).T).unflatten(1, split)
        queries, keys = turn(queries, places[-1], shape), turn(keys, torch.cat(list(places)), shape)
        keys, values = (part.repeat_interleave(shape.num_heads // shape.num_kv_heads, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / shape.head_width**0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values).flatten(1)
        stream = residual + mixed @ self.weight(f"{name}.self_attn.o_proj", WIDTH, inner).T
        normed = self.norm(stream, f"{name}.post_attention_layernorm")
        gate = normed @ self.weight(f"{name}.mlp.gate_proj", shape.mlp_size, WIDTH).T
        up = normed @ self.weight(f"{name}.mlp.up_proj", shape.mlp_size, WIDTH).T
        return stream + (gate * gate.sigmoid() * up) @ self.weight(f"{name}.mlp.down_proj", WIDTH, shape.mlp_size).T

    def prefix(self, module: int) -> str:
        if isinstance(self.config, MTPConfig):
            return f"{self.around(module)}.layers.0"
        return "layers.0" if self.config.variant == 1 else "midlayer"

    def around(self, module: int) -> str:
        assert isinstance(self.config, MTPConfig)
        return f"mtp.{module}" if self.config.num_modules > 1 else "mtp"

    def fuse(self, features: Tensor) -> Tensor:
        config = self.config
        if isinstance(config, MTPConfig) or config.variant == 1:
            return features[:, :WIDTH]
        if config.norm_before_fc:
            features = self.norm(features, "input_norm")
        if config.fc_norm:
            parts = features.split(WIDTH, dim=1)
            features = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=1)
        return features @ self.weight("fc", WIDTH, NUM_TAPS * WIDTH).T

    def enter(self, e: Tensor, h: Tensor, module: int) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual."""
        config = self.config
        if isinstance(config, MTPConfig):
            name = self.around(module)
            parts = [self.norm(e, f"{name}.pre_fc_norm_embedding"), self.norm(h, f"{name}.pre_fc_norm_hidden")]
            if config.order == "hidden_first":
                parts.reverse()
            mixed = torch.cat(parts, dim=1) @ self.weight(f"{name}.fc", WIDTH, 2 * WIDTH).T
            return self.norm(mixed, f"{name}.layers.0.input_layernorm"), mixed
        if config.variant == 1:
            mixed = torch.cat((e, h), dim=1) @ self.weight("fc", WIDTH, 2 * WIDTH).T
            mixed = mixed + self.take("fc.bias", (WIDTH,)) if config.bias else mixed
            return mixed, mixed
        normed = self.norm(h, "midlayer.hidden_norm")
        pair = torch.cat((self.norm(e, "midlayer.input_layernorm"), normed), dim=1)
        return pair, normed if config.norm_before_residual else h

    def leave(self, stream: Tensor, module: int) -> tuple[Tensor, Tensor]:
        """What the next step reads, and what the head reads."""
        config = self.config
        if isinstance(config, MTPConfig):
            normed = self.norm(stream, f"{self.around(module)}.norm")
            return normed if config.recycle == "post_norm" else stream, normed
        if config.variant == 1:
            return stream, stream
        normed = self.norm(stream, "norm")
        return normed if config.norm_output else stream, normed

    def score(self, scored: Tensor) -> Tensor:
        size = getattr(self.config, "draft_vocab_size", None)
        return scored @ (TARGET.head.weight if size is None else self.weight("lm_head", size, WIDTH)).T

    def weight(self, name: str, *size: int) -> Tensor:
        return self.take(f"{name}.weight", size)

    def norm(self, rows: Tensor, name: str) -> Tensor:
        size = (rows.square().mean(-1, keepdim=True) + self.shape.eps).sqrt()
        return rows / size * self.weight(name, rows.shape[-1])


def turn(heads: Tensor, places: Tensor, shape: BlockShape) -> Tensor:
    """Rotary positions as products of complex numbers, angles in float32 as in all models.  # [R, heads, Dh]"""
    half = shape.head_width // 2
    speeds = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_width, 2).float() / shape.head_width)
    angles = torch.outer(places.float(), speeds).to(heads.dtype)
    spun = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((spun.real, spun.imag), dim=-1)
