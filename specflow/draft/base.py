"""What the engine asks of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from specflow.draft.onnx_lm import ModelWeights
    from specflow.onnx.graphs import GraphFinder
    from specflow.target.base import Cache, Target
    from specflow.text import TextCodec
    from specflow.types import DraftBlock, DraftBudget, Observation, Sampling

__all__ = ["Drafter", "Draw", "ModelLoader", "Needs", "SourceContext", "Uniforms"]

Draw = Literal["greedy", "sampled", "coupled"]
"""How draft tokens are chosen where a request samples.

greedy   the most likely one: a point mass
sampled  drawn from the draft's law with numbers of their own, for rules that weigh p against q
coupled  drawn with the very numbers the target will use, for rules that compare: where the laws agree, so do the draws
"""

ModelLoader = Callable[[str, str, str, str], "tuple[Target, TextCodec]"]
"""Loads another language model by name, dtype, device and runtime, as recipes spell them."""


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source may build its drafter from, beside its own options."""

    target: Target
    k: int  # deepest draft position of a block
    dependency: str = ""  # name of the dependency it is combined with
    draw: Draw = "greedy"
    confidence: bool = False  # the length policy reads `DraftBlock.confidence`
    codec: TextCodec | None = None  # the target's, to compare vocabularies with
    load_model: ModelLoader | None = None
    graphs: GraphFinder | None = None  # where ONNX graphs of networks are kept; None: nowhere, torch runs them
    identify: Callable[[], str] = str  # tells the target from others by content, for graphs that hold parts of it
    threads: int | None = None  # of ONNX Runtime on a CPU
    weights: ModelWeights | None = None  # the target's, for networks that are a part of it and are written as graphs

    def takes_onnx(self, runtime: str) -> bool:
        """Whether a network with this `draft.runtime` runs as ONNX graphs: auto follows the target."""
        return runtime == "onnx" or (runtime == "auto" and not self.target.info.in_torch)


@dataclass(frozen=True, slots=True)
class Needs:
    """Target features a drafter wants with every observation."""

    taps: tuple[int, ...] = ()
    hidden_pre: bool = False
    hidden_post: bool = False

    @property
    def any(self) -> bool:
        return bool(self.taps or self.hidden_pre or self.hidden_post)


class Uniforms(Protocol):
    """Random numbers of this round, keyed by (request seed, stream, round, absolute position)."""

    def uniform(self, stream: str, row: int, position: int) -> float:
        """A number in (0, 1); the same key always gives the same number."""


class Drafter(Protocol):
    """Proposes blocks. `propose` never changes committed state: what is not observed did not happen."""

    @property
    def needs(self) -> Needs: ...

    @property
    def num_nodes(self) -> int:
        """Most nodes of a block, so that caches have room for them."""

    @property
    def branches(self) -> bool:
        """Whether blocks may be trees."""

    def reset(self, batch: int, cache: Cache) -> None:
        """Forget all requests; the next ones use rows 0 .. batch - 1.

        Args:
            batch: B.
            cache: The target's. A drafter may read its committed rows and use its scratch rows by way of `fork`.
        """

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """A new request takes this row. Its prompt features follow in observations, chunk by chunk."""

    def observe(self, observation: Observation, rows: Sequence[int]) -> None:
        """Committed tokens and their true features, for these rows (the observation is in the same order)."""

    def propose(self, anchors: Sequence[int], budget: DraftBudget, uniforms: Uniforms) -> DraftBlock | None:
        """Draft for all rows of the batch; None where no row has anything to propose (the round is a plain step).

        Args:
            anchors: Last committed token of each row.  # [B]
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
