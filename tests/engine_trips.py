"""Recipes out to an engine and in again, for the tests of every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st

from specflow.errors import SpecFlowError
from specflow.export.engines.base import Exported, Finding, Given, Imported, choose_dialect, find_engine
from specflow.export.recipe_view import Step, view_of
from specflow.recipe import Recipe, load_recipe, parse_recipe

__all__ = [
    "NUMBERS",
    "errors",
    "export",
    "export_recipe",
    "findings",
    "gaps",
    "meaning",
    "mutated",
    "read",
    "recipes",
    "same_again",
    "survives",
]


def export(engine: str, recipe: str, *overrides: str, version: str | None = None) -> Exported:
    """A shipped recipe, changed, in an engine's words."""
    return export_recipe(engine, load_recipe(recipe, overrides), version)


def export_recipe(engine: str, recipe: Recipe, version: str | None = None, schedule: Sequence[Step] = ()) -> Exported:
    found = find_engine(engine)
    return found.export(view_of(recipe, schedule=schedule), choose_dialect(found, version))


def read(engine: str, given: str | Sequence[str], version: str | None = None) -> Imported:
    """A configuration as a recipe: words of a command, or the text of a file."""
    found = find_engine(engine)
    what = Given(text=given, name="a file") if isinstance(given, str) else Given(argv=tuple(given))
    return found.read(what, choose_dialect(found, version))


def findings(imported: Imported, where: str) -> list[Finding]:
    return [finding for finding in imported.findings if finding.where == where]


def errors(imported: Imported) -> list[str]:
    """What the engine refuses."""
    return [finding.where for finding in imported.findings if finding.severity == "error"]


def gaps(exported: Exported) -> dict[str, str]:
    """Key -> what happens instead."""
    return {gap.what.partition(":")[0]: gap.instead for gap in exported.not_expressible}


def same_again(engine: str, exported: Exported, version: str | None = None, file: str = "") -> Recipe:
    """Read what was exported, find no fault in it, and export it again as the same; the recipe in between."""
    given: str | Sequence[str] = exported.files[file] if file else exported.command
    imported = read(engine, given, version)
    assert errors(imported) == []
    recipe = imported.recipe()
    again = export_recipe(engine, recipe, version)
    assert again.command == exported.command
    assert {name: _unnamed(text) for name, text in again.files.items()} == {
        name: _unnamed(text) for name, text in exported.files.items()
    }
    return recipe


def _unnamed(text: str) -> list[str]:
    """Lines, without those that carry the recipe's name."""
    return [line for line in text.splitlines() if not line.startswith('"""Recipe ')]


def meaning(recipe: Recipe) -> Mapping[str, Any]:
    """What a recipe means to an engine that does all of it; greedy text is the same by any lossless rule."""
    view = view_of(recipe)
    drafts = [
        (
            draft.family,
            draft.k,
            draft.path,
            draft.match if "index" in draft.options else None,
            draft.options.get("share"),
        )
        for draft in view.drafts
    ]
    return {
        "target": view.target,
        "drafts": drafts,
        "rule": "" if view.greedy else view.rule,
        "length": (view.policy, recipe.length.options) if drafts else None,
        "sampling": view.sampling,
        "batch": recipe.runtime.batch,
        "context": recipe.runtime.context,
    }


NUMBERS = st.floats(0.0, 1.0).map(lambda value: round(value, 4))


@st.composite
def recipes(draw: st.DrawFn, drafts: st.SearchStrategy[dict[str, Any] | None], lengths: Any, rules: Any) -> Recipe:
    """Recipes of drawn parts."""
    sampling: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 0.25, 0.7, 1.0, 1.5])),
        "max_new_tokens": draw(st.integers(1, 4000)),
    }
    if sampling["temperature"]:
        sampling["top_k"] = draw(st.integers(0, 100))
        sampling["top_p"] = draw(st.sampled_from([1.0, 0.95, 0.9]))
        sampling["seed"] = draw(st.none() | st.integers(0, 2**31 - 1))
    data: dict[str, Any] = {"target": {"model": draw(st.sampled_from(["org/model", "smollm2-135m"]))}}
    data["sampling"] = {key: value for key, value in sampling.items() if value is not None}
    draft = draw(drafts)
    if draft is not None:
        data |= {"draft": draft, "verify": {"rule": draw(rules)}, "length": draw(lengths)}
    return parse_recipe(data)


def mutated(text: str) -> st.SearchStrategy[str]:
    """A text with some of it cut, doubled or replaced."""

    def change(place: tuple[int, int, str]) -> str:
        start, length, put = place
        return text[: start % (len(text) + 1)] + put + text[start % (len(text) + 1) + length :]

    odd = st.sampled_from(
        ["", "-1", "1e999", "NaN", "null", "{", "]", "\0", '"', "true", "[[1]]", "9" * 30, "é", "--x"]
    )
    return st.tuples(st.integers(0, 4000), st.integers(0, 40), odd | st.text(max_size=6)).map(change)


def survives(engine: str, given: str | Sequence[str], version: str | None = None) -> None:
    """Whatever is read, nothing but our own errors comes out."""
    with suppress(SpecFlowError):
        read(engine, given, version).recipe()
