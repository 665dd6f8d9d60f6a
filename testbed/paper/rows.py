"""One line of ``paper.csv``: a quantity of one cell of one figure, the paper's value beside ours.

Invariant: the columns of the file are ``COLUMNS`` and do not depend on what was run.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from testbed.errors import HostError

COLUMNS = ("figure", "cell", "system", "paper", "ours", "rel_error", "kind")


class Kind(StrEnum):
    """Whether a free parameter was fitted on the cell."""

    CALIBRATED = "calibrated"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One value.

    ``where``: the cell, e.g. "660B 64K 2048"; ``quantity``: what was measured, with its unit, e.g. "JCT, s".
    ``paper``: None where the paper gives nothing; ``ours``: None where the simulation has nothing to give.
    ``panel`` and ``x`` place the value in the plot of its figure; an empty panel leaves it out.
    ``listed``: whether the terminal shows it (the file holds all).
    """

    figure: str
    where: str
    quantity: str
    system: str
    ours: float | None
    paper: float | None = None
    kind: Kind = Kind.PREDICTED
    panel: str = ""
    x: float = 0.0
    listed: bool = True

    @property
    def cell(self) -> str:
        """Where and what."""
        return f"{self.where}: {self.quantity}"

    @property
    def rel_error(self) -> float | None:
        """(ours - paper) / paper; None where one is missing or the paper's value is 0."""
        if self.paper is None or self.ours is None or self.paper == 0:
            return None
        return (self.ours - self.paper) / self.paper


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write all rows.

    Raises:
        HostError: the file cannot be written.
    """
    write_table(
        path,
        COLUMNS,
        (
            (r.figure, r.cell, r.system, number(r.paper), number(r.ours), number(r.rel_error), r.kind.value)
            for r in rows
        ),
    )


def write_table(path: Path, columns: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Write a CSV file.

    Raises:
        HostError: it cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(lines)
    except OSError as error:
        raise HostError(f"{path}: cannot be written ({error.strerror}).") from error


def number(value: float | None) -> str:
    """Six digits, empty without a value: equal runs give equal files."""
    return "" if value is None else f"{value:.6g}"
