"""Temperatures of a trained confidence head, fitted to what becomes of its blocks in real rounds.

The drafter decodes held-out prompts with blocks of a fixed length: a policy that follows the confidence would also
choose which outcomes are seen. Half of the prompts fit the temperatures, the other half says what they are worth.
Temperatures belong to the sampling and the rule of the recipe; greedy decoding and a warm one want different ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specflow.build import build_drafter, build_rule, threads_beside
from specflow.calibration import (
    Calibration,
    calibration_by_position,
    cumulative_confidence,
    expected_calibration_error,
    fit_temperatures,
    prefix_survival,
)
from specflow.draft.checkpoint import read_options
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.files import write_json_atomic
from specflow.length import Fixed
from specflow.recipe_sections import length_sections
from specflow.train.sequences import key_of

if TYPE_CHECKING:
    from specflow.build import LoadedTarget
    from specflow.recipe import Recipe
    from specflow.recipe_draft import SourceSection
    from specflow.types import DraftBlock, Sampling

__all__ = ["CalibrationPlan", "CalibrationResult", "Rounds", "calibrate_drafter", "fit_and_check", "write_temperatures"]

log = logging.getLogger(__name__)

_SURE = 1e-7
"""A confidence nearer to 0 or 1 than this has lost its log-odds in float32."""


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """How much is decoded. Ten thousand rounds tell errors of 0.01 from chance."""

    rounds: int = 8192  # for fitting and for checking together
    tokens: int = 128  # most of an answer
    batch: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Rounds:
    """What a head promised in n rounds, and what happened."""

    odds: Tensor  # [n, K] float64 log-odds without temperatures; NaN where nothing was drafted
    survived: Tensor  # [n, K] float64 as `prefix_survival` says


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """Temperatures, and errors on rounds that did not fit them."""

    temperatures: tuple[float, ...]  # [K]
    fitted_on: int  # rounds
    checked_on: int  # rounds
    error_before: float  # expected calibration error of the survival of all prefixes, without temperatures
    error: float  # with them
    before: tuple[Calibration, ...]  # [K] by position
    after: tuple[Calibration, ...]  # [K]

    def facts(self) -> dict[str, Any]:
        """As JSON holds it."""
        found: dict[str, Any] = _rounded(asdict(self))
        return found


def calibrate_drafter(
    recipe: Recipe, place: int, loaded: LoadedTarget, prompts: Sequence[Sequence[int]], plan: CalibrationPlan
) -> CalibrationResult | None:
    """Decode with a trained drafter, and fit the temperatures of its head.

    Args:
        recipe: Names its checkpoint; its sampling and its rule are what the temperatures are for.
        place: Of the drafter among the draft's parts.
        loaded: The target.
        prompts: Held-out ones, chat template included; the first half of them fits.
        plan: How much is decoded.

    Returns:
        None where nothing can be said: the drafter makes trees, which carry no confidence, or no round was made.
    """
    section = _section(recipe, place)
    drafter = build_drafter(_alone(recipe, section), loaded)
    assert drafter is not None, "a checkpoint that drafts nothing"
    if drafter.branches:
        log.warning("draft.shape is %s, and trees carry no confidence: it is not calibrated", section.shape)  # type: ignore[attr-defined]
        return None
    watch = _Watch(section.k)
    rule, threads = build_rule(recipe), threads_beside(recipe, loaded)
    parts = EngineParts(loaded.target, loaded.codec, rule, watch, drafter, threads)
    engine = Engine(parts, EngineSettings(plan.batch, recipe.runtime.context, recipe.runtime.prefill_chunk))
    used = read_options(section.options, section.options.weights).temperatures  # type: ignore[attr-defined]
    found = []
    for half in (prompts[::2], prompts[1::2]):
        asks = [_sampling(recipe.sampling, plan, number) for number in range(len(half))]
        made = _decode(engine, watch, half, asks, plan.rounds // 2)
        if made is None:
            log.warning("too few held-out prompts to calibrate the confidence head: %d", len(prompts))
            return None
        found.append(Rounds(made.odds * torch.tensor(used, dtype=torch.float64) if used else made.odds, made.survived))
    return fit_and_check(*found)


def fit_and_check(fit: Rounds, check: Rounds) -> CalibrationResult:
    """Fit temperatures on some rounds and try them on others."""
    temperatures = fit_temperatures(fit.odds, fit.survived)
    errors = [
        expected_calibration_error(cumulative_confidence(check.odds, each).flatten(), check.survived.flatten())
        for each in ((), temperatures)
    ]
    return CalibrationResult(
        temperatures=temperatures,
        fitted_on=len(fit.odds),
        checked_on=len(check.odds),
        error_before=errors[0],
        error=errors[1],
        before=tuple(calibration_by_position(check.odds, check.survived)),
        after=tuple(calibration_by_position(check.odds, check.survived, temperatures)),
    )


def write_temperatures(checkpoint: Path, temperatures: Sequence[float]) -> None:
    """Put them into the config.json of a checkpoint."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json_atomic(path, {**config, "temperatures": [round(each, 6) for each in temperatures]})


class _Watch(Fixed):
    """Blocks of k tokens, and what was promised of them.

    The last round of a request is left out: where a text ends, tokens that stood are not counted.
    """

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self._sure: Tensor | None = None  # [B, N] of the block that is being verified
        self._latest: list[tuple[Tensor, int, int] | None] = []  # [B]
        self._seen: list[tuple[Tensor, int, int]] = []

    def __len__(self) -> int:
        return len(self._seen)

    def reset(self, batch: int) -> None:
        self._latest, self._seen = [None] * batch, []

    def start(self, row: int) -> None:
        self._latest[row] = None

    def select(self, rows: Sequence[int]) -> None:
        self._latest = [self._latest[row] for row in rows]

    def trim(self, block: DraftBlock) -> DraftBlock:
        self._sure = None if block.confidence is None else block.confidence.double().cpu()
        return block

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        for row, counts in enumerate(zip(drafted, accepted, strict=True)):
            if (before := self._latest[row]) is not None:
                self._seen.append(before)
            self._latest[row] = (self._sure[row], *counts) if self._sure is not None and counts[0] else None
        self._sure = None

    def rounds(self) -> Rounds | None:
        """All that was seen; None if that is nothing."""
        if not self._seen:
            return None
        sure, drafted, accepted = zip(*self._seen, strict=True)
        odds = torch.full((len(sure), self.k), nan, dtype=torch.float64)
        for each, count, row in zip(sure, drafted, odds, strict=True):
            row[:count] = torch.logit(each[:count], eps=_SURE)
        return Rounds(odds, prefix_survival(accepted, drafted, self.k))


def _decode(
    engine: Engine, watch: _Watch, prompts: Sequence[Sequence[int]], asks: Sequence[Sampling], most: int
) -> Rounds | None:
    """Rounds of decoding these prompts, until there are enough."""
    for _ in engine.events(prompts, asks):
        if len(watch) >= most:
            break
    return watch.rounds() if prompts else None


def _sampling(sampling: Sampling, plan: CalibrationPlan, number: int) -> Sampling:
    decided = {"max_new_tokens": plan.tokens, "seed": key_of("calibration", plan.seed, number)}
    return sampling.model_copy(update=decided)


def _section(recipe: Recipe, place: int) -> SourceSection:
    assert recipe.draft is not None, "a recipe that decodes plainly has nothing to calibrate"
    return recipe.draft.parts[place]


def _alone(recipe: Recipe, section: SourceSection) -> Recipe:
    """The recipe with this drafter alone, whose confidence is asked for."""
    length = length_sections()["confidence"](policy="confidence")
    return recipe.model_copy(update={"draft": section, "length": length})


def _rounded(value: Any) -> Any:
    """Numbers in as many digits as mean anything; null for none."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return round(value, 5) if isfinite(value) else None
    return value
