"""Distance of the draft's law from the target's in the measure that verification sees."""

from __future__ import annotations

from torch import Tensor

__all__ = ["total_variation"]


def total_variation(overlap: Tensor) -> Tensor:
    """||q - p||_1, not halved: DSpark (2607.05147, section 3.3, L_tv).

    Both laws have mass 1, so it is 2 (1 - sum_v min(p, q)): twice the probability that the token is refused.

    Args:
        overlap: sum_v min(p, q).  # [n]

    Returns:
        # [n] 0 to 2
    """
    return 2.0 * (1.0 - overlap)
