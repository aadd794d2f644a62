"""Whole runs on made-up machines: the answers that the tuner has to give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLab, plan_of, prices, recipes, tuned

from specflow.errors import DataError
from specflow.recipe import parse_recipe
from tuner.budget import Budget, BudgetSpent
from tuner.confirm import Race, in_turns
from tuner.explain import explain
from tuner.report import report
from tuner.result import TuneResult, read_result, write_result
from tuner.tune import tune
from tuner.words import answer_line, break_even_line, judged_line


def test_an_always_wrong_drafter_makes_the_answer_plain_decoding(tmp_path: Path) -> None:
    found = tuned(tmp_path, FakeLab({"wrong": 0.0}), "wrong")
    assert not found.answer.speculate
    assert "Do not speculate" in found.answer.reason
    assert parse_recipe(found.recipe).draft is None
    assert any(each.choice.recipe == "wrong" for each in found.confirmed)  # it was run, not only guessed


def test_a_free_oracle_makes_the_answer_the_largest_k(tmp_path: Path) -> None:
    free = prices(per_row=0.0, per_draft=0.0)
    found = tuned(tmp_path, FakeLab({"oracle": 1.0}, free), "oracle")
    assert found.answer.speculate
    assert found.answer.choice.settings["draft.k"] == 8
    assert found.answer.speed_up.value == pytest.approx(9.0, rel=0.05)
    assert parse_recipe(found.recipe).draft.k == 8  # type: ignore[union-attr]


@pytest.mark.parametrize("ks", [(0, 4), (0,)])
def test_k_0_in_a_tune_section_is_plain_decoding(tmp_path: Path, ks: tuple[int, ...]) -> None:
    """Which is measured anyway, so no trial is spent on it."""
    lab, some = FakeLab({"good": 0.9}), recipes("good", ks=ks)
    how = Budget(None, lab.clock), lambda what: None
    found, _ = tune({"good": some["good"]}, some["vanilla"], lab, plan_of(tmp_path), how)
    assert [each.choice.candidate.k for each in found.predictions] == [k for k in ks if k]
    assert found.answer.speculate == any(ks)
    assert any(ks) or "K = 0 is plain decoding" in found.refused[0].reason


def test_the_better_of_two_methods_wins_and_predictions_hold(tmp_path: Path) -> None:
    found = tuned(tmp_path, FakeLab({"good": 0.9, "poor": 0.4}), "good", "poor")
    assert found.answer.choice.recipe == "good"
    assert max(found.errors) < 0.05


@pytest.mark.parametrize("k_costs", [0.004, 0.0001])
def test_drafting_is_switched_off_beyond_the_length_at_which_it_stops_paying(tmp_path: Path, k_costs: float) -> None:
    """Acceptance that fades with the context (speculators PR 684); where rounds cost next to nothing it still pays."""
    costs = prices(per_row=0.01 * k_costs, per_draft=k_costs)
    found = tuned(tmp_path, FakeLab({"good": 0.9}, costs, fades={"good": 0.05}), "good")
    stops = found.answer.choice.settings.get("length.until")
    if k_costs < 0.001:
        assert stops is None
        return
    assert stops == 4096
    recipe = parse_recipe(found.recipe)
    assert (recipe.length.policy, recipe.length.until) == ("fixed", 4096)
    without = [each for each in found.confirmed if each.choice.settings and "length.until" not in each.choice.settings]
    assert all(each.speed_up.value < found.answer.speed_up.value for each in without)
    said = next(each for each in found.warnings if "stops paying at 4096" in each)
    assert "length.until=4096" in said
    assert "until 4096" in answer_line(found.answer)


def test_a_length_to_stop_at_that_nobody_had_time_to_run_is_told(tmp_path: Path) -> None:
    costs, fades = prices(per_draft=0.004), {"good": 0.05}
    for name in ("whole", "short"):
        (tmp_path / name).mkdir()
    whole = tuned(tmp_path / "whole", FakeLab({"good": 0.9}, costs, fades=fades), "good", most_passes=1)
    took = sum(whole.seconds[phase] for phase in ("preflight", "profile", "trace", "search"))
    lab = FakeLab({"good": 0.9}, costs, fades=fades)
    found = tuned(tmp_path / "short", lab, "good", budget=took + 0.4 * whole.seconds["confirm"], most_passes=1)
    assert "length.until" not in found.answer.choice.settings
    assert any("was not run for lack of time" in each for each in found.warnings)


def test_an_error_while_a_length_to_stop_at_runs_is_no_lack_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    races = iter((in_turns, None))

    def breaks(*args: Any) -> Race:
        race = next(races)
        if race is None:
            raise DataError("plain decoding", "broke", "a run")
        return race(*args)

    monkeypatch.setattr("tuner.tune.in_turns", breaks)
    with pytest.raises(DataError, match="broke"):
        tuned(tmp_path, FakeLab({"good": 0.9}, prices(per_draft=0.004), fades={"good": 0.05}), "good")


def test_a_prediction_that_does_not_come_true_does_not_win(tmp_path: Path) -> None:
    lab = FakeLab({"boaster": 0.95, "honest": 0.7}, real={"boaster": 0.1})
    found = tuned(tmp_path, lab, "boaster", "honest")
    assert found.answer.choice.recipe == "honest"


def test_nothing_that_drafts_is_plain_decoding_too(tmp_path: Path) -> None:
    found = tuned(tmp_path, FakeLab({}))
    assert not found.answer.speculate
    assert found.confirmed[0].choice.label == "vanilla"


@pytest.mark.parametrize("phase", ["preflight", "profile", "confirm"])
def test_a_recipe_that_fails_is_named_with_phase_and_reason_and_the_rest_goes_on(tmp_path: Path, phase: str) -> None:
    lab = FakeLab({"good": 0.9, "bad": 0.99}, broken={"bad": phase})
    found = tuned(tmp_path, lab, "good", "bad")
    assert found.answer.choice.recipe == "good"
    assert next(each.phase for each in found.refused if each.recipe.startswith("bad")) == phase


@pytest.mark.parametrize("phase", ["trace", "search"])
def test_what_cannot_be_predicted_is_still_run_with_its_own_settings(tmp_path: Path, phase: str) -> None:
    lab = FakeLab({"good": 0.5, "odd": 0.95}, broken={"odd": phase})
    found = tuned(tmp_path, lab, "good", "odd")
    assert found.answer.choice.recipe == "odd"
    row = next(each for each in found.confirmed if each.choice.recipe == "odd")
    assert row.predicted_speed_up is None
    assert found.refused[0].phase == phase


def test_what_no_acceptance_can_pay_for_is_never_run(tmp_path: Path) -> None:
    dear = prices(step=0.001, per_row=0.03, per_draft=0.03)
    found = tuned(tmp_path, FakeLab({"dear": 1.0}, dear), "dear")
    assert found.hopeless == 4
    assert found.trials == 0
    assert [each.choice.label for each in found.confirmed] == ["vanilla"]
    assert "all accepted" in found.refused[0].reason


@pytest.mark.parametrize(("budget", "phase"), [(0.5, "profile"), (5.0, "trace"), (14.5, "confirm")])
def test_a_budget_too_small_for_one_trial_says_so(tmp_path: Path, budget: float, phase: str) -> None:
    with pytest.raises(DataError, match="--budget"):
        tuned(tmp_path, FakeLab({"good": 0.9}), "good", budget=budget)


def test_a_spent_budget_names_the_phase_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BudgetSpent, match="before trace was done") as error:
        tuned(tmp_path, FakeLab({"good": 0.9}), "good", budget=5.0)
    assert "goes on from them" in str(error.value)


def test_loads_have_answers_of_their_own_and_a_schedule(tmp_path: Path) -> None:
    lab = FakeLab({"good": 0.8}, prices(per_row=0.004))
    found = tuned(tmp_path, lab, "good", concurrency=(1, 16))
    ks = [level.k for level in found.schedule]
    assert len(ks) == 2
    assert ks[0] > ks[1]
    assert found.schedule[1].leave < found.schedule[1].enter
    assert {each.concurrency for each in found.confirmed} == {1, 16}


def test_a_drafter_that_accepts_far_less_than_was_recorded_is_told(tmp_path: Path) -> None:
    lab = FakeLab({"good": 0.5}, agreed={"good": 0.9})
    (told,) = {hint for each in tuned(tmp_path, lab, "good").acceptance for hint in each.hints}
    assert "50% of first draft tokens stand" in told
    assert "90%" in told


def test_a_damaged_record_beside_the_weights_costs_a_warning(tmp_path: Path) -> None:
    found = tuned(tmp_path, FakeLab({"good": 0.9}, broken={"good": "recorded"}), "good")
    assert len(found.acceptance) > 1
    assert sum(each.startswith("good: selftest.json: cannot be read") for each in found.warnings) == 1
    assert found.answer.choice.recipe == "good"


def test_classes_of_requests_have_answers_of_their_own_where_they_differ(tmp_path: Path) -> None:
    lab = FakeLab({"good": 0.9}, by_category={"chat": 0.0})
    found = tuned(tmp_path, lab, "good")
    answers = {each.category: each for each in found.categories}
    assert answers["code"].choice.recipe == "good"
    assert answers["chat"].choice.recipe == "vanilla"
    for each in found.categories:
        assert each.differs == (each.choice.recipe != found.answer.choice.recipe)


@pytest.mark.parametrize(("objective", "winner"), [("throughput", "bursty"), ("latency", "steady")])
def test_the_objective_steers_the_verdict_and_all_that_is_said_of_it(
    tmp_path: Path, objective: str, winner: str
) -> None:
    """One drafter is the fastest on the whole and stalls on some requests, the other is never slow."""
    lab = FakeLab({"bursty": 0.95, "steady": 0.6}, stalls={"bursty": 3.0})
    found = tuned(tmp_path, lab, "bursty", "steady", objectives=(objective,))
    answer, page = found.answer, report(found)
    assert (answer.choice.recipe, answer.objective) == (winner, objective)
    assert answer.gain is not None
    assert found.confirmed[0].choice.recipe == winner
    assert f"Judged by {objective}: it beat plain decoding in" in page
    if objective == "throughput":
        assert answer.gain == answer.speed_up
        return
    row = found.confirmed[0]
    assert row.latency_gain == answer.gain != answer.speed_up
    assert f"p95 latency {row.latency_p95_s:.2f} s" in explain(found)
    assert "times shorter than plain decoding" in answer_line(answer)
    assert all("p95 latency" in break_even_line(each) for each in found.break_even)
    assert 'id="objectives"' in page
    assert "Predicted p95 latency by K" in page
    assert read_result_of(tmp_path, found).answer.objective == "latency"


def read_result_of(folder: Path, result: TuneResult) -> TuneResult:
    write_result(folder / "tuned.json", result)
    return read_result(folder)


def test_memory_picks_the_lightest_of_what_beats_plain_decoding(tmp_path: Path) -> None:
    lab = FakeLab({"a": 0.9})
    fastest, lightest = (tuned(tmp_path, lab, "a", objectives=each) for each in (("throughput",), ("memory",)))
    k = fastest.answer.choice.candidate.k
    assert lightest.answer.speculate
    assert lightest.answer.choice.candidate.k == 1 < k
    assert lightest.answer.decided_by == "memory"
    assert "memory decided" in judged_line(lightest)


def test_several_objectives_give_a_front(tmp_path: Path) -> None:
    found = tuned(tmp_path, FakeLab({"good": 0.9}), "good", objectives=("throughput", "memory"))
    front = [each for each in found.predictions if each.pareto]
    assert any(each.pareto for each in found.confirmed)
    assert len(front) >= 2
    assert len({each.memory_bytes for each in front}) == len(front)


def test_an_unknown_objective_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--objective"):
        tuned(tmp_path, FakeLab({}), objectives=("beauty",))


def test_a_second_run_on_the_same_study_tries_nothing_again(tmp_path: Path) -> None:
    first = tuned(tmp_path, FakeLab({"good": 0.9}), "good")
    again = tuned(tmp_path, FakeLab({"good": 0.9}, broken={"good": "search"}), "good")
    assert again.trials == first.trials
    assert again.answer.choice == first.answer.choice


def test_the_result_survives_its_file(tmp_path: Path) -> None:
    found = tuned(tmp_path, FakeLab({"é ü": 0.9}), "é ü", concurrency=(1, 4))
    write_result(tmp_path / "tuned.json", found)
    assert read_result(tmp_path) == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "specflow-tuned-1"}', "\xff", '{"format": "other"}'])
def test_a_file_that_is_no_result_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tuned.json").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=r"tuned\.json"):
        read_result(tmp_path)


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_result(tmp_path / "nowhere.json")


def test_breaking_even_is_told_for_every_depth_that_was_looked_at(tmp_path: Path) -> None:
    found = tuned(tmp_path, FakeLab({"good": 0.9}), "good")
    assert [each.k for each in found.break_even] == [1, 2, 4, 8]
    assert any(each.measured for each in found.break_even)
    assert all(each.plain_steps > 1.0 for each in found.break_even)
