"""The verbs of the command line, put together."""

from __future__ import annotations

import logging
import os

import typer

from specflow.cli import (
    bench,
    convert,
    corpus,
    demo,
    doctor,
    export,
    features,
    import_recipe,
    inspect,
    models,
    profile,
    recipes,
    run,
    schema,
    search,
    selftest,
    show,
    train,
    validate,
    verbs,
)

__all__ = ["app"]

app = typer.Typer(
    name="specflow",
    help="Speculative decoding from parts: recipes, decode graphs, benchmarks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def configure(
    log_level: str = typer.Option("", help="debug, info, warning or error; SPECFLOW_LOG_LEVEL otherwise"),
) -> None:
    """Speculative decoding from parts: recipes, decode graphs, benchmarks."""
    level = (log_level or os.environ.get("SPECFLOW_LOG_LEVEL", "warning")).upper()
    if not isinstance(logging.getLevelName(level), int):
        raise typer.BadParameter(f"{level.lower()!r} is not debug, info, warning or error", param_hint="--log-level")
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


app.command("run")(run.run)
app.command("bench")(bench.bench)
app.command("demo")(demo.demo)
app.command("profile")(profile.profile)
app.command("search")(search.search)
app.command("corpus")(corpus.corpus)
app.command("features")(features.features)
app.command("train")(train.train)
app.command("convert")(convert.convert)
app.command("import")(import_recipe.import_recipe)
app.command("inspect")(inspect.inspect)
app.command("selftest")(selftest.selftest)
app.command("show")(show.show)
app.command("validate")(validate.validate)
app.command("schema")(schema.schema)
app.command("recipes")(recipes.recipes)
app.command("doctor")(doctor.doctor)
app.add_typer(models.app, name="models")
app.add_typer(export.app, name="export")
verbs.add_verbs(app)
