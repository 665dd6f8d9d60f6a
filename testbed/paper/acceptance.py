"""Whether the reproduction holds, criterion by criterion, computed from the rows (nothing is repeated here by hand).

A criterion whose rows are missing, or have no value of ours, is missed: an evaluation that did not run proves nothing.
Shares of Figure 12 are percentages already: within 3 % means within 3 points of the TTFT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from testbed.paper.figures.ablation import MEAN_CUT, SCHEDULING_RISE, SHARE, SNIC_MEAN
from testbed.paper.figures.offline import EQUAL, GAIN, JCT, MEAN_ERROR, ORDER
from testbed.paper.figures.scale import OFFLINE_FLATNESS
from testbed.paper.figures.serving import CAPACITY_GAIN
from testbed.paper.rows import Kind, Row

CALIBRATED_WITHIN = 0.03
SHARE_WITHIN_POINTS = 3.0
MEAN_ERROR_WITHIN = 0.10
CUT_WITHIN_POINTS = 5.0
EQUAL_WITHIN = 1.05
ONE_P_TWO_D_GAIN = (2.2, 3.0)
SNIC_WITHIN = 0.1
CAPACITY_WITHIN = 0.15
RISING = 1.5
FLAT = (0.8, 1.25)
"""RISING, FLAT: Sch share at .25 over .15 APS. The paper has 3.4 for Basic and 1.0 for DualPath."""
SCALING_WITHIN = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One line of the summary: what is demanded, whether it is met, and the figures that say so."""

    text: str
    met: bool
    figures: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """A row that has a value of ours."""

    row: Row
    ours: float

    @property
    def error(self) -> float:
        """Relative; 0 where the paper gives nothing to compare with."""
        return abs(self.row.rel_error or 0.0)

    @property
    def points(self) -> float:
        return abs(self.ours - (self.row.paper or 0.0))


def criteria(rows: Sequence[Row]) -> list[Criterion]:
    """All of them: what was fitted, what a system gains, how it is balanced, served and scaled."""
    return [*_calibrated(rows), *_gains(rows), *_balance_and_load(rows)]


def _calibrated(rows: Sequence[Row]) -> list[Criterion]:
    return [
        _judge(
            f"calibrated JCTs within {CALIBRATED_WITHIN:.0%}",
            [r for r in rows if r.kind is Kind.CALIBRATED and r.quantity == JCT and r.figure == "fig7"],
            lambda v: v.error <= CALIBRATED_WITHIN,
            lambda v: f"{v.row.where} {v.row.system} {v.row.rel_error:+.1%}",
        ),
        _judge(
            f"calibrated shares of TTFT within {SHARE_WITHIN_POINTS:g} points",
            [r for r in rows if r.kind is Kind.CALIBRATED and r.quantity == SHARE],
            lambda v: v.points <= SHARE_WITHIN_POINTS,
            lambda v: f"{v.row.system} {v.row.where.split()[-1]} {v.ours:.0f} ({v.row.paper:.0f})",
        ),
    ]


def _gains(rows: Sequence[Row]) -> list[Criterion]:
    return [
        _judge(
            f"Figure 7 speed-ups, mean absolute error at most {MEAN_ERROR_WITHIN:.0%}",
            [r for r in rows if r.quantity == MEAN_ERROR],
            lambda v: v.ours <= MEAN_ERROR_WITHIN,
            lambda v: f"{v.row.where} {v.ours:.1%}",
        ),
        _orderings(rows),
        _judge(
            f"ablation: mean cuts within {CUT_WITHIN_POINTS:g} points",
            [r for r in rows if r.quantity == MEAN_CUT],
            lambda v: v.points <= CUT_WITHIN_POINTS,
            _beside,
        ),
        _judge(
            f"Figure 8: equal SNICs within {EQUAL_WITHIN - 1:.0%}",
            [r for r in rows if r.quantity == EQUAL],
            lambda v: v.ours <= EQUAL_WITHIN,
            lambda v: f"{' '.join(v.row.where.split()[2:])} {v.ours:.3f}",
        ),
        _judge(
            f"Figure 8: gain of 1P2D, 64K, between {ONE_P_TWO_D_GAIN[0]:g} and {ONE_P_TWO_D_GAIN[1]:g}",
            [r for r in rows if r.figure == "fig8" and r.quantity == GAIN and " 64K 1P2D 2048" in r.where],
            lambda v: ONE_P_TWO_D_GAIN[0] <= v.ours <= ONE_P_TWO_D_GAIN[1],
            _beside,
        ),
    ]


def _balance_and_load(rows: Sequence[Row]) -> list[Criterion]:
    return [
        _judge(
            f"Figure 13: SNIC max/avg within {SNIC_WITHIN:g}",
            [r for r in rows if r.quantity == SNIC_MEAN and r.paper is not None],
            lambda v: v.points <= SNIC_WITHIN,
            _beside,
        ),
        _judge(
            f"online capacity gains within {CAPACITY_WITHIN:.0%}",
            [r for r in rows if r.quantity == CAPACITY_GAIN],
            lambda v: v.error <= CAPACITY_WITHIN,
            lambda v: f"{v.row.where} {v.ours:.2f} ({v.row.paper:.2f})",
        ),
        _judge(
            "scheduling share of TTFT rising for Basic, flat for DualPath",
            [r for r in rows if r.quantity == SCHEDULING_RISE],
            lambda v: v.ours >= RISING if v.row.system == "Basic" else FLAT[0] <= v.ours <= FLAT[1],
            _beside,
        ),
        _judge(
            f"Table 3: 24x scaling flat within {SCALING_WITHIN:.0%}",
            [r for r in rows if r.quantity == OFFLINE_FLATNESS],
            lambda v: abs(v.ours - 1) <= SCALING_WITHIN,
            _beside,
        ),
    ]


def _judge(text: str, rows: list[Row], holds: Callable[[_Value], bool], show: Callable[[_Value], str]) -> Criterion:
    values = [_Value(row=row, ours=row.ours) for row in rows if row.ours is not None]
    shown = [f"{show(value)}{'' if holds(value) else ' MISS'}" for value in values]
    shown += [f"{row.where} {row.system} has no value" for row in rows if row.ours is None]
    return Criterion(
        text=text,
        met=bool(rows) and len(values) == len(rows) and all(map(holds, values)),
        figures="; ".join(shown) or "not run",
    )


def _orderings(rows: Sequence[Row]) -> Criterion:
    """Of two dozen cells only those that are wrong are named."""
    orders = [row for row in rows if row.quantity == ORDER]
    wrong = [row for row in orders if row.ours != row.paper]
    pairs = sum(int(row.paper or 0) for row in orders)
    right = sum(int(row.ours or 0) for row in orders)
    named = "".join(f"; {row.where}" for row in wrong)
    return Criterion(
        text="Figure 7: every ordering right",
        met=bool(orders) and not wrong,
        figures=f"{right} of {pairs} pairs in {len(orders)} cells{named}" if orders else "not run",
    )


def _beside(value: _Value) -> str:
    return f"{value.row.system} {value.ours:.3g} ({value.row.paper:.3g})"
