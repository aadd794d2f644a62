"""The native torch decoder for the Llama, Mistral, Qwen2, Qwen3 and SmolLM families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from specflow.draft.nn.attention import KEY_STEP, KeyRooms, plan_attention
from specflow.draft.nn.block import Pass
from specflow.draft.nn.linear import Linear, is_row_invariant
from specflow.draft.nn.rope import RotaryTable
from specflow.draft.nn.weights import BlockForm, SeededTensors, WeightReader
from specflow.errors import ModelError
from specflow.target.architecture import Architecture, info_of
from specflow.target.base import Cache, TargetOptions
from specflow.target.cache import KVCache
from specflow.target.invariance import passes_agree
from specflow.types import Skip, TargetOutput

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["NativeTarget"]

_NOTHING = Skip()

_PROBE_LAYERS = 8
"""Layers it runs at least, and as many more as it takes to have one of each kind."""


class NativeTarget:
    """A compact decoder behind the `Target` protocol.

    Rows of all requests are flattened to [B * M, H] between attentions. On CPUs weights are packed for oneDNN.
    """

    def __init__(
        self, config: PretrainedConfig, tensors: Mapping[str, Tensor] | SeededTensors, options: TargetOptions
    ) -> None:
        """Take the weights over, one tensor at a time: a lazy mapping keeps memory at one copy of them.

        Raises:
            CheckpointError: A tensor is missing, left over or has the wrong shape.
            ModelError: Row invariance was asked for and does not hold here.
        """
        self.architecture = arch = Architecture.of(config)
        self._rotary = RotaryTable.of(config, options.dtype, options.device)
        reader = WeightReader(tensors, options.name, torch.empty(0, dtype=options.dtype, device=options.device))
        shape = arch.shape
        size = (arch.vocab_size, shape.hidden_size)
        self.embedding = reader.take("model.embed_tokens.weight", size)
        self.blocks = [
            reader.block(f"model.layers.{index}", shape, BlockForm(arch.rotary[index], arch.windowed[index]))
            for index in range(arch.num_layers)
        ]
        self._norm = reader.norm("model.norm.weight", shape.hidden_size, shape.eps)
        if arch.tied:
            reader.skip("lm_head.weight")
        self.head = reader.pack(Linear(self.embedding if arch.tied else reader.take("lm_head.weight", size)))
        reader.close(ignored=(".rotary_emb.inv_freq",))
        self.info = info_of(arch, options, "native")
        self._row_invariant = options.row_invariant is not False and self._is_row_invariant(options.dtype)
        if options.row_invariant and not self._row_invariant:
            raise ModelError(
                "target.row_invariant",
                f"passes of {options.dtype} on {options.device} change their bits with the number of rows",
                "bfloat16 on a CPU with oneDNN, or row_invariant: auto",
                "run `specflow doctor` to see which dtypes hold here",
            )
        if self._row_invariant:
            self.info = replace(self.info, exactness="bit-exact")

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        shape = self.architecture.shape
        self._rotary.grow(-(-capacity // KEY_STEP) * KEY_STEP)
        heads, width = shape.num_kv_heads, shape.head_width
        return KVCache(self.architecture.num_layers, batch, heads, capacity, width, like=self.embedding)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        mask: Tensor | None = None,
        taps: Sequence[int] = (),
        layers: tuple[int, int] | None = None,
        skip: Skip | None = None,
        hidden_in: Tensor | None = None,
        rows: Literal["all", "last", "none"] = "all",
    ) -> TargetOutput:
        """See `Target.forward`. Prefill passes (rows="last") take the ordinary layouts: both sides share them.

        Outputs are inference tensors: clone them before training on them or writing into them.
        """
        assert isinstance(cache, KVCache)
        batch, width = tokens.shape
        exact = self._row_invariant and rows != "last"
        shared = self._share(positions, cache, mask, exact)
        hidden = F.embedding(tokens.clamp_min(0), self.embedding) if hidden_in is None else hidden_in
        hidden = hidden.reshape(batch * width, -1)
        if exact and hidden.shape[0] == 1:
            hidden = hidden.expand(2, -1)
        tapped = {-1: _unflatten(hidden, batch, width)} if -1 in taps else {}
        first, end = layers or (0, len(self.blocks))
        left_out = skip or _NOTHING
        for index in range(first, end):
            block = self.blocks[index]
            if index not in left_out.attention:
                hidden = hidden + block.attend(hidden, index, shared)
            if index not in left_out.mlp:
                hidden = hidden + block.feed(hidden, shared)
            if index in taps:
                tapped[index] = _unflatten(hidden, batch, width)
        normed = self._norm(hidden)
        scored = {"all": normed, "last": _unflatten(normed, batch, width)[:, -1], "none": normed[:0]}[rows]
        logits = shared.apply(self.head, scored)
        return TargetOutput(
            logits=_unflatten(logits, batch, {"all": width, "last": 1, "none": 0}[rows]),
            taps=tapped,
            hidden_pre=_unflatten(hidden, batch, width),
            hidden_post=_unflatten(normed, batch, width),
        )

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens.clamp_min(0), self.embedding)

    def norm(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self._norm(hidden)
        return normed

    def score(self, normed: Tensor) -> Tensor:
        logits: Tensor = self.head(normed.reshape(-1, normed.shape[-1]))
        return logits.view(*normed.shape[:-1], -1)

    def _share(self, positions: Tensor, cache: KVCache, mask: Tensor | None, exact: bool) -> Pass:
        arch, shape = self.architecture, self.architecture.shape
        lengths, dtype = cache.lengths, self.embedding.dtype
        cos, sin = self._rotary.at(positions.reshape(-1), shape.num_heads + shape.num_kv_heads, shape.num_kv_heads)
        full = windowed = None
        if not all(arch.windowed):
            full = plan_attention(lengths, positions, mask, None, exact, dtype)
        if arch.window is not None:
            windowed = plan_attention(lengths, positions, mask, arch.window, exact, dtype)
        plan = full or windowed
        assert plan is not None, "a model without layers"
        return Pass(cos, sin, KeyRooms(cache.data, plan), full, windowed, split=exact)

    def _is_row_invariant(self, dtype: torch.dtype) -> bool:
        """Try these weights on this device: every linear at every width, then passes at a few."""
        linears = [linear for block in self.blocks for linear in block.linears()]
        if dtype == torch.float64 or not is_row_invariant([*linears, self.head]):
            return False
        self._row_invariant = True  # probed passes take the layouts that shall hold
        return passes_agree(self, self._probed_layers())

    def _probed_layers(self) -> tuple[int, int]:
        kinds = [(block.windowed, block.rotary) for block in self.blocks]
        return 0, min(len(kinds), max(_PROBE_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)))


def _unflatten(rows: Tensor, batch: int, width: int) -> Tensor:
    """[B * M (padded to two), X] -> [B, M, X]"""
    return rows[: batch * width].view(batch, width, rows.shape[-1])
