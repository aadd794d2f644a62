"""Drift: what counts as one, and what noise alone must not make one."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FakeLab, tuned

from specflow.errors import DataError
from specflow.files import file_sha256
from tuner.check import Tolerance, baseline_of, changed_files, compare
from tuner.confirm import Race, RacePlan, in_turns
from tuner.result import Confirmed, TuneResult
from tuner.space import Candidate

PLAIN = Candidate("vanilla")


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    return tuned(tmp_path_factory.mktemp("run"), FakeLab({"good": 0.8}), "good")


def race(baseline: TuneResult, chance: float = 0.8, noise: float = 0.01) -> tuple[Confirmed, Race, Candidate]:
    then = baseline_of(baseline)
    assert then is not None
    lab, answer = FakeLab({"good": chance}, noise=noise), then.choice.candidate
    plan = RacePlan(most_passes=1, clock=lab.clock)
    return then, in_turns([answer], PLAIN, lab.groups(1), lab, plan), answer


def test_nothing_changed_is_no_drift(baseline: TuneResult) -> None:
    assert compare(*race(baseline), Tolerance()).sound


@pytest.mark.parametrize("chance", [0.5, 0.95])
def test_acceptance_and_speed_up_drift_in_both_directions(baseline: TuneResult, chance: float) -> None:
    found = compare(*race(baseline, chance), Tolerance(0.05, 0.05))
    assert len(found.drifts) == 2
    assert ("less" if chance < 0.8 else "more") in found.drifts[0]


def test_noise_alone_is_no_drift(baseline: TuneResult) -> None:
    assert compare(*race(baseline, noise=0.3), Tolerance(0.05, 0.05)).sound


def test_a_wide_tolerance_lets_it_pass(baseline: TuneResult) -> None:
    assert compare(*race(baseline, 0.7), Tolerance(1.0, 1.0)).sound


def test_an_answer_that_fails_now_is_an_error(baseline: TuneResult) -> None:
    then, found, answer = race(baseline)
    found.failures[answer] = "the weights are gone"
    with pytest.raises(DataError, match="the weights are gone"):
        compare(then, found, answer, Tolerance())


def test_prompts_have_to_be_the_same(baseline: TuneResult, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("{}", encoding="utf-8")
    files = {str(file): file_sha256(file), str(tmp_path / "gone.jsonl"): "0"}
    work = baseline.workload.model_copy(update={"files": files})
    found = changed_files(baseline.model_copy(update={"workload": work}))
    assert found == [f"{tmp_path / 'gone.jsonl'}: not there"]
    file.write_text("{ }", encoding="utf-8")
    assert len(changed_files(baseline.model_copy(update={"workload": work}))) == 2
    work = work.model_copy(update={"files": {"data/gone.jsonl": "0"}})
    assert changed_files(baseline.model_copy(update={"workload": work})) == [f"data/gone.jsonl: not in {Path.cwd()}"]


def test_a_baseline_without_its_own_measurement_is_an_error(baseline: TuneResult) -> None:
    with pytest.raises(DataError, match="no measurement of its answer"):
        baseline_of(baseline.model_copy(update={"confirmed": []}))
