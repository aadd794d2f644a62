"""The search space: what a recipe lets a tuner change, and what is left out because it would not run."""

from __future__ import annotations

import pytest

from specflow.errors import RecipeError
from specflow.recipe import Recipe, load_recipe, parse_recipe, recipe_data
from specflow.recipe_draft import FirstOfSection, part_names
from tuner.space import POLICY, RULE, Candidate, K, Space, applied, knobs_of, own_settings, variants


def drafting(**more: object) -> Recipe:
    data = {"name": "eagle", "draft": {"method": "eagle", "k": 4, "weights": "somewhere"}, **more}
    return parse_recipe(data)


def test_depth_and_policy_may_change_in_every_recipe_that_drafts() -> None:
    knobs = {knob.key: knob.choices for knob in knobs_of(load_recipe("eagle"))}
    assert knobs[K] == (1, 2, 3, 4, 5, 6, 8)
    assert {"fixed", "expected_gain", "confidence", "threshold", "additive"} <= set(knobs[POLICY])
    assert "match" not in knobs[POLICY]  # no text was matched


def test_plain_decoding_has_nothing_to_change() -> None:
    assert knobs_of(load_recipe("vanilla")) == ()


def test_a_block_filled_at_once_is_never_deeper_than_it_was_made() -> None:
    knobs = {knob.key: knob.choices for knob in knobs_of(load_recipe("medusa"))}
    assert max(knobs[K]) == 4


def test_the_tune_section_narrows_and_adds() -> None:
    tune = {"draft.k": {"choices": [2, 4]}, "length.threshold": {"low": 0.2, "high": 0.8, "step": 0.3}}
    recipe = drafting(tune=tune, length={"policy": "confidence"})
    knobs = {knob.key: knob for knob in knobs_of(recipe)}
    assert knobs[K].choices == (2, 4)
    assert knobs["length.threshold"].choices == (0.2, 0.5, 0.8)
    assert knobs["length.threshold"].only_with == "confidence"


def test_another_policy_comes_with_its_own_defaults() -> None:
    recipe = drafting(length={"policy": "confidence", "threshold": 0.9})
    changed = applied(recipe, {POLICY: "threshold", K: 2})
    assert (changed.length.policy, changed.draft.k) == ("threshold", 2)  # type: ignore[union-attr]
    assert changed.tune == {}


def test_what_does_not_fit_is_an_error_by_itself_and_no_candidate_in_a_space() -> None:
    recipe = drafting()
    with pytest.raises(RecipeError):
        applied(recipe, {K: -1})
    space = Space({"eagle": recipe})
    assert space.recipe(Candidate.of("eagle", {K: -1})) is None
    assert space.recipe(Candidate.of("eagle", {K: 3})) is not None


def test_options_of_other_policies_do_not_make_more_candidates() -> None:
    tune = {
        "draft.k": {"choices": [2]},
        "length.policy": {"choices": ["fixed", "confidence"]},
        "length.threshold": {"choices": [0.3, 0.6]},
    }
    space = Space({"eagle": drafting(tune=tune, length={"policy": "confidence"}), "vanilla": load_recipe("vanilla")})
    listed = space.listed(100)
    assert space.size == 4
    assert len(listed) == 3  # fixed once, confidence twice
    assert all(candidate.k == 2 for candidate in listed)


def test_own_settings_lead_back_to_the_recipe() -> None:
    recipe = drafting(length={"policy": "expected_gain"})
    assert own_settings(recipe) == {K: 4, POLICY: "expected_gain"}


def test_rules_may_change_where_the_target_samples() -> None:
    warm = drafting(sampling={"temperature": 0.8})
    rules = next(knob.choices for knob in knobs_of(warm) if knob.key == RULE)
    assert {"match", "block", "rejection"} <= set(rules)
    assert "typical" not in rules
    assert RULE not in {knob.key for knob in knobs_of(drafting())}
    assert applied(warm, {RULE: "rejection"}).verify.rule == "rejection"


def test_other_options_of_a_draft_make_other_recipes() -> None:
    tune = {"draft.min_match": {"choices": [1, 3]}, "draft.k": {"choices": [2]}}
    recipe = parse_recipe({"name": "n", "draft": {"method": "ngram", "k": 4}, "tune": tune})
    found = variants(recipe)
    assert list(found) == ["n min_match=1", "n min_match=3"]
    assert [each.draft.min_match for each in found.values()] == [1, 3]  # type: ignore[union-attr]
    assert {knob.key for knob in knobs_of(found["n min_match=3"])} == {K, POLICY}
    assert next(knob.choices for knob in knobs_of(found["n min_match=1"]) if knob.key == K) == (2,)
    assert variants(drafting()) == {"eagle": drafting()}


def cascade(*methods: str, **tune: object) -> Recipe:
    parts = [{"method": method} for method in methods]
    return parse_recipe({"name": "c", "draft": {"k": 4, "first_of": parts}, "tune": tune})


def orders(found: dict[str, Recipe]) -> list[tuple[str | None, ...]]:
    return [tuple(part.method for part in recipe.draft.parts) for recipe in found.values()]  # type: ignore[union-attr]


def test_sources_that_may_be_silent_are_tried_in_every_order_ahead_of_the_one_that_always_drafts() -> None:
    found = variants(cascade("suffix", "ngram", "eagle"))
    assert orders(found) == [("suffix", "ngram", "eagle"), ("ngram", "suffix", "eagle")]
    assert list(found)[1] == "c first_of=ngram, suffix, eagle"
    assert orders(variants(cascade("suffix", "eagle"))) == [("suffix", "eagle")]
    assert list(variants(load_recipe("history_then_dspark"))) == ["history_then_dspark"]


def test_a_tune_section_names_the_orders_of_a_cascade() -> None:
    asked = cascade("suffix", "eagle", **{"draft.first_of": {"choices": ["suffix, eagle", "eagle, suffix"]}})
    found = variants(asked)
    assert orders(found) == [("suffix", "eagle"), ("eagle", "suffix")]
    assert all(recipe.tune == {} for recipe in found.values())
    again = parse_recipe(recipe_data(asked))
    assert again == asked


def test_an_order_that_is_none_of_the_parts_is_an_error_when_the_recipe_is_read() -> None:
    with pytest.raises(RecipeError, match=r"tune\.draft\.first_of") as error:
        cascade("suffix", "eagle", **{"draft.first_of": {"choices": ["suffix, medusa"]}})
    assert "suffix, eagle" in str(error.value)


def test_parts_of_one_name_are_told_apart_by_their_number() -> None:
    draft = cascade("ngram", "ngram").draft
    assert isinstance(draft, FirstOfSection)
    assert part_names(draft) == ("ngram.0", "ngram.1")


def test_a_copying_recipe_that_may_never_fire_is_tried_with_shorter_matches() -> None:
    rare = parse_recipe({"name": "n", "draft": {"method": "ngram", "k": 4, "min_match": 48}})
    assert [each.draft.min_match for each in variants(rare).values()] == [48, 2]  # type: ignore[union-attr]
    assert list(variants(load_recipe("ngram"))) == ["ngram"]


def test_the_threshold_of_the_confidence_policy_is_searched_with_that_policy_alone() -> None:
    space = Space({"eagle": drafting()})
    found = next(knob for knob in space.knobs["eagle"] if knob.key == "length.threshold")
    assert (found.only_with, found.choices) == ("confidence", (0.3, 0.5, 0.7))
    own = drafting(length={"policy": "confidence", "threshold": 0.9})
    assert next(knob.choices for knob in knobs_of(own) if knob.key == "length.threshold") == (0.3, 0.5, 0.7, 0.9)
    assert "length.threshold" not in {knob.key for knob in knobs_of(load_recipe("ngram"))}


def test_too_many_drafters_to_try_are_refused() -> None:
    tune = {"draft.max_match": {"low": 4, "high": 30, "step": 1}}
    recipe = parse_recipe({"name": "n", "draft": {"method": "ngram", "k": 4}, "tune": tune})
    with pytest.raises(RecipeError, match="drafters to try"):
        variants(recipe)


def test_keys_that_no_search_changes_are_refused() -> None:
    recipe = parse_recipe(
        {"name": "n", "draft": {"method": "ngram", "k": 4}, "tune": {"runtime.batch": {"choices": [1, 2]}}}
    )
    with pytest.raises(RecipeError, match=r"tune\.runtime\.batch"):
        variants(recipe)


def test_labels_tell_candidates_apart() -> None:
    one = Candidate.of("é", {K: 3, POLICY: "confidence", "length.threshold": 0.5})
    assert one.label == "é K=3 confidence threshold 0.5"
    assert Candidate("vanilla").label == "vanilla"
    assert Candidate("vanilla").k == 0
