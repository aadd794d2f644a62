"""A row of a pass has the same bits whatever the number of rows: bfloat16 speculation then equals vanilla bit for bit.

Where packed linears do not hold that here, the target must say "tie-exact" and take the ordinary layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from families import make_model, make_native, make_tokens, prefilled, score
from torch import Tensor

from specflow.draft.nn.attention import KEY_STEP, AttentionPlan, plan_attention
from specflow.draft.nn.block import RMSNorm
from specflow.draft.nn.linear import Linear, is_row_invariant, packed_status
from specflow.errors import ModelError
from specflow.target.transformer import NativeTarget

MOST = 33
WIDE = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 640}
BFLOAT16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@cache
def target_of(family: str, row_invariant: bool | None = None) -> NativeTarget:
    return make_native(make_model(family, **WIDE), BFLOAT16, row_invariant)


def rows_of_every_width(target: NativeTarget, prompt: Tensor) -> list[Tensor]:
    """Logits [rows, V] of a pass over the first 1, 2, ... rows that follow a prompt."""
    tokens, caches = make_tokens(MOST, seed=99), prefilled(target, [prompt], capacity=prompt.shape[1] + MOST)
    found = []
    for rows in range(1, MOST + 1):
        logits = score(target, tokens[:, :rows], caches).logits
        assert logits is not None
        found.append(logits[0].clone())
    return found


def same_bits(found: list[Tensor]) -> bool:
    return all(torch.equal(logits, found[-1][: logits.shape[0]]) for logits in found)


@cache
def holds_here() -> bool:
    return bool(packed_status()["row_invariant"]["bfloat16"])  # type: ignore[index]


def promises(target: NativeTarget) -> bool:
    """Whether the target says "bit-exact", which it must where packed linears allow it."""
    promised = target.info.exactness == "bit-exact"
    assert promised or not holds_here()
    return promised


@pytest.mark.parametrize("family", ["llama3_rope", "mistral_window", "qwen3", "llama_biases_tied"])
@pytest.mark.parametrize("context", [3, 60, 127, 500])
def test_every_row_count_gives_the_same_bits(family: str, context: int) -> None:
    """Contexts 60 and 127: rows of one pass lie on both sides of a multiple of 64 key slots."""
    target = target_of(family)
    found = same_bits(rows_of_every_width(target, make_tokens(context, seed=context)))
    assert found or not promises(target)


@pytest.mark.parametrize("family", ["llama3_rope", "mistral_window"])
def test_ragged_batch_equals_batch_one_bit_for_bit(family: str) -> None:
    target = target_of(family)
    exact = promises(target)
    prompts = [make_tokens(length, seed=length) for length in (61, 9, 130)]
    for rows in (1, 2, 5, 12, 17):
        tokens = torch.cat([make_tokens(rows, seed=70 + row) for row in range(3)])
        together = score(target, tokens, prefilled(target, prompts, 192)).logits
        for row, prompt in enumerate(prompts):
            alone = score(target, tokens[row : row + 1], prefilled(target, [prompt], 192)).logits
            assert together is not None
            assert alone is not None
            assert torch.allclose(together[row], alone[0], atol=0.05 * float(alone.abs().max()))
            assert torch.equal(together[row], alone[0]) or not exact


@pytest.mark.parametrize(("rows", "fewest", "most"), [(1, 2, 2), (2, 2, 2), (32, 32, 32), (33, 16, 17), (70, 23, 24)])
def test_linears_see_only_probed_row_counts(rows: int, fewest: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single row is padded to two, and wide passes are split: other counts may take other kernels."""
    target = target_of("llama3_rope")
    cache, plain, seen = prefilled(target, [make_tokens(5)]), Linear.forward, []

    def forward(linear: Linear, fed: Tensor) -> Tensor:
        seen.append(fed.shape[0])
        return plain(linear, fed)

    monkeypatch.setattr(Linear, "forward", forward)
    logits = score(target, make_tokens(rows, seed=1), cache).logits
    assert logits is not None
    assert logits.shape[1] == rows
    if promises(target):
        assert (min(seen), max(seen)) == (fewest, most)


def test_tree_rows_have_the_bits_of_their_path() -> None:
    target = target_of("llama3_rope")
    prompt, tokens = make_tokens(62), make_tokens(4, seed=5)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2:, 1] = False  # row 1 is a rejected sibling of row 2
    positions = torch.tensor([[62, 63, 63, 64]])
    tree = target.forward(tokens, positions, prefilled(target, [prompt]), mask=mask.unsqueeze(0)).logits
    chain = score(target, tokens[:, [0, 2, 3]], prefilled(target, [prompt])).logits
    assert tree is not None
    assert chain is not None
    # Sums over keys run in another order where a masked slot lies between: near, not bit-equal.
    assert torch.allclose(tree[0, [0, 2, 3]], chain[0], atol=0.05 * float(chain.abs().max()))
    assert torch.equal(tree[0, 0], chain[0, 0]) or not promises(target)


def test_without_it_rows_differ_and_the_ordinary_plan_is_used() -> None:
    """Negative control: the comparison above can fail."""
    target = target_of("llama3_rope", row_invariant=False)
    assert target.info.exactness == "tie-exact"
    assert not same_bits(rows_of_every_width(target, make_tokens(60, seed=60)))


def test_asking_for_it_where_it_cannot_hold_is_refused() -> None:
    with pytest.raises(ModelError, match=r"target\.row_invariant"):
        make_native(make_model("llama3_rope"), torch.float64, row_invariant=True)


def test_the_probe_finds_a_layer_that_changes_its_bits() -> None:
    class Fickle(Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) * (1.0 if rows.shape[0] < 20 else 1.01)

    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert not is_row_invariant([Fickle(weight)])


@pytest.mark.parametrize("part", ["attention", "norm"])
def test_the_probe_finds_attention_and_norms_that_change_their_bits(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears hold in all of these; what runs between them does not."""
    assert promises(make_native(make_model("llama3_rope", **WIDE), BFLOAT16)) == holds_here()
    if part == "attention":
        attend = AttentionPlan.attend
        monkeypatch.setattr(AttentionPlan, "attend", lambda plan, *args: attend(plan, *args) * (1 + plan.rows / 64))
    else:
        norm = RMSNorm.forward
        monkeypatch.setattr(RMSNorm, "forward", lambda module, rows: norm(module, rows) * (1 + rows.shape[0] / 64))
    assert make_native(make_model("llama3_rope", **WIDE), BFLOAT16).info.exactness == "tie-exact"
    with pytest.raises(ModelError, match="change their bits"):
        make_native(make_model("llama3_rope", **WIDE), BFLOAT16, row_invariant=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_crosses_a_multiple_of_64_key_slots(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows alone on both sides of it, and blocks that lie across."""
    seen, attend = set(), AttentionPlan.attend

    def note(plan: AttentionPlan, *args: Any) -> Tensor:
        seen.add((plan.rows, plan.biases[0].shape[-1]))
        return attend(plan, *args)

    monkeypatch.setattr(AttentionPlan, "attend", note)
    target = make_native(make_model("llama3_rope", **WIDE), dtype)
    if promises(target):
        assert seen == {(1, KEY_STEP), (1, 2 * KEY_STEP), (2, 2 * KEY_STEP), (5, 2 * KEY_STEP)}


def plan(rowwise: bool, **options: Any) -> Any:
    positions = torch.tensor([[5, 6, 6], [70, 71, 71]])
    mask = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    return plan_attention([5, 70], positions, mask, options.get("window"), rowwise, torch.float32)


def test_rowwise_plans_round_each_row_to_its_own_key_length() -> None:
    found = plan(rowwise=True)
    assert [tuple(bias.shape) for bias in found.biases] == [(3, 1, 1, KEY_STEP), (3, 1, 1, 2 * KEY_STEP)]
    assert plan(rowwise=False).biases[0].shape == (2, 1, 3, 73)


@pytest.mark.parametrize("window", [None, 3])
def test_both_layouts_see_the_same_keys(window: int | None) -> None:
    rowwise, together = plan(True, window=window), plan(False, window=window).biases[0]
    for row, bias in enumerate(rowwise.biases):
        seen = bias[:, 0, 0] == 0
        length = 5 if row == 0 else 70
        assert torch.equal(seen[:, : length + 3], together[row, 0, :, : length + 3] == 0)
        assert not seen[:, length + 3 :].any()
        # Row 2 sees the anchor and itself, not its sibling; committed rows within the window.
        assert seen[2, length : length + 3].tolist() == [True, False, True]
        assert int(seen[2, :length].sum()) == (length if window is None else 1)
