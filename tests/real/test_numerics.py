"""The native decoder on the embedded model: transformers' logits in float32, row invariance in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from families import CPU, gap, make_adapter, prefill, prefilled, score
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specflow.draft.nn.linear import packed_status
from specflow.target.base import TargetOptions
from specflow.target.load import load_tokenizer, read_tensors, resolve_model
from specflow.target.store import ModelFiles
from specflow.target.transformer import NativeTarget

NUM_TOKENS = 256
MOST = 33
TEXT = """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once
or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what
is the use of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid),
whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when
suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say
to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she ought
to have wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually took a watch out of
its waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it flashed across her mind
that she had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning with
curiosity, she ran across the field after it, and fortunately was just in time to see it pop down a large rabbit-hole
under the hedge.
"""
"""Lewis Carroll, Alice's Adventures in Wonderland (1865), in the public domain."""


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def tokens(files: ModelFiles) -> Tensor:
    found = torch.tensor([load_tokenizer(files).encode(TEXT)])
    assert found.shape[1] >= NUM_TOKENS
    return found


@pytest.fixture(scope="module")
def plain(files: ModelFiles, tokens: Tensor) -> Tensor:
    """Logits of transformers itself.  # [1, NUM_TOKENS, V]"""
    model = AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        logits: Tensor = model(tokens[:, :NUM_TOKENS], use_cache=False).logits
    return logits


@pytest.fixture(scope="module")
def bfloat16(files: ModelFiles) -> NativeTarget:
    return load_native(files, torch.bfloat16)


def load_native(files: ModelFiles, dtype: torch.dtype) -> NativeTarget:
    config = AutoConfig.from_pretrained(files.directory, local_files_only=True)
    return NativeTarget(config, read_tensors(files.directory), TargetOptions(files.name, dtype, CPU, (2,)))


def test_native_logits_equal_transformers(files: ModelFiles, tokens: Tensor, plain: Tensor) -> None:
    target = load_native(files, torch.float32)
    cache = target.new_cache(1, 512)
    found = prefill(target, tokens[:, : NUM_TOKENS - 20], cache, chunk=100)
    found = torch.cat((found, score(target, tokens[:, NUM_TOKENS - 20 : NUM_TOKENS], cache).logits), dim=1)
    assert gap(found, plain) <= 2e-3
    assert torch.equal(found.argmax(-1), plain.argmax(-1))


def test_adapter_logits_equal_transformers(files: ModelFiles, tokens: Tensor, plain: Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32, local_files_only=True)
    target = make_adapter(model)
    found = prefill(target, tokens[:, :NUM_TOKENS], target.new_cache(1, 512), chunk=100)
    assert gap(found, plain) <= 2e-3
    assert torch.equal(found.argmax(-1), plain.argmax(-1))


def test_bfloat16_stays_near(bfloat16: NativeTarget, tokens: Tensor, plain: Tensor) -> None:
    found = score(bfloat16, tokens[:, :NUM_TOKENS], bfloat16.new_cache(1, 512)).logits
    assert found is not None
    same = (found.argmax(-1) == plain.argmax(-1)).float().mean()
    assert float(same) >= 0.9


def same_bits(found: Tensor | None, widest: Tensor) -> bool:
    return found is not None and torch.equal(found, widest[:, : found.shape[1]])


@pytest.mark.parametrize("context", [60, 127, 500])
def test_rows_keep_their_bits(bfloat16: NativeTarget, tokens: Tensor, context: int) -> None:
    """Every row count from 1 to 33; where packed linears cannot promise it here, the target says so."""
    if not packed_status()["row_invariant"]["bfloat16"]:  # type: ignore[index]
        assert bfloat16.info.exactness == "tie-exact"
        return
    assert bfloat16.info.exactness == "bit-exact"
    text = tokens.repeat(1, 2)
    cache = prefilled(bfloat16, [text[:, :context]], capacity=context + MOST)
    found = [score(bfloat16, text[:, context : context + count], cache).logits for count in range(1, MOST + 1)]
    widest = found[-1]
    assert widest is not None
    differing = [rows for rows in range(1, MOST + 1) if not same_bits(found[rows - 1], widest)]
    assert not differing


def test_two_threads_keep_bits_too(bfloat16: NativeTarget, tokens: Tensor) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cache = prefilled(bfloat16, [tokens[:, :127]])
        found = [score(bfloat16, tokens[:, 127 : 127 + count], cache).logits for count in (33, 5, 1)]
    finally:
        torch.set_num_threads(before)
    widest = found[0]
    assert widest is not None
    assert all(same_bits(each, widest) for each in found) or bfloat16.info.exactness == "tie-exact"


def test_ragged_rows_keep_their_bits(bfloat16: NativeTarget, tokens: Tensor) -> None:
    if bfloat16.info.exactness == "tie-exact":
        assert not packed_status()["row_invariant"]["bfloat16"]  # type: ignore[index]
        return
    prompts = [tokens[:, start : start + length] for start, length in ((0, 61), (30, 9), (5, 130))]
    fresh = torch.cat([tokens[:, 200 + 5 * row : 205 + 5 * row] for row in range(3)])
    together = score(bfloat16, fresh, prefilled(bfloat16, prompts)).logits
    for row, prompt in enumerate(prompts):
        alone = score(bfloat16, fresh[row : row + 1], prefilled(bfloat16, [prompt])).logits
        assert together is not None
        assert alone is not None
        assert torch.equal(together[row], alone[0])
