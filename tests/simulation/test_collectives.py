"""Whole clusters with collectives: right tokens, the same barriers for all, named errors, and time that adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from emulators.collectives import ExpertGroup
from testbed.metrics.collectives import collective_metrics
from testbed.protocol.collectives import Collectives
from tests.simulation.inject import FaultRun, errors_of
from tests.support.leaks import leaks
from tests.support.local_world import ListScript, LocalWorld
from tests.support.sim_cluster import SimCluster
from tests.support.worlds import COLLECTIVES, cluster, small_params

TURNS = [(9, 5), (6, 1), (3, 5)]


def scripts(count: int, seed: int = 0) -> list[ListScript]:
    return [ListScript(f"a{i}", TURNS, seed=seed) for i in range(count)]


def groups_of(world: LocalWorld | SimCluster, kind: str) -> list[ExpertGroup]:
    roles = [role.machine for name, role in world.roles.items() if name.startswith(kind) and "gpu" in name]
    return [machine.group for machine in roles]


@pytest.mark.parametrize("system", ["basic", "dualpath", "oracle"])
@pytest.mark.parametrize("layer_group", [1, 3])
def test_tokens_are_right_and_all_meet_at_every_barrier(system: str, layer_group: int) -> None:
    for seed in range(2):
        params = small_params(collectives=COLLECTIVES, layer_group=layer_group)
        world = LocalWorld(cluster(gpus=2), params, system, scripts(3, seed), seed=seed)
        outcomes = world.run()
        assert not errors_of(outcomes)
        assert world.check_tokens() == 3 * 11
        world.drain()
        assert leaks(world) == []
        for kind in ("pe", "de"):
            first, second = groups_of(world, kind)
            assert first.round == second.round > 0
            assert first.figures.exchanges == second.figures.exchanges == 2 * len(first.parts) * first.round
            assert first.figures.given_up == second.figures.given_up == 0
        # Prefill: every new token, two layers with experts, half of what there is to each of two engines.
        new = sum(o.prompt_tokens - o.hit_tokens for o in outcomes)
        sent = sum(size for (role, _), size in world.bytes_exchanged.items() if role.startswith("pe"))
        assert sent == new * 2 * (64 + 128) // 2


@pytest.mark.parametrize("kind", ["pe", "de"])
@pytest.mark.parametrize("nth", [0, 1, 2, 5])
def test_lost_shards_end_the_round_by_name_and_nothing_hangs(kind: str, nth: int) -> None:
    case = FaultRun(f"dualpath@ep 3 lose-shards:{kind}:{nth}")
    errors = errors_of(case.check())
    assert case.injections[0].struck
    assert set(errors) <= {"CollectiveTimedOut"}
    assert sum(g.figures.given_up for g in groups_of(case.world, kind)) == 1


@pytest.mark.parametrize("fault", ["repeat-shards:pe:1", "repeat-shards:de:2", "late-shards:pe:1", "late-shards:de:3"])
def test_shards_that_come_twice_or_late(fault: str) -> None:
    case = FaultRun(f"dualpath@ep 1 {fault}")
    errors = set(errors_of(case.check()))
    assert case.injections[0].struck
    assert errors <= {"UnexpectedShard", "CollectiveTimedOut"}


@pytest.mark.parametrize(
    "fault", ["refuse:pe.hbm>dram:1", "flip:de.dram>hbm:0", "abort:LayerWritesOpened:1", "flip:pe.dram>hbm:2"]
)
def test_who_dies_in_the_middle_leaves_the_others_in_step(fault: str) -> None:
    case = FaultRun(f"dualpath@ep 5 {fault}")
    case.check()
    assert case.struck
    for kind in ("pe", "de0", "de1"):
        first, second = groups_of(case.world, kind)
        assert first.round == second.round
        assert not first.figures.given_up


def test_an_engine_that_never_answers_is_waited_for_once_in_a_round() -> None:
    """All its shards are lost: what needs its experts ends by name, round by round."""
    case = FaultRun("dualpath@ep 2 lose-shards:pe0gpu1:*")
    outcomes = case.check()
    first, second = groups_of(case.world, "pe")
    assert first.figures.given_up == first.round == second.round > 0
    assert set(errors_of(outcomes)) == {"CollectiveTimedOut"}


# --- time, in the sim world --------------------------------------------------------------------------------------


class _Slow:
    """Steps that take much longer than a message: 1 ms per new token and layer, 300 ms per decode step."""

    def attention_layer_time_ns(self, batch: Any) -> int:
        return sum(new for _, new in batch) * 100_000

    def prefill_layer_time_ns(self, batch: Any, layers: int = 1) -> int:
        return sum(new for _, new in batch) * 1_000_000 * layers

    def decode_step_time_ns(self, context_tokens: Any) -> int:
        return 300_000_000


# 30 ms of an idle CNIC and 90 ms of experts in each decode step of one sequence
HEAVY = replace(COLLECTIVES, dispatch_bytes=125_000.0, combine_bytes=250_000.0, decode_expert_ns=45e6)


def _sim(agents: list[ListScript], collectives: Collectives | None, **changes: Any) -> SimCluster:
    params = small_params(collectives=collectives, wait_deadline_ns=60_000_000_000, **changes)
    return SimCluster(cluster(gpus=2), params, "dualpath", agents, cost=_Slow())


def _tpot_ns(world: SimCluster) -> float:
    rounds = [o for o in world.run() if o.generate_tokens > 2]
    assert not any(o.error for o in rounds)
    gaps = [(o.last_token_ns - o.second_token_ns) / (o.generate_tokens - 2) for o in rounds]
    return sum(gaps) / len(gaps)


def test_an_unloaded_cluster_decodes_as_fast_with_collectives_as_without() -> None:
    without, with_them = _tpot_ns(_sim(scripts(1), None)), _tpot_ns(_sim(scripts(1), HEAVY))
    assert with_them == pytest.approx(without, rel=0.02)  # headers of the emulated network, and hops


def test_uneven_prompts_show_as_bubbles_and_in_the_balance() -> None:
    """Two prompts of one length, and two of which one is four times as long; one engine each."""
    shares, balances = [], []
    for lengths in ((40, 40), (10, 40)):
        prompts = [ListScript(f"a{i}", [(length, 1)]) for i, length in enumerate(lengths)]
        world = _sim(prompts, COLLECTIVES, layer_group=3, compute_quota_ns=10**12)
        outcomes = world.run()
        assert {o.prefill_engine for o in outcomes} == {"pe0gpu0", "pe0gpu1"}
        reports = {name: {"machine": role.machine.report()} for name, role in world.roles.items() if "pe0gpu" in name}
        found = collective_metrics(reports, [tuple(reports)], world.world.now_ns)
        assert found is not None
        shares.append(found.bubble_share["pe"])
        balances.append(found.attention_balance_full)
    assert balances == [1.0, 40 / 25]
    assert shares[1] > 1.2 * shares[0]
