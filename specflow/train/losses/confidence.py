"""What a confidence head is trained by: how often the token it spoke of is accepted."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["confidence"]


def confidence(odds: Tensor, stands: Tensor) -> Tensor:
    """Binary cross entropy against c* = 1 - 1/2 ||q - p||_1: DSpark (2607.05147, section 3.3, L_conf).

    c* is sum_v min(p, q) of the laws over the target's whole vocabulary, where a reduced draft has q = 0: a token that
    the draft lacks is a token refused. For greedy decoding it is 1 where both choose the same token, else 0. No
    gradient passes through it.

    Args:
        odds: Log-odds of the head.  # [n]
        stands: c*.  # [n]

    Returns:
        # [n]
    """
    return F.binary_cross_entropy_with_logits(odds, stands.detach().clamp(0.0, 1.0).to(odds.dtype), reduction="none")
