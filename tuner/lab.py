"""What a tuning run asks of whoever loads, times and decodes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from specflow.cost import CostModel
from specflow.recipe import Recipe
from tuner.confirm import Group, Runner
from tuner.profile import Profiled
from tuner.result import Refused
from tuner.scoring import Scorer
from tuner.space import Space

__all__ = ["Advance", "Lab"]

Advance = Callable[[str], None]
"""Called with the name of what was done."""


class Lab(Protocol):
    """What loads, times and decodes; `laboratory.Laboratory` does it for real."""

    @property
    def target(self) -> Mapping[str, Any]: ...

    @property
    def machine(self) -> Mapping[str, Any]: ...

    @property
    def context(self) -> int: ...

    def applies(self, recipes: Mapping[str, Recipe]) -> tuple[dict[str, Recipe], list[Refused], list[str]]: ...

    def profile(self, recipe: Recipe, target: CostModel | None, advance: Advance) -> Profiled: ...

    def trace(
        self, recipes: Mapping[str, Recipe], space: Space, costs: Mapping[str, CostModel], advance: Advance
    ) -> tuple[Scorer, list[Refused]]: ...

    def memory(self, recipe: Recipe) -> int: ...

    def placed(self, recipe: Recipe) -> str: ...

    def recorded(self, recipe: Recipe) -> float | None: ...

    def groups(self, concurrency: int) -> list[Group]: ...

    def runner(self, space: Space, concurrency: int, costs: Mapping[str, CostModel]) -> Runner: ...

    def with_costs(self, recipe: Recipe, model: CostModel) -> Recipe: ...

    def provenance(self, files: Sequence[Path] = ()) -> dict[str, Any]: ...
