"""Texts of a corpus as training sees them: cut to length, split by id, and batched so that little is padding.

Batch n of a run is a function of the texts, the seed and n alone, so that a run which goes on needs no state of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specflow.errors import DataError
from specflow.train.batch import Batch
from specflow.train.corpus import CorpusRecord, is_held_out, read_corpus
from specflow.train.prompts import refuse_evaluation_id

if TYPE_CHECKING:
    from specflow.types import Features

__all__ = ["BatchOrder", "Text", "Texts", "digest_of", "key_of", "make_batch", "packed"]

_WINDOW = 32
"""Batches whose texts are sorted by length together: enough for little padding, few enough to stay a mix."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's answer, cut to length."""

    id: str
    tokens: Tensor  # [T] int64
    num_prompt: int  # tokens before the answer; below T

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def answer(self) -> Tensor:
        """# [T - num_prompt]"""
        return self.tokens[self.num_prompt :]


@dataclass(frozen=True, slots=True)
class Texts:
    """Those that are trained on, and those that are kept for measuring."""

    training: tuple[Text, ...]
    held_out: tuple[Text, ...]
    num_records: int  # of the corpus that were read; a corpus only grows, so these stay its first ones

    @classmethod
    def read(cls, corpus: Path, held_out: float, max_length: int, num_records: int | None = None) -> Texts:
        """The texts of a corpus.

        Args:
            corpus: Its directory.
            held_out: Share that is kept for measuring; the id decides, so a text never changes sides.
            max_length: Longest text in tokens. One whose prompt alone is as long is left out.
            num_records: How many records to read, oldest first; None: all there are now.

        Raises:
            DataError: There is no corpus, it has lost records or has some of an evaluation set, or none of its texts
                fits.
        """
        records = list(islice(read_corpus(corpus), num_records))
        if num_records is not None and len(records) < num_records:
            found = f"{len(records)} records, and {num_records} when the run began"
            raise DataError(str(corpus), found, "the corpus that the run began with")
        kept: dict[bool, list[Text]] = {False: [], True: []}
        for number, record in enumerate(records, 1):
            refuse_evaluation_id(record.id, f"{corpus}, record {number}")
            if len(record.prompt_ids) < max_length:
                kept[is_held_out(record.id, held_out)].append(_text(record, max_length))
        if not kept[False]:
            found = f"{len(records)} records, and none of them is a text to train on"
            raise DataError(str(corpus), found, f"prompts below {max_length} tokens that are not held out")
        return cls(tuple(kept[False]), tuple(kept[True]), len(records))

    def digest(self) -> str:
        """Tells these texts from others."""
        return digest_of((*self.training, *self.held_out))

    def counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs in the answers that are trained on.  # [V] int64"""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for text in self.training:
            counts += text.answer.bincount(minlength=vocab_size)
        return counts


def digest_of(texts: Sequence[Text]) -> str:
    """Tells texts from others."""
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(f"{text.id}\0{text.num_prompt}\0".encode() + text.tokens.numpy().tobytes())
    return digest.hexdigest()


def _text(record: CorpusRecord, max_length: int) -> Text:
    tokens = torch.tensor(record.tokens[:max_length], dtype=torch.int64)
    return Text(record.id, tokens, len(record.prompt_ids))


class BatchOrder:
    """Which texts are in which batch, epoch after epoch without end.

    Args:
        lengths: Of all texts.
        batch_tokens: Most positions of a batch, padding included; no text is longer.
        seed: Of the order.
    """

    def __init__(self, lengths: Sequence[int], batch_tokens: int, seed: int) -> None:
        self._lengths, self._batch_tokens, self._seed = lengths, batch_tokens, seed
        self._epochs: list[list[tuple[int, ...]]] = []

    def __getitem__(self, index: int) -> tuple[int, ...]:
        """The texts of one batch of the run, by their numbers."""
        epoch = 0
        while index >= len(batches := self._batches(epoch)):
            index, epoch = index - len(batches), epoch + 1
        return batches[index]

    def in_epochs(self, epochs: float) -> int:
        """Batches of so many epochs; a part of one counts as a whole batch."""
        whole = int(epochs)
        part = epochs - whole
        before = sum(len(self._batches(epoch)) for epoch in range(whole))
        return before + (ceil(part * len(self._batches(whole))) if part else 0)

    def _batches(self, epoch: int) -> list[tuple[int, ...]]:
        while len(self._epochs) <= epoch:
            self._epochs.append(self._make(len(self._epochs)))
        return self._epochs[epoch]

    def _make(self, epoch: int) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(key_of("order", self._seed, epoch))
        order = torch.randperm(len(self._lengths), generator=generator).tolist()
        batches = [
            batch for window in self._windows(order) for batch in packed(window, self._lengths, self._batch_tokens)
        ]
        return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]

    def _windows(self, order: Sequence[int]) -> Iterator[list[int]]:
        window: list[int] = []
        room = _WINDOW * self._batch_tokens
        for text in order:
            window.append(text)
            room -= self._lengths[text]
            if room <= 0:
                yield window
                window, room = [], _WINDOW * self._batch_tokens
        if window:
            yield window


def packed(texts: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[tuple[int, ...]]:
    """Batches of texts of similar length, at most so many positions each, padding included."""
    batch: list[int] = []
    for text in sorted(texts, key=lambda text: lengths[text]):
        if batch and (len(batch) + 1) * lengths[text] > batch_tokens:
            yield tuple(batch)
            batch = []
        batch.append(text)
    if batch:
        yield tuple(batch)


def make_batch(texts: Sequence[Text], features: Features, key: int) -> Batch:
    """Texts and what the target made of them, on the device of its features.

    Args:
        texts: At least one.
        features: Of all positions, padding included.  # [B, T, ...]
        key: Of random choices.
    """
    assert features.hidden_post is not None, "batches always carry hidden_post"
    device = features.hidden_post.device
    lengths = torch.tensor([len(text) for text in texts], device=device)
    prompts = torch.tensor([text.num_prompt for text in texts], device=device)
    tokens = padded(texts).to(device)
    places = torch.arange(tokens.shape[1], device=device)
    valid = places < lengths.unsqueeze(1)
    return Batch(tokens, valid, valid & (places >= prompts.unsqueeze(1)), features, key)


def padded(texts: Sequence[Text]) -> Tensor:
    """Texts in one tensor, filled up with zeros.  # -> [B, T]"""
    return torch.nn.utils.rnn.pad_sequence([text.tokens for text in texts], batch_first=True)


def key_of(*parts: object) -> int:
    """A number in [0, 2**63) for a purpose, the same in every process."""
    digest = blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
