"""EAGLE: one block that continues the target's features.

Variant 1 (2401.15077) predicts the last hidden state and borrows the target's head; EAGLE-2 (2406.16858) is the same
network with a tree that grows where the draft is sure. Variant 3 (2503.01840) reads several layers, is trained on its
own output, and may have its own head over a reduced vocabulary; `fc_norm` and `norm_output` make it EAGLE-3.1.
Weights: the published names, `fc`, `layers.0.*` for variant 1; `fc`, `midlayer.*`, `norm`, `lm_head`, `d2t` for 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from specflow.draft.feature_options import FeatureOptions
from specflow.draft.registry import SourceInfo

if TYPE_CHECKING:
    from specflow.draft.base import Drafter, SourceContext
    from specflow.draft.nn.feature_step import Fusion, NetworkParts
    from specflow.draft.nn.weights import SeededTensors, WeightReader
    from specflow.draft.onnx_feature import FeatureGraphs
    from specflow.draft.trainable import Trainable
    from specflow.target.base import Target
    from specflow.types import BlockShape

__all__ = ["SOURCE", "EagleConfig", "build", "default_taps", "graphs", "read_network", "trainable"]

_OF_VARIANT_3 = (
    "taps",
    "norm_before_fc",
    "fc_norm",
    "norm_before_residual",
    "norm_output",
    "draft_vocab_size",
    "own_head",
)


class EagleConfig(FeatureOptions):
    """Which EAGLE it is."""

    variant: Literal[1, 3] = Field(
        3, description="1: last hidden state (EAGLE-1 and EAGLE-2); 3: several layers (EAGLE-3)"
    )
    bias: bool = Field(True, description="variant 1: fc adds a bias")
    taps: tuple[int, ...] = Field(
        (), description="variant 3: target layers whose output it reads (-1: embedding); empty: low, middle, high"
    )
    norm_before_fc: bool = Field(False, description="variant 3: one norm over all taps, before fc")
    fc_norm: bool = Field(False, description="variant 3: a norm for each tap, before fc (EAGLE-3.1)")
    norm_before_residual: bool = Field(False, description="variant 3: the residual is the normed feature")
    norm_output: bool = Field(False, description="variant 3: the next step reads the normed output (EAGLE-3.1)")
    draft_vocab_size: int | None = Field(
        None, ge=1, description="variant 3: size of a reduced draft vocabulary; none: the target's"
    )
    own_head: bool | None = Field(
        None,
        description="variant 3: a head of its own; false: the target's, its rows of the draft vocabulary; none: where "
        "the checkpoint has one or the vocabulary is reduced",
    )

    @model_validator(mode="after")
    def _of_one_variant(self) -> EagleConfig:
        wrong = [name for name in _OF_VARIANT_3 if getattr(self, name) != type(self).model_fields[name].default]
        if self.variant == 1 and wrong:
            raise ValueError(f"{', '.join(wrong)}: options of variant 3, and the variant is 1")
        if self.variant == 3 and not self.bias:
            raise ValueError("bias: an option of variant 1, and the variant is 3, whose fc adds none")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm norms each tap and norm_before_fc all at once; set one of them")
        return self


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The layers EAGLE-3 reads where nobody says, as outputs of 0-based layers.

    The official code keeps what enters layers 2, L // 2 and L - 3. Shallow targets repeat a layer.
    """
    return tuple(min(max(entered - 1, 0), num_layers - 1) for entered in (2, num_layers // 2, num_layers - 3))


def read_network(config: EagleConfig, reader: WeightReader, target: Target) -> NetworkParts:
    """The network from its tensors."""
    shape = config.shape_for(target.info.shape)
    return _read_first(config, reader, shape) if config.variant == 1 else _read_third(config, reader, shape, target)


def _read_first(config: EagleConfig, reader: WeightReader, shape: BlockShape) -> NetworkParts:
    from specflow.draft.base import Needs
    from specflow.draft.nn.feature_step import FeatureStep, NetworkParts, StepForm, StepParts
    from specflow.draft.nn.weights import BlockForm

    width = shape.hidden_size
    parts = StepParts(
        block=reader.block("layers.0", shape, BlockForm(input_norm=False)),
        fc=reader.linear("fc", width, 2 * width, bias=config.bias),
    )
    return NetworkParts([FeatureStep(parts, StepForm())], shape, Needs(hidden_post=True))


def _read_third(config: EagleConfig, reader: WeightReader, shape: BlockShape, target: Target) -> NetworkParts:
    from specflow.draft.base import Needs
    from specflow.draft.borrowed import draft_head
    from specflow.draft.checkpoint import draft_vocabulary
    from specflow.draft.nn.feature_step import FeatureStep, NetworkParts, StepForm, StepParts
    from specflow.draft.nn.weights import BlockForm

    width, eps = shape.hidden_size, shape.eps
    taps = config.taps or default_taps(target.info.num_layers)
    parts = StepParts(
        block=reader.block("midlayer", shape, BlockForm(input_norm=False, input_width=2 * width)),
        embedding_norm=reader.norm("midlayer.input_layernorm.weight", width, eps),
        hidden_norm=reader.norm("midlayer.hidden_norm.weight", width, eps),
        norm=reader.norm("norm.weight", width, eps),
    )
    form = StepForm(norm_residual=config.norm_before_residual, recycle_normed=config.norm_output)
    vocabulary = draft_vocabulary(reader, config.draft_vocab_size, target)
    return NetworkParts(
        steps=[FeatureStep(parts, form)],
        shape=shape,
        needs=Needs(taps=taps),
        fusion=_read_fusion(config, reader, shape, len(taps)),
        head=draft_head(reader, config.own_head, vocabulary, target, width),
        vocabulary=vocabulary,
    )


def _read_fusion(config: EagleConfig, reader: WeightReader, shape: BlockShape, num_taps: int) -> Fusion:
    from specflow.draft.nn.feature_step import Fusion

    width, eps = shape.hidden_size, shape.eps
    return Fusion(
        fc=reader.linear("fc", width, num_taps * width, bias=False),
        together=reader.norm("input_norm.weight", num_taps * width, eps) if config.norm_before_fc else None,
        apart=[reader.norm(f"fc_norm.{i}.weight", width, eps) for i in range(num_taps)] if config.fc_norm else [],
    )


def build(config: EagleConfig, context: SourceContext) -> Drafter:
    """The drafter for a loaded target; see `feature_drafter`."""
    from specflow.draft.feature_model import feature_drafter

    return feature_drafter(config, context, read_network)


def graphs(config: EagleConfig, context: SourceContext) -> FeatureGraphs:
    """The network as something that can be written as ONNX graphs."""
    from specflow.draft.feature_model import feature_graphs

    return feature_graphs(config, context, read_network)


def trainable(config: EagleConfig, context: SourceContext, tensors: SeededTensors) -> Trainable:
    """The network with weights that can be trained."""
    from specflow.draft.feature_model import feature_trainable

    return feature_trainable(config, context, tensors, read_network)


SOURCE = SourceInfo(
    name="eagle",
    config=EagleConfig,
    dependency=("ar",),
    build=build,
    axis="target_features",
    offers=("logits", "confidence"),
    law="sampled",
    reads=("tokens", "features"),
    confidence_from="self",
    graphs=graphs,
    trainable=trainable,
    methods={
        "eagle": {"variant": 1, "shape": "chain"},
        "eagle2": {"variant": 1, "shape": "beam"},
        "eagle3": {"variant": 3},
    },
)
