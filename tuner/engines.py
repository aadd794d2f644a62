"""Contestants as engines: decodes groups of requests for real, through the path that `specflow run` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from specflow.build import build_engine
from specflow.errors import DataError
from specflow.measure import merge_counts
from tuner.confirm import Group, Run
from tuner.interval import Work
from tuner.space import Candidate

if TYPE_CHECKING:
    from specflow.build import LoadedTarget
    from specflow.engine import Engine
    from specflow.recipe import Recipe
    from specflow.types import Generation, Sampling

__all__ = ["WARM_UP_TOKENS", "EngineRunner"]

WARM_UP_TOKENS = 16


class EngineRunner:
    """Runs contestants on one loaded target.

    Args:
        recipes: Contestant -> recipe, made when it first runs.
        loaded: The target.
        settings: Length, stop and other settings that every request gets alike.
        concurrency: Requests decoded together.
        plain: Whose texts the others are compared with.
    """

    def __init__(
        self,
        recipes: Callable[[Candidate], Recipe | None],
        loaded: LoadedTarget,
        settings: Mapping[str, object],
        concurrency: int,
        plain: Candidate,
    ) -> None:
        self._recipes, self._loaded, self._settings = recipes, loaded, dict(settings)
        self._concurrency, self._plain = concurrency, plain
        self._engines: dict[Candidate, tuple[Engine, Sampling]] = {}
        self._texts: dict[str, list[tuple[int, ...]]] = {}

    def warm_up(self, candidate: Candidate, group: Group) -> None:
        """Build the engine and decode a little.

        Raises:
            SpecFlowError: It cannot run.
        """
        self._decode(candidate, group, WARM_UP_TOKENS)

    def run(self, candidate: Candidate, group: Group) -> Run:
        """Decode a group; prefills are not timed.

        Raises:
            SpecFlowError: It failed.
        """
        began = perf_counter()
        made = self._decode(candidate, group)
        wall_s = perf_counter() - began
        longest = max(made, key=lambda each: each.counts.num_rounds)  # the one that was in every round
        seconds = longest.timings.decode_s if len(made) == 1 else wall_s - sum(m.timings.prefill_s for m in made)
        tokens = sum(len(each.tokens) - 1 for each in made)  # the first came with the prefill
        counts = merge_counts(each.counts for each in made)
        equal = self._compared(candidate, group, [each.tokens for each in made])
        return Run(Work(tokens, seconds, _spans(made)), counts, longest.timings, longest.counts.num_rounds, equal)

    def _decode(self, candidate: Candidate, group: Group, most: int | None = None) -> list[Generation]:
        engine, sampling = self._engine(candidate)
        shorter = {} if most is None else {"max_new_tokens": min(most, sampling.max_new_tokens)}
        each = [sampling.model_copy(update={"seed": group.seed + n, **shorter}) for n in range(len(group.prompts))]
        return engine.generate(group.prompts, each)

    def _engine(self, candidate: Candidate) -> tuple[Engine, Sampling]:
        if candidate not in self._engines:
            recipe = self._recipes(candidate)
            if recipe is None:
                raise DataError(candidate.label, "values that do not go together", "a valid recipe")
            together = recipe.runtime.model_copy(update={"batch": self._concurrency})
            engine = build_engine(recipe.model_copy(update={"runtime": together}), self._loaded)
            self._engines[candidate] = engine, recipe.sampling.model_copy(update=self._settings)
        return self._engines[candidate]

    def _compared(self, candidate: Candidate, group: Group, texts: list[tuple[int, ...]]) -> bool | None:
        if candidate == self._plain:
            self._texts.setdefault(group.key, texts)
        return self._texts[group.key] == texts if group.key in self._texts else None


def _spans(made: Sequence[Generation]) -> tuple[float, ...]:
    """Seconds of each request from its first token to its last, without the prompts that were scored meanwhile.

    All requests are admitted before the first round, so each waits for the prompts of those that come after it.
    """
    prefills = [each.timings.prefill_s for each in made]
    return tuple(each.timings.decode_s - sum(prefills[number + 1 :]) for number, each in enumerate(made))
