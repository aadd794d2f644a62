"""Timings that are not to be trusted, and cost models from them: measured again, refused, and put together."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median

import pytest
from fakes import prices, sure

from specflow.cost import CostModel, ProfileKey, Timing, load_profile, profile_data, save_profile
from specflow.errors import DataError
from specflow.measure import Spread, spread
from tuner.profile import measured_twice, with_target


def noisy(wide: int, sound: int) -> CostModel:
    rows = range(1, wide + sound + 1)
    spreads = [Spread(0.03, 0.02, 0.04, 5) if row <= wide else sure(0.03) for row in rows]
    return CostModel(target=tuple(Timing(row, 1, 64, each) for row, each in zip(rows, spreads, strict=True)))


def test_noisy_timings_are_refused() -> None:
    with pytest.raises(DataError, match="too wide to be trusted"):
        measured_twice("target", lambda repeats: noisy(5, 5))


def test_they_are_taken_where_the_user_says_so_and_named() -> None:
    assert len(measured_twice("target", lambda repeats: noisy(5, 5), trust_noise=True).doubts) == 5


def test_a_noisy_minute_is_measured_again_with_more_repeats() -> None:
    asked = []

    def measure(repeats: int) -> CostModel:
        asked.append(repeats)
        return noisy(5, 5) if repeats == 1 else noisy(1, 9)

    assert len(measured_twice("target", measure).doubts) == 1
    assert asked == [1, 2]


def test_quiet_timings_are_measured_once() -> None:
    asked: list[int] = []
    assert measured_twice("target", lambda repeats: asked.append(repeats) or prices()).doubts == ()  # type: ignore[func-returns-value]
    assert asked == [1]


def test_every_recipe_is_compared_with_the_same_plain_steps() -> None:
    target, drafter = prices(step=0.03), prices(step=0.05, per_draft=0.004)
    both = with_target(drafter, target)
    assert both.round_s(0, 1, 64) == target.round_s(0, 1, 64)
    assert both.draft_s(4, 1, 64) == drafter.draft_s(4, 1, 64)


def test_a_staircase_with_noise_is_recovered() -> None:
    chance = random.Random(1)

    def truth(rows: int, context: int) -> float:
        return 0.02 + 0.01 * ((rows - 1) // 8) + 2e-5 * context

    def timing(rows: int, context: int) -> Timing:
        samples = [truth(rows, context) * (1 + abs(chance.gauss(0, 0.03))) for _ in range(7)]
        found = spread(samples)
        assert found is not None
        return Timing(rows, 1, context, found)

    sizes, contexts = (1, 2, 4, 6, 8, 9, 12, 16, 17, 24, 25, 32), (64, 512, 1024)
    model = CostModel(target=tuple(timing(rows, context) for rows in sizes for context in contexts))
    errors = [abs(model.target_s(rows, 1, 300) / truth(rows, 300) - 1) for rows in range(1, 33)]
    assert median(errors) < 0.04
    on_steps = [abs(model.target_s(rows, 1, 300) / truth(rows, 300) - 1) for rows in sizes]
    assert max(on_steps) < 0.08


def test_a_profile_of_another_machine_is_refused_with_what_differs(tmp_path: Path) -> None:
    target = {"name": "m", "dtype": "float32", "device": "cpu", "runtime": "native"}
    there = ProfileKey(target, None, {"cpu_model": "other", "threads": 2})
    here = ProfileKey(target, None, {"cpu_model": "this", "threads": 2})
    path = tmp_path / "profile.json"
    save_profile(path, profile_data(there, prices(), {}))
    assert load_profile(path, there).target
    with pytest.raises(DataError, match="cpu_model: 'other' there, 'this' here"):
        load_profile(path, here)
