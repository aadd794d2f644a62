"""The summary as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specflow.bench.summary import SummaryRow

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["summary_table"]


def summary_table(summary: Sequence[SummaryRow], baseline: str) -> Table:
    """Medians over prompts, one block of rows a subset; columns about peers only where there are peers."""
    from rich import box
    from rich.table import Table

    peers = any(row.kind != "recipe" for row in summary)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=_caption(baseline, peers), caption_justify="left")
    table.add_column("method", no_wrap=True)
    for name in _columns(peers):
        table.add_column(name, justify="right", no_wrap=True)
    for index, row in enumerate(summary):
        if index == 0 or summary[index - 1].subset != row.subset:
            table.add_row(f"{row.subset}", *[""] * len(_columns(peers)), style="bold")
        last = index + 1 == len(summary) or summary[index + 1].subset != row.subset
        table.add_row(f"  {row.strategy}", *_cells(row, peers), end_section=last)
    return table


def _caption(baseline: str, peers: bool) -> str:
    lines = [
        f"tokens/s: decode, median of prompts; ratio: to {baseline} on the same prompt, median;",
        "total: all tokens over all time; accept: tokens a target pass, bonus included;",
        "draft %, target %: of decode time; equal: texts equal to plain decoding's first.",
    ]
    if peers:
        lines.append("vs plain, vs best: to a peer's plain and best speculative (*) setting.")
    return "\n".join(lines)


def _columns(peers: bool) -> list[str]:
    names = ["tokens/s", "p25-p75", "ratio", "total", "accept", "TTFT ms", "draft %", "target %", "equal", "failed"]
    return [*names, "vs plain", "vs best"] if peers else names


def _cells(row: SummaryRow, peers: bool) -> list[str]:
    cells = [
        _number(row.output_tps_median, 1) + (" *" if row.best_peer else ""),
        f"{_number(row.output_tps_p25, 1)}-{_number(row.output_tps_p75, 1)}",
        _number(row.ratio, 2),
        _number(row.ratio_total, 2),
        _number(row.acceptance_length, 2),
        _number(row.ttft_median_ms, 0),
        _number(row.draft_share, 1, 100.0),
        _number(row.target_share, 1, 100.0),
        f"{row.equal_texts}/{row.compared_texts}",
        str(row.failures or ""),
    ]
    return [*cells, _number(row.ratio_to_peer_plain, 2), _number(row.ratio_to_peer_speculative, 2)] if peers else cells


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"
