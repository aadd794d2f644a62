"""Search for the sub-layers that drafts can do without, by the measured speed of the real loop.

Draft & Verify (2309.08168) searches over one yes or no for each attention and MLP sub-layer. Here the search starts
from sets that reading finished texts promises most of (`draft.skip_search`), then a seeded sampler varies them. What
counts is only what was measured: tokens per second of speculative decoding over those of plain decoding, prompt by
prompt in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specflow.bench.results import RunDirectory
from specflow.build import LoadedTarget, build_engine
from specflow.draft.skip_search import FinishedText, PassCosts, SkipMeter, grow_skips, rank_sublayers
from specflow.errors import DataError, RecipeError
from specflow.files import write_text_atomic
from specflow.measure import acceptance_length, merge_counts
from specflow.recipe import Recipe, dump_recipe, parse_recipe, recipe_data
from specflow.types import Generation, Sampling, Skip

if TYPE_CHECKING:
    import optuna

    from specflow.engine import Engine

__all__ = ["Found", "SearchPlan", "SkipSearch", "check_recipe"]

OPTIONS = ("skip_attention", "skip_mlp")
LEAST_PROMISE = 0.75
"""Warm starts stop where reading promises less than this share of the best promise."""
Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """How long to search, and on how much."""

    trials: int = 60
    budget_s: float | None = None  # no trial begins after this many seconds
    seed: int = 0
    max_new_tokens: int = 48
    read_tokens: int = 32  # of each prompt's answer, for the warm starts
    warm_starts: int = 12


@dataclass(frozen=True, slots=True)
class Found:
    """One skip set and everything measured of it."""

    skip: Skip
    ratio: float  # tokens per second over those of plain decoding, median of its trials
    acceptance_length: float
    num_trials: int


def check_recipe(recipe: Recipe) -> Recipe:
    """The recipe, if it can be searched.

    Raises:
        RecipeError: Its source does not leave single sub-layers out, or its k is 0.
    """
    draft = recipe.draft
    fits = draft is not None and draft.k > 0 and set(OPTIONS) <= set(type(draft).model_fields)
    if draft is None or not fits or getattr(draft, "leave_out", "sublayers") != "sublayers":
        named = "no draft" if draft is None else ", ".join(part.method or part.source for part in draft.parts)
        found = named if draft is None else f"{named} with k {draft.k}"
        expected = f"one source that can leave sub-layers out ({', '.join(OPTIONS)}), and a k of 1 or more"
        raise RecipeError("draft", found, expected, "search layer_skip, or a recipe made from it")
    return recipe


class SkipSearch:
    """A study of skip sets, kept in a directory: every trial is on disk when it ends, and a stopped study goes on.

    Args:
        recipe: What to decode with; its own skip sets are the first thing tried.
        target: Loaded.
        prompts: Token ids. None of them may be a prompt that results are reported on.
        plan: How long.
        store: Where trials go.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: LoadedTarget,
        prompts: Sequence[Sequence[int]],
        plan: SearchPlan,
        store: RunDirectory,
    ) -> None:
        self.recipe, self.plan, self.store = check_recipe(recipe), plan, store
        self._target, self._prompts = target, prompts
        settings = {"max_new_tokens": plan.max_new_tokens, "ignore_eos": True, "seed": plan.seed}
        self._sampling = recipe.sampling.model_copy(update=settings)
        plain = Recipe(name="vanilla", target=recipe.target, sampling=recipe.sampling, runtime=recipe.runtime)
        self._plain = build_engine(plain, target)

    def prepare(self, advance: Advance = lambda what: None) -> None:
        """Find sets to begin with, by reading: two passes a layer, and some for each set. A study does it once."""
        if not self.store.rows:
            study = self._open_study()
            for skip in self._warm_starts(advance):
                study.enqueue_trial(self._params(skip), skip_if_exists=True)

    def run(self, advance: Advance = lambda what: None) -> Found:
        """Search until the plan ends; writes best.yaml after every trial. Returns the fastest set."""
        began, study = perf_counter(), self._open_study()
        self._decode(self._plain, self._prompts[0])  # warms up
        while len(self.store.rows) < self.plan.trials:
            if self.plan.budget_s is not None and perf_counter() - began > self.plan.budget_s and self.store.rows:
                break
            trial = study.ask()
            row = self._measure(self._ask(trial)) | {"method": "trial", "repetition": len(self.store.rows)}
            study.tell(trial, row["ratio"])
            self.store.append(row)
            self._write_best()
            advance(f"{row['ratio']:.3f} of plain speed, acceptance length {row['acceptance_length']:.2f}")
        return self.ranked()[0]

    def ranked(self) -> list[Found]:
        """All sets, the fastest first."""
        by_set: dict[Skip, list[dict[str, Any]]] = {}
        for row in self.store.rows:
            by_set.setdefault(Skip(*(frozenset(row[name]) for name in OPTIONS)), []).append(row)
        found = [
            Found(
                skip, median(row["ratio"] for row in rows), median(row["acceptance_length"] for row in rows), len(rows)
            )
            for skip, rows in by_set.items()
        ]
        return sorted(found, key=lambda each: -each.ratio)

    def recipe_with(self, skip: Skip) -> Recipe:
        """The recipe with these sub-layers left out."""
        data = recipe_data(self.recipe)
        data["draft"] |= {name: tuple(sorted(getattr(skip, name.removeprefix("skip_")))) for name in OPTIONS}
        return parse_recipe(data, self.recipe.name or "recipe")

    def _open_study(self) -> optuna.Study:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = JournalStorage(JournalFileBackend(str(self.store.path / "study.journal")))
        sampler = optuna.samplers.TPESampler(seed=self.plan.seed + len(self.store.rows), n_startup_trials=8)
        study = optuna.create_study(
            storage=storage, study_name="skip", sampler=sampler, direction="maximize", load_if_exists=True
        )
        for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):  # of a session that was killed
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        return study

    def _warm_starts(self, advance: Advance) -> Iterator[Skip]:
        """The recipe's own set, then the most promising of a growing series, best promise first."""
        draft = self.recipe.draft
        assert draft is not None
        own = Skip(*(frozenset(getattr(draft, name)) for name in OPTIONS))
        if own != Skip():
            yield own
        meter = SkipMeter(self._target.target, [self._finished(prompt) for prompt in self._prompts], draft.k)
        costs = PassCosts.measure(self._target.target, draft.k)
        promised: list[tuple[float, Skip]] = [(costs.speed(Skip(), meter.measure(Skip())), Skip())]
        for skip in grow_skips(meter, rank_sublayers(meter, advance), costs):
            promised.append((costs.speed(skip, meter.measure(skip)), skip))
            advance(f"{len(promised) - 1} sub-layers left out: {promised[-1][0]:.3f} of plain speed promised")
            if promised[-1][0] < LEAST_PROMISE * max(promised, key=lambda pair: pair[0])[0]:
                break
        promised.sort(key=lambda pair: -pair[0])
        yield from (skip for _, skip in promised[: self.plan.warm_starts])

    def _finished(self, prompt: Sequence[int]) -> FinishedText:
        greedy = Sampling(max_new_tokens=max(self.plan.read_tokens, 16), ignore_eos=True)
        (made,) = self._plain.generate([prompt], greedy)
        return FinishedText((*prompt, *made.tokens), len(prompt))

    def _params(self, skip: Skip) -> dict[str, bool]:
        layers = range(self._target.target.info.num_layers)
        parts = {"attention": skip.attention, "mlp": skip.mlp}
        return {f"{kind}.{layer}": layer in chosen for kind, chosen in parts.items() for layer in layers}

    def _ask(self, trial: optuna.Trial) -> Skip:
        left = [name for name in self._params(Skip()) if trial.suggest_categorical(name, [False, True])]
        pairs = [name.split(".") for name in left]
        return Skip(*(frozenset(int(layer) for kind, layer in pairs if kind == part) for part in ("attention", "mlp")))

    def _measure(self, skip: Skip) -> dict[str, Any]:
        """One trial: every prompt plainly and with drafts, in turns; who begins alternates."""
        engine = build_engine(self.recipe_with(skip), self._target)
        made: dict[str, list[Generation]] = {"plain": [], "drafting": []}
        for index, prompt in enumerate(self._prompts):
            turns = [("plain", self._plain), ("drafting", engine)]
            for name, each in turns if index % 2 == 0 else reversed(turns):
                made[name].append(self._decode(each, prompt))
        speeds = {name: _speed(generations) for name, generations in made.items()}
        counts = merge_counts(generation.counts for generation in made["drafting"])
        return {
            **{name: sorted(getattr(skip, name.removeprefix("skip_"))) for name in OPTIONS},
            "ratio": speeds["drafting"] / speeds["plain"],
            "output_tps": speeds["drafting"],
            "plain_tps": speeds["plain"],
            "acceptance_length": acceptance_length(counts) or 1.0,
            "equal_texts": sum(a.tokens == b.tokens for a, b in zip(*made.values(), strict=True)),
            "counts": asdict(counts),
        }

    def _decode(self, engine: Engine, prompt: Sequence[int]) -> Generation:
        return engine.generate([prompt], self._sampling)[0]

    def _write_best(self) -> None:
        best = self.ranked()[0]
        figures = f"{best.ratio:.3f} of plain speed, acceptance length {best.acceptance_length:.2f}"
        head = f"# {figures}; details in manifest.json\n"
        write_text_atomic(self.store.path / "best.yaml", head + dump_recipe(self.recipe_with(best.skip)))


def _speed(generations: Sequence[Generation]) -> float:
    """Decode tokens per second over several requests."""
    seconds = sum(generation.timings.decode_s for generation in generations)
    tokens = sum(len(generation.tokens) - 1 for generation in generations)
    if not tokens or not seconds:
        raise DataError("search", "answers of one token", "prompts with longer answers")
    return tokens / seconds
