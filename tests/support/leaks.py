"""What may be left of a request when it has ended: nothing, as the check world's conservation has it, in other worlds.

Every container of every machine must be empty, every pool unused, no grant open, no deadline set, no sequence known to
a GPU, no round of collectives under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from emulators.collectives import ExpertGroup, Phase
from testbed.fabric.check.checkers.conservation import left_in
from tests.support.local_world import LocalWorld
from tests.support.sim_cluster import SimCluster


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
    yield from left_in(machine)
    for key, value in vars(machine).items():
        if isinstance(value, ExpertGroup) and (value.phase is not Phase.IDLE or any(value._arrived.values())):
            yield f"{key}: {value.phase.value}, shards {value._arrived}"
