"""Echo requests between many pairs of endpoints at once, in one process: what ``pingall`` needs.

A process per ping costs tens of milliseconds; a cluster of 57 hosts has 3,192 ordered pairs.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Sequence

from testbed.fabric.live.addresses import Endpoint
from testbed.fabric.live.network import Network
from testbed.fabric.live.node_tools import ICMP_ECHO, ICMP_ECHO_REPLY, checksum

_PAYLOAD = bytes(56)
_BURST = 64  # requests under way at a time: more would measure this process, not the network


def ping_all(network: Network, pairs: Sequence[tuple[Endpoint, Endpoint]], patience_s: float) -> list[float | None]:
    """Round-trip time in milliseconds for each (source, destination); None where no answer came in time."""
    sockets: dict[str, socket.socket] = {}
    try:
        for source, _ in pairs:
            if source.name not in sockets:
                with network.inside(source.host):
                    sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, source.device.encode())
                sock.bind((source.address, 0))
                sockets[source.name] = sock
        trips: list[float | None] = []
        with selectors.DefaultSelector() as selector:
            for sock in sockets.values():
                selector.register(sock, selectors.EVENT_READ)
            for begin in range(0, len(pairs), _BURST):
                trips += _burst(selector, sockets, pairs[begin : begin + _BURST], patience_s)
        return trips
    finally:
        for sock in sockets.values():
            sock.close()


def _burst(
    selector: selectors.BaseSelector,
    sockets: dict[str, socket.socket],
    pairs: Sequence[tuple[Endpoint, Endpoint]],
    patience_s: float,
) -> list[float | None]:
    trips: list[float | None] = [None] * len(pairs)
    sent: dict[tuple[str, int], tuple[int, float]] = {}
    for k, (source, destination) in enumerate(pairs):
        head = struct.pack("!BBHHH", ICMP_ECHO, 0, 0, 0, k)
        head = struct.pack("!BBHHH", ICMP_ECHO, 0, checksum(head + _PAYLOAD), 0, k)
        try:
            sockets[source.name].sendto(head + _PAYLOAD, (destination.address, 0))
        except OSError:
            continue  # no route or interface down: no answer
        sent[destination.address, k] = k, time.monotonic()
    deadline = time.monotonic() + patience_s
    while sent and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            packet = key.fileobj.recv(2048)  # type: ignore[union-attr]
            now = time.monotonic()
            kind, _, _, _, sequence = struct.unpack_from("!BBHHH", packet, (packet[0] & 15) * 4)
            due = sent.pop((socket.inet_ntoa(packet[12:16]), sequence), None) if kind == ICMP_ECHO_REPLY else None
            if due is not None:
                trips[due[0]] = (now - due[1]) * 1e3
    return trips
