"""What a drafter agreed in when it was made, kept beside its weights: a large gap later means that something is wrong.

A drafter that accepts a fraction of what was published is read wrongly, or drafts for another target; nothing else
shows it. The figure counts only for the prompts and the number of tokens that it was taken with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from math import sqrt
from pathlib import Path

from specflow.errors import CheckpointError
from specflow.files import write_json_atomic
from specflow.train.selftest import CLEAR, SelfTest

__all__ = ["FILE", "Reference"]

FILE = "selftest.json"


@dataclass(frozen=True, slots=True)
class Reference:
    """First-token agreement of a drafter with its target."""

    prompts: str  # digest of their ids
    tokens: int  # that were asked for
    positions: int  # that were judged
    agreement: float

    @classmethod
    def of(cls, found: SelfTest, prompts: Sequence[Sequence[int]], tokens: int) -> Reference:
        """What a self-test came to."""
        digest = blake2b(json.dumps([list(each) for each in prompts]).encode(), digest_size=16).hexdigest()
        return cls(digest, tokens, found.count, round(found.declared.agreement, 4))

    @classmethod
    def read(cls, folder: Path) -> Reference | None:
        """The one beside some weights, if there is one.

        Raises:
            CheckpointError: The file is damaged.
        """
        file = folder / FILE
        if not file.is_file():
            return None
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            return cls(str(found["prompts"]), int(found["tokens"]), int(found["positions"]), float(found["agreement"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            hint = "specflow selftest --record writes it anew"
            raise CheckpointError(str(file), f"cannot be read: {error!r}", "a self-test's figures", hint) from error

    def write(self, folder: Path) -> None:
        """Keep it beside some weights."""
        write_json_atomic(folder / FILE, asdict(self))

    def fallen(self, now: Reference) -> bool:
        """Whether a later figure, taken alike, is clearly lower: by 10 points of 100, and twice the standard error."""
        if (self.prompts, self.tokens) != (now.prompts, now.tokens):
            return False
        spread = sqrt(sum(each.agreement * (1.0 - each.agreement) / max(each.positions, 1) for each in (self, now)))
        return self.agreement - now.agreement >= max(CLEAR, 2.0 * spread)
