"""From a recipe to an engine: which runtime a model gets, and that mistakes show before anything is loaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from made_gguf import made_store
from transformers import AutoTokenizer, MambaConfig

from specflow import build
from specflow.build import build_engine, load_target
from specflow.errors import ModelError
from specflow.recipe import load_recipe
from specflow.recipe_sections import TargetSection
from specflow.target.wheel import WheelModel

VANILLA = Path(__file__).resolve().parents[2] / "recipes" / "vanilla.yaml"


@pytest.fixture
def directory(made_wheel: tuple[WheelModel, Path], model_cache: Path) -> Path:
    """A tiny Llama."""
    return made_store(made_wheel, model_cache).ensure("tiny").directory


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_auto_takes_the_native_decoder(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = load_target(TargetSection(model=str(directory))).target
    assert target.info.runtime == "native"
    assert caplog.records == []


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}


def test_auto_falls_to_the_adapter_where_native_does_not_compute_the_positions(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_config(directory, rope_parameters=DYNAMIC)
    with caplog.at_level(logging.WARNING, logger="specflow"):
        target = load_target(TargetSection(model=str(directory))).target
    assert (target.info.runtime, target.info.context_length) == ("transformers", 32)
    assert [record.getMessage() for record in caplog.records if record.name == "specflow.build"] == [
        f"{directory}: the native decoder does not compute rope_type 'dynamic'; transformers runs it"
    ]
    with pytest.raises(ModelError, match="native does not compute rope_type 'dynamic'"):
        load_target(TargetSection(model=str(directory), implementation="native"))


def test_row_invariance_is_refused_by_the_adapter_alone(directory: Path) -> None:
    with pytest.raises(ModelError, match="cannot promise"):
        load_target(TargetSection(model=str(directory), implementation="transformers", row_invariant=True))


def test_recurrent_models_are_refused(directory: Path) -> None:
    MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1).save_pretrained(directory)
    with pytest.raises(ModelError, match="cannot be rolled back"):
        load_target(TargetSection(model=str(directory)))


def test_rule_and_length_are_made_before_the_target_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(recipe: object) -> Any:
        raise ModelError("verify", "made too late")

    monkeypatch.setattr(build, "build_rule", refuse)
    monkeypatch.setattr(build, "load_target", lambda section: pytest.fail("loaded first"))
    with pytest.raises(ModelError, match="made too late"):
        build_engine(load_recipe(str(VANILLA)))


@pytest.mark.parametrize("trusted", [False, True])
def test_the_tokenizer_is_trusted_as_the_model_is(
    trusted: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, plain = [], AutoTokenizer.from_pretrained

    def load(*args: Any, **options: Any) -> Any:
        asked.append(options["trust_remote_code"])
        return plain(*args, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    load_target(TargetSection(model=str(directory), trust_remote_code=trusted))
    assert asked == [trusted]
