"""The race: who drops out, when it ends, and what a failure does to it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specflow.errors import RequestError
from specflow.types import Counts, Timings
from tuner.budget import BudgetSpent
from tuner.choose import choose
from tuner.confirm import Group, Race, RacePlan, Run, in_turns
from tuner.interval import Work
from tuner.space import Candidate, K

PLAIN = Candidate("vanilla")


def drafted(name: str, k: int = 4) -> Candidate:
    return Candidate.of(name, {K: k})


def groups(count: int = 10, categories: tuple[str, ...] = ("code", "chat")) -> list[Group]:
    return [Group(str(n), categories[n % len(categories)], ((1, 2),), n) for n in range(count)]


class FakeRunner:
    """Speeds as they are told, on a clock of its own."""

    def __init__(self, speeds: dict[Candidate, float], noise: float = 0.01, fails: dict[Candidate, int] | None = None):
        self.speeds, self.noise, self.fails = speeds, noise, dict(fails or {})
        self.now, self.order = 0.0, []  # type: ignore[var-annotated]
        self.by_category: dict[tuple[Candidate, str], float] = {}
        self.chance = random.Random(7)

    def clock(self) -> float:
        return self.now

    def warm_up(self, candidate: Candidate, group: Group) -> None:
        if self.fails.get(candidate) == -1:
            raise RequestError("warm-up", "no room")

    def run(self, candidate: Candidate, group: Group) -> Run:
        self.order.append((group.key, candidate))
        if candidate in self.fails:
            self.fails[candidate] -= 1
            if self.fails[candidate] < 0:
                raise RequestError(group.key, "the drafter broke")
        rate = self.by_category.get((candidate, group.category), self.speeds[candidate])
        seconds = 50.0 / (rate * (1.0 + self.chance.gauss(0.0, self.noise)))
        self.now += seconds
        counts = Counts(10, 10, 10, 40, 30, 41, [10] * 4, [10, 9, 8, 7], [9, 8, 7, 6], [10], [30])
        timings = Timings(draft_s=seconds / 4, target_s=seconds / 2, verify_s=0.0, other_s=seconds / 8)
        return Run(Work(50.0, seconds), counts, timings, 10)


def race(runner: FakeRunner, *contestants: Candidate, **plan: object) -> Race:
    facts: dict[str, object] = {"clock": runner.clock, **plan}
    return in_turns(contestants, PLAIN, groups(), runner, RacePlan(**facts))  # type: ignore[arg-type]


def winner(found: Race) -> Candidate:
    measured = found.measured()
    return choose(measured, PLAIN, {each: (1, 0, 0, each.k, each.recipe) for each in measured}).winner


def test_everybody_runs_every_prompt_and_the_order_rotates() -> None:
    fast = drafted("fast")
    runner = FakeRunner({PLAIN: 10.0, fast: 11.0}, noise=0.3)
    race(runner, fast, most_passes=1)
    firsts = [runner.order[index][1] for index in range(0, len(runner.order), 2)]
    assert {firsts[0], firsts[1]} == {PLAIN, fast}
    assert len(runner.order) == 20


def test_clear_intervals_end_it_after_one_pass() -> None:
    fast = drafted("fast")
    runner = FakeRunner({PLAIN: 10.0, fast: 20.0})
    found = race(runner, fast)
    assert found.complete
    assert len(runner.order) == 20
    assert winner(found) == fast


def test_what_cannot_be_told_apart_is_run_again() -> None:
    one = drafted("one")
    runner = FakeRunner({PLAIN: 10.0, one: 10.05}, noise=0.1)
    race(runner, one, most_passes=3)
    assert len(runner.order) == 60


def test_who_is_clearly_behind_drops_out_but_keeps_its_figures() -> None:
    fast, slow = drafted("fast"), drafted("slow")
    runner = FakeRunner({PLAIN: 10.0, fast: 20.0, slow: 5.0})
    found = race(runner, fast, slow)
    assert found.dropped == [slow]
    assert len(found.all_runs(slow)) < len(found.all_runs(PLAIN))
    assert slow in found.measured()


def test_plain_decoding_never_drops_out() -> None:
    fast = drafted("fast")
    found = race(FakeRunner({PLAIN: 10.0, fast: 50.0}), fast)
    assert len(found.all_runs(PLAIN)) == 10


@pytest.mark.parametrize("after", [-1, 0, 3])
def test_a_contestant_that_fails_in_the_middle_is_left_out_with_its_reason(after: int) -> None:
    good, bad = drafted("good"), drafted("bad")
    found = race(FakeRunner({PLAIN: 10.0, good: 20.0, bad: 30.0}, fails={bad: after}), good, bad)
    assert "no room" in found.failures[bad] or "broke" in found.failures[bad]
    assert bad not in found.measured()
    assert winner(found) == good


def test_plain_decoding_that_fails_is_an_error() -> None:
    with pytest.raises(RequestError, match="broke"):
        race(FakeRunner({PLAIN: 10.0}, fails={PLAIN: 2}))


def test_the_budget_ends_it_and_keeps_what_there_is() -> None:
    one = drafted("one")
    runner = FakeRunner({PLAIN: 10.0, one: 10.5}, noise=0.2)
    race(runner, one, ends=60.0, most_passes=50)
    assert runner.now < 75.0


@pytest.mark.parametrize("ends", [60.0, 150.0])
def test_a_race_that_the_budget_ends_in_any_pass_is_not_complete(ends: float) -> None:
    """The second pass too: the answer must say that it was not decided."""
    one = drafted("one")
    assert not race(FakeRunner({PLAIN: 10.0, one: 10.05}, noise=0.3), one, ends=ends, most_passes=50).complete


def test_a_budget_too_small_for_any_comparison_is_an_error() -> None:
    one = drafted("one")
    with pytest.raises(BudgetSpent, match="--budget"):
        race(FakeRunner({PLAIN: 10.0, one: 10.5}), one, ends=6.0)


def test_classes_can_have_answers_of_their_own() -> None:
    one = drafted("one")
    runner = FakeRunner({PLAIN: 10.0, one: 20.0})
    runner.by_category[one, "chat"] = 8.0
    found = race(runner, one, most_passes=2)
    assert found.categories == ["code", "chat"]
    efforts = {PLAIN: (0, 0, 0, 0, ""), one: (1, 0, 0, 4, "one")}
    assert choose(found.measured("code"), PLAIN, efforts).winner == one
    assert choose(found.measured("chat"), PLAIN, efforts).winner == PLAIN


def test_one_run_that_the_machine_stalled_is_no_measure() -> None:
    one = drafted("one")
    runner = FakeRunner({PLAIN: 10.0, one: 10.5}, noise=0.001)
    found = race(runner, one, most_passes=3)
    before = found.measured()[one]["0"]
    found.runs[one]["0"].append(replace(found.runs[one]["0"][0], work=Work(50.0, 500.0)))
    assert found.measured()[one]["0"].rate == pytest.approx(before.rate, rel=0.01)


def test_a_round_is_split_and_the_rest_is_called_unexplained() -> None:
    fast = drafted("fast")
    found = race(FakeRunner({PLAIN: 10.0, fast: 20.0}, noise=0.0), fast)
    split = found.split(fast)
    assert split.total_s == pytest.approx(0.25)
    assert split.unexplained_s == pytest.approx(0.25 / 8)
    assert found.split(drafted("nobody")).total_s == 0.0
