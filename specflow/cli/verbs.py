"""Verbs of other packages: entry points of the group `specflow.verbs`, found by name and never imported from here.

Each names a typer command or a `typer.Typer`, in a module that imports nothing heavy: it is loaded for `--help`, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import typer

__all__ = ["GROUP", "add_verbs", "declared", "installed_verbs"]

GROUP = "specflow.verbs"
PROJECT = "pyproject.toml"

LINE = re.compile(r"""\s*([\w-]+)\s*=\s*["']([^"']+)["']\s*(#.*)?""")


def add_verbs(app: typer.Typer) -> None:
    """Add what other packages offer. A verb that is there already, or does not load, is left out and named."""
    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    for point in installed_verbs():
        if point.name in known:
            print(f"warning: verb {point.name} of {point.value} is left out: there is one already", file=sys.stderr)
            continue
        try:
            verb = point.load()
        except Exception as error:  # whatever another package does must not take the other verbs away
            found = f"{type(error).__name__}: {error}"
            print(f"warning: verb {point.name} of {point.value} is left out: {found}", file=sys.stderr)
            continue
        known.add(point.name)
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=point.name)
        else:
            app.command(point.name)(verb)


def installed_verbs() -> list[EntryPoint]:
    """Entry points of installed packages and, in a checkout that nobody installed, those of its pyproject.toml."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    project = Path(__file__).resolve().parents[2] / PROJECT
    if project.is_file():
        for point in declared(project.read_text(encoding="utf-8")):
            found.setdefault(point.name, point)
    return list(found.values())


def declared(text: str) -> Iterator[EntryPoint]:
    """The verbs that a pyproject.toml declares, line by line: Python 3.10 has no reader of TOML."""
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            inside = line.split("#")[0].strip() == f'[project.entry-points."{GROUP}"]'
        elif inside and (match := LINE.fullmatch(line)):
            yield EntryPoint(match[1], match[2], GROUP)
