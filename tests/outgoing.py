"""Drafters of every source with random weights, as they lie in a directory, and the tiny target they are for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tiny import EOS, VOCAB, tiny_model
from torch import Tensor
from transformers import LlamaForCausalLM

from specflow.checkpoint.write_drafter import StoredDrafter
from specflow.checkpoint.write_target import Verifier
from specflow.draft.base import SourceContext
from specflow.draft.borrowed import TargetTables
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.registry import discover
from specflow.target.base import TargetOptions
from specflow.target.huggingface import block_shape
from specflow.target.transformer import NativeTarget

LAYERS, K = 8, 4
OFFICIAL_TAPS = (1, LAYERS // 2 - 1, LAYERS - 4)
IDS = torch.arange(1, VOCAB, 3)
"""Target ids of a reduced vocabulary."""

MODEL = tiny_model(layers=LAYERS)
WEIGHTS: dict[str, Tensor] = dict(MODEL.state_dict())
TARGET = NativeTarget(
    MODEL.config, dict(WEIGHTS), TargetOptions("tiny", torch.float32, torch.device("cpu"), stop_ids=(EOS,))
)
TABLES = TargetTables(TARGET)
WIDTH = TARGET.info.hidden_size


def verifier_of(model: LlamaForCausalLM) -> Verifier:
    """What `--target` would read of a model."""
    config = model.config
    return Verifier(
        reference="org/tiny",
        architectures=("LlamaForCausalLM",),
        shape=block_shape(config),
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        context_length=config.max_position_embeddings,
        tied=False,
        bent="",
        tensors=dict(model.state_dict()),
    )


VERIFIER = verifier_of(MODEL)


def given_ids() -> dict[str, Tensor]:
    """`d2t` of the reduced vocabulary."""
    return {"d2t": IDS - torch.arange(len(IDS))}


def stored(source: str, given: Mapping[str, Tensor] | None = None, **options: object) -> StoredDrafter:
    """A drafter of a source with these options.

    Args:
        source: Its name.
        given: Tensors that are not random.
        options: Of the source.
    """
    info = discover()[source]
    config = info.config.model_validate(options)
    dependency = "parallel+corrector" if getattr(config, "corrector", None) else info.dependency[0]
    if getattr(config, "corrector", None) is None and "parallel" in info.dependency:
        dependency = "parallel"
    context = SourceContext(TABLES, K, dependency)  # type: ignore[arg-type]
    assert info.trainable is not None
    made = info.trainable(config, context, SeededTensors(5, given))
    return StoredDrafter(source, config, made.state(), "the drafter", K)
