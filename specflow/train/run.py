"""A training run put together: from a recipe, a corpus and a directory to a drafter that is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from specflow.allocator import keep_all_memory
from specflow.draft.checkpoint import weights_identity
from specflow.errors import DataError
from specflow.provenance import Provenance
from specflow.recipe_draft import draft_data
from specflow.train.calibrate import CalibrationPlan, calibrate_drafter, write_temperatures
from specflow.train.capture import KeptFeatures, OnlineFeatures
from specflow.train.checkpoints import load_state, save_state
from specflow.train.corpus import check_target
from specflow.train.drafting import DraftingOptions, drafting_for
from specflow.train.fitting import fit_start
from specflow.train.held_out import HeldOut, sample
from specflow.train.loop import Loop, Narrowed
from specflow.train.objective import Objective
from specflow.train.opening import Beginning, published_objective, trained_part
from specflow.train.output import RunFolder, draw_curve, earlier_runs, save_drafter, with_weights, write_recipe
from specflow.train.plain_text import Pieces
from specflow.train.sequences import BatchOrder, Texts, key_of, make_batch
from specflow.train.store import FeatureStore, StoreFacts

if TYPE_CHECKING:
    from specflow.build import LoadedTarget
    from specflow.recipe import Recipe
    from specflow.train.batch import Batch, Drafting
    from specflow.train.capture import FeatureSource
    from specflow.train.loop import StepReport
    from specflow.train.options import TrainOptions
    from specflow.train.processes import Processes
    from specflow.train.sequences import Text

__all__ = ["Progress", "RunPlan", "Session", "TrainingRun"]

log = logging.getLogger(__name__)

FIT_POSITIONS = 200_000
"""Positions, padding left out, that first weights are fitted to."""

LOG_EVERY = 10
"""Steps whose figures make up one line of the log."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What is trained, on what, and where it goes."""

    recipe: Recipe
    corpus: Path
    output: Path
    options: TrainOptions
    features: Path | None = None  # a store of features; None: they are made anew for every batch
    checkpoint: Path | None = None  # weights to go on from
    text: tuple[Path, ...] = ()  # files of plain text that are trained on beside the answers


@dataclass(frozen=True, slots=True)
class Session:
    """How much of a run is done now. None of it changes what comes out in the end."""

    evaluate_every: int = 250  # steps
    checkpoint_every: int = 100  # steps
    minutes: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    steps: int
    loss: float
    held_out: Mapping[str, Any] | None  # the latest figures of this session
    made: int  # steps of this session
    positions: int  # of this session
    seconds: float  # of this session, but those of measuring


class TrainingRun:
    """One run. Files are written by the first process alone; all the rest happens in all of them.

    Args:
        plan: What is trained, on what, and where it goes.
        loaded: The target.
        processes: That share the work.

    Raises:
        DataError: The directory is of another run, or the corpus of another target.
        GraphError: The drafter's options do not fit.
        RecipeError: The recipe has nothing to train.
    """

    def __init__(self, plan: RunPlan, loaded: LoadedTarget, processes: Processes) -> None:
        self._plan, self._loaded, self._processes = plan, loaded, processes
        options, info = plan.options, loaded.target.info
        self._place, self._section = trained_part(plan.recipe)
        self.folder = RunFolder(plan.output)
        self.folder.read()
        check_target(plan.corpus, info.name, loaded.identity())
        known = self.folder.settings.get("corpus", {}).get("records")
        longest = min(options.max_length, info.context_length)
        self.texts = Texts.read(plan.corpus, options.held_out, longest, known)
        self.pieces = Pieces.read(plan.text, loaded.codec, longest)
        self._learnt = (*self.texts.training, *self.pieces.texts)
        beginning = Beginning(self._section, loaded, options, self.texts.counts(info.vocab_size), plan.checkpoint)
        self._trainee = beginning.make()
        self._objective = options.objective or published_objective(self._section, self._trainee)
        if self._trainee.trainable.confidence is not None and "confidence" not in self._objective.losses:
            log.warning("--objective has no loss `confidence`: the confidence head stays as it begins")
        self._order = BatchOrder([len(text) for text in self._learnt], options.batch_tokens, options.seed)
        self.steps = options.steps or -(-self._order.in_epochs(options.epochs or 1.0) // options.accumulate)
        _check_share(options.accumulate, processes)
        processes.wait()
        if processes.is_first:
            provenance = Provenance.collect(str(info.device), [options.seed])
            self.folder.open(self._settings(), provenance, earlier_runs(plan.checkpoint))
        processes.wait()
        self._source = self._features()
        keep_all_memory()
        self._drafting, self._loop = self._make_loop()
        self._positions, self._seconds = 0, 0.0  # of all sessions, measuring left out
        self._resume()
        self._fitted = self.step > 0 or options.start != "fitted" or plan.checkpoint is not None
        few = sample(self.texts.held_out, options.evaluate_tokens)
        kept = self._source if isinstance(self._source, FeatureStore) else KeptFeatures(self._source)
        self._sample = HeldOut(few, options.batch_tokens, kept, processes)

    @property
    def done(self) -> bool:
        """Whether all steps are made."""
        return self._loop.done >= self.steps

    @property
    def step(self) -> int:
        """Steps that are made."""
        return self._loop.done

    @property
    def used(self) -> list[Text]:
        """Answers that were in a batch so far; below one epoch not all were."""
        batches = range(self.step * self._plan.options.accumulate)
        places = {place for number in batches for place in self._order[number]}
        return [text for place, text in enumerate(self.texts.training) if place in places]

    @property
    def lacking(self) -> list[Text]:
        """Texts whose features the store lacks."""
        return [] if self.store is None else self.store.missing([*self._learnt, *self.texts.held_out])

    @property
    def store(self) -> FeatureStore | None:
        """Where features are kept; None where they are made online."""
        return self._source if isinstance(self._source, FeatureStore) else None

    def capture(self) -> Iterator[int]:
        """Make the features that the store lacks, in the first process while the others wait.

        Yields:
            Positions that were added.
        """
        if (store := self.store) is not None:
            if self._processes.is_first:
                yield from store.add(self.lacking, OnlineFeatures(self._loaded.target, store.needs))
            self._processes.wait()
            store.refresh()

    def go(self, session: Session, asked: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Make steps until all are made, time is over, or someone asks to stop; then keep where it stands.

        Args:
            session: How much is done now.
            asked: Whether the user wants to stop.

        Yields:
            Progress after every step.

        Raises:
            TrainingError: The run diverged.
        """
        self._fit()
        began, first = perf_counter(), self.step
        earlier = self._positions, self._seconds
        seen = self._measure() if self.step == 0 else None
        measured, positions = perf_counter() - began, 0
        reports: list[StepReport] = []
        while not self.done:
            late = session.minutes is not None and perf_counter() - began > 60 * session.minutes
            report = self._loop.step(self._batches(), asked() or late)
            reports.append(report)
            positions += report.positions
            spent = perf_counter() - began - measured
            self._positions, self._seconds = earlier[0] + positions, earlier[1] + spent
            ends = self.done or report.asked
            if report.step % LOG_EVERY == 0 or ends:
                self._log(reports)
                reports = []
            if report.step % session.evaluate_every == 0 or self.done:
                seen = self._measure()
                measured = perf_counter() - began - spent
            if report.step % session.checkpoint_every == 0 or ends:
                self._keep()
            yield Progress(report.step, self.steps, report.loss, seen, report.step - first, positions, spent)
            if report.asked:
                return

    def _fit(self) -> None:
        """Fit first weights, in every process alike."""
        if self._fitted:
            return
        batches: list[tuple[int, ...]] = []
        seen = 0
        while seen < FIT_POSITIONS and len(batches) < self.steps:
            batches.append(self._order[len(batches)])
            seen += sum(len(self._learnt[place]) for place in batches[-1])
        made = (self._batch(number) for number in range(len(batches)))
        if not fit_start(self._trainee.trainable.network, made):
            log.warning("start is fitted, and nothing of this drafter can be fitted: it begins as with start=target")
        self._fitted = True

    def finish(self) -> Mapping[str, Any]:
        """Measure on all held-out answers and on as many trained on, and write the drafter as it is now.

        Returns:
            The held-out figures, as `HeldOut` gives them.
        """
        figures = self._figures(self.texts.held_out)
        # As many answers that it has seen: what it knows of them alone is not the target's way but the texts.
        seen = self._figures(sample(self.used, sum(map(len, self.texts.held_out))))
        if self._processes.is_first:
            path = self._plan.output
            save_drafter(path, self._trainee.trainable)
            recipe = with_weights(self._plan.recipe, self._place, path)
            write_recipe(path, recipe)
            self.folder.note(result={**self._result(figures, seen), "calibration": self._calibrate(recipe)})
            name = self._section.method or self._section.source
            draw_curve(self.folder, f"{name} for {self._loaded.target.info.name}")
        self._processes.wait()
        return figures

    def _calibrate(self, recipe: Recipe) -> dict[str, Any] | None:
        """Fit the confidence head's temperatures, once all steps are made; None where there is nothing to fit."""
        trainable, rounds = self._trainee.trainable, self._plan.options.calibration_rounds
        chosen: tuple[float, ...] = getattr(trainable.options, "temperatures", ())
        if not (self.done and rounds) or trainable.confidence is None or chosen:
            return None
        prompts = [text.tokens[: text.num_prompt].tolist() for text in self.texts.held_out]
        plan = CalibrationPlan(rounds, seed=self._plan.options.seed)
        found = calibrate_drafter(recipe, self._place, self._loaded, prompts, plan)
        if found is None:
            return None
        write_temperatures(self._plan.output, found.temperatures)
        return {"for": {"temperature": recipe.sampling.temperature, "rule": recipe.verify.rule}, **found.facts()}

    def _figures(self, texts: Sequence[Text]) -> Mapping[str, Any]:
        measured = HeldOut(texts, self._plan.options.batch_tokens, self._source, self._processes)
        return measured.measure(self._drafting, self._trainee)

    def _result(self, figures: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "steps": self.step,
            "of": self.steps,
            "positions": self._positions,
            "seconds": round(self._seconds, 1),
            "processes": self._processes.count,
            "parameters": sum(each.numel() for each in self._loop.parameters),
            "vocabulary_coverage": self._trainee.coverage,
            "held_out": figures,
            "trained_on": seen,
        }

    def _settings(self) -> dict[str, Any]:
        """All that decides what comes out."""
        plan, info = self._plan, self._loaded.target.info
        start = None if plan.checkpoint is None else weights_identity(str(plan.checkpoint), 0)
        text = {"text": self.pieces.facts()} if plan.text else {}
        return {
            "options": plan.options.model_dump(mode="json"),
            "objective": self._objective.model_dump(mode="json"),
            "draft": draft_data(self._section, full=True),
            "target": {
                "model": info.name,
                "identity": self._loaded.identity(),
                "weights": info.weights,
                "runtime": info.runtime,
            },
            "corpus": {"records": self.texts.num_records, "texts": self.texts.digest(), **text},
            "features": "online" if plan.features is None else "stored",
            "checkpoint": start,
        }

    def _features(self) -> FeatureSource:
        target, needs = self._loaded.target, self._trainee.trainable.needs
        if self._plan.features is None:
            return OnlineFeatures(target, needs)
        if not self._processes.is_first:
            self._processes.wait()  # until the first one has made the directory
        store = FeatureStore(self._plan.features, StoreFacts.of(self._loaded), needs)
        if self._processes.is_first:
            self._processes.wait()
        return store

    def _make_loop(self) -> tuple[Drafting, Loop]:
        options, trainee = self._plan.options, self._trainee
        trainable = trainee.trainable
        drafting = drafting_for(trainable, DraftingOptions(trainee.depth, options.anchors))
        if options.dtype != "float32":
            drafting = Narrowed(drafting, getattr(torch, options.dtype))
        objective = Objective(drafting, trainee.tables, trainable.vocabulary, self._objective)
        return drafting, Loop(objective, trainable, options, self.steps, self._processes)

    def _batches(self) -> list[Callable[[], Batch]]:
        """This process's share of the next step."""
        first = self.step * self._plan.options.accumulate
        shared = self._processes.share(self._plan.options.accumulate)
        return [partial(self._batch, first + place) for place in shared]

    def _batch(self, number: int) -> Batch:
        texts = [self._learnt[place] for place in self._order[number]]
        return make_batch(texts, self._source.read(texts), key_of("batch", self._plan.options.seed, number))

    def _measure(self) -> Mapping[str, Any]:
        figures = self._sample.measure(self._drafting, self._trainee)
        if figures and self._processes.is_first:
            self.folder.log({"step": self.step, "held_out": figures})
        return figures

    def _log(self, reports: Sequence[StepReport]) -> None:
        if self._processes.is_first:
            last = reports[-1]
            means = {name: _mean([each.terms[name] for each in reports]) for name in last.terms}
            line = {"step": last.step, "loss": _mean([each.loss for each in reports]), **means}
            line |= {"norm": _mean([each.norm for each in reports]), "rate": float(f"{last.rate:.4g}")}
            self.folder.log({**line, "positions": self._positions, "seconds": round(self._seconds, 1)})

    def _keep(self) -> None:
        """Keep where the run stands."""
        if self._processes.is_first:
            totals = {"positions": self._positions, "seconds": self._seconds}
            save_state(self.folder.state, {**self._loop.state(), **totals})

    def _resume(self) -> None:
        """Go on where the run stands, if it was begun."""
        state = load_state(self.folder.state)
        if state is not None:
            self._loop.restore(state)
            self._positions, self._seconds = state["positions"], state["seconds"]
        if self._processes.is_first:
            self.folder.rewind(self.step)
        self._processes.wait()


def _mean(values: Sequence[float]) -> float:
    return float(f"{sum(values) / len(values):.6g}")


def _check_share(accumulate: int, processes: Processes) -> None:
    if accumulate % processes.count:
        found = f"{accumulate} batches of a step, and {processes.count} processes"
        hint = f"--accumulate {-(-accumulate // processes.count) * processes.count}; it does not slow a step down"
        raise DataError("--accumulate", found, "the same number of batches for each process", hint)
