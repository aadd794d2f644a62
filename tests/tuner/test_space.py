"""The search space: what a recipe lets a tuner change, and what is left out because it would not run."""

from __future__ import annotations

import pytest

from specflow.errors import RecipeError
from specflow.recipe import Recipe, load_recipe, parse_recipe
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
