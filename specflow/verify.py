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
from specflow.tree import path_to, scoring_rows, valid_nodes
from specflow.types import PAD, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.noise import RoundNoise
    from specflow.sampling import TargetLaw
    from specflow.types import DraftBlock

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
        rows = scoring_rows(block.topology, len(said))
        last = _deepest(block, block.tokens == said.gather(1, rows))
        return _verdict(block, last, said.gather(1, last.unsqueeze(1)))


class Rejection:
    """Token by token (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

    LAW: accept x_i with probability min(1, p_i(x_i) / q_i(x_i)); stop at the first refusal, at row a.
         Recovered token ~ max(p - q, 0) of row a; bonus token ~ p of the row after the last node.
         Accepted and recovered mass of a token: min(p, q) + max(p - q, 0) = p.
    """

    name = "rejection"

    def __init__(self, lossless: bool = True) -> None:
        self.config = RejectionConfig(lossless=lossless)

    def verify(self, block: DraftBlock, law: TargetLaw, noise: RoundNoise) -> Verdict:
        _check_block(block, self.name, self.config)
        if law.greedy:
            return Match().verify(block, law, noise)
        p = law.probs()
        bar, weight = token_odds(block, p)
        stands = noise.nodes("accept", block.num_nodes) * weight <= bar
        accepted = (stands & valid_nodes(block)).long().cumprod(1).sum(1)
        return _recover(block, p, torch.ones_like(bar), accepted, noise)


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
        return _recover(block, p, reach, accepted, noise)


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
        chosen = _chosen(block, p)
        likely = chosen > bar.clamp_max(self.config.epsilon).gather(1, rows)
        last = _deepest(block, likely & valid_nodes(block), chosen.log())
        said = law.draw(None if law.greedy else noise.rows("target", block.topology))
        return _verdict(block, last, said.gather(1, last.unsqueeze(1)))


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
    return _chosen(block, p), block.law.prob()


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
    ratio = _chosen(block, p) / q.clamp_min(torch.finfo(q.dtype).tiny)
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
    whole = _row_of(p, accepted)
    bonus = accepted == valid_nodes(block).sum(1)
    if not block.num_nodes:
        return whole, bonus
    node = accepted.clamp_max(block.num_nodes - 1)
    over = block.law.excess_at(node, reach.gather(1, node.unsqueeze(1)) * whole)
    # Where p and q agree to the last bit nothing is over, and a refusal is a rounding error: p itself is right then.
    return torch.where((bonus | (over.amax(-1) <= 0)).unsqueeze(1), whole.to(over.dtype), over), bonus


def _recover(block: DraftBlock, p: Tensor, reach: Tensor, accepted: Tensor, noise: RoundNoise) -> Verdict:
    """Draw the token after the accepted ones. A bonus token uses the number that plain decoding would use."""
    weights, bonus = residual(block, p, reach, accepted)
    bonus_u = noise.rows("target", block.topology).gather(1, accepted.unsqueeze(1)).squeeze(1)
    u = torch.where(bonus, bonus_u, noise.once("residual"))
    return _verdict(block, accepted, draw_tokens(weights, u).unsqueeze(1))


def _row_of(values: Tensor, row: Tensor) -> Tensor:
    """One row of each batch row.  # [B, R, V], [B] -> [B, V]"""
    first = torch.arange(len(row), device=row.device) * values.shape[1]
    return values.flatten(0, 1).index_select(0, first + row)


def _chosen(block: DraftBlock, p: Tensor) -> Tensor:
    """p of every drafted token, at its parent's row.  # [B, M, V] -> [B, N]"""
    index = scoring_rows(block.topology, len(p)) * p.shape[-1] + block.tokens.clamp_min(0)
    return p.flatten(1).gather(1, index)


def _deepest(block: DraftBlock, stands: Tensor, score: Tensor | None = None) -> Tensor:
    """Row that ends the longest path on which every node stands; the anchor's row 0 if none does.

    Args:
        block: Chain or tree.
        stands: Verdict about each node alone; false for PAD.  # [B, N] bool
        score: Decides between paths of one length by its sum; without it the lowest row wins.  # [B, N]
    """
    ancestors, depth = block.topology.ancestors, block.topology.depth
    missed = F.pad(~stands, (1, 0))  # the anchor always stands
    reached = depth.masked_fill((ancestors & missed.unsqueeze(1)).any(-1), -1)  # [B, M]
    if score is not None:
        summed = torch.where(ancestors[:, :, 1:], score.unsqueeze(1), 0.0).sum(-1)
        return summed.masked_fill(reached < reached.amax(1, keepdim=True), -torch.inf).argmax(1)
    return reached.argmax(1)


def _verdict(block: DraftBlock, last: Tensor, following: Tensor) -> Verdict:
    """Lay out the path to a row and the token that follows it.

    Args:
        block: Chain or tree.
        last: Row that ends the accepted path.  # [B]
        following: Recovered or bonus token.  # [B, 1]
    """
    path = path_to(block.topology, last)
    accepted = block.topology.depth.expand(len(last), -1).gather(1, last.unsqueeze(1))  # [B, 1]
    with_anchor = F.pad(block.tokens, (1, 0), value=PAD)  # [B, M]
    along = with_anchor.gather(1, path.clamp_min(0)).masked_fill(path < 0, PAD)
    tokens = F.pad(along[:, 1:], (0, 1), value=PAD).scatter(1, accepted, following)
    return Verdict(tokens, path, accepted.squeeze(1))


def _check_block(block: DraftBlock, name: str, config: RejectionConfig) -> None:
    """Refuse blocks that the rule cannot take, by what the host knows of them."""
    if not (block.topology.is_chain or RULE_INFOS[name].trees):
        raise GraphError(
            f"verify: {name}",
            "the draft is a tree",
            "a chain",
            "use verify: match, which takes any tree, or a source that drafts a chain",
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
