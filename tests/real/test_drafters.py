"""The trained drafters that ship: they load, keep vanilla's text, and accept what was measured when they were made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specflow.bench.data import load_prompts
from specflow.build import LoadedTarget, build_engine, load_target
from specflow.checkpoint.write_target import open_verifier
from specflow.cli.demo import PROMPTS as PROMPTS_OF_SELFTEST
from specflow.cli.selftest import _prompts
from specflow.draft.shipped import shipped_drafters
from specflow.engine import Engine
from specflow.errors import RecipeError
from specflow.measure import acceptance_length, merge_counts
from specflow.recipe import load_recipe, trained_recipes
from specflow.train.reference import Reference
from specflow.train.selftest import greedy_texts, parts_to_test, run_selftest
from specflow.types import Generation

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures" / "drafters"
PROMPTS = ROOT / "benchmarks" / "open.jsonl"
COMMON = ["target.runtime=torch", "target.dtype=float32", "runtime.batch=8"]
NAMES = sorted(name.removeprefix("smollm2-135m/") for name in shipped_drafters())
TOLERANCE = 0.06
"""Of an acceptance length: 8 texts of 32 tokens, where a tie that falls the other way changes a few rounds."""
MOST_BYTES = 60_000_000


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(load_recipe("vanilla", COMMON[:2]).target)


def decode(engine: Engine, limit: int) -> list[Generation]:
    rows, _ = load_prompts([PROMPTS], limit)
    return engine.generate([engine.codec.encode_chat(row.messages(0, [])) for row in rows], SAMPLING)


SAMPLING = load_recipe("vanilla").sampling.model_copy(update={"temperature": 0.0, "max_new_tokens": 32})


@pytest.fixture(scope="module")
def vanilla(loaded: LoadedTarget) -> list[tuple[int, ...]]:
    return [made.tokens for made in decode(build_engine(load_recipe("vanilla", COMMON), loaded), 8)]


def test_all_together_are_small_and_have_recipes() -> None:
    assert set(NAMES) == {
        "dflash",
        "dspark",
        "eagle3",
        "early_exit",
        "medusa",
        "medusa_markov",
        "mtp",
        "small_model",
    }
    folders = shipped_drafters().values()
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= MOST_BYTES
    assert all(path.is_file() for path in trained_recipes().values())


@pytest.mark.parametrize("name", NAMES)
def test_it_accepts_what_was_measured(name: str, loaded: LoadedTarget, vanilla: list[tuple[int, ...]]) -> None:
    expected = json.loads((FIGURES / name / "greedy-fixed.json").read_text())
    recipe = load_recipe(f"smollm2-135m/{name}", COMMON)
    chain = ["draft.shape=chain"] if "shape" in type(recipe.draft).model_fields else []
    settings = [*COMMON, "length.policy=fixed", "verify.rule=block", *chain]
    made = decode(build_engine(load_recipe(f"smollm2-135m/{name}", settings), loaded), expected["limit"])
    assert [each.tokens for each in made] == vanilla
    length = acceptance_length(merge_counts(each.counts for each in made))
    assert length == pytest.approx(expected["mean_acceptance_length"], abs=TOLERANCE)
    assert expected["mean_acceptance_length"] > 1.0 + 2 * TOLERANCE, "a drafter that accepts nothing passes any test"


@pytest.mark.parametrize("name", NAMES)
def test_its_first_tokens_agree_as_recorded(name: str, loaded: LoadedTarget) -> None:
    recipe, prompts = load_recipe(f"smollm2-135m/{name}", COMMON), _prompts(PROMPTS_OF_SELFTEST, loaded)
    assert recipe.draft is not None
    if "weights" not in type(recipe.draft).model_fields:
        with pytest.raises(RecipeError, match="no conventions to mistake"):
            parts_to_test(recipe)
        return
    section = parts_to_test(recipe)[0]
    found = run_selftest(section, loaded, greedy_texts(loaded, prompts, 200))
    now, before = Reference.of(found, prompts, 200), Reference.read(shipped_drafters()[f"smollm2-135m/{name}"])
    assert before is not None
    assert (now.prompts, found.healthy) == (before.prompts, True)
    assert now.agreement == pytest.approx(before.agreement, abs=0.05)


def test_engines_are_told_the_model_that_others_know() -> None:
    assert open_verifier("smollm2-135m").reference == "HuggingFaceTB/SmolLM2-135M-Instruct"
