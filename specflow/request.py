"""One request on the host: its tokens so far, where it stops, and what is counted of it. Plain integers throughout."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from specflow.errors import RequestError
from specflow.measure import context_bucket
from specflow.types import Counts, Generation, Sampling, Timings

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.text import TextStream

__all__ = ["Event", "Request", "RequestState", "make_requests"]

ENCODE = "encode text first: engine.codec.encode(text) or encode_chat(messages)"

Finish = Literal["stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, how to sample, and the seed in use."""

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int

    def check(self, vocab_size: int, context_length: int) -> None:
        """Refuse what cannot be decoded.

        Raises:
            RequestError: The prompt is empty, too long, or names a token the target does not have.
        """
        where = f"prompt {self.index}"
        if not self.prompt:
            raise RequestError(where, "it has no tokens", "at least one token", "give a non-empty prompt")
        if len(self.prompt) >= context_length:
            raise RequestError(
                where,
                f"it has {len(self.prompt)} tokens and the context holds {context_length}",
                f"at most {context_length - 1} tokens, to leave room for an answer",
                "shorten the prompt, or raise runtime.context as far as the model allows",
            )
        named = (*self.prompt, *self.sampling.logit_bias, *self.sampling.stop_ids)
        outside = next((token for token in named if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise RequestError(
                where, f"token id {outside} is outside the vocabulary", f"ids from 0 to {vocab_size - 1}"
            )


def make_requests(prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> list[Request]:
    """Pair prompts with sampling options; a request without a seed gets a fresh one of its own."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise RequestError(
            "prompts", f"a {type(prompts).__name__}", "a list of prompts, each a list of token ids", ENCODE
        )
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling or ())
    if len(each) != len(prompts) or not all(isinstance(options, Sampling) for options in each):
        kinds = ", ".join(sorted({type(options).__name__ for options in each}))
        found = f"{len(each)} sampling options ({kinds}) for {len(prompts)} prompts"
        raise RequestError("sampling", found, "one Sampling for all, or one each")
    return [
        Request(
            index, _token_ids(index, prompt), options, secrets.randbits(63) if options.seed is None else options.seed
        )
        for index, (prompt, options) in enumerate(zip(prompts, each, strict=True))
    ]


def _token_ids(index: int, prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, prompt))
    except TypeError as error:
        raise RequestError(
            f"prompt {index}",
            f"a {type(prompt).__name__} that does not hold token ids",
            "a sequence of integers",
            ENCODE,
        ) from error


@dataclass(frozen=True, slots=True)
class Event:
    """Progress of one request: new final text, and the result once it is finished."""

    index: int
    text: str
    done: Generation | None = None


class RequestState:
    """A request while it is decoded.

    Invariant: `tokens` is what the user gets. What a round verified beyond a stop is neither kept nor counted.
    """

    def __init__(self, request: Request, stop_ids: Sequence[int], context_length: int, text: TextStream) -> None:
        sampling = request.sampling
        self.request = request
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.stopped_by: int | str | None = None
        self.counts = Counts()
        self.timings = Timings()
        self.logprobs: list[Tensor] = []
        self._stops = sampling.stops(stop_ids)
        self._most = min(sampling.max_new_tokens, context_length - len(request.prompt))
        self._capped_by: Finish = "length" if self._most == sampling.max_new_tokens else "context"
        self._text = _Text(text, sampling)

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    @property
    def draft_limit(self) -> int:
        """Most draft tokens that can still be of use: the bonus token takes one place of what is left."""
        return self._most - len(self.tokens) - 1 if self.request.sampling.speculate else 0

    def append(self, tokens: Sequence[int]) -> int:
        """Commit tokens up to the first stop, which beats a length cap in the same place.

        Returns:
            How many were kept.
        """
        for kept, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if token in self._stops:
                self.finish, self.stopped_by = "stop", token
            elif (found := self._text.push(token, len(self.tokens))) is not None:
                self.finish, self.stopped_by = "stop", found
            elif len(self.tokens) >= self._most:
                self.finish = self._capped_by
            if self.finish is not None:
                self._text.close()
                return kept
        return len(tokens)

    def count_round(self, nodes: int, depth: int, accepted: int, kept: int) -> None:
        """Book one round: positions past a stop were neither drafted nor accepted as far as the user is concerned.

        Args:
            nodes: Draft tokens verified for this request.
            depth: Draft positions they filled; fewer than nodes in a tree.
            accepted: Draft tokens the rule accepted.
            kept: Tokens of the round up to the first stop.
        """
        counts = self.counts
        counts.num_rounds += 1
        seen, accepted = min(depth, kept) if self.finish else depth, min(accepted, kept)
        if not seen:
            return
        counts.num_spec_steps += 1
        counts.num_draft_tokens += nodes - (depth - seen)
        counts.num_accepted_draft_tokens += accepted
        for column in (counts.drafted_at, counts.reached_at, counts.accepted_at):
            column.extend([0] * (seen - len(column)))
        self._count_context(len(self.request.prompt) + len(self.tokens) - kept, accepted)
        for position in range(seen):
            counts.drafted_at[position] += 1
            counts.reached_at[position] += position <= accepted
            counts.accepted_at[position] += position < accepted

    def _count_context(self, context: int, accepted: int) -> None:
        bucket = context_bucket(context)
        for column, more in ((self.counts.rounds_by_context, 1), (self.counts.accepted_by_context, accepted)):
            column.extend([0] * (bucket + 1 - len(column)))
            column[bucket] += more

    def event(self) -> Event:
        """What became final since the last call."""
        return Event(self.request.index, self._text.take(), self._result() if self.finish else None)

    def _result(self) -> Generation:
        assert self.finish is not None
        logprobs: tuple[float, ...] | None = None
        if self.request.sampling.logprobs:
            logprobs = tuple(value for piece in self.logprobs for value in piece.tolist())
        return Generation(
            prompt_tokens=self.request.prompt,
            tokens=tuple(self.tokens),
            text=self._text.text,
            finish=self.finish,
            stopped_by=self.stopped_by,
            seed=self.request.seed,
            counts=replace(self.counts, num_generated_tokens=len(self.tokens)),
            timings=self.timings,
            logprobs=logprobs,
        )


@dataclass
class _Text:
    """Text of a request as it grows; holds back what may still turn out to be part of a stop string."""

    stream: TextStream
    sampling: Sampling
    text: str = ""
    _taken: int = 0
    _searched: int = 0  # stop strings that end within this many characters were seen, or came too early to count
    _closed: bool = False
    _held: int = field(init=False)

    def __post_init__(self) -> None:
        self._held = max((len(stop) for stop in self.sampling.stop_strings), default=1) - 1

    def push(self, token: int, num_tokens: int) -> str | None:
        """Add a token; the stop string that its text completes, if one does."""
        self.text += self.stream.push((token,))
        if not self.sampling.stop_strings:
            return None
        seen = self.text + self.stream.peek()
        before, self._searched = self._searched, len(seen)
        if num_tokens < self.sampling.min_new_tokens:
            return None
        places = ((seen.find(stop, max(0, before + 1 - len(stop))), stop) for stop in self.sampling.stop_strings)
        hits = [(at, stop) for at, stop in places if at >= 0]
        if not hits:
            return None
        at, stop = min(hits)
        self.text = seen[:at]
        self._closed = True
        return stop

    def close(self) -> None:
        """No more tokens: incomplete characters at the end become final, unless a stop string has cut the text."""
        if not self._closed:
            self.text += self.stream.flush()
            self._closed = True

    def take(self) -> str:
        end = len(self.text) if self._closed else max(self._taken, len(self.text) - self._held)
        piece, self._taken = self.text[self._taken : end], end
        return piece
