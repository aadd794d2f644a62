"""What leaving sub-layers out would do to drafts, found by reading texts instead of writing them.

A drafter that stops at its first wrong token has, at every position it is judged, the target's own text before it. So
one pass over a finished greedy text says exactly which drafts would have stood: rows are cut into blocks of k, and a
row sees the target's true rows before its block and the draft's rows within it. That is some hundred times cheaper
than decoding, and ranks the sub-layers that a search then measures (Draft & Verify, 2309.08168, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import torch

from specflow.types import Skip

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.target.base import Cache, Target

__all__ = ["FinishedText", "Outlook", "PassCosts", "SkipMeter", "SubLayer", "grow_skips", "rank_sublayers"]

SubLayer = tuple[Literal["attention", "mlp"], int]
"""Kind and 0-based layer."""

_TOGETHER = 8
"""Texts of one pass."""


@dataclass(frozen=True, slots=True)
class FinishedText:
    """A prompt and what the target says after it, greedily."""

    tokens: tuple[int, ...]
    begin: int  # index of the first token of the answer


@dataclass(frozen=True, slots=True)
class Outlook:
    """How drafts of k tokens with some sub-layers left out would fare."""

    reached: tuple[float, ...]  # [k] share of blocks whose first 1, 2, ... k tokens all stand
    logprob: float  # mean log-probability that the draft gives to what the target says

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / rounds, if rounds began anywhere."""
        return 1.0 + sum(self.reached)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A batch of texts, ready to be read with any sub-layers left out."""

    cache: Cache  # their tokens
    tokens: Tensor  # [B, M] inputs of the rows to judge
    positions: Tensor  # [B, M]
    said: Tensor  # [B, M] what the target says after each


class SkipMeter:
    """Reads finished texts with sub-layers left out.

    Args:
        target: The model.
        texts: All are read as far as the shortest answer goes, in whole blocks.
        k: Draft tokens of a block.
    """

    def __init__(self, target: Target, texts: Sequence[FinishedText], k: int) -> None:
        self.target, self.k = target, k
        self._num_rows = min(len(text.tokens) - text.begin for text in texts) // k * k
        assert self._num_rows, f"an answer is shorter than {k} tokens"
        self._mask = self._block_mask()
        groups = [texts[first : first + _TOGETHER] for first in range(0, len(texts), _TOGETHER)]
        self._readings = [self._prepare(group) for group in groups]

    @torch.inference_mode()
    def measure(self, skip: Skip) -> Outlook:
        """How drafts without these sub-layers would fare."""
        agreed, logprobs = [], []
        for reading in self._readings:
            out = self.target.forward(
                reading.tokens, reading.positions, reading.cache, mask=self._mask, skip=skip, rows="last"
            )
            assert out.hidden_post is not None
            logits = self.target.score(out.hidden_post).float()
            agreed.append((logits.argmax(-1) == reading.said).view(-1, self.k))
            logprobs.append(logits.log_softmax(-1).gather(2, reading.said.unsqueeze(2)).flatten())
        reached = torch.cat(agreed).long().cumprod(1).double().mean(0)
        return Outlook(tuple(reached.tolist()), float(torch.cat(logprobs).mean()))

    def _block_mask(self) -> Tensor:
        """A row sees the committed rows before its block and, in its block, the rows up to itself.  # [1, M, 2 M]"""
        index = torch.arange(self._num_rows, device=self.target.info.device)
        block = index // self.k
        own = (block.unsqueeze(1) == block) & (index.unsqueeze(1) >= index)
        return torch.cat((block < block.unsqueeze(1), own), dim=1).unsqueeze(0)

    @torch.inference_mode()
    def _prepare(self, texts: Sequence[FinishedText]) -> _Reading:
        device, rows = self.target.info.device, self._num_rows
        cache = self.target.new_cache(len(texts), max(text.begin for text in texts) + 2 * rows)
        tokens, positions, said = [], [], []
        for row, text in enumerate(texts):
            count = text.begin + rows
            whole = torch.tensor([text.tokens[:count]], device=device)
            places = torch.arange(count, device=device).unsqueeze(0)
            view = cache.row(row)
            out = self.target.forward(whole, places, view, rows="last")
            view.keep([count])
            assert out.hidden_post is not None
            tokens.append(whole[:, text.begin :])
            positions.append(places[:, text.begin :])
            said.append(self.target.score(out.hidden_post[:, text.begin :]).argmax(-1))
        return _Reading(cache, torch.cat(tokens), torch.cat(positions), torch.cat(said))


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of passes at one context length."""

    plain_s: float  # one row through all layers
    block_s: float  # k + 1 rows through all layers
    attention_s: float  # what leaving one attention sub-layer out of a pass of one row saves
    mlp_s: float  # what leaving one MLP sub-layer out saves
    k: int

    @classmethod
    def measure(cls, target: Target, k: int, context: int = 128, repeats: int = 7) -> PassCosts:
        """Medians of repeated passes, taken in turns."""
        layers = frozenset(range(target.info.num_layers))
        cases = [(1, Skip()), (k + 1, Skip()), (1, Skip(attention=layers)), (1, Skip(mlp=layers))]
        cache = target.new_cache(1, context + k + 1)
        cache.keep([context])
        taken: list[list[float]] = [[] for _ in cases]
        for _ in range(repeats + 1):
            for times, (rows, skip) in zip(taken, cases, strict=True):
                tokens = torch.zeros(1, rows, dtype=torch.int64, device=target.info.device)
                positions = tokens + torch.arange(context, context + rows, device=target.info.device)
                began = perf_counter()
                float(target.forward(tokens, positions, cache, skip=skip).logits[0, 0, 0])  # waits for the device
                times.append(perf_counter() - began)
        plain, block, no_attention, no_mlp = (median(times[1:]) for times in taken)
        count = len(layers)
        return cls(plain, block, max(0.0, plain - no_attention) / count, max(0.0, plain - no_mlp) / count, k)

    def speed(self, skip: Skip, outlook: Outlook) -> float:
        """Expected tokens per second over those of plain decoding."""
        saved = len(skip.attention) * self.attention_s + len(skip.mlp) * self.mlp_s
        drafted = self.k * max(0.0, self.plain_s - saved)
        return outlook.acceptance_length * self.plain_s / (drafted + self.block_s)


def rank_sublayers(meter: SkipMeter, advance: Callable[[str], None] = lambda what: None) -> list[SubLayer]:
    """All sub-layers, the one whose absence the draft minds least first."""
    minded: dict[SubLayer, float] = {}
    for layer in range(meter.target.info.num_layers):
        pair: tuple[SubLayer, SubLayer] = (("attention", layer), ("mlp", layer))
        for sublayer in pair:
            minded[sublayer] = meter.measure(_with(Skip(), sublayer)).logprob
            advance(f"without {sublayer[0]} {layer}")
    return sorted(minded, key=lambda sublayer: -minded[sublayer])


def grow_skips(meter: SkipMeter, ranking: Sequence[SubLayer], costs: PassCosts, tries: int = 4) -> Iterator[Skip]:
    """Skip sets that grow by one sub-layer at a time: of the next few in the ranking, the one that promises most speed.

    Args:
        meter: Judges them.
        ranking: Sub-layers, most dispensable first.
        costs: Of passes here.
        tries: How many of the ranking are tried at each step.
    """
    left, skip = list(ranking), Skip()
    while left:
        found = [(sublayer, _with(skip, sublayer)) for sublayer in left[:tries]]
        promised = [costs.speed(larger, meter.measure(larger)) for _, larger in found]
        sublayer, skip = found[promised.index(max(promised))]
        left.remove(sublayer)
        yield skip


def _with(skip: Skip, sublayer: SubLayer) -> Skip:
    kind, layer = sublayer
    if kind == "attention":
        return Skip(skip.attention | {layer}, skip.mlp)
    return Skip(skip.attention, skip.mlp | {layer})
