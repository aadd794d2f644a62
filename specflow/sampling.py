"""From the target's logits to its law: processors, then temperature and truncation.

Processors act at every row of a pass with that row's own prefix: the committed text, then the draft tokens on the path
to it. A row of the batch is only touched by its own settings. Every step treats each row of logits alone, so a row has
the same law in a pass of one row and of many.

Semantics, where engines differ:
    temperature   below 1e-5 is greedy (as in vLLM): arg-max of the processed logits, ties to the lowest id
    penalties     repetition counts prompt and text, presence and frequency count the text alone (as in vLLM)
    top-k         exactly k tokens stay; ties go to the lowest ids
    top-p         acts on what top-k left: the smallest set whose probability is at least p, ties to the lowest ids
    min-p         acts after temperature, against the most likely token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from specflow.types import PAD, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.types import DraftBlock, TargetOutput

__all__ = ["BatchSampler", "PickedLaw", "TargetLaw", "draw_tokens", "is_greedy", "lowest_argmax", "warp"]

GREEDY_BELOW = 1e-5
RUN = 128  # long rows are searched in two steps: the run of this many entries, then the entry


def lowest_argmax(scores: Tensor) -> Tensor:
    """Index of the largest score, the lowest one of equals.  # [..., V] -> [...] int64

    On CPUs torch's arg-max is scalar code, several times slower than the maximum itself. Numpy's is not, for the types
    it knows as numbers; for others maxima of runs first.
    """
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    if scores.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.asarray(scores.detach().numpy().argmax(-1)))
    runs = _in_runs(scores, -torch.inf)
    best = runs.amax(-1).argmax(-1, keepdim=True)
    return best.squeeze(-1) * RUN + _pick_run(runs, best).argmax(-1)


def draw_tokens(weights: Tensor, u: Tensor) -> Tensor:
    """First token at which the running sum exceeds u times the total: never a token of weight 0.

    Drafters draw with it too, from the very tensor they hand on as their law.

    Args:
        weights: Probabilities up to a factor.  # [..., V]
        u: Numbers in [0, 1).  # [...] float64

    Returns:
        Token ids.  # [...] int64
    """
    runs = _in_runs(weights, 0.0)
    sums = runs.sum(-1).cumsum(-1, dtype=torch.float64)
    mass = u.unsqueeze(-1) * sums[..., -1:]
    run, before = _search(sums, mass)
    index, _ = _search(_pick_run(runs, run).cumsum(-1, dtype=torch.float64), mass - before)
    return (run * RUN + index).squeeze(-1)


def is_greedy(sampling: Sampling) -> bool:
    """Whether a request takes the most likely token."""
    return sampling.temperature < GREEDY_BELOW


def warp(logits: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Probabilities after temperature and truncation, as each request asks; one-hot where it is greedy.

    Args:
        logits: Over any vocabulary.  # [B, R, V]
        rows: How each row samples.  # [B]

    Returns:
        What to draw from.  # [B, R, V] float32 or wider
    """
    scores = _wide(logits)
    return TargetLaw(logits, _warped(scores, rows), [is_greedy(row) for row in rows]).probs()


def _search(sums: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose running sum exceeds the mass, and the sum before it.  # [..., R], [..., 1] -> [..., 1] twice

    A mass at or past the end finds the last index with a weight: rounding never leads out of the law.
    """
    last = sums[..., -1:]
    index = torch.searchsorted(sums, torch.minimum(mass, torch.nextafter(last, torch.zeros_like(last))), right=True)
    return index, sums.gather(-1, (index - 1).clamp_min(0)) * (index > 0)


def _in_runs(values: Tensor, fill: float) -> Tensor:
    """The last dimension cut into runs; few vocabularies need the padding.  # [..., V] -> [..., V / RUN, RUN]"""
    short = -values.shape[-1] % RUN
    padded = F.pad(values, (0, short), value=fill) if short else values
    return padded.reshape(*values.shape[:-1], -1, RUN)


def _pick_run(runs: Tensor, index: Tensor) -> Tensor:
    """# [..., R, RUN], [..., 1] -> [..., RUN]"""
    return runs.gather(-2, index.unsqueeze(-1).expand(*index.shape, RUN)).squeeze(-2)


class TargetLaw:
    """The target's distribution at every row of a pass, computed as far as it is asked for.

    Args:
        raw: The logits as the target gave them.  # [B, M, V]
        logits: The same after all processing; -inf where a token is impossible.  # [B, M, V]
        greedy_rows: Batch rows that take the most likely token.  # [B]
    """

    def __init__(self, raw: Tensor, logits: Tensor, greedy_rows: Sequence[bool]) -> None:
        self._raw, self.logits = raw, logits
        self.greedy = all(greedy_rows)
        self._greedy_rows = greedy_rows
        self._probs: Tensor | None = None

    def probs(self) -> Tensor:
        """Probabilities; one-hot in greedy rows.  # [B, M, V] float32 or wider"""
        if self._probs is None:
            probs = _wide(self.logits).softmax(-1)
            if any(self._greedy_rows):
                best = lowest_argmax(self.logits).unsqueeze(-1)
                rows = torch.tensor(self._greedy_rows, device=probs.device).view(-1, 1, 1)
                probs = torch.where(rows, torch.zeros_like(probs).scatter_(-1, best, 1.0), probs)
            self._probs = probs
        return self._probs

    def draw(self, u: Tensor | None = None) -> Tensor:
        """A token for every row of the pass; greedy laws need no numbers.

        Args:
            u: Numbers in [0, 1).  # [B, M] float64

        Returns:
            Token ids.  # [B, M] int64
        """
        if self.greedy:
            return lowest_argmax(self.logits)
        assert u is not None, "a sampled law needs numbers"
        return draw_tokens(self.probs(), u)

    def logprob(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Log-probability of tokens under the raw logits, before any processing (as in vLLM).

        Args:
            tokens: Token ids; where one is PAD the result means nothing.  # [B, R]
            rows: The row of the pass that scores each.  # [B, R]

        Returns:
            Natural logarithms.  # [B, R] float32 or wider
        """
        row, scores = rows.clamp_min(0), self._raw
        if rows.shape[1] < scores.shape[1]:  # a tree, most of whose rows are on no path
            scores = scores[torch.arange(len(rows), device=rows.device).unsqueeze(1), row]  # [B, R, V]
            row = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
        scores = _wide(scores)
        chosen = scores.flatten(1).gather(1, row * scores.shape[-1] + tokens.clamp_min(0))
        return chosen - scores.logsumexp(-1).gather(1, row)


class PickedLaw(TargetLaw):
    """The law of greedy rows of which nothing but the likeliest tokens is known: there are no logits.

    Args:
        picked: The most likely token of every row of the pass.  # [B, M]
        vocab_size: V.
    """

    def __init__(self, picked: Tensor, vocab_size: int) -> None:
        nothing = torch.empty(*picked.shape, 0, device=picked.device)
        super().__init__(nothing, nothing, [True] * len(picked))
        self._picked, self._vocab_size = picked, vocab_size

    def probs(self) -> Tensor:
        if self._probs is None:
            shape = *self._picked.shape, self._vocab_size
            zeros = torch.zeros(shape, device=self._picked.device)
            self._probs = zeros.scatter_(-1, self._picked.unsqueeze(-1), 1.0)
        return self._probs

    def draw(self, u: Tensor | None = None) -> Tensor:
        return self._picked

    def logprob(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Requests that ask for them are scored, not picked for."""
        raise AssertionError("tokens that were picked without logits have no log-probabilities")


@dataclass(frozen=True, slots=True)
class _Prefixes:
    """What precedes each row of a pass, beyond the committed text."""

    depth: Tensor  # [M]
    ancestors: Tensor  # [M, M]
    tokens: Tensor  # [N]

    def occurrences(self, ids: Tensor) -> Tensor:
        """How often ids occur on the path to each row.  # [U] -> [M, U] float32"""
        return self.ancestors[:, 1:].float() @ (self.tokens.unsqueeze(1) == ids).float()


class _RowState:
    """One request's settings, and the tokens its penalties count."""

    def __init__(self, sampling: Sampling, vocab_size: int, model_stops: Sequence[int], device: torch.device) -> None:
        self.sampling = sampling
        self.greedy = is_greedy(sampling)
        neutral = sampling.repetition_penalty == 1.0 and not (sampling.presence_penalty or sampling.frequency_penalty)
        self._seen = None if neutral else _Seen(vocab_size, device)
        self._edits = not neutral or bool(sampling.logit_bias)
        self._bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float64, device=device)
        self._stop_ids = torch.tensor(sorted(sampling.stops(model_stops)), dtype=torch.int64, device=device)

    def count(self, tokens: Sequence[int], prompt: bool = False) -> None:
        """Let the penalties know of tokens of the prompt or of the text."""
        if self._seen is not None:
            self._seen.add([token for token in tokens if token != PAD], prompt)

    def edits(self, generated: int) -> bool:
        """Whether any processor changes this round's logits, given how many tokens the text has."""
        return self._edits or generated < self.sampling.min_new_tokens

    def edit(self, scores: Tensor, prefixes: _Prefixes, generated: int) -> None:
        """Apply the processors in place.  # scores [M, V]"""
        scores.index_add_(1, self._bias_ids, self._bias.to(scores.dtype).expand(len(scores), -1))
        if self._seen is not None:
            self._penalise(scores, prefixes, self._seen)
        early = prefixes.depth < self.sampling.min_new_tokens - generated  # [M]
        banned = torch.where(early.unsqueeze(1), -torch.inf, scores[:, self._stop_ids])
        scores.index_copy_(1, self._stop_ids, banned)

    def _penalise(self, scores: Tensor, prefixes: _Prefixes, seen: _Seen) -> None:
        """Only ids that occur somewhere are touched. One may occur twice in the list; both get the same value."""
        options = self.sampling
        ids = torch.cat((seen.ids, prefixes.tokens.clamp_min(0)))  # [U]
        counts = (seen.counts[ids] + prefixes.occurrences(ids)).to(scores.dtype)  # [M, U]
        found, in_text = scores[:, ids], counts > 0
        lowered = torch.where(found > 0, found / options.repetition_penalty, found * options.repetition_penalty)
        found = torch.where(in_text | seen.in_prompt[ids], lowered, found)
        found = found - options.presence_penalty * in_text.to(found.dtype) - options.frequency_penalty * counts
        scores.index_copy_(1, ids, found)


class _Seen:
    """Which tokens occur in a request's prompt and text, for penalties."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(vocab_size, device=device)  # [V] occurrences in the text
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # [V]
        self.ids = torch.empty(0, dtype=torch.int64, device=device)  # [U] all that occur, each once
        self._known: set[int] = set()

    def add(self, tokens: Sequence[int], prompt: bool) -> None:
        """Tokens that became part of the prompt or of the text."""
        new = torch.tensor(tokens, dtype=torch.int64, device=self.ids.device)
        if prompt:
            self.in_prompt[new] = True
        else:
            self.counts.index_add_(0, new, torch.ones(len(new), device=new.device))
        fresh = [token for token in dict.fromkeys(tokens) if token not in self._known]
        self._known.update(fresh)
        self.ids = torch.cat((self.ids, torch.tensor(fresh, dtype=torch.int64, device=new.device)))


class BatchSampler:
    """Sampling settings of the rows of a batch; turns a pass's logits into the law the rules verify against.

    Args:
        vocab_size: V.
        stop_ids: The model's own stop ids.
        device: Where logits live.
    """

    def __init__(self, vocab_size: int, stop_ids: Sequence[int], device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._stop_ids = tuple(token for token in stop_ids if token < vocab_size)  # checkpoints may name others
        self._rows: list[_RowState] = []

    def reset(self, batch: int) -> None:
        """Forget all requests; the next ones use rows 0 .. batch - 1, greedy until they start."""
        self._rows = [self._state(Sampling()) for _ in range(batch)]

    def start(self, row: int, sampling: Sampling, seed: int, prompt: Sequence[int]) -> None:
        """A new request takes this row. Its seed is used by `RoundNoise`, so none is kept here."""
        state = self._state(sampling)
        state.count(prompt, prompt=True)
        self._rows[row] = state

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self._rows = [self._rows[row] for row in rows]

    def commit(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Tokens that became part of each row's text, every one of them counted."""
        for row, new in zip(rows, tokens, strict=True):
            self._rows[row].count(new)

    def law(
        self, logits: Tensor, block: DraftBlock, generated: Sequence[int], rows: Sequence[int] | None = None
    ) -> TargetLaw:
        """The law at every row of a pass.

        Args:
            logits: What the target said.  # [B, M, V]
            block: What was drafted.
            generated: Tokens of each row's text so far.  # [B]
            rows: Rows of the batch the logits belong to; None for all.
        """
        states = self._rows if rows is None else [self._rows[row] for row in rows]
        greedy = [state.greedy for state in states]
        edited = [b for b, state in enumerate(states) if state.edits(generated[b])]
        if all(greedy) and not edited:
            return TargetLaw(logits, logits, greedy)
        scores = _wide(logits).clone() if edited else _wide(logits)
        shape = block.topology
        for b in edited:
            own = b if len(shape.depth) > 1 else 0
            prefixes = _Prefixes(shape.depth[own], shape.ancestors[own], block.tokens[b])
            states[b].edit(scores[b], prefixes, generated[b])
        return TargetLaw(logits, _warped(scores, [state.sampling for state in states]), greedy)

    def takes_likeliest(self, generated: Sequence[int]) -> bool:
        """Whether all rows of the batch are greedy and no processor changes their logits this round.

        Args:
            generated: Tokens of each row's text so far.  # [B]
        """
        pairs = zip(self._rows, generated, strict=True)
        return all(state.greedy and not state.edits(count) for state, count in pairs)

    def law_of(self, output: TargetOutput, block: DraftBlock, generated: Sequence[int]) -> TargetLaw:
        """As `law`, of a pass over all rows of the batch, whether it scored tokens or picked the likeliest."""
        if output.picked is not None:
            return PickedLaw(output.picked, self._vocab_size)
        return self.law(output.logits, block, generated)

    def _state(self, sampling: Sampling) -> _RowState:
        return _RowState(sampling, self._vocab_size, self._stop_ids, self._device)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _warped(scores: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Temperature and truncation of the sampled rows; rows of equal settings go together.  # [B, M, V] -> [B, M, V]"""
    temperatures = [1.0 if is_greedy(row) else row.temperature for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        scores = scores / torch.tensor(temperatures, dtype=scores.dtype, device=scores.device).view(-1, 1, 1)
    groups: dict[tuple[int, float, float], list[int]] = {}
    for b, row in enumerate(rows):
        truncation = row.top_k, row.top_p, row.min_p
        if not is_greedy(row) and truncation != (0, 1.0, 0.0):
            groups.setdefault(truncation, []).append(b)
    for truncation, members in groups.items():
        if len(members) == len(rows):
            return _truncated(scores, *truncation)
        index = torch.tensor(members, device=scores.device)
        scores = scores.index_copy(0, index, _truncated(scores[index], *truncation))
    return scores


def _truncated(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """All but the best tokens made impossible.  # [..., V] -> [..., V]"""
    limited = 0 < top_k < scores.shape[-1]
    if limited or top_p < 1.0:
        kept = scores.topk(top_k).values.flip(-1) if limited else _ascending(scores)
        lowest = torch.zeros_like(kept[..., :1], dtype=torch.int64)
        if top_p < 1.0:
            share = torch.full_like(kept[..., 0], 1.0 - top_p, dtype=torch.float64)  # what may be dropped
            lowest = draw_tokens(kept.softmax(-1), share).unsqueeze(-1)
        worst = kept.gather(-1, lowest)
        tied = scores == worst
        room = (torch.searchsorted(kept, worst, right=True) - lowest).int()  # how many of the tied stay
        dropped = (scores < worst) | (tied & (tied.cumsum(-1, dtype=torch.int32) > room))
        scores = scores.masked_fill(dropped, -torch.inf)
    if min_p > 0.0:
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + log(min_p), -torch.inf)
    return scores


def _ascending(scores: Tensor) -> Tensor:
    """Sorted values. On CPUs numpy sorts them with vector instructions, over ten times faster.  # [..., V]"""
    if scores.device.type != "cpu":
        return scores.sort(-1).values
    return torch.from_numpy(np.sort(scores.detach().numpy(), axis=-1))
