"""What a recipe means to an engine, and whether what got lost on the way there and back was said."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck
from hypothesis import strategies as st

from specflow.cost import CostModel, Timing
from specflow.errors import SpecFlowError
from specflow.export.engines.base import Dialect, Engine, Exported, Given, Imported
from specflow.export.recipe_view import RecipeView, view_of
from specflow.graph import DecodeGraph
from specflow.measure import Spread
from specflow.recipe import Recipe, load_recipe, parse_recipe, shipped_recipes

__all__ = [
    "STARVED",
    "explained",
    "harmless",
    "made_costs",
    "meaning",
    "read_back",
    "recipes",
    "round_trip",
    "shipped",
    "unexplained",
]

STARVED = (HealthCheck.too_slow,)
"""Health checks that say nothing on a machine that does other things as well."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
NETWORKS = ("mtp", "eagle", "eagle3", "dflash", "dspark", "small_model")


def meaning(view: RecipeView, sampling: bool) -> dict[str, Any]:
    """Dotted key -> what it says, with names that mean the same made equal."""
    found: dict[str, Any] = {"target.model": view.target, "target.dtype": view.recipe.target.dtype}
    found |= {f"runtime.{name}": getattr(view.recipe.runtime, name) for name in ("batch", "context")}
    if sampling:
        found |= {f"sampling.{name}": getattr(view.sampling, name) for name in SAMPLING}
    if not view.drafts:
        return found
    (draft,) = view.drafts
    history = "index" in draft.options
    found |= {
        "draft.method": {"eagle2": "eagle"}.get(draft.family, draft.family),
        "draft.k": view.k,
        "draft.weights": draft.path,
        "draft.shape": draft.shape,
        "verify.rule": "match" if history and view.rule == "rejection" else view.rule,
        "length.policy": view.policy,
    }
    if history:
        low, high = draft.match
        found |= {"draft.min_match": low, "draft.max_match": high, "draft.share": draft.options["share"]}
    if not draft.is_chain:
        found |= {"draft.nodes": draft.nodes, "draft.branch": draft.options["branch"]}
    return found


def unexplained(before: Mapping[str, Any], after: Mapping[str, Any], done: Exported) -> list[str]:
    """Keys whose meaning changed without a word."""
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in changed if not explained(key, done)]


def explained(key: str, done: Exported) -> bool:
    """Whether a gap names the key, a section around it, or the tree that its sizes belong to."""
    named = [gap.what.partition(":")[0] for gap in done.not_expressible]
    tree = key in ("draft.nodes", "draft.branch") and "draft.shape" in named
    return tree or any(key == name or key.startswith(f"{name}.") for name in named)


def read_back(engine: Engine, done: Exported, dialect: Dialect) -> Imported:
    """What an engine's file reads from what it wrote."""
    if engine.name == "tensorrt_llm":
        return engine.read(Given(text=done.files["trtllm.yaml"], name="trtllm.yaml"), dialect)
    return engine.read(Given(argv=done.command), dialect)


def round_trip(engine: Engine, recipe: Recipe, dialect: Dialect, view: RecipeView | None = None) -> Exported:
    """Export, import, and compare; then export again, which has to give the same command.

    Args:
        engine: Engine.
        recipe: What to export.
        dialect: Versions.
        view: Its view, where it carries a profile.
    """
    before = view or view_of(recipe)
    done = engine.export(before, dialect)
    imported = read_back(engine, done, dialect)
    refused = [str(finding) for finding in imported.findings if finding.severity == "error"]
    assert not refused, refused
    again = imported.recipe()
    DecodeGraph.from_recipe(again).check()
    after = view_of(again, before.costs, before.schedule, before.context)
    if before.combined is None:
        wrong = unexplained(
            meaning(before, engine.name != "tensorrt_llm"), meaning(after, engine.name != "tensorrt_llm"), done
        )
        assert not wrong, (wrong, done.command, done.not_expressible)
    second = engine.export(after, dialect)
    assert second.command == done.command
    kept = {name: text for name, text in done.files.items() if name != "request.json"}
    assert {name: text for name, text in second.files.items() if name != "request.json"} == kept
    return done


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Recipes of every kind whose parts fit together."""
    history = draw(st.booleans())
    method = draw(st.sampled_from(("ngram", "suffix") if history else (*NETWORKS, "eagle2", "medusa", "layer_skip")))
    draft: dict[str, Any] = {"method": method, "k": draw(st.integers(1, 40))}
    if history:
        draft["min_match"] = draw(st.integers(1, 12))
        draft["max_match"] = draw(st.integers(draft["min_match"], 64))
    elif method not in ("layer_skip", "mtp"):
        draft["model" if method == "small_model" else "weights"] = draw(st.sampled_from(("some/drafter", "other")))
    if method in ("eagle3", "small_model") and draw(st.booleans()):
        draft |= {"shape": "beam", "nodes": draw(st.integers(1, 60)), "branch": draw(st.integers(1, 10))}
    if method == "medusa":
        draft["num_heads"] = 64
    tree = draft.get("shape") == "beam" or method in ("eagle2", "medusa")
    rule = "match" if tree else draw(st.sampled_from(("match", "rejection", "block")))
    policies = ("fixed", "additive") if tree or method == "layer_skip" else ("fixed", "additive", "expected_gain")
    policy = draw(st.sampled_from((*policies, "match") if history else policies))
    length: dict[str, Any] = {"policy": policy}
    if policy == "match":
        length["per_match"] = draw(st.sampled_from((0.5, 2.0, 3.5)))
    sampling = {"temperature": draw(st.sampled_from((0.0, 0.7))), "max_new_tokens": draw(st.integers(1, 999))}
    runtime = draw(st.sampled_from(({}, {"batch": 8, "context": 4096})))
    target = {"model": draw(st.sampled_from(("some/target", "smollm2-135m")))}
    data = {"target": target, "draft": draft, "verify": {"rule": rule}, "length": length, "sampling": sampling}
    return parse_recipe({**data, **({"runtime": runtime} if runtime else {})})


def shipped() -> list[Recipe]:
    """Every recipe that comes along."""
    return [load_recipe(name) for name in shipped_recipes()]


def made_costs(k: int = 8, batches: tuple[int, ...] = (1, 2, 4, 8, 16), slope: float = 0.02) -> CostModel:
    """Costs of a machine on which rows cost the more, the more requests share a pass."""

    def timing(size: int, batch: int, seconds: float) -> Timing:
        return Timing(size, batch, 64, Spread(seconds, seconds, seconds, 9))

    rows = [timing(rows, batch, 0.01 + slope * 0.01 * rows * batch) for rows in range(1, k + 2) for batch in batches]
    drafts = [timing(depth, batch, 0.0005 * depth) for depth in range(1, k + 1) for batch in batches]
    return CostModel(target=tuple(rows), draft=tuple(drafts))


def harmless(engine: Engine, given: Given, dialect: Dialect) -> None:
    """Whatever is read, only our own errors come out of it."""
    with suppress(SpecFlowError):
        engine.read(given, dialect).recipe()
