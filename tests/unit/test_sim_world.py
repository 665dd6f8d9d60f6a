"""The sim world by itself: its paths and costs are the live world's, its rules name what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import pytest

from testbed.errors import BugError, ConfigError, RunFailedError
from testbed.fabric.live import counters, wire
from testbed.fabric.live.addresses import Plan
from testbed.fabric.live.calibrate import PAYLOAD_SHARE
from testbed.fabric.sim import params as sim_params
from testbed.fabric.sim.params import SimParams, payload_bytes, wire_bytes
from testbed.fabric.sim.resources import kind_of, resources_of, shared_resources
from testbed.fabric.sim.world import SimWorld
from testbed.ids import cnic_dram_endpoint, cnic_hbm_endpoint, copy_dram_endpoint, copy_hbm_endpoint, snic_endpoint
from testbed.protocol import machine as m
from testbed.protocol.grants import GrantRef, Landing
from testbed.protocol.layout import BlockLayout
from testbed.protocol.messages import AbortRequest
from tests.support.worlds import TINY, cluster

SPEC = cluster(2, 2, gpus=2)
PARAMS = SimParams(message_jitter_s=0.0)
LAYER, FULL = TINY.layer_block_bytes, TINY.full_block_bytes
MS = 1_000_000


@dataclass
class Puppet:
    """A machine that does what it is told, and remembers what it hears."""

    script: list[list[m.Action]]
    heard: list[tuple[int, m.Event]] = field(default_factory=list)

    def handle(self, event: m.Event, now_ns: int) -> list[m.Action]:
        self.heard.append((now_ns, event))
        return self.script.pop(0) if self.script else []


@dataclass
class Role:
    """A ``Hosted``."""

    name: str
    puppet: Puppet
    endpoints: tuple[str, ...] = ()
    memory_bytes: int = 8 * FULL
    has_gpu: bool = False
    has_disk: bool = False

    @property
    def make(self) -> Callable[[], m.Machine]:
        return lambda: self.puppet  # type: ignore[return-value]


def hosted(*roles: Role, params: SimParams = PARAMS) -> SimWorld:
    return SimWorld(SPEC, TINY, roles, params, vocab_size=100, materialise=False)


def run(world: SimWorld, until_ns: int = 100 * MS) -> None:
    """Everything up to a time; then the world is at a standstill, or goes on."""
    try:
        world.run(lambda: world.now_ns >= until_ns)
    except RunFailedError as error:
        assert "standstill" in str(error)


def landing(key: int, *, begin: int = 0, end: int = TINY.layers, at: int = 0) -> Landing:
    return Landing(pieces=(at,), piece_bytes=(end - begin) * LAYER, keys=(key,), layer_begin=begin, layer_end=end)


def test_costs_are_those_of_the_live_world() -> None:
    assert (sim_params.WRITE_HEADER_BYTES, sim_params.SEAL_BYTES) == (wire.HEADER_BYTES, wire.SEAL_BYTES)
    assert sim_params.SEGMENT_HEADER_BYTES == counters.HEADER_BYTES
    segment = sim_params.SEGMENT_PAYLOAD_BYTES
    assert pytest.approx(segment / wire_bytes(segment)) == PAYLOAD_SHARE
    layout = BlockLayout(model="x", layers=30, block_tokens=16, bytes_per_token_layer=4)
    size = 3 * layout.full_block_bytes
    assert payload_bytes(size, 90) == wire.wire_bytes(size, layout)
    assert wire_bytes(segment + 1) == segment + 1 + 2 * 66


def test_paths_are_those_of_the_live_world() -> None:
    ours, plan = resources_of(SPEC, PARAMS), Plan(SPEC)
    engines = [node.gpu(i) for node in SPEC.nodes for i in range(node.gpus)]
    compute = [name(engine) for engine in engines for name in (cnic_dram_endpoint, cnic_hbm_endpoint)]
    storage = [snic_endpoint(host) for host in (*SPEC.storage_names, *(node.name for node in SPEC.nodes))]
    direct = [(copy_dram_endpoint(engine), copy_hbm_endpoint(engine)) for engine in engines]
    for group in (compute, storage, *direct):
        for source, destination in product(group, group):
            assert ours.path(source, destination) == plan.path(source, destination)
    rates = {name: port.rate_bps for name, port in plan.ports.items()}
    assert dict(ours.rates_bps) == rates
    shared = shared_resources(rates, SimParams(cnic="fair", dram="infiniband"), SPEC)
    kinds = {(kind_of(resource.name), resource.discipline.value) for resource in shared}
    assert kinds == {("snic", "fifo"), ("cnic", "fair"), ("pcie", "packets"), ("dram", "infiniband")}
    with pytest.raises(BugError, match=r"no endpoint 'pe9\.snic'"):
        ours.path("pe9.snic", "pe0.snic")


def test_disks_and_their_aggregate_are_resources_where_they_are_limited() -> None:
    assert resources_of(SPEC, PARAMS).disk == {"st0": (), "st1": ()}
    limited = resources_of(SPEC, SimParams(disk_rate_bps=8 * 10**6, storage_rate_bps=10**7))
    assert limited.disk == {"st0": ("st0.disk", "storage.disks"), "st1": ("st1.disk", "storage.disks")}
    assert kind_of("storage.disks") == "disk" and "st0.disk" not in limited.links


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"message_latency_s": 0.0}, r"sim.message_latency_s is 0, but it must be between"),
        ({"disk_latency_s": 11.0}, r"sim.disk_latency_s is 11"),
        ({"message_jitter_s": 0.0003}, r"no message comes before it is sent"),
        ({"disk_rate_bps": 5}, r"sim.disk_rate_bps is 5; use 0 \(unlimited\)"),
    ],
)
def test_a_transport_that_cannot_be_is_refused(values: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SimParams(**values)  # type: ignore[arg-type]


def written(write: m.Write, grant: Landing | None, **source: int) -> tuple[Puppet, Puppet, SimWorld]:
    """``st0`` posts a write to ``pe0`` at the start; its memory holds block ``key`` at page 0."""
    opened = [m.OpenGrant(write.ref, grant)] if grant else []
    server, node = Puppet([[write]]), Puppet([list(opened)])
    world = hosted(Role("pe0", node, ("pe0.snic",)), Role("st0", server, ("st0.snic",)))
    world.roles["st0"].memory.put((0,), (source.get("key", 5),), 0, TINY.layers)
    run(world)
    return server, node, world


def write(ref: GrantRef, size: int = FULL) -> m.Write:
    return m.Write(1, ref, "st0.snic", (0,), size)


def test_a_write_lands_after_its_bytes_and_is_acknowledged_a_message_later() -> None:
    server, node, world = written(write(GrantRef("pe0.snic", 7, 1, FULL)), landing(5))
    wire_size = wire_bytes(payload_bytes(FULL, TINY.layers))
    landed_ns = -(-wire_size * 8 * 10**9 // SPEC.snic_rate_bps)
    assert node.heard[1:] == [(landed_ns, m.WriteLanded(7))]
    assert server.heard[1:] == [(landed_ns + PARAMS.message_latency_ns, m.WriteCompleted(1))]
    assert world.roles["pe0"].memory.holds((0,), (5,), 0, TINY.layers)
    carried = {name: counter.data.bytes for name, counter in world.counters.items() if counter.data.bytes}
    assert carried == dict.fromkeys(("st0.snic.tx", "pe0.snic.rx", "pe0.dram"), wire_size)
    assert world.network.carried_bytes("pe0.snic.rx", world.now_ns) == wire_size


def test_a_write_leaves_when_it_has_been_submitted() -> None:
    """Two writes of one thread: the second is submitted while the first is carried."""
    wire_ns = -(-wire_bytes(payload_bytes(FULL, TINY.layers)) * 8 * 10**9 // SPEC.snic_rate_bps)
    refs = [GrantRef("pe0.snic", k, 1, FULL) for k in (1, 2)]
    submit_ns = 3 * wire_ns
    writes = [m.Write(k, ref, "st0.snic", (0,), FULL, submit_ns=submit_ns) for k, ref in enumerate(refs)]
    server, node = Puppet([list(writes)]), Puppet([[m.OpenGrant(ref, landing(5)) for ref in refs]])
    world = hosted(Role("pe0", node, ("pe0.snic",)), Role("st0", server, ("st0.snic",)))
    world.roles["st0"].memory.put((0,), (5,), 0, TINY.layers)
    run(world)
    assert node.heard[1:] == [(k * submit_ns + wire_ns, m.WriteLanded(k)) for k in (1, 2)]
    submission = world.roles["st0"].report()["submission"]
    assert submission == {"st0.snic": {"writes": 2, "busy_ns": 2 * submit_ns, "waited_ns": 3 * submit_ns}}


@pytest.mark.parametrize(
    ("ref", "grant", "reason"),
    [
        (GrantRef("pe0.snic", 7, 1, FULL), None, "grant 7 is not open"),
        (GrantRef("pe0.snic", 7, 2, FULL), landing(5), "has epoch"),
        (GrantRef("pe0.snic", 7, 1, FULL), landing(5, end=1), "is for 32 bytes, the write has 96"),
    ],
)
def test_a_write_without_the_right_grant_is_refused_by_name(ref: GrantRef, grant: Landing | None, reason: str) -> None:
    if grant is not None and ref.epoch == 2:
        opened = GrantRef("pe0.snic", 7, 1, FULL)
        server, node = Puppet([[write(ref)]]), Puppet([[m.OpenGrant(opened, grant)]])
        world = hosted(Role("pe0", node, ("pe0.snic",)), Role("st0", server, ("st0.snic",)))
        run(world)
    else:
        server, node, world = written(write(ref), grant)
    ((_, failed),) = server.heard[1:]
    assert isinstance(failed, m.WriteFailed) and reason in failed.reason
    assert len(node.heard) == 1 and world.roles["pe0"].writes_refused == 1


@pytest.mark.parametrize(
    ("expected", "held", "what"),
    [(landing(6), 5, "block 0000000000000006 layer 0"), (landing(5, begin=1, end=2), 5, "layer 1: not its bytes")],
)
def test_another_block_is_refused_by_name_at_both_ends(expected: Landing, held: int, what: str) -> None:
    size = expected.size_bytes
    server, node, world = written(write(GrantRef("pe0.snic", 7, 1, size), size), expected, key=held)
    ((_, refused),) = node.heard[1:]
    ((_, failed),) = server.heard[1:]
    assert isinstance(refused, m.LandingRefused) and what in refused.reason
    assert isinstance(failed, m.WriteFailed) and what in failed.reason
    assert len(world.roles["pe0"].grants) == 0 and world.roles["pe0"].writes_corrupt == 1


def test_a_disk_takes_its_latency_and_gives_what_was_stored() -> None:
    params = SimParams(disk_rate_bps=8 * 10**6, storage_rate_bps=4 * 10**6)
    puppet = Puppet([[m.StoreBlock(5, 0, 0)], [m.FetchBlock(5, 1, FULL), m.FetchBlock(6, 2, 2 * FULL)]])
    world = hosted(Role("st0", puppet, ("st0.snic",), has_disk=True), params=params)
    world.roles["st0"].memory.put((0,), (5,), 0, TINY.layers)
    run(world)
    disk_ns = params.disk_latency_ns + FULL * 8 * 10**9 // (4 * 10**6)  # the aggregate is the narrower one
    (_, started), (stored_ns, stored), (fetched_ns, fetched), (failed_ns, failed) = puppet.heard
    assert (stored_ns, stored) == (disk_ns, m.BlockWritten(5, 0)) and started == m.Started()
    assert (fetched_ns, fetched) == (2 * disk_ns, m.BlockFetched(5, 1))
    assert isinstance(failed, m.FetchFailed) and "0000000000000006 is not on disk" in failed.reason
    assert failed_ns == fetched_ns + FULL * 8 * 10**9 // (4 * 10**6)
    assert world.roles["st0"].memory.holds((FULL,), (5,), 0, TINY.layers)


def test_a_gpu_does_one_compute_after_the_other() -> None:
    puppet = Puppet([[m.ComputePrefill(1, 5 * MS, 0, 1, ()), m.ComputePrefill(2, 3 * MS, 1, 2, ())]])
    run(hosted(Role("pe0gpu0", puppet, has_gpu=True)))
    assert [at for at, event in puppet.heard[1:]] == [5 * MS, 8 * MS]


def test_deadlines_are_renewed_cleared_and_last_in_their_instant() -> None:
    latency = PARAMS.message_latency_ns
    puppet = Puppet(
        [
            [
                m.SetDeadline("renewed", 2 * MS), m.SetDeadline("cleared", 3 * MS), m.SetDeadline("same", latency),
                m.SetDeadline("earlier", 9 * MS),
            ],
            [m.SetDeadline("renewed", 7 * MS), m.ClearDeadline("cleared"), m.SetDeadline("earlier", 4 * MS)],
        ]
    )  # fmt: skip
    other = Puppet([[m.Send("pe0", AbortRequest("r", "why"))]])
    run(hosted(Role("pe0", puppet), Role("pe1", other)))
    told = [(at, getattr(event, "key", type(event).__name__)) for at, event in puppet.heard[1:]]
    assert told == [(latency, "Received"), (latency, "same"), (4 * MS, "earlier"), (7 * MS, "renewed")]


def test_messages_vary_with_the_draw_and_keep_their_order_and_company() -> None:
    def arrivals(draw: int) -> list[int]:
        to = Puppet([])
        pairs: list[list[m.Action]] = [
            [
                *(m.Send("pe0", AbortRequest(str(i), "why")) for i in (k, k + 1)),
                m.SetDeadline("next", 20_000 * (k // 2 + 1)),
            ]
            for k in range(0, 50, 2)
        ]
        run(hosted(Role("pe0", to), Role("pe1", Puppet(pairs)), params=SimParams(draw=draw)))
        assert [event.message.request_id for _, event in to.heard[1:]] == [str(i) for i in range(50)]  # type: ignore[union-attr]
        return [at for at, _ in to.heard[1:]]

    first = arrivals(0)
    assert first == arrivals(0) != arrivals(1)
    assert first[::2] == first[1::2], "what is sent at one instant arrives at one"
    late = [at - 20_000 * k for k, at in enumerate(first[::2])]
    assert min(late) >= 150_000 and max(late) <= 450_000 and len(set(late)) > 10


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (m.Send("nobody", AbortRequest("r", "why")), "sends to nobody"),
        (m.Write(1, GrantRef("pe0.snic", 1, 1, 8), "pe1.snic", (0,), 16), "gathers 16 bytes for a grant of 8"),
        (m.FetchBlock(1, 0, 0), "pe1 has no disk"),
        (m.ForgetSequence("r"), "pe1 has no GPU"),
    ],
)
def test_a_machine_that_asks_for_what_it_has_not_is_our_bug(action: m.Action, sentence: str) -> None:
    with pytest.raises(BugError, match=sentence):
        run(hosted(Role("pe0", Puppet([])), Role("pe1", Puppet([[action]]))))


def test_a_cluster_in_which_nothing_happens_has_failed() -> None:
    with pytest.raises(RunFailedError, match=r"standstill after 0\.0 emulated s"):
        hosted(Role("pe0", Puppet([]))).run(lambda: False)
