"""Options that the feature-step drafters share: weights, sizes of the block, confidence head, shape. No torch."""

from __future__ import annotations

from pydantic import Field

from specflow.draft.corrected import ConfidenceOptions
from specflow.draft.shapes import ShapeOptions
from specflow.draft.weight_options import BlockOptions

__all__ = ["FeatureOptions"]


class FeatureOptions(BlockOptions, ConfidenceOptions, ShapeOptions):
    """A network that steps with a token and a feature, the confidence head over it, and the shape of its blocks."""

    offset_norms: bool = Field(False, description="gains are stored as their distance from 1 (Qwen3-Next)")
