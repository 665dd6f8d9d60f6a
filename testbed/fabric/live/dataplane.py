"""The data plane of one role: one-sided writes over TCP, by the rule grant, write, notify.

Every byte of KV moves here, also between the two sides of one CNIC (a local H2D or D2H leaves through the NIC and comes
back, paper section 5). There is one connection per (own NIC, destination endpoint); its writes land in the order in
which they were posted. How much is outstanding is bounded by grants, which only the owner of the memory hands out.

See ``wire`` for the bytes, ``outbound`` for the source, ``inbound`` for the destination.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping

from testbed.errors import BugError
from testbed.fabric.live.inbound import Inbound, LandingCounters, Receiver
from testbed.fabric.live.memory import Memory, Offsets
from testbed.fabric.live.outbound import Outbound
from testbed.fabric.live.sockets import DEFAULT_OPTIONS, NO_MORE_YET, Endpoint, SocketOptions, listening_socket
from testbed.fabric.live.wire import pack_hello
from testbed.protocol.grants import GrantTable
from testbed.protocol.layout import BlockLayout
from testbed.protocol.machine import Event, Write

_MAX_INBOUND = 4096  # connections; 1,152 GPUs are the paper's largest cluster
_MAX_OUTSTANDING = 65_536  # writes: as many as a grant table can hold

_log = logging.getLogger(__name__)


class DataPlane:
    """Posts writes from ``memory`` and lands granted writes in it; tells both through ``deliver``.

    ``endpoints`` resolves every endpoint name of the cluster. ``deliver`` must only queue (it is called from socket
    callbacks). Create it inside a running event loop.
    """

    def __init__(
        self,
        role: str,
        layout: BlockLayout,
        memory: Memory,
        grants: GrantTable,
        endpoints: Mapping[str, Endpoint],
        deliver: Callable[[Event], None],
        *,
        options: SocketOptions = DEFAULT_OPTIONS,
        log: Callable[[str], None] = _log.warning,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._role = role
        self._memory = memory
        self._endpoints = endpoints
        self._deliver = deliver
        self._log = log
        self._options = options
        self._hello = pack_hello(role, layout.fingerprint)
        self._receiver = Receiver(
            layout, memory, grants, deliver, log, lowat_bytes=self._options.receive_buffer_bytes // 4
        )
        self._listeners: dict[str, socket.socket] = {}
        self._outbound: dict[tuple[str, str, int], Outbound] = {}
        self._inbound: set[Inbound] = set()
        self._bytes_sent = 0
        self.peak_outstanding = 0

    @property
    def counters(self) -> LandingCounters:
        """What has landed and what was refused."""
        return self._receiver.counters

    @property
    def bytes_sent(self) -> int:
        """TCP payload bytes handed to the kernel."""
        return self._bytes_sent + sum(connection.bytes_sent for connection in self._outbound.values())

    @property
    def outstanding(self) -> int:
        """Writes posted and not yet acknowledged."""
        return sum(connection.outstanding for connection in self._outbound.values())

    def listen(self, endpoint: Endpoint) -> None:
        """Let writes land through an own NIC.

        Raises:
            HostError: the address or the device is not there, or is taken.
        """
        sock = listening_socket(endpoint, self._options)
        self._listeners[endpoint.name] = sock
        self._loop.add_reader(sock, self._accept, sock, endpoint.name)

    def post(self, write: Write, *, tos: int = 0) -> None:
        """Post a write; ``tos`` other than 0 takes another lane (and a connection of its own).

        The outcome is a ``WriteCompleted`` or a ``WriteFailed``, always, never raised here.

        Raises:
            BugError: pieces outside the memory or not what the grant is for, unknown endpoints, too many outstanding.
        """
        pieces = self._check(write)
        key = (write.via, write.ref.endpoint, tos)
        connection = self._outbound.get(key)
        if connection is None:
            connection = self._connect(*key)
        connection.post(write, pieces)
        outstanding = self.outstanding
        self.peak_outstanding = max(self.peak_outstanding, outstanding)
        if outstanding > _MAX_OUTSTANDING:
            raise BugError(f"{self._role} has {outstanding} writes outstanding; grants should have held them back")

    def close(self) -> None:
        """Close everything: outstanding writes fail, landing writes are refused."""
        for sock in self._listeners.values():
            self._loop.remove_reader(sock)
            sock.close()
        self._listeners.clear()
        for outbound in list(self._outbound.values()):
            outbound.close()
        for inbound in list(self._inbound):
            inbound.close()

    # --- inside --------------------------------------------------------------------------------------------------

    def _check(self, write: Write) -> Offsets:
        size = len(write.pieces) * write.piece_bytes
        if size != write.ref.size_bytes or not write.pieces:
            raise BugError(f"write {write.write_id} gathers {size} bytes for a grant of {write.ref.size_bytes}")
        for name in (write.via, write.ref.endpoint):
            if name not in self._endpoints:
                raise BugError(f"write {write.write_id} names endpoint {name!r}, which the cluster does not have")
        return self._memory.offsets(write.pieces, write.piece_bytes)

    def _connect(self, via: str, endpoint: str, tos: int) -> Outbound:
        def closed(connection: Outbound, reason: str) -> None:
            self._bytes_sent += connection.bytes_sent
            del self._outbound[via, endpoint, tos]
            if not self._loop.is_closed():
                self._log(f"{self._role}: {connection.name}: {reason}")

        connection = Outbound(
            source=self._endpoints[via],
            destination=self._endpoints[endpoint],
            options=self._options,
            tos=tos,
            hello=self._hello,
            memory=self._memory,
            deliver=self._deliver,
            on_closed=closed,
        )
        self._outbound[via, endpoint, tos] = connection
        return connection

    def _accept(self, listener: socket.socket, name: str) -> None:
        try:
            sock, (address, port) = listener.accept()
        except NO_MORE_YET:
            return
        except OSError as error:
            self._log(f"{self._role}: {name} cannot accept a connection: {error}")
            return
        if len(self._inbound) >= _MAX_INBOUND:
            self._log(f"{self._role}: {name} refuses {address}: {_MAX_INBOUND} connections are open")
            sock.close()
            return
        sock.setblocking(False)
        self._inbound.add(Inbound(self._receiver, sock, f"{name}<{address}:{port}", self._inbound.discard))
