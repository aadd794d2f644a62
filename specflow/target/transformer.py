"""The native torch decoder for the Llama, Mistral, Qwen2, Qwen3 and SmolLM families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from specflow.target.architecture import Architecture
from specflow.target.base import Cache, TargetInfo, TargetOptions
from specflow.target.cache import KVCache
from specflow.types import BlockShape, Skip, TargetOutput

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["NativeTarget"]

_NOTHING = Skip()

_PROBE_CONTEXTS = (KEY_STEP - 1, 5)
"""Committed rows of the probe's two requests: the first one's next rows lie on both sides of a multiple of 64."""
_PROBE_LAYERS = 8
"""Layers it runs at least, and as many more as it takes to have one of each kind."""
_PROBE_WIDTHS = (2, 5)
"""Rows of its passes, as compared with one row at a time; linears alone are tried at every width."""


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
        size = (arch.vocab_size, arch.hidden_size)
        self.embedding = reader.take("model.embed_tokens.weight", size)
        shape = _block_shape(arch, config)
        self.blocks = [
            reader.block(f"model.layers.{index}", shape, BlockForm(arch.rotary[index], arch.windowed[index]))
            for index in range(arch.num_layers)
        ]
        self._norm = reader.norm("model.norm.weight", arch.hidden_size, arch.eps)
        if arch.tied:
            reader.skip("lm_head.weight")
        self.head = reader.pack(Linear(self.embedding if arch.tied else reader.take("lm_head.weight", size)))
        reader.close(ignored=(".rotary_emb.inv_freq",))
        self._row_invariant = options.row_invariant is not False and self._is_row_invariant(options.dtype)
        if options.row_invariant and not self._row_invariant:
            raise ModelError(
                "target.row_invariant",
                f"passes of {options.dtype} on {options.device} change their bits with the number of rows",
                "bfloat16 on a CPU with oneDNN, or row_invariant: auto",
                "run `specflow doctor` to see which dtypes hold here",
            )
        self.info = TargetInfo(
            name=options.name,
            vocab_size=arch.vocab_size,
            hidden_size=arch.hidden_size,
            num_layers=arch.num_layers,
            context_length=arch.context_length,
            stop_ids=options.stop_ids,
            dtype=options.dtype,
            device=options.device,
            runtime="native",
            exactness="bit-exact" if self._row_invariant else "tie-exact",
            shape=shape,
        )

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        arch = self.architecture
        self._rotary.grow(-(-capacity // KEY_STEP) * KEY_STEP)
        return KVCache(arch.num_layers, batch, arch.num_kv_heads, capacity, arch.head_width, like=self.embedding)

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
        arch = self.architecture
        lengths, dtype = cache.lengths, self.embedding.dtype
        cos, sin = self._rotary.at(positions.reshape(-1), arch.num_heads + arch.num_kv_heads, arch.num_kv_heads)
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
        return self._passes_agree()

    @torch.no_grad()
    def _passes_agree(self) -> bool:
        """Whether attention, norms and all else give the rows of a block the bits they have one at a time."""
        widest, device = max(_PROBE_WIDTHS), self.embedding.device
        tokens = torch.arange(2 * widest, device=device).remainder(self.embedding.shape[0]).view(2, widest)
        starts = torch.tensor(_PROBE_CONTEXTS, device=device).unsqueeze(1)
        positions = starts + torch.arange(widest, device=device)
        cache = self.new_cache(2, KEY_STEP + widest)
        values = torch.sin(torch.arange(cache.data[0].numel(), device=device) * 0.7)
        cache.data[:] = values.view_as(cache.data[0])
        cache.keep(_PROBE_CONTEXTS)
        first, alone, layers = cache.row(0), [], (0, self._probed_layers())
        for row in range(min(_PROBE_WIDTHS)):
            alone.append(self.forward(tokens[:1, row : row + 1], positions[:1, row : row + 1], first, layers=layers))
            first.keep([1])
        first.clear(0)
        first.keep(_PROBE_CONTEXTS[:1])
        blocks = [self.forward(tokens[:, :m], positions[:, :m], cache, layers=layers) for m in _PROBE_WIDTHS]
        return all(_same_first_row(one, block, row) for block in blocks for row, one in enumerate(alone))

    def _probed_layers(self) -> int:
        kinds = [(block.windowed, block.rotary) for block in self.blocks]
        return min(len(kinds), max(_PROBE_LAYERS, *(kinds.index(kind) + 1 for kind in kinds)))


def _block_shape(arch: Architecture, config: PretrainedConfig) -> BlockShape:
    return BlockShape(
        hidden_size=arch.hidden_size,
        mlp_size=config.intermediate_size,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_width=arch.head_width,
        eps=arch.eps,
        rope_theta=float(config.rope_parameters.get("rope_theta", 10000.0)),
    )


def _same_first_row(alone: TargetOutput, block: TargetOutput, row: int) -> bool:
    """Whether a pass of one row equals that row of a block's first request, bit for bit."""
    pairs = ((alone.logits, block.logits), (alone.hidden_pre, block.hidden_pre))
    return all(one is not None and many is not None and torch.equal(one[0, 0], many[0, row]) for one, many in pairs)


def _unflatten(rows: Tensor, batch: int, width: int) -> Tensor:
    """[B * M (padded to two), X] -> [B, M, X]"""
    return rows[: batch * width].view(batch, width, rows.shape[-1])
