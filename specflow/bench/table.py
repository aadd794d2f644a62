"""The summary as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specflow.bench.summary import OVERALL, SummaryRow

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["summary_table"]


def summary_table(summary: Sequence[SummaryRow], baseline: str) -> Table:
    """Medians with p25-p75, one block of rows a subset; columns about peers only where there are peers."""
    from rich.table import Table

    peers = any(row.kind != "recipe" for row in summary)
    table = Table(title=f"medians over prompts (p25-p75); ratio: to {baseline} on the same prompts")
    for name in ("subset", "method"):
        table.add_column(name, overflow="fold")
    numbers = ["tokens/s", "ratio", "total", "accept len", "TTFT ms", "draft/target/verify/other %", "equal texts"]
    for name in [*numbers, *(["vs peer plain", "vs peer best"] if peers else [])]:
        table.add_column(name, justify="right")
    for index, row in enumerate(summary):
        last = index + 1 == len(summary) or summary[index + 1].subset != row.subset
        table.add_row(*_cells(row, peers), end_section=last, style="bold" if row.subset == OVERALL else "")
    return table


def _cells(row: SummaryRow, peers: bool) -> list[str]:
    failed = f" ({row.failures} failed)" if row.failures else ""
    shares = (row.draft_share, row.target_share, row.verify_share, row.other_share)
    cells = [
        row.subset,
        row.strategy + (" *best of peer" if row.best_peer else "") + failed,
        _spread(row.output_tps_median, row.output_tps_p25, row.output_tps_p75, 1),
        _spread(row.ratio, row.ratio_p25, row.ratio_p75, 2),
        _number(row.ratio_total, 2),
        _number(row.acceptance_length, 2),
        _number(row.ttft_median_ms, 0),
        "/".join(f"{100 * share:.1f}" for share in shares if share is not None) or "-",
        f"{row.equal_texts}/{row.compared_texts}",
    ]
    if peers:
        cells += [_number(row.ratio_to_peer_plain, 2), _number(row.ratio_to_peer_speculative, 2)]
    return cells


def _spread(middle: float | None, low: float | None, high: float | None, digits: int) -> str:
    if middle is None or low is None or high is None:
        return "-"
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
