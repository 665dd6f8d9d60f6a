"""How a role's process is doing: event-loop lag, CPU time, private memory. A run is only as good as these."""

from __future__ import annotations

import resource
import time
from array import array
from pathlib import Path

from testbed.fabric.live.timer import Alarm
from testbed.units import NS_PER_MS, NS_PER_S, NS_PER_US

_PERIOD_NS = 100 * NS_PER_MS
_BIN_NS = 50 * NS_PER_US
_BINS = 4_000  # up to 200 ms; what is later counts into the last bin, and exactly into the maximum


class LagMeter:
    """Measures how late the event loop is while the role works: the delay that every event of the role suffers.

    A precise alarm asks to be called every 100 ms; how late it is called is the lag. It goes to sleep when nothing
    was handled for a period: 60 idle roles must not cost the busy ones a tenth of a core.
    """

    def __init__(self) -> None:
        self._alarm = Alarm(self._ring, period_ns=_PERIOD_NS)
        self._due_ns = 0
        self._armed = False
        self._worked = False
        self._bins = array("L", bytes(8 * _BINS))
        self.samples = 0
        self.max_ns = 0

    def working(self) -> None:
        """The role handles events: measure."""
        self._worked = True
        if not self._armed:
            self._armed = True
            self._due_ns = time.monotonic_ns() + _PERIOD_NS
            self._alarm.set(self._due_ns)

    def stop(self) -> None:
        """Cease to measure, and release the alarm."""
        self._alarm.close()

    def _ring(self) -> None:
        now_ns = time.monotonic_ns()
        lag = max(0, now_ns - self._due_ns)
        self._bins[min(lag // _BIN_NS, _BINS - 1)] += 1
        self.samples += 1
        self.max_ns = max(self.max_ns, lag)
        self._due_ns += (lag // _PERIOD_NS + 1) * _PERIOD_NS
        if not self._worked:
            self._armed = False
            self._alarm.set(None)
        self._worked = False

    def quantile_ns(self, q: float) -> int:
        """Upper bound of the bin in which the ``q`` quantile lies (0 without samples)."""
        rank, seen = q * self.samples, 0
        for k, count in enumerate(self._bins):
            seen += count
            if count and seen >= rank:
                return min((k + 1) * _BIN_NS, self.max_ns)
        return 0


def cpu_time_ns() -> int:
    """CPU time of this process so far, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int((usage.ru_utime + usage.ru_stime) * NS_PER_S)


def private_memory_bytes() -> int:
    """Memory that would be freed if this process ended (USS); what it shares with its parent does not count."""
    total = 0
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:")):
            total += int(line.split()[1]) * 1024
    return total
