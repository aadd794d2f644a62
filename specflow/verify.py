"""Verification rules: which draft tokens stand, and which token follows them.

Every rule emits one more token than it accepts: the recovered token after a rejection, the bonus token after a block
that was accepted whole. Rules run on the device and ask it nothing; formulas: reference, methods 0.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from specflow.errors import GraphError
from specflow.rules import RULE_INFOS, BlockConfig, RejectionConfig, TypicalConfig
from specflow.sampling import draw_tokens
from specflow.tree import scoring_rows, valid_nodes
from specflow.verify_rows import along_chain, chosen, deepest, row_of, verdict_for
from specflow.verify_tree import Descent, descend_points, descend_samples

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.noise import RoundNoise
    from specflow.sampling import TargetLaw
    from specflow.types import DraftBlock, Verdict

__all__ = ["RULES", "BlockRule", "Match", "Rejection", "Rule", "Typical", "block_odds", "residual", "token_odds"]


class Rule(Protocol):
    """Decides about a block, given the target's law at every row of the pass."""

    name: str  # under which `rules.RULE_INFOS` has its facts

    def verify(self, block: DraftBlock, law: TargetLaw, noise: RoundNoise) -> Verdict: ...


class Match:
    """Accepts what the target would have said.

    LAW: row i's token is drawn from p_i with the number of its own position, draft or no draft.
         A node stands if it is the token drawn at its parent's row; the text is what plain decoding draws.
         So any drafter, tree or length is lossless, and the same seed gives the same text.
    """

    name = "match"

    def verify(self, block: DraftBlock, law: TargetLaw, noise: RoundNoise) -> Verdict:
        said = law.draw(None if law.greedy else noise.rows("target", block.topology))  # [B, M]
        if block.topology.is_chain:
            return along_chain(block, said)
        rows = scoring_rows(block.topology, len(said))
        last = deepest(block, block.tokens == said.gather(1, rows))
        return verdict_for(block, last, said.gather(1, last.unsqueeze(1)))


class Rejection:
    """Token by token (Leviathan et al. 2211.17192, Chen et al. 2302.01318); sibling by sibling in trees (2402.14160).

    LAW: accept x_i with probability min(1, p_i(x_i) / q_i(x_i)); stop at the first refusal, at row a.
         Recovered token ~ max(p - q, 0) of row a; bonus token ~ p of the row after the last node.
         Accepted and recovered mass of a token: min(p, q) + max(p - q, 0) = p.
         In a tree the next sibling meets what a refusal left of p, and q without the siblings before it.
    """

    name = "rejection"

    def __init__(self, lossless: bool = True) -> None:
        self.config = RejectionConfig(lossless=lossless)

    def verify(self, block: DraftBlock, law: TargetLaw, noise: RoundNoise) -> Verdict:
        _check_block(block, self.name, self.config)
        if law.greedy:
            return Match().verify(block, law, noise)
        p = law.probs()
        if not block.topology.is_chain:
            return self._walk(block, p, noise)
        bar, weight = token_odds(block, p)
        stands = noise.nodes("accept", block.num_nodes) * weight <= bar
        accepted = (stands & valid_nodes(block)).long().cumprod(1).sum(1)
        weights, bonus = residual(block, p, torch.ones_like(bar), accepted)
        return _recover(block, Descent(accepted, weights, bonus), noise)

    def _walk(self, block: DraftBlock, p: Tensor, noise: RoundNoise) -> Verdict:
        walk = descend_points if block.law.is_point else descend_samples
        return _recover(block, walk(block, p, noise.nodes("accept", block.num_nodes)), noise)


class BlockRule:
    """The whole block at once (Sun et al. 2403.10444): accepts most of all rules that know only q of the path.

    LAW: P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)); S_i = sum of max(P_i p_{i+1} - q_{i+1}, 0).
         h_i = S_i / (S_i + 1 - P_i), at the last node h = P; a = largest i with u_i <= h_i, whatever failed before it.
         Recovered token ~ max(P_a p - q, 0) of row a, P_a included; bonus token ~ p of the row after the last node.
    """

    name = "block"

    def __init__(self, lossless: bool = True) -> None:
        self.config = BlockConfig(lossless=lossless)

    def verify(self, block: DraftBlock, law: TargetLaw, noise: RoundNoise) -> Verdict:
        _check_block(block, self.name, self.config)
        if law.greedy:
            return Match().verify(block, law, noise)
        p = law.probs()
        bar, weight, reach = block_odds(block, p)
        stands = (noise.nodes("accept", block.num_nodes) * weight <= bar) & valid_nodes(block)
        accepted = (block.topology.depth * F.pad(stands, (1, 0))).amax(1)
        weights, bonus = residual(block, p, reach, accepted)
        return _recover(block, Descent(accepted, weights, bonus), noise)


class Typical:
    """Typical acceptance (Medusa, 2401.10774). Lossy: the text leans to what the target finds unsurprising.

    LAW: a node stands if p(x) > min(epsilon, delta exp(-entropy of p)) at its parent's row.
         The longest path that stands wins, the likeliest of equals.
         The token after it is drawn from p of the path's last row.
    """

    name = "typical"

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        self.config = TypicalConfig(epsilon=epsilon, delta=delta)

    def verify(self, block: DraftBlock, law: TargetLaw, noise: RoundNoise) -> Verdict:
        p = law.probs()
        rows = scoring_rows(block.topology, len(p))
        bar = self.config.delta * torch.special.entr(p).sum(-1).neg().exp()  # [B, M]
        found = chosen(block, p)
        likely = found > bar.clamp_max(self.config.epsilon).gather(1, rows)
        last = deepest(block, likely & valid_nodes(block), found.log())
        said = law.draw(None if law.greedy else noise.rows("target", block.topology))
        return verdict_for(block, last, said.gather(1, last.unsqueeze(1)))


RULES: Mapping[str, Callable[..., Rule]] = {
    "match": Match,
    "rejection": Rejection,
    "block": BlockRule,
    "typical": Typical,
}


def token_odds(block: DraftBlock, p: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection's acceptance probability of every node, as a fraction bar / weight (at least 1: certain).

    Args:
        block: A chain.
        p: Target probabilities.  # [B, M, V]

    Returns:
        bar, weight.  # [B, N] twice
    """
    return chosen(block, p), block.law.prob()


def block_odds(block: DraftBlock, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Block verification's h of every node as a fraction bar / weight (0 / 0: certain), and the reach of its row.

    A row's last node is where it is even though the block goes on for other rows.

    Args:
        block: A chain.
        p: Target probabilities.  # [B, M, V]

    Returns:
        bar, weight, and P_a of the rows a = 0 .. N - 1.  # [B, N] three times
    """
    q = block.law.prob()
    ratio = chosen(block, p) / q.clamp_min(torch.finfo(q.dtype).tiny)
    reach = [torch.ones_like(p[:, 0, 0])]
    for each in ratio.unbind(1):
        reach.append((reach[-1] * each).clamp_max(1.0))
    at = torch.stack(reach, dim=1)  # [B, M] P_0 .. P_N
    mass = block.law.excess_mass(at[:, :-1], p[:, :-1])
    spare = F.pad(mass, (0, 1))[:, 1:]  # [B, N] S_1 .. S_{N-1}, and none at N
    final = block.topology.depth[:, 1:] == valid_nodes(block).sum(1, keepdim=True)
    reached = at[:, 1:].double()
    return torch.where(final, reached, spare), torch.where(final, 1.0, spare + 1.0 - reached), at[:, :-1]


def residual(block: DraftBlock, p: Tensor, reach: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """What the token after the accepted ones is drawn from, up to a factor, and whether it is the bonus token.

    Args:
        block: A chain.
        p: Target probabilities.  # [B, M, V]
        reach: Factor of p at each row that a node hangs from: P_a of block verification, else 1.  # [B, N]
        accepted: Number of accepted nodes.  # [B]

    Returns:
        Weights and flag.  # [B, V], [B] bool
    """
    whole = row_of(p, accepted)
    bonus = accepted == valid_nodes(block).sum(1)
    if not block.num_nodes:
        return whole, bonus
    node = accepted.clamp_max(block.num_nodes - 1)
    over = block.law.excess_at(node, reach.gather(1, node.unsqueeze(1)) * whole)
    # Where p and q agree to the last bit nothing is over, and a refusal is a rounding error: p itself is right then.
    return torch.where((bonus | (over.amax(-1) <= 0)).unsqueeze(1), whole.to(over.dtype), over), bonus


def _recover(block: DraftBlock, end: Descent, noise: RoundNoise) -> Verdict:
    """Draw the token after the accepted ones. A bonus token uses the number that plain decoding would use."""
    bonus_u = noise.rows("target", block.topology).gather(1, end.last.unsqueeze(1)).squeeze(1)
    u = torch.where(end.bonus, bonus_u, noise.once("residual"))
    return verdict_for(block, end.last, draw_tokens(end.weights, u).unsqueeze(1))


def _check_block(block: DraftBlock, name: str, config: RejectionConfig) -> None:
    """Refuse blocks that the rule cannot take, by what the host knows of them."""
    tree = not block.topology.is_chain
    if tree and not RULE_INFOS[name].trees:
        raise GraphError(
            f"verify: {name}",
            "the draft is a tree",
            "a chain",
            "use verify: match or rejection, which take trees, or a source that drafts a chain",
        )
    if block.law.is_point or not config.lossless:
        return
    if block.structure_from == "sampled" or block.lengths_from == "self":
        raise GraphError(
            f"verify: {name}",
            "a block whose shape depends on its own sampled tokens, which biases the text",
            "a shape that follows from the context or from earlier tokens",
            "use rule match, or lossless: false",
        )
    if tree and not block.without_replacement:
        raise GraphError(
            f"verify: {name}",
            "a tree whose siblings were sampled, but not each from what the ones before left, which biases the text",
            "siblings drawn without replacement, or chosen by rank",
            "use rule match, or a tree that draws siblings without replacement",
        )
