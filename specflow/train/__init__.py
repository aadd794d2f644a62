"""Training of drafters: prompts, the corpus of the target's own answers, and what is learnt from it."""

from __future__ import annotations

__all__: list[str] = []
