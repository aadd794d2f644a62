"""Texts of a corpus and their batches: cut, split, ordered by seed and epoch alone, hardly padded."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from toy_training import toy_records, toy_target, write_corpus

from specflow.errors import DataError
from specflow.train.corpus import CorpusRecord
from specflow.train.sequences import BatchOrder, Text, Texts, make_batch, packed
from specflow.types import Features

LENGTHS = [5 + 7 * number % 60 for number in range(300)]


def record(name: str, prompt: int, answer: int) -> CorpusRecord:
    return CorpusRecord(name, 0.0, 1.0, (3,) * prompt, tuple(range(4, 4 + answer)), "length")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    records = [record(f"a/{number}", 4, 6) for number in range(60)]
    return write_corpus(tmp_path / "corpus", toy_target(), [*records, record("long", 30, 9), record("cut", 8, 20)])


def test_texts_are_cut_and_those_without_answer_left_out(corpus: Path) -> None:
    texts = {text.id: text for text in Texts.read(corpus, 0.0, 12).training}
    assert "long" not in texts
    assert texts["cut"].tokens.tolist() == [3] * 8 + [4, 5, 6, 7]
    assert texts["cut"].answer.tolist() == [4, 5, 6, 7]
    assert len(texts) == 61


def test_the_split_goes_by_id(corpus: Path) -> None:
    texts = Texts.read(corpus, 0.2, 64)
    held_out = {text.id for text in texts.held_out}
    assert 4 < len(held_out) < 25
    assert held_out.isdisjoint(text.id for text in texts.training)
    fewer = Texts.read(corpus, 0.2, 64, num_records=30)
    assert {text.id for text in fewer.held_out} <= held_out
    assert fewer.num_records == 30


def test_a_corpus_that_lost_records_is_refused(corpus: Path) -> None:
    with pytest.raises(DataError, match="62 records, and 63"):
        Texts.read(corpus, 0.0, 64, num_records=63)
    with pytest.raises(DataError, match="none of them is a text"):
        Texts.read(corpus, 0.0, 4)


def test_answers_to_an_evaluation_set_are_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", toy_target(), [record("a/1", 4, 6), record("gsm8k/test-0", 4, 6)])
    with pytest.raises(DataError, match="evaluation set") as found:
        Texts.read(corpus, 0.0, 64)
    assert found.value.where.endswith("record 2")


def test_counts_are_of_the_answers_alone() -> None:
    texts = Texts((Text("a", torch.tensor([7, 7, 5, 5, 6]), 2),), (Text("b", torch.tensor([1, 2]), 1),), 2)
    assert texts.counts(8).tolist() == [0, 0, 0, 0, 0, 2, 1, 0]


def test_digests_tell_texts_apart() -> None:
    one = Texts((Text("a", torch.tensor([7, 7, 5]), 2),), (), 1)
    others = [
        Text("a", torch.tensor([7, 7, 6]), 2),
        Text("a", torch.tensor([7, 7, 5]), 1),
        Text("b", one.training[0].tokens, 2),
    ]
    assert len({one.digest(), *(Texts((other,), (), 1).digest() for other in others)}) == 4


def test_every_epoch_has_every_text_once() -> None:
    order = BatchOrder(LENGTHS, 256, 3)
    first, both = order.in_epochs(1), order.in_epochs(2)
    for begin, end in ((0, first), (first, both)):
        assert sorted(chain.from_iterable(order[number] for number in range(begin, end))) == [*range(len(LENGTHS))]
    assert [order[number] for number in range(5)] != [order[first + number] for number in range(5)]


def test_a_batch_depends_on_seed_and_number_alone() -> None:
    one, other = BatchOrder(LENGTHS, 256, 3), BatchOrder(LENGTHS, 256, 3)
    late = one.in_epochs(1.5)
    assert late == one.in_epochs(1) + -(-(one.in_epochs(2) - one.in_epochs(1)) // 2)
    assert other[late] == one[late]  # made without the batches before it
    assert [BatchOrder(LENGTHS, 256, 4)[number] for number in range(5)] != [one[number] for number in range(5)]


def test_batches_fit_and_hold_little_padding() -> None:
    order = BatchOrder(LENGTHS, 256, 0)
    sizes = [
        (len(batch), max(LENGTHS[text] for text in batch))
        for batch in map(order.__getitem__, range(order.in_epochs(1)))
    ]
    assert all(count * widest <= 256 for count, widest in sizes)
    assert sum(count * widest for count, widest in sizes) < 1.1 * sum(LENGTHS)
    lengths = [widest for _, widest in sizes]
    assert lengths != sorted(lengths)


def test_packing_takes_neighbours_in_length() -> None:
    assert list(packed(range(4), [3, 9, 4, 2], 12)) == [(3, 0, 2), (1,)]


def test_batches_know_padding_and_answers() -> None:
    texts = [Text("a", torch.tensor([5, 6, 7]), 1), Text("b", torch.tensor([8, 9]), 1)]
    batch = make_batch(texts, Features({}, None, torch.zeros(2, 3, 4)), 11)
    assert batch.tokens.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.valid.tolist() == [[True, True, True], [True, True, False]]
    assert batch.answer.tolist() == [[False, True, True], [False, True, False]]
    assert batch.key == 11


def test_toy_records_are_answers_of_the_target() -> None:
    loaded = toy_target()
    (one, *_) = toy_records(loaded, 3)
    assert len(one.response_ids) == 20
