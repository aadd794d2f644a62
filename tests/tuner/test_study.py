"""The search: finds the best, loses nothing when killed, shares its work, and goes on past what fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from fakes import MadeUp, prices, recipes

import tuner.study as study_module
from specflow.errors import DataError, SpecFlowError
from tuner.scoring import Score, hopeless
from tuner.space import Candidate, Space
from tuner.storage import shown
from tuner.study import Study, StudyPlan, Tried
from tuner.workers import abandoned, worker


def never(candidate: Candidate) -> None:
    return None


def plan(tmp_path: Path, **changes: object) -> StudyPlan:
    facts: dict[str, object] = {"name": "s", "storage": str(tmp_path / "study.journal"), **changes}
    return StudyPlan(**facts)  # type: ignore[arg-type]


def best(tried: list[Tried]) -> Candidate:
    scored = [each for each in tried if each.score is not None]
    return max(scored, key=lambda each: each.score.throughput).candidate  # type: ignore[union-attr]


def test_a_free_oracle_gets_the_largest_k(tmp_path: Path) -> None:
    scorer = MadeUp({"oracle": 1.0}, prices(per_row=0.0, per_draft=0.0))
    found = Study(Space(recipes("oracle")), scorer, never, plan(tmp_path)).run()
    assert len(found) == 4
    assert best(found).k == 8


def test_a_small_space_is_gone_through_once(tmp_path: Path) -> None:
    scorer = MadeUp({"a": 0.5, "b": 0.9})
    found = Study(Space(recipes("a", "b")), scorer, never, plan(tmp_path)).run()
    assert len(found) == len(scorer.asked) == len(set(scorer.asked)) == 8
    assert best(found).recipe == "b"


def test_a_large_space_is_sampled_and_the_same_seed_samples_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_module, "GRID_MOST", 3)
    space = Space(recipes("a", "b", ks=tuple(range(1, 30))))
    orders = []
    for name in ("one", "two"):
        scorer = MadeUp({"a": 0.3, "b": 0.8})
        found = Study(space, scorer, never, plan(tmp_path, name=name, trials=16, seed=3)).run()
        orders.append([each.candidate for each in found])
        assert best(found).recipe == "b"
    assert orders[0] == orders[1]


def test_what_the_cost_model_rules_out_is_never_tried(tmp_path: Path) -> None:
    scorer = MadeUp({"a": 1.0})
    study = Study(Space(recipes("a")), scorer, lambda each: "too dear" if each.k > 2 else None, plan(tmp_path))
    found = study.run()
    assert sorted(each.k for each in scorer.asked) == [1, 2]
    assert len(found) == 2
    assert study.num_ruled_out == 2


def test_hopeless_is_what_no_acceptance_can_pay_for() -> None:
    dear = prices(step=0.001, per_row=0.03, per_draft=0.03)
    assert "all accepted" in str(hopeless(4, dear, 1, 64))
    assert hopeless(4, prices(), 1, 64) is None
    deep = prices(per_draft=0.0, per_row=0.0)
    assert hopeless(48, deep, 1, 64) is None


def test_a_recipe_that_fails_in_the_middle_does_not_end_the_study(tmp_path: Path) -> None:
    scorer = MadeUp({"a": 0.9}, broken=("b",))
    found = Study(Space(recipes("a", "b")), scorer, never, plan(tmp_path)).run()
    lost = [each for each in found if each.score is None]
    assert {each.candidate.recipe for each in lost} == {"b"}
    assert all("ends in the middle" in each.reason for each in lost)
    assert best(found).recipe == "a"


class Batches(MadeUp):
    """Takes many at once, and remembers how many."""

    def score_many(self, candidates: Sequence[Candidate], concurrency: int) -> list[Score | SpecFlowError]:
        found: list[Score | SpecFlowError] = []
        for candidate in candidates:
            try:
                found.append(self.score(candidate, concurrency))
            except SpecFlowError as error:
                found.append(error)
        self.sizes = [*getattr(self, "sizes", []), len(candidates)]
        return found


def test_a_grid_is_replayed_many_at_once(tmp_path: Path) -> None:
    """Each candidate once, and the answers are those of one at a time."""
    made = {name: Batches({"a": 0.9}, broken=("b",)) for name in ("many", "few")}
    space = Space(recipes("a", "b"))
    many = Study(space, made["many"], never, plan(tmp_path, name="many")).run()
    with patch.object(study_module, "AHEAD", 1):
        few = Study(space, made["few"], never, plan(tmp_path, name="few")).run()
    assert many == few
    assert made["many"].sizes == [len(many)]
    assert made["few"].sizes == [1] * len(few)
    assert len(made["many"].asked) == len(many) == len(space.listed(100))


class Killed(Exception):
    """The process ends here."""


class Dies(MadeUp):
    def score(self, candidate: Candidate, concurrency: int) -> object:  # type: ignore[override]
        if len(self.asked) == 2:
            raise Killed
        return super().score(candidate, concurrency)


def test_a_killed_study_goes_on_and_keeps_its_finished_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(recipes("a"))
    with pytest.raises(Killed):
        Study(space, Dies({"a": 0.9}), never, plan(tmp_path)).run()
    monkeypatch.setattr(study_module, "worker", lambda: {"host": "here", "process": 1})
    monkeypatch.setattr(study_module, "abandoned", lambda trial: True)
    after = MadeUp({"a": 0.9})
    found = Study(space, after, never, plan(tmp_path)).run()
    assert len(after.asked) == 2  # two were done before, and the one that was under way is done again
    assert len(found) == 4


def test_a_worker_that_lives_keeps_its_trial(tmp_path: Path) -> None:
    space = Space(recipes("a"))
    first = Study(space, MadeUp({"a": 0.9}), never, plan(tmp_path))
    trial = first._study.ask()
    trial.set_user_attr("worker", worker())
    second = MadeUp({"a": 0.9})
    Study(space, second, never, plan(tmp_path)).run()
    assert len(second.asked) == 3


def test_two_workers_share_a_study(tmp_path: Path) -> None:
    space = Space(recipes("a", "b", ks=tuple(range(1, 9))))
    scorers = [MadeUp({"a": 0.5, "b": 0.9}) for _ in range(2)]
    found: list[list[Tried]] = []

    def work(scorer: MadeUp) -> None:
        found.append(Study(Space(space.recipes), scorer, never, plan(tmp_path)).run())

    threads = [threading.Thread(target=work, args=(scorer,)) for scorer in scorers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asked = [candidate for scorer in scorers for candidate in scorer.asked]
    assert len(asked) == len(set(asked)) == 16
    assert len(max(found, key=len)) == 16


def test_several_objectives_are_all_kept(tmp_path: Path) -> None:
    objectives = ("throughput", "latency", "memory")
    found = Study(Space(recipes("a")), MadeUp({"a": 0.9}), never, plan(tmp_path, objectives=objectives)).run()
    assert len(found) == 4
    assert all(each.score is not None for each in found)


def test_an_old_trial_of_another_host_is_given_up(tmp_path: Path) -> None:
    other = {"host": "elsewhere", "process": 1}
    fresh, old = (datetime.now() - timedelta(minutes=minutes) for minutes in (1, 30))
    for began, given_up in ((fresh, False), (old, True), (None, False)):
        trial = SimpleNamespace(user_attrs={"worker": other}, datetime_start=began)
        assert abandoned(trial) is given_up  # type: ignore[arg-type]


def test_a_trial_of_a_process_that_ended_is_given_up_at_once() -> None:
    gone = {**worker(), "process": 2**22 + 1}
    trial = SimpleNamespace(user_attrs={"worker": gone}, datetime_start=datetime.now())
    assert abandoned(trial)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "storage", ["sqlite:////nowhere/at/all.db", "nonsense://x", "{tmp}/no/such/folder/study.journal"]
)
def test_a_storage_that_cannot_be_reached_is_named(tmp_path: Path, storage: str) -> None:
    place = storage.format(tmp=tmp_path)
    with pytest.raises(DataError, match="--storage"):
        Study(Space(recipes("a")), MadeUp({}), never, plan(tmp_path, storage=place)).run()


def test_passwords_are_not_shown() -> None:
    assert shown("postgresql://me:secret@host/db") == "postgresql://me:...@host/db"
