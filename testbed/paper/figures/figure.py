"""What a figure or table of the paper is to the command: the simulations it needs, and its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from testbed.flowsim.run import FlowCase
from testbed.paper.cases import Scope
from testbed.paper.rows import Row
from testbed.paper.summary import CaseSummary

Results = Callable[[FlowCase], CaseSummary]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """``rows`` asks for every simulation it needs; ``cases`` names those known beforehand, to be run in parallel."""

    name: str
    title: str
    x_label: str
    cases: Callable[[Scope], list[FlowCase]]
    rows: Callable[[Scope, Results], list[Row]]


def jct(summary: CaseSummary) -> float | None:
    """JCT in seconds, if all agents came to their end."""
    return summary.jct_s if summary.finished else None


def ratio(above: float | None, below: float | None) -> float | None:
    """``above / below``, if there are both."""
    return above / below if above is not None and below else None


def mean(values: list[float | None]) -> float | None:
    """Mean, if there are values and none is missing."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there and len(there) == len(values) else None
