"""Progress: from every state that can be reached there is a way to an end, and every way that ends ends well.

A state from which nothing happens of itself is an end: all requests must have ended, and everything must be back
(conservation). While nothing has failed a request may not need its deadline to end: that is a lost wake-up. A state of
a bounded graph that reaches no end is in a livelock.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

NAME = "progress"


def unable_to_end(states: int, sources: array[int], targets: array[int], ends: Iterable[int]) -> list[int]:
    """Numbers of states from which no end is reached, smallest first. ``sources[k] -> targets[k]`` are the edges."""
    first = array("q", [-1]) * states  # per target: its last edge; ``following``: the edge before that
    following = array("q", [-1]) * len(sources)
    for edge, target in enumerate(targets):
        following[edge] = first[target]
        first[target] = edge
    reaches = bytearray(states)
    todo = deque(ends)
    for end in todo:
        reaches[end] = 1
    while todo:
        edge = first[todo.popleft()]
        while edge >= 0:
            source = sources[edge]
            if not reaches[source]:
                reaches[source] = 1
                todo.append(source)
            edge = following[edge]
    return [state for state in range(states) if not reaches[state]]
