"""Options of a training run, stored with what it makes. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specflow.train.objective_options import ObjectiveOptions

__all__ = ["TrainOptions"]


class TrainOptions(BaseModel):
    """How a drafter is trained. The same options on the same corpus give the same weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    steps: int | None = Field(None, ge=1, description="optimiser steps in all; none: as `epochs` says")
    epochs: float | None = Field(None, gt=0.0, description="passes over the training texts; none: `steps`, or one pass")
    batch_tokens: int = Field(4096, ge=2, description="most positions of a batch, padding included")
    accumulate: int = Field(1, ge=1, description="batches of a step, in all processes together")
    max_length: int = Field(1024, ge=2, description="longest text in tokens; what is beyond is cut off")
    lr: float = Field(1e-3, gt=0.0, description="highest learning rate of AdamW")
    warmup: float = Field(0.04, ge=0.0, lt=1.0, description="share of the steps in which the rate rises; then a cosine")
    clip: float = Field(1.0, gt=0.0, description="largest norm of a gradient")
    weight_decay: float = Field(0.0, ge=0.0, description="of AdamW, on matrices")
    seed: int = Field(0, ge=0, description="of first weights, order of texts and choice of anchors")
    held_out: float = Field(0.02, ge=0.0, lt=1.0, description="share of the texts kept for measuring")
    evaluate_tokens: int = Field(
        20_000, ge=1, description="most held-out positions that a measurement during training reads"
    )
    depth: int | None = Field(None, ge=1, le=64, description="draft positions that are trained; none: k of the recipe")
    anchors: int = Field(
        64, ge=1, description="blocks drafted in each text, where a block starts anywhere (DFlash, DSpark)"
    )
    draft_vocab: int = Field(
        8192, ge=0, description="size of a reduced draft vocabulary, where the source can have one; 0: the target's"
    )
    start: Literal["target", "fitted", "random"] = Field(
        "target",
        description="first weights: copies of the target's, where the shapes are alike; the same, and layers fitted "
        "to the target's next state by least squares, where a family has such; or random ones",
    )
    objective: ObjectiveOptions | None = Field(None, description="losses; none: those published for the method")
    calibration_rounds: int = Field(
        8192, ge=0, description="rounds of decoding held-out prompts that calibrate a confidence head; 0: none"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of products; weights and losses are float32")

    @model_validator(mode="after")
    def _one_length(self) -> TrainOptions:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs both say how long to train; set one of them")
        if self.max_length > self.batch_tokens:
            raise ValueError(
                f"a text may have {self.max_length} tokens and a batch {self.batch_tokens}: lower max_length"
            )
        return self
