"""What predictions say beside the best: finalists, importance, the front, break-even."""

from __future__ import annotations

import pytest
from fakes import prices

from tuner.analysis import break_even_of, importances, pareto
from tuner.finalists import finalists
from tuner.scoring import Score
from tuner.space import POLICY, Candidate, K

THROUGHPUT = ("throughput",)
PLAIN = Score(10.0, 1.0, 0, 1.0)


def drafted(recipe: str, k: int, policy: str = "fixed") -> Candidate:
    return Candidate.of(recipe, {K: k, POLICY: policy})


def score(throughput: float, latency: float = 1.0, memory: int = 0) -> Score:
    return Score(throughput, latency, memory, 2.0)


class TestFinalists:
    def test_several_methods_come_before_a_second_k_of_one(self) -> None:
        scores = {drafted("a", k): score(20.0 + k) for k in (1, 2, 4)} | {drafted("b", 4): score(15.0)}
        found = finalists(scores, PLAIN, THROUGHPUT)
        assert {each.recipe for each in found[:2]} == {"a", "b"}
        assert [each.k for each in found if each.recipe == "a"] == [4, 2, 1]

    def test_of_equal_promises_the_smallest_k_is_run(self) -> None:
        scores = {drafted("a", k, policy): score(20.0) for k in (8, 12) for policy in ("match", "fixed")}
        assert finalists(scores, PLAIN, THROUGHPUT) == [drafted("a", 8)]

    def test_what_promises_less_than_plain_decoding_is_not_run_unless_it_is_all_there_is(self) -> None:
        scores = {drafted("a", 1): score(8.0), drafted("b", 1): score(7.0)}
        assert finalists(scores, PLAIN, THROUGHPUT) == [drafted("a", 1)]
        assert finalists({**scores, drafted("c", 1): score(11.0)}, PLAIN, THROUGHPUT) == [drafted("c", 1)]

    def test_the_objective_decides(self) -> None:
        scores = {drafted("a", 1): score(12.0, 0.9), drafted("b", 1): score(11.0, 0.6)}
        assert finalists(scores, PLAIN, ("latency",))[0].recipe == "b"

    def test_what_shortens_no_latency_is_not_run_for_its_throughput(self) -> None:
        scores = {drafted("a", 1): score(20.0, 1.5), drafted("b", 1): score(9.0, 0.7)}
        assert finalists(scores, PLAIN, ("latency",)) == [drafted("b", 1)]
        assert finalists(scores, PLAIN, THROUGHPUT) == [drafted("a", 1)]

    def test_the_best_of_every_further_objective_takes_part(self) -> None:
        scores = {drafted(name, 4): score(20.0 - n, 0.5, 100 - n) for n, name in enumerate("abcdef")}
        found = finalists(scores, PLAIN, ("throughput", "memory"))
        assert found[:2] == [drafted("a", 4), drafted("f", 4)]
        assert len(found) == 4

    def test_least_memory_comes_before_speed_where_memory_is_wanted_most(self) -> None:
        scores = {drafted("a", 4): score(30.0, 0.3, 900), drafted("b", 4): score(12.0, 0.8, 0)}
        assert finalists(scores, PLAIN, ("memory",))[0] == drafted("b", 4)

    def test_what_nobody_could_predict_takes_part_too(self) -> None:
        odd = drafted("odd", 4)
        assert finalists({drafted("a", 1): score(12.0)}, PLAIN, THROUGHPUT, [odd])[-1] == odd
        assert finalists({}, None, THROUGHPUT) == []


class TestImportance:
    def test_a_knob_that_explains_everything_has_it_all(self) -> None:
        scores = {drafted("a", k, p): score(10.0 * k) for k in (1, 2, 3) for p in ("fixed", "additive")}
        found = {(each.scope, each.key): each.share for each in importances(scores)}
        assert found["a", K] == pytest.approx(1.0)
        assert found["a", POLICY] == pytest.approx(0.0)

    def test_the_method_is_judged_over_all(self) -> None:
        scores = {drafted(name, k): score(rate + k) for name, rate in (("a", 10.0), ("b", 90.0)) for k in (1, 2)}
        assert importances(scores)[0].scope == "method"
        assert importances(scores)[0].share > 0.99

    def test_nothing_to_compare_is_no_importance(self) -> None:
        assert importances({}) == []
        assert importances({drafted("a", 1): score(1.0)}) == []


def test_the_front_has_what_no_other_beats_in_everything() -> None:
    scores = {
        drafted("fast", 8): score(20.0, 1.0, 100),
        drafted("small", 1): score(12.0, 1.0, 10),
        drafted("beaten", 4): score(11.0, 1.0, 50),
        drafted("twin", 1): score(12.0, 1.0, 10),
    }
    assert {each.recipe for each in pareto(scores, ["throughput", "memory"])} == {"fast", "small", "twin"}


def test_a_front_in_latency_wants_less() -> None:
    scores = {drafted("a", 1): score(10.0, 1.0), drafted("b", 1): score(10.0, 2.0)}
    assert {each.recipe for each in pareto(scores, ["throughput", "latency"])} == {"a"}


def test_break_even_is_the_price_of_a_round_in_plain_steps() -> None:
    costs = prices(step=0.03, per_row=0.0, per_draft=0.0075, fixed=0.0)
    found = break_even_of(drafted("a", 4), costs, (1, 0), (2.5, None, False))
    assert found.plain_steps == pytest.approx(2.0, rel=0.01)
    assert found.chance is not None
    assert sum(found.chance**i for i in range(5)) == pytest.approx(found.plain_steps, rel=1e-3)
