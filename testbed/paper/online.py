"""Online serving: the SLO, the paper's stop rule, and the largest load within the SLO (section 7.4).

The rule: serve until TTFT exceeds the SLO, or until it is steady: its mean in a sliding window of 150 s is within 5 %
of what it was 30 minutes earlier. A request counts in the window in which its first token came. The earlier window may
not lie in the warm-up, when agents have come but none has left yet.

Figures are then taken where the rule looked last: over the steady half hour, or over the last window of a run that
broke the SLO or came to its horizon unsettled (still drifting, so what counts is where it had got to).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TTFT_SLO_S = 4.0
TPOT_SLO_S = 0.05
WINDOW_S = 150.0
EARLIER_S = 1800.0
TOLERANCE = 0.05
WARM_UP_S = 1200.0
CHECK_EVERY_S = 10.0


class Outcome(StrEnum):
    """How a run ended."""

    OVER = "over the SLO"
    STEADY = "steady"
    UNSETTLED = "unsettled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """When the rule ended a run, and which first tokens are measured: those in [from_s, until_s)."""

    outcome: Outcome
    from_s: float
    until_s: float


def stop_rule(first_token_s: Floats, ttft_s: Floats, end_s: float, stretch: float = 1.0) -> Stop:
    """Apply the rule to a run that was recorded until ``end_s``.

    Args:
        first_token_s: seconds since the start, one per request, in any order.
        ttft_s: same length.
        end_s: nothing later is looked at.
        stretch: how many times as long an agent lives by its tool calls; warm-up and half hour grow as much.
    """
    order = np.argsort(first_token_s, kind="stable")
    at = first_token_s[order]
    total = np.concatenate(([0.0], np.cumsum(ttft_s[order])))
    for now in np.arange(WINDOW_S, end_s + CHECK_EVERY_S / 2, CHECK_EVERY_S):
        ttft = _mean(at, total, now - WINDOW_S, now)
        if ttft is not None and ttft > TTFT_SLO_S:
            return Stop(outcome=Outcome.OVER, from_s=float(now) - WINDOW_S, until_s=float(now))
        before_s = now - stretch * EARLIER_S
        if before_s - WINDOW_S < stretch * WARM_UP_S:
            continue
        earlier = _mean(at, total, before_s - WINDOW_S, before_s)
        if ttft is not None and earlier is not None and abs(ttft - earlier) <= TOLERANCE * earlier:
            return Stop(outcome=Outcome.STEADY, from_s=float(before_s), until_s=float(now))
    return Stop(outcome=Outcome.UNSETTLED, from_s=max(0.0, end_s - WINDOW_S), until_s=end_s)


def _mean(at: Floats, total: Floats, from_s: float, until_s: float) -> float | None:
    low, high = np.searchsorted(at, (from_s, until_s), side="left")
    return float((total[high] - total[low]) / (high - low)) if high > low else None


def within_slo(outcome: Outcome, ttft_s: float, tpot_s: float) -> bool:
    """Whether a run that ended so, with these means, kept the SLO."""
    return outcome is not Outcome.OVER and ttft_s <= TTFT_SLO_S and tpot_s <= TPOT_SLO_S


def aps_grid(step: float, highest: float) -> tuple[float, ...]:
    """``step``, 2 ``step``, ... up to ``highest``, without the dust of adding floats."""
    return tuple(round(step * i, 6) for i in range(1, int(highest / step + 1e-9) + 1))


def capacity(within: Callable[[float], bool], grid: Sequence[float], known: Mapping[float, bool]) -> float:
    """The largest value of a rising ``grid`` that is ``within``, by bisection; 0 if not even the first is.

    Takes for granted that what is within at one load is within at every smaller one. ``known``: loads answered before;
    the search starts between the smallest that is not within and the largest below it that is.
    """
    high = min((i for i, aps in enumerate(grid) if known.get(aps) is False), default=len(grid))
    low = max((i for i, aps in enumerate(grid[:high]) if known.get(aps)), default=-1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(grid[middle]) else (low, middle)
    return grid[low] if low >= 0 else 0.0
