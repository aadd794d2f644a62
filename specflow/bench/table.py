"""The summary as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specflow.bench.summary import OVERALL, SummaryRow

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["figure", "label", "summary_table", "target_line"]


def summary_table(summary: Sequence[SummaryRow], baseline: str) -> Table:
    """Medians over prompts, one block of rows a subset; all other figures are in summary.csv.

    Columns about peers and failures only where there are some, the overall block only where there are several subsets.
    """
    from rich import box
    from rich.table import Table

    subsets = dict.fromkeys(row.subset for row in summary)
    if len(subsets) == 2:
        summary = [row for row in summary if row.subset != OVERALL]
    peers = any(row.kind != "recipe" for row in summary)
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=_caption(summary, baseline), caption_justify="left"
    )
    columns = _columns(peers, any(row.failures for row in summary))
    table.add_column("method", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for index, row in enumerate(summary):
        if index == 0 or summary[index - 1].subset != row.subset:
            table.add_row(row.subset, *[""] * len(columns), style="bold")
        last = index + 1 == len(summary) or summary[index + 1].subset != row.subset
        cells = _cells(row)
        table.add_row(f"  {label(row.strategy, row.lossy)}", *(cells[name] for name in columns), end_section=last)
    return table


def label(name: str, lossy: bool) -> str:
    """A method's name beside its results; lossy ones never stand there without the word."""
    return f"{name} (lossy)" if lossy else name


def target_line(facts: Mapping[str, Any]) -> str:
    """Where results come from and how exact they are; see `target_facts`."""
    meaning = {
        "bit-exact": "texts equal bit for bit",
        "tie-exact": "texts may part where two logits are as good as equal",
    }
    exactness = facts["exactness"]
    return f"{exactness} ({meaning[exactness]}): {facts['runtime']} runtime, {facts['dtype']}"


def _caption(summary: Sequence[SummaryRow], baseline: str) -> str:
    peers = any(row.kind != "recipe" for row in summary)
    targets = dict.fromkeys(target_line(asdict(row)) for row in summary if row.exactness)
    meaning = [
        f"tokens/s: decode, median of prompts; ratio: to {baseline} on the same prompt, median;",
        "accept: tokens a target pass, bonus included; equal: texts equal to plain decoding's first,",
        "and why others differ (near-tie of two logits, or bug).",
        *(["vs plain, vs best: to a peer's plain and best speculative (*) setting."] if peers else []),
        "More figures are in summary.csv.",
    ]
    cliffs = [
        f"{label(row.strategy, row.lossy)} on {row.subset}: acceptance falls off a cliff after position"
        f" {row.cliff_after}; check its block width, window and positions."
        for row in summary
        if row.cliff_after is not None
    ]
    return "\n".join([*targets, " ".join(meaning), *cliffs])  # wrapped to the width of the table


def _columns(peers: bool, failures: bool) -> list[str]:
    names = ["tokens/s", "p25-p75", "ratio", "accept", "TTFT ms", "equal"]
    return [*names, *(["failed"] if failures else []), *(["vs plain", "vs best"] if peers else [])]


def _cells(row: SummaryRow) -> dict[str, str]:
    return {
        "tokens/s": figure(row.output_tps_median, 1) + (" *" if row.best_peer else ""),
        "p25-p75": f"{figure(row.output_tps_p25, 1)}-{figure(row.output_tps_p75, 1)}",
        "ratio": figure(row.ratio, 2),
        "accept": figure(row.acceptance_length, 2),
        "TTFT ms": figure(row.ttft_median_ms, 0),
        "equal": _equal(row),
        "failed": str(row.failures or ""),
        "vs plain": figure(row.ratio_to_peer_plain, 2),
        "vs best": figure(row.ratio_to_peer_speculative, 2),
    }


def _equal(row: SummaryRow) -> str:
    causes = [f"{count} {name}" for count, name in ((row.ties, "tie"), (row.bugs, "bug")) if count]
    if not row.compared_texts:
        return figure(None, 0)
    return ", ".join([f"{row.equal_texts}/{row.compared_texts}", *causes])


def figure(value: float | None, digits: int, scale: float = 1.0) -> str:
    """A figure as tables print it; a dash where nothing was observed."""
    return "-" if value is None else f"{value * scale:.{digits}f}"
