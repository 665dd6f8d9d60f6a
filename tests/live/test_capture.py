"""A CNIC's wire, judged from a capture on it: lanes, acknowledgements and bytes, without asking our own counters first.

The socket is a plain AF_PACKET one (scapy's own sniffers look interfaces up in the namespace they were imported in);
scapy takes the packets apart.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether

from testbed.fabric.live.counters import read_counters
from testbed.fabric.live.lanes import EXPEDITED_FORWARDING, SMALL_PACKET_BYTES
from testbed.fabric.live.network import Network
from testbed.fabric.live.streams import Flow, run_streams
from tests.live.sandboxed import in_sandbox, small_spec

pytestmark = pytest.mark.live

KV_BYTES, HIGH_BYTES = 1_500_000, 600_000
MOST_PACKETS = 20_000
HEADERS_BYTES = 128
NOT_PERMITTED = "AF_PACKET: "
_ALL_PROTOCOLS = 0x0003
_PACKET_OUTGOING = 4
_SOL_PACKET, _PACKET_STATISTICS = 263, 6

Sighting = tuple[bool, bytes]
"""Whether a packet left (or entered), and its headers."""


class Packet:
    """What the headers of one captured packet (or super-packet) say."""

    def __init__(self, sighting: Sighting) -> None:
        self.left, headers = sighting
        ip = Ether(headers)[IP]
        self.ends = (ip.src, ip.dst)
        self.tos = ip.tos
        self.ip_bytes = ip.len
        self.payload_bytes = ip.len - 4 * ip.ihl - 4 * ip[TCP].dataofs


@contextmanager
def capture(network: Network, host: str, device: str) -> Iterator[Callable[[], list[Sighting]]]:
    """What crosses a device, both ways; the list is complete once the function has returned it."""
    with network.inside(host):
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # deaf until it is bound
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
    sock.bind((device, _ALL_PROTOCOLS))
    sock.settimeout(0.2)
    seen: list[Sighting] = []
    over = threading.Event()

    def listen() -> None:
        while len(seen) < MOST_PACKETS:
            try:
                headers, (_, _, kind, *_) = sock.recvfrom(HEADERS_BYTES)
            except TimeoutError:
                if over.is_set():
                    return
                continue
            seen.append((kind == _PACKET_OUTGOING, headers))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()

    def finish() -> list[Sighting]:
        over.set()
        thread.join()
        _, lost = struct.unpack("=II", sock.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        assert lost == 0, "the capture has holes"
        assert len(seen) < MOST_PACKETS
        return seen

    try:
        yield finish
    finally:
        over.set()
        thread.join()
        sock.close()


def watch_a_cnic() -> tuple[list[Sighting], dict[str, int]] | str:
    """In the sandbox: KV from node DRAM to HBM, and a model's stream out of the same CNIC. Captured, and counted."""
    flows = [
        Flow(name="kv", source="pe0.cnic0", destination="pe0gpu0.cnic", size_bytes=KV_BYTES),
        Flow(
            name="model", source="pe0gpu0.cnic", destination="pe0gpu1.cnic",
            tos=EXPEDITED_FORWARDING, size_bytes=HIGH_BYTES,
        ),
    ]  # fmt: skip
    with Network(small_spec()) as network:
        try:
            with capture(network, "pe0", "cnic0") as finish:
                run_streams(network, flows, seconds=0, warm_up_s=0)
                seen = finish()
        except PermissionError as error:
            return f"{NOT_PERMITTED}{error}"
        counted = read_counters(network)
    return seen, {way: counted[f"pe0.cnic0.{way}"].data.payload_bytes for way in ("read", "write")}


def test_a_capture_agrees_with_the_lanes_and_the_counters() -> None:
    found = in_sandbox(watch_a_cnic)
    if isinstance(found, str):
        pytest.skip(found)
    packets, counted = [Packet(sighting) for sighting in found[0]], found[1]
    endpoints = Network(small_spec()).endpoints
    dram, hbm, other = (endpoints[name].address for name in ("pe0.cnic0", "pe0gpu0.cnic", "pe0gpu1.cnic"))
    data = [packet for packet in packets if packet.payload_bytes]

    assert {packet.tos >> 2 for packet in data if packet.ends == (dram, hbm)} == {0}
    assert {packet.tos for packet in data if packet.ends == (hbm, other)} == {EXPEDITED_FORWARDING}
    assert {packet.ends for packet in data} == {(dram, hbm), (hbm, other)}

    pure = [packet for packet in packets if not packet.payload_bytes]
    assert pure
    assert max(packet.ip_bytes for packet in pure) < SMALL_PACKET_BYTES

    left, entered = ([packet for packet in data if packet.left is way] for way in (True, False))
    local = [sum(p.payload_bytes for p in side if p.ends == (dram, hbm)) for side in (left, entered)]
    assert local[0] == local[1] >= KV_BYTES, "what leaves DRAM for HBM comes back in by the same CNIC"
    assert not [p for p in entered if p.ends == (hbm, other)], "what goes to another GPU does not"
    assert sum(p.payload_bytes for p in left) == pytest.approx(counted["read"], rel=0.005)
    assert sum(p.payload_bytes for p in entered) == pytest.approx(counted["write"], rel=0.005)
