"""The dependency axis: in what order the positions of a block depend on each other.

Pure data for the graph's checks. A source says what it `offers`; a dependency says what it reads. Method names appear
on neither side, so a new source joins a dependency by offering what it asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["DEPENDENCIES", "Dependency", "Reads"]

Reads = Literal[
    "tokens",  # a continuation to copy
    "logits",  # of the next position after any draft prefix, one pass a token
    "marginals",  # logits of all positions of the block at once, from one pass over the context
]


@dataclass(frozen=True, slots=True)
class Dependency:
    """How a block is filled."""

    name: str
    summary: str
    reads: Reads  # what the source must offer
    corrects: bool = False  # has a part that corrects each position by the one before


DEPENDENCIES: Mapping[str, Dependency] = {
    dependency.name: dependency
    for dependency in (
        Dependency("copy", "positions are copied from earlier text", "tokens"),
        Dependency("ar", "each position follows from the ones before", "logits"),
        Dependency("parallel", "all positions at once, blind to each other", "marginals"),
        Dependency("parallel+corrector", "all at once, then each corrected by the one before", "marginals", True),
    )
}
