"""Every objective learns a toy set by heart: what a drafter is trained on, it must come to draft."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_training import toy_records, toy_run, toy_target, write_corpus

from specflow.build import LoadedTarget
from specflow.draft.registry import discover
from specflow.draft.trainable import saved_options
from specflow.errors import RecipeError
from specflow.recipe import Recipe, load_recipe, shipped_recipes
from specflow.train.capture import KeptFeatures
from specflow.train.held_out import HeldOut
from specflow.train.objective_options import OBJECTIVES
from specflow.train.opening import trained_part
from specflow.train.processes import Processes
from specflow.train.run import Session, TrainingRun

ENOUGH = 0.95
K = 2
LEARNING = {"steps": 600, "lr": 3e-3, "batch_tokens": 1024, "held_out": 0.0, "calibration_rounds": 0}
LARGE = {"num_layers": 3, "adapter_rank": 64}
"""Options of capacity, for sources that have them."""


def tiny(name: str) -> Recipe | None:
    """A shipped recipe, with what it needs to learn by heart; None where nothing of it is trained."""
    recipe = load_recipe(name)
    if recipe.draft is None or len(recipe.draft.parts) > 1 or recipe.draft.parts[0].info.trainable is None:
        return None
    fields = recipe.draft.parts[0].info.config.model_fields
    large = [f"draft.{key}={value}" for key, value in LARGE.items() if key in fields]
    try:
        return load_recipe(name, [f"draft.k={K}", "length={}", "verify={}", *large])
    except RecipeError:
        return None  # what is trained belongs to another method of the source


def trained_alike(recipe: Recipe) -> tuple[object, ...]:
    """What of a recipe training depends on."""
    part = trained_part(recipe)[1]
    return part.source, part.dependency, sorted(saved_options(part.options).items())


RECIPES = {name: recipe for name in shipped_recipes() if (recipe := tiny(name)) is not None}
DRAFTERS = {repr(trained_alike(recipe)): name for name, recipe in reversed(RECIPES.items())}
"""One recipe of each drafter: those that differ in the shape of blocks alone are trained alike."""


def accept_rates(run: TrainingRun, every: int = 25) -> list[float]:
    """What is accepted of the texts that were trained on, once it is enough or all steps are made."""
    seen = HeldOut(run.texts.training, 512, KeptFeatures(run._source), Processes(on_cpu=True))
    rates = [0.0]
    for progress in run.go(Session(10**6, 10**6)):
        if progress.step % every == 0:
            rates = seen.measure(run._drafting, run._trainee)["accept_rate"]
            if min(rates) > ENOUGH:
                break
    return rates


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return toy_target()


@pytest.fixture(scope="module")
def corpus(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "corpus", loaded, toy_records(loaded, 64, answer=9))


def test_every_source_that_can_be_trained_has_a_recipe_here() -> None:
    learnt = {recipe.draft.parts[0].source for recipe in RECIPES.values() if recipe.draft is not None}
    assert learnt == {name for name, info in discover().items() if info.trainable is not None}


@pytest.mark.parametrize("name", sorted(DRAFTERS.values()))
def test_a_drafter_learns_a_toy_set_by_heart(name: str, loaded: LoadedTarget, corpus: Path, tmp_path: Path) -> None:
    run = toy_run(corpus, tmp_path / "run", RECIPES[name], loaded, LEARNING)
    assert min(accept_rates(run)) > ENOUGH


@pytest.mark.parametrize(("objective", "name"), [("lk", "eagle3"), ("dflash_dpace", "dflash")])
def test_an_objective_that_no_method_is_published_with_does_too(
    objective: str, name: str, loaded: LoadedTarget, corpus: Path, tmp_path: Path
) -> None:
    options = {**LEARNING, "objective": OBJECTIVES[objective].model_dump()}
    run = toy_run(corpus, tmp_path / "run", RECIPES[name], loaded, options)
    assert min(accept_rates(run)) > ENOUGH
