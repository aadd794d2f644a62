"""From rows to what the README says: the best of every system, side by side, by kind of prompt.

A system's best is its method with the highest median of prompts; a ratio is the median over prompts of the two rates
on the same prompt. Repetitions of a prompt are reduced to their median first.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from cpu_methods import BASELINE, PEERS, SYSTEM
from cpu_quality import MAX_PERPLEXITY_CHANGE, MIN_AGREEMENT, Quality

__all__ = ["Best", "compare_systems", "gains", "quality_csv", "rows_csv", "table"]

Row = Mapping[str, Any]
FLOAT32 = ("float32", "F32")
PLAIN, DRAFTING = "plain, float32", "drafting, float32"
ANY_PLAIN, ANY = "plain, any type that passes", "fastest, any type that passes"
COMPARISONS = (PLAIN, DRAFTING, ANY_PLAIN, ANY)
SYSTEMS = (SYSTEM, *(peer for peer, _, _ in PEERS))


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest admitted method of one system on one kind of prompts."""

    subset: str
    comparison: str
    system: str
    method: str
    output_tps: float  # median of prompts
    ratio: float | None  # of our best to this one; of a gain: of drafting to plain decoding


Rates = dict[str, dict[tuple[Any, ...], float]]  # method -> prompt -> tokens/s


def compare_systems(rows: Iterable[Row], passing: Iterable[str]) -> list[Best]:
    """Best against best.

    Args:
        rows: Measurements.
        passing: Models ("system dtype") whose quality admits them.
    """
    rows, passes = list(rows), set(passing)
    found = []
    for subset in _subsets(rows):
        inside = [row for row in rows if row.get("category") == subset]
        for comparison in COMPARISONS:
            admitted = [row for row in inside if _admits(comparison, row, passes)]
            found += _side_by_side(subset, comparison, admitted)
    return found


def gains(rows: Iterable[Row]) -> list[Best]:
    """The best drafting of every model of every system over its own plain decoding."""
    rows = list(rows)
    found = []
    for subset in _subsets(rows):
        inside = [row for row in rows if row.get("category") == subset and row.get("output_tps")]
        for system, dtype in dict.fromkeys((row["system"], row["dtype"]) for row in inside):
            mine = [row for row in inside if (row["system"], row["dtype"]) == (system, dtype)]
            plain, drafting = (_rates(row for row in mine if row["drafts"] is drafts) for drafts in (False, True))
            if plain and drafting:
                best = _fastest(drafting)
                ratio = _ratio(drafting[best], plain[_fastest(plain)])
                name = f"drafting over plain, {dtype}"
                found.append(Best(subset, name, system, best, median(drafting[best].values()), ratio))
    return found


def _admits(comparison: str, row: Row, passing: set[str]) -> bool:
    if not row.get("output_tps"):
        return False
    if comparison in (PLAIN, DRAFTING):
        return row["dtype"] in FLOAT32 and row["drafts"] is (comparison == DRAFTING)
    return f"{row['system']} {row['dtype']}" in passing and (comparison == ANY or not row["drafts"])


def _side_by_side(subset: str, comparison: str, rows: Sequence[Row]) -> list[Best]:
    best = {}
    for system in SYSTEMS:
        rates = _rates(row for row in rows if row["system"] == system)
        if rates:
            name = _fastest(rates)
            best[system] = (name, rates[name])
    ours = best.get(SYSTEM)
    return [
        Best(
            subset,
            comparison,
            system,
            name,
            median(rates.values()),
            _ratio(ours[1], rates) if ours and system != SYSTEM else None,
        )
        for system, (name, rates) in best.items()
    ]


def _subsets(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["category"] for row in rows if "category" in row))


def _rates(rows: Iterable[Row]) -> Rates:
    found: dict[str, dict[tuple[Any, ...], list[float]]] = {}
    for row in rows:
        prompt = (row["file"], row["line"], row["turn"])
        found.setdefault(row["method"], {}).setdefault(prompt, []).append(row["output_tps"])
    return {name: {key: median(values) for key, values in prompts.items()} for name, prompts in found.items()}


def _fastest(rates: Rates) -> str:
    return max(rates, key=lambda name: median(rates[name].values()))


def _ratio(mine: Mapping[Any, float], theirs: Mapping[Any, float]) -> float | None:
    shared = [mine[key] / theirs[key] for key in mine if key in theirs]
    return median(shared) if shared else None


def rows_csv(rows: Sequence[Best]) -> str:
    """Comparisons and gains as CSV."""
    return _csv([item.name for item in fields(Best)], (asdict(row) for row in rows))


def quality_csv(known: Iterable[Quality], rows: Iterable[Row]) -> str:
    """Quality of every model, with how many of its plain texts are the baseline's."""
    texts: dict[str, list[bool]] = {}
    for row in rows:
        if row.get("drafts") is False and "error" not in row:
            same = row["method"] == BASELINE or bool(row["equals_baseline"])
            texts.setdefault(f"{row['system']} {row['dtype']}", []).append(same)
    lines = (
        {**asdict(item), "passes": item.passes, "equal_texts": sum(same), "compared_texts": len(same)}
        for item in known
        for same in [texts.get(item.model, [])]
    )
    extra = ["passes", "equal_texts", "compared_texts"]
    return _csv([*(item.name for item in fields(Quality)), *extra], lines)


def _csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{cell:.6g}" if isinstance(cell, float) else cell for name, cell in row.items()})
    return text.getvalue()


def table(figures: Path) -> str:
    """What stands in the README: speeds, gains, quality, and where they come from. Nothing before the first run."""
    if not (figures / "comparison.csv").exists():
        return "Not measured yet: `make bench-cpu`."
    best = _read_csv(figures / "comparison.csv")
    manifest = json.loads((figures / "manifest.json").read_text(encoding="utf-8"))
    parts = [_speeds(best), _gains(best), _quality(_read_csv(figures / "quality.csv")), _sources(manifest)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _speeds(best: Sequence[Mapping[str, str]]) -> list[str]:
    lines = [
        f"| prompts | tokens/s | {' | '.join(SYSTEMS)} | over the fastest peer |",
        f"| --- | --- |{' ---: |' * (len(SYSTEMS) + 1)}",
    ]
    for subset, comparison in dict.fromkeys((row["subset"], row["comparison"]) for row in best):
        if comparison not in COMPARISONS:
            continue
        mine = {r["system"]: r for r in best if (r["subset"], r["comparison"]) == (subset, comparison)}
        peers = [row for system, row in mine.items() if system != SYSTEM and row["ratio"]]
        fastest = max(peers, key=lambda row: float(row["output_tps"]), default=None)
        cells = [_speed(mine.get(system)) for system in SYSTEMS]
        over = f"{float(fastest['ratio']):.2f}" if fastest else ""
        lines.append(f"| {_kind(subset)} | {comparison} | {' | '.join(cells)} | {over} |")
    return lines


def _kind(subset: str) -> str:
    return subset.replace("_", " ")


def _speed(row: Mapping[str, str] | None) -> str:
    if row is None:
        return "-"
    setting = row["method"].removeprefix(f"{row['system']} ")
    return f"{float(row['output_tps']):.1f} ({setting})"


def _gains(best: Sequence[Mapping[str, str]]) -> list[str]:
    """Our drafting over our plain decoding, by type: the check that drafting never costs much."""
    mine = [row for row in best if row["system"] == SYSTEM and row["comparison"] not in COMPARISONS]
    subsets = list(dict.fromkeys(row["subset"] for row in mine))
    lines = [f"| {SYSTEM} | {' | '.join(map(_kind, subsets))} |", f"| --- |{' ---: |' * len(subsets)}"]
    for name in dict.fromkeys(row["comparison"] for row in mine):
        found = {row["subset"]: row for row in mine if row["comparison"] == name}
        cells = [f"{float(found[subset]['ratio']):.2f}" if subset in found else "-" for subset in subsets]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _quality(rows: Sequence[Mapping[str, str]]) -> list[str]:
    lines = [
        "| model | next token = float32's | perplexity "
        f"| passes (>= {MIN_AGREEMENT:g}, <= +{MAX_PERPLEXITY_CHANGE:.0%}) | texts = {BASELINE} |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for row in rows:
        change = f"{float(row['perplexity_change']):+.1%}"
        said = "yes" if row["passes"] == "True" else "no"
        texts = f"{row['equal_texts']} of {row['compared_texts']}"
        lines.append(f"| {row['model']} | {float(row['agreement']):.3f} | {change} | {said} | {texts} |")
    return lines


def _sources(manifest: Mapping[str, Any]) -> list[str]:
    session, settings = manifest["sessions"][-1], manifest["settings"]
    versions = {**session["versions"], **settings["versions"]}
    named = [name for name in ("torch", "onnxruntime-gpu", *settings["versions"]) if name in versions]
    plan = settings["plan"]
    lines = [
        f"- {session['cpu_model']}, {settings['threads']} threads, {plan['max_new_tokens']} new tokens, "
        f"{len(settings['rows'])} prompts, {plan['repeat']} repetition{'s' * (plan['repeat'] > 1)}, commit "
        f"{str(session['git_sha'])[:10]}{' with changes' * bool(session['git_dirty'])}, {session['started_at'][:10]}",
        f"- {', '.join(f'{name} {versions[name]}' for name in dict.fromkeys(named))}",
    ]
    return [*lines, *(f"- {name}: {reason}" for name, reason in settings["missing"].items())]
