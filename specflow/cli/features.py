"""`specflow features`: what drafters read of their target, kept on disk for all that are trained on one corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from specflow.cli.progress import EVERY_S, working

if TYPE_CHECKING:
    from specflow.build import LoadedTarget
    from specflow.recipe import Recipe
    from specflow.train.sequences import Text
    from specflow.train.store import FeatureStore

__all__ = ["features", "show_capture"]


def features(
    recipes: Annotated[list[str], typer.Argument(help="recipes whose drafters will read them")],
    corpus: Annotated[Path, typer.Option("--corpus", help="answers of the target (specflow corpus)")],
    output_dir: Annotated[Path, typer.Option("-o", "--output-dir", help="directory of the features, new or begun")],
    max_length: Annotated[int, typer.Option(min=2, help="longest text in tokens, as in training")] = 1024,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key.key=value of every recipe")] = None,
) -> None:
    """Keep the target's features of a corpus on disk: what all the recipes' drafters need, in float16.

    Passes of the target take most of a training step, and the same ones come again every epoch and for every drafter.
    An interrupted command goes on where it stopped, and a corpus that has grown is added to.
    """
    from specflow.recipe import load_recipe

    chosen = [load_recipe(recipe, overrides or ()) for recipe in recipes]
    with working(f"loading {chosen[0].target.model}"):
        from specflow.build import load_target
        from specflow.train.capture import OnlineFeatures
        from specflow.train.sequences import Texts

        loaded = load_target(chosen[0].target)
        store = _store(output_dir, chosen, loaded)
    texts = Texts.read(corpus, 0.0, min(max_length, loaded.target.info.context_length)).training
    missing = store.missing(texts)
    source = OnlineFeatures(loaded.target, store.needs)
    show_capture(store, missing, store.add(missing, source))
    typer.echo(f"{', '.join(store.names)} of {len(texts)} texts in {output_dir}")


def show_capture(store: FeatureStore, missing: Sequence[Text], made: Iterator[int]) -> None:
    """Say how much is to come, and how far it is.

    Args:
        store: Where it goes.
        missing: Texts to come.
        made: Positions that were added, as they are.
    """
    if missing:
        typer.echo(f"{len(missing)} texts: {store.size_of(missing) / 1e9:.2f} GB in {store.path}", err=True)
    done, total, began, said = 0, sum(map(len, missing)), monotonic(), monotonic()
    for added in made:
        done += added
        if monotonic() - said >= EVERY_S or done == total:
            said = monotonic()
            left = (said - began) * (total - done) / done
            typer.echo(f"{done}/{total} positions, {left / 60:.0f} min left", err=True)


def _store(path: Path, chosen: Sequence[Recipe], loaded: LoadedTarget) -> FeatureStore:
    """The store, for what all the recipes' drafters need of one target."""
    from specflow.errors import RecipeError
    from specflow.train.capture import united
    from specflow.train.opening import Beginning, trained_part
    from specflow.train.options import TrainOptions
    from specflow.train.store import FeatureStore, StoreFacts

    if any(recipe.target != chosen[0].target for recipe in chosen):
        names = ", ".join(sorted({recipe.target.model for recipe in chosen}))
        raise RecipeError("target", f"recipes with several targets: {names}", "one target", "--set target.dtype=...")
    import torch

    info, options = loaded.target.info, TrainOptions(start="random")
    counts = torch.ones(info.vocab_size, dtype=torch.int64)
    sections = [trained_part(recipe)[1] for recipe in chosen]
    needs = [Beginning(section, loaded, options, counts).make().trainable.needs for section in sections]
    return FeatureStore(path, StoreFacts.of(loaded), united(needs))
