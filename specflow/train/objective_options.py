"""What a drafter is trained by: losses and how positions of a block are weighed. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = ["OBJECTIVES", "LossName", "ObjectiveOptions", "block_gamma"]

LossName = Literal[
    "cross_entropy",
    "soft_cross_entropy",
    "divergence",
    "total_variation",
    "nla",
    "lk_hybrid",
    "feature",
    "confidence",
]

_GAMMAS = ((8, 4.0), (10, 5.0))
_LONG_GAMMA = 7.0


class ObjectiveOptions(BaseModel):
    """A weighted sum of losses over the positions of all blocks, each position with a weight of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    losses: Mapping[LossName, float] = Field(description="factor of each loss")
    decay: Literal["exponential", "power", "dpace"] = Field(
        "power",
        description="weights of positions k = 1, 2, ...: exp(-(k-1)/rate), rate^(k-1), or by the draft's confidences",
    )
    rate: float = Field(
        1.0, gt=0.0, description="of the decay: gamma of exponential, beta of power, the floor alpha of dpace"
    )
    contiguous: bool = Field(
        False, description="a position counts only where all before it do, and have tokens that the draft can make"
    )
    eta: float = Field(3.0, ge=0.0, description="of lk_hybrid: how fast it turns from divergence to acceptance")
    confidence_of: Literal["overlap", "agreement"] = Field(
        "overlap",
        description="what a confidence head learns: overlap, the chance that a drawn token stands (DSpark); agreement, "
        "whether the two likeliest tokens are the same, which is what stands in greedy decoding",
    )
    confidence_every: int = Field(
        4,
        ge=1,
        description="with a reduced vocabulary the confidence head learns at one of so many positions: each costs the "
        "target's whole head",
    )

    @field_validator("losses")
    @classmethod
    def _some_loss(cls, losses: Mapping[LossName, float]) -> Mapping[LossName, float]:
        if any(factor < 0.0 for factor in losses.values()):
            raise ValueError("the factor of a loss is never negative")
        found = {name: factor for name, factor in losses.items() if factor > 0.0}
        if not found:
            raise ValueError("losses needs one with a factor above 0")
        return found

    @model_validator(mode="after")
    def _rate_of_decay(self) -> ObjectiveOptions:
        if self.decay != "exponential" and self.rate > 1.0:
            raise ValueError(f"rate of a {self.decay} decay is at most 1, not {self.rate}")
        return self


def block_gamma(num_slots: int) -> float:
    """DFlash's gamma for a block: 4 up to 8 positions, 5 up to 10, 7 beyond."""
    return next((gamma for most, gamma in _GAMMAS if num_slots <= most), _LONG_GAMMA)


OBJECTIVES: Mapping[str, ObjectiveOptions] = {
    "medusa": ObjectiveOptions(losses={"cross_entropy": 1.0}, rate=0.8),
    "mtp": ObjectiveOptions(losses={"cross_entropy": 1.0}, rate=0.6),
    "eagle": ObjectiveOptions(losses={"feature": 1.0, "soft_cross_entropy": 0.1}),
    "eagle3": ObjectiveOptions(losses={"soft_cross_entropy": 1.0}, rate=0.8),
    "dflash": ObjectiveOptions(losses={"cross_entropy": 1.0}, decay="exponential", rate=4.0),
    "dflash_dpace": ObjectiveOptions(losses={"cross_entropy": 1.0}, decay="dpace", rate=0.5),
    "dspark": ObjectiveOptions(
        losses={"cross_entropy": 0.1, "total_variation": 0.9, "confidence": 1.0},
        decay="exponential",
        rate=4.0,
        contiguous=True,
    ),
    "distillation": ObjectiveOptions(losses={"divergence": 1.0}),
    "lk": ObjectiveOptions(losses={"lk_hybrid": 1.0}),
}
"""Objectives as published: Medusa, FastMTP, EAGLE-1 and 3, DFlash up to 8 positions (see `block_gamma`), DSpark; the
last two are for whole language models and exit adapters."""
