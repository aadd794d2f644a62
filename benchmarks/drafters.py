"""Measure what the shipped drafters accept, and put the figures into drafters/README.md and the README.

    python benchmarks/drafters.py --data DIR                    measure what is missing, then publish (hours on 2 cores)
    python benchmarks/drafters.py --data DIR --drafter eagle3   only this one; may be repeated
    python benchmarks/drafters.py --publish-only                rewrite the tables from docs/figures/drafters
    python benchmarks/drafters.py --ship RUN NAME               take a finished run of `specflow train` as drafter NAME

The target answers the first prompts of every evaluation set in float32 torch, greedily and at temperature 0.7; all
drafters are traced along the same answers, with chains of their k. The rounds of greedy decoding are those of a real
run, one by one; at temperature 0.7 the block and the rejection rule are replayed in law, so chance hides less of their
difference. One file a drafter, setting and set; what is there is not measured again. A few fixed prompts are decoded
for real as well, and tests decode them again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from drafter_tables import publish
from origins import without_folders

from specflow.bench.data import PromptRow, load_prompts
from specflow.build import LoadedTarget, build_engine, load_target
from specflow.errors import RecipeError
from specflow.files import write_json_atomic, write_text_atomic
from specflow.measure import merge_counts, metrics
from specflow.provenance import Provenance
from specflow.recipe import Recipe, dump_recipe, load_recipe
from specflow.train.opening import trained_part
from specflow.train.output import with_weights
from specflow.train.selftest import parts_to_test
from tuner.replay import Replayer
from tuner.replay_types import ReplayConfig
from tuner.trace import TracePlan, record, workload

ROOT = Path(__file__).resolve().parents[1]
DRAFTERS = ROOT / "drafters" / "smollm2-135m"
FIGURES = ROOT / "docs" / "figures" / "drafters"
SETS = ("smoke", "mt_bench", "humaneval", "gsm8k")
SETTINGS = {"greedy": (0.0, "block"), "block": (0.7, "block"), "rejection": (0.7, "rejection")}
"""Temperature and rule."""
DRAWS = 20
"""Replays of every workload at temperature 0.7."""
FIXED = (8, 32)
"""Prompts and tokens of an answer that tests decode again."""
COMMON = ["target.runtime=torch", "target.dtype=float32", "length.policy=fixed"]
BATCH = 16


def drafters() -> list[str]:
    """Names of the shipped ones."""
    return sorted(path.parent.name for path in DRAFTERS.glob("*/model.safetensors"))


def ship(run: Path, name: str) -> None:
    """Take what a training run made: weights, options, log and curve, without the folders it was made in."""
    target = DRAFTERS / name
    target.mkdir(parents=True, exist_ok=True)
    for file in run.iterdir():
        if file.is_file() and file.name not in ("recipe.yaml", "training.json", "log.jsonl"):
            shutil.copyfile(file, target / file.name)
    write_text_atomic(target / "log.jsonl", "".join(_thinned((run / "log.jsonl").read_text().splitlines(True))))
    training = json.loads((run / "training.json").read_text())
    training["sessions"] = [without_folders(session) for session in training["sessions"]]
    write_json_atomic(target / "training.json", training)
    write_text_atomic(target / "recipe.yaml", _recipe_text(load_recipe(run / "recipe.yaml"), f"{DRAFTERS.name}/{name}"))
    for stale in (*(FIGURES / name).glob("*.json"), target / "selftest.json"):  # of the weights that were there before
        stale.unlink(missing_ok=True)


def _thinned(log: Iterable[str]) -> Iterator[str]:
    """All that was measured on held-out texts, and the losses of one line in five."""
    for number, line in enumerate(log):
        if number % 5 == 0 or json.loads(line).get("held_out"):
            yield line


def _recipe_text(recipe: Recipe, name: str) -> str:
    """The run's recipe for everybody: its drafter under the name it ships by, the rest as in the method's recipe."""
    place, _ = trained_part(recipe)
    usual = load_recipe(recipe.name)
    plain = recipe.model_copy(update={"target": usual.target, "length": usual.length})
    return f'# specflow run {name} "Why is the sky blue?"\n{dump_recipe(with_weights(plain, place, Path(name)))}'


def recipe_of(name: str, setting: str, tokens: int) -> Recipe:
    """A drafter's recipe with chains of fixed length."""
    temperature, rule = SETTINGS[setting]
    decoding = [f"sampling.temperature={temperature}", f"verify.rule={rule}", f"sampling.max_new_tokens={tokens}"]
    changes = [*COMMON, *decoding]
    draft = load_recipe(f"{DRAFTERS.name}/{name}").draft
    if "shape" in type(draft).model_fields:
        changes.append("draft.shape=chain")
    return load_recipe(f"{DRAFTERS.name}/{name}", changes)


def figures_of(name: str, setting: str, each: str) -> Path:
    """The file of one drafter, setting and set."""
    return FIGURES / name / f"{setting}-{each}.json"


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """What is not measured yet: sets, and which drafters lack which settings of one temperature; greedy ones first."""
    names, asked = options.drafter or drafters(), options.setting or list(SETTINGS)
    for temperature in sorted({each for each, _ in SETTINGS.values()}):
        settings = [setting for setting in asked if SETTINGS[setting][0] == temperature]
        for each in options.sets or SETS:
            lacking = {
                name: [setting for setting in settings if not figures_of(name, setting, each).exists()]
                for name in names
            }
            if found := {name: those for name, those in lacking.items() if those}:
                yield each, found


def trace_set(options: argparse.Namespace, loaded: LoadedTarget, each: str, lacking: dict[str, list[str]]) -> None:
    """Trace some drafters on a set, and keep what they accept in every setting that they lack."""
    data = options.data / each / "dev.jsonl"
    recipes = {name: recipe_of(name, settings[0], options.tokens) for name, settings in lacking.items()}
    recipes = {name: recipe.model_copy(update={"name": name}) for name, recipe in recipes.items()}
    prompts = workload(chats(data, options.limit), loaded.codec)
    began = perf_counter()
    with TemporaryDirectory() as folder:
        trace = record(recipes, prompts, Path(folder, "trace"), loaded, TracePlan(options.tokens, batch=BATCH))
        seconds = round(perf_counter() - began, 1)
        player = Replayer(trace)
        for name, settings in lacking.items():
            for setting in settings:
                temperature, rule = SETTINGS[setting]
                draws = DRAWS if temperature else 1
                config = ReplayConfig.of(recipes[name], trace.info, rule=rule, concurrency=1, draws=draws)
                found = metrics(player.run(config).counts)
                facts = {"prompts": len(prompts), "draws": draws, "trace_seconds": seconds, **found}
                keep((name, setting, each), (options.limit, options.tokens), facts, data)


def decode_fixed(name: str, loaded: LoadedTarget) -> None:
    """Decode the fixed prompts for real, greedily, unless that is done."""
    if figures_of(name, "greedy", "fixed").exists():
        return
    data, (limit, tokens) = ROOT / "benchmarks" / "open.jsonl", FIXED
    recipe = recipe_of(name, "greedy", tokens)
    engine = build_engine(recipe, loaded)
    prompts = [engine.codec.encode_chat(row.messages(0, [])) for row in chats(data, limit)]
    made = engine.generate(prompts, recipe.sampling)
    found = {"prompts": len(prompts), **metrics(merge_counts(each.counts for each in made))}
    keep((name, "greedy", "fixed"), FIXED, found, data)


def chats(data: Path, limit: int) -> list[PromptRow]:
    """The first rows of a set. HumanEval's have the bare prompt beside the chat's turns; the chat counts."""
    with TemporaryDirectory() as folder:
        copy = Path(folder, data.name)
        with copy.open("w", encoding="utf-8") as file:
            for line in data.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if "turns" in row:
                    row.pop("prompt", None)
                file.write(json.dumps(row) + "\n")
        rows, bad = load_prompts([copy], limit)
    if bad or not rows:
        raise SystemExit(f"{data}: {len(rows)} usable rows; {bad[0].reason if bad else 'it is empty'}")
    return rows


def run_verb(verb: str, name: str, *words: str) -> None:
    """A command of specflow on a drafter's recipe, in the runtime and type of all measurements."""
    changes = [word for change in COMMON[:2] for word in ("--set", change)]
    command = [sys.executable, "-m", "specflow", verb, f"{DRAFTERS.name}/{name}", *words, *changes]
    subprocess.run(command, check=True, cwd=ROOT)


def measure_cost(name: str) -> None:
    """What a draft costs beside a plain pass, by `specflow profile`."""
    file = FIGURES / name / "cost.json"
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    plan = ["--contexts", "256", "--batches", "1", "--rows", "1,2,4,8"]
    run_verb("profile", name, *plan, "-o", str(file))
    found = json.loads(file.read_text())
    write_json_atomic(file, {**found, "provenance": without_folders(found["provenance"])})


def record_agreement(name: str) -> None:
    """What `specflow selftest` finds, kept beside the weights; whole models have no conventions to mistake."""
    recipe = load_recipe(f"{DRAFTERS.name}/{name}")
    with suppress(RecipeError):
        parts_to_test(recipe)
        if not (DRAFTERS / name / "selftest.json").exists():
            run_verb("selftest", name, "--record")


def measure_all(options: argparse.Namespace) -> None:
    """Whatever is asked for and not there; files as soon as a set is done."""
    loaded = load_target(load_recipe("vanilla", COMMON[:2]).target)
    names = options.drafter or drafters()
    for name in names:
        decode_fixed(name, loaded)
    for each, lacking in wanted(options):
        trace_set(options, loaded, each, lacking)
    for name in names:
        record_agreement(name)
        measure_cost(name)


def keep(what: tuple[str, str, str], sizes: tuple[int, int], found: dict[str, Any], data: Path) -> None:
    """Write what a drafter accepts in a setting on the first prompts of a set."""
    (name, setting, each), (limit, tokens) = what, sizes
    provenance = without_folders(asdict(Provenance.collect("cpu", [0], [data])))
    facts = {"drafter": name, "setting": setting, "set": each, "limit": limit, "tokens": tokens, **found}
    file = figures_of(name, setting, each)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(file, {**facts, "provenance": provenance})
    print(f"{name} {setting} {each}: length {found['mean_acceptance_length']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="directory of evaluation sets, each with a dev.jsonl")
    parser.add_argument("--drafter", action="append", help="only this one; may be repeated")
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="only this one; may be repeated")
    parser.add_argument("--set", action="append", choices=SETS, dest="sets", help="only this one; may be repeated")
    parser.add_argument("--limit", type=int, default=64, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--ship", nargs=2, metavar=("RUN", "NAME"), help="take a training run's drafter")
    parser.add_argument("--publish-only", action="store_true", help="do not measure")
    options = parser.parse_args()
    if options.ship:
        ship(Path(options.ship[0]), options.ship[1])
    elif not options.publish_only:
        if options.data is None:
            parser.error("--data DIR, or --publish-only")
        measure_all(options)
    publish(DRAFTERS, FIGURES, ROOT / "README.md")


if __name__ == "__main__":
    main()
