"""Draft tokens by batch size, from measured costs and how often draft tokens stand. No torch.

Engines that keep such a table look it up every round. What they call it and how they read its keys is in their files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specflow.export.recipe_view import Step

if TYPE_CHECKING:
    from specflow.cost import CostModel

__all__ = ["batch_schedule"]


def batch_schedule(costs: CostModel, k: int, acceptance: float, context: int) -> tuple[Step, ...]:
    """The length of most expected tokens a second for every batch size up to the largest measured one.

    A round of depth d yields 1 + a + ... + a^d tokens (Leviathan et al. 2211.17192, eq. 1). Larger batches never get
    longer drafts: where measurements say so it is noise, and engines demand it.

    Args:
        costs: What `specflow profile` measured.
        k: Most draft tokens of a round, the bonus token excluded.
        acceptance: Chance that a draft token stands, given those before it.  # a
        context: Committed tokens of each row, which make a pass dearer.
    """
    depths = sorted({0, k, *(timing.size for timing in costs.draft if timing.size < k), *range(min(k, 16) + 1)})
    yields = {depth: sum(acceptance**position for position in range(depth + 1)) for depth in depths}
    steps: list[Step] = []
    most = k
    for batch in range(1, max(timing.batch for timing in costs.target) + 1):
        speeds = {depth: yields[depth] / costs.round_s(depth, batch, context) for depth in depths if depth <= most}
        most = max(speeds, key=lambda depth: (speeds[depth], -depth))
        if steps and steps[-1].k == most:
            steps[-1] = Step(steps[-1].low, batch, most)
        else:
            steps.append(Step(batch, batch, most))
    return tuple(steps)
