"""Traces: the workload decoded once, plainly, and what every drafter would have drafted at every position of it.

    prompts, bad = load_prompts([Path("chats.jsonl")])
    trace = record({"dspark": load_recipe("dspark")}, workload(prompts, target.codec), Path("runs/trace"), target)

What a drafter says at a position follows from the text and the target's true features of it, whichever rounds led
there, so one trace serves every length of draft and every length policy. Where the target samples, rules that weigh p
against q keep only the law of the text: for them the drafter is led along the text in a second pass, and its q of each
token is noted beside the target's p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from specflow.bench.methods import target_facts
from specflow.build import load_target, threads_beside
from specflow.engine import Engine, EngineParts, EngineSettings
from specflow.errors import DataError
from specflow.length import Fixed
from specflow.provenance import Provenance
from specflow.sampling import is_greedy
from specflow.types import Sampling
from tuner.drafters import TracedDrafter, deepest, law_drafter, no_deeper, open_drafter, parts_of
from tuner.recorded import Trace, load_trace
from tuner.recorders import ChainRecorder, LawRecorder, TreeRecorder
from tuner.shadow import Place, Recorder, Shadow, WatchedMatch
from tuner.trace_store import TraceStore

if TYPE_CHECKING:
    from specflow.bench import PromptRow
    from specflow.build import LoadedTarget
    from specflow.draft.base import Drafter
    from specflow.recipe import Recipe
    from specflow.text import TextCodec

__all__ = ["Trace", "TracePlan", "TracedPrompt", "load_trace", "record", "workload"]

DECIDED_BY_PLAN = ("max_new_tokens", "ignore_eos", "seed")


@dataclass(frozen=True, slots=True)
class TracePlan:
    """How the workload is decoded, and how deep drafters are recorded."""

    max_new_tokens: int = 128
    ignore_eos: bool = False
    seed: int = 0  # of the first request; the next ones count up
    k: int | None = None  # deepest draft position; None: what each recipe drafts, or may be tuned to draft
    batch: int = 4  # requests decoded together, and written together


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """One request of the workload."""

    key: str  # names it, unique
    category: str
    tokens: tuple[int, ...]


def workload(rows: Sequence[PromptRow], codec: TextCodec) -> list[TracedPrompt]:
    """The first turn of each row, with the model's chat template.

    Raises:
        DataError: A conversation does not go through the template.
    """
    return [TracedPrompt(row.key, row.category, tuple(codec.encode_chat(row.messages(0, ())))) for row in rows]


def record(
    recipes: Mapping[str, Recipe],
    prompts: Sequence[TracedPrompt],
    path: Path,
    target: LoadedTarget | None = None,
    plan: TracePlan = TracePlan(),
    advance: Callable[[str], None] = lambda _: None,
) -> Trace:
    """Decode the workload plainly and note what the drafters of all recipes would do; or go on where that ended.

    Args:
        recipes: By name; one target and one sampling. Those without a draft add nothing.
        prompts: The workload.
        path: Directory of the trace. What is there already is not decoded again, and drafters can be added.
        target: Loaded; None loads that of the recipes.
        plan: How.
        advance: Called with a prompt's key after it was traced.

    Raises:
        DataError: There is no prompt, the recipes disagree, or what is in the directory is another trace.
        GraphError: A drafter does not fit the target, or its drafts depend on earlier requests.
    """
    if not prompts:
        raise DataError("workload", "no prompts", "at least one", "give --data a file of prompts")
    first = _one_target(recipes)
    loaded = target or load_target(first.target)
    session = _Session(first, loaded, plan, prompts)
    store = TraceStore.create(path, session.settings(), session.requests())
    with store.locked():
        session.run(store, recipes, advance)
    return load_trace(path)


def _one_target(recipes: Mapping[str, Recipe]) -> Recipe:
    """Any of the recipes, which must agree in what they decode."""
    if not recipes:
        raise DataError("recipes", "none", "at least one")
    (name, first), *others = recipes.items()
    for label, recipe in others:
        if recipe.target != first.target or _asked(recipe.sampling) != _asked(first.sampling):
            raise DataError(label, f"another target or sampling than {name}", "one target and one sampling in a trace")
    return first


def _asked(sampling: Sampling) -> dict[str, Any]:
    """Sampling without what the plan decides."""
    return sampling.model_dump(mode="json", exclude=set(DECIDED_BY_PLAN))


class _Session:
    """One run of `record`."""

    def __init__(self, recipe: Recipe, loaded: LoadedTarget, plan: TracePlan, prompts: Sequence[TracedPrompt]) -> None:
        self._recipe, self._loaded, self._plan, self._prompts = recipe, loaded, plan, prompts
        asked = {"max_new_tokens": plan.max_new_tokens, "ignore_eos": plan.ignore_eos}
        self._sampling = recipe.sampling.model_copy(update={**asked, "logprobs": False, "speculate": True})

    def settings(self) -> dict[str, Any]:
        """Everything that decides the texts."""
        target = {"name": self._loaded.target.info.name, **target_facts(self._loaded.target.info)}
        plan = {name: getattr(self._plan, name) for name in DECIDED_BY_PLAN}
        sampling = {**_asked(self._recipe.sampling), **plan}
        return {"target": target, "sampling": sampling, "greedy": is_greedy(self._sampling)}

    def requests(self) -> list[dict[str, Any]]:
        """Each prompt, and how many tokens may follow it."""
        info, runtime = self._loaded.target.info, self._recipe.runtime
        context = min(info.context_length, runtime.context or info.context_length)
        return [
            {
                "key": each.key,
                "category": each.category,
                "prompt_tokens": len(each.tokens),
                "prompt": list(each.tokens),
                "most": min(self._plan.max_new_tokens, context - len(each.tokens)),
            }
            for each in self._prompts
        ]

    def run(self, store: TraceStore, recipes: Mapping[str, Recipe], advance: Callable[[str], None]) -> None:
        """Trace what is missing, batch by batch."""
        drafters: dict[int, TracedDrafter] = {}
        for name, recipe in recipes.items():
            parts, depth = parts_of(name, recipe), deepest(recipe, self._plan.k)
            for part, section in parts.items():
                traced = open_drafter(part, section, recipe, self._loaded, depth)
                drafters[store.add_drafter(traced.info)] = traced
            if parts:
                store.add_recipe(no_deeper(recipe, depth).model_copy(update={"name": name}), list(parts))
        provenance = asdict(Provenance.collect(str(self._loaded.target.info.device)))
        store.header["provenance"].append({**provenance, "plan": asdict(self._plan)})
        store.save_header()
        missing = [
            number
            for number in range(len(self._prompts))
            if not all(store.has(number, each) for each in (None, *drafters))
        ]
        asked = _Asked(self._sampling, drafters, self._loaded)
        for begin in range(0, len(missing), self._plan.batch):
            group = missing[begin : begin + self._plan.batch]
            self._trace(store, group, asked)
            for number in group:
                advance(self._prompts[number].key)

    def _trace(self, store: TraceStore, group: Sequence[int], asked: _Asked) -> None:
        """Decode some prompts together, and keep what was said."""
        asked.forget()
        texts, chances = self._decode(group, list(asked.recorders.values()))
        for law in asked.laws.values():
            law.texts = texts
        if asked.laws and self._decode(group, list(asked.laws.values()))[0] != texts:
            raise DataError(str(store.path), "another text when decoded again", "equal texts for equal seeds")
        for index, number in enumerate(group):
            self._write_text(store, number, texts[index], chances[index])
            for drafter in asked.recorders:
                if not store.has(number, drafter):
                    store.write(number, asked.arrays(drafter, index, texts[index]), drafter)
        self._note_confidence(store, asked.recorders)

    def _decode(
        self, group: Sequence[int], recorders: Sequence[Recorder]
    ) -> tuple[list[tuple[int, ...]], list[list[float]]]:
        """Plain texts of some prompts, and the target's probability of every token but the first."""
        shadow = Shadow(recorders)
        rule = WatchedMatch(shadow)
        parts = EngineParts(
            target=self._loaded.target,
            codec=self._loaded.codec,
            rule=rule,
            length=Fixed(max((each.k for each in recorders), default=0)),
            drafter=cast("Drafter", shadow),
            torch_threads=threads_beside(self._recipe, self._loaded),
        )
        runtime = self._recipe.runtime
        engine = Engine(parts, EngineSettings(len(group), runtime.context, runtime.prefill_chunk))
        each = [self._sampling.model_copy(update={"seed": self._plan.seed + number}) for number in group]
        made = engine.generate([self._prompts[number].tokens for number in group], each)
        texts = [generation.tokens for generation in made]
        places = [[Place(index, at) for at in range(len(text) - 1)] for index, text in enumerate(texts)]
        return texts, [[rule.chances.get(place, 1.0) for place in row] for row in places]

    def _write_text(self, store: TraceStore, number: int, text: Sequence[int], chances: Sequence[float]) -> None:
        """Keep a text, or see that it is the one that was kept.

        Raises:
            DataError: It is another one.
        """
        if not store.has(number):
            store.write(number, {"tokens": np.array(text, np.int32), "chances": np.array(chances, np.float64)})
        elif store.read(number)["tokens"].tolist() != list(text):
            found = f"another text for {self._prompts[number].key} than when it was traced first"
            raise DataError(str(store.path), found, "equal texts for equal settings", "trace into a new directory")

    def _note_confidence(self, store: TraceStore, recorders: Mapping[int, ChainRecorder | TreeRecorder]) -> None:
        """What the confidence of each drafter depends on shows when it first drafts."""
        changed = False
        for number, recorder in recorders.items():
            data = store.header["drafters"][number]
            if recorder.confidence_from not in (None, data["confidence_from"]):
                data["confidence_from"], changed = recorder.confidence_from, True
        if changed:
            store.save_header()


class _Asked:
    """Who is asked in a session: each drafter, and once more those whose law rules may weigh.

    Args:
        sampling: Of all requests.
        drafters: By their numbers in the trace.
        loaded: The target.
    """

    def __init__(self, sampling: Sampling, drafters: Mapping[int, TracedDrafter], loaded: LoadedTarget) -> None:
        self.recorders: dict[int, ChainRecorder | TreeRecorder] = {}
        self.laws: dict[int, LawRecorder] = {}
        for number, each in drafters.items():
            if each.info.tree:
                self.recorders[number] = TreeRecorder(each.drafter, each.info.k)
                continue
            self.recorders[number] = ChainRecorder(each.drafter, each.info.k, sampling)
            if each.info.sampled:
                self.laws[number] = LawRecorder(law_drafter(each, loaded), each.info.k, sampling)

    def forget(self) -> None:
        """Make room for other requests."""
        for recorder in (*self.recorders.values(), *self.laws.values()):
            recorder.forget()

    def arrays(self, drafter: int, request: int, text: Sequence[int]) -> dict[str, Any]:
        """All that was noted of a request."""
        law = self.laws[drafter].arrays(request, text) if drafter in self.laws else {}
        return {**self.recorders[drafter].arrays(request, text), **law}
