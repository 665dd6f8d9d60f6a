"""The exchange plane of one engine: shards of collectives, real bytes, in the high lane of its CNIC.

Expert-parallel dispatch and combine (paper section 5.1: model traffic) leave the sender's HBM through its paired CNIC
and enter the peer's HBM through the peer's. Both ends of a connection are marked DSCP EF, so that every packet with
data is in the high lane. There is one connection per direction and peer, opened at the start, before anything is timed.

Invariants:

* No grants: the memory is set aside (DeepEP), so what a peer may have under way is bounded by the protocol: a peer is
  at most one collective ahead, because its next needs our shard of the one before. Both sides check it.
* A shard counts when all of it is there and its seal is right. Payload goes into a scratch buffer that nobody reads.
* A connection that is lost, out of step or carries wrong bytes is an error with the peer's name: a collective has no
  second try.

A shard's latency ends when the kernel had its last byte (the packet's time stamp), not when this process got round to
reading it: that is host time, not the network's, and counted apart.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import xxhash

from testbed.errors import BugError, PeerError, TestbedError
from testbed.fabric.live.lanes import EXPEDITED_FORWARDING
from testbed.fabric.live.sockets import (
    EXCHANGE_PORT,
    NO_MORE_YET,
    SO_TIMESTAMPNS,
    STAMP_CONTROL_BYTES,
    Endpoint,
    SocketOptions,
    connecting_socket,
    describe,
    listening_socket,
    stamp_ns,
)
from testbed.fabric.live.wire import (
    HELLO_BYTES,
    ShardHead,
    ShardReader,
    check_hello,
    pack_hello,
    pack_shard,
    seal_shard,
)
from testbed.ids import cnic_hbm_endpoint
from testbed.protocol.machine import Event, Exchange, ExchangeTag, ShardArrived

MAX_SHARD_BYTES = 64 * 1024 * 1024
_MOST_UNDER_WAY = 2  # a dispatch that the kernel has not taken whole, and the combine after it
_SCRATCH_BYTES = 256 * 1024
_PATTERN = memoryview(random.Random(2602_21548).randbytes(256 * 1024))  # what is sent; made before roles are forked
_STRIDE = 7919  # bytes by which the payloads of consecutive collectives are shifted
_LOOKS = 16


@dataclass(slots=True)
class ExchangeCounters:
    """What one engine's collectives have moved. Bytes are payload, without heads and seals."""

    shards_sent: int = 0
    bytes_sent: int = 0
    shards_arrived: int = 0
    bytes_arrived: int = 0
    peak_under_way: int = 0  # shards to all peers that the kernel had not taken whole
    late_ns: int = 0  # sum of how long shards lay in the kernel before they were read
    late_max_ns: int = 0
    connections_refused: int = 0  # not a peer


@dataclass(slots=True)
class _Peer:
    """An engine of the group, as this one sees it."""

    name: str
    outgoing: _Outgoing | None = None
    connected: bool = False  # its connection to us
    posted: int = 0
    arrived: int = 0
    last: ExchangeTag | None = None


class ExchangePlane:
    """Posts shards to ``peers`` (role names) and delivers those that arrive.

    ``deliver`` must only queue. ``fail`` is told, once, what went wrong. Create it inside a running event loop; then
    ``listen``, and ``connect`` when every peer listens.
    """

    def __init__(
        self,
        role: str,
        layout: int,
        peers: Iterable[str],
        endpoints: Mapping[str, Endpoint],
        deliver: Callable[[Event], None],
        fail: Callable[[TestbedError], None],
        *,
        options: SocketOptions,
        log: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._layout = layout
        self._endpoints = endpoints
        self._deliver = deliver
        self._fail = fail
        self._log = log
        self._listener: socket.socket | None = None
        self._incoming: set[_Incoming] = set()
        self._over = False
        self._shift = xxhash.xxh3_64_intdigest(role.encode())  # no two engines send alike
        self.role = role
        self.clock_offset_ns = _clock_offset_ns()
        self.options = replace(options, port=EXCHANGE_PORT)
        self.hello = pack_hello(role, layout)
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.peers = {name: _Peer(name) for name in peers}
        self.counters = ExchangeCounters()

    def endpoint(self, role: str) -> Endpoint:
        """The HBM side of an engine's CNIC."""
        return self._endpoints[cnic_hbm_endpoint(role)]

    def listen(self) -> None:
        """Let peers connect.

        Raises:
            HostError: the address or the device is not there, or is taken.
        """
        self._listener = sock = listening_socket(self.endpoint(self.role), self.options, EXPEDITED_FORWARDING)
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)  # what is accepted inherits it
        self._loop.add_reader(sock, self._accept, sock)

    def connect(self) -> None:
        """Open the connection to every peer; shards posted before it is open wait for it."""
        for peer in self.peers.values():
            peer.outgoing = _Outgoing(self, peer)

    def post(self, exchange: Exchange) -> None:
        """Send every peer its shard.

        Raises:
            BugError: a shard for an engine that is no peer, a second one, or one that is too large.
            PeerError: a peer takes nothing.
        """
        digests: dict[int, bytes] = {}
        for name, size in exchange.shards:
            peer = self.peers.get(name)
            if peer is None or peer.outgoing is None:
                raise BugError(f"{self.role} exchanges with {name}, which it has no connection to")
            if size > MAX_SHARD_BYTES:
                raise BugError(f"{self.role} has a shard of {size} bytes, above the {MAX_SHARD_BYTES} set aside")
            payload = self._payload(exchange.tag, size)
            if size not in digests:
                digests[size] = _digest(payload)
            head = pack_shard(ShardHead(exchange.tag, exchange.tokens, size, time.monotonic_ns()))
            peer.posted += 1
            self.counters.shards_sent += 1
            self.counters.bytes_sent += size
            peer.outgoing.post([memoryview(head), *payload, memoryview(seal_shard(head, digests[size]))])
        under_way = sum(peer.outgoing.under_way for peer in self.peers.values() if peer.outgoing)
        self.counters.peak_under_way = max(self.counters.peak_under_way, under_way)

    def close(self) -> None:
        """Close everything, without a word."""
        self._over = True
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for peer in self.peers.values():
            if peer.outgoing is not None:
                peer.outgoing.close()
        for incoming in list(self._incoming):
            incoming.close()

    # --- what connections tell ----------------------------------------------------------------------------------

    def failed(self, peer: str, reason: str) -> None:
        """A connection is of no more use. Others stay open until this role has said why it dies: else its peers, who
        lose it, might be heard first.
        """
        if not self._over:
            self._over = True
            self._fail(PeerError(f"{self.role}: the exchange with {peer} failed: {reason}"))

    def refused(self, incoming: _Incoming, reason: str) -> None:
        """Somebody who is no peer has connected."""
        self.counters.connections_refused += 1
        self._log(f"{self.role}: a connection for collectives refused: {reason}")
        incoming.close()

    def welcome(self, hello: memoryview) -> _Peer:
        """Who has connected.

        Raises:
            PeerError: no peer, or one that is connected already.
        """
        name = check_hello(hello, self._layout)
        peer = self.peers.get(name)
        if peer is None or peer.connected:
            raise PeerError(f"{name} " + ("has connected already" if peer else "is not of this group"))
        peer.connected = True
        return peer

    def arrived(self, peer: _Peer, shard: ShardHead, arrived_ns: int, late_ns: int) -> None:
        """A shard is there, and right.

        Raises:
            PeerError: it is not the peer's turn.
        """
        if peer.last is not None and shard.tag <= peer.last:
            raise PeerError(f"a shard of {shard.tag} after one of {peer.last}")
        peer.last = shard.tag
        peer.arrived += 1
        if peer.arrived > peer.posted + 1:
            raise PeerError(f"it is more than one collective ahead, at {shard.tag}")
        counters = self.counters
        counters.shards_arrived += 1
        counters.bytes_arrived += shard.size_bytes
        counters.late_ns += late_ns
        counters.late_max_ns = max(counters.late_max_ns, late_ns)
        self._deliver(ShardArrived(peer.name, shard.tag, shard.tokens, arrived_ns - shard.posted_ns))

    # --- inside --------------------------------------------------------------------------------------------------

    def _payload(self, tag: ExchangeTag, size: int) -> list[memoryview]:
        """``size`` bytes that differ from those of the collectives around it and of other engines."""
        number = 2 * (tag.round * 1009 + tag.part) + tag.combine
        at = (self._shift + number * _STRIDE) % len(_PATTERN)
        buffers: list[memoryview] = []
        while size:
            part = _PATTERN[at : at + size]
            buffers.append(part)
            size -= len(part)
            at = 0
        return buffers

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except NO_MORE_YET:
            return
        except OSError as error:
            self._log(f"{self.role}: a connection for collectives could not be accepted: {error}")
            return
        sock.setblocking(False)
        self._incoming.add(_Incoming(self, sock, address[0], self._incoming.discard))


def _digest(payload: Iterable[memoryview]) -> bytes:
    hasher = xxhash.xxh3_64()
    for part in payload:
        hasher.update(part)
    return hasher.digest()


class _Outgoing:
    """The connection to one peer: shards leave in order, each as soon as the kernel takes it."""

    def __init__(self, plane: ExchangePlane, peer: _Peer) -> None:
        self._loop = asyncio.get_running_loop()
        self._plane = plane
        self._peer = peer.name
        self._shards: deque[list[memoryview]] = deque()  # what of each shard the kernel has not taken
        self._writing = True  # the kernel will tell when it takes more; at first, when it has connected
        self._open = True
        options = plane.options
        source, destination = plane.endpoint(plane.role), plane.endpoint(peer.name)
        try:
            self._socket = connecting_socket(source, destination, options, EXPEDITED_FORWARDING)
        except OSError as error:
            raise PeerError(f"{plane.role} cannot connect to {peer.name}: {error}") from error
        self._timeout = self._loop.call_later(options.connect_timeout_s, self._lost, "no answer to the connect")
        self._loop.add_writer(self._socket, self._on_connected)

    @property
    def under_way(self) -> int:
        """Shards that the kernel has not taken whole."""
        return len(self._shards)

    def post(self, shard: list[memoryview]) -> None:
        """Send a shard after those posted before.

        Raises:
            PeerError: the peer takes nothing.
        """
        self._shards.append(shard)
        if len(self._shards) > _MOST_UNDER_WAY:
            raise PeerError(f"{self._peer} has not taken the last {_MOST_UNDER_WAY} shards of {self._plane.role}")
        if not self._writing:
            self._flush()

    def close(self) -> None:
        """Close from this side."""
        if self._open:
            self._open = False
            self._timeout.cancel()
            self._loop.remove_writer(self._socket)
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._shards.clear()

    def _on_connected(self) -> None:
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._lost(f"cannot connect: {describe(error)}")
            return
        self._timeout.cancel()
        self._loop.add_reader(self._socket, self._on_readable)
        self._shards.appendleft([memoryview(self._plane.hello)])
        self._loop.add_writer(self._socket, self._flush)
        self._flush()

    def _on_readable(self) -> None:
        """The peer says nothing here: it is gone."""
        try:
            data = self._socket.recv(1)
        except NO_MORE_YET:
            return
        except OSError as error:
            self._lost(f"connection lost: {error}")
            return
        self._lost("it wrote where it only reads" if data else "connection closed by the peer")

    def _flush(self) -> None:
        """Give the kernel what it takes now; its buffer is bounded, so this does not hold up the event loop."""
        try:
            while self._shards:
                if not _send(self._socket, self._shards[0]):
                    break
                self._shards.popleft()
        except NO_MORE_YET:
            pass
        except OSError as error:
            self._lost(f"connection lost: {error}")
            return
        busy = bool(self._shards)
        if busy != self._writing:
            self._writing = busy
            if busy:
                self._loop.add_writer(self._socket, self._flush)
            else:
                self._loop.remove_writer(self._socket)

    def _lost(self, reason: str) -> None:
        if self._open:
            self.close()
            self._plane.failed(self._peer, reason)


def _send(sock: socket.socket, shard: list[memoryview]) -> bool:
    """One system call; drops from ``shard`` what the kernel took. Result: whether that was all."""
    sent = sock.sendmsg(shard)
    while shard and sent >= len(shard[0]):
        sent -= len(shard.pop(0))
    if shard:
        shard[0] = shard[0][sent:]
    return not shard


@dataclass(slots=True, eq=False)
class _Incoming:
    """A connection that a peer has opened: what comes is cut into shards as it comes."""

    plane: ExchangePlane
    sock: socket.socket
    address: str
    on_closed: Callable[[_Incoming], None]
    peer: _Peer | None = None
    open: bool = True
    lowat: int = 1
    hello: bytearray = field(default_factory=bytearray)
    reader: ShardReader = field(default_factory=lambda: ShardReader(MAX_SHARD_BYTES))

    def __post_init__(self) -> None:
        asyncio.get_running_loop().add_reader(self.sock, self._on_readable)

    def close(self) -> None:
        """Close from this side."""
        if self.open:
            self.open = False
            asyncio.get_running_loop().remove_reader(self.sock)
            self.sock.close()
            self.on_closed(self)

    def _on_readable(self) -> None:
        """One read, however much there is: the event loop comes back."""
        scratch = self.plane.scratch
        try:
            count, control, _, _ = self.sock.recvmsg_into([scratch], STAMP_CONTROL_BYTES)
            if count:
                self._take(scratch[:count], control)
                self._tune_wakeups()
                return
            reason = "connection closed by the peer"
        except NO_MORE_YET:
            return
        except OSError as error:
            reason = f"connection lost: {error}"
        except PeerError as error:
            reason = str(error)
        if self.peer is None:
            self.plane.refused(self, f"{self.address}: {reason}")
        else:
            asyncio.get_running_loop().remove_reader(self.sock)
            self.plane.failed(self.peer.name, reason)

    def _take(self, data: memoryview, control: list[tuple[int, int, bytes]]) -> None:
        if self.peer is None:
            lacking = HELLO_BYTES - len(self.hello)
            self.hello += data[:lacking]
            data = data[lacking:]
            if len(self.hello) < HELLO_BYTES:
                return
            self.peer = self.plane.welcome(memoryview(self.hello))
        shards = self.reader.feed(data)
        if shards:
            now_ns = time.monotonic_ns()
            kernel_ns = stamp_ns(control) - self.plane.clock_offset_ns
            for shard in shards:  # a clock that was set since is not believed
                arrived_ns = kernel_ns if shard.posted_ns <= kernel_ns <= now_ns else now_ns
                self.plane.arrived(self.peer, shard, arrived_ns, now_ns - arrived_ns)

    def _tune_wakeups(self) -> None:
        """Wake when the rest of a shard is there, or a good part of it, not for each packet."""
        lowat = min(max(self.reader.due_bytes, 1), self.plane.options.receive_buffer_bytes // 4)
        if lowat != self.lowat and self.open:
            self.lowat = lowat
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lowat)


def _clock_offset_ns() -> int:
    """What the clock of packets (since 1970) is ahead of the monotonic one. Of several looks, the least disturbed."""
    looks = []
    for _ in range(_LOOKS):
        before_ns, real_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        looks.append((after_ns - before_ns, real_ns - (before_ns + after_ns) // 2))
    return min(looks)[1]
