"""Verification rules as recipes and graphs see them: options and facts by name. No torch; `verify` has the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["RULE_INFOS", "BlockConfig", "MatchConfig", "RejectionConfig", "RuleInfo", "TypicalConfig"]


class MatchConfig(BaseModel):
    """Keep a draft token where it equals the token the target draws; equals plain decoding token for token."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RejectionConfig(BaseModel):
    """Keep a draft token with probability min(1, p/q), else draw from the residual; in a tree try the next sibling."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lossless: bool = Field(True, description="false admits drafts whose shape depends on the sampled tokens: a bias")


class BlockConfig(RejectionConfig):
    """Rejection over the block as a whole: the same law, longer accepted blocks (arXiv 2403.10444)."""


class TypicalConfig(BaseModel):
    """Keep a draft token the target finds likely enough, p > min(epsilon, delta * exp(-entropy)). Lossy (Medusa)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epsilon: float = Field(0.09, gt=0.0, lt=1.0, description="a token this likely is always kept")
    delta: float = Field(
        0.3, gt=0.0, allow_inf_nan=False, description="how much less is enough where the target is unsure"
    )


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """What a rule says about itself before anything is loaded."""

    config: type[BaseModel]
    lossy: bool = False  # the text's law is not the target's
    needs_law: bool = False  # reads the law the block was drawn from
    trees: bool = False  # takes blocks that are not chains
    without_replacement: bool = False  # of sampled siblings it takes those drawn each from what the ones before left
    same_text: bool = False  # the text is plain decoding's, token for token, whatever is drafted


RULE_INFOS: Mapping[str, RuleInfo] = {
    "match": RuleInfo(MatchConfig, trees=True, same_text=True),
    "rejection": RuleInfo(RejectionConfig, needs_law=True, trees=True, without_replacement=True),
    "block": RuleInfo(BlockConfig, needs_law=True),
    "typical": RuleInfo(TypicalConfig, lossy=True, trees=True),
}
