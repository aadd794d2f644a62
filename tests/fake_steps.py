"""Drafting networks of known behaviour: laws from tables, for every prefix. They ask tensors nothing in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from tiny import tiny_target
from torch import Tensor

from specflow.draft.base import Draw, Needs, SourceContext
from specflow.draft.parallel import Marginals, ParallelModel
from specflow.draft.steps import Frontier
from specflow.law import DraftVocabulary
from specflow.noise import RoundNoise
from specflow.target.base import Cache
from specflow.types import Observation

NUM_STATES = 997
DEEPEST = 16


class _Quiet:
    """Remembers nothing between rounds."""

    needs = Needs()
    most_positions = 10_000

    def __init__(self, vocabulary: DraftVocabulary | None = None, most_depth: int = DEEPEST) -> None:
        self.vocabulary, self.most_depth = vocabulary, most_depth
        self.num_rows = 0

    def reset(self, batch: int, num_nodes: int, cache: Cache) -> None:
        self.num_rows = num_nodes

    def start(self, row: int, prompt: Sequence[int]) -> None:
        pass

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        pass


class TableModel(_Quiet):
    """A law of its own after every prefix: the prefix chooses a row of a table of random logits.

    A row's prefix is read off the rows it sees, so a wrong mask gives a wrong law.
    """

    def __init__(self, num_draft: int, seed: int = 0, vocabulary: DraftVocabulary | None = None) -> None:
        super().__init__(vocabulary)
        draws = torch.Generator().manual_seed(seed)
        self.table = torch.randn(NUM_STATES, num_draft, generator=draws, dtype=torch.float64) * 2.0
        self.factors = torch.randint(1, NUM_STATES, (DEEPEST + 1,), generator=draws)
        self.frontiers: list[Frontier] = []

    def logits_after(self, anchor: int, prefix: Sequence[int]) -> Tensor:
        """# [Vd]"""
        state = sum(int(self.factors[level]) * (token + 1) for level, token in enumerate((anchor, *prefix)))
        return self.table[state % NUM_STATES]

    def open(self, anchors: Sequence[int], active: Sequence[bool]) -> TableSteps:
        self.frontiers = []
        return TableSteps(self, torch.tensor(anchors))


class TableSteps:
    def __init__(self, model: TableModel, anchors: Tensor) -> None:
        self._model = model
        self._root = model.factors[0] * (anchors.unsqueeze(1) + 1)  # [B, 1]
        self._parts = self._root[:, :0]  # [B, P] what each row adds to the states of those that see it
        self._level = 0
        self.hidden = self._root
        self.logits = self._read(self._root).squeeze(1)

    def extend(self, tokens: Tensor, frontier: Frontier | None = None) -> Tensor:
        self._level += 1
        self._parts = torch.cat((self._parts, self._model.factors[self._level] * (tokens + 1)), dim=1)
        if frontier is None:
            return self._read(self._root + self._parts.sum(1, keepdim=True))
        self._model.frontiers.append(frontier)
        return self._read(self._root + (frontier.visible * self._parts.unsqueeze(1)).sum(-1))

    def entry(self, last: Tensor) -> None:
        return None

    def _read(self, states: Tensor) -> Tensor:
        return self._model.table[states % NUM_STATES]


class TableMarginals(_Quiet):
    """Positions that are blind to each other: a table of logits for every anchor."""

    def __init__(self, num_draft: int, seed: int = 0, depth: int = DEEPEST) -> None:
        super().__init__(most_depth=depth)
        draws = torch.Generator().manual_seed(seed)
        self.table = torch.randn(64, depth, num_draft, generator=draws, dtype=torch.float64) * 2.0

    def marginals(self, anchors: Sequence[int], active: Sequence[bool]) -> Marginals:
        logits = self.table[list(anchors)]
        return Marginals(logits, logits[..., :2])


class TableCorrector:
    """A bias from the token before, and from the one before that by way of the state."""

    def __init__(self, num_draft: int, seed: int = 1) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.near = torch.randn(64, num_draft, generator=draws, dtype=torch.float64)
        self.far = torch.randn(64, num_draft, generator=draws, dtype=torch.float64)

    def begin(self, batch: int) -> Tensor:
        return torch.zeros(batch, 1, dtype=torch.int64)

    def correct(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.near[previous] + self.far[state.squeeze(-1)], previous.unsqueeze(-1)


class Prophet(_Quiet):
    """Marginals that know what vanilla will say: the true token is likeliest, second or nowhere, by position.

    Args:
        futures: What each request will say, in the order they start.
        vocab_size: V.
    """

    def __init__(self, futures: Sequence[Sequence[int]], vocab_size: int, depth: int = DEEPEST) -> None:
        super().__init__(most_depth=depth)
        self._futures, self._vocab_size = [list(future) for future in futures], vocab_size
        self._noise = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def reset(self, batch: int, num_nodes: int, cache: Cache) -> None:
        super().reset(batch, num_nodes, cache)
        self._waiting = list(self._futures)
        self._rows: list[list[int]] = [[]] * batch
        self._done = [0] * batch

    def start(self, row: int, prompt: Sequence[int]) -> None:
        self._rows[row], self._done[row] = self._waiting.pop(0), 0

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        for tokens, row in zip(observation.tokens, rows, strict=True):
            self._done[row] += len(tokens)

    def select(self, rows: Sequence[int]) -> None:
        self._rows, self._done = [self._rows[row] for row in rows], [self._done[row] for row in rows]

    def marginals(self, anchors: Sequence[int], active: Sequence[bool]) -> Marginals:
        logits = torch.stack([self._scores(row) for row in range(len(anchors))])
        return Marginals(logits, logits[..., :2])

    def _scores(self, row: int) -> Tensor:
        done = self._done[row]
        scores = self._noise[torch.arange(done, done + self.most_depth) % len(self._noise)].clone()
        for step, token in enumerate(self._rows[row][done : done + self.most_depth]):
            luck = (done + step) * 7 % 5
            if luck < 4:  # ahead of all other tokens, or just behind the first
                scores[step, token] = scores[step].max() + (3.0 if luck < 3 else -0.01)
        return scores


def context_of(vocab_size: int, k: int, draw: Draw = "greedy") -> SourceContext:
    """A target of which only the facts are asked."""
    info = replace(tiny_target().info, vocab_size=vocab_size)
    return SourceContext(target=SimpleNamespace(info=info), k=k, draw=draw)  # type: ignore[arg-type]


def cache_of(lengths: Sequence[int]) -> Cache:
    return SimpleNamespace(lengths=list(lengths), capacity=512)  # type: ignore[return-value]


def noise_of(starts: Sequence[int], first_seed: int = 7) -> RoundNoise:
    return RoundNoise([first_seed + row for row in range(len(starts))], starts, torch.device("cpu"))


def corrected(num_draft: int, depth: int, seed: int = 0) -> ParallelModel:
    return ParallelModel(TableMarginals(num_draft, seed, depth), TableCorrector(num_draft))
