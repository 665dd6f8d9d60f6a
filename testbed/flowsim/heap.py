"""Event heap of the flow simulation: integer nanoseconds, ordered by (time, sequence).

Arrays of a fixed capacity; ``size[0]`` entries are in use, ``size[1]`` counts what was ever pushed, so that two events
of one instant come in the order in which they were made.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from testbed.flowsim.compiled import compiled, inlined

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]


class Heap(NamedTuple):
    """Pending events: ``kind`` and ``arg`` say what happens, ``stamp`` guards against one that was superseded."""

    time_ns: I64
    sequence: I64
    kind: I32
    arg: I32
    stamp: I64
    size: I64


def make_heap(capacity: int) -> Heap:
    """An empty heap."""
    return Heap(
        time_ns=np.zeros(capacity, np.int64),
        sequence=np.zeros(capacity, np.int64),
        kind=np.zeros(capacity, np.int32),
        arg=np.zeros(capacity, np.int32),
        stamp=np.zeros(capacity, np.int64),
        size=np.zeros(2, np.int64),
    )


@inlined
def _before(h: Heap, a: int, b: int) -> bool:
    earlier = h.time_ns[a] < h.time_ns[b] or (h.time_ns[a] == h.time_ns[b] and h.sequence[a] < h.sequence[b])
    return bool(earlier)


@inlined
def _swap(h: Heap, a: int, b: int) -> None:
    h.time_ns[a], h.time_ns[b] = h.time_ns[b], h.time_ns[a]
    h.sequence[a], h.sequence[b] = h.sequence[b], h.sequence[a]
    h.kind[a], h.kind[b] = h.kind[b], h.kind[a]
    h.arg[a], h.arg[b] = h.arg[b], h.arg[a]
    h.stamp[a], h.stamp[b] = h.stamp[b], h.stamp[a]


@compiled
def push(h: Heap, time_ns: int, kind: int, arg: int, stamp: int) -> None:
    """Add an event. Raises IndexError when the heap is full, which would be a bug: its capacity bounds all waits."""
    at = h.size[0]
    if at >= len(h.time_ns):
        raise IndexError("the event heap is full")
    h.time_ns[at] = time_ns
    h.sequence[at] = h.size[1]
    h.kind[at] = kind
    h.arg[at] = arg
    h.stamp[at] = stamp
    h.size[0] += 1
    h.size[1] += 1
    while at > 0:
        parent = (at - 1) >> 1
        if not _before(h, at, parent):
            return
        _swap(h, at, parent)
        at = parent


@compiled
def drop_first(h: Heap) -> None:
    """Remove the earliest event (entry 0)."""
    h.size[0] -= 1
    last = h.size[0]
    _swap(h, 0, last)
    at = 0
    while True:
        least = 2 * at + 1
        if least >= last:
            return
        if least + 1 < last and _before(h, least + 1, least):
            least += 1
        if not _before(h, least, at):
            return
        _swap(h, at, least)
        at = least
