"""The preallocated cache: boundaries, paths, views, and what leaves no trace."""

from __future__ import annotations

import pytest
import torch

from specflow.target.base import Cache
from specflow.target.cache import KVCache

LAYERS, HEADS, WIDTH = 2, 3, 4


def make_cache(batch: int = 3, capacity: int = 20) -> KVCache:
    return KVCache(LAYERS, batch, HEADS, capacity, WIDTH, like=torch.zeros(0, dtype=torch.float64))


def write(cache: KVCache, row: int, values: list[float]) -> None:
    """Write scratch rows as a pass does: above the committed ones, in every layer, keys positive, values negative."""
    length = cache.lengths[row]
    for index in range(LAYERS):
        keys, vals = cache.layer(index)
        fresh = torch.tensor(values, dtype=torch.float64).view(1, -1, 1) + 100 * index
        keys[row, :, length : length + len(values)] = fresh
        vals[row, :, length : length + len(values)] = -fresh


def held(cache: KVCache, row: int) -> list[float]:
    """Committed rows, after checking that all layers, heads and widths agree."""
    length = cache.lengths[row]
    keys, values = cache.layer(0)
    expected = keys[row, :1, :length, :1]
    for index in range(LAYERS):
        keys, values = cache.layer(index)
        assert torch.equal(keys[row, :, :length], (expected + 100 * index).expand(HEADS, length, WIDTH))
        assert torch.equal(values[row, :, :length], -(expected + 100 * index).expand(HEADS, length, WIDTH))
    return expected.flatten().tolist()


def test_starts_empty_with_the_room_asked_for() -> None:
    cache: Cache = make_cache(batch=2, capacity=65)
    assert list(cache.lengths) == [0, 0]
    assert cache.capacity >= 65


def test_keep_commits_the_first_rows() -> None:
    cache = make_cache()
    write(cache, 0, [1, 2, 3])
    write(cache, 1, [4, 5])
    cache.keep([2, 0, 0])
    assert list(cache.lengths) == [2, 0, 0]
    assert held(cache, 0) == [1, 2]


def test_rejected_rows_are_overwritten() -> None:
    cache = make_cache()
    write(cache, 0, [1, 2, 3])
    cache.keep([1, 0, 0])
    write(cache, 0, [7, 8])
    cache.keep([2, 0, 0])
    assert held(cache, 0) == [1, 7, 8]


def test_keep_moves_the_rows_of_a_path() -> None:
    cache = make_cache()
    for row in range(3):
        write(cache, row, [9])
    cache.keep([1, 1, 1])
    for row in range(3):
        write(cache, row, [10 * row + offset for offset in range(6)])
    cache.keep([3, 1, 2], torch.tensor([[0, 2, 5, -1], [0, -1, -1, -1], [0, 4, -1, -1]]))
    assert held(cache, 0) == [9, 0, 2, 5]
    assert held(cache, 1) == [9, 10]
    assert held(cache, 2) == [9, 20, 24]


def test_a_path_may_keep_every_row() -> None:
    cache = make_cache(batch=1)
    write(cache, 0, [1, 2, 3])
    cache.keep([3], torch.tensor([[0, 1, 2]]))
    assert held(cache, 0) == [1, 2, 3]


@pytest.mark.parametrize("rows", [[2, 0], [1], [0, 1, 2], [2, 1, 0]])
def test_select_keeps_rows_in_the_order_asked(rows: list[int]) -> None:
    cache = make_cache()
    for row in range(3):
        write(cache, row, [10.0 * row + offset for offset in range(row + 1)])
    cache.keep([1, 2, 3])
    before = [held(cache, row) for row in range(3)]
    cache.select(rows)
    assert [held(cache, index) for index in range(len(rows))] == [before[row] for row in rows]
    write(cache, 0, [77])
    cache.keep([1] + [0] * (len(rows) - 1))
    assert held(cache, 0) == [*before[rows[0]], 77]


def test_clear_empties_one_row_only() -> None:
    cache = make_cache()
    for row in range(3):
        write(cache, row, [1.0 + row])
    cache.keep([1, 1, 1])
    cache.clear(1)
    assert list(cache.lengths) == [1, 0, 1]
    assert held(cache, 2) == [3]
    write(cache, 1, [8, 9])
    cache.keep([0, 2, 0])
    assert held(cache, 1) == [8, 9]


def test_a_row_view_shares_memory_and_length() -> None:
    cache = make_cache()
    view = cache.row(1)
    write(view, 0, [5, 6])
    view.keep([2])
    assert list(view.lengths) == [2]
    assert list(cache.lengths) == [0, 2, 0]
    assert held(cache, 1) == [5, 6]
    write(cache, 1, [7])
    cache.keep([0, 1, 0])
    assert held(view, 0) == [5, 6, 7]
    view.clear(0)
    assert list(cache.lengths) == [0, 0, 0]


def test_a_row_view_keeps_paths() -> None:
    cache = make_cache()
    view = cache.row(2)
    write(view, 0, [5, 6, 7])
    view.keep([2], torch.tensor([[0, 2]]))
    assert held(cache, 2) == [5, 7]


def test_slots_that_were_given_back_are_taken_again_by_all_views() -> None:
    cache = make_cache(batch=2, capacity=300)
    cache.trim(64)
    assert cache.data.shape[4] == 64
    write(cache, 1, [1, 2, 3])
    view, fork = cache.row(1), cache.fork()
    view.keep([2])
    cache.make_room(64)
    assert cache.data.shape[4] == 64, "there was room"
    view.make_room(200)
    assert 200 <= cache.data.shape[4] <= 320
    assert cache.data.shape[4] == fork.data.shape[4] == view.data.shape[4]
    assert cache.capacity == 320
    assert held(cache, 1) == [1, 2]


def test_no_room_beyond_the_capacity() -> None:
    with pytest.raises(AssertionError, match="65 positions in a cache for 64"):
        make_cache(capacity=20).make_room(65)


def test_a_trimmed_cache_grows_as_it_fills_and_loses_nothing() -> None:
    cache = make_cache(batch=2, capacity=300)
    cache.trim(64)
    view = cache.row(1)
    assert (cache.data.shape[4], cache.capacity) == (64, 320)
    write(cache, 1, [1, 2, 3])
    cache.keep([0, 2])
    for positions, slots in ((64, 64), (65, 128), (200, 256), (320, 320)):
        view.make_room(positions)
        assert cache.data.shape[4] == view.data.shape[4] == slots
    assert held(cache, 1) == [1, 2]
    with pytest.raises(AssertionError, match="321 positions"):
        cache.make_room(321)


def test_slots_that_a_cache_grows_by_hold_numbers() -> None:
    """Rows that are not there have the weight 0, which only takes numbers away."""
    cache = make_cache(capacity=256)
    cache.trim()
    torch.use_deterministic_algorithms(True)  # memory that nobody has filled is filled with nan
    try:
        cache.make_room(200)
    finally:
        torch.use_deterministic_algorithms(False)
    assert cache.data.shape[4] > 64
    assert not cache.data.any()


def test_a_small_cache_is_not_copied_to_be_trimmed() -> None:
    cache = make_cache()
    before = cache.data.data_ptr()
    cache.trim()
    assert cache.data.data_ptr() == before


def test_what_is_committed_is_not_trimmed_away() -> None:
    cache = make_cache(capacity=200)
    cache.keep([100, 0, 0])
    with pytest.raises(AssertionError, match="100 committed rows"):
        cache.trim(64)
