"""How likely draft tokens are to stand, given the text that a rule said: the law of acceptance along a text.

Rules that weigh p against q keep the law of the text, so the text of a trace, a sample of the target, is a text of
theirs too. With r_i = p(y_i) / q(y_i), q the law of the draft led along the text y, position j stands, given that those
before it did, with chance

    rejection (2211.17192)   min(1, 1 / r_j)
    block (2403.10444)       min(1, 1 / (P_{j-1} r_j)),  P_0 = 1,  P_j = min(1, P_{j-1} r_j)

A round of block verification stands up to i with chance P_i, given its first i tokens (there, lemma 1); so it says
y_1 .. y_i as draft tokens with mass q(y_1 .. y_i) P_i, out of p(y_1 .. y_i) in all, and the quotient of two neighbours
is the chance above. Rejection's mass is min(p, q) out of p, token by token. What follows a round is drawn from the
target either way, so rounds along y are independent given where they begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = NDArray[Any]

__all__ = ["along_text", "stand_chances"]

LEAST = np.finfo(np.float64).tiny


def stand_chances(p: Numbers, q: Numbers, rule: str) -> Numbers:
    """The chance that the first 1, 2, ... tokens of the text were draft tokens that stood.

    Args:
        p: The target's probability of each token of the text.  # [P, K]
        q: The draft's, after the tokens before it.  # [P, K]
        rule: rejection or block.

    Returns:
        # [P, K], falling along each line
    """
    found = np.empty(q.shape)
    stands, reach = np.ones(len(q)), np.ones(len(q))
    for position in range(q.shape[1]):
        mass, drawn = reach * p[:, position], q[:, position]
        stands = stands * np.minimum(1.0, drawn / np.maximum(mass, LEAST))
        if rule == "block":
            reach = np.minimum(1.0, mass / np.maximum(drawn, LEAST))
        found[:, position] = stands
    return found


def along_text(chance: Numbers, left: Numbers, width: int) -> Numbers:
    """The target's probability of the tokens after every position; 1 past the end.  # [P], [P] -> [P, width]"""
    ahead = np.arange(width)
    index = np.minimum(np.arange(len(chance))[:, None] + ahead, len(chance) - 1)
    return np.where(ahead < left[:, None], chance[index], 1.0)
