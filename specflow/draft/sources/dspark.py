"""DSpark (2607.05147): the backbone of DFlash, a corrector that makes each token follow the one before, and a head that
says how likely each token is to stand.

The anchor's slot predicts the first draft token, so a block of B slots gives B tokens. Weights: the published tensor
names, those of DFlash and `markov_head.*`, `confidence_head.proj.*`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from specflow.draft.sources.dflash import SOURCE as DFLASH
from specflow.draft.sources.dflash import DFlashConfig

__all__ = ["SOURCE", "DSparkConfig"]


class DSparkConfig(DFlashConfig):
    """DFlash's options with DSpark's choices."""

    layout: Literal["fill_in", "shifted"] = Field(
        "shifted", description="shifted: a slot predicts the next position, the anchor's slot the first; or fill_in"
    )
    corrector: Literal["markov", "gated", "rnn"] | None = Field(
        "markov", description="makes each position follow the token before it; null with dependency parallel"
    )
    confidence_head: bool = Field(True, description="a head that says, before a token is chosen, whether it will stand")


SOURCE = replace(DFLASH, name="dspark", config=DSparkConfig, dependency=("parallel+corrector", "parallel"))
