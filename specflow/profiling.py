"""Measures a cost model: target passes, drafts and rounds, timed on the device at hand.

Every pass over the plan visits every point once, in an order that rotates, so that a slow minute of the machine falls
on all of them. The text is a phrase that repeats itself: networks do not care, and copying sources find drafts of any
length in it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import torch

from specflow.cost import CostModel, Timing
from specflow.device import asking_is_free, torch_threads
from specflow.draft.base import Needs
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.errors import DataError
from specflow.handover import asks_for_likeliest, empty_block, features_of, score_block
from specflow.law import PointMass
from specflow.length import Fixed
from specflow.measure import spread
from specflow.noise import RoundNoise
from specflow.tree import chain
from specflow.types import DraftBlock, DraftBudget, Features, Observation, Sampling

if TYPE_CHECKING:
    from specflow.draft.base import Drafter
    from specflow.target.base import Target

__all__ = ["CONTEXTS", "ROWS", "Plan", "Profiler", "Stopwatch", "make_plan"]

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
CONTEXTS = (64, 512, 1024)
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PERIOD = 24  # tokens after which the text repeats itself
CHUNK = 512  # tokens of a prefill pass
ROUND_TOKENS = 9  # tokens of a request whose rounds are timed

T = TypeVar("T")
Point = tuple[str, int, int, int]
"""(table of the cost model, size, batch, context)"""


class Stopwatch:
    """Seconds of a piece of work: between device events on CUDA, by the wall clock elsewhere, queues drained first."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = perf_counter) -> None:
        self._device, self.now = device, clock

    def seconds(self, work: Callable[[], T]) -> tuple[float, T]:
        """How long a call and what it started on the device take, and what it returned."""
        if self._device.type == "cuda":
            return self._events(work)
        self._drain()
        began = self.now()
        result = work()
        self._drain()
        return self.now() - began, result

    def _events(self, work: Callable[[], T]) -> tuple[float, T]:
        stream = torch.cuda.current_stream(self._device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        began.record(stream)
        result = work()
        ended.record(stream)
        torch.cuda.synchronize(self._device)
        return began.elapsed_time(ended) / 1e3, result

    def _drain(self) -> None:
        if self._device.type == "mps":
            torch.mps.synchronize()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    depths: tuple[int, ...] = ()  # of drafts; () without a drafter
    repeat: int = 5
    budget_s: float | None = None  # None: as long as it takes

    @property
    def room(self) -> int:
        """Slots that are needed after a context."""
        rounds = 2 * len(self.depths) + 1
        return max(*self.rows, rounds + max(self.depths, default=0), ROUND_TOKENS) + 1

    @property
    def num_points(self) -> int:
        """Things timed in one pass over the plan."""
        settings = len(self.batches) * len(self.contexts)
        return settings * (len(self.rows) + len(self.depths)) + len(self.batches) * (2 if self.depths else 1)


def make_plan(parts: EngineParts, k: int, asked: Plan, stretch: bool) -> Plan:
    """A plan that fits the target and the drafter.

    Args:
        parts: Target and drafter.
        k: Deepest draft position.
        asked: Rows, contexts, batches, repeats and budget; depths are chosen here.
        stretch: Whether contexts that do not fit are left out; False refuses them.

    Raises:
        DataError: A context does not fit, or none does.
    """
    most = parts.target.info.context_length
    deepest = _deepest(parts.drafter, k)
    depths = tuple(sorted({depth for depth in (*DEPTHS, deepest) if 0 < depth <= deepest}))
    rows = tuple(sorted({1, *(count for count in asked.rows if count < most // 2 or not stretch)}))
    plan = replace(asked, rows=rows, batches=tuple(sorted(set(asked.batches))), depths=depths)
    free = most - plan.room
    contexts = tuple(sorted({context for context in asked.contexts if context <= free}))
    if left_out := sorted(set(asked.contexts) - set(contexts)):
        if not stretch:
            found = f"context {left_out[-1]} with {plan.room} tokens after it"
            raise DataError("--contexts", found, f"at most {free}: {parts.target.info.name} holds {most} tokens")
        contexts = contexts or ((free,) if free > 0 else ())
    if not contexts:
        raise DataError("--rows", f"{max(rows)} rows", f"a context and its rows within {most} tokens")
    return replace(plan, contexts=contexts)


def _deepest(drafter: Drafter | None, k: int) -> int:
    if drafter is None:
        return 0
    return k if drafter.branches else min(k, drafter.num_nodes)


class Profiler:
    """Measures one target, with its drafter if it has one.

    Args:
        parts: What a round is made of; the length policy is not used.
        plan: What is measured.
        sampling: The requests'; decides what drafters and rounds compute.
        clock: Seconds, for tests.
    """

    def __init__(
        self, parts: EngineParts, plan: Plan, sampling: Sampling, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._parts, self._plan = parts, plan
        endless = {"ignore_eos": True, "stop_ids": (), "stop_strings": (), "min_new_tokens": 0}
        self._sampling = sampling.model_copy(update={**endless, "max_new_tokens": ROUND_TOKENS, "seed": 0})
        self._greedy = asks_for_likeliest(parts.target.info, self._sampling)
        self._watch = Stopwatch(parts.target.info.device, clock)
        self._samples: dict[Point, list[float]] = defaultdict(list)
        self._nodes: dict[int, int] = {}
        self._own = False  # blocks are verified in another way than chains
        self._places: dict[tuple[int, int], _Place] = {}
        self._ends: float | None = None

    def measure(self, advance: Callable[[str], None] = lambda _: None) -> CostModel:
        """Run the plan; where the budget ends it early, every point has fewer repeats than planned, but some.

        Args:
            advance: Called with the name of what was timed.

        Raises:
            DataError: The budget did not last for one pass over the plan.
        """
        budget = self._plan.budget_s
        self._ends = None if budget is None else self._watch.now() + budget
        turn = 0
        try:
            with torch_threads(self._parts.torch_threads):
                for turn in range(self._plan.repeat):
                    self._pass_over(turn, advance)
        except _BudgetSpent:
            if not turn:
                raise DataError(
                    f"a profile in {budget:g} s",
                    f"{len(self._samples)} of {self._plan.num_points} points measured when they were over",
                    "time for one pass over all of them",
                    "raise --budget, or measure fewer rows, contexts or batches",
                ) from None
        return self._model()

    def _pass_over(self, turn: int, advance: Callable[[str], None]) -> None:
        plan = self._plan
        for batch, context in _rotated([(b, c) for b in plan.batches for c in plan.contexts], turn):
            self._check_budget()
            place = self._place(batch, context)
            for rows in _rotated(plan.rows, turn):
                self._time_target(place, rows, warm=turn == 0)
                advance(f"{rows} rows, batch {batch}, context {context}")
            if plan.depths:
                self._time_drafts(place, turn, advance)
        for batch in plan.batches:
            for speculate in (False, True) if plan.depths else (False,):
                self._time_rounds(batch, speculate, warm=turn == 0)
                advance(f"rounds, batch {batch}")

    def _check_budget(self) -> None:
        if self._ends is not None and self._watch.now() >= self._ends:
            raise _BudgetSpent

    def _place(self, batch: int, context: int) -> _Place:
        if (batch, context) not in self._places:
            self._places[batch, context] = _Place(self._parts, batch, context, self._plan.room, self._greedy)
        return self._places[batch, context]

    def _time_target(self, place: _Place, rows: int, warm: bool) -> None:
        for timed in (False, True) if warm else (True,):
            self._check_budget()
            seconds, _ = self._watch.seconds(lambda: place.score(rows))
            if timed:
                self._samples["target", rows, place.batch, place.context].append(seconds)

    def _time_drafts(self, place: _Place, turn: int, advance: Callable[[str], None]) -> None:
        """Rounds of all depths; the first one also drafts for the whole prompt, and is not counted."""
        self._check_budget()
        rounds = _Rounds(self._parts, place, self._sampling)
        rounds.run(self._plan.depths[0], self._watch)
        for depth in _rotated(self._plan.depths, turn):
            for timed in (False, True) if turn == 0 and depth != self._plan.depths[0] else (True,):
                self._check_budget()
                draft_s, verify_s, block = rounds.run(depth, self._watch)
                if not timed:
                    continue
                self._samples["draft", depth, place.batch, place.context].append(draft_s)
                self._samples["own_blocks", depth, place.batch, place.context].append(verify_s)
                self._nodes[depth] = max(self._nodes.get(depth, 0), block.num_nodes)
                self._own |= block.entry is not None or not block.topology.is_chain
            advance(f"draft of {depth}, batch {place.batch}, context {place.context}")

    def _time_rounds(self, batch: int, speculate: bool, warm: bool) -> None:
        """What real rounds spend outside draft and target.

        Where the host does not wait for every pass, spans do not tell the parts apart: the whole round is kept, of
        plain steps only, and the passes are taken off in the end.
        """
        free = asking_is_free(self._parts.target.info.device)
        if speculate and not free:
            return
        parts = replace(self._parts, length=Fixed(max(self._plan.depths, default=0)))
        context = self._plan.contexts[0]
        prompts = [_text(row, self._parts.target.info.vocab_size, context) for row in range(batch)]
        sampling = self._sampling.model_copy(update={"speculate": speculate})
        for timed in (False, True) if warm else (True,):
            self._check_budget()
            last = Engine(parts, EngineSettings(batch)).generate(prompts, sampling)[-1]
            if timed:
                spent, counts = last.timings, last.counts
                seconds = spent.verify_s + spent.other_s + (0.0 if free else spent.draft_s + spent.target_s)
                depth = round(sum(counts.drafted_at) / counts.num_rounds)
                self._samples["overhead", depth, batch, context].append(seconds / counts.num_rounds)

    def _model(self) -> CostModel:
        tables: dict[str, list[Timing]] = defaultdict(list)
        for (table, size, batch, context), seconds in sorted(self._samples.items()):
            if (found := spread(seconds)) is not None:
                tables[table].append(Timing(size, batch, context, found))
        model = CostModel(
            target=tuple(tables["target"]),
            draft=tuple(tables["draft"]),
            own_blocks=tuple(tables["own_blocks"]) if self._own else (),
            nodes=self._nodes if self._own else {},
        )
        overhead = tables["overhead"]
        if not asking_is_free(self._parts.target.info.device):
            overhead = [_without_pass(timing, model) for timing in overhead]
        return replace(model, overhead=tuple(overhead))


class _BudgetSpent(Exception):
    """No time is left."""


class _Place:
    """A batch of requests with filled caches, and what a drafter is told of their prompts."""

    def __init__(self, parts: EngineParts, batch: int, context: int, room: int, greedy: bool) -> None:
        self.batch, self.context, self.greedy = batch, context, greedy
        self.target: Target = parts.target
        info, nodes = parts.target.info, parts.drafter.num_nodes if parts.drafter else 0
        needs = parts.drafter.needs if parts.drafter else Needs()
        self.texts = [_text(row, info.vocab_size, context + room) for row in range(batch)]
        self.cache = parts.target.new_cache(batch, context + room + nodes + 1)
        self.observations = self._fill(needs)

    def _fill(self, needs: Needs) -> list[Observation]:
        """Run the prompts, all rows together. A drafter without needs hears only of the first anchor."""
        device, told = self.target.info.device, []
        for begin in range(0, self.context, CHUNK):
            count = min(CHUNK, self.context - begin)
            tokens = torch.tensor([text[begin : begin + count] for text in self.texts], device=device)
            positions = torch.arange(begin, begin + count, device=device).expand(self.batch, -1)
            output = self.target.forward(tokens, positions, self.cache, taps=needs.taps, rows="last")
            self.cache.keep([count] * self.batch)
            if needs.any:
                told.append(self.observation(begin, count, features=features_of(output, needs)))
        return told or [self.observation(self.context - 1, 1)]

    def observation(self, begin: int, count: int, features: Features | None = None) -> Observation:
        """The tokens after `count` positions from `begin` on became true, in every row."""
        tokens = tuple(text[begin + 1 : begin + 1 + count] for text in self.texts)
        return Observation(tokens, (begin,) * self.batch, (count,) * self.batch, features)

    def score(self, rows: int) -> None:
        """A target pass over a chain of this many rows, nothing of which is kept."""
        info = self.target.info
        anchors = [text[self.context] for text in self.texts]
        after = [text[self.context + 1 : self.context + rows] for text in self.texts]
        tokens = torch.tensor(after, dtype=torch.int64, device=info.device).view(self.batch, rows - 1)
        law = PointMass(tokens, info.vocab_size)
        block = DraftBlock(tokens, (rows - 1,) * self.batch, chain(rows - 1, info.device), law)
        score_block(self.target, self.cache, anchors, block, Needs(), self.greedy)


class _Rounds:
    """Rounds as the engine runs them, none of whose draft tokens is accepted: the context stays about the same."""

    def __init__(self, parts: EngineParts, place: _Place, sampling: Sampling) -> None:
        assert parts.drafter is not None
        self._target, self._drafter, self._place = parts.target, parts.drafter, place
        self._cache = place.cache.fork()
        self._drafter.reset(place.batch, self._cache)
        for row, text in enumerate(place.texts):
            self._drafter.start(row, text[: place.context], sampling)
        for observation in place.observations:
            self._drafter.observe(observation, range(place.batch))

    def run(self, depth: int, watch: Stopwatch) -> tuple[float, float, DraftBlock]:
        """One round: seconds of the draft and of the target pass, and the block."""
        info, needs, batch = self._target.info, self._drafter.needs, self._place.batch
        starts = tuple(self._cache.lengths)
        anchors = [text[starts[0]] for text in self._place.texts]
        noise = RoundNoise(range(batch), starts, info.device)
        budget = DraftBudget((depth,) * batch)
        draft_s, found = watch.seconds(lambda: self._drafter.propose(anchors, budget, noise))
        block = found if found is not None else empty_block(batch, info.vocab_size, info.device)
        greedy = self._place.greedy
        verify_s, output = watch.seconds(lambda: score_block(self._target, self._cache, anchors, block, needs, greedy))
        self._cache.keep((1,) * batch)
        told = self._place.observation(starts[0], 1, features_of(output, needs))
        own = (0,) * batch if block.topology.is_chain else ()
        self._drafter.observe(replace(told, own=own), range(batch))
        return draft_s, verify_s, block


def _without_pass(timing: Timing, model: CostModel) -> Timing:
    """A plain round without its target pass."""
    off = model.target_s(1, timing.batch, timing.context)
    seconds = timing.seconds
    rest = {name: max(0.0, getattr(seconds, name) - off) for name in ("median", "p25", "p75")}
    return replace(timing, seconds=replace(seconds, **rest))


def _text(row: int, vocab_size: int, length: int) -> tuple[int, ...]:
    """A phrase that repeats itself, another one in every row, the same in every run."""
    choose = random.Random(row)
    phrase = [choose.randrange(vocab_size) for _ in range(PERIOD)]
    return tuple(phrase[place % PERIOD] for place in range(length))


def _rotated(items: Sequence[T], turn: int) -> list[T]:
    """Another order every turn: begun somewhere else, and backwards every second time."""
    shift = turn * 5 % len(items)
    order = [*items[shift:], *items[:shift]]
    return order[::-1] if turn % 2 else order
