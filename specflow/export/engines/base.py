"""What every engine's file offers, and how it is found: one file each beside this one, or an entry point. No torch.

An engine file keeps a constant `ENGINE` that fits the `Engine` protocol. Files without one are not engines.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from specflow.errors import RecipeError
from specflow.recipe import nearest, parse_recipe

if TYPE_CHECKING:
    from specflow.export.recipe_view import RecipeView
    from specflow.recipe import Recipe

__all__ = [
    "ENTRY_POINTS",
    "NO_DRAFTER",
    "Dialect",
    "Engine",
    "Exported",
    "Finding",
    "Gap",
    "Given",
    "Imported",
    "choose_dialect",
    "engines",
    "find_engine",
    "flag_words",
    "version_key",
    "worst_first",
]

ENTRY_POINTS = "specflow.exporters"

NO_DRAFTER = "DRAFTER"
"""Stands in a command where a recipe names no trained drafter: its reader replaces it, and `read` ignores it."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One thing a recipe says that the engine cannot do."""

    what: str  # dotted key and value, as in the recipe: "verify.rule: block"
    instead: str  # what the engine does, or what was written in its place


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about an engine's configuration that its owner should know."""

    severity: Literal["error", "warning", "note"]  # refused by the engine, or costs speed or quality, or good to know
    where: str  # flag or key
    found: str
    meaning: str  # what the engine makes of it
    fix: str = ""  # what to write instead

    def __str__(self) -> str:
        line = f"{self.severity}: {self.where}: {self.found}: {self.meaning}"
        return f"{line}\n  fix: {self.fix}" if self.fix else line


@dataclass(frozen=True, slots=True)
class Exported:
    """A recipe in an engine's own words.

    Attributes:
        engine: Name of the engine.
        versions: Range of versions this is for.
        command: Launch command, word by word; files stand in it by their names.
        files: Name -> text. The names are those in `command`.
        notes: What to know before it is launched.
        not_expressible: What the recipe says and the engine cannot do, complete.
    """

    engine: str
    versions: str
    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    not_expressible: tuple[Gap, ...] = ()


@dataclass(frozen=True, slots=True)
class Given:
    """A configuration to read: words of a command line, or the text of a file. One of the two."""

    argv: tuple[str, ...] = ()
    text: str = ""
    name: str = "the command line"  # for errors

    @property
    def is_command(self) -> bool:
        return bool(self.argv)


@dataclass(frozen=True, slots=True)
class Imported:
    """What a configuration means.

    Attributes:
        engine: Name of the engine it is for.
        data: A recipe as plain data (`specflow.recipe.parse_recipe` takes it).
        findings: What is wrong or surprising about it, the worst first.
        versions: Range of versions whose meaning was taken.
    """

    engine: str
    data: Mapping[str, Any]
    findings: tuple[Finding, ...] = ()
    versions: str = ""

    def recipe(self) -> Recipe:
        """The recipe, checked.

        Raises:
            RecipeError: The configuration says something no recipe can.
        """
        return parse_recipe(self.data, f"recipe read from {self.engine}")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Versions of an engine that are configured alike."""

    since: str  # first version
    until: str  # last version that was checked, or that understands it
    name: str = ""  # what an engine file calls it

    @property
    def versions(self) -> str:
        """The range in words."""
        return f"{self.since} to {self.until}" if self.since != self.until else self.since


@runtime_checkable
class Engine(Protocol):
    """Writes recipes as configurations of one engine, and reads configurations as recipes."""

    name: str
    dialects: tuple[Dialect, ...]  # the newest first

    def export(self, view: RecipeView, dialect: Dialect) -> Exported:
        """A recipe in the engine's words.

        Raises:
            SpecFlowError: There is nothing sensible to write.
        """

    def read(self, given: Given, dialect: Dialect) -> Imported:
        """A configuration as a recipe, with what is wrong about it.

        Raises:
            SpecFlowError: It is no configuration of this engine.
        """


def choose_dialect(engine: Engine, version: str | None) -> Dialect:
    """The dialect of a version; the newest where none is asked for. Newer versions than were checked get the newest.

    Raises:
        RecipeError: No version, or older than every dialect.
    """
    if version is None:
        return engine.dialects[0]
    asked = version_key(version)
    for dialect in engine.dialects:
        if asked >= version_key(dialect.since):
            return dialect
    known = ", ".join(dialect.versions for dialect in engine.dialects)
    raise RecipeError(f"--engine-version {version}", f"older than every known {engine.name}", f"one of {known}")


def version_key(version: str) -> tuple[int, ...]:
    """Sorts versions such as 0.33.0, 1.4.0rc4, 2026.4.1 and b10752; a release candidate comes before its release.

    Raises:
        RecipeError: There is no number in it.
    """
    match = re.fullmatch(
        r"[vb]?(\d{1,9}(?:\.\d{1,9})*)(?:\.?(?:rc|a|b|dev)(\d{1,9}))?(?:[.+-]\w+)*", version.strip(), re.ASCII
    )
    if match is None:
        raise RecipeError(f"version {version}", "no version number", "for example 0.33.0")
    numbers = [int(part) for part in match[1].split(".")]
    numbers += [0] * (4 - len(numbers))
    return (*numbers[:4], -1 if match[2] else 0, int(match[2] or 0))


@cache
def engines() -> Mapping[str, Engine]:
    """Name -> engine: the files of this folder in alphabetical order, then installed entry points.

    Raises:
        RecipeError: An entry point that is no engine, or two engines of one name.
    """
    import specflow.export.engines as folder

    found: dict[str, Engine] = {}
    for module in sorted(pkgutil.iter_modules(folder.__path__), key=lambda each: each.name):
        path = f"{folder.__name__}.{module.name}"
        engine = getattr(importlib.import_module(path), "ENGINE", None) if path != __name__ else None
        if engine is not None:
            _add(found, engine, path)
    for point in entry_points(group=ENTRY_POINTS):
        _add(found, point.load(), f"entry point {point.name} ({point.value})")
    return found


def find_engine(name: str) -> Engine:
    """An engine by its name; underscores and dashes are the same.

    Raises:
        RecipeError: There is none of that name; the nearest is named.
    """
    known = engines()
    wanted = _plain(name)
    for each, engine in known.items():
        if _plain(each) == wanted:
            return engine
    raise RecipeError(f"engine {name}", "unknown", f"one of: {', '.join(known)}", nearest(name, known))


def _plain(name: str) -> str:
    return re.sub(r"[-_. ]", "", name).lower()


def _add(found: dict[str, Engine], engine: object, origin: str) -> None:
    if not isinstance(engine, Engine):
        raise RecipeError(origin, f"a {type(engine).__name__}", "an object that fits `Engine`")
    if engine.name in found:
        raise RecipeError(origin, f"a second engine named {engine.name!r}", "one engine of each name")
    found[engine.name] = engine


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors, then warnings, then notes, each in the order they were found; none twice."""
    order = ("error", "warning", "note")
    return tuple(sorted(dict.fromkeys(findings), key=lambda each: order.index(each.severity)))


def flag_words(settings: Mapping[str, Any]) -> Iterator[str]:
    """Settings as words of a command line: true is a bare flag, false none, a mapping JSON."""
    for name, value in settings.items():
        if value is False:
            continue
        yield f"--{name}"
        if isinstance(value, Mapping):
            yield json.dumps(value)
        elif value is not True:
            yield str(value)
