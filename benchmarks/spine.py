"""Measure plain decoding, history drafting and transformers, and put the figures into the README.

    python benchmarks/spine.py                 measure both dtypes, then publish (about half an hour on 2 cores)
    python benchmarks/spine.py --publish-only  rewrite the README table from docs/figures/spine

An interrupted run resumes. Prompts: benchmarks/*.jsonl; `--smoke FILE` adds a file measured without the peer.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures" / "spine"
RUNS = ROOT / "runs" / "spine"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
DTYPES = ("float32", "bfloat16")
RECIPES = ("vanilla", "ngram", "suffix")
LENGTH = ["--max-new-tokens", "64"]
KINDS = ("code_edits", "extraction", "open")


def measure(dtype: str, name: str, data: list[Path], extra: list[str]) -> None:
    """One interleaved run; its summary and manifest become figures."""
    directory = RUNS / f"{name}-{dtype}"
    command = [sys.executable, "-m", "specflow", "bench", *RECIPES, "--dtype", dtype, "--output-dir", str(directory)]
    for path in data:
        command += ["--data", str(path)]
    if directory.exists():
        command.append("--resume")
    subprocess.run([*command, *extra], check=True, cwd=ROOT)
    target = FIGURES / f"{name}-{dtype}"
    target.mkdir(parents=True, exist_ok=True)
    for file in ("summary.csv", "acceptance.csv", "context.csv", "manifest.json"):
        shutil.copyfile(directory / file, target / file)


def table() -> str:
    """The README's table, from the summaries that are there."""
    lines = [
        "| prompts | dtype | method | tokens/s (p25-p75) | over vanilla | over the peer | acceptance length "
        "| text = vanilla |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    sources = []
    for directory in sorted(path.parent for path in FIGURES.glob("*/summary.csv")):
        run, dtype = directory.name.rsplit("-", 1)
        with (directory / "summary.csv").open() as file:
            lines += [_line(row, run, dtype) for row in csv.DictReader(file) if _wanted(row, run)]
        sources.append(_provenance(directory))
    return "\n".join([*lines, "", *sources])


def _wanted(row: dict[str, str], run: str) -> bool:
    """Kinds of prompts one by one; of the peer, plain decoding and its best lookup setting."""
    if (row["subset"] == "overall") != (run == "smoke"):
        return False
    return row["kind"] != "peer speculative" or row["best_peer"] == "True"


def _line(row: dict[str, str], run: str, dtype: str) -> str:
    peer = row["ratio_to_peer_plain"] if row["strategy"] == "vanilla" else row["ratio_to_peer_speculative"]
    against = f"{float(peer):.2f}" if peer and row["kind"] == "recipe" else ""
    rate, low, high = (float(row[f"output_tps_{name}"]) for name in ("median", "p25", "p75"))
    causes = [f"{row[name]} {name}" for name in ("ties", "bugs") if int(row[name])]
    cells = [
        run if row["subset"] == "overall" else row["subset"].replace("_", " "),
        dtype,
        f"{row['strategy']} (lossy)" if row["lossy"] == "True" else row["strategy"],
        f"{rate:.1f} ({low:.1f}-{high:.1f})",
        f"{float(row['ratio']):.2f}",
        against,
        f"{float(row['acceptance_length']):.2f}",
        ", ".join([f"{row['equal_texts']} of {row['compared_texts']}", *causes]),
    ]
    return f"| {' | '.join(cells)} |"


def _provenance(directory: Path) -> str:
    manifest = json.loads((directory / "manifest.json").read_text())
    session, target = manifest["sessions"][-1], manifest["settings"]["target"]
    versions = session["versions"]
    return (
        f"- `{directory.relative_to(ROOT)}`: {target['exactness']} ({target['runtime']} runtime), "
        f"{session['cpu_model']}, {session['threads']} threads, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, "
        f"commit {str(session['git_sha'])[:10]}{' with changes' * bool(session['git_dirty'])}, "
        f"{session['started_at'][:10]}"
    )


def publish() -> None:
    """Write the table between the README's markers."""
    text = README.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    README.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publish-only", action="store_true", help="do not measure")
    parser.add_argument("--smoke", type=Path, help="another prompt file, measured without the peer")
    parser.add_argument("--limit", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="only this one; may be repeated")
    options = parser.parse_args()
    if not options.publish_only:
        data = [Path("benchmarks", f"{kind}.jsonl") for kind in KINDS]
        for dtype in options.dtype or DTYPES:
            measure(dtype, "peer", data, ["--peer", "transformers", "--limit", str(options.limit), *LENGTH])
            if options.smoke:
                measure(dtype, "smoke", [options.smoke], LENGTH)
    publish()


if __name__ == "__main__":
    main()
