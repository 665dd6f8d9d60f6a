"""A small cluster in the sim world, with the face of ``LocalWorld``: the same checks look at both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from emulators.agent_driver import AgentDriver, Outcome, Script
from emulators.cluster import describe_roles
from testbed.fabric.sim.gpu import expected_tokens, prompt_bytes
from testbed.fabric.sim.params import SimParams
from testbed.fabric.sim.role import SimRole
from testbed.fabric.sim.world import SimWorld
from testbed.fabric.spec import ClusterSpec
from testbed.ids import DRIVER
from testbed.protocol import machine as mc
from testbed.protocol.params import ProtocolParams, system_named
from testbed.protocol.plan import plan_cluster
from tests.support.local_world import VOCAB, FlatCost

_CALM_NS = 1_000_000_000
"""By then everything that was on its way has arrived; half of what a wait may take."""


class SimCluster:
    """Hosts every role in a ``SimWorld``; ``seed`` draws the timing of messages."""

    def __init__(
        self,
        spec: ClusterSpec,
        params: ProtocolParams,
        system: str,
        scripts: Sequence[Script],
        *,
        seed: int = 0,
        starts_ns: Sequence[int] = (),
        sim: SimParams | None = None,
        cost: Any = None,
    ) -> None:
        self.layout = params.layout
        self.plan = plan_cluster(spec)
        self.scripts = scripts
        self.bytes_via: Counter[tuple[str, str]] = Counter()
        config = system_named(system)
        self.world = SimWorld(
            spec,
            params.layout,
            describe_roles(
                self.plan,
                config,
                params,
                cost or FlatCost(),
                scripts,
                starts_ns or [0] * len(scripts),
                central_host="ctl0",
            ),
            sim or SimParams(draw=seed),
            vocab_size=VOCAB,
            materialise=not config.moves_kv,
            record=self._record,
        )

    @property
    def roles(self) -> dict[str, SimRole]:
        """All roles by name."""
        return self.world.roles

    @property
    def driver(self) -> AgentDriver:
        """The agent driver machine."""
        machine = self.world.roles[DRIVER].machine
        assert isinstance(machine, AgentDriver)
        return machine

    @property
    def refusals(self) -> int:
        """Writes that no destination took."""
        return sum(role.writes_refused + role.writes_corrupt for role in self.roles.values())

    def _record(self, role: str, now_ns: int, event: mc.Event, actions: Sequence[mc.Action]) -> None:
        for action in actions:
            if isinstance(action, mc.Write):
                self.bytes_via[action.via, action.ref.endpoint] += len(action.pieces) * action.piece_bytes

    def run(self) -> list[Outcome]:
        """Until all agents have ended; their outcomes."""
        self.world.run(lambda: self.driver.finished)
        return self.driver.outcomes

    def drain(self) -> None:
        """Run on until nothing but periodic fetches is left."""
        end_ns = self.world.now_ns + _CALM_NS
        while self.world.now_ns < end_ns:
            self.world.step()

    def check_tokens(self) -> int:
        """Compare every emitted token with the reference; how many were compared."""
        compared = 0
        for agent, script in enumerate(self.scripts):
            context = np.empty(0, dtype=np.uint32)
            for outcome in (o for o in self.driver.outcomes if o.agent == agent):
                context = np.concatenate([context, script.append_ids(outcome.turn)])
                expected = expected_tokens(self.layout, VOCAB, prompt_bytes(context), outcome.generate_tokens)
                got = [outcome.tokens[i] for i in range(outcome.generate_tokens)]
                assert got == expected, f"agent {agent} turn {outcome.turn}: wrong tokens"
                context = np.concatenate([context, np.array(got, dtype=np.uint32)])
                compared += len(got)
        return compared
