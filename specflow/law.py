"""Draft laws: what the tokens of a block were drawn from, in the smallest form that says it.

All implement `types.Law`. A law holds the distribution the tokens were really sampled from, after every processor and
in the precision of the draw (a draft sampled in bfloat16 against a float32 law biases the text), so probabilities
below float32 are refused.

The excess mass of a small law follows from the few entries where q is not 0: p has mass 1, so the sum of
max(s p - q, 0) is s minus the sum of min(s p, q).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from specflow.errors import GraphError

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.types import Law

__all__ = ["ByRow", "Dense", "DraftVocabulary", "PointMass", "Reduced", "Sparse"]


class PointMass:
    """Tokens chosen deterministically from their prefix (copies, arg-max drafts, beams): q is 1 on the token.

    Args:
        tokens: The drafted tokens, PAD where a row has none.  # [B, N] int64
        vocab_size: V.
    """

    is_point = True

    def __init__(self, tokens: Tensor, vocab_size: int) -> None:
        self.tokens, self.vocab_size = tokens, vocab_size

    def prob(self) -> Tensor:
        """One everywhere.  # [B, N] float32"""
        return torch.ones(self.tokens.shape, device=self.tokens.device)

    def excess_mass(self, scale: Tensor, p: Tensor) -> Tensor:
        """What is left of p without the drafted token.  # [B, N], [B, N, V] -> [B, N] float64"""
        drafted = p.gather(-1, self.tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return scale.double() * (1.0 - drafted.double()).clamp_min_(0.0)

    def excess_at(self, node: Tensor, scaled_p: Tensor) -> Tensor:
        """scaled_p without the drafted token: no probability exceeds 1.  # [B], [B, V] -> [B, V]"""
        return scaled_p.scatter(-1, self.tokens.gather(1, node.unsqueeze(1)).clamp_min(0), 0.0)

    def row(self, node: Tensor) -> Tensor:
        """# [B] -> [B, V]"""
        token = self.tokens.gather(1, node.unsqueeze(1)).clamp_min(0)
        return torch.zeros(len(node), self.vocab_size, device=node.device).scatter_(1, token, 1.0)

    def narrow(self, width: int) -> PointMass:
        return PointMass(self.tokens[:, :width], self.vocab_size)


class Dense:
    """Tokens sampled from a distribution over the whole vocabulary.

    Args:
        tokens: The drafted tokens, PAD where a row has none.  # [B, N] int64
        probs: What each was sampled from, given its prefix.  # [B, N, V] float32 or wider
    """

    is_point = False

    def __init__(self, tokens: Tensor, probs: Tensor) -> None:
        self.tokens, self.probs = tokens, _checked(probs)
        self.vocab_size = int(probs.shape[-1])

    def prob(self) -> Tensor:
        """# [B, N]"""
        found = self.probs.gather(-1, self.tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return found.masked_fill(self.tokens < 0, 1.0)

    def excess_mass(self, scale: Tensor, p: Tensor) -> Tensor:
        """# [B, N], [B, N, V] -> [B, N] float64"""
        return (scale.unsqueeze(-1) * p - self.probs).clamp_min_(0.0).sum(-1, dtype=torch.float64)

    def excess_at(self, node: Tensor, scaled_p: Tensor) -> Tensor:
        """# [B], [B, V] -> [B, V]"""
        return (scaled_p - _at(self.probs, node)).clamp_min_(0.0)

    def row(self, node: Tensor) -> Tensor:
        """# [B] -> [B, V]"""
        return _at(self.probs, node)

    def narrow(self, width: int) -> Dense:
        return Dense(self.tokens[:, :width], self.probs[:, :width])


class DraftVocabulary:
    """A smaller vocabulary, each id of which is one id of the target's. Made once, with the drafter.

    Args:
        to_target: Target id of each draft id, without repeats.  # [Vd] int64
        vocab_size: V.
    """

    def __init__(self, to_target: Tensor, vocab_size: int) -> None:
        self.to_target, self.vocab_size = to_target, vocab_size
        self.from_target = torch.full((vocab_size,), -1, device=to_target.device)  # [V] -1 where it has no such token
        self.from_target[to_target] = torch.arange(len(to_target), device=to_target.device)


class Reduced:
    """Tokens sampled from a smaller draft vocabulary.

    Args:
        tokens: The drafted tokens as target ids, PAD where a row has none.  # [B, N] int64
        probs: Over the draft vocabulary.  # [B, N, Vd] float32 or wider
        vocabulary: What its ids mean.
    """

    is_point = False

    def __init__(self, tokens: Tensor, probs: Tensor, vocabulary: DraftVocabulary) -> None:
        self.tokens, self.probs = tokens, _checked(probs)
        self.vocabulary, self.vocab_size = vocabulary, vocabulary.vocab_size

    def prob(self) -> Tensor:
        """0 for a token the draft vocabulary lacks.  # [B, N]"""
        index = self.vocabulary.from_target[self.tokens.clamp_min(0)]
        found = self.probs.gather(-1, index.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return found.masked_fill(index < 0, 0.0).masked_fill(self.tokens < 0, 1.0)

    def excess_mass(self, scale: Tensor, p: Tensor) -> Tensor:
        """# [B, N], [B, N, V] -> [B, N] float64"""
        return _excess_of_few(scale, p[..., self.vocabulary.to_target], self.probs)

    def excess_at(self, node: Tensor, scaled_p: Tensor) -> Tensor:
        """Tokens outside the draft vocabulary keep all of scaled_p.  # [B], [B, V] -> [B, V]"""
        ids = self.vocabulary.to_target
        left = (scaled_p[:, ids] - _at(self.probs, node)).clamp_min_(0.0)
        return scaled_p.index_copy(-1, ids, left.to(scaled_p.dtype))

    def row(self, node: Tensor) -> Tensor:
        """# [B] -> [B, V]"""
        found = _at(self.probs, node)
        return found.new_zeros(len(found), self.vocab_size).index_copy_(1, self.vocabulary.to_target, found)

    def narrow(self, width: int) -> Reduced:
        return Reduced(self.tokens[:, :width], self.probs[:, :width], self.vocabulary)


class Sparse:
    """Tokens sampled from a few candidates at each position.

    Args:
        tokens: The drafted tokens, PAD where a row has none.  # [B, N] int64
        ids: Candidates, PAD in unused places; probabilities of a repeated id add up.  # [B, N, C] int64
        probs: Of the candidates.  # [B, N, C] float32 or wider
        vocab_size: V.
    """

    is_point = False

    def __init__(self, tokens: Tensor, ids: Tensor, probs: Tensor, vocab_size: int) -> None:
        self.tokens, self.vocab_size = tokens, vocab_size
        self.ids = ids.clamp_min(0)
        self.probs = _checked(probs).masked_fill(ids < 0, 0.0)

    def prob(self) -> Tensor:
        """# [B, N]"""
        found = self.probs.masked_fill(self.ids != self.tokens.unsqueeze(-1), 0.0).sum(-1)
        return found.masked_fill(self.tokens < 0, 1.0)

    def excess_mass(self, scale: Tensor, p: Tensor) -> Tensor:
        """# [B, N], [B, N, V] -> [B, N] float64"""
        same = self.ids.unsqueeze(-1) == self.ids.unsqueeze(-2)  # [B, N, C, C]
        merged = torch.where(same, self.probs.unsqueeze(-2), 0.0).sum(-1)
        repeated = same.tril(-1).any(-1)
        return _excess_of_few(scale, p.gather(-1, self.ids), merged.masked_fill(repeated, 0.0))

    def excess_at(self, node: Tensor, scaled_p: Tensor) -> Tensor:
        """# [B], [B, V] -> [B, V]"""
        wide = torch.promote_types(scaled_p.dtype, self.probs.dtype)
        return scaled_p.to(wide).scatter_add(-1, _at(self.ids, node), -_at(self.probs, node).to(wide)).clamp_min_(0.0)

    def row(self, node: Tensor) -> Tensor:
        """# [B] -> [B, V]"""
        found = _at(self.probs, node)
        return found.new_zeros(len(found), self.vocab_size).scatter_add_(1, _at(self.ids, node), found)

    def narrow(self, width: int) -> Sparse:
        return Sparse(self.tokens[:, :width], self.ids[:, :width], self.probs[:, :width], self.vocab_size)


class ByRow:
    """Blocks of several drafters in one batch, each row with the law of its own.

    Args:
        laws: Each over the whole batch; rows that it does not serve mean nothing.  # of [B, N_i] nodes
        widths: Nodes of each law.  # N_i
        serves: Number of the law of each row.  # [B] int64
        width: N, the widest.
    """

    def __init__(self, laws: Sequence[Law], widths: Sequence[int], serves: Tensor, width: int) -> None:
        self._laws, self._widths, self._serves, self._width = laws, widths, serves, width
        self.is_point = all(law.is_point for law in laws)

    def prob(self) -> Tensor:
        """# [B, N]"""
        return self._of_nodes((law.prob() for law in self._laws), 1.0)

    def excess_mass(self, scale: Tensor, p: Tensor) -> Tensor:
        """# [B, N], [B, N, V] -> [B, N] float64"""
        each = zip(self._laws, self._widths, strict=True)
        return self._of_nodes((law.excess_mass(scale[:, :width], p[:, :width]) for law, width in each), 0.0)

    def excess_at(self, node: Tensor, scaled_p: Tensor) -> Tensor:
        """# [B], [B, V] -> [B, V]"""
        each = zip(self._laws, self._widths, strict=True)
        return self._of_rows(law.excess_at(node.clamp_max(width - 1), scaled_p) for law, width in each)

    def row(self, node: Tensor) -> Tensor:
        """# [B] -> [B, V]"""
        each = zip(self._laws, self._widths, strict=True)
        return self._of_rows(law.row(node.clamp_max(width - 1)) for law, width in each)

    def narrow(self, width: int) -> ByRow:
        widths = [min(each, width) for each in self._widths]
        laws = [law.narrow(each) for law, each in zip(self._laws, widths, strict=True)]
        return ByRow(laws, widths, self._serves, width)

    def _of_nodes(self, values: Iterable[Tensor], spare: float) -> Tensor:
        """Each row from its law; nodes past a law's own are PAD.  # [B, N_i] each -> [B, N]"""
        return self._of_rows(F.pad(each, (0, self._width - each.shape[1]), value=spare) for each in values)

    def _of_rows(self, values: Iterable[Tensor]) -> Tensor:
        """# [B, X] each -> [B, X]"""
        first, *others = values
        for number, other in enumerate(others, start=1):
            first = torch.where((self._serves == number).unsqueeze(1), other, first)
        return first


def _excess_of_few(scale: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Excess mass from the entries that hold all of q.  # [B, N], [B, N, C] twice -> [B, N] float64"""
    met = torch.minimum(scale.unsqueeze(-1) * p, q).sum(-1, dtype=torch.float64)
    return (scale.double() - met).clamp_min_(0.0)


def _at(values: Tensor, node: Tensor) -> Tensor:
    """One node of each row.  # [B, N, C], [B] -> [B, C]"""
    return values[torch.arange(len(node), device=node.device), node]


def _checked(probs: Tensor) -> Tensor:
    if probs.dtype not in (torch.float32, torch.float64):
        raise GraphError(
            "draft law",
            f"probabilities in {str(probs.dtype).removeprefix('torch.')}",
            "float32 or wider",
            "take the draft's softmax in float32, sample from it, and pass on what was sampled from",
        )
    return probs
