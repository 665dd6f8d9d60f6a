"""The busiest window of links whose counters are read now and then."""

from __future__ import annotations

from collections.abc import Mapping

from testbed.units import NS_PER_S

PEAK_WINDOW_NS = NS_PER_S


class Peaks:
    """Highest mean rate between two looks that are at least half a window apart; ``bps`` by name."""

    def __init__(self) -> None:
        self.bps: dict[str, float] = {}
        self._before: Mapping[str, int] = {}
        self._at_ns: int | None = None

    def look(self, at_ns: int, carried_bytes: Mapping[str, int]) -> None:
        """Counters at a time; a look too soon after the last, as at the end of a run, counts for nothing."""
        if self._at_ns is not None:
            span_ns = at_ns - self._at_ns
            if 2 * span_ns < PEAK_WINDOW_NS:
                return
            for name, carried in carried_bytes.items():
                rate = (carried - self._before[name]) * 8 * NS_PER_S / span_ns
                self.bps[name] = max(self.bps.get(name, 0.0), rate)
        self._before, self._at_ns = carried_bytes, at_ns
