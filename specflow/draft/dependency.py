"""The dependency axis: in what order the positions of a block depend on each other.

Pure data for the graph's checks. A source says what it `offers`; a dependency says what it needs. Method names appear
on neither side, so a new source joins a dependency by offering what it asks for.

Offers known to the toolkit:
    tokens          a continuation to copy
    match_lengths   how many tokens of the text each row's continuation is based on (length policies may need it)
    logits          of the next position after any draft prefix, one pass a token
    marginals       of all positions of a block at once, from one pass over the context
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DEPENDENCIES", "Dependency"]


@dataclass(frozen=True, slots=True)
class Dependency:
    """How a block is filled."""

    name: str
    summary: str
    needs: frozenset[str]  # what the source must offer
    passes: Literal["none", "token", "block"]  # draft passes: none, one a drafted token, one a block
    sees_drafts: bool  # whether a position's law depends on the draft tokens before it


DEPENDENCIES = {
    dependency.name: dependency
    for dependency in (
        Dependency("copy", "tokens are copied from earlier text", frozenset({"tokens"}), "none", True),
        Dependency("ar", "each position follows the one before", frozenset({"logits"}), "token", True),
        Dependency("parallel", "all positions at once", frozenset({"marginals"}), "block", False),
        Dependency(
            "parallel+corrector",
            "all positions at once, then a small correction by the token before",
            frozenset({"marginals"}),
            "block",
            True,
        ),
    )
}
