"""Plain TCP streams between endpoints, for calibration and tests: all flows of a set in one thread, one poll loop.

Made for measuring on few cores: the sender writes one big buffer again and again, the receiver reads into one big
buffer, and both are bounded by explicit socket buffers so that no more than those are ever queued in the network.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.errors import HostError
from testbed.fabric.live.addresses import Endpoint
from testbed.fabric.live.network import Network

WINDOW_BYTES = 1 << 17
_CHUNK_BYTES = 1 << 18
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A stream from one endpoint to another; ``tos`` is the IP TOS byte; ``size_bytes`` 0 means until time is up."""

    name: str
    source: str
    destination: str
    tos: int = 0
    window_bytes: int = WINDOW_BYTES
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowResult:
    """What a receiver saw after the warm-up: payload bytes between its first and last read, and the time between."""

    name: str
    payload_bytes: int
    seconds: float
    total_bytes: int

    @property
    def payload_bps(self) -> float:
        """Payload rate in steady state."""
        return self.payload_bytes * 8 / self.seconds if self.seconds > 0 else 0.0


class _Stream:
    """Both ends of one flow."""

    def __init__(self, network: Network, flow: Flow) -> None:
        self.flow = flow
        self.sent = self.received = self.counted = 0
        self.first_s = self.last_s = 0.0
        source, destination = network.endpoints[flow.source], network.endpoints[flow.destination]
        listener = _open(network, destination, flow)
        self.sender = _open(network, source, flow)
        try:
            listener.listen(1)
            listener.settimeout(_CONNECT_S)
            self.sender.settimeout(_CONNECT_S)
            self.sender.connect((destination.address, listener.getsockname()[1]))
            self.receiver, _ = listener.accept()
        except OSError as error:
            self.sender.close()
            raise HostError(f"no connection from {flow.source} to {flow.destination}: {error}.") from error
        finally:
            listener.close()
        self.sender.setblocking(False)
        self.receiver.setblocking(False)

    def send(self, data: memoryview) -> bool:
        """Send what fits; False when all of a sized flow is sent."""
        left = self.flow.size_bytes - self.sent if self.flow.size_bytes else len(data)
        self.sent += self.sender.send(data[:left])
        if self.flow.size_bytes and self.sent >= self.flow.size_bytes:
            self.sender.shutdown(socket.SHUT_WR)
            return False
        return True

    def receive(self, buffer: bytearray, now_s: float, count_from_s: float) -> bool:
        """Read what is there; False at the end of the stream. The first counted read only starts the clock."""
        size = self.receiver.recv_into(buffer)
        self.received += size
        if size and now_s >= count_from_s:
            if self.first_s:
                self.counted += size
                self.last_s = now_s
            else:
                self.first_s = self.last_s = now_s
        return size > 0

    def result(self) -> FlowResult:
        """The figures so far."""
        return FlowResult(
            name=self.flow.name,
            payload_bytes=self.counted,
            seconds=self.last_s - self.first_s,
            total_bytes=self.received,
        )

    def close(self) -> None:
        """Close both ends."""
        self.sender.close()
        self.receiver.close()


def _open(network: Network, endpoint: Endpoint, flow: Flow) -> socket.socket:
    with network.inside(endpoint.host):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, endpoint.device.encode())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, flow.window_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, flow.window_bytes)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, flow.tos)
    sock.bind((endpoint.address, 0))
    return sock


def run_streams(network: Network, flows: Sequence[Flow], *, seconds: float, warm_up_s: float) -> dict[str, FlowResult]:
    """Run all flows at once; sized flows until they are done, the others for ``seconds``.

    Raises:
        HostError: a connection cannot be made, or a sized flow stalls.
    """
    streams: list[_Stream] = []
    try:
        for flow in flows:
            streams.append(_Stream(network, flow))
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                selector.register(stream.sender, selectors.EVENT_WRITE, stream)
                selector.register(stream.receiver, selectors.EVENT_READ, stream)
            _pump(selector, streams, seconds, warm_up_s)
        return {stream.flow.name: stream.result() for stream in streams}
    finally:
        for stream in streams:
            stream.close()


def _pump(selector: selectors.BaseSelector, streams: Sequence[_Stream], seconds: float, warm_up_s: float) -> None:
    data, buffer = memoryview(bytes(_CHUNK_BYTES)), bytearray(_CHUNK_BYTES)
    start = time.monotonic()
    open_sized = sum(1 for stream in streams if stream.flow.size_bytes)
    only_sized = open_sized == len(streams)
    while True:
        events = selector.select(1.0)
        now = time.monotonic()
        if (not only_sized and now >= start + seconds and not open_sized) or (only_sized and not open_sized):
            return
        if not events:
            raise HostError("a stream stands still: no byte passed within a second.")
        for key, mask in events:
            stream: _Stream = key.data
            if mask & selectors.EVENT_WRITE:
                if not stream.send(data):
                    selector.unregister(stream.sender)
            elif not stream.receive(buffer, now, start + warm_up_s):
                selector.unregister(stream.receiver)
                open_sized -= 1
