"""The recipes of a run: one target, names that tell apart, shipped drafters found; and tuned.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FakeLab, tuned

import tuner.recipes as recipes_module
from specflow.errors import DataError, RecipeError
from specflow.recipe import load_recipe, parse_recipe
from specflow.recipe_yaml import read_yaml
from tuner.recipes import read_recipes, tuned_yaml


def write(folder: Path, name: str, text: str) -> str:
    file = folder / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_all_shipped_recipes_get_the_target(tmp_path: Path) -> None:
    found = read_recipes([], "some/model", ["target.dtype=bfloat16", "draft.k=3"])
    assert {"ngram", "eagle3"} <= set(found.recipes)
    assert found.plain.target.model == "some/model"
    assert all(recipe.target == found.plain.target for recipe in found.recipes.values())
    assert found.recipes["ngram"].draft.k == 3  # type: ignore[union-attr]


def test_a_broken_recipe_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    write(tmp_path, "broken", "name: broken\ndraft: {method: nothing}\n")
    write(tmp_path, "fine", "name: fine\ndraft: {method: ngram, k: 2}\n")
    found = read_recipes([str(tmp_path / "*.yaml")], None)
    assert list(found.recipes) == ["fine"]
    assert found.refused[0].recipe == "broken"
    assert "nothing" in found.refused[0].reason


def test_no_such_recipe_is_an_error() -> None:
    with pytest.raises(RecipeError, match="ngrem"):
        read_recipes(["ngrem"], None)


def test_two_of_one_name_are_an_error(tmp_path: Path) -> None:
    one = write(tmp_path, "one", "name: x\ndraft: {method: ngram}\n")
    two = write(tmp_path, "two", "name: x\ndraft: {method: suffix}\n")
    with pytest.raises(DataError, match="second recipe named 'x'"):
        read_recipes([one, two], None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: o\ntarget: {model: x}\ndraft: {method: ngram}\n", "another target"),
        ("name: o\nsampling: {temperature: 1.0}\ndraft: {method: ngram}\n", "another sampling"),
        (
            "name: o\ndraft: {method: medusa, k: 4}\nverify: {rule: typical, lossless: false}\n",
            "lossy",
        ),
    ],
)
def test_what_cannot_be_compared_takes_no_part(tmp_path: Path, text: str, reason: str) -> None:
    found = read_recipes(["suffix", write(tmp_path, "o", text)], None)
    assert list(found.recipes) == ["suffix"]
    assert reason in found.refused[0].reason


def test_a_shipped_drafter_is_found_by_target_and_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = {"smollm2-135m/eagle3": Path("x"), "smollm2-135m/ngram": Path("y")}
    monkeypatch.setattr(recipes_module, "shipped_drafters", lambda: shipped)
    found = read_recipes(["eagle3", "eagle", "ngram"], "smollm2-135m").recipes
    assert found["eagle3"].draft.weights == "smollm2-135m/eagle3"  # type: ignore[union-attr]
    assert found["eagle"].draft.weights is None  # type: ignore[union-attr]
    assert found["ngram"] == load_recipe("ngram", ["target.model=smollm2-135m"])
    assert read_recipes(["eagle3"], "other").recipes["eagle3"].draft.weights is None  # type: ignore[union-attr]


def test_tuned_yaml_says_what_was_chosen_even_where_it_is_the_default(tmp_path: Path) -> None:
    result = tuned(tmp_path, FakeLab({"good": 0.95}), "good")
    recipe = parse_recipe({"name": "good-tuned", "draft": {"method": "ngram"}})
    text = tuned_yaml(recipe, result)
    data = read_yaml(text, "t").data
    assert data["draft"]["k"] == 8
    assert (data["verify"]["rule"], data["length"]["policy"]) == ("match", "fixed")
    assert text.startswith("# Use good K=")
    assert "acceptance length" in text.splitlines()[2]


def test_plain_decoding_is_a_recipe_too(tmp_path: Path) -> None:
    result = tuned(tmp_path, FakeLab({"wrong": 0.0}), "wrong")
    text = tuned_yaml(load_recipe("vanilla"), result)
    assert "Do not speculate" in text.splitlines()[0]
    assert parse_recipe(read_yaml(text, "t").data).draft is None
