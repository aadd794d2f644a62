"""What tests of step-by-step drafters share: prompts, samplings, and the comparison with plain decoding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny import EOS, tiny_engine, tiny_target

from specflow.draft.base import Drafter
from specflow.target.transformer import NativeTarget
from specflow.types import Sampling

PROMPTS = [[3, 4, 5], [7], list(range(5, 45)), [9, 8]]
SAMPLINGS = [Sampling(temperature=T, seed=3, max_new_tokens=14, ignore_eos=True) for T in (0.0, 0.9)]
DEPTHS = (1, 2, 3, 5, 8, 16)


def same_text(make: Callable[[int], Drafter], target: NativeTarget) -> None:
    """Rule match says vanilla's text, alone and in a ragged batch, whatever is drafted and how deep."""
    for sampling in SAMPLINGS:
        plain = [done.tokens for done in tiny_engine(k=0, target=target).generate(PROMPTS, sampling)]
        for depth in DEPTHS:
            drafter = make(depth)
            for batch in (1, 4):
                engine = tiny_engine(drafter, k=depth, batch=batch, target=target)
                done = engine.generate(PROMPTS, sampling)
                assert [each.tokens for each in done] == plain, (sampling.temperature, depth, batch)
                assert all(each.counts.num_draft_tokens for each in done)


def plain_embedding_target() -> NativeTarget:
    """A target whose layers add nothing: the next token follows from the last one's embedding alone."""
    target = tiny_target(seed=3)
    with torch.no_grad():
        for block in target.blocks:
            block.out.weight.zero_()
            block.down.weight.zero_()
    assert EOS in target.info.stop_ids
    return target
