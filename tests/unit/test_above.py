"""Inputs of a pass above a cache: the quick bias of chains is the one that any sight gives."""

from __future__ import annotations

import pytest
import torch

from specflow.draft.nn.attention import Sight, attention_biases
from specflow.onnx.above import feeds_above
from specflow.target.cache import KVCache


def cache(*lengths: int, dtype: torch.dtype = torch.float32) -> KVCache:
    made = KVCache(1, len(lengths), 1, 256, 2, torch.empty(0, dtype=dtype))
    made.keep(lengths)
    made.trim()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 5])
def test_chains_see_what_any_sight_says(rows: int, dtype: torch.dtype) -> None:
    lengths = (0, 7, 59)
    kept = cache(*lengths, dtype=dtype)
    sight = Sight(lengths, torch.zeros(3, rows, dtype=torch.int64))
    feeds = feeds_above(kept, rows, {"bias": sight})
    assert feeds["starts"].tolist() == list(lengths)
    assert torch.equal(feeds["bias"], torch.stack(attention_biases(sight, [64] * 3, dtype)))
    assert feeds["bias"].dtype == dtype


def test_masks_and_windows_are_heeded() -> None:
    positions = torch.tensor([[7, 8]])
    mask = torch.tensor([[[True, False], [False, True]]])
    sights = {"tree": Sight((7,), positions, mask), "windowed": Sight((7,), positions, window=3)}
    feeds = feeds_above(cache(7), 2, sights)
    assert feeds["tree"][0, 1, :9].tolist() == [*[0.0] * 7, -torch.inf, 0.0]
    assert feeds["windowed"][0, 1, :9].tolist() == [*[-torch.inf] * 6, 0.0, 0.0, 0.0]


def test_room_is_made_first() -> None:
    kept = cache(63)
    feeds = feeds_above(kept, 3, {"bias": Sight((63,), torch.zeros(1, 3, dtype=torch.int64))})
    assert kept.data.shape[4] == feeds["bias"].shape[2] == 128
    assert feeds_above(kept, 3, {}).keys() == {"starts"}
