"""The control plane of one role: small messages over TCP, first in first out per peer.

A role dials each peer it sends to, lazily, and listens for those that send to it; what one role sends to another goes
over one connection, in order. Hellos pass both ways first: another protocol version or block layout is refused there,
with both fingerprints named (the `layout-changed` fault). Messages sent together leave together.

A lost connection is reported through ``on_peer_lost`` and what was queued on it is gone: the machines' deadlines
decide what that means, a transport that repeats silently would only hide it. The next send dials again.
Nothing a peer sends makes memory grow past one frame, and nothing a peer fails to read past ``_MAX_UNSENT_BYTES``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from testbed.errors import BugError, HostError, PeerError, TestbedError
from testbed.protocol.codec import FrameReader, check_hello, encode, hello
from testbed.protocol.messages import Message

_MAX_UNSENT_BYTES = 64 * 1024 * 1024
_MAX_INBOUND = 4096
_CONNECT_TIMEOUT_S = 5.0
_HELLO_TIMEOUT_S = 5.0

Address = tuple[str, int]
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ControlCounters:
    """What one role's control plane has seen."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    peers_refused: int = 0  # another version or layout, an unknown role, malformed frames
    peers_lost: int = 0
    peak_unsent_bytes: int = 0


class ControlPlane:
    """Sends to and receives from every role of ``address_book`` (role name to IPv4 address and port).

    ``deliver(sender, message)`` must only queue. Create it inside a running event loop.
    """

    def __init__(
        self,
        role: str,
        layout_fingerprint: int,
        address_book: Mapping[str, Address],
        deliver: Callable[[str, Message], None],
        *,
        on_peer_lost: Callable[[str, str], None] | None = None,
        log: Callable[[str], None] = _log.warning,
    ) -> None:
        self.role = role
        self.layout = layout_fingerprint
        self.address_book = address_book
        self.deliver = deliver
        self.log = log
        self.counters = ControlCounters()
        self._on_peer_lost = on_peer_lost
        self._dialled: dict[str, _Dialled] = {}
        self._accepted: dict[str, _Accepted] = {}
        self._strangers: set[_Accepted] = set()  # accepted, hello pending
        self._server: asyncio.Server | None = None
        self._closing = False

    async def listen(self) -> None:
        """Accept peers at the own address.

        Raises:
            HostError: the address is not there, or is taken.
        """
        address, port = self.address_book[self.role]
        try:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: _Accepted(self), address, port, backlog=256)
        except OSError as error:
            raise HostError(f"{self.role} cannot listen at {address}:{port}: {error}") from error

    def send(self, to: str, message: Message) -> None:
        """Queue a message; it leaves in this pass of the event loop, after those queued before.

        Raises:
            BugError: no such role.
            PeerError: the message is larger than any peer would accept.
        """
        peer = self._dialled.get(to)
        if peer is None:
            if to not in self.address_book:
                raise BugError(f"{self.role} sends a {type(message).__name__} to {to!r}, no role of the cluster")
            peer = self._dialled[to] = _Dialled(self, to)
        peer.send(encode(message))
        self.counters.messages_sent += 1

    async def close(self) -> None:
        """Hand queued messages to the kernel, close all connections."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for peer in list(self._dialled.values()):
            peer.close("closed by this side")
        for accepted in [*self._accepted.values(), *self._strangers]:
            accepted.close()
        await asyncio.sleep(0)  # let the transports close

    # --- called by the connections -------------------------------------------------------------------------------

    def lost(self, peer: _Dialled, reason: str) -> None:
        """A dialled connection is no more."""
        if self._dialled.get(peer.role) is peer:
            del self._dialled[peer.role]
        if not self._closing:
            self.counters.peers_lost += 1
            if self._on_peer_lost is not None:
                self._on_peer_lost(peer.role, reason)

    def arrived(self, connection: _Accepted) -> bool:
        """A stranger has connected; False: there are too many."""
        if len(self._strangers) + len(self._accepted) >= _MAX_INBOUND:
            return False
        self._strangers.add(connection)
        return True

    def accept(self, connection: _Accepted, message: Message) -> str:
        """Judge a stranger's hello. Result: its role; an older connection of the same role is closed.

        Raises:
            PeerError: refused.
        """
        role = check_hello(message, layout=self.layout)
        if role not in self.address_book:
            raise PeerError(f"{role!r} is no role of this cluster")
        self._strangers.discard(connection)
        older = self._accepted.get(role)
        self._accepted[role] = connection
        if older is not None:
            older.close()
        return role

    def departed(self, connection: _Accepted) -> None:
        """An accepted connection is no more."""
        self._strangers.discard(connection)
        if connection.peer is not None and self._accepted.get(connection.peer) is connection:
            del self._accepted[connection.peer]


class _Dialled(asyncio.Protocol):
    """The connection that carries this role's messages to one peer."""

    def __init__(self, plane: ControlPlane, role: str) -> None:
        self.role = role
        self._plane = plane
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(max_frame_bytes=4096)  # only a hello ever comes back
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._flush_due = False
        self._ready = False
        self._over = False
        self._transport: asyncio.Transport | None = None
        self._task = self._loop.create_task(self._dial())

    async def _dial(self) -> None:
        address, port = self._plane.address_book[self.role]
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._loop.create_connection(lambda: self, address, port)
        except TimeoutError:
            self.close(f"no answer from {address}:{port}")
        except OSError as error:
            self.close(f"cannot connect: {error}")

    def send(self, frame: bytes) -> None:
        """Queue one frame."""
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        if self._ready and not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)
        elif self._queued_bytes > _MAX_UNSENT_BYTES:
            self.close(f"does not answer, {self._queued_bytes} bytes unsent")

    def _flush(self) -> None:
        self._flush_due = False
        transport, counters = self._transport, self._plane.counters
        if not self._queue or self._over or transport is None:
            return
        transport.write(b"".join(self._queue))
        counters.bytes_sent += self._queued_bytes
        self._queue.clear()
        self._queued_bytes = 0
        unsent = transport.get_write_buffer_size()
        counters.peak_unsent_bytes = max(counters.peak_unsent_bytes, unsent)
        if unsent > _MAX_UNSENT_BYTES:
            self.close(f"does not read, {unsent} bytes unsent")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        _prepare(transport)
        transport.write(encode(hello(self._plane.role, self._plane.layout)))

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                if self._ready:
                    raise PeerError("sends messages where only a hello is due")
                role = check_hello(message, layout=self._plane.layout)
                if role != self.role:
                    raise PeerError(f"is {role}, not {self.role}")
                self._ready = True
                self._flush()
        except PeerError as error:
            self._plane.counters.peers_refused += 1
            self._plane.log(f"{self._plane.role}: {self.role}: {error}")
            self.close(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(f"connection lost: {exc}" if exc else "connection closed by the peer")

    def close(self, reason: str) -> None:
        """End the connection; what the kernel has not taken yet is still offered to it when it is in order."""
        if self._over:
            return
        if self._ready:
            self._flush()
        self._over = True
        self._task.cancel()
        self._queue.clear()
        if self._transport is not None:
            self._transport.close()
        self._plane.lost(self, reason)


class _Accepted(asyncio.Protocol):
    """A connection on which one peer sends to this role."""

    def __init__(self, plane: ControlPlane) -> None:
        self.peer: str | None = None
        self._plane = plane
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._plane.arrived(self):
            transport.abort()
            return
        _prepare(transport)
        loop = asyncio.get_running_loop()
        self._timeout = loop.call_later(_HELLO_TIMEOUT_S, self._refuse, PeerError("no hello in time"))

    def data_received(self, data: bytes) -> None:
        plane = self._plane
        plane.counters.bytes_received += len(data)
        try:
            messages = self._reader.feed(data)
            if self.peer is None:
                if self._reader.buffered_bytes > 4096 and not messages:
                    raise PeerError("the first frame is too large for a hello")
                if not messages:
                    return
                self._welcome(messages.pop(0))
            for message in messages:
                plane.counters.messages_received += 1
                plane.deliver(self.peer or "", message)
        except PeerError as error:
            self._refuse(error)

    def _welcome(self, message: Message) -> None:
        assert self._transport is not None
        # The own hello goes out first: a refused peer learns both fingerprints from it.
        self._transport.write(encode(hello(self._plane.role, self._plane.layout)))
        self.peer = self._plane.accept(self, message)
        if self._timeout is not None:
            self._timeout.cancel()

    def _refuse(self, error: TestbedError) -> None:
        self._plane.counters.peers_refused += 1
        name = self.peer or (self._transport and self._transport.get_extra_info("peername")) or "a stranger"
        self._plane.log(f"{self._plane.role}: connection from {name} closed: {error}")
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._plane.departed(self)

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()


def _prepare(transport: asyncio.Transport) -> None:
    sock = transport.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
