"""Measure plain decoding and history drafting on 2 CPU threads against other engines at their best.

    python benchmarks/cpu.py                 measure, then publish (about 20 minutes on 2 quiet cores)
    python benchmarks/cpu.py --publish-only  rewrite the README table from docs/figures/cpu

The embedded model, greedy, batch 1, answers of fixed length, all methods interleaved prompt by prompt in one run.
`make bench-cpu` makes the peers' environment. An interrupted run resumes. Prompts: benchmarks/*.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cpu_figures import compare_systems, gains, quality_csv, rows_csv, table
from cpu_methods import BASELINE, PEERS, THREADS, Field, load_field
from cpu_quality import TEXT_TOKENS, measure_quality
from origins import without_folders

from specflow.bench import Bench, Plan, PromptRow, RunDirectory, load_prompts, summarise
from specflow.bench.summary import summary_csv
from specflow.cli.progress import counted
from specflow.files import file_sha256, replace_text, write_json_atomic
from specflow.provenance import Provenance
from specflow.target.load import read_json

__all__ = ["main", "publish"]

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures" / "cpu"
README = ROOT / "README.md"
BEGIN, END = "<!-- cpu:begin -->", "<!-- cpu:end -->"
KINDS = ("code_edits", "extraction", "open")
FILES = ("summary.csv", "comparison.csv", "quality.csv", "manifest.json")


def measure(options: argparse.Namespace) -> Path:
    """One interleaved run, then quality; the directory that holds its figures."""
    data = [Path("benchmarks", f"{kind}.jsonl") for kind in options.kind or KINDS]
    prompts, bad = load_prompts(data, options.limit)
    assert not bad, bad
    plan = Plan(options.max_new_tokens, options.repeat, 1, ignore_eos=True)
    with ExitStack() as stack:
        field = load_field(options.peers, options.runs, stack, options.only)
        for name, reason in field.missing.items():
            print(f"left out: {name}: {reason}", flush=True)
        provenance = Provenance.collect("cpu", range(len(prompts)), data)
        directory: Path = options.runs / options.name
        store = RunDirectory(directory, _settings(field, prompts, plan, data), provenance, directory.exists())
        state = "interrupted"
        try:
            _decode(field, prompts, plan, store)
            _report(field, store)
            state = "complete"
        finally:
            store.close(state)
    return directory


def _settings(field: Field, prompts: Sequence[PromptRow], plan: Plan, data: Sequence[Path]) -> dict[str, Any]:
    """Everything that decides what a row measures."""
    return {
        "methods": {method.name: dict(method.facts) for method in field.methods},
        "missing": field.missing,
        "versions": field.versions,
        "threads": THREADS,
        "data": {str(path): file_sha256(path) for path in data},
        "rows": [row.key for row in prompts],
        "plan": asdict(plan),
        "scored_tokens": TEXT_TOKENS,
    }


def _decode(field: Field, prompts: Sequence[PromptRow], plan: Plan, store: RunDirectory) -> None:
    assert field.encode is not None
    bench = Bench(field.methods, BASELINE, field.encode, plan, store)
    with counted(plan.num_measurements(prompts, len(field.methods))) as advance:
        bench.run(prompts, [], advance)


def _report(field: Field, store: RunDirectory) -> None:
    """Score all models on the baseline's texts, then write the derived files."""
    rows = store.rows
    for row in (row for row in rows if "error" in row):
        print(f"failed: {row.get('method')} on {row.get('id')}: {row['error']}", flush=True)
    first = [row for row in rows if row.get("method") == BASELINE and row.get("repetition") == 0 and "error" not in row]
    texts = [_text(field, row) for row in first]
    known, failed = measure_quality(texts, field.scores, f"{BASELINE.rsplit(' ', 1)[0]}", store.path / "quality.jsonl")
    for name, reason in failed.items():
        print(f"not scored: {name}: {reason}", flush=True)
    passing = [name for name, item in known.items() if item.passes]
    store.write_text("summary.csv", summary_csv(summarise(rows, BASELINE)))
    store.write_text("comparison.csv", rows_csv([*compare_systems(rows, passing), *gains(rows)]))
    store.write_text("quality.csv", quality_csv([known[name] for name in field.scores if name in known], rows))


def _text(field: Field, row: Mapping[str, Any]) -> tuple[int, ...]:
    """Prompt and answer, its last TEXT_TOKENS tokens."""
    assert field.encode is not None
    (prompt,) = (item for item in load_prompts([Path(row["file"])])[0] if item.line == row["line"])
    return (*field.encode(prompt.messages(0, ())), *row["tokens"])[-TEXT_TOKENS:]


def publish(readme: Path = README, figures: Path = FIGURES) -> None:
    """Write the table between the README's markers."""
    text = readme.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    replace_text(readme, f"{head}{BEGIN}\n{table(figures)}\n{END}{tail}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publish-only", action="store_true", help="do not measure")
    parser.add_argument("--no-publish", action="store_true", help="leave docs/figures and the README as they are")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only these prompts; may be repeated")
    parser.add_argument("--limit", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="length of every answer")
    parser.add_argument("--repeat", type=int, default=1, help="measurements of every prompt and method")
    systems = [system for system, _, _ in PEERS]
    parser.add_argument("--only", action="append", choices=systems, default=[], help="only this peer; may be repeated")
    parser.add_argument("--name", default="run", help="of this run, below --runs; one that is there is resumed")
    parser.add_argument("--runs", type=Path, default=Path("runs", "cpu"), help="holds runs, converted models and logs")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers", "bin", "python"), help="the peers' python")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and publish, as asked."""
    options = _options(arguments)
    if not options.publish_only:
        directory = measure(options)
        if not options.no_publish:
            FIGURES.mkdir(parents=True, exist_ok=True)
            for name in FILES:
                replace_text(FIGURES / name, (directory / name).read_text(encoding="utf-8"))
            manifest = read_json(FIGURES / "manifest.json")
            sessions = [without_folders(each) for each in manifest["sessions"]]
            write_json_atomic(FIGURES / "manifest.json", {**manifest, "sessions": sessions})
    if not options.no_publish:
        publish()


if __name__ == "__main__":
    main()
