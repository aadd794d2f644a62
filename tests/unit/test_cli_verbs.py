"""Verbs of other packages: found by entry points or, in a checkout, by its pyproject.toml; none can break the rest."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from specflow.cli import verbs
from specflow.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
THIS = __name__


def hello() -> None:
    """Say hello."""
    typer.echo("hello")


group = typer.Typer()


@group.command("one")
def one() -> None:
    """One."""
    typer.echo("one of two")


@group.command("two")
def two() -> None:
    """Two."""


def made(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> typer.Typer:
    """An app with one verb of its own, and those of other packages."""
    found = [EntryPoint(name, value, verbs.GROUP) for name, value in points]
    monkeypatch.setattr(verbs, "installed_verbs", lambda: found)
    grown = typer.Typer()
    grown.command("run")(hello)
    verbs.add_verbs(grown)
    return grown


def test_commands_and_groups_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = made(monkeypatch, ("greet", f"{THIS}:hello"), ("count", f"{THIS}:group"))
    assert CliRunner().invoke(grown, ["greet"]).output == "hello\n"
    assert CliRunner().invoke(grown, ["count", "one"]).output == "one of two\n"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("greet", "no_such_module_here:hello", "ModuleNotFoundError"),
        ("greet", f"{THIS}:no_such_name", "AttributeError"),
        ("run", f"{THIS}:hello", "there is one already"),
    ],
)
def test_one_that_cannot_be_added_is_named_and_left_out(
    name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grown = made(monkeypatch, (name, value), ("fine", f"{THIS}:hello"))
    said = capsys.readouterr().err
    assert value in said
    assert reason in said
    assert len(grown.registered_commands) == 2
    assert CliRunner().invoke(grown, ["fine"]).exit_code == 0


def test_a_pyproject_is_read_line_by_line() -> None:
    text = (
        '[project]\nname = "x"\n\n[project.entry-points."specflow.verbs"]  # verbs\n'
        'greet = "a.b:c"  # says hello\n\n# count = "no"\nadd-up = \'d:e\'\n[tool.x]\nother = "f:g"\n'
    )
    assert [(point.name, point.value) for point in verbs.declared(text)] == [("greet", "a.b:c"), ("add-up", "d:e")]
    assert list(verbs.declared("")) == []


def test_every_declared_verb_is_on_the_command_line() -> None:
    declared = list(verbs.declared((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    shown = CliRunner().invoke(app, ["--help"]).output
    assert {"trace", "replay"} <= {point.name for point in declared}
    assert all(point.name in shown for point in declared)
