"""A CNIC's wire, judged from a capture on it: lanes, order and bytes, without asking our own counters first.

The product records; scapy takes the packets apart and has to agree with our own reader.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import CookedLinuxV2
from scapy.utils import PcapReader

from testbed.capture.lanes import Cargo, DirectionVerdict, Lane, LaneWaits, judge, waits
from testbed.capture.packets import Flow as Connection
from testbed.capture.packets import Packet, read_packets
from testbed.fabric.live import link_control
from testbed.fabric.live.counters import read_counters
from testbed.fabric.live.lanes import EXPEDITED_FORWARDING, SMALL_PACKET_BYTES
from testbed.fabric.live.network import Network
from testbed.fabric.live.recorder import LEAVING, Recording, recording
from testbed.fabric.live.streams import Flow, run_streams
from tests.live.sandboxed import in_sandbox, small_spec

pytestmark = pytest.mark.live

MODEL = Flow(
    name="model", source="pe0gpu0.cnic", destination="pe0gpu1.cnic", tos=EXPEDITED_FORWARDING, size_bytes=600_000
)
KV = Flow(name="kv", source="pe0.cnic0", destination="pe0gpu0.cnic", size_bytes=1_500_000)
"""From a node's DRAM to HBM, out of the CNIC that the model's stream leaves by, and into it again."""
CNIC, DRAM_SIDE, HBM_SIDE = "pe0.cnic0", "pe0.mem0", "pe0gpu0.cnic"
PORT = f"{CNIC}.read"
ENDPOINTS = {name: int.from_bytes(bytes(map(int, endpoint.address.split("."))), "big")
             for name, endpoint in Network(small_spec()).endpoints.items()}  # fmt: skip
MOST_KV_SHARE = 0.1
"""While the high lane has something to send: 1 % is KV's, and the packet that is under way when it begins."""
LEAST_OVERTAKEN_BYTES = 16_000


PAST_THE_CNIC = Flow(name="kv", source="pe0.copy0", destination="pe0gpu0.copy", size_bytes=KV.size_bytes)
MISMARKED = Flow(
    name="kv", source=KV.source, destination=KV.destination, size_bytes=KV.size_bytes, tos=EXPEDITED_FORWARDING
)
CASES: dict[str, tuple[Callable[[Network], None], Flow]] = {
    "whole": (lambda network: None, KV),
    "filter-removed": (lambda network: link_control.remove_lane_filter(network, PORT), KV),
    "lanes-swapped": (lambda network: link_control.swap_lanes(network, PORT), KV),
    "copy-engine": (lambda network: None, PAST_THE_CNIC),
    "kv-marked-EF": (lambda network: None, MISMARKED),
}
"""What is done to the network, and which way KV takes beside the model's stream."""


@dataclass(frozen=True)
class Watched:
    """What was recorded of each link, and what the kernel's counters say of the CNIC."""

    files: dict[str, bytes]
    recordings: list[Recording]
    counted: dict[str, int]


@functools.cache
def watched() -> dict[str, Watched]:
    """Every case, one after the other on one network."""
    return in_sandbox(_watch_all)


def _watch_all() -> dict[str, Watched]:
    with Network(small_spec()) as network, tempfile.TemporaryDirectory() as folder:
        return {name: _watch(network, Path(folder), *case) for name, case in CASES.items()}


def _watch(network: Network, folder: Path, change: Callable[[Network], None], kv: Flow) -> Watched:
    change(network)
    before = read_counters(network, CNIC)
    with recording(network, (CNIC, DRAM_SIDE, HBM_SIDE), folder) as found:
        run_streams(network, (kv, MODEL), seconds=0, warm_up_s=0)
    after = read_counters(network, CNIC)
    link_control.unshape(network, PORT)
    link_control.shape(network, PORT)
    return Watched(
        {one.link: Path(one.file).read_bytes() for one in found},
        found,
        {name: (after[name].data - before[name].data).payload_bytes for name in after},
    )


def packets_of(tmp_path: Path, data: bytes) -> list[Packet]:
    path = tmp_path / "x.pcap"
    path.write_bytes(data)
    return list(read_packets(path))


def cargo_of(connection: Connection) -> Cargo:
    """What the streams of these tests carry, by the memories that they join."""
    source, destination = connection[:2]
    kv = {(ENDPOINTS[KV.source], ENDPOINTS[KV.destination]), (ENDPOINTS["pe0.copy0"], ENDPOINTS["pe0gpu0.copy"])}
    return Cargo.KV if (source, destination) in kv or (destination, source) in kv else Cargo.MODEL


def test_our_reader_agrees_with_scapy_and_both_with_the_counters(tmp_path: Path) -> None:
    seen = watched()["whole"]
    found = seen.recordings[0]
    assert all((one.lost, one.beyond, one.failure) == (0, 0, "") for one in seen.recordings)
    ours = packets_of(tmp_path, seen.files[CNIC])
    with PcapReader(str(tmp_path / "x.pcap")) as reader:
        theirs = list(reader)
    assert len(ours) == len(theirs) == found.packets
    for packet, other in zip(ours, theirs, strict=True):
        ip, tcp = other[IP], other[TCP]
        assert packet.leaving is (other[CookedLinuxV2].pkttype == LEAVING)
        assert packet.flow[2:] == (tcp.sport, tcp.dport)
        assert ".".join(map(str, packet.flow[0].to_bytes(4, "big"))) == ip.src
        assert (packet.tos, packet.ip_bytes, packet.sequence) == (ip.tos, ip.len, tcp.seq)
        assert packet.payload_bytes == ip.len - 4 * ip.ihl - 4 * tcp.dataofs
        assert packet.at_ns == pytest.approx(int(other.time * 10**9), abs=1000)

    pure = [packet for packet in ours if not packet.payload_bytes]
    assert pure
    assert max(packet.ip_bytes for packet in pure) < SMALL_PACKET_BYTES
    left, entered = judge(ours, cargo_of)
    assert (left.lanes[Lane.KV].dscp, left.lanes[Lane.HIGH].dscp) == ({0}, {EXPEDITED_FORWARDING >> 2})
    assert left.misplaced == entered.misplaced == {}
    assert left.cargo_bytes[Cargo.KV] == entered.cargo_bytes[Cargo.KV], "a local copy comes in by the CNIC it left by"
    assert left.cargo_bytes[Cargo.KV] >= KV.size_bytes
    assert entered.cargo_bytes[Cargo.MODEL] == 0, "what goes to another GPU does not"
    assert sum(left.cargo_bytes.values()) == pytest.approx(seen.counted[f"{CNIC}.read"], rel=0.005)
    assert sum(entered.cargo_bytes.values()) == pytest.approx(seen.counted[f"{CNIC}.write"], rel=0.005)


def complaints(left: DirectionVerdict, entered: DirectionVerdict, queue: LaneWaits) -> list[str]:
    """What the wire says against the lanes of the CNIC that both streams leave by."""
    found = []
    # half of it: a recorder that is short of CPU loses packets, and counts them
    if min(left.cargo_bytes[Cargo.KV], entered.cargo_bytes[Cargo.KV]) < KV.size_bytes // 2:
        found.append("KV goes past the CNIC")
    if left.misplaced or entered.misplaced:
        found.append("a stream has the other one's mark")
    if queue.kv_share > MOST_KV_SHARE:
        found.append("KV is not held back")
    if queue.most_overtaken < LEAST_OVERTAKEN_BYTES:
        found.append("the model's packets do not overtake KV")
    return found


@pytest.mark.stock_kernel
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("whole", []),
        ("filter-removed", ["KV is not held back"]),
        ("lanes-swapped", ["KV is not held back"]),
        ("copy-engine", ["KV goes past the CNIC"]),
        ("kv-marked-EF", ["a stream has the other one's mark"]),
    ],
)
def test_the_wire_shows_lanes_that_work_and_lanes_that_do_not(tmp_path: Path, case: str, expected: list[str]) -> None:
    packets = {name: packets_of(tmp_path, data) for name, data in watched()[case].files.items()}
    left, entered = judge(packets[CNIC], cargo_of)
    entering = [packet for side in (DRAM_SIDE, HBM_SIDE) for packet in packets[side] if packet.leaving]
    queue = waits(entering, [packet for packet in packets[CNIC] if packet.leaving])
    found = complaints(left, entered, queue)
    assert found[:1] == expected, (left, entered, queue)
