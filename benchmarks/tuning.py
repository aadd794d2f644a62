"""Measure the tuner: how well it predicts, what its choice loses to the best of a measured grid, how long it takes.

    python benchmarks/tuning.py [--data ../shared/data/smoke/dev.jsonl] [--recipes R] [--limit 20]

Tunes the embedded model with every recipe that has weights, then runs the whole grid of methods and K for real, in
turns, and writes docs/figures/tuner/figures.json with the provenance of both. Takes hours on 2 cores with many
recipes; an interrupted tuning run resumes. The machine has to be quiet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import asdict, fields, replace
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from origins import without_folders  # noqa: E402

from specflow.build import LoadedTarget, load_target  # noqa: E402
from specflow.cost import CostModel  # noqa: E402
from specflow.errors import SpecFlowError  # noqa: E402
from specflow.files import write_json_atomic  # noqa: E402
from specflow.provenance import Provenance  # noqa: E402
from tuner.confirm import Race, RacePlan, in_turns  # noqa: E402
from tuner.interval import Work  # noqa: E402
from tuner.laboratory import Laboratory, LabPlan  # noqa: E402
from tuner.recipes import Chosen, read_recipes  # noqa: E402
from tuner.recorded import Drafts, Trace  # noqa: E402
from tuner.replay_scorer import ReplayScorer  # noqa: E402
from tuner.result import TuneResult, read_result  # noqa: E402
from tuner.scoring import Score  # noqa: E402
from tuner.session import Order, carry_out, claim  # noqa: E402
from tuner.space import POLICY, Candidate, K, Space  # noqa: E402
from tuner.trace import load_trace  # noqa: E402
from tuner.workload import Asked, encoded, read_rows  # noqa: E402

FIGURES = ROOT / "docs" / "figures" / "tuner"
RUN = ROOT / "runs" / "tuner"
GRID = (1, 2, 3, 4, 6, 8, 12)
TRACE_TOKENS, AT_ONCE = 4000, 64  # of the trace that is replayed, and configurations of it


def main() -> None:
    """Tune, measure the grid, write the figures."""
    options = _options()
    asked = Asked((options.data,), options.limit, options.max_new_tokens, 0)
    chosen = read_recipes(options.recipes or [], "smollm2-135m")
    loaded = load_target(chosen.plain.target)
    result = _tuned(Order(asked, RUN, budget_s=options.budget_s, ignore_eos=True), chosen, loaded)
    names = [name for name in chosen.recipes if name in result.costs]
    space = Space({chosen.plain.name: chosen.plain, **{name: chosen.recipes[name] for name in names}})
    began = perf_counter()
    race, scorer = _grid(asked, chosen, loaded, space, result)
    grid_s = perf_counter() - began
    figures = {
        "targets": {"median_error": 0.06, "worst_error": 0.15, "regret": 0.03, "share_of_grid_time": 0.15}
        | {"replays_a_second": 200, "target_profile_s": 90, "drafter_profile_s": 60},
        **_errors(race, scorer, chosen.plain.name),
        **_regret(race, result, grid_s),
        "replays_a_second": _replay_rates(space, result),
        "profile_s": result.profile_seconds,
        "refused": [each.model_dump() for each in result.refused],
        "provenance": without_folders(asdict(Provenance.collect(str(loaded.target.info.device), [0], [options.data]))),
    }
    FIGURES.mkdir(parents=True, exist_ok=True)
    write_json_atomic(FIGURES / "figures.json", figures)
    print(json.dumps({name: value for name, value in figures.items() if name != "provenance"}, indent=2))


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    smoke = ROOT.parent / "shared" / "data" / "smoke" / "dev.jsonl"
    parser.add_argument("--data", type=Path, default=smoke if smoke.is_file() else ROOT / "benchmarks" / "open.jsonl")
    parser.add_argument("--recipes", action="append", help="only these; may be repeated")
    parser.add_argument("--budget-s", type=float, help="seconds of the tuning run; none: until its intervals part")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    return parser.parse_args()


def _tuned(order: Order, chosen: Chosen, loaded: LoadedTarget) -> TuneResult:
    """One tuning run, or the finished one that is there."""
    if (RUN / "tuned.json").is_file():
        return read_result(RUN)
    claim(RUN, order, resume=RUN.exists())
    return carry_out(order, chosen, read_rows(order.asked), lambda: loaded, print)


def _grid(
    asked: Asked, chosen: Chosen, loaded: LoadedTarget, space: Space, result: TuneResult
) -> tuple[Race, ReplayScorer]:
    """Every method at every K, a fixed length, on all prompts; and the answer of the tuner in the same turns."""
    rows = read_rows(asked)
    prompts, _ = encoded(rows, loaded.codec, asked, loaded.target.info.context_length)
    lab = Laboratory(loaded, chosen.plain, prompts, LabPlan(RUN, asked.max_new_tokens, ignore_eos=True))
    plain, answer = Candidate(chosen.plain.name), result.answer.choice.candidate
    wanted = {Candidate.of(name, {K: k, POLICY: "fixed"}) for name in space.recipes for k in GRID} | {answer}
    contestants = [each for each in sorted(wanted, key=str) if each.settings and space.recipe(each) is not None]
    plan = RacePlan(most_passes=1, drops=False)
    costs = {name: CostModel.from_data(data) for name, data in result.costs.items()}
    race = in_turns(contestants, plain, lab.groups(1), lab.runner(space, 1, costs), plan, print)
    return race, ReplayScorer(load_trace(RUN / "trace"), space, costs, lab.memory)


def _errors(race: Race, scorer: ReplayScorer, plain: str) -> dict[str, Any]:
    """Predicted over measured speed-up, less one, of every contestant that can be replayed."""
    rates, base = _rates(race), scorer.score(Candidate(plain), 1).throughput
    found = {}
    for each, rate in rates.items():
        score = _score(scorer, each)
        if each.settings and score is not None:
            found[each.label] = score.throughput / base / (rate / rates[race.plain]) - 1.0
    sizes = sorted(abs(error) for error in found.values())
    return {
        "errors": found,
        "median_error": median(sizes) if sizes else None,
        "worst_error": sizes[-1] if sizes else None,
    }


def _score(scorer: ReplayScorer, candidate: Candidate) -> Score | None:
    """None where the trace cannot tell."""
    try:
        return scorer.score(candidate, 1)
    except SpecFlowError:
        return None


def _regret(race: Race, result: TuneResult, grid_s: float) -> dict[str, Any]:
    rates, answer = _rates(race), result.answer.choice.candidate
    best = max(rates, key=lambda each: rates[each])
    tuning_s = sum(result.seconds.values())
    return {
        "answer": answer.label,
        "best_of_grid": best.label,
        "regret": 1.0 - rates[answer] / rates[best],
        "tuning_s": tuning_s,
        "grid_s": grid_s,
        "share_of_grid_time": tuning_s / grid_s,
    }


def _rates(race: Race) -> dict[Candidate, float]:
    return {each: sum(work.values(), Work(0.0, 0.0)).rate for each, work in race.measured().items()}


def _replay_rates(space: Space, result: TuneResult) -> dict[str, dict[str, float]]:
    """Configurations a second on the run's trace, its requests over again until it has enough tokens, on one core.

    By length policy, over the recipes that can be replayed: the median recipe, one configuration after another and all
    of a recipe at once, as a grid is replayed.
    """
    trace, costs = _tiled(load_trace(RUN / "trace")), {n: CostModel.from_data(c) for n, c in result.costs.items()}
    scorer = ReplayScorer(trace, space, costs, lambda recipe: 0)
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    asked: dict[tuple[str, str], list[Candidate]] = {}
    for name in space.recipes:
        for each in Space({name: space.recipes[name]}).listed(10_000):
            if _score(scorer, each) is not None:
                asked.setdefault((name, each.policy), []).append(each)
    for (_, policy), candidates in asked.items():
        chosen = [candidates[number % len(candidates)] for number in range(AT_ONCE)]
        began = process_time()
        scorer.score_many(chosen, 1)
        rates[policy]["at_once"].append(len(chosen) / (process_time() - began))
        began = process_time()
        for each in chosen:
            scorer.score(each, 1)
        rates[policy]["one_by_one"].append(len(chosen) / (process_time() - began))
    return {policy: {how: median(each) for how, each in found.items()} for policy, found in rates.items()}


def _tiled(trace: Trace) -> Trace:
    """A trace over and over, until it has `TRACE_TOKENS`."""
    times = ceil(TRACE_TOKENS / trace.info.num_tokens)
    count, requests = trace.num_positions, []
    for turn in range(times):
        for each in trace.requests:
            requests.append(replace(each, first=each.first + turn * count, end=each.end + turn * count))
    columns = {name: np.tile(getattr(trace, name), times) for name in ("left", "limit", "context", "chance")}
    owner = np.concatenate([trace.request + turn * len(trace.requests) for turn in range(times)])
    drafts = {name: _drafts_tiled(each, times) for name, each in trace.drafts.items()}
    info = replace(trace.info, num_requests=len(requests), num_tokens=trace.info.num_tokens * times)
    return Trace(info, tuple(requests), owner, **columns, drafts=drafts)


def _drafts_tiled(drafts: Drafts, times: int) -> Drafts:
    tables = {each.name: getattr(drafts, each.name) for each in fields(drafts) if each.name != "info"}
    tiled: dict[str, Any] = {
        name: np.concatenate([table] * times) for name, table in tables.items() if table is not None
    }
    return replace(drafts, **tiled)


if __name__ == "__main__":
    main()
