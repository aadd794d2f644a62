"""LK losses (2602.23881): the acceptance rate alpha = sum_v min(p, q) itself, with a gradient where it is small."""

from __future__ import annotations

from torch import Tensor

__all__ = ["lk_hybrid", "nla"]

_LEAST = 1e-30
"""Of alpha: its logarithm stays finite where p and q share nothing."""


def nla(overlap: Tensor) -> Tensor:
    """-log alpha: the gradient of the total variation, grown by 1 / alpha.

    Args:
        overlap: alpha.  # [n]

    Returns:
        # [n]
    """
    return -overlap.clamp_min(_LEAST).log()


def lk_hybrid(divergence: Tensor, overlap: Tensor, rate: float = 3.0) -> Tensor:
    """lambda KL(p || q) + (1 - lambda) TV(p, q), lambda = exp(-eta alpha) without a gradient, TV = 1 - alpha.

    It leans on the divergence where the laws share little, and on what is accepted where they share much.

    Args:
        divergence: KL(p || q).  # [n]
        overlap: alpha.  # [n]
        rate: eta; 3 is the paper's best.

    Returns:
        # [n]
    """
    share = (-rate * overlap.detach()).exp()
    return share * divergence + (1.0 - share) * (1.0 - overlap)
