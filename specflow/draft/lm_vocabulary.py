"""Whether two models mean the same by their token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specflow.errors import ModelError

if TYPE_CHECKING:
    from specflow.text import TextCodec

__all__ = ["check_vocabularies"]

_EXAMPLES = 5


def check_vocabularies(target: TextCodec, draft: TextCodec) -> None:
    """Refuse a draft model whose ids are other strings than the target's: it would draft noise without a word.

    An id that only one tokenizer knows is no mismatch: models pad their vocabularies to different sizes, and one may
    have tokens that the other lacks.

    Raises:
        ModelError: Naming the first ids that differ, with both strings.
    """
    size = max(target.num_ids, draft.num_ids)
    pairs = ((token, target.token(token), draft.token(token)) for token in range(size))
    known = [(token, ours, its) for token, ours, its in pairs if ours is not None and its is not None]
    differ = [(token, ours, its) for token, ours, its in known if ours != its]
    if differ:
        examples = ", ".join(f"{token} is {ours!r} and {its!r}" for token, ours, its in differ[:_EXAMPLES])
        raise ModelError(
            f"draft.model: {draft.name}",
            f"{len(differ)} of {len(known)} token ids mean something else than in {target.name}: {examples}",
            "the target's vocabulary",
            "choose a draft model of the target's own family, or a source that drafts from the target itself",
        )
