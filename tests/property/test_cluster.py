"""Random clusters, workloads and interleavings of all systems: right tokens, nothing left, the paper's step counts.

Every example is a run with real bytes, or one with sizes only; hypothesis prints the arguments of a failing one, which
replay it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from testbed.fabric.sim.params import SimParams
from testbed.fabric.spec import ClusterSpec
from testbed.protocol.layout import BlockLayout
from testbed.protocol.params import ProtocolParams, system_named
from tests.support.leaks import leaks
from tests.support.local_world import ListScript, LocalWorld
from tests.support.sim_cluster import SimCluster
from tests.support.worlds import SERVED, cluster, expected_bytes, seen_bytes, small_params

SETTINGS = settings(
    max_examples=20,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # worlds are slow to shrink, and easy to read as they are
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Case:
    """One random world; ``shared`` tokens are common to all agents' first prompts."""

    layers: int
    block_tokens: int
    token_bytes: int
    layer_group: int
    layers_in_flight: int
    nodes: tuple[int, int]
    gpus: int
    storage: int
    replicas: int
    turns: tuple[tuple[tuple[int, int], ...], ...]
    shared: int
    quota_tokens: int
    tight: bool
    delay_ns: int
    seed: int

    def real_bytes(self, system: str) -> LocalWorld:
        """The world with real bytes, not started."""
        delay = (1_000, self.delay_ns)
        return LocalWorld(self.spec, self.params, system, self.scripts, seed=self.seed, message_delay_ns=delay)

    def sizes_only(self, system: str) -> SimCluster:
        """The sim world, not started."""
        latency_s = self.delay_ns / 1e9
        sim = SimParams(draw=self.seed, message_latency_s=latency_s, message_jitter_s=0.9 * latency_s)
        return SimCluster(self.spec, self.params, system, self.scripts, sim=sim)

    @property
    def spec(self) -> ClusterSpec:
        """The cluster."""
        return cluster(*self.nodes, gpus=self.gpus, storage=self.storage)

    @property
    def scripts(self) -> list[ListScript]:
        """The agents."""
        return [ListScript(f"a{i}", turns, self.seed, self.shared) for i, turns in enumerate(self.turns)]

    @property
    def params(self) -> ProtocolParams:
        """Parameters of the protocol."""
        layout = BlockLayout(
            model="any", layers=self.layers, block_tokens=self.block_tokens, bytes_per_token_layer=self.token_bytes
        )
        most = max(sum(a + g for a, g in turns) for turns in self.turns)
        room = layout.blocks(most) + 1
        pages = room if self.tight else 4 * room
        return small_params(
            layout,
            layer_group=min(self.layer_group, self.layers),
            layers_in_flight=self.layers_in_flight,
            replicas=self.replicas,
            dram_pages=pages,
            dram_cache_pages=(0, 3, 40, 0)[self.seed % 4],
            de_hbm_pages=pages,
            stage_pages=1 if self.tight else 8,
            storage_pages=1 if self.tight else 8,
            read_window_blocks=1 if self.tight else 8,
            persist_window_blocks=1 if self.tight else 8,
            pe_hbm_bytes=(2 if self.tight else 8) * self.layers_in_flight * room * layout.full_block_bytes,
            # FlatCost: one microsecond of attention per token and layer
            compute_quota_ns=self.quota_tokens * self.layers * 1_000,
        )


Build = Callable[[Case, str], LocalWorld | SimCluster]

_turn = st.tuples(st.integers(1, 14), st.integers(1, 9))
_agent = st.lists(_turn, min_size=1, max_size=4).map(tuple)
cases = st.builds(
    Case,
    layers=st.integers(1, 4),
    block_tokens=st.integers(1, 5),
    token_bytes=st.sampled_from([1, 4, 8, 12]),
    layer_group=st.integers(1, 3),
    layers_in_flight=st.integers(1, 3),
    nodes=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    gpus=st.integers(1, 2),
    storage=st.integers(1, 3),
    replicas=st.integers(1, 2),
    turns=st.lists(_agent, min_size=1, max_size=4).map(tuple),
    shared=st.sampled_from([0, 0, 6]),
    quota_tokens=st.sampled_from([3, 10, 1_000_000]),
    tight=st.booleans(),
    delay_ns=st.sampled_from([2_000, 200_000, 10_000_000]),
    seed=st.integers(0, 2**16),
)


@pytest.mark.parametrize("build", [Case.real_bytes, Case.sizes_only], ids=lambda build: build.__name__)
@pytest.mark.parametrize("system", SERVED)
@SETTINGS
@given(case=cases)
def test_any_workload_on_any_cluster(system: str, build: Build, case: Case) -> None:
    world = build(case, system)
    outcomes = world.run()
    assert not [o.error_detail for o in outcomes if o.error]
    assert world.check_tokens() == sum(g for turns in case.turns for _, g in turns)
    world.drain()
    assert leaks(world) == []
    assert not world.refusals
    _check_hits(world, case)
    if not system_named(system).moves_kv:
        assert not world.bytes_via
        return
    expected, seen = expected_bytes(world, outcomes, case.replicas), seen_bytes(world)
    if case.quota_tokens == 1_000_000:
        assert seen == expected
    else:  # a chunk loads again what is cached before it; nothing else grows
        assert {p for p in seen if seen[p] < expected[p]} == set()
        grown = {to for (via, to), size in seen.items() if size > expected[via, to]}
        assert all("gpu" in to and to.startswith("pe") for to in grown)


def _check_hits(world: LocalWorld | SimCluster, case: Case) -> None:
    """A turn hits all full blocks of the turn before, but never its whole prompt; a first turn hits only what others
    brought."""
    bt = case.block_tokens
    for agent in range(len(case.turns)):
        rounds = [o for o in world.driver.outcomes if o.agent == agent]
        assert rounds[0].hit_tokens <= case.shared
        for before, after in pairwise(rounds):
            stored = (before.prompt_tokens + before.generate_tokens - 1) // bt * bt
            own = min(stored, (after.prompt_tokens - 1) // bt * bt)
            assert after.hit_tokens >= own if case.shared else after.hit_tokens == own
