"""Every shipped recipe reproduces vanilla token for token on a tiny model, for every K, batch and temperature."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import NumberText, tiny_target

from specflow.build import LoadedTarget, build_engine
from specflow.measure import check_counts
from specflow.recipe import load_recipe
from specflow.types import Generation, Sampling

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PHRASE = [5, 9, 33, 17, 40, 41]
PROMPTS = [PHRASE * 3, [7], [*PHRASE, 3, *PHRASE, 4, 5, 9], [11] * 20]
TARGET = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
GREEDY = Sampling(max_new_tokens=24, ignore_eos=True, seed=3)
WARM = Sampling(max_new_tokens=24, ignore_eos=True, seed=3, temperature=0.8, logit_bias={9: 50.0, 33: 50.0})


def decode(recipe: Path, settings: list[str], sampling: Sampling) -> list[Generation]:
    return build_engine(load_recipe(str(recipe), settings), TARGET).generate(PROMPTS, sampling)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["T0", "T0.8"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_equals_vanilla_for_every_k(recipe: Path, sampling: Sampling, batch: int) -> None:
    expected = decode(ROOT / "recipes" / "vanilla.yaml", [], sampling)
    drafts = load_recipe(str(recipe)).draft is not None
    accepted = 0
    for k in range(1, 17) if drafts else (0,):
        settings = [f"runtime.batch={batch}", *([f"draft.k={k}"] if drafts else [])]
        got = decode(recipe, settings, sampling)
        assert [g.tokens for g in got] == [e.tokens for e in expected], f"K = {k}"
        for generation in got:
            check_counts(generation.counts)
            accepted += generation.counts.num_accepted_draft_tokens
    assert (accepted > 0) == drafts


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_other_lossless_rules_equal_vanilla_when_greedy(recipe: Path, rule: str) -> None:
    if load_recipe(str(recipe)).draft is None:
        return
    expected = decode(ROOT / "recipes" / "vanilla.yaml", [], GREEDY)
    got = decode(recipe, [f"verify.rule={rule}"], GREEDY)
    assert [g.tokens for g in got] == [e.tokens for e in expected]
