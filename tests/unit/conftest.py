"""Fixtures of the unit tests: a made model in a wheel, and a cache directory of its own for every test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from specflow.target.wheel import WheelModel


@pytest.fixture(scope="session")
def made_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[WheelModel, Path]:
    """A wheel with a model in it, and the directory it lies in."""
    from made_gguf import tiny_config, tiny_model, write_gguf, write_wheel

    directory = tmp_path_factory.mktemp("wheels")
    gguf = write_gguf(directory / "model.gguf", tiny_model(tiny_config("llama")))
    return write_wheel(directory, gguf), directory


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory that the environment names, beside an empty cache of the hub."""
    monkeypatch.setenv("SPECFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "cache"
