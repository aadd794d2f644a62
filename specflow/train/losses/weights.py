"""Weights of the positions of a block: a refused token takes all behind it along, so early ones count more."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dpace", "exponential_decay", "power_decay"]


def exponential_decay(num_slots: int, gamma: float) -> Tensor:
    """w_k = exp(-(k - 1) / gamma): DFlash (2602.06036) and DSpark (2607.05147, section 3.3).

    Args:
        num_slots: K.
        gamma: Positions after which a weight has fallen to 1/e.

    Returns:
        # [K]
    """
    return torch.exp(-torch.arange(num_slots) / gamma)


def power_decay(num_slots: int, beta: float) -> Tensor:
    """w_k = beta^(k - 1): Medusa's 0.8^k (2401.10774), EAGLE-3's 0.8^j (2503.01840), FastMTP's 0.6 (2509.18362).

    They differ by factors that all positions share, and losses are divided by the sum of the weights.

    Args:
        num_slots: K.
        beta: 1 counts all positions alike.

    Returns:
        # [K]
    """
    return torch.tensor(beta) ** torch.arange(num_slots)


def dpace(label: Tensor, known: Tensor, alpha: float = 0.5) -> Tensor:
    """w_j = sum_{m >= j} prod_{i <= m} s_i, s_i = (1 - alpha) q_i(x_i) + alpha: D-PACE (2605.18810, eqs. 7 and 8).

    The sum over m of the products is a smooth stand-in for the length that is accepted; w_j is what log q_j adds to it.
    Positions that limit the length weigh most, and weights move on as these are learnt.

    Args:
        label: log q(x) of every position, -inf for a token that the draft lacks.  # [n, K]
        known: Which of them count; a chain ends at the first that does not.  # [n, K] bool
        alpha: Floor of the smoothed confidences; 1 leaves K - j + 1.

    Returns:
        Without a gradient; 0 where a position does not count.  # [n, K]
    """
    smoothed = (1.0 - alpha) * label.detach().exp() + alpha
    products = torch.where(known, smoothed, 0.0).cumprod(1)  # 0 from the first on that does not count
    return products.flip(1).cumsum(1).flip(1)
