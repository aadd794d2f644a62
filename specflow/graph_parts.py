"""Nodes, edges and flows of a decode graph: what each kind of part writes and reads. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from specflow.draft.dependency import DEPENDENCIES
from specflow.draft.registry import SourceInfo
from specflow.length import POLICIES
from specflow.recipe_sections import DraftSection

__all__ = ["Combine", "Commit", "Dependency", "Edge", "Flow", "Kind", "Node", "links", "reads"]

Flow = Literal[
    "budget",  # most draft tokens of each row
    "tokens",  # a continuation to copy; between rounds, committed tokens
    "logits",  # of the next draft position, or of every row of the target's pass
    "marginals",  # draft logits of all positions of the block at once
    "match_lengths",  # how much committed text a draft continues
    "confidence",  # probability that a node survives
    "block",  # draft tokens, their topology and their law
    "features",  # hidden states of the target
    "verdict",  # accepted tokens and their path
    "cache",  # key/value rows: scratch rows of a pass, committed rows between rounds
    "stats",  # how many were drafted and accepted
]


class Kind(str, Enum):
    """Kinds of nodes, in the order of a round."""

    SOURCE = "source"
    LENGTH = "length"
    DEPENDENCY = "dependency"
    COMBINE = "combine"
    TARGET = "target"
    VERIFY = "verify"
    COMMIT = "commit"


class Dependency(BaseModel):
    """Settings of a dependency node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    k: int = Field(DraftSection.model_fields["k"].default, ge=0, le=256, description="longest block")


class Combine(BaseModel):
    """Settings of a combine node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["first_of"] = "first_of"


class Commit(BaseModel):
    """Settings of the commit node: there are none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class Node:
    """A part of the round.

    Attributes:
        name: Unique in its graph.
        kind: What it is for.
        part: Which one: a model, a source, a dependency, a policy, a rule.
        settings: Its options.
    """

    name: str
    kind: Kind
    part: str
    settings: BaseModel

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output it reads (-1 is the embedding)."""
        return tuple(getattr(self.settings, "taps", ()))

    @property
    def changed(self) -> dict[str, Any]:
        """Options that differ from their defaults."""
        return self.settings.model_dump(exclude_defaults=True)


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """What one node writes and another reads, in the same round or, carried, in the next."""

    writer: str
    reader: str
    flow: Flow
    carry: bool


# Writer, reader, flow and whether it is carried to the next round.
FIXED: tuple[tuple[Kind, Kind, Flow, bool], ...] = (
    (Kind.LENGTH, Kind.DEPENDENCY, "budget", False),
    (Kind.DEPENDENCY, Kind.COMBINE, "block", False),
    (Kind.DEPENDENCY, Kind.TARGET, "block", False),
    (Kind.DEPENDENCY, Kind.VERIFY, "block", False),
    (Kind.COMBINE, Kind.TARGET, "block", False),
    (Kind.COMBINE, Kind.VERIFY, "block", False),
    (Kind.TARGET, Kind.VERIFY, "logits", False),
    (Kind.TARGET, Kind.COMMIT, "cache", False),
    (Kind.VERIFY, Kind.COMMIT, "verdict", False),
    (Kind.VERIFY, Kind.LENGTH, "stats", True),
    (Kind.COMMIT, Kind.TARGET, "tokens", True),
    (Kind.COMMIT, Kind.TARGET, "cache", True),
)


def links(writer: Node, reader: Node, sources: Mapping[str, SourceInfo]) -> list[tuple[Flow, bool]]:
    """Flows that one part can write and another read, each with whether it is carried to the next round."""
    pair = (writer.kind, reader.kind)
    found = [(flow, carry) for one, other, flow, carry in FIXED if (one, other) == pair]
    if pair == (Kind.SOURCE, Kind.DEPENDENCY):
        found.append((DEPENDENCIES[reader.part].reads, False))
    if pair == (Kind.SOURCE, Kind.LENGTH):
        found.extend((flow, False) for flow in _policy_needs(reader))
    if reader.kind is Kind.SOURCE:
        carried: dict[Kind, Flow] = {Kind.COMMIT: "tokens", Kind.TARGET: "features"}
        flow = carried.get(writer.kind)
        if flow is not None and flow in sources[reader.part].reads:
            found.append((flow, True))
    return found


def reads(node: Node, sources: Mapping[str, SourceInfo], drafts: bool) -> list[Flow]:
    """Flows a part cannot do without. With `drafts` there is a block to score."""
    block: list[Flow] = ["block"] if drafts else []
    if node.kind is Kind.SOURCE:
        return list(sources[node.part].reads)
    if node.kind is Kind.DEPENDENCY:
        return [DEPENDENCIES[node.part].reads, "budget"]
    if node.kind is Kind.LENGTH:
        return ["stats", *_policy_needs(node)]
    fixed: dict[Kind, list[Flow]] = {
        Kind.COMBINE: ["block"],
        Kind.TARGET: ["tokens", "cache", *block],
        Kind.VERIFY: ["logits", *block],
        Kind.COMMIT: ["verdict", "cache"],
    }
    return fixed[node.kind]


def _policy_needs(length: Node) -> list[Flow]:
    return [flow for flow in get_args(Flow) if flow in POLICIES[length.part].needs]
