"""What a profiler times, in which order, how often, and what it leaves untouched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import Branching, NumberText, Oracle, Scripted, tiny_target

from specflow.build import LoadedTarget, build_drafter, build_engine, build_rule
from specflow.cost import CostModel
from specflow.draft.base import Needs, Uniforms
from specflow.engine import EngineParts
from specflow.errors import DataError, GraphError
from specflow.length import Fixed
from specflow.profiling import CONTEXTS, ROWS, Plan, Profiler, Stopwatch, make_plan
from specflow.recipe import Recipe, load_recipe
from specflow.types import DraftBlock, DraftBudget, Entry, Observation, Sampling
from specflow.verify import Match

TARGET = tiny_target()
LOADED = LoadedTarget(TARGET, NumberText())  # type: ignore[arg-type]
RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
SMALL = Plan(rows=(1, 4), contexts=(10, 40), batches=(1, 3), repeat=3)


class Ticks:
    """A clock that goes on by one second a reading."""

    def __init__(self) -> None:
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return float(self.readings)


class Watched(Scripted):
    """Drafts the text's own continuation and writes down what it is asked and told."""

    needs = Needs(taps=(0,), hidden_post=True)
    num_nodes = 4

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self.text: dict[int, list[int]] = {}

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        super().start(row, prompt, sampling)
        self.text[row] = [prompt[0]]

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        for index, row in enumerate(rows):
            assert observation.starts[index] == len(self.text[row]) - 1, "features come in order, without a gap"
            assert observation.features is not None
            assert observation.features.taps[0].shape[1] >= observation.counts[index]
            self.text[row] += observation.tokens[index]

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.text = {index: self.text[row] for index, row in enumerate(rows)}

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        assert [self.text[row][-1] for row in range(len(anchors))] == list(anchors)
        self.asked.append((budget.widest, tuple(len(self.text[row]) - 1 for row in range(len(anchors)))))
        self._rows = [[7] * 4 for _ in anchors]
        self._done = [0] * len(anchors)
        return super().propose(anchors, budget, uniforms)


def parts(drafter: object = None, k: int = 4) -> EngineParts:
    return EngineParts(TARGET, NumberText(), Match(), Fixed(k), drafter)  # type: ignore[arg-type]


def measured(drafter: object = None, asked: Plan = SMALL, k: int = 4) -> CostModel:
    made = parts(drafter, k)
    return Profiler(made, make_plan(made, k, asked, stretch=False), Sampling(), Ticks()).measure()


def test_every_point_is_timed_as_often_as_asked() -> None:
    model = measured(Watched())
    places = {(batch, context) for batch in (1, 3) for context in (10, 40)}
    assert {(t.size, t.batch, t.context) for t in model.target} == {(rows, *p) for rows in (1, 4) for p in places}
    assert {(t.size, t.batch, t.context) for t in model.draft} == {(d, *p) for d in (1, 2, 3, 4) for p in places}
    assert {t.seconds.count for t in (*model.target, *model.draft)} == {3}
    assert {t.seconds.median for t in (*model.target, *model.draft)} == {1.0}  # one reading before, one after
    assert model.own_blocks == ()
    assert model.nodes == {}


def test_overhead_is_measured_in_real_rounds_with_and_without_a_draft() -> None:
    model = measured(Oracle(), k=2)
    assert {(t.batch, t.context) for t in model.overhead} == {(1, 10), (3, 10)}
    assert {t.size for t in model.overhead} == {0}  # it has no text to be right about, so it drafts nothing
    assert {t.seconds.count for t in model.overhead} == {6}
    copying = load_recipe("ngram", ["draft.k=4", "sampling.logit_bias={9: 99.0}"])
    made = parts_of(copying, 4)
    found = Profiler(made, make_plan(made, 4, SMALL, stretch=False), copying.sampling).measure()
    assert min(t.size for t in found.overhead) == 0 < max(t.size for t in found.overhead) <= 4
    assert all(0 < t.seconds.median < 1 for t in found.overhead)


def test_drafts_are_asked_for_at_their_context_and_told_the_truth() -> None:
    """What is told, and in which order, is asserted inside `Watched`."""
    drafter = Watched()
    made = parts(drafter)
    plan = make_plan(made, 4, SMALL, stretch=False)
    Profiler(made, plan, Sampling(), Ticks()).measure()
    lengths = {length for depth, lengths in drafter.asked for length in lengths}
    assert min(lengths) == 10
    assert lengths <= {*range(10, 20), *range(40, 50)}
    assert {depth for depth, _ in drafter.asked} == {1, 2, 3, 4}


def test_the_order_of_the_points_changes_from_pass_to_pass() -> None:
    made = parts()
    done: list[str] = []
    plan = make_plan(made, 0, Plan((1, 2, 3, 4), (10, 20, 30), (1,), repeat=3), stretch=False)
    Profiler(made, plan, Sampling(), Ticks()).measure(done.append)
    size = plan.num_points
    assert len(done) == 3 * size
    orders = [done[turn * size : (turn + 1) * size] for turn in range(3)]
    assert Counter(orders[0]) == Counter(orders[1]) == Counter(orders[2])
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_trees_and_blocks_that_enter_the_target_have_their_own_passes() -> None:
    class Growing(Branching):
        def tokens_for(self, row: int, most: int) -> list[int]:
            return [5] * most

    tree = measured(Growing(), k=3)
    assert tree.nodes == {1: 2, 2: 4, 3: 6}
    assert {t.size for t in tree.own_blocks} == {1, 2, 3}
    assert tree.rows(2) == 5

    class Entering(Watched):
        needs = Needs(hidden_post=True)

        def observe(self, observation: Observation, rows: Sequence[int]) -> None:
            for index, row in enumerate(rows):
                self.text[row] += observation.tokens[index]

        def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
            block = super().propose(anchors, budget, uniforms)
            assert block is not None
            hidden = torch.zeros(len(anchors), block.num_nodes + 1, TARGET.info.hidden_size, dtype=torch.float64)
            return replace(block, entry=Entry(1, hidden))

    early = measured(Entering())
    assert {t.size for t in early.own_blocks} == {1, 2, 3, 4}
    assert early.verify_s(4, 1, 10) == 1.0


def test_a_budget_ends_the_measuring_with_fewer_repeats() -> None:
    whole = Ticks()
    made = parts()
    plan = make_plan(made, 0, Plan((1, 4), (10,), (1,), repeat=50), stretch=False)
    Profiler(made, plan, Sampling(), whole).measure()
    clock = Ticks()
    limited = make_plan(made, 0, Plan((1, 4), (10,), (1,), repeat=50, budget_s=40.0), stretch=False)
    model = Profiler(made, limited, Sampling(), clock).measure()
    assert clock.readings <= 40 + 3 < whole.readings
    assert {(t.size, t.seconds.count >= 3) for t in model.target} == {(1, True), (4, True)}


def test_a_budget_too_small_for_one_pass_is_an_error_not_a_model() -> None:
    made = parts()
    plan = make_plan(made, 0, Plan((1, 4), (10,), (1,), budget_s=7.0), stretch=False)
    with pytest.raises(DataError, match=r"a profile in 7 s: 1 of 3 points measured"):
        Profiler(made, plan, Sampling(), Ticks()).measure()


def test_a_plan_fits_the_model_or_is_refused() -> None:
    default = make_plan(parts(), 0, Plan(ROWS, CONTEXTS), stretch=True)
    assert (default.rows, default.contexts, default.depths) == (ROWS, (64,), ())
    assert make_plan(parts(), 0, Plan((4, 8), (30,)), stretch=False).rows == (1, 4, 8)
    with pytest.raises(DataError, match=r"--contexts: context 240 .*\n.*at most 239: tiny holds 256 tokens"):
        make_plan(parts(), 0, Plan((16,), (30, 240)), stretch=False)
    short = parts()
    little = EngineParts(tiny_target(context=32), short.codec, short.rule, short.length)
    stretched = make_plan(little, 0, Plan(ROWS, CONTEXTS), stretch=True)
    assert max(stretched.rows) < 16
    assert 0 < stretched.contexts[0] + stretched.room <= 32
    with pytest.raises(DataError, match="--rows: 400 rows"):
        make_plan(parts(), 0, Plan((400,), ()), stretch=False)


def test_depths_end_where_the_drafter_does() -> None:
    assert make_plan(parts(Watched()), 16, SMALL, stretch=False).depths == (1, 2, 3, 4)
    assert make_plan(parts(Branching()), 5, SMALL, stretch=False).depths == (1, 2, 3, 4, 5)
    assert make_plan(parts(Oracle()), 20, SMALL, stretch=False).depths == (1, 2, 3, 4, 6, 8, 12, 16, 20)


def parts_of(recipe: Recipe, k: int) -> EngineParts:
    """On a tiny target; on a deep one where the recipe names layers that a tiny one does not have."""
    try:
        return EngineParts(TARGET, LOADED.codec, build_rule(recipe), Fixed(k), build_drafter(recipe, LOADED))
    except GraphError:
        deep = LoadedTarget(tiny_target(layers=30), LOADED.codec)
        return EngineParts(deep.target, deep.codec, build_rule(recipe), Fixed(k), build_drafter(recipe, deep))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_can_be_profiled(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    k = min(loaded.draft.k, 3) if loaded.draft else 0
    made = parts_of(loaded, k)
    plan = make_plan(made, k, Plan((1, 4), (12, 40), (1, 2), repeat=2), stretch=False)
    model = Profiler(made, plan, loaded.sampling).measure()
    assert bool(model.draft) == (loaded.draft is not None)
    assert all(timing.seconds.median > 0 for timing in (*model.target, *model.draft, *model.overhead))
    assert model.round_s(k, 2, 40) > model.verify_s(k, 2, 40)


def test_a_stopwatch_returns_what_the_work_does() -> None:
    watch = Stopwatch(torch.device("cpu"), Ticks())
    assert watch.seconds(lambda: "done") == (1.0, "done")


def test_profiling_leaves_a_target_as_it_was() -> None:
    sampling = Sampling(max_new_tokens=12, ignore_eos=True, seed=1)
    engine = build_engine(load_recipe("vanilla"), LOADED)
    before = engine.generate([[5, 9, 33]], sampling)[0].tokens
    measured(Watched())
    assert engine.generate([[5, 9, 33]], sampling)[0].tokens == before
