"""A drafter's directory: tensors, options and the reduced vocabulary, each read as written or refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from tiny import VOCAB, tiny_target

from specflow.draft.checkpoint import draft_vocabulary, open_weights, read_options
from specflow.errors import CheckpointError
from specflow.recipe import parse_recipe

TARGET = tiny_target(torch.float32)


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(1, ge=1)
    taps: tuple[int, ...] = ()
    weights: str | None = None
    seed: int = 0


def folder(path: Path, options: dict[str, Any] | str | None = None, **tensors: torch.Tensor) -> str:
    save_file(tensors or {"a": torch.zeros(2)}, path / "model.safetensors")
    if options is not None:
        text = options if isinstance(options, str) else json.dumps(options)
        (path / "config.json").write_text(text, encoding="utf-8")
    return str(path)


def test_no_weights_are_random_ones_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        reader = open_weights(None, 3, TARGET)
    assert "random" in caplog.text
    assert reader.is_random
    again, other = open_weights(None, 3, TARGET), open_weights(None, 4, TARGET)
    assert torch.equal(reader.take("a", (2, 3)), again.take("a", (2, 3)))
    assert not torch.equal(reader.take("b", (2, 3)), other.take("b", (2, 3)))


def test_tensors_take_the_type_of_the_target(tmp_path: Path) -> None:
    weights = folder(tmp_path, a=torch.tensor([1.0, 2.0], dtype=torch.float16), d2t=torch.tensor([5]))
    reader = open_weights(weights, 0, TARGET)
    assert not reader.is_random
    assert reader.take("a", (2,)).dtype == torch.float32
    assert reader.take("d2t", (1,)).dtype == torch.int64
    reader.close()


def test_offset_norms_gain_one(tmp_path: Path) -> None:
    tensors = {"mtp.norm.weight": torch.tensor([0.5, -0.25]), "fc.weight": torch.ones(1, 2), "fc.bias": torch.ones(2)}
    reader = open_weights(folder(tmp_path, **tensors), 0, TARGET, offset_norms=True)
    assert reader.take("mtp.norm.weight", (2,)).tolist() == [1.5, 0.75]
    assert reader.take("fc.weight", (1, 2)).tolist() == [[1.0, 1.0]]
    assert reader.take("fc.bias", (2,)).tolist() == [1.0, 1.0]
    reader.close()


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    for missing in (tmp_path / "absent", tmp_path):
        with pytest.raises(CheckpointError, match=r"no such directory|model\.safetensors"):
            open_weights(str(missing), 0, TARGET)


def test_the_checkpoint_fills_what_the_recipe_left_out(tmp_path: Path) -> None:
    weights = folder(tmp_path, {"layers": 3, "taps": [1, 2]})
    assert read_options(Options(weights=weights), weights) == Options(layers=3, taps=(1, 2), weights=weights)
    assert read_options(Options(taps=(1, 2)), weights).layers == 3
    assert read_options(Options(layers=2), None) == Options(layers=2)


def test_no_config_changes_nothing(tmp_path: Path) -> None:
    assert read_options(Options(layers=2), folder(tmp_path)) == Options(layers=2)


def test_a_contradiction_names_both_values(tmp_path: Path) -> None:
    weights = folder(tmp_path, {"layers": 3})
    with pytest.raises(CheckpointError, match=r"layers is 3, and 1 in the recipe"):
        read_options(Options(layers=1), weights)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"layer": 3}', "unknown key 'layer'"),
        ('{"seed": 3}', "unknown key 'seed'"),
        ('{"weights": "elsewhere"}', "unknown key 'weights'"),
        ('{"layers": 0}', "layers: "),
        ("[1]", "a list"),
        ("{", "cannot be read"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path: Path, text: str, found: str) -> None:
    weights = folder(tmp_path, text)
    with pytest.raises(CheckpointError, match=found) as error:
        read_options(Options(), weights)
    assert "config.json" in error.value.where


def test_what_a_recipe_leaves_out_is_left_to_the_checkpoint() -> None:
    recipe = parse_recipe({"name": "x", "draft": {"method": "eagle", "k": 3, "bias": True}}, "here")
    assert recipe.draft is not None
    assert recipe.draft.options.model_fields_set == {"variant", "shape", "bias"}


def test_a_draft_vocabulary_is_read_from_offsets(tmp_path: Path) -> None:
    ids = torch.tensor([0, 4, 5, 60])
    tensors = {"d2t": ids - torch.arange(4), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    reader = open_weights(folder(tmp_path, **tensors), 0, TARGET)
    vocabulary = draft_vocabulary(reader, 4, TARGET)
    reader.close()
    assert vocabulary is not None
    assert vocabulary.to_target.tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("offsets", "size", "found"),
    [
        ([0, 0, 0, 58], 4, "ids from 0 to 61"),
        ([0, -3, 0, 0], 4, "ids from -2 to 3"),
        ([0, 0, 1, 0], 4, "the same target id"),
        ([0.0, 1.0], 2, "whole numbers"),
        ([0, 0, 0, 0], 5, r"shape \(4,\)"),
        ([0, 0, 0, 0], None, "size is not set"),
        ([0, 0, 0, 0], VOCAB + 1, "a draft vocabulary of 62"),
    ],
)
def test_a_wrong_draft_vocabulary_is_refused(tmp_path: Path, offsets: list[int], size: int | None, found: str) -> None:
    reader = open_weights(folder(tmp_path, d2t=torch.tensor(offsets)), 0, TARGET)
    with pytest.raises(CheckpointError, match=found):
        draft_vocabulary(reader, size, TARGET)


def test_a_missing_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'d2t' is missing"):
        draft_vocabulary(open_weights(folder(tmp_path), 0, TARGET), 7, TARGET)


def test_the_targets_own_ids_need_no_map(tmp_path: Path) -> None:
    reader = open_weights(folder(tmp_path), 0, TARGET)
    assert draft_vocabulary(reader, None, TARGET) is None
    assert draft_vocabulary(reader, VOCAB, TARGET) is None


def test_random_drafters_spread_their_ids() -> None:
    vocabulary = draft_vocabulary(open_weights(None, 0, TARGET), 20, TARGET)
    assert vocabulary is not None
    ids = vocabulary.to_target.tolist()
    assert len(set(ids)) == 20
    assert max(ids) > VOCAB * 3 // 4


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    reader = open_weights(folder(tmp_path, **{"fc.weight": torch.tensor([[1.0, float("nan")]])}), 0, TARGET)
    with pytest.raises(CheckpointError, match=r"fc\.weight holds values that are not finite"):
        reader.take("fc.weight", (1, 2))
