"""Standalone drafting: any causal language model that speaks the target's vocabulary drafts for it.

Leviathan et al. 2211.17192; Chen et al. 2302.01318. The draft model knows the target only by its text.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from specflow.device import find_device
from specflow.draft.registry import SourceInfo
from specflow.draft.shapes import ShapeOptions, make_drafter

if TYPE_CHECKING:
    import torch

    from specflow.draft.base import Drafter, SourceContext
    from specflow.draft.onnx_lm import ModelWeights
    from specflow.onnx.graphs import NetworkGraphs
    from specflow.target.base import Target

__all__ = ["SOURCE", "SmallModelConfig", "build", "graphs"]

log = logging.getLogger(__name__)

_OF_A_RANDOM_ONE = ("layers", "width", "heads", "seed")
_QUANTIZED = ("int8", "int4")


class SmallModelConfig(ShapeOptions):
    """Which model drafts, and where it runs."""

    model: str | None = Field(
        None,
        min_length=1,
        description="embedded model, HF id, local folder or .gguf file; null: a small random one, plumbing only",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64", "int8", "int4"] = Field(
        "auto", description="type of the draft model's weights; auto is the target's for a random one"
    )
    runtime: Literal["auto", "torch", "onnx"] = Field(
        "auto", description="what computes it: torch or ONNX Runtime; auto as in target, of a random one the target's"
    )
    device: str | None = Field(
        None, pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$", description="where it runs; null is the target's device"
    )
    layers: int = Field(2, ge=1, description="decoder layers of a random draft model")
    width: int = Field(64, ge=2, description="hidden width of a random draft model")
    heads: int = Field(4, ge=1, description="attention heads of a random draft model")
    seed: int = Field(0, ge=0, description="seed of a random draft model")

    @model_validator(mode="after")
    def _even_heads(self) -> SmallModelConfig:
        if self.width % (2 * self.heads):
            raise ValueError(f"width is {self.width}; expected a multiple of {2 * self.heads} with {self.heads} heads")
        return self

    @model_validator(mode="after")
    def _one_runtime(self) -> SmallModelConfig:
        if self.runtime == "torch" and self.dtype in _QUANTIZED:
            raise ValueError(f"dtype is {self.dtype}, and runtime torch; quantised weights run in ONNX Runtime")
        return self

    @model_validator(mode="after")
    def _sizes_of_a_random_one(self) -> SmallModelConfig:
        set_anyway = [n for n in _OF_A_RANDOM_ONE if getattr(self, n) != type(self).model_fields[n].default]
        if self.model is not None and set_anyway:
            raise ValueError(f"{', '.join(set_anyway)}: options of a random draft model, and model is {self.model}")
        return self


def build(config: SmallModelConfig, context: SourceContext) -> Drafter:
    """The drafter for a loaded target.

    Raises:
        ModelError: The draft model cannot be loaded, or its token ids mean other strings than the target's.
    """
    from specflow.draft.lm_model import LanguageModel
    from specflow.draft.lm_vocabulary import check_vocabularies

    device = context.target.info.device if config.device is None else find_device(config.device, "draft.device")
    if config.model is None:
        log.warning("no draft.model: the draft model is random and accepts almost nothing; the text is exact")
        return make_drafter(config, LanguageModel(_random_model(config, context, device), context), context)
    assert context.load_model is not None, "nobody gave a loader of models"
    model, codec = context.load_model(config.model, config.dtype, str(device), config.runtime)
    if context.codec is not None:
        check_vocabularies(context.codec, codec)
    return make_drafter(config, LanguageModel(model, context), context)


def graphs(config: SmallModelConfig, context: SourceContext) -> NetworkGraphs:
    """The draft model as something that can be written as ONNX graphs.

    Raises:
        ModelError: As in `build`, or graphs do not compute it.
    """
    from specflow.draft.lm_vocabulary import check_vocabularies
    from specflow.draft.onnx_lm import LanguageModelGraphs, read_weights
    from specflow.target.load import load_tokenizer, resolve_model

    if config.model is None:
        return LanguageModelGraphs(_random_weights(config, context.target), context.target.info.vocab_size)
    files = resolve_model(config.model)
    if context.codec is not None:
        check_vocabularies(context.codec, load_tokenizer(files))
    return LanguageModelGraphs(read_weights(files), context.target.info.vocab_size)


def _random_model(config: SmallModelConfig, context: SourceContext, device: torch.device) -> Target:
    """A seeded Llama with the target's vocabulary and context, run by what runs the target."""
    import torch

    from specflow.draft.onnx_lm import DRAFT_MODEL, LanguageModelGraphs, graph_target
    from specflow.onnx.graphs import Precision
    from specflow.target.base import TargetOptions
    from specflow.target.transformer import NativeTarget

    info, weights = context.target.info, _random_weights(config, context.target)
    name = info.weights if config.dtype == "auto" else config.dtype
    quantized = name if name in _QUANTIZED else None
    dtype = info.dtype if config.dtype == "auto" else torch.float32 if quantized else getattr(torch, name)
    options = TargetOptions("random draft model", dtype, device, quantization=quantized)
    in_onnx = context.takes_onnx(config.runtime) or config.dtype in _QUANTIZED
    if not in_onnx or context.graphs is None or dtype == torch.float64:
        return NativeTarget(weights.config, weights.tensors, replace(options, quantization=None))
    network = LanguageModelGraphs(weights, info.vocab_size)
    random = config.model_dump(include={*_OF_A_RANDOM_ONE})
    identity = {"random": random, "vocab_size": info.vocab_size, "context_length": info.context_length}
    path = context.graphs(identity, Precision.named(options.weights), network.write) / f"{DRAFT_MODEL}.onnx"
    return graph_target(weights, options, lambda _: path)


def _random_weights(config: SmallModelConfig, target: Target) -> ModelWeights:
    from transformers import LlamaConfig

    from specflow.draft.nn.weights import SeededTensors
    from specflow.draft.onnx_lm import ModelWeights

    info = target.info
    llama = LlamaConfig(
        vocab_size=info.vocab_size,
        hidden_size=config.width,
        intermediate_size=2 * config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=info.context_length,
    )
    return ModelWeights(llama, SeededTensors(config.seed))


SOURCE = SourceInfo(
    name="small_model",
    config=SmallModelConfig,
    dependency=("ar",),
    build=build,
    axis="small_model",
    offers=("logits", "confidence"),
    law="sampled",
    confidence_from="self",
    graphs=graphs,
)
