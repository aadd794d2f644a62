"""Every shipped recipe reproduces vanilla token for token on a tiny model, for every K, batch and temperature.

Networks without weights are small seeded ones here: what is proven is the computation, not the drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from families import make_onnx
from tiny import NumberText, tiny_model, tiny_target

from specflow.build import LoadedTarget, build_engine
from specflow.measure import check_counts
from specflow.recipe import Recipe, load_recipe
from specflow.rules import RULE_INFOS
from specflow.types import Generation, Sampling

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PHRASE = [5, 9, 33, 17, 40, 41]
PROMPTS = [PHRASE * 3, [7], [*PHRASE, 3, *PHRASE, 4, 5, 9], [11] * 20]
TARGET = LoadedTarget(tiny_target(), NumberText())  # type: ignore[arg-type]
GREEDY = Sampling(max_new_tokens=24, ignore_eos=True, seed=3)
WARM = Sampling(max_new_tokens=24, ignore_eos=True, seed=3, temperature=0.8, logit_bias={9: 50.0, 33: 50.0})


def decode(recipe: Path, settings: list[str], sampling: Sampling, target: LoadedTarget = TARGET) -> list[Generation]:
    return build_engine(loaded(recipe, settings), target).generate(PROMPTS, sampling)


def loaded(recipe: Path, settings: list[str]) -> Recipe:
    """The recipe, its lists of layers folded into the few that the tiny target has."""
    made = load_recipe(str(recipe), settings)
    for name, field in getattr(type(made.draft), "model_fields", {}).items():
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("of") == "layers":
            layers = sorted({layer % TARGET.target.info.num_layers for layer in getattr(made.draft, name)})
            settings = [*settings, f"draft.{name}={layers}"]
    return load_recipe(str(recipe), settings)


@cache
def vanilla(warm: bool) -> list[tuple[int, ...]]:
    made = decode(ROOT / "recipes" / "vanilla.yaml", [], WARM if warm else GREEDY)
    return [generation.tokens for generation in made]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("warm", [False, True], ids=["T0", "T0.8"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_equals_vanilla_for_every_k(recipe: Path, warm: bool, batch: int) -> None:
    """With the rule that promises the same text; the others promise its law (tests/law)."""
    drafts = loaded(recipe, []).draft is not None
    accepted = 0
    for k in range(1, 17) if drafts else (0,):
        settings = [f"runtime.batch={batch}", *([f"draft.k={k}", "verify.rule=match"] if drafts else [])]
        got = decode(recipe, settings, WARM if warm else GREEDY)
        assert [generation.tokens for generation in got] == vanilla(warm), f"K = {k}"
        for generation in got:
            check_counts(generation.counts)
            accepted += generation.counts.num_accepted_draft_tokens
    if not warm:  # a biased target says little else than two tokens, which a random draft may never hit
        assert (accepted > 0) == drafts


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_other_lossless_rules_equal_vanilla_when_greedy(recipe: Path, rule: str) -> None:
    if loaded(recipe, []).draft is None:
        return
    engine = build_engine(loaded(recipe, []), TARGET)
    if engine.exactness == "tie-exact" and not RULE_INFOS[rule].trees:
        return  # a rule for chains refuses trees: tests/unit/test_graph.py
    got = decode(recipe, [f"verify.rule={rule}"], GREEDY)
    assert [generation.tokens for generation in got] == vanilla(False)


@pytest.fixture(scope="module")
def onnx_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedTarget]:
    """The same model in ONNX Runtime; graphs of drafters go to a cache of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECFLOW_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield LoadedTarget(make_onnx(tiny_model()), NumberText())  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_equals_vanilla_in_onnx_runtime(recipe: Path, batch: int, onnx_target: LoadedTarget) -> None:
    """Target and drafter."""
    drafts = loaded(recipe, []).draft is not None
    accepted = 0
    for sampling in (GREEDY, WARM):
        expected = decode(ROOT / "recipes" / "vanilla.yaml", [], sampling, onnx_target)
        for k in (1, 9) if drafts else (0,):
            settings = [f"runtime.batch={batch}", *([f"draft.k={k}", "verify.rule=match"] if drafts else [])]
            got = decode(recipe, settings, sampling, onnx_target)
            assert [each.tokens for each in got] == [each.tokens for each in expected], f"K = {k}"
            accepted += sum(each.counts.num_accepted_draft_tokens for each in got)
    assert (accepted > 0) == drafts
