"""Any causal language model of `transformers` behind the `Target` protocol.

The model runs as it is; ours are the cache it writes to, the masks and the positions. A pass gets an explicit 4-D
additive mask and explicit positions, so ragged batches, trees and rollback are exact. What a model's structure does
not allow is refused when it is loaded, by trying it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from specflow.draft.nn.attention import plan_attention
from specflow.errors import CheckpointError, ModelError
from specflow.target.architecture import SLIDING, attention_kinds, recurrent_reason
from specflow.target.base import Cache, TargetInfo, TargetOptions
from specflow.target.cache import KVCache
from specflow.target.stack import DecoderStack
from specflow.types import BlockShape, Skip, TargetOutput

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


__all__ = ["HuggingFaceTarget", "block_shape", "load_huggingface"]

log = logging.getLogger(__name__)

_CACHE_NAMES = ("cache", "past_key_values")
"""What models call the cache argument: transformers renamed it in 5.24."""


class HuggingFaceTarget:
    """A `transformers` causal language model behind the `Target` protocol. Not re-entrant: hooks are set for a pass."""

    def __init__(self, model: PreTrainedModel, options: TargetOptions) -> None:
        """Take over a loaded model, already on its device and in its dtype.

        Raises:
            ModelError: It does not honour explicit masks, positions and caches.
        """
        config = model.config.get_text_config(decoder=True)
        self._model: Any = model.train(False).requires_grad_(False)
        kinds, window = attention_kinds(config)
        self._windows = {kind: window if kind == SLIDING else None for kind in kinds}
        self._cache_name, self._cuts_logits = _read_signature(model)
        self._options, self._num_layers = options, config.num_hidden_layers
        logits = self._study()
        self.info = TargetInfo(
            name=options.name,
            vocab_size=logits.shape[-1],
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            context_length=_context_length(config),
            stop_ids=options.stop_ids,
            dtype=options.dtype,
            weights=options.weights,
            device=options.device,
            runtime="transformers",
            exactness="tie-exact",
            shape=block_shape(config),
        )
        self._compare_with_plain()

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        heads = max(shape[1] for shapes in self._shapes for shape in shapes)
        width = max(shape[3] for shapes in self._shapes for shape in shapes)
        like = torch.empty(0, dtype=self._options.dtype, device=self._options.device)
        return KVCache(self._num_layers, batch, heads, capacity, width, like=like)

    @torch.no_grad()
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
        """See `Target.forward`."""
        assert isinstance(cache, KVCache)
        span = layers or (0, self._num_layers)
        wanted = [tap for tap in taps if tap < 0 or span[0] <= tap < span[1]]
        lengths = cache.lengths
        arguments: dict[str, Any] = {
            "input_ids": tokens.clamp_min(0),
            "position_ids": positions,
            "attention_mask": self._masks(lengths, positions, mask),
            self._cache_name: TransformersCache(
                layers=[_PassLayer(*cache.layer(index), lengths) for index in range(self._num_layers)]
            ),
        }
        if rows != "all" and self._cuts_logits:
            arguments["logits_to_keep"] = 1
        with self._stack.watch(wanted, span[0], hidden_in) as seen, self._stack.leave_out(span, skip or Skip()):
            logits = self._model(**arguments, use_cache=True, return_dict=True).logits
        return TargetOutput(
            logits={"all": logits, "last": logits[:, -1:], "none": logits[:, :0]}[rows],
            taps=seen.taps,
            hidden_pre=seen.hidden_pre,
            hidden_post=seen.hidden_post,
        )

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._model.get_input_embeddings()(tokens.clamp_min(0))
        return embedded

    def norm(self, hidden: Tensor) -> Tensor:
        return self._stack.final_norm(hidden)

    def score(self, normed: Tensor) -> Tensor:
        logits: Tensor = self._model.get_output_embeddings()(normed)
        cap = getattr(self._model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        return logits if cap is None else (logits / cap).tanh() * cap

    def _masks(self, lengths: Sequence[int], positions: Tensor, mask: Tensor | None) -> Tensor | dict[str, Tensor]:
        """Additive masks over committed and new slots: one, or one for each kind of layer.  # [B, 1, M, S]"""
        masks = {
            kind: plan_attention(lengths, positions, mask, window, False, self._options.dtype).biases[0]
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.no_grad()
    def _study(self) -> Tensor:
        """Run two tokens to find the layers and the shapes of their key and value rows; returns the logits."""
        tokens = torch.tensor([[0, 1]], device=self._options.device)
        recorders: list[_Recorder] = []
        shapes: list[list[torch.Size]] = []  # of the first run: later ones skip branches
        logits: list[Tensor] = []

        def run() -> None:
            recorders[:] = [_Recorder([0]) for _ in range(self._num_layers)]
            arguments: dict[str, Any] = {"attention_mask": self._masks([0], tokens, None), "position_ids": tokens}
            arguments[self._cache_name] = TransformersCache(layers=list(recorders))
            logits[:] = [self._model(tokens, **arguments, use_cache=True, return_dict=True).logits]
            shapes[:] = shapes or [recorder.seen for recorder in recorders]

        try:
            self._stack = DecoderStack(self._model, self._num_layers, run)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise _not_served(self._options, f"a pass with an explicit mask and cache fails: {error}") from error
        odd = [index for index, seen in enumerate(shapes) if len(seen) != 2]
        if odd:
            raise _not_served(self._options, f"layer {odd[0]} keeps no key and value rows of its own")
        self._shapes = shapes
        return logits[0]

    @torch.no_grad()
    def _compare_with_plain(self) -> None:
        """Score a small ragged tree and compare with the model's own pass over each path.

        Models whose positions follow the slots of the cache, or that ignore masks, are found out here.
        """
        device = self._options.device
        tokens = torch.arange(2, 9, device=device).remainder(self.info.vocab_size).unsqueeze(0)
        plain = self._model(tokens, use_cache=False, return_dict=True).logits[0]
        cache = self.new_cache(2, 16)
        starts = (3, 1)
        for row, start in enumerate(starts):
            chunk = torch.arange(start, device=device).unsqueeze(0)
            self.forward(tokens[:, :start], chunk, cache.row(row), rows="last")
            cache.row(row).keep([start])
        # The anchor, a rejected sibling, then two tokens below the anchor.
        block = torch.stack([tokens[0, [start, 6, start + 1, start + 2]] for start in starts])
        positions = torch.tensor([[start, start + 1, start + 1, start + 2] for start in starts], device=device)
        mask = torch.ones(4, 4, dtype=torch.bool, device=device).tril()
        mask[2:, 1] = False
        scored = self.forward(block, positions, cache, mask=mask.unsqueeze(0)).logits
        assert scored is not None
        expected = torch.stack([plain[start + 2] for start in starts])
        error = float((scored[:, 3] - expected).abs().max())
        allowed = (1e-3 if self._options.dtype.itemsize >= 4 else 0.1) * float(expected.abs().max())
        if not error <= allowed:
            found = f"a ragged tree pass differs from the plain one by {error:.1e}, more than {allowed:.1e}"
            raise _not_served(self._options, found)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What transformers asks of any cache layer; masks and positions are explicit, so sizes are a courtesy."""

    is_sliding = False

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lengths, self.is_initialized = lengths, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: memory is the target's cache."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(self.lengths) + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.lengths)

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """`get_max_length` under the name it had before transformers 5.24."""
        return -1


class _PassLayer(_Layer):  # type: ignore[no-untyped-call]
    """Writes a pass's rows above each request's committed rows and shows the slots that the mask speaks of."""

    def __init__(self, key_slots: Tensor, value_slots: Tensor, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.key_slots, self.value_slots = key_slots, value_slots

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """key_states [B, Hk, M, Dh] -> keys [B, Hk, S, Dh], and likewise for values"""
        return self._write(self.key_slots, key_states), self._write(self.value_slots, value_states)

    def _write(self, slots: Tensor, fresh: Tensor) -> Tensor:
        _, heads, rows, width = fresh.shape
        for b, length in enumerate(self.lengths):
            slots[b, :heads, length : length + rows, :width] = fresh[b]
        return slots[:, :heads, : max(self.lengths) + rows, :width]


class _Recorder(_Layer):  # type: ignore[no-untyped-call]
    """Notes the shapes of a layer's rows."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.seen: list[torch.Size] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.seen += [key_states.shape, value_states.shape]
        return key_states, value_states


def load_huggingface(directory: Path, options: TargetOptions, trust_remote_code: bool = False) -> HuggingFaceTarget:
    """Load a model directory as a target.

    Raises:
        ModelError: Its state cannot be rolled back, transformers cannot load it, or the adapter cannot serve it.
        CheckpointError: The weight files lack tensors of the model, or hold them in another shape.
    """
    local = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    loader: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(directory, **local)
        _refuse(config.get_text_config(decoder=True), options)
        model, report = loader.from_pretrained(
            directory, config=config, dtype=options.dtype, output_loading_info=True, **local
        )
    except (OSError, ValueError, LookupError, ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        found = f"transformers cannot load {directory}: {reason}"
        raise ModelError(options.name, found, "a directory with a causal language model") from error
    absent = sorted(str(key) for key in {*report["missing_keys"], *report["mismatched_keys"]})
    if absent:
        found = f"{len(absent)} tensors are missing or have another shape: {', '.join(absent[:4])}"
        raise CheckpointError(options.name, found)
    if extra := report["unexpected_keys"]:
        log.warning("%s: %d tensors of the files are not part of the model", options.name, len(extra))
    return HuggingFaceTarget(model.to(options.device), options)


def _refuse(config: PretrainedConfig, options: TargetOptions) -> None:
    if reason := recurrent_reason(config):
        raise _not_served(options, reason)
    if options.row_invariant:
        raise ModelError(
            "target.row_invariant",
            "the transformers adapter cannot promise it",
            "row_invariant: auto or false",
            "use implementation: native where the model's family allows it",
        )


def _not_served(options: TargetOptions, reason: str) -> ModelError:
    return ModelError(
        options.name,
        reason,
        "an attention-only causal language model that honours explicit masks, positions and a cache",
        "choose another model; this one can only be decoded by the package that made it",
    )


def _read_signature(model: PreTrainedModel) -> tuple[str, bool]:
    """The name of the cache argument, and whether the model can score fewer rows than it runs."""
    names = inspect.signature(model.forward).parameters
    lacking = [name for name in ("attention_mask", "position_ids") if name not in names]
    cache_name = next((name for name in _CACHE_NAMES if name in names), None)
    if lacking or cache_name is None:
        lacking += [] if cache_name else [_CACHE_NAMES[0]]
        found = f"{type(model).__name__} takes no {', '.join(lacking)}"
        raise ModelError("target.model", found, "explicit masks, positions and a cache")
    return cache_name, "logits_to_keep" in names


def block_shape(config: PretrainedConfig) -> BlockShape:
    """Sizes of a model's decoder blocks, as far as its configuration names them."""
    heads: int = config.num_attention_heads
    parameters = getattr(config, "rope_parameters", None) or {}
    return BlockShape(
        hidden_size=config.hidden_size,
        mlp_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // heads,
        eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_theta=float(parameters.get("rope_theta", 10000.0)),
    )


def _context_length(config: PretrainedConfig) -> int:
    """Most positions for which rotary frequencies do not depend on the length of what is being decoded.

    Beyond them ("dynamic" and "longrope" scaling) cached keys would have to be rotated again.
    """
    longest: int = config.max_position_embeddings
    parameters = getattr(config, "rope_parameters", None) or {}
    each_kind = [values for values in parameters.values() if isinstance(values, dict)]
    for values in (parameters, *each_kind):
        if values.get("rope_type") in ("dynamic", "longrope"):
            longest = min(longest, values.get("original_max_position_embeddings") or longest)
    return longest
