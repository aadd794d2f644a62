"""The draft section of a recipe: one source, or several combined. No torch.

A source's section takes its options from the source it names (`specflow.draft.registry`), so a new source brings its
own keys, checks and schema without a change here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from specflow.draft.registry import SourceInfo, discover
from specflow.recipe_sections import Choice, Section, fault, section_of

__all__ = [
    "COMBINED",
    "DRAFT",
    "PART",
    "CombinedSection",
    "DraftSection",
    "FirstOfSection",
    "MergeSection",
    "SourceSection",
    "draft_data",
    "draft_sections",
    "expand_draft",
    "expand_method",
    "in_order",
    "part_names",
    "source_sections",
]


class DraftSection(Section):
    """What drafts a block."""

    k: int = Field(
        8, ge=0, le=256, description="most draft tokens of a round, the bonus token excluded; 0 is plain decoding"
    )

    @property
    @abstractmethod
    def parts(self) -> tuple[SourceSection, ...]:
        """The sources it draws on, in order of priority."""


class SourceSection(DraftSection):
    """Where drafts come from. Every source has its own subclass, which adds its options (see `source_sections`)."""

    source: str = Field(description="where the draft gets its information")
    dependency: str = Field(description="in what order the positions of a block depend on each other")

    @property
    def parts(self) -> tuple[SourceSection, ...]:
        return (self,)

    @property
    def info(self) -> SourceInfo:
        """What the source says about itself."""
        return discover()[self.source]

    @property
    def options(self) -> BaseModel:
        """The source's own config; what nobody set stays unset in it, for a checkpoint to fill in."""
        config = self.info.config
        return config.model_validate(
            {name: getattr(self, name) for name in self.model_fields_set & {*config.model_fields}}
        )

    @property
    def method(self) -> str | None:
        """Name of the preset that stands for these axes, if one does."""
        for name, fixed in self.info.presets().items():
            if all(getattr(self, key) == value for key, value in fixed.items()):
                return name
        return None

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler.resolve_ref_schema(handler(schema))
        source = cls.model_fields["source"].default
        if isinstance(source, str):
            names = list(discover()[source].presets())
            method = {"enum": names, "description": "preset of the axes: source, dependency and the source's options"}
            found["properties"] = {"method": method, **found["properties"]}
        return found


@cache
def source_sections() -> dict[str, type[SourceSection]]:
    """Source name -> its draft section: source, dependency and k, plus the source's own options."""
    return {name: _source_section(info) for name, info in discover().items()}


def _source_section(info: SourceInfo) -> type[SourceSection]:
    clash = {"method", *COMBINED, *SourceSection.model_fields} & set(info.config.model_fields)
    assert not clash, f"options of source {info.name} hide keys of the draft section: {sorted(clash)}"
    described = SourceSection.model_fields
    fields: Any = {
        "source": (Literal[info.name], Field(info.name, description=described["source"].description)),
        "dependency": (
            Literal[info.dependency],
            Field(info.dependency[0], description=described["dependency"].description),
        ),
    }
    section: type[SourceSection] = section_of(f"{info.name}_draft", (info.config, SourceSection), fields)
    return section


def expand_method(data: Any) -> Any:
    """Replace `method` by the axes it stands for; axes written beside it must agree."""
    if not isinstance(data, Mapping):
        return data
    presets = {name: (info, fixed) for info in discover().values() for name, fixed in info.presets().items()}
    given = dict(data)
    if nested := _policy(given):
        raise fault(nested, "a combination inside a combination", "one source; list its parts in the outer one")
    if "method" not in given:
        if "source" not in given:
            raise fault("", "neither method nor source", "one of them")
        return given
    method = given.pop("method")
    if not isinstance(method, str) or method not in presets:
        raise fault("method", f"unknown method {method!r}", f"one of: {', '.join(presets)}", tuple(presets))
    info, options = presets[method]
    fixed = {"source": info.name, **options}
    for key, value in fixed.items():
        if given.setdefault(key, value) != value:
            raise fault(key, f"{given[key]!r}, which contradicts method {method}", f"{value!r}, or no method")
    return given


COMBINED = ("first_of", "merge")
"""Keys that combine several sources."""

PART = Choice("source", source_sections, expand=expand_method)
Parts = Annotated[tuple[Annotated[SourceSection, PART], ...], Field(min_length=2, max_length=8)]


class CombinedSection(DraftSection):
    """Several sources that draft one block. A part's k follows the block's, or is smaller."""

    policy: ClassVar[str]

    @property
    def parts(self) -> tuple[SourceSection, ...]:
        found: tuple[SourceSection, ...] = getattr(self, self.policy)
        return found

    @model_validator(mode="after")
    def _parts_within_k(self) -> CombinedSection:
        for number, part in enumerate(self.parts):
            if self.k > 0 and not 0 < part.k <= self.k:
                raise fault(f"{self.policy}.{number}.k", f"{part.k}, and the block's k is {self.k}", f"1 to {self.k}")
        return self


class FirstOfSection(CombinedSection):
    """For each request, the first source that has something to propose drafts the block."""

    policy = "first_of"

    first_of: Parts = Field(description="sources in order: each is asked for what those before it left empty")


class MergeSection(CombinedSection):
    """The proposals of all sources in one tree."""

    policy = "merge"

    merge: Parts = Field(description="sources whose proposals become one tree; the first goes first at every depth")
    nodes: int = Field(32, ge=1, le=1024, description="most nodes of the tree, shallow ones first")


def part_names(section: CombinedSection) -> tuple[str, ...]:
    """What the parts are called: each its method, else its source; with its number where several have one name."""
    names = [part.method or part.source for part in section.parts]
    return tuple(name if names.count(name) == 1 else f"{name}.{number}" for number, name in enumerate(names))


def in_order(section: CombinedSection, order: str) -> CombinedSection:
    """A combination with its parts in another order.

    Args:
        section: The combination.
        order: Names of its parts, as `part_names` has them, between commas.

    Raises:
        PydanticCustomError: These are not its parts, each once.
    """
    names, wanted = part_names(section), [name.strip() for name in order.split(",")]
    if sorted(wanted) != sorted(names):
        expected = f"each of these once, between commas: {', '.join(names)}"
        raise fault(f"tune.draft.{section.policy}", repr(order), expected)
    return section.model_copy(update={section.policy: tuple(section.parts[names.index(name)] for name in wanted)})


class DraftChoice(Choice):
    """One source's section by its name, or a combination by the key that holds its parts."""

    def tag(self, value: Any) -> Any:
        if isinstance(value, CombinedSection):
            return value.policy
        policy = _policy(value) if isinstance(value, Mapping) else None
        return policy or super().tag(value)


@cache
def draft_sections() -> dict[str, type[DraftSection]]:
    """Source or combination -> its draft section."""
    combined = {section.policy: section for section in (FirstOfSection, MergeSection)}
    return {**source_sections(), **combined}


def expand_draft(data: Any) -> Any:
    """Replace methods by what they stand for, and give parts of a combination the k of the block."""
    if not isinstance(data, Mapping):
        return data
    policy = _policy(data)
    if policy is None:
        if not {"method", "source"} & set(data):
            raise fault("", "neither method nor source", f"one of them, {', '.join(COMBINED)}, or no draft section")
        return expand_method(data)
    parts, k = data[policy], data.get("k", DraftSection.model_fields["k"].default)
    if not isinstance(parts, list | tuple) or type(k) is not int:
        return data
    return {**data, policy: tuple({"k": k, **part} if isinstance(part, Mapping) else part for part in parts)}


def draft_data(section: DraftSection, full: bool) -> dict[str, Any]:
    """Plain data of a draft section, what chooses it first.

    Args:
        section: One source, or several.
        full: Write defaults too. The k of a part that follows the block's stays away: it would not follow any more.
    """
    dumped = section.model_dump(exclude_defaults=not full)
    if isinstance(section, SourceSection):
        dumped = _as_said(section, dumped)
        dumped.pop("source", None)
        if section.method is None:
            return {"source": section.source, **dumped}
        for fixed in section.info.presets()[section.method]:
            dumped.pop(fixed, None)
        return {"method": section.method, **dumped}
    assert isinstance(section, CombinedSection)
    parts = [draft_data(part, full) for part in section.parts]
    for data, part in zip(parts, section.parts, strict=True):
        data.pop("k", None)
        if part.k != section.k:
            data["k"] = part.k
    return {section.policy: tuple(parts), **{key: value for key, value in dumped.items() if key != section.policy}}


def _as_said(section: SourceSection, dumped: dict[str, Any]) -> dict[str, Any]:
    """Where a source has weights, its options as they were set, and no others.

    A checkpoint fills in what was not set and contradicts what was: a default that is written out would be refused.
    """
    if getattr(section, "weights", None) is None:
        return dumped
    options = section.info.config.model_fields.keys()
    kept = section.model_fields_set & options | dumped.keys() - options
    return {name: value for name, value in section.model_dump().items() if name in kept}


def _policy(data: Mapping[Any, Any]) -> str | None:
    return next((name for name in COMBINED if name in data), None)


DRAFT = DraftChoice("source", draft_sections, expand=expand_draft)
