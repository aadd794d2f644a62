"""`specflow models`: which models and ONNX graphs are cached; fetch, verify, remove."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from specflow.onnx.store import GraphStore, StoredGraphs
    from specflow.target.store import ModelStore, StoredModel

__all__ = ["app"]

app = typer.Typer(help="List, fetch, verify and remove models and the ONNX graphs made of them.")

_GRAPHS = "onnx/"
"""How names of graphs begin."""

Json = Annotated[bool, typer.Option("--json", help="machine output on stdout")]


@app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: Json = False) -> None:
    """List the catalogue, every cached model, and ONNX graphs (onnx/...)."""
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
    """Recompute the hashes of one cached model or folder of graphs, or of all. Exit code 1 where one is broken."""
    store, graphs = _store(), _graphs()
    names = [name] if name else [*(model.name for model in store.cached()), *store.unreadable(), *_graph_names(graphs)]
    problems = {
        each: graphs.verify(each.removeprefix(_GRAPHS)) if each.startswith(_GRAPHS) else store.verify(each)
        for each in names
    }
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
            print("hint: specflow models remove NAME drops broken graphs; they are written again", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def remove(name: str, as_json: Json = False) -> None:
    """Delete a converted model or ONNX graphs (onnx/KEY, or onnx for all). Hub models belong to `hf cache`."""
    if name == _GRAPHS.rstrip("/"):
        graphs = _graphs()
        freed = sum(graphs.remove(each.removeprefix(_GRAPHS)) for each in _graph_names(graphs))
    elif name.startswith(_GRAPHS):
        freed = _graphs().remove(name.removeprefix(_GRAPHS))
    else:
        freed = _store().remove(name)
    print(json.dumps({"name": name, "freed": freed}) if as_json else f"{name}: {freed / 1e6:.0f} MB freed")


def _store() -> ModelStore:
    from specflow.target.store import ModelStore

    return ModelStore()


def _graphs() -> GraphStore:
    from specflow.onnx.store import GraphStore

    return GraphStore()


def _graph_names(graphs: GraphStore) -> list[str]:
    return [f"{_GRAPHS}{name}" for name in (*(each.name for each in graphs.cached()), *graphs.unreadable())]


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
    graphs = _graphs()
    known = {row["hash"][:12]: name for name, row in cached.items()}
    written = [_graph_row(each, known) for each in graphs.cached()]
    damaged = [{**_broken_row(graphs, name), "name": f"{_GRAPHS}{name}"} for name in graphs.unreadable()]
    return [*cached.values(), *broken.values(), *absent, *hub, *written, *damaged]


def _graph_row(graphs: StoredGraphs, known: Mapping[str, str]) -> dict[str, Any]:
    """A folder of graphs; the hashes of cached models are shown as their names."""
    made_of = graphs.source
    for short, name in known.items():
        made_of = made_of.replace(short, name)
    return {
        "name": f"{_GRAPHS}{graphs.name}", "kind": "graphs", "cached": True, "path": str(graphs.directory),
        "size": graphs.size, "verified": graphs.verified, "source": f"{graphs.precision}, {made_of}",
        "hash": None, "precision": graphs.precision, "graphs": list(graphs.graphs), "identity": graphs.identity,
        "writer": graphs.writer,
    }  # fmt: skip


def _broken_row(store: ModelStore | GraphStore, name: str) -> dict[str, Any]:
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
