"""Traces made up by chance, as `load_trace` gives them: no model, any number of positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tuner.recorded import Drafts, Trace, TracedRequest
from tuner.replay_types import DrafterInfo, TraceInfo


@dataclass(frozen=True)
class Made:
    """What a made-up drafter is like."""

    good: float = 0.6  # chance of a token to be the text's, about
    confidence_from: Literal["context", "prefix", "self"] | None = "prefix"
    copies: bool = False
    tree: bool = False
    sampled: bool = False
    absent: float = 0.1  # share of positions without a draft


def made_trace(drafters: Mapping[str, Made], lengths: Sequence[int], k: int, seed: int = 0) -> Trace:
    """A trace of requests of so many tokens each; some of them ended before their limit.

    Args:
        drafters: By name.
        lengths: Tokens of each request.
        k: Deepest draft position.
        seed: Of all chance.
    """
    dice, requests, first = np.random.default_rng(seed), [], 0
    for number, length in enumerate(lengths):
        end, most = first + length - 1, length + int(dice.integers(0, 2)) * 3
        prompt = int(dice.integers(1, 150))
        requests.append(TracedRequest(str(number), f"kind{number % 2}", prompt, length, most, first, end))
        first = end
    owner = np.repeat(np.arange(len(requests)), [each.end - each.first for each in requests])
    step = np.concatenate([np.arange(each.end - each.first) for each in requests])
    left = np.array([each.end - each.first for each in requests])[owner] - step
    drafts = {name: _drafts(name, made, (left, k), dice) for name, made in drafters.items()}
    infos = {name: each.info for name, each in drafts.items()}
    sampled = any(made.sampled for made in drafters.values())
    info = TraceInfo({}, {}, not sampled, infos, {}, len(requests), sum(lengths), ("kind0", "kind1"), {})
    return Trace(
        info,
        tuple(requests),
        owner,
        left,
        np.maximum(np.array([each.most for each in requests])[owner] - step - 2, 0),
        np.array([each.prompt_tokens for each in requests])[owner] + step,
        dice.random(len(owner)) if sampled else np.ones(len(owner)),
        drafts,
    )


def _drafts(name: str, made: Made, size: tuple[Any, int], dice: np.random.Generator) -> Drafts:
    left, k = size
    count = len(left)
    exact = tuple(range(1, k + 1))
    info = DrafterInfo(name, {}, k, made.tree, made.sampled, made.confidence_from, made.copies, exact)
    depth = np.where(dice.random(count) < made.absent, 0, np.minimum(dice.integers(1, 2 * k, count), k))
    agree = np.minimum(dice.geometric(1.0 - made.good, count) - 1, left)
    sure = (dice.random((count, k)) ** (0.5 * (1.0 - made.good))).astype(np.float32)
    if made.tree:
        columns = np.arange(1, k + 1)
        deep = np.minimum(columns, np.maximum(depth, 1)[:, None])
        return Drafts(info, np.minimum(agree[:, None], deep), deep, nodes=2 * deep - 1)
    own = sure if made.confidence_from else None
    law = (dice.random((count, k)) ** 0.4).astype(np.float32) if made.sampled else None
    return Drafts(
        info,
        agree=np.minimum(agree, depth),
        length=depth,
        tokens=np.zeros((count, k), np.int32),
        match=np.where(depth > 0, dice.geometric(0.1, count), 0) if made.copies else None,
        confidence=own,
        chance=own,
        law=law,
        law_confidence=law if own is not None else None,
    )
