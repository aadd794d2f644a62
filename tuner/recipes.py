"""The recipes of a tuning run, with one target; those that cannot take part are named with the reason. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from specflow.draft.shipped import shipped_drafters
from specflow.errors import DataError, RecipeError
from specflow.recipe import Recipe, find_recipe, load_recipe, parse_recipe, recipe_data, shipped_recipes
from specflow.recipe_draft import SourceSection
from specflow.recipe_yaml import read_yaml, write_yaml
from specflow.types import Sampling
from tuner.preflight import missing_weights
from tuner.result import Confirmed, Refused, TuneResult
from tuner.space import variants
from tuner.words import answer_line, nearest_round

__all__ = ["Chosen", "read_recipes", "tuned_yaml"]

PLAIN = "vanilla"
DECIDED_BY_RUN = {"max_new_tokens", "ignore_eos", "seed"}
OF_USE = ("method", "source", "dependency", "k", "shape", "nodes", "branch", "runtime")
"""Keys of a draft section that say how a network is used, not how it was made."""
OF_DRAFTS = ("draft", "verify", "length")


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a run chooses from."""

    plain: Recipe
    recipes: dict[str, Recipe]  # that draft
    refused: list[Refused]


def read_recipes(names: Sequence[str], target: str | None, settings: Sequence[str] = ()) -> Chosen:
    """Recipes by name.

    Args:
        names: Files, shipped names, or patterns such as recipes/*.yaml; () is all that come with SpecFlow.
        target: Model of all of them; None leaves that to the recipes.
        settings: `key=value` for all; those of draft, verify and length for recipes that draft.

    Raises:
        RecipeError: There is no such recipe, or a setting is wrong for all.
        DataError: Two recipes have one name.
    """
    settings = [*settings, *([] if target is None else [f"target.model={target}"])]
    for_all = [each for each in settings if each.split("=")[0].split(".")[0] not in OF_DRAFTS]
    plain = load_recipe(PLAIN, for_all)
    found: dict[str, Recipe] = {}
    refused: list[Refused] = []
    for name in _expanded(names):
        file = find_recipe(name)
        try:
            recipe = load_recipe(file)
            recipe = load_recipe(file, settings if recipe.draft is not None else for_all)
            recipe = _with_shipped_weights(recipe, recipe.name or file.stem)
        except RecipeError as error:
            refused.append(Refused(recipe=file.stem, phase="reading", reason=str(error)))
            continue
        label = recipe.name or file.stem
        if recipe.draft is None:
            plain = recipe if target is None and not found else plain
            continue
        if label in found or label == plain.name:
            raise DataError(str(name), f"a second recipe named '{label}'", "names that tell the results apart")
        try:
            found |= variants(recipe.model_copy(update={"name": label}))
        except RecipeError as error:
            refused.append(Refused(recipe=label, phase="reading", reason=str(error)))
    return _alike(plain, found, refused, named_target=target is not None)


def _with_shipped_weights(recipe: Recipe, label: str) -> Recipe:
    """The recipe with the drafter that comes with SpecFlow for its target, where it names no weights of its own.

    Its directory is named as the recipe. What shaped the network stands in its own config, so the recipe keeps only
    what says how it is used.

    Raises:
        RecipeError: That is no valid recipe.
    """
    name = f"{recipe.target.model}/{label}"
    if not isinstance(recipe.draft, SourceSection) or missing_weights(recipe) is None or name not in shipped_drafters():
        return recipe
    data = recipe_data(recipe)
    kept = {key: value for key, value in data["draft"].items() if key in OF_USE}
    return parse_recipe({**data, "draft": {**kept, recipe.draft.info.checkpoint: name}}, label)


def _expanded(names: Sequence[str]) -> list[str]:
    if not names:
        return list(shipped_recipes())
    found: list[str] = []
    for name in names:
        found += sorted(glob(name)) or [name] if any(sign in name for sign in "*?[") else [name]
    return list(dict.fromkeys(found))


def _alike(plain: Recipe, recipes: Mapping[str, Recipe], refused: list[Refused], named_target: bool) -> Chosen:
    """All with one target and one sampling; what asks for another takes no part."""
    if not named_target and recipes:
        first = next(iter(recipes.values()))
        plain = plain.model_copy(update={"target": first.target, "sampling": first.sampling, "name": PLAIN})
    kept = {}
    for name, recipe in recipes.items():
        if recipe.target != plain.target:
            refused.append(Refused(recipe=name, phase="reading", reason="another target than the others"))
        elif _compared(recipe.sampling) != _compared(plain.sampling):
            refused.append(Refused(recipe=name, phase="reading", reason="another sampling than the others"))
        elif recipe.verify.lossy:
            reason = f"rule {recipe.verify.rule} is lossy: its text is not the target's, so its speed is no answer"
            refused.append(Refused(recipe=name, phase="reading", reason=reason))
        else:
            kept[name] = recipe
    return Chosen(plain, kept, refused)


def _compared(sampling: Sampling) -> dict[str, Any]:
    return sampling.model_dump(exclude=DECIDED_BY_RUN)


def _spelt_out(recipe: Recipe) -> dict[str, Any]:
    """The recipe as data, with what was chosen written down even where it is the default."""
    data = recipe_data(recipe)
    if recipe.draft is None:
        return data
    data["draft"] = {**data["draft"], "k": recipe.draft.k}
    for section, key in (("verify", "rule"), ("length", "policy")):
        data.setdefault(section, {key: getattr(getattr(recipe, section), key)})
    return {name: data[name] for name in Recipe.model_fields if name in data}


def _reached(measured: Confirmed) -> list[str]:
    """The reference that later runs are compared with (`specflow check`)."""
    length = measured.acceptance_length
    return [] if length is None else [f"Measured acceptance length {length:.2f}, bonus token included."]


def tuned_yaml(recipe: Recipe, result: TuneResult) -> str:
    """tuned.yaml: the recipe, and above it where it comes from. It is read back before anybody relies on it.

    Raises:
        RecipeError: It does not load to the same recipe.
    """
    facts, measured = result.provenance, nearest_round(result)
    versions = facts.get("versions") or {}
    torch = versions.get("torch") if isinstance(versions, Mapping) else None
    head = [
        answer_line(result.answer),
        f"Made by `specflow tune` at {facts.get('started_at')}, code {facts.get('git_sha')}, torch {torch}.",
        *(_reached(measured) if measured is not None and result.answer.speculate else ()),
        "Evidence: report.html and tuned.json beside this file. Run: specflow run tuned.yaml PROMPT",
    ]
    text = "".join(f"# {' '.join(line.split())}\n" for line in head) + write_yaml(_spelt_out(recipe))
    again = parse_recipe(read_yaml(text, "tuned.yaml").data, str(Path("tuned.yaml")))
    if again != recipe:
        raise RecipeError("tuned.yaml", "loads to another recipe", "the recipe that was chosen")
    return text
