"""The arg-max of a float32 head, found without reading most of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from specflow.onnx.graphs import GraphSet, Precision
from specflow.onnx.screen import rounding_share, write_screen
from specflow.onnx.session import OnnxSession, Place

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["SATURATES", "ScreenedHead", "screens_hold"]

SATURATES = "sums of products of bytes saturate on this CPU"
"""What `ScreenedHead.holds` finds where it is false."""

_LEAST_UNIT, _MOST_UNIT = 1e-20, 1e20
"""Between them neither the full head's products vanish beside the bound nor its sums overflow."""
_VANISHING = 1e-40
"""More than what products too small for float32 come to."""
_PROBED_ROWS = 8
_PROBED_PAIRS = 64
_SAMPLE = (2048, 64)
"""Outputs and inputs of a made-up head that tells what a CPU does."""


def screens_hold() -> bool:
    """Whether screens of heads hold on this CPU, from one of a small head.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    weight = torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0))
    with TemporaryDirectory() as folder, torch.inference_mode():
        with GraphSet(Path(folder), Precision.named("float32")) as graphs, graphs.graph("screen") as writer:
            write_screen(writer, weight)
        session = OnnxSession(Path(folder) / "screen.onnx", Place(torch.device("cpu"), 1))
        return ScreenedHead(session, weight, lambda rows: rows @ weight.T).holds()


class ScreenedHead:
    """Says which logit of each row is the largest, the lowest id of equals: bit for bit what the full head would say.

    `onnx.screen` leaves a few tokens. Their dot products in float64, each with the most that float32 may have added,
    mostly leave one; where two stay possible, or where the screen leaves too many, the full head decides about that
    row. So nothing depends on how the full head sums, or on how many rows share a call.

    Args:
        session: Of the screen's graph.
        weight: Of the head.  # [V, H]
        score: The full head, whose rows have the same bits however many there are.  # [R, H] -> [R, V]
    """

    def __init__(self, session: OnnxSession, weight: Tensor, score: Callable[[Tensor], Tensor]) -> None:
        self._session, self._weight, self._score = session, weight, score
        self._candidates = int(session.outputs["tokens"].shape[1])
        # A little more than the share itself, for what float64 rounds.
        self._doubt = rounding_share(weight.shape[1]) * (1.0 + 1e-6)

    def pick(self, rows: Tensor) -> Tensor:
        """Arg-max of each row.  # [R, H] -> [R] int64"""
        tokens, bounds = self._screen(rows)
        exact = rows.numpy().astype(np.float64)
        best = tokens[:, 0].copy()
        value, doubt = self._logits(exact, best)
        left = (bounds >= (value - doubt)[:, None]).sum(axis=1)
        full = (left < 1) | (left >= self._candidates)
        for row in np.flatnonzero((left > 1) & ~full):
            likely = tokens[row, : left[row]]
            value, doubt = self._logits(exact[row], likely)
            first = value.argmax()
            best[row] = likely[first]
            full[row] = (value + doubt >= value[first] - doubt[first]).sum() != 1
        if full.any():
            undecided = np.flatnonzero(full)
            best[undecided] = self._score(rows[torch.from_numpy(undecided)].contiguous()).numpy().argmax(axis=-1)
        return torch.from_numpy(best)

    def holds(self) -> bool:
        """Whether the bounds hold here: x86 without VNNI adds the products of two neighbouring bytes in 16 bits.

        Rows of the head itself are those whose products with it are largest; rows of two entries are those of which
        such a sum loses most, too little to be seen among the products of many entries.
        """
        count = len(self._weight)
        chosen = torch.arange(0, count, max(1, count // _PROBED_ROWS))[:_PROBED_ROWS]
        rows = self._weight[chosen].float()
        rows = torch.cat((rows, rows.sign(), torch.ones_like(rows[:1]), self._heavy_pairs()))
        tokens, bounds = self._screen(rows)
        logits = self._score(rows).numpy().astype(np.float64)
        listed = np.take_along_axis(logits, tokens, axis=1)
        np.put_along_axis(logits, tokens, -np.inf, axis=1)
        bounded = np.isfinite(bounds).all(axis=1)  # of a row of zeros, as tokens that nobody uses have, nothing is
        held = (listed <= bounds).all(axis=1) & (logits.max(axis=1) <= bounds[:, -1])
        return bool(bounded.any() and held[bounded].all())

    def _heavy_pairs(self) -> Tensor:
        """Rows of two neighbouring ones, each where the token with the largest logit weighs most.  # [n, H]"""
        inputs = self._weight.shape[1]
        count = min(_PROBED_PAIRS, inputs // 2)
        sums = self._weight[:, : 2 * count].float().view(len(self._weight), count, 2).sum(-1)  # [V, P]
        largest, token = sums.max(0)
        share = largest / self._weight[token].float().abs().amax(1)  # of what 8 bits hold of that token
        pairs = share.nan_to_num(0.0).topk(min(_PROBED_ROWS, count)).indices
        rows = torch.eye(count).repeat_interleave(2, dim=1)[pairs]
        return F.pad(rows, (0, inputs - 2 * count))

    def _screen(self, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Tokens and upper bounds of their logits, the highest first; not a number where they mean nothing."""
        shape = (len(rows), self._candidates)
        found = self._session.run({"rows": rows}, {"tokens": shape, "bounds": shape, "unit": (len(rows), 1)})
        unit = found["unit"].numpy().astype(np.float64)
        unit[~((unit >= _LEAST_UNIT) & (unit <= _MOST_UNIT))] = np.nan
        return found["tokens"].numpy(), found["bounds"].numpy() * unit

    def _logits(
        self, rows: NDArray[np.float64], tokens: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Logits of tokens, and how far a float32 head may be from them.  # [n, H] or [H], [n] -> [n], [n]"""
        with np.errstate(invalid="ignore"):  # rows that are not finite are the full head's
            products = self._weight[torch.from_numpy(tokens)].float().double().numpy() * rows
            return products.sum(axis=1), self._doubt * np.abs(products).sum(axis=1) + _VANISHING
