"""What a replay is asked and what it answers, and what a trace says of itself. Plain data: no torch, no files.

info = trace.info                                    # TraceInfo
config = ReplayConfig(("dspark",), k=6)              # or ReplayConfig.of(recipe, info)
result = replay(trace, config, cost)                 # ReplayResult
result.tokens_per_s, result.acceptance_length, result.by_position, result.p95_latency_s
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from specflow.errors import DataError
from specflow.measure import (
    ContextRate,
    PositionRate,
    acceptance_by_context,
    acceptance_by_position,
    acceptance_length,
    quantile,
)
from specflow.types import Counts

if TYPE_CHECKING:
    from specflow.recipe import Recipe

__all__ = ["DrafterInfo", "ReplayConfig", "ReplayResult", "ReplayedRequest", "RoundCosts", "TraceInfo"]


class RoundCosts(Protocol):
    """Seconds of the parts of a round; `specflow.cost.CostModel` is one."""

    def draft_s(self, depth: int, batch: int, context: int) -> float: ...

    def verify_s(self, depth: int, batch: int, context: int) -> float: ...

    def overhead_s(self, depth: int = 0, batch: int = 1) -> float: ...

    def round_s(self, depth: int, batch: int, context: int) -> float: ...


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What a trace holds of one drafter."""

    name: str  # unique in the trace
    section: Mapping[str, Any]  # the draft section it was built from, as a recipe would write it
    k: int  # deepest draft position that was recorded
    tree: bool  # blocks branch: depths are recorded, tokens are not
    sampled: bool  # at the trace's temperature the rules rejection and block meet a law that is not one-hot
    confidence_from: Literal["context", "prefix", "self"] | None  # None: it has no confidence
    matches: bool  # it copies text, and says how long a match its drafts continue
    exact_k: tuple[int, ...]  # values of `draft.k` whose drafts are those that were recorded


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What a trace holds, without its arrays."""

    target: Mapping[str, Any]  # name, dtype, device, runtime, exactness
    sampling: Mapping[str, Any]  # of every request; seeds count up from its seed
    greedy: bool
    drafters: Mapping[str, DrafterInfo]
    recipes: Mapping[str, tuple[str, ...]]  # recipe -> its drafters: several where it is a cascade (first_of)
    num_requests: int
    num_tokens: int  # generated, the prefill's token of each request included
    categories: tuple[str, ...]
    provenance: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """One way to decode the traced workload."""

    drafters: tuple[str, ...] = ()  # names in the trace; (): plain decoding; several: the first that has a draft
    k: int = 0  # most draft tokens of a round, the bonus token excluded
    part_k: tuple[int, ...] = ()  # of each drafter, where they are less than k; () is k for all
    policy: str = "fixed"  # length policy, as in `length.policy`
    options: Mapping[str, Any] = field(default_factory=dict)  # of the policy, as in a recipe
    until: int | None = None  # committed tokens from which on rounds are plain
    rule: str = "match"
    concurrency: int = 1  # requests decoded together
    contexts: tuple[int, int] | None = None  # count only rounds with low <= committed tokens < high
    categories: tuple[str, ...] = ()  # only requests of these; () takes all
    draws: int = 1  # where acceptance is a matter of chance, how often the workload is replayed
    seed: int = 0  # of that chance

    @classmethod
    def of(cls, recipe: Recipe, info: TraceInfo, **changes: Any) -> ReplayConfig:
        """How a recipe decodes, if a trace has its drafters.

        Args:
            recipe: With the name it had when it was traced.
            info: Of the trace.
            changes: Other fields of the result.

        Raises:
            DataError: The trace does not have it.
        """
        if recipe.draft is None or recipe.draft.k == 0:
            return cls(**{"concurrency": recipe.runtime.batch, **changes})
        if recipe.name not in info.recipes:
            known = ", ".join(info.recipes) or "none"
            raise DataError(
                "trace", f"no recipe '{recipe.name}' in it", f"one of: {known}", "trace it into the same directory"
            )
        found: dict[str, Any] = {
            "drafters": info.recipes[recipe.name],
            "k": recipe.draft.k,
            "part_k": tuple(part.k for part in recipe.draft.parts) if len(recipe.draft.parts) > 1 else (),
            "policy": recipe.length.policy,
            "options": recipe.length.options,
            "until": recipe.length.until,
            "rule": recipe.verify.rule,
            "concurrency": recipe.runtime.batch,
        }
        return cls(**{**found, **changes})


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One request, as it would have gone."""

    request: int  # its place in the trace
    category: str
    context: int  # tokens of its prompt
    tokens: int  # generated, the prefill's token included
    rounds: tuple[tuple[int, int], ...]  # (draft tokens verified, of those accepted), round by round
    seconds: float  # from its first token to its last

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in self.rounds)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A whole workload, as it would have gone. Counts and seconds are sums over all draws."""

    config: ReplayConfig
    counts: Counts  # of all requests; `specflow.measure.metrics` reads it
    seconds: float  # of all rounds, prefills left out; 0 without a cost model
    draft_s: float  # of that, drafting
    target_s: float  # target passes
    other_s: float  # the rest of the rounds
    requests: tuple[ReplayedRequest, ...]  # draw by draw, in the order of the trace

    @property
    def rounds(self) -> int:
        return self.counts.num_rounds

    @property
    def drafted(self) -> int:
        return self.counts.num_draft_tokens

    @property
    def accepted(self) -> int:
        return self.counts.num_accepted_draft_tokens

    @property
    def tokens(self) -> int:
        """Tokens that rounds yielded; those of prefills are not among them."""
        return self.counts.num_generated_tokens - len(self.requests)

    @property
    def tokens_per_s(self) -> float | None:
        """Decode throughput of the batch; None without a cost model."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def acceptance_length(self) -> float | None:
        """tau = 1 + accepted / rounds; None without a round."""
        return acceptance_length(self.counts)

    @property
    def by_position(self) -> list[PositionRate]:
        return acceptance_by_position(self.counts)

    @property
    def by_context(self) -> list[ContextRate]:
        return acceptance_by_context(self.counts)

    @property
    def p50_latency_s(self) -> float | None:
        """Half of the requests decode within this time, queueing left out."""
        return quantile([each.seconds for each in self.requests], 0.5)

    @property
    def p95_latency_s(self) -> float | None:
        return quantile([each.seconds for each in self.requests], 0.95)
