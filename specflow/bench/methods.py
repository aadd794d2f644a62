"""What a benchmark measures: anything that continues a prompt and says when its tokens came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from specflow.types import Counts, Generation, Sampling, Timings

__all__ = ["EngineMethod", "Generator", "Method", "Outcome", "Request", "outcome_of"]


class Generator(Protocol):
    """The part of an engine that this package uses."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Generation]: ...


@dataclass(frozen=True, slots=True)
class Request:
    """What every method of a run is asked alike."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool
    seed: int


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

    @property
    def output_tps(self) -> float | None:
        """Decode tokens per second; None where nothing followed the first delivery."""
        later = len(self.tokens) - self.first_tokens
        return later / self.decode_s if later > 0 and self.decode_s > 0 else None

    @property
    def tokens_per_round(self) -> float | None:
        """Acceptance length as seen from outside: tokens after the first delivery over passes after it."""
        return (len(self.tokens) - self.first_tokens) / self.rounds if self.rounds else None


def outcome_of(made: Generation) -> Outcome:
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
    )


class Method(Protocol):
    """Something to measure. `kind` decides what it is compared with."""

    name: str
    kind: Literal["recipe", "peer plain", "peer speculative"]

    def generate(self, request: Request) -> Outcome:
        """Continue one prompt."""


class EngineMethod:
    """A recipe's engine as a method."""

    kind: Literal["recipe", "peer plain", "peer speculative"] = "recipe"

    def __init__(self, name: str, engine: Generator, sampling: Sampling) -> None:
        self.name = name
        self._engine = engine
        self._sampling = sampling

    def generate(self, request: Request) -> Outcome:
        """Continue one prompt at batch 1 with the recipe's own sampling; the run decides length, stop and seed."""
        settings = {
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": request.ignore_eos,
            "seed": request.seed,
        }
        sampling = self._sampling.model_copy(update=settings)
        (made,) = self._engine.generate([request.prompt], sampling)
        return outcome_of(made)
