"""The flow simulation with everything in reach: settings, arrays and event loop, which ``simulate`` keeps to itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.flowsim import events
from testbed.flowsim.calibration import Calibration, load_calibration
from testbed.flowsim.engine import run
from testbed.flowsim.heap import Heap, make_heap, push
from testbed.flowsim.run import FlowCase, _model, _settings
from testbed.flowsim.state import (
    Agents,
    Cluster,
    Queues,
    Requests,
    Settings,
    make_agents,
    make_cluster,
    make_queues,
    make_requests,
)

Turns = Sequence[tuple[int, int]]
"""Tokens appended and generated, turn after turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowWorld:
    """A cluster with its agents' rounds, nothing submitted; the arrays are filled by what runs."""

    settings: Settings
    cluster: Cluster
    queues: Queues
    requests: Requests
    agents: Agents
    heap: Heap

    def push(self, at_ns: int, kind: int, arg: int) -> None:
        """Add an event."""
        push(self.heap, at_ns, kind, arg, 0)

    def run(self) -> int:
        """Run until all agents are done; events processed."""
        s, c, q, r, a, h = self.parts
        return run(s, c, q, r, a, h, 1 << 62)

    def drain(self) -> None:
        """Run until no event is left, agents or not."""
        self.cluster.counts[0] += 1 << 40
        self.run()
        self.cluster.counts[0] -= 1 << 40

    @property
    def parts(self) -> tuple[Settings, Cluster, Queues, Requests, Agents, Heap]:
        """What the compiled functions take, in their order."""
        return self.settings, self.cluster, self.queues, self.requests, self.agents, self.heap


def settings_for(case: FlowCase, calibration: Calibration | None = None, **changed: Any) -> Settings:
    """The constants that ``simulate`` would use, some of them changed."""
    fit = calibration or load_calibration()
    return _settings(case, _model(case), fit)._replace(**changed)


def flow_world(settings: Settings, turns: Sequence[Turns], *, windows: int = 1 << 12) -> FlowWorld:
    """An idle cluster and one agent per entry of ``turns``."""
    offset = np.concatenate([[0], np.cumsum([len(t) for t in turns])]).astype(np.int64)
    append = np.array([a for t in turns for a, _ in t], np.int32)
    generate = np.array([g for t in turns for _, g in t], np.int32)
    cluster = make_cluster(settings, len(turns), windows)
    cluster.counts[0] = len(turns)
    engines = len(cluster.pe_tokens) + len(cluster.de_tokens)
    return FlowWorld(
        settings=settings,
        cluster=cluster,
        queues=make_queues(settings, len(append)),
        requests=make_requests(offset, append, generate),
        agents=make_agents(offset),
        heap=make_heap(32 * len(turns) + 64 * engines + 10_000),
    )


def arrive(world: FlowWorld, starts_ns: Sequence[int] = ()) -> FlowWorld:
    """All agents come, together unless ``starts_ns`` says when."""
    count = len(world.agents.turn)
    for agent, start_ns in enumerate(starts_ns or [0] * count):
        world.push(start_ns, events.ARRIVE, agent)
    return world
