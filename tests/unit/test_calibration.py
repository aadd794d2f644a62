"""Calibration: measures by hand, and temperatures found where the truth is known."""

from __future__ import annotations

import random
from math import isnan, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specflow.calibration import (
    GRID,
    area_under_curve,
    brier_score,
    calibration_by_position,
    cumulative_confidence,
    expected_calibration_error,
    fit_temperatures,
    prefix_survival,
)


def rounds(count: int, scales: list[float], seed: int) -> tuple[Tensor, Tensor]:
    """A head whose log-odds are the true ones times a factor, and what became of its blocks."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(count, len(scales), generator=generator, dtype=torch.float64) * 1.2 + 1.0
    stood = torch.rand(truth.shape, generator=generator, dtype=torch.float64) < truth.sigmoid()
    return truth * torch.tensor(scales, dtype=torch.float64), stood.double().cumprod(1)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.floats(1.6, 3.5), min_size=1, max_size=4))
def test_an_over_confident_head_is_set_right(seed: int, scales: list[float]) -> None:
    fitted = fit_temperatures(*rounds(20_000, scales, seed))
    logits, survived = rounds(20_000, scales, seed + 1)
    before, after = calibration_by_position(logits, survived), calibration_by_position(logits, survived, fitted)
    for k, (raw, scaled) in enumerate(zip(before, after, strict=True)):
        assert fitted[k] == pytest.approx(scales[k], rel=0.3)
        assert scaled.error < 0.5 * raw.error
        assert scaled.error < 0.02
        assert scaled.brier < raw.brier
        assert (raw.position, raw.count) == (k + 1, 20_000)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_scaling_keeps_the_order_at_every_position(seed: int) -> None:
    logits, survived = rounds(300, [3.0, 2.0, 0.5], seed)
    fitted = fit_temperatures(logits, survived)
    assert all(temperature > 0 for temperature in fitted)
    for k in range(3):
        raw, scaled = logits[:, k], (logits[:, k] / fitted[k]).sigmoid()
        assert torch.equal(raw.argsort(stable=True), scaled.argsort(stable=True))
    alone = area_under_curve(logits[:, 0].sigmoid(), survived[:, 0])
    assert area_under_curve((logits[:, 0] / fitted[0]).sigmoid(), survived[:, 0]) == pytest.approx(alone)


def test_a_calibrated_head_is_left_alone() -> None:
    assert fit_temperatures(*rounds(20_000, [1.0, 1.0], 3)) == pytest.approx((1.0, 1.0), rel=0.15)


def test_no_temperature_does_better_where_the_ones_before_are_fixed() -> None:
    logits, survived = rounds(500, [2.5, 0.4, 3.0], 4)
    fitted = fit_temperatures(logits, survived)
    for k in range(3):
        best = expected_calibration_error(cumulative_confidence(logits, fitted)[:, k], survived[:, k])
        for other in GRID:
            tried = cumulative_confidence(logits[:, : k + 1], (*fitted[:k], other))[:, k]
            assert best <= expected_calibration_error(tried, survived[:, k]) + 1e-12


def test_survival_tells_refused_from_unknown() -> None:
    survived = prefix_survival(accepted=[3, 1, 2, 0, 0], drafted=[3, 3, 2, 1, 0], num_positions=3)
    expected = [[1, 1, 1], [1, 0, 0], [1, 1, nan], [0, 0, 0], [nan, nan, nan]]
    assert survived.isnan().tolist() == torch.tensor(expected).isnan().tolist()
    assert survived.nan_to_num(9.0).tolist() == torch.tensor(expected).nan_to_num(9.0).tolist()


def test_unknown_positions_change_nothing() -> None:
    logits, survived = rounds(2_000, [2.0, 2.0], 5)
    more = torch.cat((logits, torch.full((500, 2), 9.0))), torch.cat((survived, torch.full((500, 2), nan)))
    assert fit_temperatures(*more) == fit_temperatures(logits, survived)
    assert calibration_by_position(*more) == calibration_by_position(logits, survived)
    undrafted = torch.cat((logits, torch.full((500, 2), nan))), torch.cat((survived, torch.zeros(500, 2)))
    assert fit_temperatures(*undrafted) == fit_temperatures(logits, survived)


def test_positions_behind_a_refusal_count_as_failed() -> None:
    """Left out, they would make every prefix look as good as its last position."""
    logits, survived = rounds(20_000, [1.0, 1.0, 1.0], 6)
    censored = survived.clone()
    censored[:, 1:][survived[:, :-1] == 0] = nan
    assert calibration_by_position(logits, survived)[2].error < 0.02
    assert calibration_by_position(logits, censored)[2].error > 0.1


def test_nothing_known_gives_temperature_one() -> None:
    logits, survived = rounds(50, [3.0, 3.0], 7)
    survived[:, 1] = nan
    assert fit_temperatures(logits, survived)[1] == 1.0
    last = calibration_by_position(logits, survived)[1]
    assert (last.count, last.error) == (0, 0.0)
    assert isnan(last.area)
    assert isnan(last.brier)


def test_the_error_by_hand() -> None:
    promised = torch.tensor([0.02, 0.04, 0.97, 0.99, 1.0, 0.5], dtype=torch.float64)
    happened = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.5])
    low, high = abs(0.06 - 1.0), abs(2.96 - 2.0)
    assert expected_calibration_error(promised, happened) == pytest.approx((low + high) / 6)
    assert expected_calibration_error(promised, happened, num_bins=1) == pytest.approx(abs(3.52 - 3.5) / 6)
    assert brier_score(promised, happened) == pytest.approx((0.02**2 + 0.96**2 + 0.03**2 + 0.01**2 + 1.0) / 6)


@pytest.mark.parametrize("seed", range(5))
def test_the_area_is_the_share_of_pairs_in_the_right_order(seed: int) -> None:
    rng = random.Random(seed)
    promised = [rng.randrange(8) / 8 for _ in range(40)]
    happened = [float(rng.random() < p) for p in promised]
    pairs = [
        0.5 if one == other else float(one > other)
        for one, stood in zip(promised, happened, strict=True)
        for other, fell in zip(promised, happened, strict=True)
        if stood and not fell
    ]
    got = area_under_curve(torch.tensor(promised), torch.tensor(happened))
    assert got == pytest.approx(sum(pairs) / len(pairs))
    assert area_under_curve(-torch.tensor(promised), torch.tensor(happened)) == pytest.approx(1 - got)


def test_expected_outcomes_serve_as_well_as_drawn_ones() -> None:
    logits, _ = rounds(20_000, [2.0, 2.0], 8)
    expected = (logits / 2.0).sigmoid().cumprod(1)
    assert fit_temperatures(logits, expected) == pytest.approx((2.0, 2.0), rel=0.03)
