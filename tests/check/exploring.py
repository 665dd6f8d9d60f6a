"""Explorations for tests: a configuration by name, to the end or to what is found."""

from __future__ import annotations

import time
from collections.abc import Callable

from emulators.cluster import RoleDescription
from testbed.cli.check_cluster import CheckConfig, load_config, setup_of
from testbed.fabric.check.explore import Bounds, Coverage, Explorer
from testbed.fabric.check.reduction import Reduction
from testbed.fabric.check.world import FAULTS, CheckWorld

Alter = Callable[[list[RoleDescription]], list[RoleDescription]]


def bounds(max_states: int = 3_000_000) -> Bounds:
    """Enough for everything that a test explores."""
    return Bounds(max_states=max_states, max_memory_bytes=1, memory_bytes=lambda: 0, clock_s=time.perf_counter)


def explore(
    config: str | CheckConfig,
    faults: int,
    *,
    alter: Alter = list,
    full: bool = False,
    kinds: frozenset[str] = FAULTS,
) -> tuple[CheckWorld, Coverage]:
    """The world and what was covered."""
    world = CheckWorld(setup_of(load_config(config) if isinstance(config, str) else config, alter=alter))
    reduction = None if full else Reduction(world)
    return world, Explorer(world, faults, bounds(), reduction=reduction, kinds=kinds).run()
