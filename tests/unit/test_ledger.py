"""The ledger against the machines themselves: a whole cluster in one process, every write's path counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from emulators.agent_driver import Outcome
from emulators.cluster import params_for
from testbed.fabric.live.addresses import Plan
from testbed.fabric.live.wire import HEADER_BYTES, SEAL_BYTES, wire_bytes
from testbed.fabric.spec import ClusterSpec
from testbed.metrics.ledger import FLOOR_BLOCKS, STORAGE, ServedBy, WireCosts, expected_traffic, settle
from testbed.protocol import machine as mc
from testbed.protocol.layout import BlockLayout
from testbed.protocol.params import ProtocolParams, system_named
from testbed.units import MBIT
from tests.support.local_world import ListScript, LocalWorld
from tests.support.runs import counter, outcome
from tests.support.worlds import SERVED

LAYOUT = BlockLayout(model="m", layers=6, block_tokens=4, bytes_per_token_layer=8)
WIRE = WireCosts(header_bytes=HEADER_BYTES, seal_bytes=SEAL_BYTES)
SPEC = ClusterSpec(
    name="x", prefill_nodes=1, decode_nodes=2, gpus_per_node=2, storage_servers=2, cnic_rate_bps=MBIT,
    snic_rate_bps=MBIT, pcie_rate_bps=MBIT, dram_rate_bps=MBIT,
)  # fmt: skip
# Steps of 4 and 2 layers; no chunks.
PARAMS = ProtocolParams(layout=LAYOUT, layer_group=4, compute_quota_ns=10**12, split_least_blocks=1)
TURNS = [(9, 4), (6, 1), (4, 8), (1, 3)]  # partial tails, a generation of one, blocks filled in decode


def served_by(system: str, params: ProtocolParams = PARAMS) -> ServedBy:
    params = params_for(system_named(system), params)
    return ServedBy(
        layout=LAYOUT,
        step_layers=tuple(b - a for a, b in params.steps),
        replicas=min(params.replicas, SPEC.storage_servers),
        moves_kv=system_named(system).moves_kv,
        wire=WIRE,
        direct_copies=system_named(system).direct_copies,
    )


def run(system: str, seed: int = 1, params: ProtocolParams = PARAMS) -> tuple[Counter[str], list[Outcome]]:
    """Wire bytes of every write that the machines post, by resource of its path; and the outcomes."""
    net, found = Plan(SPEC), Counter[str]()

    def count(name: str, action: mc.Action) -> list[mc.Action]:
        if isinstance(action, mc.Write):
            for resource in net.path(action.via, action.ref.endpoint):
                host, _, rest = resource.partition(".")
                key = f"{STORAGE}.{rest}" if host.startswith("st") else resource
                found[key] += wire_bytes(len(action.pieces) * action.piece_bytes, LAYOUT)
        return [action]

    scripts = [ListScript(f"a{i}", TURNS[: 2 + i % 3], seed=seed) for i in range(5)]
    world = LocalWorld(SPEC, params, system, scripts, seed=seed, hook=count)
    outcomes = world.run()
    world.drain()
    assert not any(o.error for o in outcomes)
    return found, outcomes


@pytest.mark.parametrize("system", [*SERVED, "dualpath-copy-engine", "dualpath-split-copy-engine"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_step_counts_are_what_the_machines_post(system: str, seed: int) -> None:
    found, outcomes = run(system, seed)
    expected = expected_traffic(outcomes, served_by(system))
    assert +expected == +found
    if system in ("dualpath", "dualpath-copy-engine"):
        assert {o.read_side for o in outcomes} >= {"pe", "de"} and expected["pe0.dram"] > 0
    if system == "dualpath-split":
        assert any(o.read_side == "split" for o in outcomes)


@pytest.mark.parametrize("system", ["basic", "dualpath", "dualpath-split"])
def test_hits_from_dram_are_no_storage_reads_and_all_else_stays(system: str) -> None:
    found, outcomes = run(system, params=replace(PARAMS, dram_cache_pages=40))
    assert sum(o.dram_hit_tokens for o in outcomes) > 0
    assert +expected_traffic(outcomes, served_by(system)) == +found


def test_a_step_left_out_is_seen() -> None:
    """One round's hits not loaded into the PE: exactly its resources are off."""
    found, outcomes = run("basic")
    reader = next(o for o in outcomes if o.hit_tokens)
    lied = [replace(o, hit_tokens=0, de_hit_tokens=0, read_side="none") if o is reader else o for o in outcomes]
    off = {k for k, v in expected_traffic(lied, served_by("basic")).items() if v != found[k]}
    assert {"pe0.snic.rx", "storage.snic.tx", "pe0.dram"} <= off


def test_rounds_that_failed_are_not_predicted() -> None:
    how = served_by("basic")
    assert expected_traffic([outcome(error="Timeout"), outcome(1, completed_ns=0)], how) == Counter()
    assert expected_traffic([outcome()], how)


def test_settling_against_counters() -> None:
    block = LAYOUT.full_block_bytes
    expected = {"pe0.snic.rx": 1000 * block, "storage.snic.tx": 1000 * block, "pe0.dram": block}
    counters = {
        "pe0.snic.rx": counter("pe0.snic.rx", 1030 * block),
        "st0.snic.tx": counter("st0.snic.tx", 400 * block),
        "st1.snic.tx": counter("st1.snic.tx", 600 * block),
        "pe0.dram": counter("pe0.dram", 2 * block),
        "pe0.snic.tx": counter("pe0.snic.tx", FLOOR_BLOCKS * block),
    }
    rows = {e.resource: e for e in settle("basic", expected, counters, LAYOUT)}
    assert rows["pe0.snic.rx"].error == pytest.approx(0.03) and rows["pe0.snic.rx"].system == "basic"
    assert rows["storage.snic.tx"].error == 0.0  # which server served is not predicted
    assert rows["pe0.dram"].error == pytest.approx(1 / FLOOR_BLOCKS)  # one block too many on an idle resource
    assert rows["pe0.snic.tx"].expected_bytes == 0 and rows["pe0.snic.tx"].error == 1.0
    assert len(rows) == 4
