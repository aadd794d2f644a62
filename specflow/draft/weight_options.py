"""Options of drafters that are checkpoints: where their tensors are, and the sizes of their blocks. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specflow.errors import GraphError
from specflow.types import BlockShape

__all__ = ["BlockOptions", "RopeScaling", "WeightOptions"]


class WeightOptions(BaseModel):
    """Where the tensors of a drafter come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: str | None = Field(
        None,
        description="directory, hub id or shipped drafter's name: a checkpoint of ours or in any layout that `specflow "
        "inspect` knows; none: small random weights, plumbing only",
    )
    seed: int = Field(0, ge=0, description="of the random weights")
    runtime: Literal["auto", "torch", "onnx"] = Field(
        "auto", description="what computes the drafter: torch, or ONNX Runtime; auto is the target's"
    )


class RopeScaling(BaseModel):
    """Rotary positions stretched over longer texts, in the words of `transformers`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rope_type: Literal["linear", "llama3", "yarn"] = Field(description="how")
    factor: float = Field(gt=0.0, description="by how much")
    original_max_position_embeddings: int | None = Field(None, ge=1, description="llama3, yarn: positions before")
    low_freq_factor: float | None = Field(None, gt=0.0, description="llama3: what is stretched whole")
    high_freq_factor: float | None = Field(None, gt=0.0, description="llama3: what is left as it is")
    beta_fast: float | None = Field(None, gt=0.0, description="yarn: what is left as it is")
    beta_slow: float | None = Field(None, gt=0.0, description="yarn: what is stretched whole")
    attention_factor: float | None = Field(None, gt=0.0, description="yarn: factor of cosines and sines")
    mscale: float | None = Field(None, gt=0.0, description="yarn: of that factor")
    mscale_all_dim: float | None = Field(None, gt=0.0, description="yarn: of that factor")
    truncate: bool | None = Field(None, description="yarn: bounds are rounded")

    @model_validator(mode="after")
    def _of_its_type(self) -> RopeScaling:
        needed = {
            "linear": (),
            "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
            "yarn": ("original_max_position_embeddings",),
        }[self.rope_type]
        lacking = [name for name in needed if getattr(self, name) is None]
        if lacking:
            raise ValueError(f"rope_type {self.rope_type} needs {', '.join(lacking)}")
        return self


class BlockOptions(WeightOptions):
    """A drafter whose decoder blocks are the target's, but where it says otherwise."""

    num_heads: int | None = Field(None, ge=1, description="query heads; none: the target's")
    num_kv_heads: int | None = Field(None, ge=1, description="key and value heads; none: the target's")
    head_width: int | None = Field(None, ge=2, multiple_of=2, description="width of a head; none: the target's")
    mlp_size: int | None = Field(None, ge=1, description="width of the MLP; none: the target's")
    eps: float | None = Field(None, gt=0.0, description="of the norms; none: the target's")
    rope_theta: float | None = Field(None, gt=0.0, description="base of the rotary positions; none: the target's")
    rope_scaling: RopeScaling | None = Field(None, description="scaled rotary positions; none: unscaled")
    max_positions: int | None = Field(
        None, ge=1, description="positions it was trained for; longer texts go on undrafted; none: the target's"
    )

    def shape_for(self, target: BlockShape) -> BlockShape:
        """Sizes of the drafter's blocks.

        Raises:
            GraphError: Query heads do not share key and value heads evenly.
        """
        names = ("num_heads", "num_kv_heads", "head_width", "mlp_size", "eps", "rope_theta")
        shape = replace(target, **{name: value for name in names if (value := getattr(self, name)) is not None})
        if self.rope_scaling is not None:
            parameters = self.rope_scaling.model_dump(exclude_none=True)
            shape = replace(shape, rope_scaling=tuple(sorted(parameters.items())))
        if shape.num_heads % shape.num_kv_heads:
            found = f"{shape.num_heads} query heads and {shape.num_kv_heads} key and value heads"
            hint = f"set draft.num_kv_heads to a divisor of {shape.num_heads}"
            raise GraphError("draft.num_heads", found, "a multiple of num_kv_heads", hint)
        return shape
