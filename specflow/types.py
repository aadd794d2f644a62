"""The nouns of the toolkit, and the one legend of shapes.

Shape legend, used in trailing comments everywhere:
    B  rows of a batch (requests decoded together)
    N  draft tokens of a block, anchor excluded; static within a round
    M  rows of one target pass, N + 1: the anchor, then the block
    D  depth of a block: the longest path from the anchor (N for a chain)
    V  target vocabulary      Vd  reduced draft vocabulary      H  hidden width
    L  target layers          Hq, Hk  query and key/value heads      Dh  width of a head
    S  key slots of a cache

PAD marks "no token" in token tensors and "no row" in row tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PAD",
    "BlockShape",
    "Counts",
    "DraftBlock",
    "DraftBudget",
    "Entry",
    "Features",
    "Generation",
    "Law",
    "Observation",
    "Sampling",
    "Skip",
    "TargetOutput",
    "Timings",
    "Topology",
    "Verdict",
]

PAD = -1


class Sampling(BaseModel):
    """How tokens are chosen from the target's logits, and when to stop. Immutable.

    Order of processing at every verified position, each with that position's own prefix: logit bias, repetition,
    presence and frequency penalties, minimum length, temperature, top-k, top-p, min-p.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(0.0, ge=0.0, description="0 is greedy; ties go to the lowest token id")
    top_k: int = Field(0, ge=0, description="keep the k most likely tokens; 0 keeps all")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="keep the smallest set with this much probability")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="drop tokens below this share of the most likely one")
    repetition_penalty: float = Field(
        1.0, gt=0.0, description="divides positive logits of tokens seen in prompt or text"
    )
    presence_penalty: float = Field(0.0, description="subtracted once from tokens seen in the text")
    frequency_penalty: float = Field(0.0, description="subtracted once per occurrence in the text")
    logit_bias: Mapping[NonNegativeInt, float] = Field(
        default_factory=dict, description="token id -> added to its logit"
    )
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="same seed, same text; none draws a fresh one per request"
    )
    max_new_tokens: int = Field(128, ge=1, description="length cap, in tokens")
    min_new_tokens: int = Field(0, ge=0, description="stop ids are impossible before this many tokens")
    stop_ids: tuple[NonNegativeInt, ...] = Field((), description="extra token ids that end the text")
    stop_strings: tuple[str, ...] = Field((), description="strings that end the text; cut from it")
    ignore_eos: bool = Field(False, description="the model's own stop ids do not end the text")
    logprobs: bool = Field(False, description="return the log-probability of every chosen token")
    speculate: bool = Field(True, description="false decodes this request plainly, without any draft call")

    @field_validator("stop_strings")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in value):
            raise ValueError("a stop string is empty; every text would stop at once")
        return value

    @model_validator(mode="after")
    def _room_for_the_minimum(self) -> Sampling:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}")
        return self

    def stops(self, model_stop_ids: Sequence[int]) -> frozenset[int]:
        """Token ids that end the text: the request's own, and the model's unless they are ignored."""
        return frozenset(self.stop_ids) | (frozenset() if self.ignore_eos else frozenset(model_stop_ids))


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """What a length policy lets a drafter spend this round. Host integers: decided before anything is drafted."""

    tokens: tuple[int, ...]  # [B] deepest draft position of each row; 0 means: do not draft for this row
    per_match: float | None = None  # draft at most this many tokens per matched token (history sources)
    by_match: tuple[tuple[int, ...], ...] | None = None
    """[B][L] most draft tokens of a row after a match of 1, 2, ... L tokens; the last entry serves longer matches."""
    stop_below: tuple[float, ...] | None = None
    """[B] a chain ends after the first token that its drafter gave less probability than this; that token stays."""

    @property
    def widest(self) -> int:
        return max(self.tokens, default=0)

    def most(self, row: int, match_length: int) -> int:
        """Most draft tokens for a row whose draft continues a match of this many tokens (1 or more)."""
        allowed = self.tokens[row]
        if self.per_match is not None:
            allowed = min(allowed, ceil(self.per_match * match_length - 1e-9))
        if self.by_match is not None:
            table = self.by_match[row]
            allowed = min(allowed, table[min(match_length, len(table)) - 1])
        return allowed


class Law(Protocol):
    """The distribution the tokens of a block were drawn from, given their prefixes.

    A small law stays small: no implementation materialises [B, N, V] where less says the same.
    """

    @property
    def is_point(self) -> bool:
        """True where every token was chosen deterministically (one-hot q)."""

    def prob(self) -> Tensor:
        """q of every drafted token.  # [B, N] float32 or wider, 1 where PAD"""

    def excess_mass(self, scale: Tensor, p: Tensor) -> Tensor:
        """Sum of max(scale p - q, 0) at every draft position.  # [B, N], [B, N, V] -> [B, N] float64"""

    def excess_at(self, node: Tensor, scaled_p: Tensor) -> Tensor:
        """max(scaled_p - q, 0) at one node of each row.  # [B], [B, V] -> [B, V]"""

    def row(self, node: Tensor) -> Tensor:
        """q at one node of each row, before any sibling was removed.  # [B] -> [B, V]"""

    def narrow(self, width: int) -> Law:
        """The law of the first `width` nodes."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Shape of a draft tree. Row 0 of the pass is the anchor, row n + 1 is draft node n. Built in `tree`."""

    parents: Tensor  # [B or 1, N] int64, node index of the parent, -1 = anchor; parents precede children
    depth: Tensor  # [B or 1, M] int64, 0 for the anchor
    ancestors: Tensor  # [B or 1, M, M] bool, [i, j] true where row j is row i or above it
    max_depth: int  # D
    is_chain: bool
    max_siblings: int | None = None  # most children of one row, where the host knows it


@dataclass(frozen=True, slots=True)
class Entry:
    """Where verification enters the target: the draft has run the layers below for every row of the coming pass.

    Their key and value rows stand in the scratch rows of the target's cache.
    """

    layer: int  # first layer still to run
    hidden: Tensor  # [B, M, H] its input


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """A drafter's proposal. Nodes that a row does not have are PAD; in a tree, so is everything below them."""

    tokens: Tensor  # [B, N] int64
    lengths: tuple[int, ...]  # [B] most nodes of each row, as far as the host knows; the device may hold more PAD
    topology: Topology
    law: Law
    confidence: Tensor | None = None
    """[B, N] probability that the node stands, given that its parent does; None where nobody says."""
    confidence_from: Literal["context", "prefix", "self"] = "context"
    """What a node's confidence depends on: the state before the block, earlier tokens too, or the token itself."""
    lengths_from: Literal["context", "prefix", "self"] = "context"
    """What decides whether a node is there, likewise; "self" biases the law (reference: methods 0.2)."""
    structure_from: Literal["context", "sampled"] = "context"
    """What the shape of the tree depends on; a shape that follows from sampled tokens biases the law."""
    without_replacement: bool = False
    """Siblings were drawn one after another, in the order of their indices, each from what the ones before left."""
    entry: Entry | None = None
    match_lengths: tuple[int, ...] | None = None
    """[B] tokens of committed text that each row's draft continues (history sources); 0 where it continues none."""

    @property
    def num_nodes(self) -> int:
        return int(self.tokens.shape[1])


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of a decoder block of the Llama family."""

    hidden_size: int  # H
    mlp_size: int
    num_heads: int  # Hq
    num_kv_heads: int  # Hk
    head_width: int  # Dh
    eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float | str | bool], ...] | None = None  # by name; None: unscaled positions


@dataclass(frozen=True, slots=True)
class Skip:
    """Sub-layers left out of a pass (a skipped one is a residual pass-through). 0-based layer numbers."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one target pass yields. New key/value rows stay in the cache's scratch rows until `cache.keep`."""

    logits: Tensor  # [B, M, V], or [B, 1, V] with rows="last", [B, 0, V] with rows="none"
    taps: Mapping[int, Tensor] = field(
        default_factory=dict
    )  # layer -> [B, M, H], output of that 0-based layer (-1: embedding)
    hidden_pre: Tensor | None = None  # [B, M, H] last hidden before the final norm
    hidden_post: Tensor | None = None  # [B, M, H] after it
    picked: Tensor | None = None  # [B, M] the likeliest tokens, in place of logits


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification rule decided. All on the device; the engine copies `tokens` to the host, once a round."""

    tokens: Tensor  # [B, D + 1] int64: accepted draft tokens, then the recovered or bonus token, then PAD
    path: Tensor  # [B, D + 1] int64: rows of the target pass on the accepted path, from the anchor's row 0; then PAD
    accepted: Tensor  # [B] int64: number of accepted draft tokens


@dataclass(frozen=True, slots=True)
class Features:
    """True target features of observed positions, as the drafter's needs asked for them."""

    taps: Mapping[int, Tensor]  # layer -> [B, R, H]
    hidden_pre: Tensor | None = None  # [B, R, H]
    hidden_post: Tensor | None = None  # [B, R, H]


@dataclass(frozen=True, slots=True)
class Observation:
    """What became true: told to the drafter after every commit.

    Features belong to the positions whose target rows are now in the cache; the new anchor has none yet.
    """

    tokens: tuple[tuple[int, ...], ...]  # per row: tokens committed now, in order; the last one is the new anchor
    starts: tuple[int, ...]  # [B] absolute position of the first feature row of each row
    counts: tuple[int, ...]  # [B] number of feature rows of each row
    features: Features | None = None  # rows at or past a row's count are meaningless
    own: tuple[int, ...] = ()
    """[B] how many of the tokens, from the first on, are the receiving drafter's own latest chain; () where none is.
    Scratch rows it wrote for them still hold."""

    def news(self, index: int, known: int) -> tuple[int, ...]:
        """Tokens of a row beyond the first `known` ones of its text: prompts are observed again, chunk by chunk.

        Args:
            index: Place of the row in this observation.
            known: Tokens of the row's text, prompt included, that the receiver already has.
        """
        first = self.starts[index] + 1  # position of tokens[0]
        assert known >= first, f"{first - known} tokens before position {first} were never observed"
        return self.tokens[index][known - first :]


@dataclass(slots=True)
class Counts:
    """Counts of one request or one run. K excludes the bonus token; names follow vLLM's per-request metrics.

    mean_acceptance_length = (accepted + rounds) / rounds, the bonus token included, over all decode rounds.
    draft_acceptance_rate = accepted / drafted. Tokens after a stop are not counted.
    """

    num_rounds: int = 0  # target passes after the prefill
    num_spec_steps: int = 0  # of those, rounds that verified at least one draft token
    num_draft_calls: int = 0  # times the drafter was asked
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_generated_tokens: int = 0  # committed, the prefill's token included
    drafted_at: list[int] = field(default_factory=list)  # rounds in which position i was drafted
    reached_at: list[int] = field(default_factory=list)  # of those, rounds in which all earlier positions were accepted
    accepted_at: list[int] = field(default_factory=list)  # of those, rounds in which it was accepted
    rounds_by_context: list[int] = field(default_factory=list)  # rounds that drafted, by `measure.context_bucket`
    accepted_by_context: list[int] = field(default_factory=list)  # draft tokens accepted in them


@dataclass(slots=True)
class Timings:
    """Seconds of one request or run, by clock span. In a batch every row carries the batch's round times."""

    prefill_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    ttft_s: float = 0.0  # from the request's start to its first token
    decode_s: float = 0.0  # from the first token to the last

    def add(self, spent: Timings) -> None:
        """Charge the spans of a round or a prefill; the two wall-clock totals are set by the engine."""
        self.prefill_s += spent.prefill_s
        self.draft_s += spent.draft_s
        self.target_s += spent.target_s
        self.verify_s += spent.verify_s
        self.other_s += spent.other_s


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished request."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]  # the stop token, if one ended the text, is included
    text: str  # without the stop token and without the stop string
    finish: Literal["stop", "length", "context"]
    stopped_by: int | str | None  # the stop id or stop string
    seed: int  # the seed in use, also where the request named none
    counts: Counts
    timings: Timings
    logprobs: tuple[float, ...] | None = None
