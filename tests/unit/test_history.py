"""History drafting: what is found, what is copied, what it costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from time import perf_counter

import pytest
import torch
from pydantic import ValidationError

from specflow.draft.ngram import REACH, NgramIndex
from specflow.draft.sources.history import History, HistoryConfig, Store
from specflow.draft.suffix import SuffixIndex
from specflow.target.cache import KVCache
from specflow.types import PAD, DraftBlock, DraftBudget, Observation, Sampling

VOCAB = 50
KINDS = ["ngram", "suffix"]
CACHE = KVCache(1, 1, 1, 1, 1, torch.empty(0))
"""A target's, which history never looks at."""


class NoRandomness:
    def uniform(self, stream: str, row: int, position: int) -> float:
        raise AssertionError("history drafting draws no random numbers")


def drafter(*prompts: Sequence[int], **options: object) -> History:
    """Matches of two tokens and more, unless told otherwise."""
    history = History(HistoryConfig(**{"min_match": 2, **options}), VOCAB, num_nodes=16)
    history.reset(len(prompts), CACHE)
    for row, prompt in enumerate(prompts):
        history.start(row, prompt, Sampling())
    return history


def commit(history: History, row: int, tokens: Sequence[int]) -> None:
    known = len(history._rows[row].tokens)
    history.observe(Observation((tuple(tokens),), (known - 1,), (len(tokens),)), [row])


def propose(history: History, *budget: int, **limits: object) -> DraftBlock | None:
    anchors = [row.tokens[-1] if row.tokens else 0 for row in history._rows]
    return history.propose(anchors, DraftBudget(budget, **limits), NoRandomness())


def drafts(block: DraftBlock | None) -> list[list[int]]:
    assert block is not None
    return [row[:length] for row, length in zip(block.tokens.tolist(), block.lengths, strict=True)]


def by_hand(text: Sequence[int], tail: Sequence[int], shortest: int, longest: int) -> tuple[int, int]:
    """The longest match of a tail in a text, the most recent of its occurrences that something follows."""
    best = (0, 0)
    for follower in range(len(text) - 1, 0, -1):
        length = 0
        while length < min(longest, follower, len(tail)) and text[follower - 1 - length] == tail[-1 - length]:
            length += 1
        if length >= shortest and length > best[0]:
            best = length, follower
    return best


@pytest.mark.parametrize("seed", range(60))
def test_both_indexes_agree_with_a_search_by_hand(seed: int) -> None:
    rng = random.Random(seed)
    vocab, shortest = rng.choice([1, 2, 3, 5]), rng.randint(1, 3)
    longest = rng.randint(shortest, 9)
    ngram, suffix = NgramIndex(shortest, longest, vocab), SuffixIndex(shortest, longest)
    text: list[int] = []
    for _ in range(40):
        part = [rng.randrange(vocab) for _ in range(rng.randint(0, 3))]
        if text and rng.random() < 0.2:
            begin = rng.randrange(len(text))
            part = text[begin : begin + 6]
        text += part
        ngram.extend(part)
        suffix.extend(part)
        expected = by_hand(text, text, shortest, longest)
        assert suffix.match() == expected
        length, follower = ngram.match()
        assert (min(length, longest), follower) == expected
        other = [rng.randrange(vocab) for _ in range(rng.randint(0, 12))]
        length, follower = ngram.find(other)
        assert (min(length, longest), follower) == by_hand(text, other, shortest, longest)
        assert suffix.find(other) == by_hand([*text, vocab], other, shortest, longest)


def test_an_ngram_match_is_measured_beyond_its_longest_ngram() -> None:
    index = NgramIndex(2, 3, VOCAB)
    index.extend([9, 1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5])
    assert index.match() == (5, 6)
    index.extend([7] * 200)
    assert index.match()[0] == REACH


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 4, 16])
def test_repetition_drafts_all_k_tokens(kind: str, k: int) -> None:
    assert drafts(propose(drafter([7, 7, 7, 7], index=kind), k)) == [[7] * k]


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_reaches_the_end_goes_on_with_what_it_wrote(kind: str) -> None:
    assert drafts(propose(drafter([1, 2, 3, 1, 2, 3, 1, 2], index=kind), 8)) == [[3, 1, 2, 3, 1, 2, 3, 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_most_recent_occurrence_wins_among_equally_long_ones(kind: str) -> None:
    assert drafts(propose(drafter([1, 2, 10, 5, 1, 2, 11, 6, 1, 2], index=kind), 1)) == [[11]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_match_beats_a_more_recent_one(kind: str) -> None:
    assert drafts(propose(drafter([4, 1, 2, 10, 5, 1, 2, 11, 4, 1, 2], index=kind), 1)) == [[10]]


def test_a_suffix_match_may_be_longer_than_any_ngram() -> None:
    text = [*range(10), 20, 30, *range(2, 10), 21, 31, *range(10)]
    assert drafts(propose(drafter(text, index="suffix"), 1)) == [[20]]
    assert drafts(propose(drafter(text, index="ngram"), 1)) == [[21]]


@pytest.mark.parametrize("kind", KINDS)
def test_generated_tokens_are_searched_like_the_prompt(kind: str) -> None:
    history = drafter([1, 2], index=kind)
    assert propose(history, 4) is None
    for token in (3, 4, 1):
        commit(history, 0, [token])
        assert propose(history, 4) is None
    commit(history, 0, [2])
    assert drafts(propose(history, 2)) == [[3, 4]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [[], [5]])
def test_the_shortest_prompts_work(kind: str, prompt: list[int]) -> None:
    history = drafter(prompt, index=kind)
    assert propose(history, 4) is None
    commit(history, 0, [6, 7, 6, 7])
    assert drafts(propose(history, 3)) == [[6, 7, 6]]


@pytest.mark.parametrize("kind", KINDS)
def test_proposing_changes_nothing(kind: str) -> None:
    asked, unasked = drafter([1, 2, 3, 1, 2], index=kind), drafter([1, 2, 3, 1, 2], index=kind)
    for token in (3, 9, 9, 1, 2):
        propose(asked, 5)
        commit(asked, 0, [token])
        commit(unasked, 0, [token])
    assert drafts(propose(asked, 5)) == drafts(propose(unasked, 5))


def test_a_prompt_that_is_observed_again_is_not_indexed_twice() -> None:
    history = drafter([1, 2, 3, 4])
    history.observe(Observation(((2, 3, 4),), (0,), (3,)), [0])
    assert propose(history, 4) is None
    history.observe(Observation(((3, 4, 5),), (1,), (3,)), [0])
    assert history._rows[0].tokens == [1, 2, 3, 4, 5]


def test_a_gap_in_the_observed_text_is_noticed() -> None:
    with pytest.raises(AssertionError, match="2 tokens before position 4"):
        drafter([1, 2]).observe(Observation(((5,),), (3,), (1,)), [0])


def test_rows_are_ragged_and_padded() -> None:
    block = propose(drafter([1, 2, 3, 1, 2], [4, 5, 6], [8, 8, 8]), 4, 4, 2)
    assert block is not None
    assert block.tokens.tolist() == [[3, 1, 2, 3], [PAD] * 4, [8, 8, PAD, PAD]]
    assert block.lengths == (4, 0, 2)
    assert block.match_lengths == (2, 0, 2)
    assert block.topology.is_chain
    assert block.topology.max_depth == 4
    assert block.law.is_point


def test_a_row_without_budget_is_not_searched() -> None:
    history = drafter([8, 8, 8], [8, 8, 8], [1, 2, 3])
    assert propose(history, 0, 0, 0) is None
    assert (history.num_lookups, history.num_hits) == (0, 0)
    assert drafts(propose(history, 0, 2, 2)) == [[], [8, 8], []]
    assert (history.num_lookups, history.num_hits) == (2, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("per_match", "expected"), [(0.5, 1), (0.6, 2), (1.0, 2), (2.0, 4), (9.0, 6)])
def test_a_draft_grows_with_the_match(kind: str, per_match: float, expected: int) -> None:
    block = propose(drafter([1, 2, 3, 4, 5, 6, 7, 1, 2], index=kind), 6, per_match=per_match)
    assert block is not None
    assert block.lengths == (expected,)


def test_a_table_by_match_length_holds_per_row() -> None:
    history = drafter([1, 2, 3, 9, 1, 2], [4, 4, 4, 4], [5, 5, 5])
    block = propose(history, 9, 9, 9, by_match=((9, 1), (9, 1, 4), (9, 0, 9)))
    assert block is not None
    assert block.lengths == (1, 4, 0)
    assert block.match_lengths == (2, 3, 0)


def test_select_keeps_rows_in_the_given_order_and_start_takes_one_over() -> None:
    history = drafter([1, 1, 1], [2, 2, 2], [3, 3, 3])
    history.select([2, 0])
    assert drafts(propose(history, 2, 2)) == [[3, 3], [1, 1]]
    history.start(1, [6, 7, 6, 7], Sampling())
    assert drafts(propose(history, 2, 2)) == [[3, 3], [6, 7]]
    history.reset(1, CACHE)
    assert propose(history, 2) is None


@pytest.mark.parametrize("kind", KINDS)
def test_finished_requests_are_searched_only_where_shared(kind: str) -> None:
    for share in (False, True):
        history = drafter([1, 2, 3, 4, 5, 6], index=kind, share=share)
        history.reset(1, CACHE)
        history.start(0, [9, 2, 3], Sampling())
        assert (propose(history, 9) is not None) == share
    assert drafts(propose(history, 9)) == [[4, 5, 6]]
    commit(history, 0, [8, 2, 3])
    assert drafts(propose(history, 9))[0][:3] == [8, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_match_in_the_store_beats_the_text_itself(kind: str) -> None:
    history = drafter([1, 2, 3, 4, 5], index=kind, share=True)
    history.select([])
    history.reset(1, CACHE)
    history.start(0, [2, 3, 9, 1, 2, 3], Sampling())
    block = propose(history, 9)
    assert block is not None
    assert (drafts(block), block.match_lengths) == ([[4, 5]], (3,))


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_is_bounded_and_drops_the_oldest_text(kind: str) -> None:
    store = Store(HistoryConfig(index=kind, share=True, share_tokens=40), VOCAB)
    for start in (0, 10, 20, 30):
        store.add(list(range(start, start + 10)))
        assert store.num_tokens <= 40
    assert store.find([5, 6], 9) == (0, [])
    assert store.find([35, 36], 9) == (2, [37, 38, 39])
    assert store.find([38, 39], 9) == (0, [])
    store.add(list(range(50)) * 3)
    assert store.num_tokens <= 40
    assert store.find([47, 48], 9) == (2, [49])


@pytest.mark.parametrize("kind", KINDS)
def test_texts_in_the_store_do_not_run_into_each_other(kind: str) -> None:
    store = Store(HistoryConfig(index=kind, share=True, min_match=2), VOCAB)
    store.add([1, 2])
    store.add([3, 4])
    assert store.find([2, 3], 9) == (0, [])
    assert store.find([1, 2], 9) == (0, [])


@pytest.mark.parametrize(
    "options", [{"index": "trie"}, {"min_match": 0}, {"min_match": 5, "max_match": 4}, {"max_matches": 3}]
)
def test_senseless_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        HistoryConfig(**options)


def test_a_high_min_match_raises_the_default_max_match() -> None:
    assert HistoryConfig(min_match=6).longest == 6
    assert HistoryConfig().longest < HistoryConfig(index="suffix").longest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["open", "same", "periodic"])
def test_cost_a_token_and_a_miss_do_not_grow_with_the_text(kind: str, text: str) -> None:
    size, rng = 30_000, random.Random(0)
    tokens = {
        "open": [rng.randrange(40_000) for _ in range(size)],
        "same": [7] * size,
        "periodic": [1, 2, 3] * (size // 3),
    }
    history = History(HistoryConfig(index=kind, min_match=2), 40_000, num_nodes=16)
    history.reset(1, CACHE)
    began = perf_counter()
    history.start(0, tokens[text], Sampling())
    assert perf_counter() - began < size * 50e-6  # about 1 to 3 us a token; a rescan would need milliseconds

    def miss() -> float:
        began = perf_counter()
        commit(history, 0, [rng.randrange(40_000)])
        assert propose(history, 8) is None
        return perf_counter() - began

    assert sorted(miss() for _ in range(101))[50] < 200e-6  # about 5 us, beside passes of 15 ms and more


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_of_copies_does_not_fall_with_the_context(kind: str) -> None:
    """A text that repeats itself from any distance is drafted right, wherever it is."""
    rng = random.Random(1)
    for size in (40, 400, 4000):
        text = [rng.randrange(3, 40_000) for _ in range(size)]
        history = History(HistoryConfig(index=kind, min_match=2), 40_000, num_nodes=16)
        history.reset(1, CACHE)
        history.start(0, [*text, *text[:2]], Sampling())
        at = 2
        while at + 8 <= size:
            assert drafts(propose(history, 8)) == [text[at : at + 8]], f"{size} tokens back"
            commit(history, 0, text[at : at + 9])
            at += 9
