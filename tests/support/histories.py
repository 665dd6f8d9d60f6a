"""Machines put into a state by their own real history.

A LocalWorld run is recorded per role. Replaying a role's events into a fresh machine (it is deterministic) brings it to
any state that it was in, without poking at its insides; and the run has a real message of every kind for every request.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from testbed.protocol import machine as mc
from testbed.protocol import messages as m
from tests.support.local_world import ListScript, LocalWorld
from tests.support.worlds import cluster, small_params

TURNS = ((21, 9), (5, 6), (9, 1), (3, 8))


@dataclass
class History:
    """What one role was told in one run."""

    world: LocalWorld
    role: str
    kind: type
    events: list[tuple[mc.Event, int]]
    states: list[dict[str, Enum]]
    """After ``n`` events: the state of every record."""

    def machine(self, count: int) -> Any:
        """A fresh machine that has seen the first ``count`` events."""
        machine = self.make()
        for event, now_ns in self.events[:count]:
            machine.handle(event, now_ns)
        return machine

    def make(self) -> Any:
        """A machine that has seen nothing."""
        return next(d for d in self.world.descriptions if d.name == self.role).make()

    def now_ns(self, count: int) -> int:
        """Time of the last of the first ``count`` events."""
        return self.events[count - 1][1] if count else 0


def addressed(message: m.Message, request_id: str) -> m.Message:
    """The same message about another request."""
    replace = msgspec.structs.replace
    match message:
        case m.RequestsAssigned():
            return replace(message, assignments=(replace(message.assignments[0], request_id=request_id),))
        case m.EnginesChosen():
            single = {k: getattr(message, k)[:1] for k in ("engines", "tokens", "hbm_tokens")}
            return replace(message, request_ids=(request_id,), **single)
        case m.AssignPrefill() | m.AssignDecode() | m.LoadPrefix() | m.ReserveBuffer():
            return replace(message, assignment=replace(message.assignment, request_id=request_id))
    return replace(message, request_id=request_id)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1)
def histories() -> tuple[History, ...]:
    """Recorded roles of runs whose memories are so small that requests are seen in every state.

    Round robin gives a DE more than its HBM holds, so that requests wait there for buffers and for HBM.
    """
    found: list[History] = []
    for seed, stage_pages, system in ((3, 1, "dual-path-rr"), (5, 4, "dualpath")):
        recorded: dict[str, list[tuple[mc.Event, int]]] = {}
        params = small_params(
            dram_pages=26,
            de_hbm_pages=20,
            stage_pages=stage_pages,
            wait_deadline_ns=10**10,
            compute_quota_ns=3 * 8 * 1_000,
        )
        scripts = [ListScript(f"a{i}", TURNS, seed=seed) for i in range(4)]

        def watch(role: str, event: mc.Event, now_ns: int, log: dict[str, list[Any]] = recorded) -> None:
            log.setdefault(role, []).append((event, now_ns))

        world = LocalWorld(cluster(1, 1, 1, 2), params, system, scripts, seed=seed, watch=watch)
        world.run()
        world.drain()
        assert not [o for o in world.driver.outcomes if o.error]
        found += [_replayed(world, role, events) for role, events in recorded.items()]
    return tuple(found)


def _replayed(world: LocalWorld, role: str, events: list[tuple[mc.Event, int]]) -> History:
    machine = next(d for d in world.descriptions if d.name == role).make()
    history = History(world, role, type(machine), events, [{}])
    for event, now_ns in events:
        machine.handle(event, now_ns)
        records = getattr(machine, "records", {})
        history.states.append({r: record.state for r, record in records.items()})
    return history


@functools.lru_cache(maxsize=1)
def messages_seen() -> dict[str, list[tuple[History, int, str, m.Message]]]:
    """By kind: (history, events before it, sender, message) of every message."""
    seen: dict[str, list[tuple[History, int, str, m.Message]]] = {}
    for history in histories():
        for count, (event, _) in enumerate(history.events):
            if isinstance(event, mc.Received):
                entry = (history, count, event.sender, event.message)
                seen.setdefault(type(event.message).__name__, []).append(entry)
    return seen


def frozen(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """A comparable copy of a machine or anything in it: everything that it remembers, but the time."""
    if id(value) in seen:
        return "..."
    seen = (*seen, id(value))
    if isinstance(value, dict):
        return {k: frozen(v, seen) for k, v in value.items()}
    if isinstance(value, list | tuple | deque):
        return [frozen(v, seen) for v in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, types.FunctionType | types.MethodType):
        return value.__qualname__
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: frozen(getattr(value, f.name), seen) for f in fields(value)}
    if hasattr(value, "__slots__") and not isinstance(value, Enum | msgspec.Struct | set | frozenset):
        return {k: frozen(getattr(value, k), seen) for k in value.__slots__ if hasattr(value, k)}
    if hasattr(value, "__dict__") and not isinstance(value, Enum | type):
        return {k: frozen(v, seen) for k, v in vars(value).items() if k not in ("now_ns", "_state")}
    return value
