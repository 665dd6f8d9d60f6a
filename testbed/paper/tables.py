"""What ``testbed paper`` prints: one table per figure, paper beside ours, and at the end whether it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from testbed.paper.acceptance import Criterion
from testbed.paper.figures.figure import Figure
from testbed.paper.rows import Kind, Row, number

QUICK_NOTE = "a tenth of the agents: does not compare with the paper"


def figure_table(figure: Figure, rows: Iterable[Row], *, note: str = "") -> RenderableType:
    """The listed rows of a figure; a value that was calibrated on says so. ``note`` goes behind the title."""
    table = Table()
    for column in ("cell", "system"):
        table.add_column(column)
    for column in ("paper", "ours", "error"):
        table.add_column(column, justify="right")
    table.add_column("kind")
    for row in rows:
        if row.listed:
            table.add_row(Text(row.cell), row.system, *map(_short, (row.paper, row.ours)), _error(row), row.kind.value)
    return Group(_heading(f"{figure.name}: {figure.title}", note), table)


def acceptance_table(criteria: Sequence[Criterion], *, note: str = "") -> RenderableType:
    """One line per criterion."""
    table = Table()
    for column in ("criterion", "", "ours (paper)"):
        table.add_column(column)
    for criterion in criteria:
        table.add_row(Text(criterion.text), "pass" if criterion.met else "MISS", Text(criterion.figures))
    return Group(_heading("What was to be reproduced", note), table)


def summary_line(rows: Sequence[Row]) -> str:
    """How many values were compared, and how far off they are."""
    parts = []
    for kind in Kind:
        errors = sorted(abs(row.rel_error) for row in rows if row.kind is kind and row.rel_error is not None)
        if errors:
            parts.append(f"{len(errors)} {kind.value}, median error {errors[len(errors) // 2]:.1%}")
    return f"Compared with the paper: {'; '.join(parts) or 'nothing'}."


def _heading(title: str, note: str) -> Text:
    return Text(f"{title} ({note})" if note else title, style="bold")


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else number(float(f"{value:.4g}"))


def _error(row: Row) -> str:
    return "" if row.rel_error is None else f"{row.rel_error:+.1%}"
