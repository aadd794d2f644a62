"""Where an exported configuration says models and drafters are: the engine starts in another folder than the recipe."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from engine_meaning import read_back
from typer.testing import CliRunner

from specflow.cli.app import app
from specflow.draft.shipped import shipped_drafters
from specflow.export.engines.base import engines
from specflow.export.recipe_view import view_of
from specflow.recipe import load_recipe, parse_recipe
from specflow.target.store import HUB_IDS

TRAINED = sorted(shipped_drafters().items())


def exported(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["export", "engine", *words, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a drafter of somebody else's, a model and one of our own layout."""
    monkeypatch.chdir(tmp_path)
    for name in ("theirs", "model", "ours"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"")
        said = {"taps": [1, 2, 3]} if name == "ours" else {"architectures": ["LlamaForCausalLMEagle3"]}
        (tmp_path / name / "config.json").write_text(json.dumps(said))
    return tmp_path


@pytest.mark.parametrize(("name", "place"), TRAINED, ids=[name for name, _ in TRAINED])
def test_a_shipped_drafter_is_named_by_its_folder(name: str, place: Path) -> None:
    (draft,) = view_of(load_recipe(name)).drafts
    assert draft.path == str(place)
    notes = exported("vllm", name)["notes"]
    if draft.family in ("medusa", "early_exit"):  # vLLM has no such method
        return
    told = "token ids of its own" if draft.family == "small_model" else f"specflow convert {place} --to speculators"
    assert any(told in note for note in notes)


def test_folders_are_absolute_in_what_another_folder_starts(folder: Path) -> None:
    draft = {"method": "eagle3", "k": 3, "weights": "theirs"}
    view = view_of(parse_recipe({"target": {"model": "model"}, "draft": draft}))
    assert (view.target, view.drafts[0].path) == (str(folder / "model"), str(folder / "theirs"))
    overrides = ("--set", "draft.weights=./theirs", "--set", "target.model=model")
    for engine in ("vllm", "sglang", "llama_cpp"):
        words = exported(engine, "eagle3", *overrides)["command"]
        said = shlex.join(words)
        assert str(folder / "theirs") in said
        assert str(folder / "model") in said


def test_a_small_model_has_the_name_others_know() -> None:
    (draft,) = view_of(load_recipe("small_model", ["draft.model=smollm2-135m"])).drafts
    assert draft.path == HUB_IDS["smollm2-135m"]


@pytest.mark.parametrize("name", ["org/drafter", "~nobody-here/x", "x" * 5000, "a\0b"])
def test_what_is_not_here_keeps_its_name(name: str) -> None:
    data = {"target": {"model": name}, "draft": {"method": "eagle3", "k": 3, "weights": name}}
    view = view_of(parse_recipe(data))
    assert (view.target, view.drafts[0].path) == (name, name)
    sglang = engines()["sglang"]
    assert name in sglang.export(view, sglang.dialects[0]).command


def test_drafters_of_our_layout_are_to_be_converted(folder: Path) -> None:
    ours = exported("sglang", "eagle3", "--set", "draft.weights=ours")["notes"]
    assert any(re.search(r"specflow convert \S+/ours --to speculators", note) for note in ours)
    medusa = exported("vllm", "medusa", "--set", "draft.weights=ours", "--engine-version", "0.29")["notes"]
    assert any("--to official" in note for note in medusa)
    theirs = exported("sglang", "eagle3", "--set", "draft.weights=theirs")["notes"]
    assert not any("convert" in note for note in theirs)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm"])
def test_folders_with_spaces_come_back(engine: str, tmp_path: Path) -> None:
    place = tmp_path / "my models"
    place.mkdir()
    recipe = load_recipe("eagle3", [f"target.model={place}", f"draft.weights={place}"])
    found = engines()[engine]
    back = read_back(found, found.export(view_of(recipe), found.dialects[0]), found.dialects[0]).recipe()
    assert back.target.model == str(place)
    assert back.draft is not None
    assert back.draft.parts[0].options.weights == str(place)  # type: ignore[attr-defined]
