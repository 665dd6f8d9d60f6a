"""The network in the kernel: what is built is what was specified, what passes is what is counted, breakage is named."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from testbed.fabric.live import link_control
from testbed.fabric.live.addresses import Plan
from testbed.fabric.live.calibrate import PAYLOAD_SHARE, calibrate
from testbed.fabric.live.counters import LinkCounter, read_counters, segments_resent, total_drops, verify_shaping
from testbed.fabric.live.lanes import EXPEDITED_FORWARDING, PACKET_BYTES
from testbed.fabric.live.network import Network
from testbed.fabric.live.streams import Flow, run_streams
from testbed.fabric.spec import ClusterSpec
from tests.live.sandboxed import in_sandbox, small_spec
from tests.support.lane_load import message_seconds

Result = TypeVar("Result")

PAYLOAD_BYTES = 2_000_000
MOST_BPS = 300e6  # measured at a time: little, so that a busy host does not matter
SEGMENT_BYTES = 1448  # payload of a full one
ATTEMPTS = 6  # at a figure that other programs on the host can spoil


def on_network(spec: ClusterSpec, look: Callable[[Network], Result]) -> Result:
    """Build, look, close, in a sandbox."""

    def body() -> Result:
        with Network(spec) as network:
            return look(network)

    return in_sandbox(body)


def largest_spec() -> ClusterSpec:
    return small_spec(prefill=16, decode=16, gpus=16, servers=16, storage_mbit=100)


def test_names_and_addresses_of_the_largest_cluster_are_valid() -> None:
    plan = Plan(largest_spec())
    addresses = [endpoint.address for endpoint in plan.endpoints.values()]
    assert len(set(addresses)) == len(addresses)
    devices = {(e.host, e.device) for e in plan.endpoints.values()} | {(p.host, p.device) for p in plan.ports.values()}
    assert max(len(device) for _, device in devices | {(link.switch, link.port) for link in plan.links}) <= 15
    indexes = [(link.switch, link.port_index) for link in plan.links]
    assert len(set(indexes)) == len(indexes)
    assert all(link.port_index != link.index for link in plan.links)


def test_every_path_ends_in_memories_and_names_the_papers_steps() -> None:
    plan = Plan(small_spec())
    assert plan.path("st0.snic", "pe0.snic") == ("st0.snic.tx", "pe0.snic.rx", "pe0.dram")
    assert plan.path("pe0.cnic1", "pe0gpu1.cnic") == (
        "pe0.dram",
        "pe0.cnic1.read",
        "pe0.cnic1.write",
        "pe0gpu1.pcie.rx",
    )
    assert plan.path("pe0gpu0.cnic", "de0.cnic1") == (
        "pe0gpu0.pcie.tx",
        "pe0.cnic0.read",
        "de0.cnic1.write",
        "de0.dram",
    )
    assert plan.path("pe0.copy0", "pe0gpu0.copy") == ("pe0.dram", "pe0gpu0.pcie.rx")
    assert plan.path("ctl0.control", "pe0gpu0.control") == ()


@pytest.mark.live
@pytest.mark.parametrize(
    "spec",
    [
        small_spec(gpus=1, mbit=1),
        pytest.param(small_spec(decode=2, servers=3, storage_mbit=40), marks=pytest.mark.stock_kernel),
        small_spec(prefill=2, gpus=8, mbit=400),
        small_spec(gpus=1, mbit=40_000),
    ],
    ids=["1 Mbit/s", "shaped storage", "wide", "40 Gbit/s"],
)
def test_what_is_built_is_what_was_specified(spec: ClusterSpec) -> None:
    assert on_network(spec, verify_shaping) == []


@pytest.mark.live
@pytest.mark.stock_kernel
def test_no_stream_paces_itself_whatever_the_host_does() -> None:
    def used(network: Network) -> str:
        with network.inside("pe0gpu0"), socket.socket() as stream:
            return stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()

    assert on_network(small_spec(gpus=1), used) == "reno"


@pytest.mark.live
def test_it_can_be_built_again_after_it_was_closed() -> None:
    def body() -> list[str]:
        with Network(small_spec(gpus=1)) as network:
            assert os.path.exists(network.namespace_path("pe0"))
        assert os.listdir("/run/netns") == []
        with Network(small_spec(gpus=1)) as network:
            return verify_shaping(network)

    assert in_sandbox(body) == []


@pytest.mark.live
@pytest.mark.stock_kernel
def test_counters_give_the_payload_of_every_step_of_a_path_and_nothing_else() -> None:
    pairs = (
        ("st0.snic", "pe0.snic", 0),
        ("de0.snic", "st0.snic", 0),
        ("pe0.cnic0", "pe0gpu0.cnic", 0),
        ("pe0gpu1.cnic", "pe0.cnic1", 0),
        ("pe0gpu0.cnic", "de0.cnic1", 0),
        ("de0.cnic0", "pe0gpu1.cnic", 0),
        ("pe0gpu0.cnic", "pe0gpu1.cnic", EXPEDITED_FORWARDING),
        ("de0.copy1", "de0gpu1.copy", 0),
    )

    def look(network: Network) -> list[tuple[int, int, dict[str, LinkCounter], dict[str, LinkCounter]]]:
        found = []
        for source, destination, tos in pairs:
            before = read_counters(network)
            flow = Flow(name="flow", source=source, destination=destination, tos=tos, size_bytes=PAYLOAD_BYTES)
            sent = PAYLOAD_BYTES + run_streams(network, [flow], seconds=0, warm_up_s=0)["flow"].retransmitted_bytes
            found.append((sent, total_drops(network), before, read_counters(network)))
        return found

    spec = small_spec(mbit=400, storage_mbit=400)
    plan = Plan(spec)
    for (source, destination, tos), (sent, drops, before, after) in zip(pairs, on_network(spec, look), strict=True):
        assert drops == 0
        path = plan.path(source, destination)
        for name, counter in after.items():
            payload = (counter.data - before[name].data).payload_bytes
            if name in path:
                assert payload == pytest.approx(sent, rel=0.001), f"{source} to {destination} at {name}"
                lane = counter.high - before[name].high
                assert (lane.packets > 0) == (bool(tos) and "cnic" in name)
            else:
                assert payload == 0, f"{source} to {destination} touched {name}"
            assert counter.rest == before[name].rest


@pytest.mark.live
def test_a_copy_that_bypasses_the_cnic_leaves_no_trace_in_its_counters() -> None:
    def look(network: Network) -> dict[str, LinkCounter]:
        flow = Flow(name="copy", source="pe0.copy0", destination="pe0gpu0.copy", size_bytes=PAYLOAD_BYTES)
        run_streams(network, [flow], seconds=0, warm_up_s=0)
        return read_counters(network)

    counters = on_network(small_spec(), look)
    assert counters["pe0.cnic0.read"].data.bytes == counters["pe0.cnic0.write"].data.bytes == 0
    assert counters["pe0gpu0.pcie.rx"].shared.payload_bytes >= PAYLOAD_BYTES


@pytest.mark.live
def test_every_link_has_its_rate() -> None:
    def look(network: Network) -> list[tuple[str, float]]:
        for _ in range(ATTEMPTS):
            off = [(m.name, m.error) for m in calibrate(network, tolerance=0.01, most_bps=MOST_BPS) if not m.ok]
            if not off:
                break
        return off

    assert on_network(small_spec(gpus=1), look) == []


@pytest.mark.live
@pytest.mark.parametrize("port", ["pe0.snic.tx", "pe0.snic.rx", "de0.cnic1.read", "de0.cnic1.write", "pe0gpu0.pcie.tx"])
@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_a_link_shaped_wrongly_at_one_end_is_read_back(port: str, factor: float) -> None:
    def look(network: Network) -> tuple[list[str], list[str]]:
        link_control.set_rate(network, port, round(100e6 * factor))
        wrong = verify_shaping(network)
        link_control.restore_rate(network, port)
        return wrong, verify_shaping(network)

    wrong, restored = on_network(small_spec(), look)
    assert wrong
    assert all(problem.startswith(f"{port} class") for problem in wrong)
    assert restored == []


@pytest.mark.live
@pytest.mark.parametrize(
    ("port", "factor"), [("de0.cnic0.read", 1.05), ("de0.cnic0.write", 1.05), ("pe0.snic.rx", 0.95)]
)
def test_a_link_shaped_wrongly_at_one_end_is_measured(port: str, factor: float) -> None:
    def look(network: Network) -> dict[str, float]:
        link_control.set_rate(network, port, round(100e6 * factor))
        for _ in range(ATTEMPTS):
            off = {m.name: m.error for m in calibrate(network, tolerance=0.025, most_bps=MOST_BPS) if not m.ok}
            if list(off) == [port]:
                break
        return off

    assert on_network(small_spec(gpus=1), look) == {port: pytest.approx(factor - 1, abs=0.02)}


@pytest.mark.live
def test_a_link_that_nothing_can_saturate_is_read_back_and_says_so() -> None:
    def look(network: Network) -> dict[str, tuple[str, bool]]:
        link_control.set_rate(network, "pe0.dram", 950_000_000)
        return {m.name: (m.method, m.ok) for m in calibrate(network, most_bps=MOST_BPS, most_s=0)}

    found = on_network(small_spec(gpus=1), look)
    assert found["pe0.dram"] == ("readback", False)
    assert found["de0.dram"] == ("readback", True)
    assert found["pe0.snic.rx"][0] == found["pe0gpu0.pcie.tx"][0] == "measured"


@pytest.mark.live
@pytest.mark.parametrize(
    ("spoil", "needle"),
    [
        (lambda network: link_control.remove_lane_filter(network, "pe0.cnic0.read"), "pe0.cnic0.read lacks the filter"),
        (lambda network: link_control.unshape(network, "de0.snic.rx"), "de0.snic.rx (storage:de0.snic) is not shaped"),
        (lambda network: link_control.set_up(network, "pe0gpu1.pcie.rx", False), "pe0gpu1:pcie_rx is down"),
    ],
    ids=["lane filter removed", "not shaped", "down"],
)
def test_a_spoiled_link_is_named(spoil: Callable[[Network], None], needle: str) -> None:
    def look(network: Network) -> list[str]:
        spoil(network)
        return verify_shaping(network)

    problems = on_network(small_spec(), look)
    assert [needle in problem for problem in problems] == [True]


def shares(network: Network, flows: list[Flow], seconds: float = 0.8) -> dict[str, float]:
    """Payload rates as shares of what a link of the network can carry."""
    capacity = network.spec.cnic_rate_bps * PAYLOAD_SHARE
    results = run_streams(network, flows, seconds=seconds + 0.3, warm_up_s=0.3)
    return {name: result.steady_bps / capacity for name, result in results.items()}


@pytest.mark.live
@pytest.mark.parametrize(
    "flows",
    [
        [
            Flow(name="loopback", source="pe0.cnic0", destination="pe0gpu0.cnic"),
            Flow(name="forward", source="pe0gpu0.cnic", destination="de0.cnic0"),
        ],
        [
            Flow(name="loopback", source="de0.cnic0", destination="de0gpu0.cnic"),
            Flow(name="forward", source="pe0gpu0.cnic", destination="de0.cnic0", window_bytes=1 << 16),
        ],
    ],
    ids=["one read side", "one write side"],
)
def test_loopback_and_forwarding_share_a_cnic_evenly(flows: list[Flow]) -> None:
    def look(network: Network) -> dict[str, float]:
        for _ in range(ATTEMPTS):
            got = shares(network, flows)
            if all(abs(share - 0.5) < 0.05 for share in got.values()):
                break
        return got

    got = on_network(small_spec(gpus=1), look)
    assert got == {"loopback": pytest.approx(0.5, abs=0.05), "forward": pytest.approx(0.5, abs=0.05)}


MODEL = Flow(name="model", source="pe0gpu0.cnic", destination="pe0gpu1.cnic", tos=EXPEDITED_FORWARDING)
KV = [
    Flow(name="kv in", source="de0.cnic1", destination="pe0gpu1.cnic"),
    Flow(name="kv out", source="pe0gpu0.cnic", destination="de0.cnic0"),
]


@pytest.mark.live
def test_the_model_lane_comes_before_kv_and_kv_takes_what_is_left() -> None:
    def look(network: Network) -> tuple[dict[str, float], dict[str, float]]:
        for _ in range(ATTEMPTS):
            both, alone = shares(network, [MODEL, *KV]), shares(network, KV, 0.3)
            kept = all(0.003 < both[kv.name] < 0.03 for kv in KV)
            if both["model"] > 0.97 and kept and min(alone.values()) > 0.97:
                break
        return both, alone

    both, alone = on_network(small_spec(), look)
    assert both["model"] > 0.97
    assert 0.003 < both["kv in"] < 0.03
    assert 0.003 < both["kv out"] < 0.03
    assert min(alone.values()) > 0.97


@pytest.mark.live
@pytest.mark.parametrize("tos", [0, EXPEDITED_FORWARDING], ids=["kv", "model"])
def test_the_end_of_a_message_does_not_overtake_it(tos: int) -> None:
    """The last packet is as small as an acknowledgement; TCP would send again what that overtook."""
    super_packet_bytes = PACKET_BYTES // SEGMENT_BYTES * SEGMENT_BYTES
    size_bytes = 9 * super_packet_bytes + 20

    def look(network: Network) -> tuple[int, int, int]:
        assert len(message_seconds(network, size_bytes, 8, tos=tos)) == 8
        with network.inside("pe0gpu1"):
            names, values = re.findall(r"^TcpExt: (.*)$", Path("/proc/thread-self/net/netstat").read_text(), re.M)
        out_of_order = dict(zip(names.split(), values.split(), strict=True))["TCPOFOQueue"]
        return int(out_of_order), segments_resent(network)["pe0gpu0"], total_drops(network)

    assert on_network(small_spec(mbit=20), look) == (0, 0, 0)


@pytest.mark.live
def test_without_its_filter_the_model_lane_is_lost() -> None:
    def look(network: Network) -> dict[str, float]:
        link_control.remove_lane_filter(network, "pe0.cnic0.read")
        return shares(network, [MODEL, *KV])

    assert on_network(small_spec(), look)["model"] < 0.7


@pytest.mark.live
def test_a_socket_bound_by_address_alone_uses_its_own_cnic() -> None:
    def look(network: Network) -> tuple[bool, dict[str, LinkCounter]]:
        there, here = network.endpoints["pe0gpu1.cnic"], network.endpoints["pe0.cnic1"]
        with network.inside(there.host):
            server = socket.create_server((there.address, 0))
        with network.inside(here.host):
            client = socket.create_connection(server.getsockname(), source_address=(here.address, 0))
        receiver, _ = server.accept()
        client.sendall(bytes(50_000))
        left = 50_000
        while left:
            left -= len(receiver.recv(left))
        return network.source_routing, read_counters(network)

    source_routing, counters = on_network(small_spec(), look)
    if not source_routing:
        pytest.skip("this kernel has no policy routing: bind to the endpoint's device")
    assert counters["pe0.cnic1.read"].data.payload_bytes == 50_000
    assert counters["pe0.cnic0.read"].data.bytes == 0


@pytest.mark.live
def test_a_role_process_enters_its_namespace_and_reaches_control_from_there() -> None:
    def look(network: Network) -> bytes:
        with network.inside("ctl0"):
            server = socket.create_server((network.endpoints["ctl0.control"].address, 0))
        role = os.fork()
        if role == 0:
            network.enter("de0gpu1")
            with socket.create_connection(server.getsockname()) as connection:
                connection.sendall(b"%s" % connection.getsockname()[0].encode())
            os._exit(0)
        os.waitpid(role, 0)
        peer, _ = server.accept()
        assert all(counter.data.bytes == counter.ack.bytes == 0 for counter in read_counters(network).values())
        return peer.recv(100)

    spec = small_spec()
    assert on_network(spec, look).decode() == Plan(spec).endpoints["de0gpu1.control"].address


@pytest.mark.live
def test_many_streams_into_one_link_lose_nothing() -> None:
    def look(network: Network) -> tuple[int, int, int]:
        sources = [("de0.cnic0", 3), ("de0.cnic1", 3), ("pe0gpu0.cnic", 3), ("pe0.cnic0", 3)]
        flows = [
            Flow(name=f"{source} {k}", source=source, destination="pe0gpu1.cnic", size_bytes=300_000)
            for source, count in sources
            for k in range(count)
        ]
        again = sum(r.retransmitted_bytes for r in run_streams(network, flows, seconds=0, warm_up_s=0).values())
        return total_drops(network), again, read_counters(network)["pe0.cnic1.write"].data.payload_bytes

    drops, again, payload = on_network(small_spec(), look)
    assert drops == 0
    assert payload == pytest.approx(12 * 300_000 + again, rel=0.001)
