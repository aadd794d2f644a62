"""Multi-token prediction (DeepSeek-V3, 2412.19437): the target's own extra blocks draft from its last hidden state.

The modules of different families are alike in tensors and differ in what is normed when; a wrong choice drafts without
error and is hardly ever accepted, so every choice is an option. Weights are named as in Qwen3-Next: `mtp.fc`,
`mtp.pre_fc_norm_{hidden,embedding}`, `mtp.layers.0.*`, `mtp.norm`; of several modules `mtp.{j}.fc` and so on. The
embedding is the target's, and so is the head, unless the checkpoint has an `lm_head` (and `d2t`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from specflow.draft.feature_options import FeatureOptions
from specflow.draft.registry import SourceInfo

if TYPE_CHECKING:
    from specflow.draft.base import Drafter, SourceContext
    from specflow.draft.nn.feature_step import FeatureStep, NetworkParts
    from specflow.draft.nn.weights import SeededTensors, WeightReader
    from specflow.draft.onnx_feature import FeatureGraphs
    from specflow.draft.trainable import Trainable
    from specflow.target.base import Target
    from specflow.types import BlockShape

__all__ = ["SOURCE", "MTPConfig", "build", "graphs", "read_network", "trainable"]


class MTPConfig(FeatureOptions):
    """Which modules there are, and what is normed when."""

    num_modules: int = Field(
        1, ge=1, le=64, description="1: one module, run again for every position; more: one a draft position"
    )
    unrolled: int | None = Field(
        None,
        ge=2,
        le=64,
        description="draft positions the one module serves with a causal chain each, as FastMTP trains it; "
        "none: it goes on along its own output",
    )
    order: Literal["embedding_first", "hidden_first"] = Field(
        "embedding_first", description="what the first half of fc reads; the paper writes the hidden state first"
    )
    hidden: Literal["pre_norm", "post_norm"] = Field(
        "post_norm", description="the target's last hidden state before or after its final norm"
    )
    recycle: Literal["pre_norm", "post_norm"] = Field(
        "post_norm", description="a module's output as the next one reads it: before or after its final norm"
    )
    zero_first: bool = Field(False, description="the embedding at position 0 is zero")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="size of a reduced draft vocabulary (FastMTP); none: the target's"
    )
    own_head: bool | None = Field(
        None,
        description="a head of its own; false: the target's, its rows of the draft vocabulary; none: where the "
        "checkpoint has one or the vocabulary is reduced",
    )

    @model_validator(mode="after")
    def _one_module_to_unroll(self) -> MTPConfig:
        if self.unrolled is not None and self.num_modules > 1:
            raise ValueError(f"unrolled repeats one module, and num_modules is {self.num_modules}; set one of them")
        return self


def read_network(config: MTPConfig, reader: WeightReader, target: Target) -> NetworkParts:
    """The modules from their tensors."""
    from specflow.draft.base import Needs
    from specflow.draft.borrowed import draft_head
    from specflow.draft.checkpoint import draft_vocabulary
    from specflow.draft.nn.feature_step import NetworkParts

    shape = config.shape_for(target.info.shape)
    several = config.num_modules > 1
    prefixes = [f"mtp.{index}" for index in range(config.num_modules)] if several else ["mtp"]
    steps = [_read_step(config, reader, shape, prefix) for prefix in prefixes]
    vocabulary = draft_vocabulary(reader, config.draft_vocab_size, target)
    return NetworkParts(
        steps=steps * (config.unrolled or 1),
        shape=shape,
        needs=Needs(hidden_pre=config.hidden == "pre_norm", hidden_post=config.hidden == "post_norm"),
        head=draft_head(reader, config.own_head, vocabulary, target, shape.hidden_size),
        vocabulary=vocabulary,
    )


def _read_step(config: MTPConfig, reader: WeightReader, shape: BlockShape, prefix: str) -> FeatureStep:
    from specflow.draft.nn.feature_step import FeatureStep, StepForm, StepParts

    width, eps = shape.hidden_size, shape.eps
    parts = StepParts(
        block=reader.block(f"{prefix}.layers.0", shape),
        fc=reader.linear(f"{prefix}.fc", width, 2 * width, bias=False),
        embedding_norm=reader.norm(f"{prefix}.pre_fc_norm_embedding.weight", width, eps),
        hidden_norm=reader.norm(f"{prefix}.pre_fc_norm_hidden.weight", width, eps),
        norm=reader.norm(f"{prefix}.norm.weight", width, eps),
    )
    form = StepForm(
        hidden_first=config.order == "hidden_first",
        recycle_normed=config.recycle == "post_norm",
        zero_first=config.zero_first,
    )
    return FeatureStep(parts, form)


def build(config: MTPConfig, context: SourceContext) -> Drafter:
    """The drafter for a loaded target; see `feature_drafter`."""
    from specflow.draft.feature_model import feature_drafter

    return feature_drafter(config, context, read_network)


def graphs(config: MTPConfig, context: SourceContext) -> FeatureGraphs:
    """The network as something that can be written as ONNX graphs."""
    from specflow.draft.feature_model import feature_graphs

    return feature_graphs(config, context, read_network)


def trainable(config: MTPConfig, context: SourceContext, tensors: SeededTensors) -> Trainable:
    """The network with weights that can be trained."""
    from specflow.draft.feature_model import feature_trainable

    return feature_trainable(config, context, tensors, read_network)


SOURCE = SourceInfo(
    name="mtp",
    config=MTPConfig,
    dependency=("ar",),
    build=build,
    axis="target_features",
    offers=("logits", "confidence"),
    law="sampled",
    reads=("tokens", "features"),
    confidence_from="self",
    graphs=graphs,
    trainable=trainable,
)
