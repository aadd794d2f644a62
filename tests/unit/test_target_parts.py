"""Parts of the target that drafters build on: embedding, norm, head, forks, and trees that grow level by level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import ALL, NATIVE, gap, make_model, make_native, make_target, make_tokens, prefilled, score
from test_target import BOTH, EXACT, tree_mask

LEVELS = ((1, (0, 0)), (3, (1, 1, 2)), (6, (4,)))
"""A tree added level by level: its first row, and the rows (0 is the anchor) its rows hang on."""


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("runtime", "family"), BOTH)
class TestPieces:
    def test_embedding_is_what_the_first_layer_takes(self, runtime: str, family: str) -> None:
        target, tokens = make_target(runtime, family, torch.float64), make_tokens(7)
        taken = score(target, tokens, target.new_cache(1, 16), taps=(-1,)).taps[-1]
        added = taken - target.embed(tokens)
        if family == "gpt2":  # it adds what it learnt of positions, whatever the token
            other = make_tokens(7, seed=1)
            taken = score(target, other, target.new_cache(1, 16), taps=(-1,)).taps[-1]
            assert gap(taken - target.embed(other), added) <= EXACT[runtime]
            assert float(added.abs().max()) > 0.1
        else:
            assert float(added.abs().max()) <= EXACT[runtime]
        assert target.embed(torch.full((2, 3), -1)).shape == (2, 3, 64)

    def test_norm_and_head_finish_a_pass(self, runtime: str, family: str) -> None:
        target, tokens = make_target(runtime, family, torch.float64), make_tokens(7)
        out = score(target, tokens, target.new_cache(1, 16))
        assert gap(target.norm(out.hidden_pre), out.hidden_post) <= EXACT[runtime]
        assert gap(target.score(out.hidden_post), out.logits) <= EXACT[runtime]
        assert gap(target.score(target.norm(out.hidden_pre)), out.logits) <= EXACT[runtime]

    def test_an_early_exit_is_finished_by_the_same_norm_and_head(self, runtime: str, family: str) -> None:
        target, tokens = make_target(runtime, family, torch.float64), make_tokens(7)
        out = score(target, tokens, target.new_cache(1, 16), layers=(0, 2), taps=(1,))
        assert gap(out.hidden_pre, out.taps[1]) <= EXACT[runtime]
        assert gap(target.score(target.norm(out.hidden_pre)), out.logits) <= EXACT[runtime]

    def test_rows_none_scores_nothing(self, runtime: str, family: str) -> None:
        target, tokens = make_target(runtime, family, torch.float64), make_tokens(7)
        whole = score(target, tokens, target.new_cache(1, 16))
        bare = score(target, tokens, target.new_cache(1, 16), rows="none")
        assert bare.logits.shape == (1, 0, 64)
        assert gap(bare.hidden_pre, whole.hidden_pre) <= EXACT[runtime]
        assert gap(bare.hidden_post, whole.hidden_post) <= EXACT[runtime]

    def test_a_fork_keeps_a_boundary_of_its_own(self, runtime: str, family: str) -> None:
        target = make_target(runtime, family, torch.float64)
        prompts, block = [make_tokens(8, seed=1), make_tokens(14, seed=2)], make_tokens(4, seed=3).expand(2, -1)
        cache = prefilled(target, prompts)
        expected = score(target, block, prefilled(target, prompts)).logits
        fork = cache.fork()
        for row in range(4):
            out = score(target, block[:, row : row + 1], fork)
            fork.keep([1, 1])
            assert gap(out.logits, expected[:, row : row + 1]) <= EXACT[runtime]
        assert (list(cache.lengths), list(fork.lengths)) == ([8, 14], [12, 18])
        assert gap(score(target, block, cache).logits, expected) <= EXACT[runtime]

    def test_what_a_fork_keeps_the_original_holds_as_scratch(self, runtime: str, family: str) -> None:
        target, block = make_target(runtime, family, torch.float64), make_tokens(3, seed=3)
        cache = prefilled(target, [make_tokens(8)])
        fork = cache.fork()
        for row in range(3):
            score(target, block[:, row : row + 1], fork)
            fork.keep([1])
        cache.keep([2])
        expected = score(target, make_tokens(2), prefilled(target, [torch.cat((make_tokens(8), block[:, :2]), 1)]))
        assert gap(score(target, make_tokens(2), cache).logits, expected.logits) <= EXACT[runtime]


@pytest.mark.parametrize(("runtime", "family"), BOTH)
def test_a_tree_grown_in_a_fork_equals_each_path(runtime: str, family: str) -> None:
    """Also where a sliding window is shorter than the tree is deep: windows count positions, not slots."""
    changes = {"sliding_window": 3} if "sliding_window" in ALL[family][1] and family != "llama_stray_window" else {}
    target = make_target(runtime, family, torch.float64, **changes)
    prompts = [make_tokens(8, seed=4), make_tokens(17, seed=5)]
    tokens = torch.cat([make_tokens(7, seed=7), make_tokens(7, seed=8)])
    parents = (-1, *(parent for _, level in LEVELS for parent in level))
    mask, depth = tree_mask(parents)
    cache = prefilled(target, prompts)
    fork = cache.fork()
    starts = torch.tensor(cache.lengths).unsqueeze(1)
    logits = [target.forward(tokens[:, :1], starts, fork).logits]
    fork.keep([1, 1])
    for first, level in LEVELS:
        rows = slice(first, first + len(level))
        visible = mask[:, rows, 1 : rows.stop]
        logits.append(target.forward(tokens[:, rows], starts + depth[rows], fork, mask=visible).logits)
        fork.keep([len(level)] * 2)
    grown = torch.cat(logits, dim=1)
    for path in ([0, 1, 4, 6], [0, 1, 3], [0, 2, 5]):
        chain = score(target, tokens[:, path], prefilled(target, prompts))
        assert gap(grown[:, path], chain.logits) <= EXACT[runtime]


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_early_layers_and_the_rest_have_the_bits_of_the_whole(family: str, dtype: torch.dtype) -> None:
    """Layers 0..E one row at a time, the others over the block: what verification after an early exit does."""
    target = make_native(make_model(family), dtype)
    if target.info.exactness != "bit-exact":
        assert dtype == torch.float32
        return
    prompts, block = [make_tokens(62, seed=1), make_tokens(9, seed=2)], make_tokens(4, seed=3).expand(2, -1)
    expected = score(target, block, prefilled(target, prompts))
    cache = prefilled(target, prompts)
    fork, left = cache.fork(), []
    for row in range(4):
        left.append(score(target, block[:, row : row + 1], fork, layers=(0, 2)).hidden_pre)
        fork.keep([1, 1])
    out = score(target, block, cache, layers=(2, 3), hidden_in=torch.cat(left, dim=1))
    assert torch.equal(out.logits, expected.logits)
    assert torch.equal(out.hidden_pre, expected.hidden_pre)
