"""Options that the feature-step drafters share: weights, sizes of the block, confidence head, shape. No torch."""

from __future__ import annotations

from pydantic import Field

from specflow.draft.corrected import ConfidenceOptions
from specflow.draft.shapes import ShapeOptions
from specflow.types import BlockShape

__all__ = ["FeatureOptions"]


class FeatureOptions(ConfidenceOptions, ShapeOptions):
    """A drafter whose block is the target's, but where it says otherwise."""

    weights: str | None = Field(
        None,
        description="directory with model.safetensors (and config.json); none: small random weights, plumbing only",
    )
    seed: int = Field(0, ge=0, description="of the random weights")
    num_heads: int | None = Field(None, ge=1, description="query heads; none: the target's")
    num_kv_heads: int | None = Field(None, ge=1, description="key and value heads; none: the target's")
    head_width: int | None = Field(None, ge=2, multiple_of=2, description="width of a head; none: the target's")
    mlp_size: int | None = Field(None, ge=1, description="width of the MLP; none: the target's")
    eps: float | None = Field(None, gt=0.0, description="of the norms; none: the target's")
    rope_theta: float | None = Field(None, gt=0.0, description="base of the rotary positions; none: the target's")
    max_positions: int | None = Field(
        None, ge=1, description="positions it was trained for; longer texts go on undrafted; none: the target's"
    )

    def shape_for(self, target: BlockShape) -> BlockShape:
        """Sizes of the drafter's block."""
        names = ("mlp_size", "num_heads", "num_kv_heads", "head_width", "eps", "rope_theta")
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return BlockShape(**{name: getattr(target, name) for name in ("hidden_size", *names)} | own)
