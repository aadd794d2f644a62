"""Drafters by name: a folder first, then those that ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from specflow.draft.shipped import drafter_path, shipped_drafters
from specflow.recipe import find_recipe, load_recipe, trained_recipes


def test_a_name_is_that_of_a_shipped_drafter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, path in shipped_drafters().items():
        assert drafter_path(name) == path
        assert (path / "config.json").is_file()


def test_a_folder_of_that_name_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    name = next(iter(shipped_drafters()))
    Path(name).mkdir(parents=True)
    assert drafter_path(name) == Path(name)


@pytest.mark.parametrize("name", ["no/such", "~nobody-of-that-name/x", ""])
def test_an_unknown_name_stays_a_path(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert drafter_path(name) == Path(name)


@pytest.mark.parametrize("name", trained_recipes())
def test_every_one_has_a_recipe_that_names_it(name: str) -> None:
    draft = load_recipe(find_recipe(name)).draft
    assert draft is not None
    options = draft.parts[0].options
    assert name in (getattr(options, "weights", None), getattr(options, "model", None))
