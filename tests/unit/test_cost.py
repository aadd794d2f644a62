"""The cost model: what it reads between measured points, what it never does, and where it is kept."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import NumberText, tiny_target

from specflow import cost
from specflow.build import LoadedTarget
from specflow.cost import CostModel, ProfileKey, Timing, find_profile, load_profile, profile_data, save_profile
from specflow.curves import Surface, isotonic
from specflow.errors import DataError
from specflow.measure import Spread
from specflow.recipe import load_recipe, parse_recipe, recipe_data, shipped_recipes

LOADED = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
NGRAM = parse_recipe({"draft": {"method": "ngram", "k": 8}})


def timing(size: int, seconds: float, batch: int = 1, context: int = 64) -> Timing:
    return Timing(size, batch, context, Spread(seconds, seconds, seconds, 5))


def stair(rows: int, batch: int, context: int) -> float:
    """A step of 8 rows and a slope that grows with the rows, as kernels and attention have them."""
    steps = math.ceil(rows * batch / 8)
    return 0.020 + 0.005 * steps + 1e-6 * (1 + rows) * batch * context


def stair_model(batches: tuple[int, ...] = (1, 4), draft: bool = True) -> CostModel:
    contexts = (64, 512, 1024)
    places = [(batch, context) for batch in batches for context in contexts]
    return CostModel(
        target=tuple(
            timing(rows, stair(rows, b, c), b, c) for b, c in places for rows in (1, 2, 4, 8, 9, 16, 17, 32, 64)
        ),
        draft=tuple(timing(d, 0.001 * d * b, b, c) for b, c in places for d in (1, 2, 4, 8)) if draft else (),
        overhead=(timing(0, 0.0005), timing(8, 0.0009)),
    )


def test_a_staircase_is_recovered_where_it_was_measured_and_on_the_line_of_the_context() -> None:
    model = stair_model()
    for batch in (1, 4):
        for rows in (1, 4, 9, 64):
            for context in (64, 300, 1024, 4096):
                assert model.target_s(rows, batch, context) == pytest.approx(stair(rows, batch, context))


def test_between_measured_points_it_is_linear_and_before_them_constant() -> None:
    model = stair_model()
    assert model.target_s(6, 1, 64) == pytest.approx((model.target_s(4, 1, 64) + model.target_s(8, 1, 64)) / 2)
    assert model.target_s(8, 2, 64) == pytest.approx((2 * model.target_s(8, 1, 64) + model.target_s(8, 4, 64)) / 3)
    assert model.target_s(8, 1, 3) == model.target_s(8, 1, 64)
    assert model.draft_s(6, 1, 64) == pytest.approx(0.006)
    assert model.draft_s(3, 2, 512) == pytest.approx(0.006)


def test_beyond_measured_points_it_goes_on_as_its_docstring_says() -> None:
    model = stair_model()
    upper = (model.target_s(64, 1, 64) - model.target_s(9, 1, 64)) / (64 - 9)
    assert model.target_s(100, 1, 64) == pytest.approx(model.target_s(64, 1, 64) + 36 * upper)
    assert model.target_s(8, 8, 64) == model.target_s(16, 4, 64)
    assert model.draft_s(4, 9, 64) == model.draft_s(4, 4, 64)
    assert model.draft_s(10, 1, 64) == pytest.approx(0.010)


def test_a_round_is_the_sum_of_its_parts_and_a_plain_step_drafts_nothing() -> None:
    model = stair_model()
    assert model.round_s(0, 1, 64) == pytest.approx(stair(1, 1, 64) + 0.0005)
    assert model.round_s(8, 1, 64) == pytest.approx(0.008 + stair(9, 1, 64) + 0.0009)
    assert model.overhead_s(4) == pytest.approx(0.0007)
    assert model.plain_steps(0, 4, 512) == 1.0
    bare = CostModel(target=model.target)
    assert bare.round_s(3, 1, 64) == bare.target_s(4, 1, 64)


def test_blocks_that_are_no_chains_have_passes_of_their_own() -> None:
    own = tuple(timing(depth, 0.05 + depth / 100, batch) for batch in (1, 4) for depth in (1, 4))
    model = replace(stair_model(), own_blocks=own, nodes={1: 3, 4: 20})
    assert [model.rows(depth) for depth in (0, 1, 2, 4, 6)] == [1, 4, 21, 21, 21]
    assert model.verify_s(4, 1, 64) == pytest.approx(0.09)
    assert model.verify_s(0, 1, 64) == pytest.approx(stair(1, 1, 64))
    wider = model.target_s(21, 8, 64) / model.target_s(21, 4, 64)
    assert model.verify_s(4, 8, 64) == pytest.approx(0.09 * wider)


def test_break_even_is_the_chance_at_which_a_depth_pays() -> None:
    model = stair_model()
    for depth in (1, 2, 4, 8):
        chance = model.break_even(depth, 1, 64)
        assert chance is not None
        tokens = sum(chance**position for position in range(depth + 1))
        assert tokens / model.round_s(depth, 1, 64) == pytest.approx(1 / model.round_s(0, 1, 64))
    free = CostModel(target=(timing(1, 0.1), timing(9, 0.1)))
    assert free.break_even(8, 1, 64) == 0.0
    dear = replace(model, draft=(timing(1, 1.0), timing(8, 8.0)))
    assert dear.break_even(8, 1, 64) is None


seconds = st.floats(1e-4, 1.0)
noisy = st.lists(
    st.tuples(st.integers(1, 64), st.sampled_from([1, 2, 4, 7]), st.sampled_from([16, 64, 512, 2048]), seconds),
    min_size=1,
    max_size=40,
)


@given(noisy, st.integers(1, 80), st.integers(1, 9), st.integers(0, 4000))
def test_no_noise_makes_more_work_cheaper(
    points: list[tuple[int, int, int, float]], rows: int, batch: int, context: int
) -> None:
    surface = Surface(points)
    model = CostModel(target=tuple(timing(size, s, b, c) for size, b, c, s in points))
    here, tolerance = model.target_s(rows, batch, context), 1 + 1e-9
    assert 0 < here < float("inf")
    assert here <= model.target_s(rows + 1, batch, context) * tolerance
    assert surface.at(rows, batch, context) <= surface.at(rows, batch + 1, context) * tolerance
    if batch > surface.largest_batch:  # rows stand for requests there, and carry their contexts along
        assert here <= model.target_s(rows, batch + 1, context) * tolerance
    smallest = min(b for _, b, _, _ in points)
    assert surface.at(rows, smallest, context) <= surface.at(rows, smallest, context + 100) * tolerance


@given(st.lists(st.floats(0, 1), max_size=30))
def test_isotonic_never_falls_keeps_the_sum_and_leaves_order_alone(values: list[float]) -> None:
    fitted = isotonic(values)
    assert len(fitted) == len(values)
    assert all(low <= high + 1e-12 for low, high in pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(values))
    assert isotonic(sorted(values)) == pytest.approx(sorted(values))


def test_a_slow_long_context_does_not_make_the_short_one_cost_nothing() -> None:
    """The line through 1, 1 and 5 seconds begins at a third of a second."""
    bent = Surface([(1, 1, 0, 1.0), (1, 1, 500, 1.0), (1, 1, 1000, 5.0)])
    assert bent.at(1, 1, 0) == 1.0


def test_noise_around_a_staircase_is_smoothed() -> None:
    shaken = [(rows, 1, 64, stair(rows, 1, 64) * (1 + 0.05 * (-1) ** rows)) for rows in range(1, 65)]
    surface = Surface(shaken)
    errors = [abs(surface.at(rows, 1, 64) / stair(rows, 1, 64) - 1) for rows in range(1, 65)]
    assert max(errors) <= 0.0501
    assert sum(errors) / len(errors) < 0.02


def test_wide_or_few_timings_are_named_and_never_trusted() -> None:
    wide = Timing(2, 1, 64, Spread(0.010, 0.008, 0.0111, 5))
    few = Timing(4, 1, 64, Spread(0.010, 0.010, 0.010, 2))
    model = CostModel(target=(timing(1, 0.01), wide), overhead=(few,))
    assert [each.trusted for each in (*model.target, few)] == [True, False, False]
    first, second = model.doubts()
    assert first == "target rows 2, batch 1, context 64: 10.00 ms, middle half 8.00-11.10 ms, 5 repeats"
    assert second.startswith("overhead depth 4")
    assert not model.trusted
    assert CostModel(target=(timing(1, 0.01),)).trusted
    assert Timing(2, 1, 64, Spread(0.010, 0.008, 0.011, 5)).trusted


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    key = ProfileKey.of(NGRAM, LOADED.target.info)
    model = replace(stair_model(), own_blocks=(timing(1, 0.1),), nodes={1: 3, 8: 20})
    path = tmp_path / "deep" / "profile.json"
    save_profile(path, profile_data(key, model, {"argv": ["x"]}))
    assert load_profile(path) == model
    assert load_profile(path, key).round_s(3, 2, 99) == model.round_s(3, 2, 99)
    assert [each.name for each in path.parent.iterdir()] == ["profile.json"]


def test_another_machine_or_target_is_refused_with_the_facts_that_differ(tmp_path: Path) -> None:
    key = ProfileKey.of(NGRAM, LOADED.target.info)
    other = replace(key, machine={**key.machine, "threads": 99}, target={**key.target, "dtype": "bfloat16"})
    save_profile(tmp_path / "p.json", profile_data(other, stair_model(), {}))
    with pytest.raises(DataError) as caught:
        load_profile(tmp_path / "p.json", key)
    assert "target dtype: 'bfloat16' there, 'float64' here" in str(caught.value)
    assert f"machine threads: 99 there, {torch.get_num_threads()} here" in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("seconds"),
        lambda data: data.update(format="specflow-profile-0"),
        lambda data: data["seconds"].update(target=[]),
        lambda data: data["seconds"]["target"][0].update(median_s=float("nan")),
        lambda data: data["seconds"]["target"][0].update(batch=0),
        lambda data: data["seconds"].update(nodes=[1]),
        lambda data: data["seconds"]["target"][0].update(median_s=0.0),
        lambda data: data["seconds"]["target"][0].update(count=float("inf")),
    ],
)
def test_a_damaged_profile_is_an_error_with_its_path(tmp_path: Path, damage: object) -> None:
    data = json.loads(json.dumps(profile_data(ProfileKey.of(NGRAM, LOADED.target.info), stair_model(), {})))
    damage(data)  # type: ignore[operator]
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(DataError, match=r"p\.json: cannot be read"):
        load_profile(tmp_path / "p.json")


class TestFindingProfiles:
    def keep(self, recipe: dict[str, object], model: CostModel, **facts: object) -> Path:
        key = ProfileKey.of(parse_recipe(recipe), LOADED.target.info)
        key = replace(key, machine={**key.machine, **facts})
        path = cost.profiles_dir() / key.file_name
        save_profile(path, profile_data(key, model, {}))
        return path

    def test_nothing_is_found_where_nothing_was_kept(self, model_cache: Path) -> None:
        assert find_profile(NGRAM, LOADED) is None

    def test_one_profile_serves_every_k_and_no_other_draft(
        self, model_cache: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = self.keep({"draft": {"method": "ngram", "k": 4}}, stair_model())
        assert path.parent == model_cache / "profiles"
        assert find_profile(NGRAM, LOADED) == stair_model()
        assert not caplog.records
        assert find_profile(parse_recipe({"draft": {"method": "suffix", "k": 4}}), LOADED) is None
        assert find_profile(parse_recipe({}), LOADED) is None

    def test_of_another_machine_it_says_what_differs(self, model_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = self.keep({"draft": {"method": "ngram"}}, stair_model(), cpu_model="abacus")
        assert find_profile(NGRAM, LOADED) is None
        assert str(path) in caplog.text
        assert "machine cpu_model: 'abacus' there" in caplog.text
        assert "threads" not in caplog.text

    def test_doubtful_timings_are_used_aloud(self, model_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        wide = replace(stair_model(), overhead=(Timing(0, 1, 64, Spread(0.01, 0.001, 0.1, 5)),))
        self.keep({"draft": {"method": "ngram"}}, wide)
        assert find_profile(NGRAM, LOADED) == wide
        assert "1 timings spread too wide to be trusted, such as overhead depth 0" in caplog.text

    def test_a_damaged_one_is_reported_and_not_used(self, model_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = self.keep({"draft": {"method": "ngram"}}, stair_model())
        path.write_text(path.read_text()[:100])
        assert find_profile(NGRAM, LOADED) is None
        assert f"{path}: cannot be read" in caplog.text


def test_another_thread_count_is_another_key() -> None:
    here = ProfileKey.of(NGRAM, LOADED.target.info)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        there = ProfileKey.of(NGRAM, LOADED.target.info)
    finally:
        torch.set_num_threads(threads)
    assert here.stem == there.stem
    assert here.file_name != there.file_name
    assert here.file_name.startswith("tiny-float64-cpu-native-history.")


def test_every_shipped_recipe_has_a_key_of_its_own_that_k_does_not_change() -> None:
    recipes = {name: load_recipe(path) for name, path in shipped_recipes().items()}
    names = {name: ProfileKey.of(recipe, LOADED.target.info).file_name for name, recipe in recipes.items()}
    drafts = {name: json.dumps(recipe_data(recipe).get("draft"), sort_keys=True) for name, recipe in recipes.items()}
    assert len({*names.values()}) == len({*drafts.values()})
    for name, recipe in recipes.items():
        if recipe.draft is not None:
            other = load_recipe(name, ["draft.k=2"])
            assert ProfileKey.of(other, LOADED.target.info).file_name == names[name]
