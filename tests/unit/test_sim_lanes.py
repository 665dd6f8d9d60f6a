"""What the lanes of a simulated CNIC do to model traffic and to KV, discipline by discipline, on a cluster's paths."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from testbed.fabric.arbiter import ArbiterTables
from testbed.fabric.sim import fluid
from testbed.fabric.sim.disciplines import Contender, Port, fill
from testbed.fabric.sim.fluid import WINDOW_BYTES, FluidNetwork, Lane
from testbed.fabric.sim.params import SimParams
from testbed.fabric.sim.resources import memory_of, resources_of, shared_resources
from testbed.fabric.spec import ClusterSpec, LaneDiscipline
from testbed.units import MBIT, NS_PER_S

RATE_BPS = 80 * MBIT  # ten bytes per microsecond
SHARD_BYTES, HOG_BYTES = 10_000, 100_000_000
ALONE_NS = SHARD_BYTES * 8 * NS_PER_S // RATE_BPS
SECOND = NS_PER_S


def spec_of(lanes: LaneDiscipline, dram_bps: int = 10 * RATE_BPS, **more: object) -> ClusterSpec:
    return ClusterSpec(
        name="test", prefill_nodes=2, decode_nodes=1, gpus_per_node=2, storage_servers=1, cnic_rate_bps=RATE_BPS,
        snic_rate_bps=RATE_BPS, pcie_rate_bps=RATE_BPS * 128 // 100, dram_rate_bps=dram_bps, lanes=lanes,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


class Cluster:
    """The links of a cluster, with flows between its endpoints."""

    def __init__(self, spec: ClusterSpec) -> None:
        params = SimParams()
        self.resources = resources_of(spec, params)
        self.net = FluidNetwork(shared_resources(self.resources.rates_bps, params, spec))
        self.ends: dict[object, int] = {}

    def start(
        self, now_ns: int, source: str, to: str, size_bytes: int, lane: Lane = Lane.KV, token: object = ""
    ) -> None:
        path = tuple(name for name in self.resources.path(source, to) if name in self.resources.rates_bps)
        self.net.start(now_ns, size_bytes, path, lane, token or (source, to), memory_of(source))

    def until(self, token: object) -> int:
        """Play until the flow ends."""
        while token not in self.ends:
            now_ns = self.net.next_ns()
            assert now_ns is not None
            self.ends.update(dict.fromkeys(self.net.complete(now_ns), now_ns))
        return self.ends[token]

    def kv_bps(self, begin_ns: int, end_ns: int, name: str) -> float:
        """Rate of KV at a resource. Nothing may end in between."""
        before = self.net.carried_bytes(name, begin_ns, Lane.KV)
        return (self.net.carried_bytes(name, end_ns, Lane.KV) - before) * 8 * NS_PER_S / (end_ns - begin_ns)


def shard_beside_kv(spec: ClusterSpec, hogs: int = 1) -> float:
    """Time of a small flow of model traffic beside KV that leaves through the same CNIC, over its time alone."""
    cluster = Cluster(spec)
    for i in range(hogs):
        cluster.start(0, "pe0gpu0.cnic", f"de0.cnic{i}", HOG_BYTES)
    cluster.start(SECOND, "pe0gpu0.cnic", "pe1gpu0.cnic", SHARD_BYTES, Lane.HIGH, "shard")
    return (cluster.until("shard") - SECOND) / ALONE_NS


def test_isolated_model_traffic_hardly_sees_kv() -> None:
    assert shard_beside_kv(spec_of(LaneDiscipline.HTB)) == pytest.approx(100 / 99, abs=1e-4)
    assert shard_beside_kv(spec_of(LaneDiscipline.HTB, high_share=0.9)) == pytest.approx(10 / 9, abs=1e-4)
    assert shard_beside_kv(spec_of(LaneDiscipline.ETS)) == pytest.approx(241 / 240, abs=1e-4)
    assert shard_beside_kv(spec_of(LaneDiscipline.PRIO)) == 1
    assert shard_beside_kv(spec_of(LaneDiscipline.INFINIBAND)) == pytest.approx(964 / 963, abs=1e-4)
    even = ArbiterTables(high=((0, 64), (2, 64)), low=((0, 1),), high_limit=255)
    assert shard_beside_kv(spec_of(LaneDiscipline.INFINIBAND, arbiter=even)) == pytest.approx(2, abs=1e-3)


def test_without_isolation_model_traffic_waits_for_what_is_queued() -> None:
    """A window of KV for each stream, as in any queue."""
    for hogs in (1, 2):
        expected = 1 + hogs * WINDOW_BYTES / SHARD_BYTES
        assert shard_beside_kv(spec_of(LaneDiscipline.NONE), hogs) == pytest.approx(expected, rel=1e-3)


def test_a_local_copy_has_its_window_in_one_of_two_queues_or_the_other() -> None:
    """What passes the second queue gathers the copy there, what passes the first lets it go back. Live, messages of
    130 kB into a CNIC beside one local copy took 2.06, 3.13, 4.20, 4.68 times as long as alone, then 4.68 each.
    """
    cluster = Cluster(spec_of(LaneDiscipline.NONE))
    cluster.start(0, "de0.cnic0", "de0gpu0.cnic", HOG_BYTES)
    size_bytes, now_ns = 130_000, SECOND

    def stretch(source: str, to: str) -> float:
        nonlocal now_ns
        cluster.start(now_ns, source, to, size_bytes, Lane.HIGH, now_ns)
        begin_ns, now_ns = now_ns, cluster.until(now_ns)
        return (now_ns - begin_ns) * RATE_BPS / (size_bytes * 8 * NS_PER_S)

    most = 1 + WINDOW_BYTES / size_bytes
    expected = pytest.approx([2, 3, most, most], rel=1e-3)
    for _ in range(2):
        assert [stretch("pe0gpu0.cnic", "de0gpu0.cnic") for _ in range(4)] == expected
        assert [stretch("de0gpu0.cnic", "pe0gpu0.cnic") for _ in range(4)] == expected


def test_windows_gather_where_copies_meet() -> None:
    """Live, two copies into one HBM, a local one and one from afar, had 7.2 times as long for a message of 130 kB."""
    cluster = Cluster(spec_of(LaneDiscipline.NONE))
    cluster.start(0, "de0.cnic0", "de0gpu0.cnic", HOG_BYTES)
    cluster.start(0, "pe0.cnic0", "de0gpu0.cnic", HOG_BYTES)
    cluster.start(SECOND, "de0gpu1.cnic", "de0gpu0.cnic", 130_000, Lane.HIGH, "in")
    alone_ns = 130_000 * 8 * NS_PER_S // RATE_BPS
    assert (cluster.until("in") - SECOND) / alone_ns == pytest.approx(1 + 2 * WINDOW_BYTES / 130_000, rel=1e-3)


def test_what_passes_both_queues_leaves_a_copy_where_it_is() -> None:
    cluster = Cluster(spec_of(LaneDiscipline.NONE))
    cluster.start(0, "de0.cnic0", "de0gpu0.cnic", HOG_BYTES)
    cluster.start(0, "de0gpu0.cnic", "de0.cnic0", 4 * WINDOW_BYTES, token="back")
    now_ns = cluster.until("back")
    cluster.start(now_ns, "pe0gpu0.cnic", "de0gpu0.cnic", 100_000, Lane.HIGH, "in")
    assert (cluster.until("in") - now_ns) * RATE_BPS / (100_000 * 8 * NS_PER_S) == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(
    ("lanes", "share"),
    [(LaneDiscipline.HTB, 0.01), (LaneDiscipline.ETS, 1 / 241), (LaneDiscipline.PRIO, 0), (LaneDiscipline.NONE, 0.5)],
)
def test_kv_beside_model_traffic_without_end(lanes: LaneDiscipline, share: float) -> None:
    cluster = Cluster(spec_of(lanes))
    cluster.start(0, "pe0gpu0.cnic", "de0.cnic0", HOG_BYTES)
    assert cluster.kv_bps(0, SECOND, "pe0.cnic0.read") == RATE_BPS  # alone it has all
    cluster.start(SECOND, "pe0gpu0.cnic", "pe1gpu0.cnic", HOG_BYTES, Lane.HIGH)
    assert cluster.kv_bps(SECOND, 2 * SECOND, "pe0.cnic0.read") == pytest.approx(share * RATE_BPS, abs=100)


def test_sources_take_turns_and_streams_of_one_share() -> None:
    """Two memories write through a CNIC of the decode node: half each, whatever the number of streams."""
    cluster = Cluster(spec_of(LaneDiscipline.HTB))
    cluster.start(0, "pe0gpu0.cnic", "de0.cnic0", HOG_BYTES)
    cluster.start(0, "pe1gpu0.cnic", "de0.cnic0", HOG_BYTES)
    cluster.start(0, "pe1gpu1.cnic", "de0.cnic0", HOG_BYTES)
    rates = [cluster.net.carried_bytes(f"{name}.read", SECOND) * 8 for name in ("pe0.cnic0", "pe1.cnic0", "pe1.cnic1")]
    assert rates == pytest.approx([RATE_BPS / 2, RATE_BPS / 4, RATE_BPS / 4], abs=100)


def test_a_connection_sends_one_write_after_the_other() -> None:
    cluster = Cluster(spec_of(LaneDiscipline.HTB))
    for i in range(3):
        cluster.start(0, "pe0gpu0.cnic", "de0.cnic0", 100_000, token=i + 1)
    assert [cluster.until(i + 1) for i in range(3)] == [10_000_000, 20_000_000, 30_000_000]
    assert cluster.net.backlog_bytes("pe0.cnic0.read", 30_000_000) == 0


def test_what_waits_in_a_connection_is_in_the_backlog() -> None:
    cluster = Cluster(spec_of(LaneDiscipline.HTB))
    for i in range(3):
        cluster.start(0, "pe0gpu0.cnic", "de0.cnic0", 100_000, token=i + 1)
    assert cluster.net.backlog_bytes("pe0.cnic0.read", 5_000_000) == 250_000
    assert cluster.net.carried_bytes("de0.dram", 5_000_000) == 50_000


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Flows of each filling of rates from now on."""
    calls: list[int] = []

    def counting(ports: Sequence[Port], flows: Sequence[Contender]) -> None:
        calls.append(len(flows))
        fill(ports, flows)

    monkeypatch.setattr(fluid, "fill", counting)
    return calls


def test_snics_keep_their_slots_beside_cnics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory that is not full joins nobody: reads from storage cost no filling of rates, and no time."""
    calls = counted(monkeypatch)
    cluster = Cluster(spec_of(LaneDiscipline.HTB))
    cluster.start(0, "pe0.cnic0", "pe0gpu0.cnic", HOG_BYTES)
    for i in range(1, 50):
        cluster.start(0, "st0.snic", "pe0.snic", 10_000, token=i)
    assert cluster.until(49) == 49 * ALONE_NS
    assert calls == [1]


def test_a_memory_that_fills_is_shared_by_all_that_use_it() -> None:
    """Two local copies and a read from storage ask for 3 of 2.5: what was promised to the SNIC stays with it."""
    cluster = Cluster(spec_of(LaneDiscipline.HTB, dram_bps=RATE_BPS * 5 // 2))
    cluster.start(0, "st0.snic", "pe0.snic", 1_000_000, token="read")
    cluster.start(0, "pe0.cnic0", "pe0gpu0.cnic", HOG_BYTES)
    cluster.start(0, "pe0.cnic1", "pe0gpu1.cnic", HOG_BYTES)
    copies = [cluster.net.carried_bytes(f"pe0.cnic{i}.read", SECOND // 20) * 8 * 20 for i in (0, 1)]
    assert copies == pytest.approx([0.75 * RATE_BPS] * 2, rel=1e-4)
    assert cluster.until("read") == 100 * ALONE_NS
    cluster.start(SECOND // 2, "st0.snic", "pe0.snic", 1_000_000, token="next")  # no room: it has its part of 2.5
    assert cluster.until("next") - SECOND // 2 == pytest.approx(120 * ALONE_NS, rel=1e-4)
    begin = [cluster.net.carried_bytes(f"pe0.cnic{i}.read", cluster.ends["next"]) for i in (0, 1)]
    end = [cluster.net.carried_bytes(f"pe0.cnic{i}.read", cluster.ends["next"] + SECOND) for i in (0, 1)]
    assert [(b - a) * 8 for a, b in zip(begin, end, strict=True)] == pytest.approx([RATE_BPS] * 2, rel=1e-4)
