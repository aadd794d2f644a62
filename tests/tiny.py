"""Tiny targets and drafters of known behaviour, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specflow.draft.base import Needs, Uniforms
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.law import Dense, PointMass
from specflow.length import Fixed
from specflow.target.base import Cache, TargetOptions
from specflow.target.transformer import NativeTarget
from specflow.tree import chain, from_parents
from specflow.types import PAD, DraftBlock, DraftBudget, Observation, Sampling
from specflow.verify import Match, Rule

VOCAB = 61
EOS = 2


def tiny_model(context: int = 256, seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    """A random Llama whose next-token choices are well separated."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.35)
    return model


def tiny_target(dtype: torch.dtype = torch.float64, context: int = 256, seed: int = 0, layers: int = 2) -> NativeTarget:
    """That model in torch."""
    model = tiny_model(context, seed, layers)
    options = TargetOptions("tiny", dtype, torch.device("cpu"), stop_ids=(EOS,))
    return NativeTarget(model.config, dict(model.state_dict()), options)


class NumberText:
    """A codec whose text is the token ids, each followed by a space."""

    stop_ids = (EOS,)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{token} " for token in ids)

    def stream(self) -> NumberStream:
        return NumberStream()


class NumberStream:
    def push(self, ids: Sequence[int]) -> str:
        return "".join(f"{token} " for token in ids)

    def peek(self) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Scripted:
    """A drafter that knows, from a table, what vanilla will say; subclasses bend it."""

    needs = Needs()
    num_nodes = 32
    branches = False

    def __init__(self, futures: Sequence[Sequence[int]] = ()) -> None:
        self._futures = [list(future) for future in futures]  # one a request, in the order they start
        self.calls = 0

    def reset(self, batch: int, cache: Cache) -> None:
        self._waiting = list(self._futures)
        self._rows: list[list[int]] = [[] for _ in range(batch)]
        self._done = [0] * batch

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self._rows[row] = self._waiting.pop(0) if self._waiting else []
        self._done[row] = 0

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        for tokens, row in zip(observation.tokens, rows, strict=True):
            self._done[row] += len(tokens)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
        self._done = [self._done[row] for row in rows]

    def tokens_for(self, row: int, most: int) -> list[int]:
        return self._rows[row][self._done[row] : self._done[row] + most]

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        self.calls += 1
        drafts = [self.tokens_for(row, most) for row, most in enumerate(budget.tokens)]
        width = max(len(draft) for draft in drafts)
        tokens = torch.full((len(drafts), width), PAD)
        for row, draft in enumerate(drafts):
            tokens[row, : len(draft)] = torch.tensor(draft, dtype=torch.int64)
        lengths = tuple(len(draft) for draft in drafts)
        return DraftBlock(tokens, lengths, chain(width, tokens.device), PointMass(tokens, VOCAB))


class Oracle(Scripted):
    """Always right."""


class Adversary(Scripted):
    """Always wrong."""

    def tokens_for(self, row: int, most: int) -> list[int]:
        right = super().tokens_for(row, most)
        return [(token + 1 + index) % VOCAB for index, token in enumerate(right + [3] * (most - len(right)))]


class Empty(Scripted):
    """Never has anything to say."""

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        self.calls += 1
        return None


class Ragged(Scripted):
    """Right for a while, wrong after, in lengths that change from round to round."""

    def tokens_for(self, row: int, most: int) -> list[int]:
        right = super().tokens_for(row, most)
        keep = (self._done[row] * 7 + row * 3) % (most + 1)
        return right[:keep] + ([5] if keep < most and self._done[row] % 3 == 0 else [])


class Branching(Scripted):
    """A tree: the right path, a wrong sibling at every depth, and a wrong child below the last right node."""

    branches = True

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        self.calls += 1
        depth = min(max(1, budget.widest), 3)
        paths = [self.tokens_for(row, min(depth, most)) for row, most in enumerate(budget.tokens)]
        if min(map(len, paths)) < depth:
            return None
        nodes, parents, last = [[] for _ in paths], [], -1  # type: ignore[var-annotated]
        for level in range(depth):
            for wrong in (1, 0):
                for row, path in enumerate(paths):
                    nodes[row].append((path[level] + wrong) % VOCAB)
                parents.append(last)
            last = len(parents) - 1
        tokens = torch.tensor(nodes)
        topology = from_parents(torch.tensor([parents]), max_depth=depth)
        return DraftBlock(tokens, (len(parents),) * len(paths), topology, PointMass(tokens, VOCAB))


class Random(Scripted):
    """Samples from a fixed full-vocabulary law and says so."""

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        self.calls += 1
        width, batch = budget.widest, len(budget.tokens)
        law = torch.softmax(torch.randn(VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64), 0)
        tokens = torch.full((batch, width), PAD)
        for row, most in enumerate(budget.tokens):
            for step in range(most):
                u = uniforms.uniform("draft", row, self._done[row] * 31 + step)
                tokens[row, step] = int(torch.searchsorted(law.cumsum(0), torch.tensor(u, dtype=torch.float64)))
        return DraftBlock(
            tokens, budget.tokens, chain(width, tokens.device), Dense(tokens, law.expand(batch, width, VOCAB))
        )


def tiny_engine(
    drafter: object = None, k: int = 4, batch: int = 1, rule: Rule | None = None, target: NativeTarget | None = None
) -> Engine:
    parts = EngineParts(target or tiny_target(), NumberText(), rule or Match(), Fixed(k), drafter)  # type: ignore[arg-type]
    return Engine(parts, EngineSettings(batch=batch, prefill_chunk=8))
