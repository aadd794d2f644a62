"""Profiles that workers of a study share: measured once, by one of them, for machines of one kind."""

from __future__ import annotations

import threading
from pathlib import Path
from time import sleep

import pytest
from fakes import FakeLab, prices, tuned
from optuna.trial import TrialState, create_trial

from specflow.errors import DataError
from tuner.budget import BudgetSpent
from tuner.profile import Profiled
from tuner.shared_costs import SharedCosts

HERE = {"cpu_model": "abacus", "threads": 2}


def never() -> Profiled:
    raise AssertionError("it is known")


def nothing() -> None:
    pass


def place(folder: Path, kind: str) -> str:
    return f"sqlite:///{folder}/study.db" if kind == "database" else str(folder / "study.journal")


@pytest.mark.parametrize("kind", ["journal", "database"])
def test_a_second_worker_takes_what_the_first_has_measured(tmp_path: Path, kind: str) -> None:
    storage, found = place(tmp_path, kind), Profiled(prices(), ("rows 3 spread wide",))
    assert SharedCosts(storage, "s", HERE).get("good", lambda: found, nothing) == found
    other = SharedCosts(storage, "s", HERE)
    assert other.get("good", never, nothing) == found
    with pytest.raises(AssertionError, match="known"):
        other.get("another", never, nothing)


def test_a_worker_on_another_machine_is_refused_with_what_differs(tmp_path: Path) -> None:
    storage = place(tmp_path, "journal")
    SharedCosts(storage, "s", HERE)
    with pytest.raises(DataError, match=r"threads: 2 there, 4 here") as error:
        SharedCosts(storage, "s", {**HERE, "threads": 4})
    assert "storage of its own" in error.value.hint
    SharedCosts(storage, "another study", {**HERE, "threads": 4})


def test_workers_that_come_at_once_measure_once(tmp_path: Path) -> None:
    storage, measured, found = place(tmp_path, "journal"), [], []
    start = threading.Barrier(3)

    def measure() -> Profiled:
        measured.append(1)
        sleep(0.3)
        return Profiled(prices())

    def work() -> None:
        shared = SharedCosts(storage, "s", HERE)
        start.wait()
        found.append(shared.get("good", measure, nothing))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert found == [Profiled(prices())] * 3
    assert len(measured) == 1


def test_what_is_told_between_the_last_two_looks_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, found = place(tmp_path, "journal"), Profiled(prices())
    late = SharedCosts(storage, "s", HERE)

    def leaves(recipe: str, number: int) -> bool:
        data = {"model": found.model.to_data(), "doubts": []}
        late._study.set_user_attr(f"costs of {recipe}", data)
        return False

    monkeypatch.setattr(late, "_others_before", leaves)
    assert late.get("good", never, nothing) == found


def test_where_one_fails_the_next_measures(tmp_path: Path) -> None:
    storage = place(tmp_path, "journal")

    def noisy() -> Profiled:
        raise DataError("profile", "too noisy", "a quiet machine")

    with pytest.raises(DataError, match="too noisy"):
        SharedCosts(storage, "s", HERE).get("good", noisy, nothing)
    assert SharedCosts(storage, "s", HERE).get("good", lambda: Profiled(prices()), nothing) == Profiled(prices())


@pytest.mark.parametrize("process", [2**22 + 1, 1])
def test_nobody_waits_for_a_worker_that_is_gone_nor_longer_than_the_budget(tmp_path: Path, process: int) -> None:
    from socket import gethostname

    shared = SharedCosts(place(tmp_path, "journal"), "s", HERE)
    facts = {"recipe": "good", "worker": {"host": gethostname(), "process": process}}
    shared._study.add_trial(create_trial(state=TrialState.RUNNING, user_attrs=facts))

    def spent() -> None:
        raise BudgetSpent("--budget", "spent", "time")

    if process == 1:  # there all the time
        with pytest.raises(BudgetSpent):
            shared.get("good", never, spent)
    else:
        assert shared.get("good", lambda: Profiled(prices()), spent) == Profiled(prices())


def test_a_whole_run_measures_nothing_that_another_worker_has(tmp_path: Path) -> None:
    first = tuned(tmp_path, FakeLab({"good": 0.9}), "good")
    lab = FakeLab({"good": 0.9}, broken={"good": "profile", "vanilla": "profile"})
    again = tuned(tmp_path, lab, "good")
    assert again.costs == first.costs
    assert not again.refused
    with pytest.raises(DataError, match="too noisy"):  # other batches have prices of their own
        tuned(tmp_path, lab, "good", concurrency=(1, 16))


def test_a_whole_run_on_another_machine_refuses_before_anything_is_measured(tmp_path: Path) -> None:
    tuned(tmp_path, FakeLab({"good": 0.9}), "good")
    lab = FakeLab({"good": 0.9})
    lab.machine = {"cpu_model": "slide rule", "threads": 2}
    with pytest.raises(DataError, match="cpu_model: 'abacus' there, 'slide rule' here"):
        tuned(tmp_path, lab, "good")
    assert lab.now == 0.0
