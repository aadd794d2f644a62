"""Real rounds, decoded with torch and with graphs in step: the same drafts and the same choices, or how close they are.

The reference decodes as it would alone. The graphs follow its text: their rule accepts what the reference committed,
and what they would have said is compared token by token. One difference therefore hides no later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from specflow.draft.network import NetworkDrafter
from specflow.engine import Engine, EngineParts
from specflow.length import Fixed
from specflow.onnx.graphs import OutputError, difference
from specflow.sampling import lowest_argmax
from specflow.types import PAD, Sampling, Verdict
from specflow.verify import Match

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import Drafter, Uniforms
    from specflow.draft.steps import Frontier, StepModel, Steps
    from specflow.noise import RoundNoise
    from specflow.sampling import TargetLaw
    from specflow.target.base import Target
    from specflow.text import TextCodec
    from specflow.types import DraftBlock, DraftBudget, Entry, TargetOutput

__all__ = ["Comparison", "Decoder", "Rounds", "compare_rounds", "first_block"]


@dataclass(frozen=True, slots=True)
class Decoder:
    """What decodes: a target, and the sources of its drafter, in the order of a combination."""

    target: Target
    sources: Sequence[Drafter]
    combine: Callable[[Sequence[Drafter]], Drafter | None]


@dataclass(frozen=True, slots=True)
class Rounds:
    """What to decode."""

    prompts: Sequence[Sequence[int]]
    most: int  # rounds
    k: int  # draft tokens of each
    tolerance: float  # relative difference of logits that is rounding


@dataclass
class Comparison:
    """What was found."""

    rounds: int = 0
    blocks: int = 0
    same_blocks: int = 0
    choices: int = 0
    same_choices: int = 0
    near_ties: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)  # that rounding does not explain
    found: dict[str, tuple[float, float]] = field(default_factory=dict)  # output -> largest difference, largest value

    def errors(self) -> Iterator[OutputError]:
        """Errors on the inputs of these rounds."""
        for name, (largest, most) in self.found.items():
            yield OutputError("rounds", name, largest, largest / most if most else largest, "real")

    def note(self, name: str, found: Tensor, expected: Tensor) -> float:
        """Compare two outputs; the relative difference."""
        largest, most = difference(found, expected), float(expected.abs().max())
        before = self.found.get(name, (0.0, 0.0))
        self.found[name] = max(before[0], largest), max(before[1], most)
        return largest / most if most else largest


@dataclass
class _Step:
    """One pass of a drafting network."""

    tokens: Tensor | None  # [1, R]; None where the round opened
    logits: Tensor  # [1, R, Vd] or [1, Vd]


@dataclass
class _Seen:
    """What one engine did in its latest round."""

    block: DraftBlock | None = None
    steps: list[_Step] = field(default_factory=list)
    logits: Tensor | None = None  # [1, M, V] of the target's latest pass
    tokens: list[int] = field(default_factory=list)  # that were committed
    path: list[int] = field(default_factory=list)  # rows that chose them

    def clear(self) -> None:
        """Before the next round."""
        self.block = None
        self.steps.clear()


class _Target:
    """A target whose logits are seen."""

    def __init__(self, target: Target, seen: _Seen) -> None:
        self._target, self._seen = target, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, *args: Any, **options: Any) -> TargetOutput:
        out = self._target.forward(*args, **options)
        self._seen.logits = out.logits
        return out


class _Drafter:
    """A drafter whose blocks are seen."""

    def __init__(self, drafter: Drafter, seen: _Seen) -> None:
        self._drafter, self._seen = drafter, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        self._seen.block = self._drafter.propose(anchors, budget, uniforms)
        return self._seen.block


class _Model:
    """A network whose steps are seen."""

    def __init__(self, model: StepModel, seen: _Seen) -> None:
        self._model, self._seen = model, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def open(self, anchors: Sequence[int], active: Sequence[bool]) -> Steps:
        steps = self._model.open(anchors, active)
        self._seen.steps.append(_Step(None, steps.logits.clone()))
        return _Steps(steps, self._seen)


class _Steps:
    """Steps of a round that are seen."""

    def __init__(self, steps: Steps, seen: _Seen) -> None:
        self._steps, self._seen = steps, seen

    @property
    def logits(self) -> Tensor:
        return self._steps.logits

    @property
    def hidden(self) -> Tensor:
        return self._steps.hidden

    def extend(self, tokens: Tensor, frontier: Frontier | None = None) -> Tensor:
        logits = self._steps.extend(tokens, frontier)
        self._seen.steps.append(_Step(tokens.clone(), logits))
        return logits

    def entry(self, last: Tensor) -> Entry | None:
        return self._steps.entry(last)


class _Leader:
    """Accepts what the target says, and notes it."""

    name = "match"

    def __init__(self, seen: _Seen) -> None:
        self._seen = seen

    def verify(self, block: DraftBlock, law: TargetLaw, noise: RoundNoise) -> Verdict:
        verdict = Match().verify(block, law, noise)
        self._seen.tokens = [token for token in verdict.tokens[0].tolist() if token != PAD]
        self._seen.path = verdict.path[0, : len(self._seen.tokens)].tolist()
        return verdict


class _Follower:
    """Accepts what somebody else has committed, and no more."""

    name = "match"

    def __init__(self, seen: _Seen) -> None:
        self._seen = seen
        self.known: list[int] = []  # tokens behind the anchor

    def verify(self, block: DraftBlock, law: TargetLaw, noise: RoundNoise) -> Verdict:
        nodes = list(zip(block.tokens[0].tolist(), block.topology.parents[0].tolist(), strict=True))
        path = [0]
        while len(path) < len(self.known):
            wanted = (self.known[len(path) - 1], path[-1] - 1)
            if wanted not in nodes[: block.lengths[0]]:
                break
            path.append(nodes.index(wanted) + 1)
        tokens, self.known = self.known[: len(path)], self.known[len(path) :]
        self._seen.tokens, self._seen.path = tokens, path
        spare = [PAD] * (block.topology.max_depth + 1 - len(path))
        both = torch.tensor([[*tokens, *spare], [*path, *spare]], device=block.tokens.device)
        return Verdict(both[:1], both[1:], torch.tensor([len(path) - 1], device=block.tokens.device))


def compare_rounds(reference: Decoder, graphs: Decoder, codec: TextCodec, rounds: Rounds) -> Comparison:
    """Decode greedily with both.

    Args:
        reference: In torch.
        graphs: The same in graphs.
        codec: The target's.
        rounds: What to decode.
    """
    found, one, two = Comparison(), _Seen(), _Seen()
    follower = _Follower(two)
    leads = _engine(reference, codec, _Leader(one), one, rounds.k)
    follows = _engine(graphs, codec, follower, two, rounds.k)
    pair = _Pair(leads, follows, follower, one, two)
    for number, prompt in enumerate(rounds.prompts):
        # A prompt whose context was full too soon leaves its rounds to those after it.
        most = -(-(rounds.most - found.rounds) // (len(rounds.prompts) - number))
        if most > 0:
            _decode(found, pair, prompt, replace(rounds, most=most), f"prompt {number + 1}")
    return found


def first_block(decoder: Decoder, codec: TextCodec, prompt: Sequence[int], k: int) -> tuple[int, list[int]]:
    """What greedy decoding says first, and what is drafted behind it.

    Args:
        decoder: Drafts chains.
        codec: The target's.
        prompt: Token ids.
        k: Draft tokens.
    """
    seen = _Seen()
    sampling = Sampling(max_new_tokens=k + 2, ignore_eos=True, seed=0)
    events = _engine(decoder, codec, _Leader(seen), seen, k).events([prompt], sampling)
    next(events)
    assert seen.logits is not None
    said = int(lowest_argmax(seen.logits[0, -1:]))
    next(events)
    return said, [token for token, _ in _nodes(seen.block)]


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two engines and what is seen of them."""

    leads: Engine
    follows: Engine
    follower: _Follower
    one: _Seen
    two: _Seen


def _decode(found: Comparison, pair: _Pair, prompt: Sequence[int], rounds: Rounds, name: str) -> None:
    """Some rounds of one prompt. A follower that accepted less than the leader runs rounds of its own to catch up."""
    one, two = pair.one, pair.two
    room = pair.leads.context_length - len(prompt)
    sampling = Sampling(max_new_tokens=min((rounds.most + 1) * (rounds.k + 1) + 1, room), ignore_eos=True, seed=0)
    first = pair.leads.events([prompt], sampling)
    next(first)
    assert one.logits is not None
    said = int(lowest_argmax(one.logits[0, -1:]))
    second = pair.follows.events([prompt], sampling.model_copy(update={"logit_bias": {said: 1e9}}))
    next(second)
    for index in range(rounds.most):
        where = f"{name}, round {index + 1}"
        one.clear()
        two.clear()
        event = next(first, None)
        if event is None:
            return
        found.rounds += 1
        pair.follower.known = list(one.tokens)
        begin = 0
        while pair.follower.known and next(second, None) is not None:
            if begin == 0:
                _compare_blocks(found, one, two, rounds.tolerance, where)
            _compare_choices(found, one, two, begin, (rounds.tolerance, where))
            begin += len(two.tokens)
            two.clear()


def _engine(decoder: Decoder, codec: TextCodec, rule: Any, seen: _Seen, k: int) -> Engine:
    for source in decoder.sources:
        if isinstance(source, NetworkDrafter):
            source.watch(lambda model: cast("StepModel", _Model(model, seen)))
    whole = decoder.combine(decoder.sources)
    drafter = None if whole is None else cast("Drafter", _Drafter(whole, seen))
    return Engine(EngineParts(cast("Target", _Target(decoder.target, seen)), codec, rule, Fixed(k), drafter))


def _compare_blocks(found: Comparison, one: _Seen, two: _Seen, tolerance: float, where: str) -> None:
    """Blocks drafted in the same place, and the logits of drafting passes over the same tokens."""
    if one.block is None and two.block is None:
        return
    found.blocks += 1
    close, tied, rounded = True, False, False
    for mine, its in zip(two.steps, one.steps, strict=False):
        if not _equal(mine.tokens, its.tokens):
            break
        close = found.note("draft logits", mine.logits, its.logits) <= tolerance and close
        tied = tied or _changed_places(mine.logits, its.logits, tolerance)
        rounded = rounded or not torch.equal(mine.logits, its.logits)
    if _nodes(one.block) == _nodes(two.block):
        found.same_blocks += 1
        return
    text = f"{where}: drafted {_shown(two.block)}, torch {_shown(one.block)}"
    if close and (tied or (rounded and _began_alike(one.block, two.block))):
        found.near_ties.append(f"{text}; draft logits agree within {tolerance:g}")
    else:
        found.differences.append(text)


def _changed_places(mine: Tensor, its: Tensor, tolerance: float) -> bool:
    """Whether rounding has made another token the likeliest somewhere.  # [..., Vd] twice"""
    right, other = its.argmax(-1, keepdim=True), mine.argmax(-1, keepdim=True)
    margin = (its.gather(-1, right) - its.gather(-1, other)) / its.abs().amax(-1, keepdim=True)
    return bool(((right != other) & (margin <= 2 * tolerance)).any())


def _began_alike(one: DraftBlock | None, two: DraftBlock | None) -> bool:
    """Whether two trees have the same first node: where likelihoods of paths tie, later ones may change places."""
    trees = one is not None and two is not None and not one.topology.is_chain
    return trees and bool(_nodes(one)) and _nodes(one)[:1] == _nodes(two)[:1]


def _compare_choices(found: Comparison, one: _Seen, two: _Seen, begin: int, sense: tuple[float, str]) -> None:
    """What the target said at the rows of the accepted path.

    Args:
        begin: How many of the leader's tokens the follower had committed before this round.
        sense: Tolerance, and where this is.
    """
    tolerance, where = sense
    assert one.logits is not None
    assert two.logits is not None
    expected, logits = one.logits[0, one.path[begin : begin + len(two.path)]], two.logits[0, two.path]
    found.note("target logits", logits, expected)
    wanted, said = lowest_argmax(expected), lowest_argmax(logits)
    found.choices += len(said)
    found.same_choices += int((wanted == said).sum())
    for row, (right, other) in enumerate(zip(wanted.tolist(), said.tolist(), strict=True)):
        if right != other:
            margin = float((expected[row, right] - expected[row, other]) / expected[row].abs().max())
            text = f"{where}: token {other}, torch {right}, relative margin {margin:.1e}"
            (found.near_ties if margin <= 2 * tolerance else found.differences).append(text)


def _equal(one: Tensor | None, two: Tensor | None) -> bool:
    return (one is None and two is None) or (one is not None and two is not None and torch.equal(one, two))


def _nodes(block: DraftBlock | None) -> list[tuple[int, int]]:
    if block is None:
        return []
    return list(zip(block.tokens[0].tolist(), block.topology.parents[0].tolist(), strict=True))[: block.lengths[0]]


def _shown(block: DraftBlock | None) -> str:
    return " ".join(str(token) for token, _ in _nodes(block)) or "nothing"
