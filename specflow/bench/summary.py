"""From rows to the figures that are read: medians with spread, and ratios within the same run.

A prompt's figure is the median of its repetitions; a subset's figure is the median of its prompts with p25 and p75.
ratio is the median over prompts of (method / baseline on the same prompt); ratio_total compares all decode tokens over
all decode time, on the prompts both finished. Acceptance is counted over first repetitions (repetitions are equal).
tpot is the time per token, from token counts; itl the time between deliveries, each of which may hold several tokens.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from specflow.measure import (
    ContextRate,
    PositionRate,
    acceptance_by_context,
    acceptance_by_position,
    acceptance_length,
    cliff,
    draft_acceptance_rate,
    merge_counts,
    pooled,
    spread,
)
from specflow.types import Counts

__all__ = [
    "OVERALL",
    "SummaryRow",
    "acceptance_csv",
    "acceptance_rows",
    "context_csv",
    "context_rows",
    "summarise",
    "summary_csv",
]

OVERALL = "overall"
Row = Mapping[str, Any]


@dataclass(slots=True)
class SummaryRow:
    """One method on one subset. Figures without an observation are None."""

    subset: str
    strategy: str
    kind: str
    exactness: str | None  # what the target promises of equal texts; None of a peer
    runtime: str
    dtype: str
    lossy: bool  # the recipe's rule changes the law of the text
    prompts: int  # finished turns
    failures: int
    output_tps_median: float | None = None
    output_tps_p25: float | None = None
    output_tps_p75: float | None = None
    ratio: float | None = None
    ratio_p25: float | None = None
    ratio_p75: float | None = None
    ratio_total: float | None = None
    ratio_to_peer_plain: float | None = None
    ratio_to_peer_speculative: float | None = None
    acceptance_length: float | None = None  # bonus included, over all rounds
    draft_acceptance_rate: float | None = None
    cliff_after: int | None = None  # draft position after which acceptance all but ends; see `measure.cliff`
    ttft_median_ms: float | None = None
    tpot_median_ms: float | None = None
    itl_median_ms: float | None = None
    itl_p95_ms: float | None = None
    latency_median_s: float | None = None
    draft_share: float | None = None  # of the time from first to last token; the four add up to 1
    target_share: float | None = None
    verify_share: float | None = None
    other_share: float | None = None
    peak_rss_mb: float | None = None  # of the whole process, all methods' models included
    equal_texts: int = 0
    compared_texts: int = 0
    ties: int = 0  # texts that differ where the target's two best logits are as good as equal
    bugs: int = 0  # texts that differ where they are not
    best_peer: bool = False  # the fastest speculative setting of the peers on this subset


@dataclass(slots=True)
class _Prompt:
    """The repetitions of one method on one turn of one prompt."""

    rows: list[Row]

    def middle(self, name: str) -> float | None:
        values = [row[name] for row in self.rows if row[name] is not None]
        return median(values) if values else None

    @property
    def decoded(self) -> tuple[float, float]:
        """Tokens after the first delivery, and their seconds, over all repetitions."""
        rows = [row for row in self.rows if row["output_tps"] is not None]
        return sum(r["new_tokens"] - r["first_tokens"] for r in rows), sum(r["decode_s"] for r in rows)


Prompts = dict[tuple[Any, ...], _Prompt]


def summarise(rows: Iterable[Row], baseline: str) -> list[SummaryRow]:
    """Every method on every category, then overall."""
    rows = [row for row in rows if row.get("method")]
    order = list(dict.fromkeys(row["method"] for row in rows))
    summary = []
    for subset in _subsets(rows):
        inside = [row for row in rows if subset in (OVERALL, row["category"])]
        present = {row["method"] for row in inside}
        groups = {name: _by_prompt(inside, name) for name in order if name in present}
        part = [_summarise_method(subset, name, inside, groups) for name in groups]
        _compare(part, groups, baseline)
        summary.extend(part)
    return summary


def acceptance_rows(rows: Iterable[Row]) -> list[tuple[str, str, PositionRate]]:
    """(subset, method, rate) of every draft position."""
    return [(subset, name, rate) for subset, name, counts in _counts(rows) for rate in acceptance_by_position(counts)]


def context_rows(rows: Iterable[Row]) -> list[tuple[str, str, ContextRate]]:
    """(subset, method, rate) of every range of contexts."""
    return [(subset, name, rate) for subset, name, counts in _counts(rows) for rate in acceptance_by_context(counts)]


def _counts(rows: Iterable[Row]) -> Iterator[tuple[str, str, Counts]]:
    """Counts of every method on every subset, over first repetitions."""
    rows = [row for row in rows if row.get("counts") and row["repetition"] == 0]
    for subset in _subsets(rows):
        inside = [row for row in rows if subset in (OVERALL, row["category"])]
        for name in dict.fromkeys(row["method"] for row in inside):
            yield subset, name, merge_counts(Counts(**row["counts"]) for row in inside if row["method"] == name)


def summary_csv(summary: Sequence[SummaryRow]) -> str:
    """The summary as CSV; None is an empty cell."""
    columns = [item.name for item in dataclasses.fields(SummaryRow)]
    return _csv(columns, ([getattr(row, name) for name in columns] for row in summary))


def acceptance_csv(rates: Sequence[tuple[str, str, PositionRate]]) -> str:
    """Acceptance by position as CSV; a rate that was not observed says so."""
    columns = [item.name for item in dataclasses.fields(PositionRate)]
    lines = ([subset, name, *(_observed(getattr(rate, column)) for column in columns)] for subset, name, rate in rates)
    return _csv(["subset", "strategy", *columns], lines)


def context_csv(rates: Sequence[tuple[str, str, ContextRate]]) -> str:
    """Acceptance by context length as CSV."""
    columns = [item.name for item in dataclasses.fields(ContextRate)]
    lines = ([subset, name, *(getattr(rate, column) for column in columns)] for subset, name, rate in rates)
    return _csv(["subset", "strategy", *columns], lines)


def _observed(value: float | None) -> float | str:
    return "unobserved" if value is None else value


def _csv(columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in line] for line in lines)
    return text.getvalue()


def _subsets(rows: Iterable[Row]) -> list[str]:
    categories = list(dict.fromkeys(row["category"] for row in rows))
    return [*(name for name in categories if name != OVERALL), OVERALL] if categories else []


def _by_prompt(rows: Iterable[Row], method: str) -> Prompts:
    found: Prompts = {}
    for row in rows:
        if row["method"] == method and "error" not in row:
            found.setdefault((row["file"], row["line"], row["turn"]), _Prompt([])).rows.append(row)
    return found


def _summarise_method(subset: str, name: str, rows: Sequence[Row], groups: Mapping[str, Prompts]) -> SummaryRow:
    prompts = groups[name]
    mine = [row for row in rows if row["method"] == name]
    good = [row for row in mine if "error" not in row]
    rates = spread(_middles(prompts, "output_tps"))
    facts = {fact: mine[0][fact] for fact in ("kind", "exactness", "runtime", "dtype", "lossy")}
    result = SummaryRow(subset, name, **facts, prompts=len(prompts), failures=len(mine) - len(good))
    if rates is not None:
        result.output_tps_median, result.output_tps_p25, result.output_tps_p75 = rates.median, rates.p25, rates.p75
    result.ttft_median_ms = _median(_middles(prompts, "ttft_s"), 1000.0)
    result.tpot_median_ms = _median(_middles(prompts, "tpot_s"), 1000.0)
    result.itl_median_ms = _median(_middles(prompts, "itl_median_s"), 1000.0)
    result.itl_p95_ms = _median(_middles(prompts, "itl_p95_s"), 1000.0)
    result.latency_median_s = _median(_middles(prompts, "wall_time"))
    result.peak_rss_mb = max((row["peak_rss_bytes"] for row in good), default=0) / 1e6 or None
    compared = [row for row in good if row["equals_baseline"] is not None]
    result.compared_texts = len(compared)
    result.equal_texts = sum(row["equals_baseline"] for row in compared)
    result.ties = sum(row["divergence"] == "tie" for row in good)
    result.bugs = sum(row["divergence"] == "bug" for row in good)
    _add_acceptance(result, [row for row in good if row["repetition"] == 0])
    _add_shares(result, good)
    return result


def _middles(prompts: Prompts, name: str) -> list[float]:
    return [value for prompt in prompts.values() if (value := prompt.middle(name)) is not None]


def _median(values: Sequence[float], scale: float = 1.0) -> float | None:
    return median(values) * scale if values else None


def _add_acceptance(result: SummaryRow, rows: Sequence[Row]) -> None:
    counted = [row for row in rows if row["counts"]]
    if counted:
        counts = merge_counts(Counts(**row["counts"]) for row in counted)
        result.acceptance_length = acceptance_length(counts)
        result.draft_acceptance_rate = draft_acceptance_rate(counts)
        result.cliff_after = cliff(counts)
        return
    passes = [row for row in rows if row["decoding_steps"]]
    result.acceptance_length = pooled(
        (row["new_tokens"] - row["first_tokens"], row["decoding_steps"]) for row in passes
    )


def _add_shares(result: SummaryRow, rows: Sequence[Row]) -> None:
    timed = [row for row in rows if row["timings"]]
    total = sum(row["decode_s"] for row in timed)
    if total:
        spent = [sum(row["timings"][span] for row in timed) / total for span in ("draft_s", "target_s", "verify_s")]
        result.draft_share, result.target_share, result.verify_share = spent
        result.other_share = 1.0 - sum(spent)  # what no span claims is overhead too


def _compare(part: Sequence[SummaryRow], groups: Mapping[str, Prompts], baseline: str) -> None:
    """Fill in all ratios of one subset."""
    plain = _fastest(part, lambda row: row.kind == "peer plain")
    speculative = _fastest(part, lambda row: row.kind == "peer speculative")
    if speculative is not None:
        speculative.best_peer = True
    for row in part:
        mine, reference = groups[row.strategy], groups.get(baseline, {})
        ratios = spread(_ratios(mine, reference))
        if ratios is not None:
            row.ratio, row.ratio_p25, row.ratio_p75 = ratios.median, ratios.p25, ratios.p75
        row.ratio_total = _total_ratio(mine, reference)
        if plain is not None:
            row.ratio_to_peer_plain = _median(_ratios(mine, groups[plain.strategy]))
        if speculative is not None:
            row.ratio_to_peer_speculative = _median(_ratios(mine, groups[speculative.strategy]))


def _fastest(part: Sequence[SummaryRow], wanted: Callable[[SummaryRow], bool]) -> SummaryRow | None:
    rows = [row for row in part if wanted(row) and row.output_tps_median is not None]
    return max(rows, key=lambda row: row.output_tps_median or 0.0, default=None)


def _ratios(mine: Prompts, reference: Prompts) -> list[float]:
    pairs = ((mine[key].middle("output_tps"), reference[key].middle("output_tps")) for key in mine if key in reference)
    return [a / b for a, b in pairs if a is not None and b is not None]


def _total_ratio(mine: Prompts, reference: Prompts) -> float | None:
    shared = [key for key in mine if key in reference]
    rate, base = (pooled(prompts[key].decoded for key in shared) for prompts in (mine, reference))
    return rate / base if rate and base else None
