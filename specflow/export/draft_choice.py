"""Which source of a recipe an engine drafts with, where it takes one only; and what everybody is told of drafters."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from specflow.checkpoint.detection import is_published
from specflow.errors import CheckpointError
from specflow.export.pair_checks import check_block, check_match, check_pair
from specflow.export.recipe_view import DraftView, Ledger, RecipeView
from specflow.target.store import HUB_IDS

__all__ = ["OF_TREES", "choose_draft", "launched_plainly", "notes_on"]

OF_TREES = ("nodes", "branch", "paths", "accuracies", "widths")
"""Options that say nothing once a tree has become a chain."""

OFFICIAL = ("medusa", "eagle", "eagle2")
"""Families that `specflow convert` writes in their authors' layout alone."""


def choose_draft(view: RecipeView, ledger: Ledger, families: Collection[str], engine: str) -> DraftView | None:
    """The source that the engine drafts with, or None. What it leaves out of the others is said in the ledger.

    Of several sources the last that can run as it stands: those before it are shortcuts for easy texts.

    Args:
        view: The recipe.
        ledger: Its account.
        families: Families the engine has.
        engine: Its name, for words.
    """
    fit = [draft for draft in view.drafts if draft.family in families]
    ready = [draft for draft in fit if draft.path is not None or "index" in draft.options]
    chosen = next(iter([*reversed(ready), *reversed(fit)]), None)
    if chosen is None:
        if view.drafts:
            launched_plainly(ledger, f"{engine} has no such method: launched without speculation")
        return None
    for other in view.drafts:
        if other is not chosen:
            ledger.lacks(other.at, f"{engine} drafts with one method: {chosen.family}", other.family)
    if view.combined is not None:
        at = f"draft.{view.combined}"
        ledger.lacks(f"{at}.policy", f"one method: {chosen.family} ({chosen.at})", view.combined)
        ledger.says("draft.nodes")
    ledger.says("draft.k", *(chosen.key(name) for name in ("k", "method", "source", "weights", "model")))
    return chosen


def launched_plainly(ledger: Ledger, why: str) -> None:
    """Settle all that belongs to drafting: there is none."""
    drafts = ledger.view.drafts
    what = [draft.family for draft in drafts]
    ledger.lacks("draft", why, what[0] if len(what) == 1 else what)
    for section in ("verify", "length"):
        ledger.lacks(section, "nothing is drafted", getattr(ledger.view, "rule" if section == "verify" else "policy"))


def notes_on(view: RecipeView, draft: DraftView | None) -> Iterator[str]:
    """What to know before a launch, whatever the engine."""
    asked = view.recipe.target.model
    if asked in HUB_IDS:
        yield f"{asked} is {HUB_IDS[asked]} with 4-bit weights: the texts of the two differ a little"
    if draft is None:
        return
    if "index" not in draft.options and draft.path is None and draft.family != "mtp":
        yield f"the recipe names no trained drafter: put its folder or hub id where {draft.place} stands"
    if "index" not in draft.options and draft.family != "small_model" and _is_ours(draft.path):
        layout = "official" if draft.family in OFFICIAL else "speculators"
        yield (
            f"{draft.path} has SpecFlow's own layout, which no engine reads: specflow convert {draft.path} --to "
            f"{layout} -o FOLDER, and FOLDER in its place"
        )
    if draft.facts.own_ids:
        yield f"{draft.path} has token ids of its own for a part of the target's vocabulary, which no engine reads"
    found = [*check_block(draft.k, draft.path, draft.family, draft.key("k"))]
    found += check_pair(view.target, draft.path, draft.family, view.recipe.runtime.context)
    if "index" in draft.options:
        found += check_match(draft.match[0], draft.key("min_match"))
    yield from map(str, found)


def _is_ours(path: str | None) -> bool:
    """Whether a local folder holds a drafter as `specflow train` writes it."""
    folder = Path(path or "")
    try:
        return path is not None and (folder / "model.safetensors").is_file() and not is_published(folder)
    except (CheckpointError, OSError, ValueError):
        return False
