"""What is happening while no text comes yet: a spinner on terminals, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import typer

__all__ = ["EVERY_S", "counted", "working"]

EVERY_S = 10.0
"""Seconds between lines."""


@contextmanager
def working(what: str, shown: bool = True) -> Iterator[None]:
    """Say what takes its time while the body runs, where it is `shown`."""
    if not shown:
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        typer.echo(f"{what} ...", err=True)
        yield
        return
    with console.status(escape(f"{what} ...")):
        yield


@contextmanager
def counted(total: int) -> Iterator[Callable[[str], None]]:
    """Count things done, by name: a bar on terminals, a line now and then elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


class _Lines:
    """A line at most every EVERY_S seconds, and one at the end."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._said = total, 0, monotonic()

    def __call__(self, what: str) -> None:
        self._done += 1
        now = monotonic()
        if self._done == self._total or now - self._said >= EVERY_S:
            self._said = now
            typer.echo(f"{self._done}/{self._total} {what}", err=True)
