"""Recipes: what to run, in YAML. Load with line numbers, override, dump, find, describe as JSON Schema. No torch.

recipe = load_recipe("ngram", ["draft.k=5"])      # a shipped recipe, or a path
text = dump_recipe(recipe)                        # loads to an equal recipe
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from specflow.draft.shipped import shipped_drafters
from specflow.errors import RecipeError
from specflow.recipe_draft import (
    COMBINED,
    DRAFT,
    PART,
    CombinedSection,
    DraftSection,
    SourceSection,
    draft_data,
    in_order,
)
from specflow.recipe_sections import (
    Choice,
    LengthSection,
    RuntimeSection,
    Section,
    TargetSection,
    TuneRange,
    VerifySection,
    fault,
    length_sections,
    plain_length,
    plain_verify,
    verify_sections,
)
from specflow.recipe_yaml import Document, read_yaml, split_key, write_yaml
from specflow.types import Sampling

__all__ = [
    "Recipe",
    "dump_recipe",
    "explain",
    "find_recipe",
    "load_recipe",
    "nearest",
    "parse_recipe",
    "read_recipe",
    "recipe_data",
    "recipe_schema",
    "shipped_recipes",
    "trained_recipes",
]

VERIFY = Choice("rule", verify_sections, default="match")
LENGTH = Choice("policy", length_sections, default="fixed")
CHOICES = {"draft": DRAFT, "verify": VERIFY, "length": LENGTH}


class Recipe(Section):
    """One way to decode: a target, perhaps a draft, and how they work together. Without a draft: plain decoding."""

    name: str = Field("", description="short name, used in tables")
    description: str = Field("", description="one line: what it does")
    target: TargetSection = Field(default_factory=TargetSection)
    draft: Annotated[DraftSection, DRAFT] | None = Field(None, description="null decodes plainly")
    verify: Annotated[VerifySection, VERIFY] = Field(default_factory=plain_verify)
    length: Annotated[LengthSection, LENGTH] = Field(default_factory=plain_length)
    sampling: Sampling = Field(default_factory=Sampling)
    runtime: RuntimeSection = Field(default_factory=RuntimeSection)
    tune: Mapping[str, TuneRange] = Field(default_factory=dict, description="dotted key -> values a tuner may try")

    @model_validator(mode="after")
    def _length_has_draft(self) -> Recipe:
        if self.draft is None and self.length != plain_length():
            raise fault("length", "a length policy without a draft", "a draft section, or no length section")
        return self

    @model_validator(mode="after")
    def _tunes_itself(self) -> Recipe:
        """Every value a tuner may try must give a valid recipe: found now, not hours into a study."""
        for key, values in self.tune.items():
            for value in values.ends:
                if isinstance(self.draft, CombinedSection) and key == f"draft.{self.draft.policy}":
                    in_order(self.draft, str(value))
                    continue
                document = Document("tune", recipe_data(self.model_copy(update={"tune": {}})))
                document.set(key, value, "tune")
                try:
                    type(self).model_validate(document.data, strict=True)
                except ValidationError as error:
                    problem = next(iter(_problems(error)))
                    found = f"{problem.found} as a value of {'.'.join(map(str, problem.path))}"
                    raise fault(f"tune.{key}", found, problem.expected) from error
        return self


MESSAGES = {
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "union_tag_not_found": "a mapping of keys",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "tuple_type": "a list",
    "missing": "a value",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a recipe."""

    path: tuple[Any, ...]
    found: str
    expected: str
    hint: str = ""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or a shipped recipe by its name, with `key.key=value` overrides.

    Raises:
        RecipeError: With file, line, key, what was found and expected, and the nearest valid name.
    """
    document = read_recipe(path)
    for setting in overrides:
        document.override(setting)
    return _validate(document)


def read_recipe(path: str | Path) -> Document:
    """A recipe file as data with line numbers, not validated yet."""
    file = find_recipe(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(str(file), f"cannot be read: {error}", "a YAML file in UTF-8") from error
    return read_yaml(text, str(file))


def parse_recipe(data: Mapping[str, Any], name: str = "recipe") -> Recipe:
    """A recipe from plain data; errors are those of a file without line numbers."""
    return _validate(Document(name, _with_tuples(dict(data))))


def _with_tuples(data: Any) -> Any:
    """A copy of plain data whose lists are tuples, which is what sections hold."""
    if isinstance(data, list | tuple):
        return tuple(_with_tuples(each) for each in data)
    return {key: _with_tuples(value) for key, value in data.items()} if isinstance(data, dict) else copy.copy(data)


def recipe_data(recipe: Recipe, full: bool = False) -> dict[str, Any]:
    """Plain data that validates to an equal recipe.

    Args:
        recipe: The recipe.
        full: Write defaults too, so that the file means the same where defaults differ.
    """
    data: dict[str, Any] = {}
    for name in Recipe.model_fields:
        value = getattr(recipe, name)
        if name == "tune":
            dumped: Any = {key: values.model_dump(exclude_defaults=True) for key, values in value.items()}
        elif isinstance(value, DraftSection):
            dumped = draft_data(value, full)
        else:
            dumped = value.model_dump(exclude_defaults=not full) if isinstance(value, BaseModel) else value
            if name in CHOICES and value is not None:
                key = CHOICES[name].key
                dumped = {key: getattr(value, key), **dumped}
        if full or (value is not None and value != Recipe.model_fields[name].get_default(call_default_factory=True)):
            data[name] = dumped
    return data


def dump_recipe(recipe: Recipe, full: bool = False) -> str:
    """YAML that loads to an equal recipe; with `full`, defaults are written too."""
    return write_yaml(recipe_data(recipe, full))


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors."""
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "SpecFlow recipe"}


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with SpecFlow."""
    return {file.stem: file for file in sorted(_recipe_folder().glob("*.yaml"))}


def trained_recipes() -> dict[str, Path]:
    """TARGET/NAME -> file of the recipes of the trained drafters that come with SpecFlow."""
    return {name: path / "recipe.yaml" for name, path in shipped_drafters().items()}


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe given by path, or by name if it is a shipped one."""
    path = Path(name)
    if path.is_file():
        return path
    known = shipped_recipes() | trained_recipes()
    if str(name) in known:
        return known[str(name)]
    if path.is_dir():
        raise RecipeError(str(name), "a folder", "a recipe file", f"for example {path / 'NAME.yaml'}")
    hint = nearest(path.stem, known)
    raise RecipeError(str(name), "no such file", f"a path, or a shipped recipe: {', '.join(known)}", hint)


def nearest(name: object, known: Sequence[str] | Mapping[str, Any]) -> str:
    """A hint with the valid name most like the one given; empty where none is close."""
    close = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else ""


def word(value: Any) -> str:
    """A value as a recipe would write it."""
    if isinstance(value, BaseModel | Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else json.dumps(value, ensure_ascii=False, default=str)


def _recipe_folder() -> Path:
    """Beside the modules in an installed package, one level up in a checkout."""
    here = Path(__file__).resolve().parent
    inside = here / "recipes"
    return inside if inside.is_dir() else here.parent / "recipes"


def _validate(document: Document) -> Recipe:
    try:
        return Recipe.model_validate(document.data, strict=True)
    except ValidationError as error:
        raise _recipe_error(document, list(_problems(error))) from error


def _recipe_error(document: Document, problems: Sequence[Problem]) -> RecipeError:
    """The first problem in full; the others after it, one line each."""

    def where(problem: Problem) -> str:
        origin, key = document.origin(problem.path), ".".join(map(str, problem.path))
        return origin if not key or origin == f"--set {key}" else f"{origin}: {key}"

    first, *others = problems
    rest = [f"also {where(other)}: {other.found}; expected {other.expected or 'otherwise'}" for other in others]
    return RecipeError(where(first), first.found, first.expected, "\n  ".join(filter(None, [first.hint, *rest])))


def _problems(error: ValidationError) -> Iterator[Problem]:
    details = error.errors()
    for detail in details:
        # A list loses its faulty members and then seems too short.
        place = detail["loc"]
        faulty = detail["type"] == "too_short" and any(
            other["loc"][: len(place)] == place and len(other["loc"]) > len(place) for other in details
        )
        if not faulty:
            yield _problem(detail)


def _problem(detail: ErrorDetails) -> Problem:
    path, section = _place(detail["loc"])
    return explain(detail, path, section, sorted(_keys(path[:-1], section)))


def explain(
    detail: ErrorDetails, path: tuple[Any, ...], section: type[BaseModel] | None, known: Sequence[str]
) -> Problem:
    """One pydantic error in the words of a recipe.

    Args:
        detail: The error.
        path: Keys that lead to the value.
        section: Model the value's key belongs to.
        known: Valid keys there.
    """
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "recipe":
        key = split_key(context["key"])
        hint = nearest(detail["input"].get(key[-1]), context["choices"]) if key and context["choices"] else ""
        return Problem((*path, *key), context["found"], context["expected"], hint)
    if kind == "extra_forbidden":
        return Problem(path, "unknown key", f"one of: {', '.join(known)}", nearest(path[-1], known))
    if kind == "union_tag_invalid":
        choices = [name for name in re.findall(r"'([^']*)'", context["expected_tags"]) if name not in COMBINED]
        hint = nearest(context["tag"], choices)
        place = (*path, CHOICES[str(path[0])].key)
        return Problem(place, word(context["tag"]), f"one of: {', '.join(choices)}", hint)
    if kind == "literal_error":
        choices = [name.strip("'") for name in re.findall(r"'[^']*'|True|False|-?\d+", context["expected"])]
        choices = [name.lower() if name in ("True", "False") else name for name in choices]
        return Problem(path, word(detail["input"]), f"one of: {', '.join(choices)}", nearest(detail["input"], choices))
    if kind in ("too_short", "too_long"):
        wanted = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return Problem(path, f"a list of {context['actual_length']}", wanted)
    if kind == "value_error":
        return Problem(path, detail["msg"].removeprefix("Value error, "), "")
    if kind == "string_pattern_mismatch" and section is not None and path[-1] in section.model_fields:
        return Problem(path, word(detail["input"]), f"one of: {section.model_fields[path[-1]].description}")
    return Problem(path, word(detail["input"]), MESSAGES.get(kind, detail["msg"].removeprefix("Input should be ")))


def _place(loc: tuple[int | str, ...]) -> tuple[tuple[Any, ...], type[BaseModel] | None]:
    """Path of keys in the file, and the section model it leads to: the location without the tags of choices."""
    choice = CHOICES.get(str(loc[0])) if loc else None
    if choice is None or len(loc) == 1:
        field = Recipe.model_fields.get(str(loc[0])) if loc else None
        found = field.annotation if field is not None else None
        return loc, found if isinstance(found, type) and issubclass(found, BaseModel) else None
    section: type[BaseModel] = choice.sections()[str(loc[1])]
    if issubclass(section, CombinedSection) and len(loc) > 4 and loc[2] == section.policy:
        return (loc[0], *loc[2:4], *loc[5:]), PART.sections()[str(loc[4])]
    return (loc[0], *loc[2:]), section


def _keys(path: tuple[Any, ...], section: type[BaseModel] | None) -> set[str]:
    """Valid keys of the section at a path."""
    if not path:
        return set(Recipe.model_fields)
    if path[0] == "tune":
        return set(TuneRange.model_fields)
    keys = set(section.model_fields) if section is not None else set()
    return keys | {"method"} if section is not None and issubclass(section, SourceSection) else keys
