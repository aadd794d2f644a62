"""A small Llama made for a target: random, or to be trained from scratch; over the target's vocabulary or a part of it.

With the whole vocabulary it is a plain Hugging Face model. With a reduced one its ids are its own: config.json then
has a model_type that no other loader takes for a Llama of the target's vocabulary, and `d2t` says what the ids mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specflow.draft.checkpoint import draft_vocabulary
from specflow.draft.nn.weights import WeightReader
from specflow.draft.onnx_lm import ModelWeights
from specflow.draft.shipped import drafter_path
from specflow.errors import CheckpointError
from specflow.target.architecture import Architecture
from specflow.target.load import read_json, read_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import LlamaConfig

    from specflow.draft.nn.block import DecoderBlock, RMSNorm
    from specflow.draft.nn.weights import SeededTensors
    from specflow.law import DraftVocabulary
    from specflow.target.base import Target
    from specflow.types import BlockShape

__all__ = [
    "EMBEDDING",
    "NewModel",
    "TextLayers",
    "layout_of",
    "llama_config",
    "open_reduced",
    "project_embedding",
    "read_layers",
    "with_beginning",
]

EMBEDDING = "model.embed_tokens.weight"
_REDUCED = "specflow_reduced_llama"
_MLP = 2
"""Width of an MLP, in widths of the model."""
_QUIET = {"self_attn.o_proj.weight": 1, "mlp.down_proj.weight": _MLP}
"""What makes a block's part of the stream, and the widths it reads: it begins no larger than the embedding."""


@dataclass(frozen=True, slots=True)
class NewModel:
    """A draft model before anything computes it, and what its ids mean."""

    weights: ModelWeights
    vocabulary: DraftVocabulary | None = None  # None: they are the target's


def llama_config(target: Target, sizes: tuple[int, int, int], num_ids: int, tied: bool = True) -> LlamaConfig:
    """The configuration of a small Llama with the target's context.

    Args:
        target: The model it drafts for.
        sizes: Layers, width and heads.
        num_ids: Of its vocabulary.
        tied: Its head is its embedding.
    """
    from transformers import LlamaConfig

    layers, width, heads = sizes
    return LlamaConfig(
        vocab_size=num_ids,
        hidden_size=width,
        intermediate_size=_MLP * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=target.info.context_length,
        tie_word_embeddings=tied,
    )


def layout_of(config: LlamaConfig, stop_ids: Sequence[int], reduced: bool) -> dict[str, Any]:
    """The config.json of a trained one, as every transformers reads it."""
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "tie_word_embeddings",
    )
    found = {name: getattr(config, name) for name in names}
    found |= {"rope_theta": Architecture.of(config).shape.rope_theta, "torch_dtype": "float16"}
    if reduced:
        return {"model_type": _REDUCED, **found}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **found,
        "bos_token_id": None,
        "eos_token_id": list(stop_ids),
    }


def open_reduced(model: str, target: Target) -> NewModel | None:
    """A trained model with a reduced vocabulary; None where the name is that of any other model.

    Raises:
        CheckpointError: A file is damaged, or the ids are not those of the target.
    """
    from transformers import LlamaConfig

    path = drafter_path(model)
    if not (path / "config.json").is_file():
        return None
    found = read_json(path / "config.json")
    if found.get("model_type") != _REDUCED:
        return None
    settings = {name: value for name, value in found.items() if name not in ("model_type", "torch_dtype")}
    tensors = dict(read_tensors(path))
    ids = {name: tensors.pop(name) for name in ("d2t",) if name in tensors}
    reader = WeightReader(ids, model, torch.empty(0, device=target.info.device), packed=False)
    try:
        config = LlamaConfig(**settings)
        size = int(config.vocab_size)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}/config.json", f"no Llama: {error}", "what `specflow train` wrote") from error
    vocabulary = draft_vocabulary(reader, size, target)
    if vocabulary is None:
        raise CheckpointError(model, "no d2t, which says what its ids mean", f"{size} offsets")
    return NewModel(ModelWeights(config, tensors), vocabulary)


class TextLayers(nn.Module):
    """A Llama whose head is its embedding, over whole texts.

    Args:
        embedding: # [Vd, H]
        blocks: Its layers.
        norm: The last one.
        shape: Of the layers.
        to_draft: Draft id of every target id; None: they are the same.  # [V]
    """

    def __init__(
        self,
        embedding: Tensor,
        blocks: Sequence[DecoderBlock],
        norm: RMSNorm,
        shape: BlockShape,
        to_draft: Tensor | None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.blocks, self.norm = nn.ModuleList(blocks), norm
        self.shape, self._to_draft = shape, to_draft

    def embed(self, tokens: Tensor) -> Tensor:
        """# [R] target ids -> [R, H]"""
        return F.embedding(tokens if self._to_draft is None else self._to_draft[tokens], self.embedding)

    def score(self, rows: Tensor) -> Tensor:
        """# [R, H] -> [R, Vd]"""
        return F.linear(self.norm(rows), self.embedding)


def read_layers(reader: WeightReader, config: LlamaConfig, vocabulary: DraftVocabulary | None) -> TextLayers:
    """The layers of a checkpoint under their published names.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    arch = Architecture.of(config)
    shape = arch.shape
    return TextLayers(
        reader.take(EMBEDDING, (arch.vocab_size, shape.hidden_size)),
        [reader.block(f"model.layers.{index}", shape) for index in range(arch.num_layers)],
        reader.norm("model.norm.weight", shape.hidden_size, shape.eps),
        shape,
        None if vocabulary is None else vocabulary.from_target.clamp_min(0),
    )


def with_beginning(tensors: SeededTensors, config: LlamaConfig, rows: Tensor) -> SeededTensors:
    """First weights: the target's embedding in its principal directions, and blocks that add little to it.

    Args:
        tensors: Of the rest; what they hold stays.
        config: Of the model.
        rows: The target's embedding of the model's ids.  # [Vd, H]
    """
    width = config.hidden_size
    given = {EMBEDDING: project_embedding(rows, width)}
    for layer in range(config.num_hidden_layers):
        for part, inputs in _QUIET.items():
            name = f"model.layers.{layer}.{part}"
            given[name] = tensors.draw(name, (width, inputs * width)) * width**-0.5
    return tensors.holding(given)


def project_embedding(rows: Tensor, width: int) -> Tensor:
    """The principal directions of embedding rows, scaled to rows of length 1 in the mean.

    Args:
        rows: # [Vd, H]
        width: Directions to keep; beyond H they are zero.

    Returns:
        # [Vd, width] float32
    """
    centred = rows.double() - rows.double().mean(0)
    directions = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :width]
    kept = F.pad(centred @ directions, (0, width - directions.shape[1]))
    scaled: Tensor = kept / kept.norm(dim=1).mean()
    return scaled.float()
