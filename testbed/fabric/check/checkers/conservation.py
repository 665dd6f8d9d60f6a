"""Conservation: bytes, buffer pages, grants and HBM pages are neither lost nor held twice.

In every state: a pool's pages are each free or held, never both; a grant is opened once and used once; memory that a
write in flight reads does not change; a write lands only in memory that somebody holds. At rest: everything is back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from testbed.fabric.check.memory import pools_of
from testbed.protocol.pages import PagePool

NAME = "conservation"
LASTING = {
    "_ended": "names of ended requests, by which late messages are known",
    "contexts": "the agents' own memory",
    "outcomes": "the result",
    "scripts": "the input",
    "starts_ns": "the input",
    "tool_delay_ns": "the input",
    "group_tokens": "a figure per group",
    "read_queues": "a figure per node",
    "_turn": "a figure per kind",
    "_serials": "a figure per group",
    "_told": "what the leaders' next reports will include",
    "_servers": "the cluster",
}
FIGURES = ("outstanding", "private")
"""Dicts whose keys last and whose values must all be back to nothing."""


def of_role(role: Any) -> Iterator[str]:
    """What is wrong with a role in any state."""
    for name, pool, _ in pools_of(role.machine):
        free, held = pool._free, pool._holds
        if len(set(free)) != len(free) or set(free) & set(held) or len(free) + len(held) != pool.capacity:
            yield f"{role.name}.{name}: {len(free)} pages free, {len(held)} held, of {pool.capacity}"


def at_rest(role: Any) -> Iterator[str]:
    """What a role still holds although every request has ended and nothing is in flight."""
    for left in left_in(role.machine):
        yield f"{role.name}.{left}"
    if len(role.grants):
        yield f"{role.name}: {len(role.grants)} grants are open"
    if role.posted:
        yield f"{role.name}: {len(role.posted)} writes never ended"
    if armed := sorted(set(role.deadlines) - {"fetch"}):
        yield f"{role.name}: deadlines {', '.join(armed)} are set"
    if role.gpu is not None and (role.gpu.votes or role.gpu.sequences):
        yield f"{role.name}: the GPU remembers {', '.join(sorted({*role.gpu.votes, *role.gpu.sequences}))}"


def kept_pages(machine: Any, pool: PagePool) -> dict[int, int]:
    """Holds that outlive every request: the cache's, one of each of its pages."""
    cache = getattr(machine, "cache", None)
    return dict.fromkeys(cache.lru.values(), 1) if cache is not None and cache.pool is pool else {}


def left_in(machine: Any) -> Iterator[str]:
    """What a machine still holds of requests: any container, any page, whatever is not named above. A generic walk, so
    that a new queue is watched at once.
    """
    for key, value in vars(machine).items():
        if key in LASTING:
            continue
        if isinstance(value, PagePool):
            kept = kept_pages(machine, value)
            if value._holds != kept or value.free + len(kept) != value.capacity:
                cached = f", {len(kept)} of them by the cache" if kept else ""
                yield f"{key}: {value.used} of {value.capacity} pages are held{cached}"
        elif key in FIGURES:
            if any(value.values()):
                yield f"{key}: {value}"
        elif isinstance(value, dict | list | set | deque | tuple):
            if value:
                yield f"{key}: {len(value)} left"
        elif type(value).__name__ == "Persister":
            yield from (f"persister.{left}" for left in left_in(value))
        elif key in ("forward", "computing") and value is not None:
            yield f"{key}: still there"
