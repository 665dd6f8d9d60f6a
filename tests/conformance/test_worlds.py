"""The same cases in every world: all rounds complete, same hits, right tokens, the step counts, nothing left over."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from testbed.protocol.params import system_named
from tests.conformance.cases import CACHE_CASES, CASES, COPY_CASES, Case
from tests.support.leaks import leaks
from tests.support.local_world import LocalWorld
from tests.support.sim_cluster import SimCluster
from tests.support.worlds import SERVED, expected_bytes, seen_bytes

Hosted = LocalWorld | SimCluster
Build = Callable[[Case, str, int], Hosted]


def real_bytes(case: Case, system: str, seed: int) -> LocalWorld:
    return LocalWorld(case.spec, case.params, system, case.scripts, seed=seed, starts_ns=case.starts_ns)


def sizes_only(case: Case, system: str, seed: int) -> SimCluster:
    return SimCluster(case.spec, case.params, system, case.scripts, seed=seed, starts_ns=case.starts_ns)


WORLDS: dict[str, Build] = {"real bytes": real_bytes, "sim": sizes_only}


def hits_of(world: Hosted) -> dict[tuple[int, int], int]:
    return {(o.agent, o.turn): o.hit_tokens for o in world.driver.outcomes}


def shared_blocks_hit(case: Case) -> bool:
    return case.shared >= case.params.layout.block_tokens


@pytest.mark.parametrize(
    ("system", "case"),
    [
        *itertools.product(SERVED, CASES),
        *itertools.product(("basic", "dualpath", "dualpath-split"), CACHE_CASES),
        *itertools.product(("dualpath-copy-engine",), COPY_CASES),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_worlds_serve_alike(system: str, case: Case) -> None:
    hits = {}
    for name, build in WORLDS.items():
        world = build(case, system, 3)
        outcomes = world.run()
        rounds = sum(len(turns) for turns in case.turns)
        assert [o.error_detail for o in outcomes if o.error] == [] and len(outcomes) == rounds, name
        assert all(o.completed_ns for o in outcomes), name
        assert world.check_tokens() == sum(g for turns in case.turns for _, g in turns), name
        assert not world.refusals, name
        world.drain()
        assert leaks(world) == [], name
        _check_bytes(world, case, system, name)
        hits[name] = hits_of(world)
    assert hits["sim"] == hits["real bytes"]
    first = [hit for (agent, turn), hit in hits["sim"].items() if turn == 0 and agent]
    assert any(first) == shared_blocks_hit(case)
    assert any(o.dram_hit_tokens for o in outcomes) == (case in CACHE_CASES)


def _check_bytes(world: Hosted, case: Case, system: str, name: str) -> None:
    seen = seen_bytes(world)
    config = system_named(system)
    if not config.moves_kv:
        assert not seen, name
        return
    expected = expected_bytes(world, world.driver.outcomes, case.replicas, direct=config.direct_copies)
    if not case.chunked:
        assert seen == expected, name
        return
    assert {path for path in expected if seen[path] < expected[path]} == set(), name
    assert all("gpu" in to and to.startswith("pe") for (via, to), n in seen.items() if n > expected[via, to]), name
