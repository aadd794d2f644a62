"""Intervals, the choice among contestants, and the schedule by load."""

from __future__ import annotations

import itertools
import random

import pytest

from specflow.recipe import load_recipe, parse_recipe
from tuner.aims import Aims
from tuner.choose import MARGIN, SIMPLICITY, SLACK, Verdict, choose, effort, told_apart
from tuner.interval import Work, latency_s, ratio_of_latencies, ratio_of_rates
from tuner.result import Choice
from tuner.schedule import Best, Scheduler, make_schedule
from tuner.space import Candidate, K

PLAIN = Candidate("vanilla")


def work(rate: float, noise: float = 0.0, prompts: int = 12, seed: int = 0) -> dict[str, Work]:
    chance = random.Random(seed)
    return {str(n): Work(100.0, 100.0 / (rate * (1.0 + chance.gauss(0.0, noise)))) for n in range(prompts)}


def drafted(name: str, k: int) -> Candidate:
    return Candidate.of(name, {K: k})


def efforts(*all_of: Candidate) -> dict[Candidate, tuple[int, int, int, int, str]]:
    return {each: (1, 0, 0, each.k, each.recipe) for each in all_of}


class TestRatio:
    def test_is_exact_without_noise(self) -> None:
        found = ratio_of_rates(work(20.0), work(10.0))
        assert found is not None
        assert found.value == found.low == found.high == pytest.approx(2.0)

    def test_weighs_prompts_by_their_length(self) -> None:
        mine = {"a": Work(100, 10.0), "b": Work(900, 30.0), "c": Work(1, 1.0)}
        base = {"a": Work(100, 10.0), "b": Work(900, 90.0), "c": Work(1, 1.0)}
        found = ratio_of_rates(mine, base)
        assert found is not None
        assert found.value == pytest.approx(101.0 / 41.0)

    def test_covers_the_truth_about_as_often_as_it_says(self) -> None:
        hits = 0
        for seed in range(200):
            found = ratio_of_rates(work(15.0, 0.1, 8, seed), work(10.0, 0.1, 8, 1000 + seed))
            assert found is not None
            hits += found.low <= 1.5 <= found.high
        assert 178 <= hits <= 200

    def test_of_two_prompts_says_nothing_for_sure(self) -> None:
        found = ratio_of_rates(work(20.0, prompts=2), work(10.0, prompts=2))
        assert found is not None
        assert found.low == 0.0

    def test_leaves_out_what_only_one_has_and_what_made_nothing(self) -> None:
        assert ratio_of_rates({"a": Work(1, 1)}, {"b": Work(1, 1)}) is None
        assert ratio_of_rates({"a": Work(0, 1)}, {"a": Work(1, 1)}) is None


class TestChoice:
    def test_always_wrong_drafts_lose_to_plain_decoding(self) -> None:
        bad = drafted("bad", 4)
        found = choose({PLAIN: work(10.0, 0.02), bad: work(7.0, 0.02, seed=1)}, PLAIN, efforts(PLAIN, bad))
        assert found.winner == PLAIN
        assert "slower than plain decoding" in found.reason
        assert "Do not speculate" in found.reason

    def test_a_gain_within_the_noise_is_none(self) -> None:
        one = drafted("one", 4)
        found = choose({PLAIN: work(10.0, 0.2), one: work(10.6, 0.2, seed=1)}, PLAIN, efforts(PLAIN, one))
        assert found.winner == PLAIN

    def test_a_sure_gain_below_the_margin_is_none(self) -> None:
        one = drafted("one", 4)
        found = choose({PLAIN: work(10.0), one: work(10.0 * (1 + MARGIN / 2))}, PLAIN, efforts(PLAIN, one))
        assert found.winner == PLAIN

    def test_the_fastest_wins(self) -> None:
        few, many = drafted("m", 2), drafted("m", 8)
        measured = {PLAIN: work(10.0), few: work(14.0), many: work(18.0)}
        found = choose(measured, PLAIN, efforts(PLAIN, few, many))
        assert (found.winner, found.ties) == (many, ())
        assert told_apart(measured, PLAIN)

    def test_a_tie_goes_to_the_smaller_k(self) -> None:
        few, many = drafted("m", 2), drafted("m", 8)
        measured = {PLAIN: work(10.0), few: work(15.0, 0.05, seed=3), many: work(15.1, 0.05, seed=4)}
        found = choose(measured, PLAIN, efforts(PLAIN, few, many))
        assert (found.winner, found.ties) == (few, (many,))
        assert not told_apart(measured, PLAIN)

    def test_simplicity_may_cost_little(self) -> None:
        few, many, most = drafted("m", 2), drafted("m", 8), drafted("m", 12)
        turns = [1.2 if number % 2 else 0.8 for number in range(12)]
        measured = {
            PLAIN: spans(*[10.0] * 12),
            few: spans(*[10.0 / (1.40 * turn) for turn in turns]),
            many: spans(*[10.0 / (1.50 * (2.0 - turn)) for turn in turns]),
        }
        measured[most] = measured[many]
        found = choose(measured, PLAIN, efforts(PLAIN, few, many, most))
        ups = {each: ratio_of_rates(measured[each], measured[PLAIN]) for each in (few, many)}
        assert ups[few].value < ups[many].value * (1.0 - SLACK)  # type: ignore[union-attr]
        assert (found.winner, found.ties) == (many, (few, most))
        assert "within 3% of the best it is the simplest" in found.reason

    def test_nothing_measured_is_plain_decoding(self) -> None:
        assert choose({PLAIN: work(10.0)}, PLAIN, efforts(PLAIN)).winner == PLAIN

    def test_efforts_follow_what_a_method_needs(self) -> None:
        ngram, eagle = load_recipe("ngram"), load_recipe("eagle")
        both = parse_recipe({"draft": {"k": 4, "first_of": [{"method": "suffix"}, {"method": "eagle"}]}})
        order = [load_recipe("vanilla"), ngram, eagle, load_recipe("small_model"), both]
        found = [effort(Candidate(recipe.name), recipe) for recipe in order]
        assert found == sorted(found)


def spans(*seconds: float, tokens: float = 100.0) -> dict[str, Work]:
    return {str(n): Work(tokens, each, (each,)) for n, each in enumerate(seconds)}


class TestObjectives:
    """Two drafters: one fast on the whole, the other never slow."""

    FAST, EVEN = drafted("fast", 8), drafted("even", 2)
    MEASURED = {  # noqa: RUF012 - read only
        PLAIN: spans(*[10.0] * 40),
        FAST: spans(*[1.0] * 36, *[11.0] * 4),
        EVEN: spans(*[6.0] * 40),
    }

    def verdict(self, *objectives: str, **memory: int) -> Verdict:
        bytes_of = {self.FAST: memory.get("fast", 0), self.EVEN: memory.get("even", 0)}
        return choose(self.MEASURED, PLAIN, efforts(*self.MEASURED), Aims(objectives, bytes_of))

    def test_throughput_and_latency_have_winners_of_their_own(self) -> None:
        fastest, soonest = self.verdict("throughput"), self.verdict("latency")
        assert (fastest.winner, soonest.winner) == (self.FAST, self.EVEN)
        assert fastest.gain == fastest.speed_up
        assert soonest.gain.value == pytest.approx(10.0 / 6.0)
        assert "95 % of the requests are done within 6.00 s" in soonest.reason
        assert (fastest.decided_by, soonest.decided_by) == ("throughput", "latency")

    def test_what_is_faster_on_the_whole_and_later_for_some_shortens_no_latency(self) -> None:
        measured = {each: self.MEASURED[each] for each in (PLAIN, self.FAST)}
        found = choose(measured, PLAIN, efforts(*measured), Aims(("latency",)))
        assert found.winner == PLAIN
        assert "times as short a latency" in found.reason
        assert choose(measured, PLAIN, efforts(*measured)).winner == self.FAST

    def test_memory_decides_among_what_beats_plain_decoding(self) -> None:
        found = self.verdict("memory", fast=900, even=10)
        assert (found.winner, found.decided_by) == (self.EVEN, "memory")
        slow = {**self.MEASURED, self.EVEN: spans(*[11.0] * 40)}
        aims = Aims(("memory",), {self.FAST: 900, self.EVEN: 10})
        assert choose(slow, PLAIN, efforts(*slow), aims).winner == self.FAST

    def test_a_further_objective_decides_among_ties_only(self) -> None:
        assert self.verdict("throughput", "memory", fast=900, even=10).winner == self.FAST
        twin = drafted("twin", 1)
        measured = {**self.MEASURED, twin: self.MEASURED[self.FAST]}
        tied = choose(measured, PLAIN, efforts(*measured), Aims(("throughput",), {}))
        assert (tied.winner, tied.decided_by, tied.ties) == (twin, SIMPLICITY, (self.FAST,))
        aims = Aims(("throughput", "memory"), {self.FAST: 10, twin: 900, self.EVEN: 0})
        found = choose(measured, PLAIN, efforts(*measured), aims)
        assert (found.winner, found.decided_by, found.ties) == (self.FAST, "memory", ())

    def test_a_race_is_told_apart_in_what_decides(self) -> None:
        measured = {PLAIN: self.MEASURED[PLAIN], self.FAST: spans(*[1.0] * 20, *[10.0] * 20)}
        assert told_apart(measured, PLAIN)
        assert not told_apart(measured, PLAIN, Aims(("latency",)))


class TestLatency:
    def test_is_the_quantile_of_requests_not_of_groups(self) -> None:
        group = {"a": Work(10, 9.0, (1.0, 2.0, 3.0, 9.0))}
        assert latency_s(group) == pytest.approx(8.1)
        assert latency_s({}) is None
        assert latency_s({"a": Work(10, 4.0)}) == 4.0

    def test_ratio_is_exact_without_noise_and_says_nothing_of_two_prompts(self) -> None:
        found = ratio_of_latencies(spans(*[1.0, 2.0, 3.0] * 4), spans(*[2.0, 4.0, 6.0] * 4))
        assert found is not None
        assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
        few = ratio_of_latencies(spans(1.0, 2.0), spans(2.0, 4.0))
        assert few is not None
        assert few.low == 0.0
        assert ratio_of_latencies({"a": Work(1, 1)}, {"b": Work(1, 1)}) is None

    def test_ratio_covers_the_truth_about_as_often_as_it_says(self) -> None:
        hits = 0
        for seed in range(60):
            found = ratio_of_latencies(work(15.0, 0.1, 30, seed), work(10.0, 0.1, 30, 1000 + seed))
            assert found is not None
            hits += found.low <= 1.5 <= found.high
        assert hits >= 52


class TestSchedule:
    LOADS = (Best(1, Choice(recipe="e", settings={K: 8}), 8, 2.0), Best(4, Choice(recipe="e", settings={K: 4}), 4, 1.5))
    HIGH = Best(16, Choice(recipe="vanilla"), 0, 1.0)

    def test_has_a_band_between_levels(self) -> None:
        levels = make_schedule([*self.LOADS, self.HIGH])
        assert [level.k for level in levels] == [8, 4, 0]
        assert levels[0].enter == 1
        assert all(level.leave < level.enter for level in levels)
        assert all(one.enter < other.enter for one, other in itertools.pairwise(levels))

    def test_an_oscillating_load_does_not_switch_back_and_forth(self) -> None:
        levels = make_schedule([*self.LOADS, self.HIGH])
        threshold = levels[2].enter
        follow = Scheduler(levels)
        for turn in range(100):
            follow.choose(threshold - turn % 2)
        assert follow.num_switches == 1

    def test_goes_down_again_when_the_load_is_really_gone(self) -> None:
        follow = Scheduler(make_schedule([*self.LOADS, self.HIGH]))
        assert [follow.choose(load).k for load in (1, 4, 16, 4, 1)] == [8, 4, 0, 4, 8]

    def test_one_choice_is_one_level(self) -> None:
        again = Best(16, self.LOADS[1].choice, 4, 1.2)
        assert len(make_schedule([*self.LOADS, again])) == 2
