"""The engine: prefill, round, generate, stream. It knows no method's name and no model's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from specflow.device import with_threads
from specflow.draft.base import Needs
from specflow.errors import RequestError
from specflow.handover import Prompt, empty_block, features_of, prefill, score_block
from specflow.measure import Clock
from specflow.noise import RoundNoise
from specflow.request import Event, Request, RequestState, make_requests
from specflow.sampling import BatchSampler
from specflow.tree import extents
from specflow.types import PAD, DraftBlock, Generation, Observation, Sampling, TargetOutput, Timings
from specflow.verify import Match

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.draft.base import Drafter
    from specflow.length import LengthPolicy
    from specflow.target.base import Cache, Exactness, Target
    from specflow.text import TextCodec
    from specflow.verify import Rule

__all__ = ["Engine", "EngineParts", "EngineSettings"]

ONE_CALL = "finish the older stream first, or build a second engine on the same loaded target"


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a round is made of."""

    target: Target
    codec: TextCodec
    rule: Rule
    length: LengthPolicy
    drafter: Drafter | None = None  # None: every round is a plain step
    torch_threads: int | None = None  # while decoding, where another runtime has the CPU; None leaves them alone


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How many requests are decoded together and how much of their prompts at once."""

    batch: int = 1
    context: int | None = None  # None: what the target was made for
    prefill_chunk: int = 512


class Engine:
    """Decodes requests with one target and at most one drafter. One call at a time: a new one ends an older stream.

    Vanilla decoding is the same loop with empty blocks, so baseline and speculation share every line.
    """

    def __init__(self, parts: EngineParts, settings: EngineSettings | None = None) -> None:
        self.target, self.codec = parts.target, parts.codec
        self.settings = settings or EngineSettings()
        info = parts.target.info
        self.context_length = min(info.context_length, self.settings.context or info.context_length)
        self._rule, self._length, self._drafter = parts.rule, parts.length, parts.drafter
        self._torch_threads = parts.torch_threads
        self._needs = parts.drafter.needs if parts.drafter else Needs()
        self._sampler = BatchSampler(info.vocab_size, info.stop_ids, info.device)
        self._states: list[RequestState] = []
        self._cache: Cache
        self._began = 0.0
        self._run: object = None  # the call that owns the state above

    @property
    def exactness(self) -> Exactness:
        """What equal texts can be expected: rows of a tree do not have the bits they have one at a time."""
        branches = self._drafter is not None and self._drafter.branches
        return "tie-exact" if branches else self.target.info.exactness

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Generation]:
        """Decode prompts to the end; results in the order of the prompts.

        Args:
            prompts: Token ids of each prompt.
            sampling: One for all, or one a prompt.
            on_text: Called with (prompt index, new text) as text becomes final.

        Raises:
            RequestError: A prompt is empty, too long or out of vocabulary; nothing has been decoded then.
        """
        finished: dict[int, Generation] = {}
        for event in self.events(prompts, sampling):
            if on_text is not None and event.text:
                on_text(event.index, event.text)
            if event.done is not None:
                finished[event.index] = event.done
        return [finished[index] for index in range(len(prompts))]

    def stream(self, prompt: Sequence[int], sampling: Sampling = Sampling()) -> Iterator[str]:  # noqa: B008 - frozen
        """Decode one prompt, yielding text as it becomes final."""
        return (event.text for event in self.events([prompt], sampling) if event.text)

    def events(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> Iterator[Event]:
        """Decode prompts, yielding progress as it happens: text as it becomes final, requests as they finish."""
        return with_threads(self._torch_threads, self._decode(make_requests(prompts, sampling)))

    def _decode(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Fill the batch, run rounds; finished requests leave it and waiting ones take their rows."""
        for request in requests:
            request.check(self.target.info.vocab_size, self.context_length)
        if not requests:
            return
        self._run = run = object()
        self._states, self._began = [], perf_counter()
        waiting, batch = deque(requests), min(self.settings.batch, len(requests))
        longest = max(len(request.prompt) + request.sampling.max_new_tokens for request in requests)
        nodes = self._drafter.num_nodes if self._drafter is not None else 0
        self._cache = self.target.new_cache(batch, min(longest, self.context_length) + nodes + 1)
        self._sampler.reset(batch)
        self._length.reset(batch)
        if self._drafter is not None:
            self._drafter.reset(batch, self._cache)
        while waiting or self._states:
            if self._run is not run:
                raise RequestError("engine", "another call began before this one ended", "one call at a time", ONE_CALL)
            row = next((row for row in range(batch) if row >= len(self._states) or self._states[row].finish), batch)
            if waiting and row < batch:
                yield self._admit(waiting.popleft(), row)
                continue
            batch = self._close_ranks(batch)
            if self._states:
                self._round()
                yield from [self._event(state) for state in self._states]

    def _round(self) -> None:
        """One round: draft, one target pass, verify, one copy to the host, commit."""
        states, starts = self._states, tuple(self._cache.lengths)
        clock = Clock(spent := Timings())
        anchors, generated = [state.anchor for state in states], [len(state.tokens) for state in states]
        noise = RoundNoise([state.request.seed for state in states], starts, self.target.info.device)
        block = self._propose(anchors, noise)
        clock.lap("draft_s")
        asked = any(state.request.sampling.logprobs for state in states)
        greedy = not asked and self._sampler.takes_likeliest(generated)
        output = score_block(self.target, self._cache, anchors, block, self._needs, greedy)
        clock.lap("target_s")
        law = self._sampler.law_of(output, block, generated)
        verdict = self._rule.verify(block, law, noise)
        logprobs = law.logprob(verdict.tokens, verdict.path) if asked else None
        host = torch.cat((verdict.tokens, extents(block)), dim=1).tolist()  # the one copy of a round
        clock.lap("verify_s")
        committed = [self._commit(b, row, logprobs) for b, row in enumerate(host)]
        path = None if block.topology.is_chain else verdict.path
        self._tell(committed, [row[-1] for row in host], output, path)
        clock.lap("other_s")
        for state in states:
            state.timings.add(spent)

    def _propose(self, anchors: Sequence[int], noise: RoundNoise) -> DraftBlock:
        states = self._states
        if self._drafter is not None:
            budget = self._length.budget([state.draft_limit for state in states], self._cache.lengths)
            if budget.widest > 0:
                for state, tokens in zip(states, budget.tokens, strict=True):
                    state.counts.num_draft_calls += tokens > 0
                block = self._drafter.propose(anchors, budget, noise)
                if block is not None:
                    return self._length.trim(block)
        info = self.target.info
        return empty_block(len(states), info.vocab_size, info.device)

    def _commit(self, row: int, found: Sequence[int], logprobs: Tensor | None) -> list[int]:
        """Give a request its tokens, up to the first stop, and count them."""
        state, (*verified, nodes, depth) = self._states[row], found
        tokens = [token for token in verified if token != PAD]
        kept = state.append(tokens)
        state.count_round(nodes, depth, len(tokens) - 1, kept)
        if logprobs is not None:
            state.logprobs.append(logprobs[row, :kept])
        return tokens[:kept]

    def _tell(self, committed: list[list[int]], drafted: list[int], output: TargetOutput, path: Tensor | None) -> None:
        """Commit cache rows and let everything that learns from a round see what became true."""
        starts, rows = tuple(self._cache.lengths), range(len(committed))
        counts = tuple(len(tokens) for tokens in committed)
        self._cache.keep(counts, path)
        self._sampler.commit(rows, committed)
        accepted = tuple(count - 1 for count in counts)
        self._length.observe(drafted, accepted)
        if self._drafter is not None:
            features, own = features_of(output, self._needs, path), accepted if path is None else ()
            self._drafter.observe(Observation(tuple(map(tuple, committed)), starts, counts, features, own), rows)

    def _admit(self, request: Request, row: int) -> Event:
        """Prefill a request into a row of the batch and sample its first token, the first anchor."""
        info, clock = self.target.info, Clock(spent := Timings())
        state = RequestState(request, info.stop_ids, self.context_length, self.codec.stream())
        self._states[row : row + 1] = [state]
        self._cache.clear(row)
        self._sampler.start(row, request.sampling, request.seed, request.prompt)
        self._length.start(row)
        if self._drafter is not None:
            self._drafter.start(row, request.prompt, request.sampling)
        last = len(request.prompt) - 1
        prompt, view = Prompt(request.prompt, self.settings.prefill_chunk, row), self._cache.row(row)
        output, begin = prefill(self.target, view, prompt, self._drafter)
        noise = RoundNoise([request.seed], [last], info.device)
        block = empty_block(1, info.vocab_size, info.device)
        law = self._sampler.law(output.logits, block, [0], rows=[row])
        verdict = Match().verify(block, law, noise)
        first = verdict.tokens[0].tolist()
        if request.sampling.logprobs:
            state.logprobs.append(law.logprob(verdict.tokens, verdict.path)[0])
        state.append(first)
        self._sampler.commit([row], [first])
        if self._drafter is not None:
            begin = begin if self._needs.any else last
            tokens = request.prompt[begin + 1 :] + tuple(first)
            features = features_of(output, self._needs)
            self._drafter.observe(Observation((tokens,), (begin,), (len(tokens),), features), [row])
        clock.lap("prefill_s")
        state.timings.add(spent)
        state.timings.ttft_s = perf_counter() - self._began
        return self._event(state)

    def _close_ranks(self, batch: int) -> int:
        """Rows without a live request leave the batch of this size; the others move together. The new size."""
        live = [row for row, state in enumerate(self._states) if not state.finish]
        if live and len(live) < batch:
            for part in (self._cache, self._sampler, self._length, self._drafter):
                if part is not None:
                    part.select(live)
        self._states = [self._states[row] for row in live]
        return len(live)

    def _event(self, state: RequestState) -> Event:
        if state.finish:
            state.timings.decode_s = perf_counter() - self._began - state.timings.ttft_s
        return state.event()
