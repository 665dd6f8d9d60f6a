"""Criteria are judged from rows: what meets them passes, what just does not is a miss, what is missing is a miss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from testbed.flowsim.run import FlowCase
from testbed.paper import reference
from testbed.paper.acceptance import Criterion, criteria
from testbed.paper.cases import Scope
from testbed.paper.figures import FIGURES
from testbed.paper.rows import Kind, Row
from testbed.paper.summary import CaseSummary, reduce
from tests.support.paper_world import fake_simulate


def fake(case: FlowCase) -> CaseSummary:
    return reduce(fake_simulate(case))


def perfect(row: Row) -> Row:
    """What the paper has, where it has something; where it has 64K pairs 9 % apart, equal."""
    if row.quantity == "JCT max/min of equal SNICs":
        return replace(row, ours=1.02)
    if row.quantity == "speed-up, mean absolute error":
        return replace(row, ours=0.0)
    return row if row.paper is None else replace(row, ours=row.paper)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [perfect(row) for figure in FIGURES.values() for row in figure.rows(Scope(), fake)]


def missed(rows: list[Row]) -> list[str]:
    return [criterion.text.split(":")[0] for criterion in criteria(rows) if not criterion.met]


def named(rows: list[Row], text: str) -> Criterion:
    (found,) = [criterion for criterion in criteria(rows) if text in criterion.text]
    return found


def test_the_papers_own_values_meet_everything(rows: list[Row]) -> None:
    assert missed(rows) == []
    assert len(criteria(rows)) == 11


def test_without_rows_nothing_is_met() -> None:
    assert not any(criterion.met for criterion in criteria([]))
    assert {criterion.figures for criterion in criteria([])} == {"not run"}


def changed(rows: list[Row], cell: str, system: str, ours: float | None) -> list[Row]:
    found = [row for row in rows if (row.cell, row.system) == (cell, system)]
    assert found, cell
    return [replace(row, ours=ours) if row in found else row for row in rows]


CELLS = [
    ("calibrated JCTs", "660B 64K 2048: JCT, s", "Oracle", 4920 * 1.029, 4920 * 1.031),
    ("calibrated JCTs", "27B 64K 2048: JCT, s", "Basic", 7850 * 0.971, 7850 * 0.969),
    ("calibrated shares", "660B 0.2 APS Alloc: share of TTFT, %", "Basic", 2.9, 3.1),
    ("speed-ups", "27B: speed-up, mean absolute error", "Basic / DualPath", 0.099, 0.101),
    ("ablation", "660B 64K: mean cut of JCT against Basic, %", "+ dual path", 38.19 - 4.9, 38.19 - 5.1),
    ("equal SNICs", "27B 64K 512 3 SNICs: JCT max/min of equal SNICs", "DualPath 2P1D, DualPath 1P2D", 1.049, 1.051),
    ("gain of 1P2D", "27B 64K 1P2D 2048: speed-up", "Basic / DualPath", 2.21, 2.19),
    ("gain of 1P2D", "27B 64K 1P2D 2048: speed-up", "Basic / DualPath", 2.99, 3.01),
    ("Figure 13", "27B 1P2D 48K 1024: SNIC max/avg, mean", "+ dual path", 1.528 - 0.099, 1.528 - 0.101),
    ("capacity", "660B: capacity gain", "DualPath / Basic", 2.25 * 1.149, 2.25 * 1.151),
    ("scheduling share", "660B: Sch share at .25 over .15 APS", "Basic", 1.6, 1.4),
    ("scheduling share", "660B: Sch share at .25 over .15 APS", "DualPath", 1.2, 1.3),
    ("Table 3", "offline: JCT, 24x the size over 1x", "DualPath", 0.971, 0.969),
]


@pytest.mark.parametrize(("criterion", "cell", "system", "good", "bad"), CELLS, ids=[f"{c[0]}-{c[3]:g}" for c in CELLS])
def test_each_bound(rows: list[Row], criterion: str, cell: str, system: str, good: float, bad: float) -> None:
    assert named(changed(rows, cell, system, good), criterion).met
    worse = changed(rows, cell, system, bad)
    assert not named(worse, criterion).met and "MISS" in named(worse, criterion).figures
    assert len(missed(worse)) == 1
    without = changed(rows, cell, system, None)
    assert not named(without, criterion).met and "has no value" in named(without, criterion).figures


def test_one_wrong_order_is_named(rows: list[Row]) -> None:
    order = "660B 48K 512: pairs of systems in the paper's order"
    wrong = named(changed(rows, order, "all", 4), "ordering")
    assert not wrong.met and wrong.figures.endswith("; 660B 48K 512")
    right = named(rows, "ordering")
    assert right.figures == f"{_pairs()} of {_pairs()} pairs in 24 cells"


def _pairs() -> int:
    def apart() -> Iterator[bool]:
        for systems in reference.FIGURE_7.values():
            for values in zip(*systems.values(), strict=True):
                there = sorted(value for value in values if value is not None)
                yield from (b > a * 1.05 for i, a in enumerate(there) for b in there[i + 1 :])

    return sum(apart())


def test_predictions_do_not_count_as_calibrated(rows: list[Row]) -> None:
    off = [replace(r, ours=2 * r.paper) if r.kind is Kind.PREDICTED and r.paper else r for r in rows]
    assert named(off, "calibrated JCTs").met and named(off, "calibrated shares").met
