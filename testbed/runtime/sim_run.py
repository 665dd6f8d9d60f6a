"""The sim run: every system of a plan in virtual time; no sandbox, no root, no process but this one.

The same machines as live (``emulators``), the same warm start, the same result. A run is a function of its plan: the
same seed gives the same bytes in every trace, whatever the host does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from emulators.agent_driver import AgentDriver
from emulators.cluster import params_for
from testbed.fabric.sim.gpu import expected_tokens, prompt_bytes
from testbed.fabric.sim.world import Record, SimWorld
from testbed.ids import DRIVER
from testbed.protocol import machine as m
from testbed.protocol.params import SystemConfig
from testbed.protocol.placement import replicas_of
from testbed.runtime.oracle import verify_tokens
from testbed.runtime.past import final_prefixes, warm_entries
from testbed.runtime.plan import RunPlan
from testbed.runtime.result import RunResult, SnicSample, SystemRun
from testbed.runtime.roles import roles_of
from testbed.trace.tracefile import TraceWriter
from testbed.workload.trajectory import AgentScript

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is done (0 to 1)."""


def run_sim(plan: RunPlan, progress: Progress, *, traced: bool = True) -> RunResult:
    """Run all systems of ``plan``, one after the other; ``traced``: leave a trace per role in the run folder.

    Raises:
        RunFailedError: a cluster came to a standstill.
        HostError: the disk is full.
    """
    progress("warming storage", 0.0)
    stored = warm_entries(plan.scripts, plan.params.layout)
    runs = [_run_system(plan, system, stored, progress, traced=traced) for system in plan.systems]
    progress("verifying tokens", 0.0)
    verify_tokens(plan.scripts, runs, lambda script: _reference(plan, script))
    return RunResult(links=[], shaping_faults=[], systems=runs)


def world_of(plan: RunPlan, system: SystemConfig, stored: Sequence[tuple[int, int]], record: Record | None) -> SimWorld:
    """The world of one system, not started; its storage holds the blocks ``stored``, ``(key, parent)`` each.

    Where writing back is free, it holds what the run would write too; the index does not know that yet.
    """
    params = params_for(system, plan.params)
    descriptions = roles_of(plan, system, stored)
    world = SimWorld(
        plan.cluster,
        params.layout,
        descriptions,
        plan.sim,
        vocab_size=plan.vocab_size,
        materialise=not system.moves_kv,
        record=record,
    )
    keys = dict.fromkeys(key for key, _ in stored)
    if params.write_back == "free":
        for prefix in final_prefixes(plan.scripts, params.layout, lambda script: _reference(plan, script)):
            keys.update(dict.fromkeys(params.layout.keys(prefix)))
    for key in keys:
        for server in replicas_of(key, plan.roles.storage, params.replicas):
            world.store_before(server, key)
    return world


def _run_system(
    plan: RunPlan, system: SystemConfig, stored: Sequence[tuple[int, int]], progress: Progress, *, traced: bool
) -> SystemRun:
    progress(system.title, 0.0)
    rounds = sum(script.turns for script in plan.scripts)
    traces = Traces(plan.run_dir / system.name / "trace")
    world = world_of(plan, system, stored, traces.record if traced else None)
    driver = world.roles[DRIVER].machine
    assert isinstance(driver, AgentDriver)

    def tick() -> None:
        progress(system.title, (len(driver.outcomes) - len(driver.records)) / rounds)

    try:
        world.run(lambda: driver.finished, tick)
    finally:
        traces.close()
    return SystemRun(
        system=system.name,
        started_ns=0,
        ended_ns=world.now_ns,
        outcomes=driver.outcomes,
        counters=world.counters,
        samples=[SnicSample(at_ns=at_ns, wire_bytes=carried) for at_ns, carried in world.samples],
        pcie_peaks_bps=world.pcie_peaks.bps,
        reports={name: role.report() for name, role in world.roles.items()},
    )


class Traces:
    """One trace file per role, in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, TraceWriter] = {}

    def record(self, role: str, now_ns: int, event: m.Event, actions: Sequence[m.Action]) -> None:
        """An event and what it led to."""
        writer = self._writers.get(role)
        if writer is None:
            writer = self._writers[role] = TraceWriter(self._directory / f"{role}.jsonl")
        writer.record(now_ns, event)
        for action in actions:
            writer.record(now_ns, action)

    def close(self) -> None:
        """Write everything out."""
        for writer in self._writers.values():
            writer.close()


def _reference(plan: RunPlan, script: AgentScript) -> list[list[int]]:
    """The right tokens of every turn of an agent, without a cluster."""
    context = np.empty(0, dtype=np.uint32)
    turns = []
    for turn in range(script.turns):
        context = np.concatenate([context, script.append_ids(turn).astype(np.uint32)])
        tokens = expected_tokens(
            plan.params.layout, plan.vocab_size, prompt_bytes(context), script.generate_tokens(turn)
        )
        context = np.concatenate([context, np.array(tokens, dtype=np.uint32)])
        turns.append(tokens)
    return turns
