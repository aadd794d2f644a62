"""Scores candidates by replaying a trace with the cost models of their recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from specflow.cost import CostModel
from specflow.errors import DataError, SpecFlowError
from tuner.replay import Replayer
from tuner.replay_types import ReplayConfig, ReplayResult
from tuner.result import Split
from tuner.scoring import Score
from tuner.space import Candidate, Space

if TYPE_CHECKING:
    from specflow.recipe import Recipe
    from tuner.recorded import Trace

__all__ = ["ReplayScorer"]

DRAWS = 4
"""Times that the workload is replayed where acceptance is a matter of chance."""


class ReplayScorer:
    """Replays candidates.

    Args:
        trace: Of the workload, with the drafters of all recipes that could be traced.
        space: Makes recipes of candidates.
        costs: Of each recipe, plain decoding among them.
        memory: Bytes that a recipe needs beyond plain decoding.
    """

    def __init__(
        self, trace: Trace, space: Space, costs: Mapping[str, CostModel], memory: Callable[[Recipe], int]
    ) -> None:
        self._trace, self._space, self._costs, self._memory = trace, space, costs, memory
        self._players: dict[str, Replayer] = {}

    def score(self, candidate: Candidate, concurrency: int) -> Score:
        """What a candidate would do.

        Raises:
            DataError: The trace does not have it, or it cannot be replayed.
        """
        (found,) = self.score_many((candidate,), concurrency)
        if isinstance(found, SpecFlowError):
            raise found
        return found

    def score_many(self, candidates: Sequence[Candidate], concurrency: int) -> list[Score | SpecFlowError]:
        """What each would do, or why it cannot be replayed; those of one recipe share the work."""
        found: dict[int, Score | SpecFlowError] = {}
        asked: dict[str, dict[int, tuple[Recipe, ReplayConfig]]] = {}
        for number, candidate in enumerate(candidates):
            try:
                asked.setdefault(candidate.recipe, {})[number] = self._config(candidate, concurrency)
            except SpecFlowError as error:
                found[number] = error
        for name, group in asked.items():
            results = self._player(name).run_many([config for _, config in group.values()])
            for (number, (recipe, _)), result in zip(group.items(), results, strict=True):
                found[number] = self._judged(candidates[number], recipe, result)
        return [found[number] for number in range(len(candidates))]

    def _config(self, candidate: Candidate, concurrency: int) -> tuple[Recipe, ReplayConfig]:
        recipe = self._space.recipe(candidate)
        if recipe is None or (candidate.settings and candidate.recipe not in self._trace.info.recipes):
            raise DataError(candidate.label, "not in the trace", "a recipe that was traced")
        draws = 1 if self._trace.info.greedy else DRAWS
        return recipe, ReplayConfig.of(recipe, self._trace.info, concurrency=concurrency, draws=draws)

    def _judged(
        self, candidate: Candidate, recipe: Recipe, result: ReplayResult | SpecFlowError
    ) -> Score | SpecFlowError:
        if isinstance(result, SpecFlowError):
            return result
        if not result.tokens_per_s or result.acceptance_length is None or result.p95_latency_s is None:
            return DataError(candidate.label, "no round in the trace", "prompts with longer answers")
        return Score(
            throughput=result.tokens_per_s,
            latency_p95_s=result.p95_latency_s,
            memory_bytes=self._memory(recipe),
            acceptance_length=result.acceptance_length,
            split=_split(result),
        )

    def _player(self, recipe: str) -> Replayer:
        """Prices of a recipe are looked up once for all its candidates."""
        if recipe not in self._players:
            self._players[recipe] = Replayer(self._trace, self._costs[recipe])
        return self._players[recipe]


def _split(result: ReplayResult) -> Split:
    """Seconds of the mean round; rounds that requests share are not told apart from those they do not."""
    if not result.rounds or result.config.concurrency > 1:
        return Split()
    parts = {"draft_s": result.draft_s, "target_s": result.target_s, "other_s": result.other_s}
    return Split(**{name: seconds / result.rounds for name, seconds in parts.items()})
