"""Self-speculative drafting: the target drafts for itself with a part of its layers.

Draft & Verify (2309.08168) leaves out single attention and MLP sub-layers; early exit (LayerSkip, 2404.16710) stops
after the first layers. Either way drafts read the target's own cache and commit nothing to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from specflow.draft.registry import SourceInfo
from specflow.draft.shapes import ShapeOptions, make_drafter

if TYPE_CHECKING:
    from specflow.draft.base import Drafter, SourceContext
    from specflow.draft.lm_steps import Shortcut
    from specflow.draft.nn.weights import SeededTensors
    from specflow.draft.trainable import Trainable
    from specflow.onnx.graphs import NetworkGraphs

__all__ = ["SOURCE", "SkippedLayersConfig", "build", "graphs", "trainable"]

_OF_EXITS = ("exit_layer", "adapter_rank", "weights")
_OF_SKIPS = ("skip_attention", "skip_mlp")


class SkippedLayersConfig(ShapeOptions):
    """Which layers draft."""

    leave_out: Literal["sublayers", "tail"] = Field(
        "sublayers", description="chosen attention and MLP sub-layers, or all layers from one on (early exit)"
    )
    skip_attention: tuple[int, ...] = Field(
        (), description="0-based layers whose attention drafts do without", json_schema_extra={"of": "layers"}
    )
    skip_mlp: tuple[int, ...] = Field(
        (), description="0-based layers whose MLP drafts do without", json_schema_extra={"of": "layers"}
    )
    exit_layer: int | None = Field(
        None, ge=1, description="tail: first layer that drafts do not run; null is two thirds of the way up"
    )
    adapter_rank: int | None = Field(
        None, ge=1, description="tail: inner width of a residual adapter before the final norm; null has none"
    )
    weights: str | None = Field(
        None, description="tail: directory with the adapter's model.safetensors; null: a random one, plumbing only"
    )
    seed: int = Field(0, ge=0, description="seed of a random adapter")

    @model_validator(mode="after")
    def _of_one_kind(self) -> SkippedLayersConfig:
        strange = _OF_EXITS if self.leave_out == "sublayers" else _OF_SKIPS
        given = [name for name in strange if getattr(self, name)]
        if given:
            raise ValueError(f"{given[0]} with leave_out {self.leave_out}; expected it with the other one only")
        for name in _OF_SKIPS:
            layers = getattr(self, name)
            if len(set(layers)) != len(layers) or min(layers, default=0) < 0:
                raise ValueError(f"{name} is {list(layers)}; expected different layers, the first one numbered 0")
        return self


def build(config: SkippedLayersConfig, context: SourceContext) -> Drafter:
    """The drafter for a loaded target.

    Raises:
        GraphError: A layer is named that the target does not have, or weights that nothing reads.
        CheckpointError: The adapter's tensors do not fit.
    """
    from specflow.draft.checkpoint import read_options
    from specflow.draft.lm_shared import SharedLayers

    config = read_options(config, config.weights)
    model = SharedLayers(context.target, _shortcut(config, context), context.k)
    return make_drafter(config, model, context)


def graphs(config: SkippedLayersConfig, context: SourceContext) -> NetworkGraphs:
    """The layers that draft, and those above an early exit, as something that can be written as ONNX graphs.

    Raises:
        GraphError: As in `build`.
        ModelError: Graphs do not compute the target.
        CheckpointError: The adapter's tensors do not fit.
    """
    from specflow.draft.checkpoint import read_options
    from specflow.draft.onnx_lm import SharedLayersGraphs
    from specflow.errors import ModelError

    if context.weights is None:
        found = f"ONNX graphs do not compute the layers of {context.target.info.name}"
        raise ModelError("draft.source", found, "a target that they compute")
    config = read_options(config, config.weights)
    shortcut = _shortcut(config, context, packed=False)
    return SharedLayersGraphs(context.weights, shortcut, context.target)


def trainable(config: SkippedLayersConfig, context: SourceContext, tensors: SeededTensors) -> Trainable:
    """The adapter of an early exit with weights that can be trained.

    Raises:
        GraphError: There is no adapter, or no such layer.
    """
    from specflow.draft.base import Needs
    from specflow.draft.checkpoint import trained_reader
    from specflow.draft.lm_shared import AdaptedExit, read_adapter
    from specflow.draft.trainable import Trainable
    from specflow.errors import GraphError

    rank = config.adapter_rank
    if rank is None:
        hint = "--set draft.adapter_rank=64" if config.leave_out == "tail" else "train method early_exit"
        raise GraphError("draft.adapter_rank", "no adapter: nothing to train", "the rank of one", hint)
    layer, target = _exit_layer(config, context), context.target
    reader = trained_reader(tensors, target)
    adapter = read_adapter(reader, rank, target.info.hidden_size)
    reader.close()
    chosen = {name: getattr(config, name) for name in config.model_fields_set} | {"exit_layer": layer}
    options = SkippedLayersConfig.model_validate(chosen)
    return Trainable(AdaptedExit(adapter, layer, target), options, reader, Needs(taps=(layer - 1,)))


def _shortcut(config: SkippedLayersConfig, context: SourceContext, packed: bool = True) -> Shortcut:
    from specflow.draft.lm_shared import open_adapter
    from specflow.draft.lm_steps import Shortcut
    from specflow.errors import GraphError
    from specflow.types import Skip

    if config.leave_out == "sublayers":
        for name in _OF_SKIPS:
            _check_layers(name, getattr(config, name), context.target.info.num_layers - 1)
        return Shortcut(skip=Skip(frozenset(config.skip_attention), frozenset(config.skip_mlp)))
    layer = _exit_layer(config, context)
    rank = config.adapter_rank
    if rank is None and config.weights is not None:
        hint = "set adapter_rank, here or in the checkpoint's config.json, or leave the weights out"
        raise GraphError("draft.weights", "an adapter without adapter_rank: nothing would read it", "its rank", hint)
    adapter = None if rank is None else open_adapter(config.weights, config.seed, rank, context.target, packed)
    return Shortcut(exit_layer=layer, adapter=adapter)


def _exit_layer(config: SkippedLayersConfig, context: SourceContext) -> int:
    num_layers = context.target.info.num_layers
    layer = max(1, 2 * num_layers // 3) if config.exit_layer is None else config.exit_layer
    _check_layers("exit_layer", (layer,), num_layers)
    return layer


def _check_layers(name: str, layers: tuple[int, ...], most: int) -> None:
    from specflow.errors import GraphError

    wrong = [layer for layer in layers if layer > most]
    if wrong:
        found = f"layer {', '.join(map(str, wrong))}, which the target does not have"
        raise GraphError(f"draft.{name}", found, f"at most {most}", "choose layers of this target")


SOURCE = SourceInfo(
    name="skipped_layers",
    config=SkippedLayersConfig,
    dependency=("ar",),
    build=build,
    axis="skipped_layers",
    offers=("logits", "confidence"),
    law="sampled",
    confidence_from="self",
    graphs=graphs,
    trainable=trainable,
    untrained=("layer_skip",),
    methods={"layer_skip": {"leave_out": "sublayers"}, "early_exit": {"leave_out": "tail"}},
)
