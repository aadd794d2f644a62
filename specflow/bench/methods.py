"""What a benchmark measures: anything that continues a prompt and says when its tokens came."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Protocol

from specflow.types import Counts, Generation, Sampling, Timings

if TYPE_CHECKING:
    from specflow.engine import Engine
    from specflow.target.base import TargetInfo

__all__ = [
    "Ask",
    "EngineMethod",
    "Generator",
    "Kind",
    "Method",
    "Outcome",
    "engine_facts",
    "first_divergence",
    "outcome_of",
    "target_facts",
]

Kind = Literal["recipe", "peer plain", "peer speculative"]


class Generator(Protocol):
    """The part of an engine that this package uses."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Generation]: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """What every method of a run is asked alike."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool
    seed: int

    def sampling(self, base: Sampling) -> Sampling:
        """A recipe's sampling under the run's length, stop and seed."""
        settings = {"max_new_tokens": self.max_new_tokens, "ignore_eos": self.ignore_eos, "seed": self.seed}
        return base.model_copy(update=settings)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One measured continuation. Rates count the tokens after the first delivery, over the time after it."""

    tokens: tuple[int, ...]
    text: str
    finish: str
    first_tokens: int  # tokens that had arrived at ttft_s; a speculative peer may deliver several at once
    ttft_s: float
    decode_s: float
    rounds: int | None  # model passes after the first delivery
    counts: Counts | None = None
    timings: Timings | None = None
    deliveries: tuple[float, ...] = ()  # seconds at which pieces of text came; a piece may hold several tokens

    @property
    def later_tokens(self) -> int:
        """Tokens after the first delivery."""
        return len(self.tokens) - self.first_tokens

    @property
    def output_tps(self) -> float | None:
        """Decode tokens per second; None where nothing followed the first delivery."""
        return self.later_tokens / self.decode_s if self.later_tokens > 0 and self.decode_s > 0 else None

    @property
    def tokens_per_round(self) -> float | None:
        """Acceptance length as seen from outside: tokens after the first delivery over passes after it."""
        return self.later_tokens / self.rounds if self.rounds else None

    @property
    def waits(self) -> list[float]:
        """Inter-token latencies as a reader meets them: seconds between one delivery and the next.

        A delivery holds several tokens where drafts were accepted, so this is no substitute for the time per token,
        which comes from token counts (1 / output_tps).
        """
        return [after - before for before, after in zip(self.deliveries, self.deliveries[1:], strict=False)]


def outcome_of(made: Generation, deliveries: Sequence[float] = ()) -> Outcome:
    """A finished request of an engine as a measurement."""
    return Outcome(
        tokens=made.tokens,
        text=made.text,
        finish=made.finish,
        first_tokens=1,
        ttft_s=made.timings.ttft_s,
        decode_s=made.timings.decode_s,
        rounds=made.counts.num_rounds,
        counts=made.counts,
        timings=made.timings,
        deliveries=tuple(deliveries),
    )


def first_divergence(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one text ends; None where they are equal."""
    for index, (mine, theirs) in enumerate(zip(tokens, reference, strict=False)):
        if mine != theirs:
            return index
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


def target_facts(info: TargetInfo) -> dict[str, str]:
    """What a result must say of the target that made it; `exactness` is what equal texts can be expected of it."""
    return {
        "exactness": info.exactness,
        "runtime": info.runtime,
        "dtype": info.weights,
        "device": str(info.device),
    }


def engine_facts(engine: Engine, lossy: bool) -> dict[str, Any]:
    """The same for an engine: drafts that branch promise less than their target does."""
    return {**target_facts(engine.target.info), "exactness": engine.exactness, "lossy": lossy}


class Method(Protocol):
    """Something to measure. `kind` decides what it is compared with."""

    name: str
    kind: Kind
    facts: Mapping[str, Any]  # runtime, dtype, device, exactness (None: nothing is promised) and lossy, for every row

    def generate(self, ask: Ask) -> Outcome:
        """Continue one prompt."""


class EngineMethod:
    """A recipe's engine as a method.

    Args:
        name: Name of the recipe.
        engine: Decodes it.
        sampling: The recipe's; a run decides length, stop and seed.
        facts: See `Method.facts`.
    """

    kind: Kind = "recipe"

    def __init__(self, name: str, engine: Generator, sampling: Sampling, facts: Mapping[str, Any]) -> None:
        self.name = name
        self.facts = facts
        self._engine = engine
        self._sampling = sampling

    def generate(self, ask: Ask) -> Outcome:
        """Continue one prompt at batch 1."""
        arrivals: list[float] = []
        started = perf_counter()
        (made,) = self._engine.generate(
            [ask.prompt], ask.sampling(self._sampling), lambda *_: arrivals.append(perf_counter() - started)
        )
        return outcome_of(made, arrivals)
