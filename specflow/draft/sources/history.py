"""History drafting: what followed the newest tokens last time is likely to follow them again.

No network and no target features. A draft copies the tokens after the most recent earlier occurrence of the text's
own last tokens, in the prompt or in what was generated (prompt lookup, Saxena 2023; suffix automaton: SAM decoding,
Hu et al. 2411.10666).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specflow.draft.base import Needs
from specflow.draft.ngram import REACH, NgramIndex
from specflow.draft.registry import SourceInfo
from specflow.draft.suffix import SuffixIndex
from specflow.types import PAD, DraftBlock

if TYPE_CHECKING:
    import torch

    from specflow.draft.base import SourceContext, Uniforms
    from specflow.target.base import Cache
    from specflow.types import DraftBudget, Observation, Sampling

__all__ = ["SOURCE", "History", "HistoryConfig", "Index", "Store", "build"]

LONGEST = {"ngram": 4, "suffix": 64}


class HistoryConfig(BaseModel):
    """How earlier text is searched."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: Literal["ngram", "suffix"] = Field("ngram", description="n-grams, or suffixes of any length")
    min_match: int = Field(1, ge=1, le=256, description="shortest match worth a draft, in tokens")
    max_match: int | None = Field(
        None, ge=1, le=256, description="of longer matches the most recent wins; none: 4 for ngram, 64 for suffix"
    )
    share: bool = Field(
        False, description="also search finished requests; needs rule match, whose text no draft can change"
    )
    share_tokens: int = Field(200_000, ge=2, description="most tokens kept of finished requests; the oldest go first")

    @model_validator(mode="after")
    def _ordered(self) -> HistoryConfig:
        if self.max_match is not None and self.max_match < self.min_match:
            raise ValueError(f"max_match is {self.max_match}, below min_match {self.min_match}; no match could count")
        return self

    @property
    def longest(self) -> int:
        return self.max_match or max(LONGEST[self.index], self.min_match)

    def new_index(self, vocab_size: int) -> Index:
        if self.index == "ngram":
            return NgramIndex(self.min_match, self.longest, vocab_size)
        return SuffixIndex(self.min_match, self.longest)


class Index(Protocol):
    """A text that grows at its end and finds earlier occurrences of the newest tokens."""

    tokens: list[int]

    def extend(self, tokens: Sequence[int]) -> None: ...

    def match(self) -> tuple[int, int]:
        """Matched length and position of the token after the match, for the text's own suffix; (0, 0) for none."""

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """The same for the suffix of another text."""


class Store:
    """Texts of finished requests, in two generations of half the capacity.

    When the young one is full the old one is dropped whole and they change places: bounded memory, oldest text first,
    and no index ever has to forget single tokens.
    """

    def __init__(self, config: HistoryConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size  # also the separator: no token has this id
        self._young = config.new_index(vocab_size)
        self._old = config.new_index(vocab_size)

    @property
    def num_tokens(self) -> int:
        return len(self._young.tokens) + len(self._old.tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a finished text; of one longer than half the capacity, its end."""
        room = self._config.share_tokens // 2
        kept = tokens[max(0, len(tokens) + 1 - room) :]
        if len(self._young.tokens) + len(kept) + 1 > room:
            self._young, self._old = self._config.new_index(self._vocab_size), self._young
        self._young.extend([*kept, self._vocab_size])

    def find(self, tail: Sequence[int], count: int) -> tuple[int, list[int]]:
        """The longest match for a text's last tokens, and up to `count` tokens that followed it."""
        best: tuple[int, list[int]] = (0, [])
        for index in (self._young, self._old):
            length, follower = index.find(tail)
            if length > best[0]:
                found = index.tokens[follower : follower + count]
                if self._vocab_size in found:
                    del found[found.index(self._vocab_size) :]
                if found:
                    best = length, found
        return best


class History:
    """Drafts copies of earlier text, one index a row.

    With `share`, a request's text moves to the store when its row is dropped, taken over or reset. Drafts then depend
    on which requests came before. Rule match says the same text for any draft; the other rules keep at most its law, so
    that a sampled text would differ for the same seed: the graph's checks refuse them.

    Attributes:
        num_lookups: Rows searched so far; rows without a budget are not.
        num_hits: Of those, rows that found something to copy.
    """

    needs = Needs()
    branches = False

    def __init__(
        self, config: HistoryConfig, vocab_size: int, num_nodes: int, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.num_nodes = config, num_nodes
        self.num_lookups = 0
        self.num_hits = 0
        self._vocab_size = vocab_size
        self._device = device
        self._tail = max(REACH, config.longest)
        self._rows: list[Index] = []
        self._store = Store(config, vocab_size) if config.share else None

    def reset(self, batch: int, cache: Cache) -> None:
        """Forget all requests. What the store holds of finished ones stays."""
        self._retire(range(len(self._rows)))
        self._rows = [self.config.new_index(self._vocab_size) for _ in range(batch)]

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self._retire([row])
        self._rows[row] = self.config.new_index(self._vocab_size)
        self._rows[row].extend(prompt)

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        """Append what is new: beside a drafter that reads features, a prompt is observed again chunk by chunk."""
        for index, row in enumerate(rows):
            self._rows[row].extend(observation.news(index, len(self._rows[row].tokens)))

    def select(self, rows: Sequence[int]) -> None:
        self._retire(sorted(set(range(len(self._rows))).difference(rows)))
        self._rows = [self._rows[row] for row in rows]

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        found = [self._draft(row, budget) if budget.tokens[row] > 0 else (0, []) for row in range(len(anchors))]
        widest = max((len(draft) for _, draft in found), default=0)
        if not widest:
            return None
        return self._block(found, widest)

    def _draft(self, row: int, budget: DraftBudget) -> tuple[int, list[int]]:
        """Matched length and the tokens to draft."""
        index = self._rows[row]
        self.num_lookups += 1
        length, follower = index.match()
        draft = _copy(index.tokens, follower, budget.most(row, length)) if length else []
        if self._store is not None:
            other_length, other = self._store.find(index.tokens[-self._tail :], budget.tokens[row])
            if other_length > length:
                length, draft = other_length, other[: budget.most(row, other_length)]
        if not draft:
            return 0, []
        self.num_hits += 1
        return length, draft

    def _block(self, found: Sequence[tuple[int, list[int]]], widest: int) -> DraftBlock:
        import torch

        from specflow.law import PointMass
        from specflow.tree import chain

        padded = [draft + [PAD] * (widest - len(draft)) for _, draft in found]
        tokens = torch.tensor(padded, dtype=torch.int64, device=self._device)  # [B, N]
        return DraftBlock(
            tokens=tokens,
            lengths=tuple(len(draft) for _, draft in found),
            topology=chain(widest, self._device),
            law=PointMass(tokens, self._vocab_size),
            match_lengths=tuple(length for length, _ in found),
        )

    def _retire(self, rows: Sequence[int]) -> None:
        """Move the texts of these rows to the store."""
        if self._store is not None:
            for row in rows:
                if self._rows[row].tokens:
                    self._store.add(self._rows[row].tokens)


def _copy(tokens: Sequence[int], follower: int, count: int) -> list[int]:
    """`count` tokens from `follower` on. Past the end the copy reads what it wrote: a repetition goes on repeating."""
    copied = list(tokens[follower : follower + count])
    return copied if len(copied) == count else list(islice(cycle(copied), count))


def build(config: HistoryConfig, context: SourceContext) -> History:
    """The drafter for a loaded target."""
    info = context.target.info
    return History(config, info.vocab_size, context.k, info.device)


SOURCE = SourceInfo(
    name="history",
    config=HistoryConfig,
    dependency=("copy",),
    build=build,
    axis="history",
    offers=("tokens", "match_lengths"),
    remembers="share",
    methods={"ngram": {"index": "ngram"}, "suffix": {"index": "suffix"}},
)
