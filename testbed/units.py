"""Units: the few conversions everybody needs. Names carry the unit last (``size_bytes``, ``rate_bps``, ``now_ns``)."""

from __future__ import annotations

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000

MBIT = 1_000_000
GBIT = 1_000_000_000


def seconds_to_ns(seconds: float) -> int:
    """Seconds to integer nanoseconds, rounded to nearest."""
    return round(seconds * NS_PER_S)


def transfer_time_ns(size_bytes: int, rate_bps: int) -> int:
    """Time that ``size_bytes`` take on a link of ``rate_bps`` bits per second, in nanoseconds, rounded up."""
    return -(-size_bytes * 8 * NS_PER_S // rate_bps)
