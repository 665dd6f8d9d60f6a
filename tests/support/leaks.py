"""What may be left of a request when it has ended: nothing. A generic walk, so that a new queue is watched at once.

Every container of every machine must be empty, every pool unused, no grant open, no deadline set, no sequence known to
a GPU; exceptions are listed by name, with the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from emulators.collectives import ExpertGroup, Phase
from testbed.fabric.check.checkers.conservation import kept_pages
from testbed.protocol.pages import PagePool
from tests.support.local_world import LocalWorld
from tests.support.sim_cluster import SimCluster

LASTING = {
    "_ended": "names of ended requests, bounded: late messages are known by them",
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
INNER = {
    "outstanding": "figures that must all be back to zero",
    "private": "queues that must all be empty",
}


def leaks(world: LocalWorld | SimCluster) -> list[str]:
    """Everything that is still held somewhere, by name."""
    found: list[str] = []
    for name, role in world.roles.items():
        found += [f"{name}.{left}" for left in _machine_leaks(role.machine)]
        if len(role.grants):
            found.append(f"{name}: {len(role.grants)} grants open")
        if left := set(role.deadlines) - {"fetch"}:
            found.append(f"{name}: deadlines {sorted(left)}")
        gpu: Any = getattr(role, "device", None) or getattr(role, "gpu", None)
        if gpu is not None and (gpu._sequences or getattr(gpu, "_prompts", ()) or getattr(gpu, "_spoilt", ())):
            found.append(f"{name}: the GPU remembers requests")
    return found


def _machine_leaks(machine: Any) -> Iterator[str]:
    for key, value in vars(machine).items():
        if key in LASTING:
            continue
        if isinstance(value, PagePool):
            kept = kept_pages(machine, value)
            if value._holds != kept or value.free + len(kept) != value.capacity:
                yield f"{key}: {value.used} of {value.capacity} pages used, {len(kept)} by the cache"
        elif key in INNER:
            if any(value.values()):
                yield f"{key}: {value}"
        elif isinstance(value, dict | list | set | deque | tuple):
            if value:
                yield f"{key}: {len(value)} left ({str(value)[:200]})"
        elif isinstance(value, ExpertGroup):
            if value.phase is not Phase.IDLE or any(value._arrived.values()):
                yield f"{key}: {value.phase.value}, shards {value._arrived}"
        elif type(value).__name__ == "Persister":
            yield from (f"persister.{left}" for left in _machine_leaks(value))
        elif key in ("forward", "computing") and value is not None:
            yield f"{key}: still there"
