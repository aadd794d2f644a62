"""Texts with made-up features, and what a drafter says of them round by round, its drafts being the text's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tiny import VOCAB, tiny_target
from torch import Tensor

from specflow.draft.base import SourceContext
from specflow.draft.borrowed import TargetTables
from specflow.draft.corrected import ParallelOptions, read_heads
from specflow.draft.nn.confidence import LinearConfidence
from specflow.draft.nn.weights import SeededTensors, WeightReader
from specflow.draft.onnx_parallel import GraphedModel
from specflow.draft.parallel import ParallelModel
from specflow.draft.registry import SourceInfo
from specflow.draft.trainable import Trainable
from specflow.train.batch import Batch, Slot
from specflow.train.drafting.corrected import Chains
from specflow.types import Features, Observation

TARGET = tiny_target(torch.float32)
TABLES = TargetTables(TARGET)
WIDTH = TARGET.info.hidden_size
TAPS = (-1, 0)
ANSWERS = ((3, 40), (9, 31), (26, 28), (35, 44))
"""Where the answer of each text begins and ends. The third has a single token pair, the fourth reaches the end."""

MakeModel = Callable[[ParallelOptions, WeightReader, SourceContext], GraphedModel]


def texts(key: int = 0, span: int = 44) -> Batch:
    """Four texts of random tokens with random features."""
    noise, count = torch.Generator().manual_seed(3), len(ANSWERS)
    positions = torch.arange(span)
    starts, ends = torch.tensor(ANSWERS).unsqueeze(-1).unbind(1)
    valid = positions < ends
    tokens = torch.randint(3, VOCAB, (count, span), generator=noise) * valid
    drawn = torch.randn(len(TAPS) + 1, count, span, WIDTH, generator=noise)
    features = Features(dict(zip(TAPS, drawn, strict=False)), hidden_post=drawn[-1])
    return Batch(tokens, valid, valid & (positions >= starts), features, key)


def trainable(source: SourceInfo, config: ParallelOptions, k: int, reduced: bool = False) -> Trainable:
    """Random weights, none of them zero; every third token is in a reduced vocabulary."""
    given = {"d2t": torch.arange(len(reduced_ids())) * 2 + 1} if reduced else {}
    assert source.trainable is not None
    made = source.trainable(config, context(config, k), SeededTensors(5, given))
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    return made


def reduced_ids() -> Tensor:
    return torch.arange(1, VOCAB, 3)


def context(config: ParallelOptions, k: int, draw: str = "greedy") -> SourceContext:
    dependency = "parallel" if config.corrector is None else "parallel+corrector"
    return SourceContext(TABLES, k, dependency, draw)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What drafting says of a chain for each text and anchor."""

    logits: list[Tensor]  # K of [n, Vd]
    sure: list[Tensor] | None  # K of [n] log-odds


def replay(made: Trainable, make: MakeModel, batch: Batch, places: Sequence[tuple[int, int]], k: int) -> Replayed:
    """One round of the drafter in each of some places, with the trained tensors as a checkpoint holds them.

    Args:
        made: Gives tensors and options.
        make: The source's network.
        batch: The texts.
        places: Text and position of each anchor.
        k: Draft positions to read.
    """
    options = made.options
    assert isinstance(options, ParallelOptions)
    reader = WeightReader(made.state(), "trained", torch.empty(0))
    network = make(options, reader, context(options, k))
    heads = read_heads(network, options, reader, context(options, k))
    reader.close()
    model = ParallelModel(network, heads.corrector)
    cache = TARGET.new_cache(len(places), batch.tokens.shape[1] + 16)
    model.reset(len(places), model.most_depth, cache)
    counts = tuple(anchor for _, anchor in places)
    rows = [text for text, _ in places]
    model.observe(Observation(_said(batch, places), (0,) * len(places), counts, _picked(batch, rows)), range(len(rows)))
    cache.keep(counts)
    before = [batch.tokens[text, anchor] for text, anchor in places]
    steps = model.open([int(token) for token in before], [True] * len(places))
    logits, sure = [steps.logits], [_odds(heads.confidence, steps.hidden, torch.stack(before))]
    for ahead in range(1, k):
        forced = torch.stack([batch.tokens.roll(-ahead, 1)[text, anchor] for text, anchor in places])
        logits.append(steps.extend(forced.unsqueeze(1)).squeeze(1))
        sure.append(_odds(heads.confidence, steps.hidden, forced))
    return Replayed(logits, None if heads.confidence is None else [each for each in sure if each is not None])


def check_slots(slots: Sequence[Slot], batch: Batch, places: Sequence[tuple[int, int]], expected: Replayed) -> None:
    """Slots of chains in these places, where all that was drafted is of the answer, are what drafting says."""
    chains = Chains.of(batch, *torch.tensor(places).unbind(1), len(slots))
    assert sum(int(slot.known.sum()) for slot in slots) > 60
    for k, slot in enumerate(slots):
        assert torch.equal(slot.at[slot.known], chains.at[k][slot.known])
        assert torch.equal(slot.known, torch.tensor([judged(text, anchor + k) for text, anchor in places]))
        torch.testing.assert_close(slot.logits[slot.known], expected.logits[k][slot.known], atol=2e-5, rtol=1e-5)
        assert (slot.confidence is None) == (expected.sure is None)
        if slot.confidence is not None and expected.sure is not None:
            known = slot.known
            torch.testing.assert_close(slot.confidence[known], expected.sure[k][known], atol=2e-5, rtol=1e-5)


def judged(text: int, position: int) -> bool:
    """Whether the token after a position is of the answer."""
    start, end = ANSWERS[text]
    return start <= position + 1 < end


def all_places() -> list[tuple[int, int]]:
    """Every anchor that is of an answer and followed by a token of it."""
    return [(text, at) for text, (start, end) in enumerate(ANSWERS) for at in range(start, end - 1)]


def _said(batch: Batch, places: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """The token after each committed position."""
    return tuple(tuple(batch.tokens[text, 1 : anchor + 1].tolist()) for text, anchor in places)


def _picked(batch: Batch, rows: Sequence[int]) -> Features:
    hidden = batch.features.hidden_post
    assert hidden is not None
    taps = {tap: values[list(rows)] for tap, values in batch.features.taps.items()}
    return Features(taps, hidden_post=hidden[list(rows)])


def _odds(head: LinearConfidence | None, hidden: Tensor, before: Tensor) -> Tensor | None:
    return None if head is None else head.logits(hidden, before)
