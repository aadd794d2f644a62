"""Length policies by name: how many tokens to draft for each row, and which of them to verify.

`length_base` says what a policy is. A budget may depend on anything that was known before drafting; what is cut after
drafting may depend on the tokens before the cut, never on the token that is dropped (reference: methods 0.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from specflow.length_base import Additive, AdditiveConfig, Fixed, FixedConfig, LengthPolicy, Until
from specflow.length_confidence import Confidence, ConfidenceConfig, Threshold, ThresholdConfig
from specflow.length_gain import Costs, ExpectedGain, ExpectedGainConfig
from specflow.length_match import ByMatch, ByMatchConfig

__all__ = [
    "POLICIES",
    "Additive",
    "AdditiveConfig",
    "ByMatch",
    "ByMatchConfig",
    "Confidence",
    "ConfidenceConfig",
    "Costs",
    "ExpectedGain",
    "ExpectedGainConfig",
    "Fixed",
    "FixedConfig",
    "LengthPolicy",
    "Policy",
    "Threshold",
    "ThresholdConfig",
    "Until",
]


@dataclass(frozen=True, slots=True)
class Policy:
    """A length policy by name: its options, and its class, which takes k and the options by their names."""

    config: type[BaseModel]
    policy: Callable[..., LengthPolicy]
    needs: frozenset[str] = frozenset()
    """What the source must offer for the policy to mean anything."""
    uses: frozenset[str] = frozenset()
    """What it makes use of where the source offers it."""
    priced: bool = False
    """Whether it decides by measured costs: it then has `use(costs)`."""
    needs_costs: bool = False
    """Whether it has no prices of its own, so that no recipe runs with it before they were measured."""
    chains: bool = False
    """Whether it shortens chains alone: what it means for a tree is nothing."""
    cuts_before: bool = False
    """Whether it drops a token for that token's own confidence even where the token was sampled."""


POLICIES: Mapping[str, Policy] = {
    "fixed": Policy(FixedConfig, Fixed),
    "additive": Policy(AdditiveConfig, Additive),
    "match": Policy(ByMatchConfig, ByMatch, frozenset({"match_lengths"}), priced=True),
    "threshold": Policy(ThresholdConfig, Threshold, frozenset({"confidence"}), chains=True),
    "confidence": Policy(ConfidenceConfig, Confidence, frozenset({"confidence"}), chains=True),
    "expected_gain": Policy(
        ExpectedGainConfig, ExpectedGain, uses=frozenset({"confidence"}), priced=True, needs_costs=True
    ),
}
