"""For engines that know one draft length only: what was measured for the batch the recipe declares. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specflow.export.recipe_view import DraftView, Ledger, RecipeView

__all__ = ["lacks_schedule", "length_at_batch"]


def length_at_batch(view: RecipeView, draft: DraftView) -> int:
    """Draft tokens of a round at `runtime.batch`: k, or what a measured schedule says; 0 is plain decoding."""
    batch = view.recipe.runtime.batch
    step = next((step for step in view.schedule if step.low <= batch <= step.high), None)
    return draft.k if step is None else min(draft.k, step.k)


def lacks_schedule(view: RecipeView, ledger: Ledger) -> None:
    """Say that the measured schedule shrinks to one length."""
    if view.schedule:
        steps = ", ".join(f"{step.low}-{step.high}: {step.k}" for step in view.schedule)
        batch = view.recipe.runtime.batch
        ledger.lacks("measured schedule", f"one length, the one measured for runtime.batch {batch}", steps)
