"""Forward KL divergence from the target's law, and the cross entropy that differs from it by a constant.

Over a reduced vocabulary p is made to sum to 1 there (EAGLE-3). Positions whose token the draft lacks are not counted:
as the text was drawn from the target, a position counts in the mean as much as p has mass in the draft's vocabulary,
which is the cross entropy of the whole law without its part that no draft can meet.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["divergence", "soft_cross_entropy"]


def soft_cross_entropy(cross: Tensor) -> Tensor:
    """-sum_v p log q: EAGLE (2401.15077, L_cls) and EAGLE-3 (2503.01840).

    Args:
        cross: sum_v p log q.  # [n]

    Returns:
        # [n]
    """
    return -cross


def divergence(cross: Tensor, entropy: Tensor) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q): DistillSpec (2310.08461). Its gradient is that of the cross entropy.

    Args:
        cross: sum_v p log q.  # [n]
        entropy: -sum_v p log p.  # [n]

    Returns:
        # [n]
    """
    return -cross - entropy
