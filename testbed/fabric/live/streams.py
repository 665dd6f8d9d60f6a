"""Plain TCP streams between endpoints, for calibration and tests.

Made for measuring on few cores: a sender is a thread that blocks in the kernel and writes one big buffer again and
again, all receivers share one poll loop and one big buffer, and a read is stamped when it returns. Explicit socket
buffers bound what a stream may have in the network.
"""

from __future__ import annotations

import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from testbed.errors import HostError
from testbed.fabric.live.addresses import Endpoint
from testbed.fabric.live.network import Network

WINDOW_BYTES = 1 << 17
_CHUNK_BYTES = 1 << 18
_CONNECT_S = 5.0
_STALL_S = 2.0
_BYTES_RETRANS_OFFSET = 208  # tcpi_bytes_retrans in struct tcp_info
_TCP_INFO_BYTES = _BYTES_RETRANS_OFFSET + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A stream from one endpoint to another; ``tos`` is the IP TOS byte; ``size_bytes`` 0 means until time is up.

    Streams with the same ``name`` are measured as one: what comes through a shared link in turns is even in sum only.
    """

    name: str
    source: str
    destination: str
    tos: int = 0
    window_bytes: int = WINDOW_BYTES
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowResult:
    """What the receivers of a name saw after the warm-up.

    ``mean_bps`` is payload between the first and the last read by the time between. ``steady_bps`` is the interquartile
    mean of the rates over all thirds of that time: a stall of the host in one place (the processor taken away for some
    milliseconds) moves the mean, not this, and averaging evens out that bytes arrive in super-packets.
    ``retransmitted_bytes`` crossed the links a second time: TCP's timers take a stall of the host for a loss.
    """

    name: str
    total_bytes: int
    mean_bps: float
    steady_bps: float
    retransmitted_bytes: int


class _Tally:
    """What arrived under one name: when and how much so far."""

    def __init__(self) -> None:
        self.total = self.retransmitted = 0
        self.times: list[float] = []
        self.totals: list[int] = []

    def mark(self, now_s: float) -> None:
        """Take a reading, after every readable stream was read: what still waits in a socket would count too late."""
        if not self.totals or self.totals[-1] != self.total:
            self.times.append(now_s)
            self.totals.append(self.total)

    def result(self, name: str) -> FlowResult:
        """The figures so far. The first reading only starts the clock: how long its bytes had been due is unknown."""
        reads = len(self.times)
        span = max(reads // 3, 1)
        rates = sorted(self._rate_bps(i, i + span) for i in range(reads - span))
        middle = rates[len(rates) // 4 : len(rates) - len(rates) // 4]
        return FlowResult(
            name=name,
            total_bytes=self.total,
            mean_bps=self._rate_bps(0, reads - 1) if middle else 0.0,
            steady_bps=sum(middle) / len(middle) if middle else 0.0,
            retransmitted_bytes=self.retransmitted,
        )

    def _rate_bps(self, begin: int, end: int) -> float:
        seconds = self.times[end] - self.times[begin]
        return (self.totals[end] - self.totals[begin]) * 8 / seconds if seconds > 0 else 0.0


class _Stream:
    """Both ends of one flow."""

    def __init__(self, network: Network, flow: Flow, tally: _Tally) -> None:
        self.flow = flow
        self.tally = tally
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
        self.sender.settimeout(None)
        self.receiver.setblocking(False)

    def send(self) -> None:
        """The sender's thread: write until all is sent or the socket is closed under it."""
        data = memoryview(bytes(_CHUNK_BYTES))
        left = self.flow.size_bytes or sys.maxsize
        with suppress(OSError):
            while left > 0:
                left -= self.sender.send(data[:left])
            self.sender.shutdown(socket.SHUT_WR)

    def receive(self, buffer: bytearray) -> bool:
        """Read what is there; False at the end of the stream."""
        size = self.receiver.recv_into(buffer)
        self.tally.total += size
        return size > 0

    def count_retransmissions(self) -> None:
        """Ask the sender's TCP, while it still exists."""
        info = self.sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) == _TCP_INFO_BYTES:  # Linux 4.19 or later
            self.tally.retransmitted += struct.unpack_from("=Q", info, _BYTES_RETRANS_OFFSET)[0]

    def stop(self) -> None:
        """Wake the sender's thread, whatever it is blocked in."""
        with suppress(OSError):
            self.sender.shutdown(socket.SHUT_RDWR)

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
    tallies = {flow.name: _Tally() for flow in flows}
    try:
        for flow in flows:
            streams.append(_Stream(network, flow, tallies[flow.name]))
        threads = [threading.Thread(target=stream.send, daemon=True) for stream in streams]
        try:
            for thread in threads:
                thread.start()
            _pump(streams, seconds, warm_up_s)
        finally:
            for stream in streams:
                stream.stop()
            for thread in threads:
                thread.join()
        for stream in streams:
            stream.count_retransmissions()
        return {name: tally.result(name) for name, tally in tallies.items()}
    finally:
        for stream in streams:
            stream.close()


def _pump(streams: Sequence[_Stream], seconds: float, warm_up_s: float) -> None:
    """Receive until all sized streams have ended and the others had their time."""
    buffer = bytearray(_CHUNK_BYTES)
    start = time.monotonic()
    sized = sum(1 for stream in streams if stream.flow.size_bytes)
    end = start if sized == len(streams) else start + seconds
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.receiver, selectors.EVENT_READ, stream)
        while sized or time.monotonic() < end:
            events = selector.select(_STALL_S)
            if not events:
                raise HostError(f"a stream stands still: no byte passed within {_STALL_S:.0f} s.")
            for key, _ in events:
                if not key.data.receive(buffer):
                    selector.unregister(key.fileobj)
                    sized -= 1
            if (now := time.monotonic()) >= start + warm_up_s:
                for tally in {key.data.tally for key, _ in events}:
                    tally.mark(now)
