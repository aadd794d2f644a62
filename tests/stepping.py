"""What tests of step-by-step drafters share: prompts, samplings, and the comparison with plain decoding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny import EOS, tiny_engine, tiny_target

from specflow.draft.base import Drafter
from specflow.target.transformer import NativeTarget
from specflow.types import Sampling

PROMPTS = [[3, 4, 5], [7], list(range(5, 40)), [9, 8]]
SAMPLINGS = [Sampling(temperature=T, seed=3, max_new_tokens=10, ignore_eos=True) for T in (0.0, 0.9)]
DEPTHS = (1, 3, 16)
NARROW: dict[str, dict[str, object]] = {
    "chain": {},
    "static": {"branch": 3, "nodes": 10},
    "beam": {"branch": 3, "nodes": 10},
    "best_first": {"nodes": 10},
    "sampled": {"widths": (2, 2, 1), "nodes": 10},
}
"""What makes a small tree of each shape."""


def same_text(make: Callable[[int], Drafter], target: NativeTarget) -> None:
    """Rule match says vanilla's text, alone and in a ragged batch, whatever is drafted and how deep."""
    plain = tiny_engine(k=0, batch=4, target=target)
    expected = [[done.tokens for done in plain.generate(PROMPTS, sampling)] for sampling in SAMPLINGS]
    for depth in DEPTHS:
        drafter = make(depth)
        for batch in (1, 4):
            engine = tiny_engine(drafter, k=depth, batch=batch, target=target)
            for sampling, texts in zip(SAMPLINGS, expected, strict=True):
                done = engine.generate(PROMPTS, sampling)
                assert [each.tokens for each in done] == texts, (sampling.temperature, depth, batch)
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
