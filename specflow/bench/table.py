"""The summary as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specflow.bench.summary import SummaryRow

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["figure", "label", "summary_table", "target_line"]


def summary_table(summary: Sequence[SummaryRow], baseline: str) -> Table:
    """Medians over prompts, one block of rows a subset; columns about peers only where there are peers."""
    from rich import box
    from rich.table import Table

    peers = any(row.kind != "recipe" for row in summary)
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=_caption(summary, baseline), caption_justify="left"
    )
    table.add_column("method", no_wrap=True)
    for name in _columns(peers):
        table.add_column(name, justify="right", no_wrap=True)
    for index, row in enumerate(summary):
        if index == 0 or summary[index - 1].subset != row.subset:
            table.add_row(f"{row.subset}", *[""] * len(_columns(peers)), style="bold")
        last = index + 1 == len(summary) or summary[index + 1].subset != row.subset
        table.add_row(f"  {label(row.strategy, row.lossy)}", *_cells(row, peers), end_section=last)
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
    lines = [
        *targets,
        f"tokens/s: decode, median of prompts; ratio: to {baseline} on the same prompt, median;",
        "total: all tokens over all time; accept: tokens a target pass, bonus included;",
        "ITL: between deliveries, which may hold several tokens; draft %, target %: of decode time;",
        "equal: texts equal to plain decoding's first, and why others differ (near-tie of two logits, or bug).",
    ]
    if peers:
        lines.append("vs plain, vs best: to a peer's plain and best speculative (*) setting.")
    return "\n".join(lines)


def _columns(peers: bool) -> list[str]:
    names = [
        "tokens/s",
        "p25-p75",
        "ratio",
        "total",
        "accept",
        "TTFT ms",
        "ITL ms",
        "draft %",
        "target %",
        "equal",
        "failed",
    ]
    return [*names, "vs plain", "vs best"] if peers else names


def _cells(row: SummaryRow, peers: bool) -> list[str]:
    cells = [
        figure(row.output_tps_median, 1) + (" *" if row.best_peer else ""),
        f"{figure(row.output_tps_p25, 1)}-{figure(row.output_tps_p75, 1)}",
        figure(row.ratio, 2),
        figure(row.ratio_total, 2),
        figure(row.acceptance_length, 2),
        figure(row.ttft_median_ms, 0),
        figure(row.itl_median_ms, 0),
        figure(row.draft_share, 1, 100.0),
        figure(row.target_share, 1, 100.0),
        _equal(row),
        str(row.failures or ""),
    ]
    return [*cells, figure(row.ratio_to_peer_plain, 2), figure(row.ratio_to_peer_speculative, 2)] if peers else cells


def _equal(row: SummaryRow) -> str:
    causes = [f"{count} {name}" for count, name in ((row.ties, "tie"), (row.bugs, "bug")) if count]
    return ", ".join([f"{row.equal_texts}/{row.compared_texts}", *causes])


def figure(value: float | None, digits: int, scale: float = 1.0) -> str:
    """A figure as tables print it; a dash where nothing was observed."""
    return "-" if value is None else f"{value * scale:.{digits}f}"
