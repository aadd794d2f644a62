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
    from transformers import LlamaConfig

    from specflow.draft.base import Drafter, SourceContext
    from specflow.draft.lm_new import NewModel
    from specflow.draft.nn.weights import SeededTensors
    from specflow.draft.trainable import Trainable
    from specflow.onnx.graphs import NetworkGraphs
    from specflow.target.base import Target

__all__ = ["SOURCE", "SmallModelConfig", "build", "graphs", "trainable"]

log = logging.getLogger(__name__)

_OF_A_NEW_ONE = ("layers", "width", "heads", "draft_vocab_size", "seed")
_QUANTIZED = ("int8", "int4")


class SmallModelConfig(ShapeOptions):
    """Which model drafts, and where it runs."""

    model: str | None = Field(
        None,
        min_length=1,
        description="embedded model, HF id, local folder or .gguf file; null: a small new one, to be trained; until "
        "then it is random, plumbing only",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64", "int8", "int4"] = Field(
        "auto", description="type of the draft model's weights; auto is the target's for a new one"
    )
    runtime: Literal["auto", "torch", "onnx"] = Field(
        "auto", description="what computes it: torch or ONNX Runtime; auto as in target, of a new one the target's"
    )
    device: str | None = Field(
        None, pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$", description="where it runs; null is the target's device"
    )
    layers: int = Field(2, ge=1, description="decoder layers of a new draft model")
    width: int = Field(64, ge=2, description="hidden width of a new draft model")
    heads: int = Field(4, ge=1, description="attention heads of a new draft model")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="size of a reduced vocabulary of a new draft model; none: the target's"
    )
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
    def _sizes_of_a_new_one(self) -> SmallModelConfig:
        set_anyway = [n for n in _OF_A_NEW_ONE if getattr(self, n) != type(self).model_fields[n].default]
        if self.model is not None and set_anyway:
            raise ValueError(f"{', '.join(set_anyway)}: options of a new draft model, and model is {self.model}")
        return self


def build(config: SmallModelConfig, context: SourceContext) -> Drafter:
    """The drafter for a loaded target.

    Raises:
        ModelError: The draft model cannot be loaded, or its token ids mean other strings than the target's.
    """
    from specflow.draft.lm_model import LanguageModel
    from specflow.draft.lm_new import open_reduced
    from specflow.draft.lm_vocabulary import check_vocabularies

    device = context.target.info.device if config.device is None else find_device(config.device, "draft.device")
    if config.model is None:
        log.warning("no draft.model: the draft model is random and accepts almost nothing; the text is exact")
    made = _random_model(config, context.target) if config.model is None else open_reduced(config.model, context.target)
    if made is not None:
        return make_drafter(
            config, LanguageModel(_run(made, config, context, device), context, made.vocabulary), context
        )
    assert context.load_model is not None, "nobody gave a loader of models"
    assert config.model is not None
    model, codec = context.load_model(config.model, config.dtype, str(device), config.runtime)
    if context.codec is not None:
        check_vocabularies(context.codec, codec)
    return make_drafter(config, LanguageModel(model, context), context)


def graphs(config: SmallModelConfig, context: SourceContext) -> NetworkGraphs:
    """The draft model as something that can be written as ONNX graphs.

    Raises:
        ModelError: As in `build`, or graphs do not compute it.
    """
    from specflow.draft.lm_new import open_reduced
    from specflow.draft.lm_vocabulary import check_vocabularies
    from specflow.draft.onnx_lm import LanguageModelGraphs, read_weights
    from specflow.errors import ModelError
    from specflow.target.load import load_tokenizer, resolve_model

    made = _random_model(config, context.target) if config.model is None else open_reduced(config.model, context.target)
    if made is not None:
        if made.vocabulary is not None:
            found = f"a reduced vocabulary of {len(made.vocabulary.to_target)}: its graphs would read ids of their own"
            raise ModelError("draft.model", found, "a draft model with the target's vocabulary")
        return LanguageModelGraphs(made.weights, context.target.info.vocab_size)
    assert config.model is not None
    files = resolve_model(config.model)
    if context.codec is not None:
        check_vocabularies(context.codec, load_tokenizer(files))
    return LanguageModelGraphs(read_weights(files), context.target.info.vocab_size)


def trainable(config: SmallModelConfig, context: SourceContext, tensors: SeededTensors) -> Trainable:
    """A new model with weights that can be trained; its embedding begins as the target's, in fewer dimensions.

    Raises:
        GraphError: The recipe names a model.
    """
    from specflow.draft.base import Needs
    from specflow.draft.borrowed import borrowed_embedding
    from specflow.draft.checkpoint import draft_vocabulary, trained_reader
    from specflow.draft.lm_new import EMBEDDING, layout_of, read_layers, with_beginning
    from specflow.draft.trainable import Trainable
    from specflow.errors import GraphError

    if config.model is not None:
        hint = "leave draft.model out; --from goes on from trained weights"
        raise GraphError("draft.model", f"{config.model}, a model that is there already", "a new one", hint)
    target = context.target
    llama = _config(config, target)
    if EMBEDDING not in tensors:
        vocabulary = draft_vocabulary(trained_reader(tensors, target), config.draft_vocab_size, target)
        rows = borrowed_embedding(target)
        tensors = with_beginning(tensors, llama, rows if vocabulary is None else rows[vocabulary.to_target])
    reader = trained_reader(tensors, target)
    vocabulary = draft_vocabulary(reader, config.draft_vocab_size, target)
    layers = read_layers(reader, llama, vocabulary)
    reader.close()
    codec = context.codec
    return Trainable(
        layers,
        config,
        reader,
        Needs(),
        vocabulary,
        layout=layout_of(llama, target.info.stop_ids, vocabulary is not None),
        accompany=None if codec is None or vocabulary is not None else codec.save,
    )


def _random_model(config: SmallModelConfig, target: Target) -> NewModel:
    """A seeded Llama with the target's context."""
    import torch

    from specflow.draft.lm_new import NewModel
    from specflow.draft.nn.weights import SeededTensors
    from specflow.draft.onnx_lm import ModelWeights
    from specflow.law import DraftVocabulary

    # With the head tied to the embedding, a model that has learnt nothing says the token it has just read.
    weights = ModelWeights(_config(config, target, tied=False), SeededTensors(config.seed))
    size, full = config.draft_vocab_size, target.info.vocab_size
    if size is None:
        return NewModel(weights)
    return NewModel(weights, DraftVocabulary(torch.arange(size, device=target.info.device) * full // size, full))


def _config(config: SmallModelConfig, target: Target, tied: bool = True) -> LlamaConfig:
    from specflow.draft.lm_new import llama_config
    from specflow.errors import GraphError

    size, full = config.draft_vocab_size, target.info.vocab_size
    if size is not None and size > full:
        raise GraphError("draft.draft_vocab_size", f"{size}", f"at most the target's {full}")
    return llama_config(target, (config.layers, config.width, config.heads), size or full, tied)


def _run(made: NewModel, config: SmallModelConfig, context: SourceContext, device: torch.device) -> Target:
    """What computes a model whose weights lie ready: that which runs the target."""
    import torch

    from specflow.draft.checkpoint import weights_identity
    from specflow.draft.onnx_lm import DRAFT_MODEL, LanguageModelGraphs, graph_target
    from specflow.onnx.graphs import Precision
    from specflow.target.base import TargetOptions
    from specflow.target.transformer import NativeTarget

    info, weights = context.target.info, made.weights
    name = info.weights if config.dtype == "auto" else config.dtype
    quantized = name if name in _QUANTIZED else None
    dtype = info.dtype if config.dtype == "auto" else torch.float32 if quantized else getattr(torch, name)
    called = "random draft model" if config.model is None else config.model
    options = TargetOptions(called, dtype, device, quantization=quantized)
    in_onnx = context.takes_onnx(config.runtime) or config.dtype in _QUANTIZED
    if not in_onnx or context.graphs is None or dtype == torch.float64:
        return NativeTarget(weights.config, weights.tensors, replace(options, quantization=None))
    network = LanguageModelGraphs(weights, info.vocab_size)
    if config.model is None:
        random = config.model_dump(include={*_OF_A_NEW_ONE})
        identity = {"random": random, "vocab_size": info.vocab_size, "context_length": info.context_length}
    else:
        identity = {"checkpoint": weights_identity(config.model, 0)}
    path = context.graphs(identity, Precision.named(options.weights), network.write) / f"{DRAFT_MODEL}.onnx"
    return graph_target(weights, options, lambda _: path)


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
    trainable=trainable,
    checkpoint="model",
    of_new=_OF_A_NEW_ONE,
)
