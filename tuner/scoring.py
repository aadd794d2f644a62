"""What a candidate is worth without running it: replayed on traces, priced by the cost model. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

from specflow.errors import DataError, SpecFlowError
from tuner.result import Split
from tuner.space import Candidate

__all__ = ["OBJECTIVES", "BatchScorer", "Bound", "Objective", "Score", "Scorer", "check_objectives", "hopeless"]


@dataclass(frozen=True, slots=True)
class Objective:
    """A figure of a score, and which way is better."""

    name: str
    key: str
    direction: str  # as Optuna spells it

    def of(self, score: Score) -> float:
        value = getattr(score, self.key)
        assert isinstance(value, int | float), f"no {self.key} to judge by"
        return float(value)

    def better(self, one: float, other: float) -> bool:
        """Whether one value is better than another."""
        return one > other if self.direction == "maximize" else one < other


OBJECTIVES = {
    "throughput": Objective("throughput", "throughput", "maximize"),
    "latency": Objective("latency", "latency_p95_s", "minimize"),
    "memory": Objective("memory", "memory_bytes", "minimize"),
}
"""By the name that the command line has for them."""


def check_objectives(names: Sequence[str]) -> None:
    """See that there are objectives of these names.

    Raises:
        DataError: There is none of that name, or no name.
    """
    unknown = [name for name in names if name not in OBJECTIVES]
    if unknown or not names:
        raise DataError("--objective", unknown[0] if unknown else "none", f"some of {', '.join(OBJECTIVES)}")


@dataclass(frozen=True, slots=True)
class Score:
    """What a candidate would do with the traced workload."""

    throughput: float  # decode tokens a second, over all requests decoded together
    latency_p95_s: float  # of a request, from its first token to its last
    memory_bytes: int  # beyond what plain decoding takes
    acceptance_length: float
    split: Split = field(default_factory=Split)

    def to_data(self) -> dict[str, Any]:
        return {**asdict(self), "split": self.split.model_dump()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Score:
        return cls(**{**data, "split": Split(**data["split"])})


class Scorer(Protocol):
    """Replays candidates."""

    def score(self, candidate: Candidate, concurrency: int) -> Score:
        """What it would do.

        Raises:
            SpecFlowError: It cannot be replayed; the study goes on without it.
        """


@runtime_checkable
class BatchScorer(Scorer, Protocol):
    """Replays many candidates in less time than one after another."""

    def score_many(self, candidates: Sequence[Candidate], concurrency: int) -> list[Score | SpecFlowError]:
        """What each would do, or why it cannot be replayed."""


class Bound(Protocol):
    """The price of a round; `specflow.cost.CostModel` is one."""

    def plain_steps(self, depth: int, batch: int, context: int) -> float: ...


def hopeless(k: int, costs: Bound, concurrency: int, context: int) -> str | None:
    """Why no drafter of this depth can pay, whatever it says; None where one might.

    A round of depth d yields at most d + 1 tokens, so it cannot pay where it costs that many plain steps. A block may
    be shorter than K, so every depth up to K has to fail.
    """
    if k <= 0:
        return "K = 0 is plain decoding, which is measured anyway"
    prices = [(depth, costs.plain_steps(depth, concurrency, context)) for depth in range(1, k + 1)]
    if any(depth + 1 > price for depth, price in prices):
        return None
    depth, price = min(prices, key=lambda pair: pair[1] / (pair[0] + 1))
    return f"even a round of {depth} draft tokens, all accepted, costs {price:.2f} plain steps for {depth + 1} tokens"
