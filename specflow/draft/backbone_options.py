"""Options of block backbones: what a network that reads target features at many layers may look like. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from specflow.draft.weight_options import BlockOptions

__all__ = ["BackboneOptions", "LayerKind", "spread_taps"]

LayerKind = Literal["full_attention", "sliding_attention"]


class BackboneOptions(BlockOptions):
    """The network that fills a block, and where its weights are."""

    num_layers: int = Field(5, ge=1, le=64, description="decoder blocks of the backbone")
    taps: tuple[int, ...] = Field(
        (), description="target layers whose output it reads (-1: embedding); empty: num_layers of them, spread evenly"
    )
    layout: Literal["fill_in", "shifted"] = Field(
        "fill_in",
        description="fill_in: a slot predicts its own position; shifted: the next one, the anchor's slot too",
    )
    block_size: int | None = Field(
        None, ge=1, le=257, description="slots of a block, the anchor's included; none: as many as k needs"
    )
    mask_token: int | None = Field(
        None, ge=0, description="id that stands in the unknown slots, a row of the embedding; none: the last id"
    )
    layer_types: tuple[LayerKind, ...] = Field(
        (), description="what each layer sees of the context; empty: all sliding where there is a window, else full"
    )
    window: int | None = Field(None, ge=1, description="positions a sliding layer sees")
    window_from: Literal["row", "anchor"] = Field(
        "row", description="where the window ends: at each slot's own position, or before the anchor for all slots"
    )
    causal: bool | None = Field(
        None, description="a slot sees only earlier slots of the block; none: in sliding layers, not in full ones"
    )
    draft_vocab_size: int | None = Field(
        None, ge=1, description="size of a reduced draft vocabulary; none: the target's"
    )
    own_head: bool | None = Field(
        None,
        description="a head of its own; false: the target's, its rows of the draft vocabulary; none: where the "
        "checkpoint has one or the vocabulary is reduced",
    )
    logit_scale: float = Field(1.0, gt=0.0, description="factor of the draft logits, before the cap")
    logit_cap: float | None = Field(None, gt=0.0, description="draft logits become cap * tanh(logits / cap)")

    @model_validator(mode="after")
    def _one_kind_a_layer(self) -> BackboneOptions:
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers, num_layers is {self.num_layers}")
        if "sliding_attention" in self.layer_types and self.window is None:
            raise ValueError("layer_types has sliding_attention, and window is not set")
        if self.window is not None and self.layer_types and "sliding_attention" not in self.layer_types:
            raise ValueError(f"window is {self.window}, and no layer of layer_types is sliding_attention")
        if self.window is None and self.window_from != "row":
            raise ValueError(f"window_from is {self.window_from}, and no layer has a window; set window")
        return self

    @model_validator(mode="after")
    def _the_anchor_alone_predicts_nothing(self) -> BackboneOptions:
        if self.block_size == 1 and self.layout == "fill_in":
            raise ValueError("block_size is 1: with layout fill_in the anchor's slot predicts nothing")
        return self

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Which layers have the sliding window.  # [num_layers]"""
        kinds = self.layer_types or ("sliding_attention" if self.window else "full_attention",) * self.num_layers
        return tuple(kind == "sliding_attention" for kind in kinds)

    @property
    def first_slot(self) -> int:
        """The first slot that predicts."""
        return 1 if self.layout == "fill_in" else 0

    def slots(self, k: int) -> int:
        """Slots of a block that drafts k tokens, or of the block it was trained for."""
        return self.block_size or k + self.first_slot


def spread_taps(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """The layers DFlash reads where nobody says (2602.06036): round(1 + i (L - 4) / (N - 1)), i = 0 .. N - 1.

    One layer reads L // 2. The last layer is left out. Targets too shallow for that many distinct layers give fewer.

    Args:
        num_layers: Of the backbone.  # N
        num_target_layers: # L
    """
    last = max(0, num_target_layers - 2)
    if num_layers == 1:
        return (min(num_target_layers // 2, last),)
    low = min(1, last)
    high = max(low, num_target_layers - 3)
    return tuple(sorted({round(low + i * (high - low) / (num_layers - 1)) for i in range(num_layers)}))
