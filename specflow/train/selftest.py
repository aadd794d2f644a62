"""Whether a drafter's checkpoint is read as it was trained: the only sign of a wrong reading is low acceptance.

The output of speculative decoding is right whatever is loaded, so a tap one layer off, the wrong slot of a block or a
norm left out costs speed without a word. The target's own greedy tokens tell: drafts made all over them, the tokens
before being the target's (teacher-forced), agree at the first position in 60 to 90 of 100 cases where a healthy drafter
is read rightly, and in 0 to 25 where it is not. The readings that such mistakes lead to are tried too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ValidationError

from specflow.checkpoint.fitting import fitted
from specflow.checkpoint.layout import read
from specflow.checkpoint.write_drafter import whole_norms
from specflow.draft.base import Needs, SourceContext
from specflow.draft.borrowed import TargetTables
from specflow.draft.checkpoint import read_options
from specflow.draft.nn.weights import SeededTensors
from specflow.draft.shipped import drafter_path
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.errors import CheckpointError, DataError, RecipeError
from specflow.length import Fixed
from specflow.train.capture import OnlineFeatures
from specflow.train.drafting import DraftingOptions, drafting_for
from specflow.train.sequences import Text, make_batch
from specflow.types import Features, Sampling
from specflow.verify import Match

if TYPE_CHECKING:
    from torch import Tensor

    from specflow.build import LoadedTarget
    from specflow.draft.trainable import Trainable
    from specflow.recipe import Recipe
    from specflow.recipe_draft import SourceSection

__all__ = ["CLEAR", "HEALTHY", "LOW", "Found", "SelfTest", "greedy_texts", "parts_to_test", "run_selftest"]

C = TypeVar("C", bound=BaseModel)

log = logging.getLogger(__name__)

HEALTHY = 0.6
"""Agreement of trained drafters that are read rightly begins about here; small ones and hard texts have less."""
LOW = 0.1
"""Below it nothing useful is drafted: another target, another chat template, other weights, or no training."""
CLEAR = 0.1
"""A reading is clearly better by so much agreement, if that is twice its standard error too."""

_MOST_PROMPTS = 8
_NO_OPTION = "no option of this source says so: the weights were made for another convention"


@dataclass(frozen=True, slots=True)
class Found:
    """How often one reading of the weights agrees with the target."""

    name: str
    agreement: float  # share of positions whose first draft token is the target's own
    change: str  # what to write in the recipe to get this reading; empty for the declared one


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What all readings of one drafter came to."""

    source: str
    weights: str
    count: int  # positions that were judged
    readings: tuple[Found, ...]  # the declared one first

    @property
    def declared(self) -> Found:
        return self.readings[0]

    @property
    def better(self) -> Found | None:
        """The best other reading, where it is clearly better than the declared one."""
        best = max(self.readings[1:], key=lambda found: found.agreement, default=None)
        if best is None:
            return None
        variance = sum(each.agreement * (1.0 - each.agreement) for each in (best, self.declared)) / self.count
        return best if best.agreement - self.declared.agreement >= max(CLEAR, 2.0 * sqrt(variance)) else None

    @property
    def healthy(self) -> bool:
        """No other reading is clearly better, and the declared one agrees now and then."""
        return self.better is None and self.declared.agreement >= LOW

    def data(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "source": self.source,
            "weights": self.weights,
            "positions": self.count,
            "healthy": self.healthy,
            "better": None if self.better is None else self.better.name,
            "readings": [{"name": f.name, "agreement": f.agreement, "change": f.change} for f in self.readings],
        }


@dataclass(frozen=True, slots=True)
class _Reading:
    """A way to read the weights."""

    name: str
    change: str
    options: BaseModel
    state: Literal["as it is", "before the norm"] = "as it is"  # what serves as the target's last state
    slot: int = 0  # number of the slot that is judged
    label: int = 0  # number of the slot whose token it should foretell
    flipped: bool = False  # gains are taken the other way: less 1, or not


def parts_to_test(recipe: Recipe) -> tuple[SourceSection, ...]:
    """The parts of a recipe's draft that name trained weights.

    Raises:
        RecipeError: There is none.
    """
    parts = () if recipe.draft is None else recipe.draft.parts
    found = tuple(each for each in parts if getattr(each.options, "weights", None) is not None)
    if not found:
        names = ", ".join(each.source for each in parts) or "plain decoding"
        hint = "a draft model or the target's own layers have no conventions to mistake"
        raise RecipeError("draft.weights", f"none ({names})", "a drafter with trained weights", hint)
    return found


def greedy_texts(loaded: LoadedTarget, prompts: Sequence[Sequence[int]], tokens: int = 200) -> list[Text]:
    """Greedy answers of a target to a few prompts.

    Args:
        loaded: The target.
        prompts: Token ids of each; the first eight are answered.
        tokens: Of all answers together, about; a text that ends early leaves it at fewer.
    """
    chosen = [list(prompt) for prompt in islice(prompts, _MOST_PROMPTS)]
    if not chosen:
        raise DataError("prompts", "none", "at least one")
    parts = EngineParts(loaded.target, loaded.codec, Match(), Fixed(0))
    engine = Engine(parts, EngineSettings(batch=len(chosen)))
    each = max(3, ceil(tokens / len(chosen)))
    made = engine.generate(chosen, Sampling(max_new_tokens=each))
    return [
        Text(f"selftest/{number}", torch.tensor([*done.prompt_tokens, *done.tokens]), len(done.prompt_tokens))
        for number, done in enumerate(made)
    ]


def run_selftest(section: SourceSection, loaded: LoadedTarget, texts: Sequence[Text]) -> SelfTest:
    """Try the declared reading of a drafter's weights and those that are easily mistaken for it.

    Args:
        section: A part of a recipe that names weights.
        loaded: Its target.
        texts: Of `greedy_texts`.

    Raises:
        RecipeError: Its source cannot be run over whole texts.
        CheckpointError: The weights do not fit the options or the target.
        DataError: The texts are too short to judge anything.
    """
    bench = _Bench.of(section, loaded, texts)
    found, count = [], 0
    for reading in bench.readings():
        agreement, judged = bench.judge(reading)
        count = count or judged
        found.append(Found(reading.name, agreement, reading.change))
    return SelfTest(section.source, bench.weights, count, tuple(found))


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all readings of one drafter share."""

    section: SourceSection
    weights: str
    options: BaseModel  # with what the checkpoint says
    tensors: Mapping[str, Tensor]
    loaded: LoadedTarget
    tables: TargetTables
    texts: Sequence[Text]
    taps: dict[int, Tensor] = field(default_factory=dict)  # layer -> [B, T, H], filled when it is first read
    last: dict[str, Tensor] = field(default_factory=dict)  # hidden_pre, hidden_post

    @classmethod
    def of(cls, section: SourceSection, loaded: LoadedTarget, texts: Sequence[Text]) -> _Bench:
        options = section.options
        weights: str | None = getattr(options, "weights", None)
        if section.info.trainable is None or weights is None:
            raise RecipeError("draft.source", f"{section.source} without weights", "a drafter with trained weights")
        options = read_options(options, weights)
        slots = getattr(options, "slots", None)
        known = {} if slots is None else {"block_size": slots(section.k)}
        stored = read(str(drafter_path(weights)))
        tensors = stored.tensors if stored.layout.is_native else fitted(stored, loaded.target.info)
        tables = TargetTables(loaded.target)
        return cls(section, weights, _changed(options, weights=None, **known), tensors, loaded, tables, texts)

    def readings(self) -> Iterator[_Reading]:
        """The declared one, then the others, each as far as the source's options have it."""
        yield _Reading("as declared", "", self.options)
        made = self._make(_Reading("", "", self.options))
        fields, needs = type(self.options).model_fields, made.needs
        for key in ("layout", "order", "hidden"):
            if key in fields:
                yield from self._other_choices(key)
        if "causal" in fields:
            yield from self._other_sights()
        if "taps" in fields and needs.taps:
            yield from self._other_taps(tuple(getattr(made.network, "taps", needs.taps)))
        if needs.hidden_post and "hidden" not in fields:
            yield _Reading("state before the final norm", _NO_OPTION, self.options, state="before the norm")
        if "offset_norms" in fields:
            flipped = not getattr(self.options, "offset_norms", False)
            name = "gains stored less 1" if flipped else "gains stored whole"
            yield _Reading(name, f"offset_norms: {str(flipped).lower()}", self.options, flipped=True)
        if self._depth > 1:
            yield _Reading("second head first", _NO_OPTION, self.options, slot=1)
            yield _Reading("heads one token later", _NO_OPTION, self.options, label=1)

    @property
    def _depth(self) -> int:
        """Draft positions that are made: two of a network with a head for each, whose heads may be one off."""
        return min(2, getattr(self.options, "num_heads", 1)) if hasattr(self.options, "own_heads") else 1

    def _other_choices(self, key: str) -> Iterator[_Reading]:
        """The other words that an option may be."""
        words = type(self.options).model_fields[key].annotation.__args__  # type: ignore[union-attr]
        for word in words:
            if word != getattr(self.options, key):
                yield from self._with(f"{key} {word}", **{key: word})

    def _other_sights(self) -> Iterator[_Reading]:
        windowed: tuple[bool, ...] = self.options.windowed  # type: ignore[attr-defined]
        causal: bool | None = self.options.causal  # type: ignore[attr-defined]
        now = windowed if causal is None else (causal,) * len(windowed)
        for other, name in ((True, "causal block"), (False, "block seen both ways")):
            if any(each != other for each in now):
                yield from self._with(name, causal=other)

    def _other_taps(self, taps: tuple[int, ...]) -> Iterator[_Reading]:
        most = self.loaded.target.info.num_layers - 1
        for step, name in ((-1, "taps one layer lower"), (1, "taps one layer higher")):
            moved = tuple(min(max(tap + step, -1), most) for tap in taps)
            if moved != taps:
                yield from self._with(name, taps=moved)

    def _with(self, name: str, **values: Any) -> Iterator[_Reading]:
        """A reading with other options, if they go together."""
        words = ", ".join(f"{key}: {_yaml(value)}" for key, value in values.items())
        try:
            yield _Reading(name, words, _changed(self.options, **values))
        except ValidationError as error:
            log.debug("%s is not tried: %s", name, error)

    def judge(self, reading: _Reading) -> tuple[float, int]:
        """Agreement at the first draft position, and over how many positions."""
        made = self._make(reading)
        batch = make_batch(self.texts, self._features(made.needs, reading.state), 0)
        most = max(len(text) for text in self.texts)
        with torch.no_grad():
            slots = drafting_for(made, DraftingOptions(self._depth, most))(batch)
        judged, meant = slots[reading.slot], slots[reading.label]
        known = judged.known & meant.known
        count = int(known.sum())
        if not count:
            raise DataError("texts", "too short: no draft can be judged", "answers of several tokens", "other prompts")
        top = judged.logits[known].argmax(-1)
        if made.vocabulary is not None:
            top = made.vocabulary.to_target[top]
        return float((top == batch.labels(meant.at)[known]).double().mean()), count

    def _make(self, reading: _Reading) -> Trainable:
        make = self.section.info.trainable
        assert make is not None, "a source that is not run over whole texts was let in"
        whole = bool(getattr(reading.options, "offset_norms", False)) != reading.flipped
        tensors = whole_norms(self.tensors) if whole else self.tensors
        context = SourceContext(
            target=self.tables,
            k=self._depth,
            dependency=self.section.dependency,
            codec=self.loaded.codec,
            identify=self.loaded.identity,
        )
        return make(reading.options, context, _Stored(self.weights, tensors))

    def _features(self, needs: Needs, state: str) -> Features:
        """Features as a reading takes them; what was made for another one is kept."""
        lacking = tuple(sorted(set(needs.taps) - set(self.taps)))
        if lacking or not self.last:
            made = OnlineFeatures(self.loaded.target, Needs(lacking, hidden_pre=True, hidden_post=True))
            features = made.read(self.texts)
            self.taps.update(features.taps)
            for name, tensor in (("pre", features.hidden_pre), ("post", features.hidden_post)):
                assert tensor is not None, "both states were asked for"
                self.last[name] = tensor
        post = self.last["post" if state == "as it is" else "pre"]
        return Features({tap: self.taps[tap] for tap in needs.taps}, self.last["pre"], post)


class _Stored(SeededTensors):
    """The tensors of a checkpoint; none is drawn."""

    def __init__(self, where: str, given: Mapping[str, Tensor]) -> None:
        super().__init__(0, given)
        self._where = where

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `SeededTensors.draw`.

        Raises:
            CheckpointError: Always: what is asked for and not given is missing.
        """
        raise CheckpointError(self._where, f"tensor {name!r} is missing", f"shape {shape}")


def _changed(options: C, **values: Any) -> C:
    """The options with some of them set anew."""
    explicit = {name: getattr(options, name) for name in options.model_fields_set}
    return type(options).model_validate({**explicit, **values})


def _yaml(value: object) -> str:
    """As a recipe spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
