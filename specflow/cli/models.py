"""`specflow models`: what is cached; fetch, verify, remove."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from specflow.target.store import ModelStore, StoredModel

__all__ = ["app"]

app = typer.Typer(help="List, fetch, verify and remove models.")

Json = Annotated[bool, typer.Option("--json", help="machine output on stdout")]


@app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: Json = False) -> None:
    """List the catalogue and every cached model."""
    if context.invoked_subcommand is not None:
        if as_json:
            raise typer.BadParameter(f"put it behind {context.invoked_subcommand}", param_hint="--json")
        return
    rows = _rows()
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)


@app.command()
def fetch(name: str, as_json: Json = False) -> None:
    """Fetch a model of the catalogue or of the hub; a broken cached one is fetched again."""
    store = _store()
    if name in store.catalogue:
        row = _stored_row(store.fetch(name))
    else:
        from specflow.target.load import resolve_model

        files = resolve_model(name)
        row = {"name": name, "path": str(files.directory), "hash": files.hash}
    print(json.dumps(row, indent=2) if as_json else f"{row['name']}: {row['path']}")


@app.command()
def verify(name: Annotated[str, typer.Argument()] = "", as_json: Json = False) -> None:
    """Recompute the hashes of one cached model, or of all. Exit code 1 where one is broken."""
    store = _store()
    names = [name] if name else [*(model.name for model in store.cached()), *store.unreadable()]
    problems = {each: store.verify(each) for each in names}
    if as_json:
        print(json.dumps(problems, indent=2))
    else:
        for each, found in problems.items():
            print(f"{each}: {'; '.join(found) or 'ok'}")
        if not names:
            print("nothing is cached", file=sys.stderr)
    if any(problems.values()):
        if not as_json:
            print("hint: specflow models fetch NAME replaces a broken model", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def remove(name: str, as_json: Json = False) -> None:
    """Delete a converted model from the cache. Hub models belong to the hub's client (`hf cache`)."""
    freed = _store().remove(name)
    print(json.dumps({"name": name, "freed": freed}) if as_json else f"{name}: {freed / 1e6:.0f} MB freed")


def _store() -> ModelStore:
    from specflow.target.store import ModelStore

    return ModelStore()


def _stored_row(model: StoredModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "kind": "converted",
        "cached": True,
        "path": str(model.directory),
        "size": model.size,
        "verified": model.verified,
        "source": model.source,
        "hash": model.hash,
    }


def _rows() -> list[dict[str, Any]]:
    from specflow.target.hub import cached_hub_models

    store = _store()
    cached = {model.name: _stored_row(model) for model in store.cached()}
    broken = {name: _broken_row(store, name) for name in store.unreadable()}
    absent = [
        {"name": name, "kind": "catalogue", "cached": False, "path": None, "size": model.wheel_size,
         "verified": None, "source": model.requirement, "hash": None}
        for name, model in store.catalogue.items()
        if name not in cached and name not in broken
    ]  # fmt: skip
    hub = [
        {"name": model.name, "kind": "hub", "cached": True, "path": str(model.directory), "size": model.size,
         "verified": None, "source": "Hugging Face hub", "hash": None}
        for model in cached_hub_models()
    ]  # fmt: skip
    return [*cached.values(), *broken.values(), *absent, *hub]


def _broken_row(store: ModelStore, name: str) -> dict[str, Any]:
    path, reason = store.directory_of(name), "; ".join(store.verify(name))
    return {
        "name": name, "kind": "broken", "cached": False, "path": str(path), "size": None,
        "verified": None, "source": reason, "hash": None,
    }  # fmt: skip


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("name", "state", "MB", "verified", "source", "path"):
        table.add_column(name, overflow="fold")
    for row in rows:
        state = "broken" if row["kind"] == "broken" else "cached" if row["cached"] else "not cached"
        size = f"{row['size'] / 1e6:.0f}" if row["size"] is not None else "-"
        source = row["source"].partition(" (sha256")[0]
        table.add_row(row["name"], state, size, (row["verified"] or "-")[:10], source, row["path"] or "-")
    Console().print(table)
