"""Distance of a drafted state from the target's: what an EAGLE-1 drafter reads in the target's place."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["feature"]


def feature(drafted: Tensor, true: Tensor) -> Tensor:
    """SmoothL1 of f_hat against f, its mean over the width: EAGLE (2401.15077, L_reg).

    Args:
        drafted: f_hat.  # [n, H]
        true: f, the target's state of the same position after its final norm.  # [n, H]

    Returns:
        # [n]
    """
    return F.smooth_l1_loss(drafted, true, reduction="none").mean(-1)
