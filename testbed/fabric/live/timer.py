"""An alarm with nanosecond arguments: asyncio's own timers are up to a millisecond late.

``loop.call_later`` ends in ``epoll_wait``, whose timeout is whole milliseconds, rounded up. A layer step of an emulated
GPU lasts a few milliseconds, so that half a millisecond of lateness per step would be an error of the results. A
timerfd (``timerfd_create(2)``) wakes the same event loop through the same epoll, some 50 us late. Python 3.11 does not
offer it; the C library does.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
from collections.abc import Callable

from testbed.units import NS_PER_S

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _ItimerSpec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """Calls ``ring`` once at the time set last, on the clock of ``time.monotonic_ns``. No wakeup unless set.

    With a ``period_ns`` it goes on ringing at that distance; rings that the loop was too late for are left out.
    """

    def __init__(self, ring: Callable[[], None], *, period_ns: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._periodic = period_ns > 0
        self._at_ns: int | None = None
        self._spec = _ItimerSpec(*divmod(period_ns, NS_PER_S), 0, 0)
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop.add_reader(self._fd, self._expired)

    def set(self, at_ns: int | None) -> None:
        """Ring at ``at_ns`` (at once if that has passed), or not at all; replaces what was set before."""
        if at_ns == self._at_ns:
            return
        self._at_ns = at_ns
        # An all-zero value disarms; a time that has passed rings at once.
        self._spec.value_s, self._spec.value_ns = (0, 0) if at_ns is None else divmod(max(1, at_ns), NS_PER_S)
        if _libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Release the descriptor (idempotent)."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set again since
        if not self._periodic:
            self._at_ns = None
        self._ring()


class Deadlines:
    """Named times, the next one known; replaced and cleared ones leave the heap lazily."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def set(self, key: str, at_ns: int) -> None:
        """Set or replace a deadline."""
        if self._at.get(key) == at_ns:
            return
        self._at[key] = at_ns
        heapq.heappush(self._heap, (at_ns, key))
        if len(self._heap) > 64 + 4 * len(self._at):
            self._heap = [(at, name) for name, at in self._at.items()]
            heapq.heapify(self._heap)

    def clear(self, key: str) -> None:
        """Forget a deadline (idempotent)."""
        self._at.pop(key, None)

    def next_ns(self) -> int | None:
        """Time of the next deadline."""
        heap = self._heap
        while heap and self._at.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take_passed(self, now_ns: int) -> list[str]:
        """Deadlines at or before ``now_ns``, in order of time; they are forgotten."""
        passed = []
        while (at_ns := self.next_ns()) is not None and at_ns <= now_ns:
            key = heapq.heappop(self._heap)[1]
            del self._at[key]
            passed.append(key)
        return passed
