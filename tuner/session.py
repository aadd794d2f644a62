"""A tuning run from what the command line says to the files it leaves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.build import load_target
from specflow.errors import DataError, SpecFlowError
from specflow.files import claim_directory, write_json_atomic, write_text_atomic
from specflow.recipe import Recipe, parse_recipe, recipe_data
from specflow.target.load import read_config
from tuner.budget import Budget
from tuner.check import Check, Tolerance, baseline_of, changed_files, compare
from tuner.confirm import RacePlan, in_turns
from tuner.laboratory import Laboratory, LabPlan
from tuner.recipes import Chosen, tuned_yaml
from tuner.report import report
from tuner.result import TuneResult, write_result
from tuner.space import Candidate, Space
from tuner.storage import check_storage
from tuner.tune import TunePlan, tune
from tuner.workload import Asked, Rows, encoded, read_rows

if TYPE_CHECKING:
    from specflow.build import LoadedTarget

__all__ = ["Order", "again", "carry_out", "claim", "give_back", "write_run"]

Advance = Callable[[str], None]
MANIFEST = "run.json"
STOPPED = "stopped"
"""What ended a run before it had an answer."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the command line asked for."""

    asked: Asked
    directory: Path
    objectives: tuple[str, ...] = ("throughput",)
    concurrency: tuple[int, ...] = (1,)
    budget_s: float | None = None
    storage: str = ""  # "" is a journal in the directory
    trials: int = 300
    finalists: int = 4
    passes: int = 5
    ignore_eos: bool = False
    trust_noise: bool = False

    @property
    def where(self) -> str:
        """The storage of the studies."""
        return self.storage or str(self.directory / "study.journal")


def carry_out(
    order: Order, chosen: Chosen, rows: Rows, loading: Callable[[], LoadedTarget], advance: Advance
) -> TuneResult:
    """Tune, and leave tuned.yaml, tuned.json and report.html in the directory.

    Args:
        order: What was asked for.
        chosen: The recipes.
        rows: Of the prompt files: those that can be used, and the reasons against the others.
        loading: Loads the target.
        advance: Called with the name of what was done.

    Raises:
        DataError: There is no answer: see `tune`.
    """
    budget = Budget(order.budget_s)
    check_storage(order.where)
    loaded = loading()
    prompts, workload = encoded(rows, loaded.codec, order.asked, loaded.target.info.context_length)
    plan = LabPlan(
        directory=order.directory,
        max_new_tokens=order.asked.max_new_tokens,
        ignore_eos=order.ignore_eos,
        seed=order.asked.seed,
        concurrency=order.concurrency,
        trust_noise=order.trust_noise,
        **_shares(order.budget_s, len(chosen.recipes)),
    )
    lab = Laboratory(loaded, chosen.plain, prompts, plan, _config(loaded))
    how = TunePlan(
        workload=workload.model_copy(update={"ignore_eos": order.ignore_eos}),
        storage=order.where,
        study=_study_name(order, chosen, workload.files),
        objectives=order.objectives,
        concurrency=order.concurrency,
        trials=order.trials,
        seed=order.asked.seed,
        finalists=order.finalists,
        most_passes=order.passes,
    )
    result, recipe = tune(chosen.recipes, chosen.plain, lab, how, (budget, advance))
    result = result.model_copy(update={"refused": [*chosen.refused, *result.refused]})
    write_run(order.directory, result, recipe)
    return result


def _shares(budget_s: float | None, num_recipes: int) -> dict[str, float]:
    """Most seconds of each profile, where the budget is small: together they take a third of it."""
    if budget_s is None:
        return {}
    each = budget_s / 3 / (num_recipes + 1.5)
    return {"target_s": min(90.0, 1.5 * each), "drafter_s": min(60.0, each)}


def claim(directory: Path, order: Order, resume: bool) -> None:
    """Take a directory for a run, or the one of a run that was stopped; one that an error stopped is gone on with.

    Raises:
        DataError: It holds other files, or a run of other settings.
    """
    facts = _facts(order)
    manifest = directory / MANIFEST
    if not resume and not _goes_on(manifest, facts):
        claim_directory(directory, "continue a stopped run with --resume, or choose another with -o")
        write_json_atomic(manifest, facts)
        return
    try:
        before = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(str(directory), f"no run to resume: {error}", "the directory of a stopped run") from error
    changed = [name for name, value in facts.items() if not isinstance(before, dict) or before.get(name) != value]
    if changed:
        raise DataError(str(directory), f"cannot resume: {', '.join(changed)} differ", "the settings of the run")
    write_json_atomic(manifest, facts)


def _goes_on(manifest: Path, facts: dict[str, Any]) -> bool:
    """Whether the same was asked before and ended with an error."""
    try:
        before = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(before, dict) and STOPPED in before and {**facts, STOPPED: before[STOPPED]} == before


def give_back(directory: Path, error: SpecFlowError) -> None:
    """After an error: the same command may go on with what was measured; where nothing was, the directory is free."""
    manifest = directory / MANIFEST
    with suppress(OSError, ValueError, DataError):
        worth = [path for path in directory.iterdir() if path != manifest and (path.is_dir() or path.stat().st_size)]
        if worth:
            facts = json.loads(manifest.read_text(encoding="utf-8"))
            write_json_atomic(manifest, {**facts, STOPPED: str(error)})
            return
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def _facts(order: Order) -> dict[str, Any]:
    """What decides the traces of a run."""
    asked = order.asked
    return {
        "files": [str(path) for path in asked.files],
        "limit": asked.limit,
        "max_new_tokens": asked.max_new_tokens,
        "seed": asked.seed,
        "ignore_eos": order.ignore_eos,
    }


def _study_name(order: Order, chosen: Chosen, files: dict[str, str]) -> str:
    """Workers that are asked the same share a study; whose machine is another one is refused by its costs."""
    recipes = {name: recipe_data(recipe, full=True) for name, recipe in (("", chosen.plain), *chosen.recipes.items())}
    facts = [recipes, sorted(files.values()), order.objectives, _facts(order)["limit"]]
    facts += [order.asked.max_new_tokens, order.asked.seed, order.ignore_eos, order.trust_noise]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"specflow-{digest[:12]}"


def _config(loaded: LoadedTarget) -> dict[str, Any]:
    """The target's own config, for warnings about its kind."""
    if loaded.files is None:
        return {}
    try:
        found: dict[str, Any] = read_config(loaded.files).to_dict()
    except SpecFlowError:
        return {}
    return found


def write_run(directory: Path, result: TuneResult, recipe: Recipe) -> None:
    """Leave the files of a run.

    Raises:
        DataError: One cannot be written.
        RecipeError: The recipe does not survive its own file.
    """
    text = tuned_yaml(recipe, result)
    write_text_atomic(directory / "tuned.yaml", text)
    write_result(directory / "tuned.json", result)
    write_text_atomic(directory / "report.html", report(result))


def again(baseline: TuneResult, tolerance: Tolerance, passes: int, advance: Advance) -> Check | None:
    """Measure the answer of an earlier run again; None where it was not to speculate.

    Raises:
        DataError: Its prompts have changed, or it fails now.
        SpecFlowError: The target or the recipe cannot be built any more.
    """
    then = baseline_of(baseline)
    if then is None:
        return None
    if changed := changed_files(baseline):
        raise DataError("--data", changed[0], "the prompts that the baseline was measured on", "tune again")
    recipe = parse_recipe(baseline.recipe, "baseline")
    plain = Recipe(name="vanilla", target=recipe.target, sampling=recipe.sampling)
    work, first = baseline.workload, baseline.concurrency[0]
    asked = Asked(tuple(map(Path, work.files)), work.limit, work.max_new_tokens, work.seed)
    rows = read_rows(asked)
    loaded = load_target(recipe.target)
    prompts, _ = encoded(rows, loaded.codec, asked, loaded.target.info.context_length)
    lab = Laboratory(loaded, plain, prompts, LabPlan(Path(), work.max_new_tokens, work.ignore_eos, work.seed))
    space = Space({plain.name: plain, recipe.name: recipe})
    answer, nobody = Candidate(recipe.name), Candidate(plain.name)
    plan = RacePlan(most_passes=passes)
    race = in_turns([answer], nobody, lab.groups(first), lab.runner(space, first, {}), plan, advance)
    return replace(compare(then, race, answer, tolerance), label=recipe.name)
