"""Answers of a target to prompts, drawn with the batched engine and kept as they finish."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING

from specflow.errors import RequestError
from specflow.train.corpus import Corpus, CorpusRecord, CorpusTarget, SamplingMix, share_of
from specflow.types import Sampling

if TYPE_CHECKING:
    from specflow.bench.data import PromptRow
    from specflow.build import LoadedTarget
    from specflow.engine import Engine
    from specflow.types import Generation

__all__ = ["Answering", "record_id", "sampling_of", "target_of"]

log = logging.getLogger(__name__)

WINDOW = 16
"""Batches of prompts that are sorted by length together: attention costs by the longest text of a batch."""


def target_of(loaded: LoadedTarget) -> CorpusTarget:
    """What a corpus must know of a target."""
    info = loaded.target.info
    shown = loaded.codec.render_chat([{"role": "user", "content": "QUESTION"}])
    return CorpusTarget(info.name, loaded.identity(), info.weights, info.vocab_size, shown)


def record_id(row: PromptRow, turn: int) -> str:
    """The id of the answer to one turn of a row."""
    return row.id if turn == 0 else f"{row.id}#{turn + 1}"


def sampling_of(name: str, mix: SamplingMix) -> Sampling:
    """How a record is drawn: its id decides whether greedily, and seeds it, so it never comes out another way."""
    digest = blake2b(f"{mix.seed}:{name}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    if share_of(name, f"greedy {mix.seed}") < mix.greedy_share:
        return Sampling(seed=seed, max_new_tokens=mix.max_new_tokens)
    return Sampling(temperature=mix.temperature, top_p=mix.top_p, seed=seed, max_new_tokens=mix.max_new_tokens)


@dataclass(frozen=True, slots=True)
class _Ask:
    """One answer to draw."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling

    def record(self, made: Generation) -> CorpusRecord:
        sampling = self.sampling
        return CorpusRecord(self.id, sampling.temperature, sampling.top_p, self.prompt, made.tokens, made.finish)


class Answering:
    """Draws the answers that a corpus does not have yet.

    Args:
        engine: Decodes many requests together, plainly or with lossless drafts.
        corpus: Where answers go.
        mix: How they are drawn.
    """

    def __init__(self, engine: Engine, corpus: Corpus, mix: SamplingMix) -> None:
        self._engine, self._corpus, self._mix = engine, corpus, mix
        self._said: dict[str, str] = {}  # answers that a later turn follows

    def run(self, rows: Sequence[PromptRow], num_tokens: int | None = None) -> Iterator[CorpusRecord]:
        """Answer rows until all are answered, or until the corpus holds so many response tokens.

        Later turns are asked after all first ones, each after the target's own answers.

        Args:
            rows: In the order of their turn. Only neighbours are sorted by length, so a prefix stays a fair mix.
            num_tokens: Response tokens to stop at, those that are there already included.

        Yields:
            Records, as they are kept.
        """
        talks = {record_id(row, turn) for row in rows for turn in range(len(row.turns) - 1)}
        if talks:
            self._said = {each.id: self._text(each) for each in self._corpus.records() if each.id in talks}
        for turn in range(max((len(row.turns) for row in rows), default=0)):
            asks = self._asks([row for row in rows if turn < len(row.turns)], turn)
            while window := list(islice(asks, WINDOW * self._engine.settings.batch)):
                for record in self._draw(sorted(window, key=lambda ask: len(ask.prompt), reverse=True)):
                    if record.id in talks:
                        self._said[record.id] = self._text(record)
                    yield record
                    if num_tokens is not None and self._corpus.num_tokens >= num_tokens:
                        return

    def _asks(self, rows: Sequence[PromptRow], turn: int) -> Iterator[_Ask]:
        """What is missing of one turn; a prompt that cannot be asked is named and left out."""
        for row in rows:
            name = record_id(row, turn)
            before = [record_id(row, earlier) for earlier in range(turn)]
            if name in self._corpus.ids or not all(each in self._said for each in before):
                continue
            try:
                prompt = self._engine.codec.encode_chat(row.messages(turn, [self._said[each] for each in before]))
            except RequestError as error:
                log.warning("%s: %s", row.key, error.found)
                continue
            if len(prompt) < self._engine.context_length:
                yield _Ask(name, tuple(prompt), sampling_of(name, self._mix))
            else:
                log.warning("%s: %d tokens do not fit the context", row.key, len(prompt))

    def _draw(self, asks: Sequence[_Ask]) -> Iterator[CorpusRecord]:
        """Records in the order in which their requests finish, each kept."""
        for event in self._engine.events([ask.prompt for ask in asks], [ask.sampling for ask in asks]):
            if event.done is not None:
                record = asks[event.index].record(event.done)
                self._corpus.append(record)
                yield record

    def _text(self, record: CorpusRecord) -> str:
        """An answer as the next turn sees it. An empty one is no turn of a conversation."""
        return self._engine.codec.decode(record.response_ids)
