"""Cross entropy on the tokens of the text."""

from __future__ import annotations

from torch import Tensor

__all__ = ["cross_entropy"]


def cross_entropy(label: Tensor) -> Tensor:
    """-log q(x): what Medusa (2401.10774, eq. 1), FastMTP (2509.18362) and DFlash (2602.06036) are trained by.

    A token that the draft's vocabulary lacks has no q, and its position is not counted.

    Args:
        label: log q(x).  # [n]

    Returns:
        # [n]
    """
    return -label
