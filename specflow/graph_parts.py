"""Nodes, edges and flows of a decode graph: what each kind of part writes and reads. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specflow.draft.dependency import DEPENDENCIES
from specflow.draft.registry import SourceInfo
from specflow.length import POLICIES
from specflow.recipe_draft import DraftSection, MergeSection

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

    policy: Literal["first_of", "merge"] = "first_of"
    k: int = Field(DraftSection.model_fields["k"].default, ge=0, le=256, description="longest block")
    nodes: int | None = Field(None, ge=1, description="most nodes of a merged tree")

    @model_validator(mode="before")
    @classmethod
    def _tree_has_a_size(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("policy") != "merge" or data.get("nodes") is not None:
            return data
        return {**data, "nodes": MergeSection.model_fields["nodes"].default}

    @model_validator(mode="after")
    def _only_a_tree_has(self) -> Combine:
        if self.nodes is not None and self.policy != "merge":
            raise ValueError(f"nodes is {self.nodes}, and {self.policy} merges nothing")
        return self


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
        """Target layers whose output it reads (-1 is the embedding); none where only a loaded target can tell."""
        return tuple(getattr(self.settings, "taps", None) or ())

    @property
    def shape(self) -> str:
        """Form of the blocks a source drafts."""
        return str(getattr(self.settings, "shape", "chain"))

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
        found.extend((flow, False) for flow in _policy_needs(reader) if flow in sources[writer.part].offers)
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
