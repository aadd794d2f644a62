"""Drives a drafter as the engine does, except that a script says what is accepted; and what its blocks say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import torch
from tiny import VOCAB, NumberText, tiny_target

from specflow.draft.base import SourceContext
from specflow.handover import Prompt, empty_block, features_of, prefill, score_block
from specflow.noise import RoundNoise
from specflow.recipe import parse_recipe
from specflow.recipe_draft import SourceSection
from specflow.target.transformer import NativeTarget
from specflow.tree import path_to
from specflow.types import PAD, DraftBlock, DraftBudget, Observation, Sampling

K = 4
CHUNK = 16  # prompt tokens of a pass
CPU = torch.device("cpu")
WARM = Sampling(temperature=0.8)
Options = dict[str, object]


@cache
def target() -> NativeTarget:
    return tiny_target()


class Session:
    """A drafter beside the tiny target, driven as the engine drives it, except that a script says what is accepted.

    Every request is told apart by the seed it came with, so that it draws the same numbers in any row.
    """

    def __init__(self, options: Options, prompts: Sequence[Sequence[int]]) -> None:
        section = parse_recipe({"draft": {"k": K, **options}}).draft
        assert isinstance(section, SourceSection)
        self.options, self.info = options, section.info
        context = SourceContext(target(), K, section.dependency, "sampled", confidence=True, codec=NumberText())  # type: ignore[arg-type]
        self.drafter = section.info.build(section.options, context)
        self.reset(prompts, range(len(prompts)))

    def reset(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        self.cache = target().new_cache(len(prompts), 256 + self.drafter.num_nodes + 1)
        self.texts: list[list[int]] = [[] for _ in prompts]
        self.seeds = list(seeds)
        self.drafter.reset(len(prompts), self.cache)
        for row, prompt in enumerate(prompts):
            self.admit(row, prompt, seeds[row])

    def admit(self, row: int, text: Sequence[int], seed: int) -> None:
        """Prefill all tokens but the last, which is the request's first own one; the same text may be a prompt."""
        *prompt, anchor = text if len(text) > 1 else [*text, 4]
        self.texts[row], self.seeds[row] = [*prompt, anchor], seed
        self.cache.clear(row)
        self.drafter.start(row, prompt, WARM)
        view = self.cache.row(row)
        output, begin = prefill(target(), view, Prompt(tuple(prompt), CHUNK, row), self.drafter)
        begin = begin if self.drafter.needs.any else len(prompt) - 1
        tokens = (*prompt[begin + 1 :], anchor)
        features = features_of(output, self.drafter.needs)
        self.drafter.observe(Observation((tokens,), (begin,), (len(tokens),), features), [row])

    def propose(self, *budget: int) -> DraftBlock | None:
        noise = RoundNoise(self.seeds, tuple(self.cache.lengths), CPU)
        return self.drafter.propose([text[-1] for text in self.texts], DraftBudget(budget), noise)

    def commit(self, block: DraftBlock | None, accepted: Sequence[int], new: Sequence[int]) -> None:
        """Accept as many tokens of each row's deepest path as the script says and exist, then add its new token."""
        block = block or empty_block(len(self.texts), VOCAB, CPU)
        anchors = [text[-1] for text in self.texts]
        output = score_block(target(), self.cache, anchors, block, self.drafter.needs)
        path = path_to(block.topology, torch.tensor([_deepest(block, b, most) for b, most in enumerate(accepted)]))
        tokens = []
        for row, token in enumerate(new):
            nodes = [node - 1 for node in path[row, 1:].tolist() if node > 0]
            tokens.append((*block.tokens[row, nodes].tolist(), token))
            self.texts[row].extend(tokens[-1])
        counts, starts = tuple(map(len, tokens)), tuple(self.cache.lengths)
        chain = block.topology.is_chain
        self.cache.keep(counts, None if chain else path)
        features = features_of(output, self.drafter.needs, None if chain else path)
        own = tuple(count - 1 for count in counts) if chain else ()
        self.drafter.observe(Observation(tuple(tokens), starts, counts, features, own), range(len(new)))

    def play(self, rng: random.Random, rounds: int, mode: str = "mixed") -> None:
        """Rounds in which all drafts stand, or none, or some; now and then a round that does not draft."""
        for _ in range(rounds):
            most = [rng.choice([0, 1, K, K]) if mode == "mixed" else K for _ in self.texts]
            block = self.propose(*most)
            accepted = [{"all": K, "none": 0}.get(mode, rng.randint(0, K)) for _ in self.texts]
            self.commit(block, accepted, text(rng, len(self.texts)))

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.drafter.select(rows)
        self.texts = [self.texts[row] for row in rows]
        self.seeds = [self.seeds[row] for row in rows]

    def again(self, *rows: int) -> Session:
        """A drafter that has seen nothing but the texts of these rows, as prompts."""
        fresh = Session(self.options, [])
        fresh.reset([self.texts[row] for row in rows], [self.seeds[row] for row in rows])
        return fresh


def _deepest(block: DraftBlock, row: int, most: int) -> int:
    """Row of the pass of the first node at the greatest depth up to `most`; 0, the anchor's, where there is none."""
    depth = block.topology.depth.expand(len(block.tokens), -1)[row].tolist()
    there = [True, *(token != PAD for token in block.tokens[row].tolist())]
    reached = [each if valid and each <= most else -1 for each, valid in zip(depth, there, strict=True)]
    return reached.index(max(reached))


def text(rng: random.Random, length: int) -> list[int]:
    """Few distinct tokens, so that things repeat."""
    return [rng.randrange(3, 7) for _ in range(length)]


def nodes(block: DraftBlock | None, row: int) -> list[tuple[int, ...]]:
    """Path of tokens to each node of a row, in the order of the nodes."""
    if block is None:
        return []
    parents = block.topology.parents.expand(len(block.tokens), -1)[row].tolist()
    found: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(zip(block.tokens[row].tolist(), parents, strict=True)):
        if token != PAD:
            found[node] = (*found[parent], token)
    return list(found.values())[1:]


def said(block: DraftBlock | None, row: int) -> list[tuple[float, ...]]:
    """What a block says of each node of a row: the probability it was drawn with, and how sure its drafter is."""
    if block is None:
        return []
    told = [block.law.prob(), *([] if block.confidence is None else [block.confidence])]
    there = block.tokens[row] >= 0
    return [tuple(each) for each in torch.stack([each[row].double() for each in told], dim=1)[there].tolist()]
