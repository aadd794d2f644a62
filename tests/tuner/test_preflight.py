"""Which recipes apply: each refusal says why."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specflow.errors import CheckpointError
from specflow.recipe import Recipe, load_recipe, parse_recipe
from specflow.train.reference import Reference
from specflow.types import BlockShape
from tuner.preflight import (
    Conditions,
    expected_experts,
    free_memory,
    memory_need,
    missing_weights,
    placed,
    preflight,
    recorded_agreement,
    warnings_of,
)

INFO = SimpleNamespace(vocab_size=1000, dtype=torch.float32, shape=BlockShape(64, 128, 4, 2, 16))
ROOM = Conditions(batch=1, context=100, free_bytes=10**9)


def with_weights(folder: Path, **draft: object) -> Recipe:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"x" * 5000)
    return parse_recipe({"name": "eagle", "draft": {"method": "eagle", "k": 4, "weights": str(folder), **draft}})


def checked(
    recipes: dict[str, Recipe], conditions: Conditions = ROOM, error: Exception | None = None
) -> dict[str, str]:
    def build(recipe: Recipe) -> object:
        if error is not None:
            raise error
        return object()

    _, refused = preflight(recipes, INFO, conditions, build)  # type: ignore[arg-type]
    return {each.recipe: each.reason for each in refused}


@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa", "dflash", "dspark", "mtp", "small_model"])
def test_a_network_without_weights_is_refused(name: str) -> None:
    recipe = load_recipe(name)
    recipe = parse_recipe({"name": name, "draft": {"method": recipe.draft.parts[0].method, "k": 3}})  # type: ignore[union-attr]
    assert "at random" in checked({name: recipe})[name]


@pytest.mark.parametrize("name", ["vanilla", "ngram", "suffix", "layer_skip", "early_exit"])
def test_what_needs_no_weights_applies(name: str) -> None:
    recipe = load_recipe(name)
    assert missing_weights(recipe) is None
    assert checked({name: recipe}) == {}


def test_a_part_without_weights_refuses_the_cascade() -> None:
    recipe = parse_recipe({"draft": {"k": 4, "first_of": [{"method": "suffix"}, {"method": "dspark"}]}})
    assert "dspark" in str(missing_weights(recipe))


def test_a_vocabulary_that_does_not_agree_is_the_reason_in_the_drafters_words(tmp_path: Path) -> None:
    error = CheckpointError("eagle", "a vocabulary of 10", "1000")
    reasons = checked({"e": with_weights(tmp_path / "w"), "ngram": load_recipe("ngram")}, error=error)
    assert "a vocabulary of 10" in reasons["e"]


def test_memory_counts_weights_the_drafters_own_cache_and_verified_rows(tmp_path: Path) -> None:
    recipe = with_weights(tmp_path / "w")
    (tmp_path / "w" / "config.json").write_text(json.dumps({"num_layers": 3}), encoding="utf-8")
    need = memory_need(recipe, INFO, Conditions(2, 100, None))  # type: ignore[arg-type]
    assert need.weights == 5000
    assert need.cache == 2 * 100 * 2 * 3 * 2 * 16 * 4
    assert need.activations == 2 * 5 * 1000 * 4 * 3


def test_what_does_not_fit_is_refused_with_its_figures(tmp_path: Path) -> None:
    recipe = with_weights(tmp_path / "w")
    assert "more memory" in checked({"e": recipe}, Conditions(64, 4096, 10**6))["e"]
    assert checked({"e": recipe}, Conditions(64, 4096, None)) == {}  # nobody knows


def test_context_is_that_of_the_requests_and_not_of_the_model(tmp_path: Path) -> None:
    recipe = with_weights(tmp_path / "w")
    short, long = (memory_need(recipe, INFO, Conditions(1, context, None)).cache for context in (100, 8192))  # type: ignore[arg-type]
    assert long > 80 * short


def test_experts_grow_with_rows_and_never_beyond_all() -> None:
    counts = [expected_experts(256, 8, rows) for rows in range(1, 200)]
    assert counts[0] == pytest.approx(8.0)
    assert counts == sorted(counts)
    assert counts[-1] <= 256


def test_warnings_name_what_slows_drafts_down(tmp_path: Path) -> None:
    recipe = with_weights(tmp_path / "w")
    (tmp_path / "w" / "config.json").write_text(json.dumps({"block_size": 16}), encoding="utf-8")
    small = parse_recipe({"name": "s", "draft": {"method": "small_model", "k": 3, "model": "x", "device": "cpu"}})
    experts = {"num_experts": 256, "num_experts_per_tok": 8}
    found = warnings_of({"e": recipe, "s": small}, experts, "cuda:0")
    assert len(found) == 3
    assert "mixture of experts" in found[0]
    assert "blocks of 16" in found[1]
    assert "on cpu" in found[2]


def test_what_a_drafter_agreed_in_is_read_beside_its_weights(tmp_path: Path) -> None:
    recipe = with_weights(tmp_path / "w")
    assert recorded_agreement(recipe) is None
    Reference("0", 200, 198, 0.46).write(tmp_path / "w")
    assert recorded_agreement(recipe) == 0.46
    part = {"method": "eagle", "weights": str(tmp_path / "w")}
    both = {"name": "b", "draft": {"k": 4, "first_of": [{"method": "suffix"}, part]}}
    assert recorded_agreement(parse_recipe(both)) is None
    (tmp_path / "w" / "selftest.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"selftest\.json"):
        recorded_agreement(recipe)


def test_free_memory_is_asked_of_the_system() -> None:
    free = free_memory("cpu")
    assert free is None or free > 10**6


def test_where_drafters_compute_is_told() -> None:
    info = SimpleNamespace(device="cuda:0", weights="bfloat16", runtime="native")
    small = parse_recipe({"draft": {"method": "small_model", "model": "x", "device": "cpu", "dtype": "float32"}})
    assert placed(small, info) == "small_model on cpu in float32, native runtime"  # type: ignore[arg-type]
    both = parse_recipe({"draft": {"first_of": [{"method": "suffix"}, {"method": "eagle"}]}})
    said = "suffix on the host, no network; eagle on cuda:0 in bfloat16, native runtime"
    assert placed(both, info) == said  # type: ignore[arg-type]
