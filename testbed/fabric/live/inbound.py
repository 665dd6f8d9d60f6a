"""The destination's side of a data connection: lands one-sided writes, refuses what no grant allows.

Invariants (how the bytes travel is in ``landing``):

* Before every system call that writes into memory the grant is asked for again: once it is closed, what still comes
  goes to a scratch buffer that nobody reads, because the memory may belong to someone else by then.
* A write is taken only when every Layer Block's seal, recomputed from the landed bytes with the key that the *owner*
  expects there, equals the seal that came with it. Right bytes at the wrong place do not pass.
* A peer can make this side hold one hello, one header and one write's seals, and never more.

``SO_RCVLOWAT`` tells the kernel how much of a write must be there before it wakes this process: a link shaped to 100
Mbit/s delivers 8 KB at a time, and waking Python for each packet of 60 roles would cost more than moving the bytes.
"""

from __future__ import annotations

import asyncio
import enum
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from testbed.errors import PeerError
from testbed.fabric.live.landing import LandingWrite
from testbed.fabric.live.memory import Memory
from testbed.fabric.live.sockets import NO_MORE_YET
from testbed.fabric.live.wire import (
    HEADER_BYTES,
    HELLO_BYTES,
    AckStatus,
    check_hello,
    pack_ack,
    seal_bytes,
    unpack_header,
)
from testbed.protocol.grants import GrantTable
from testbed.protocol.layout import BlockLayout
from testbed.protocol.machine import Event, LandingRefused, WriteLanded

_READS_PER_WAKE = 4  # then let the event loop serve others
_SCRATCH_BYTES = 64 * 1024
_UNSENT_ACKS = 64 * 1024  # a source that does not read its acknowledgements is no peer


@dataclass(slots=True)
class LandingCounters:
    """What one role's NICs have seen."""

    bytes_landed: int = 0
    writes_landed: int = 0
    writes_refused: int = 0  # no grant, stale epoch, used grant, another size, closed in mid write
    writes_corrupt: int = 0  # a seal that does not match
    connections_refused: int = 0  # another version or layout, or not a peer at all
    connections_lost: int = 0  # ended in the middle of a write, or out of step


@dataclass(slots=True)
class Receiver:
    """What all inbound connections of one role share."""

    layout: BlockLayout
    memory: Memory
    grants: GrantTable
    deliver: Callable[[Event], None]
    log: Callable[[str], None]
    lowat_bytes: int
    counters: LandingCounters = field(default_factory=LandingCounters)
    scratch: memoryview = field(default_factory=lambda: memoryview(bytearray(_SCRATCH_BYTES)))


class _Phase(enum.Enum):
    HELLO = "hello"
    HEADER = "header"
    WRITE = "write"
    CLOSED = "closed"


class Inbound:
    """One accepted connection."""

    def __init__(
        self, receiver: Receiver, sock: socket.socket, name: str, on_closed: Callable[[Inbound], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        self._socket = sock
        self._on_closed = on_closed
        self._phase = _Phase.HELLO
        self._head = memoryview(bytearray(max(HELLO_BYTES, HEADER_BYTES)))
        self._head_need = HELLO_BYTES
        self._head_have = 0
        self._write: LandingWrite | None = None  # None in phase WRITE: the bytes go to scratch
        self._write_id = 0
        self._left = 0  # payload and seals of the current write still to come
        self._refusal = ""
        self._lowat = 1
        self._acks = b""  # acknowledgements that the kernel would not take yet
        self.name = name
        self._loop.add_reader(sock, self._on_readable)

    def close(self) -> None:
        """Close from this side, without a word."""
        self._end()

    # --- reading -------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            for _ in range(_READS_PER_WAKE):
                wanted, count = self._read()
                if count == 0:
                    self._lost("closed by the source" + (" in the middle of a write" if self._left else ""))
                    return
                self._take(count)
                if count < wanted or self._phase is _Phase.CLOSED:
                    break
        except NO_MORE_YET:
            pass
        except OSError as error:
            self._lost(f"connection lost: {error}")
            return
        except PeerError as error:
            self._receiver.log(f"{self.name}: {error}")
            self._lost(str(error))
            return
        self._tune_wakeups()

    def _read(self) -> tuple[int, int]:
        """One system call. Result: bytes asked for, bytes read."""
        if self._phase is not _Phase.WRITE:
            head = self._head[self._head_have : self._head_need]
            return len(head), self._socket.recv_into(head)
        targets = self._write_targets()
        wanted = sum(map(len, targets))
        if wanted == self._left:  # the rest of the write fits: read the next header with it
            targets.append(self._head[:HEADER_BYTES])
            wanted += HEADER_BYTES
        if len(targets) == 1:
            return wanted, self._socket.recv_into(targets[0])
        return wanted, self._socket.recvmsg_into(targets)[0]

    def _write_targets(self) -> list[memoryview]:
        write = self._write
        if write is not None:
            if self._receiver.grants.is_landing(write.header.grant_id, write.header.epoch):
                return write.targets()
            self._refuse(f"grant {write.header.grant_id} was closed in the middle of the write")
        return [self._receiver.scratch[: self._left]]

    def _take(self, count: int) -> None:
        if self._phase is _Phase.WRITE:
            body = min(count, self._left)
            if self._write is not None:
                self._write.landed(body)
            self._left -= body
            if self._left:
                return
            self._finish_write()
            count -= body
            self._phase, self._head_need, self._head_have = _Phase.HEADER, HEADER_BYTES, 0
        self._head_have += count
        if self._head_have == self._head_need:
            if self._phase is _Phase.HELLO:
                self._take_hello()
            else:
                self._begin_write()

    def _take_hello(self) -> None:
        receiver = self._receiver
        try:
            role = check_hello(self._head[:HELLO_BYTES], receiver.layout.fingerprint)
        except PeerError as error:
            receiver.counters.connections_refused += 1
            self._acknowledge(pack_ack(0, AckStatus.REFUSED, str(error)))
            receiver.log(f"{self.name}: {error}")
            self._end()
            return
        self.name = f"{self.name} from {role}"
        self._phase, self._head_need, self._head_have = _Phase.HEADER, HEADER_BYTES, 0
        self._acknowledge(pack_ack(0, AckStatus.WELCOME))

    def _begin_write(self) -> None:
        receiver = self._receiver
        header = unpack_header(self._head[:HEADER_BYTES], receiver.layout, receiver.memory.size_bytes)
        self._phase, self._write_id, self._write = _Phase.WRITE, header.write_id, None
        self._left = header.size_bytes + seal_bytes(header.size_bytes, receiver.layout)
        try:
            landing = receiver.grants.begin(header.grant_id, header.epoch, header.size_bytes)
        except PeerError as error:
            self._refuse(str(error).removeprefix("write refused: "))
        else:
            self._write = LandingWrite(header, landing, receiver.layout, receiver.memory)

    def _refuse(self, reason: str) -> None:
        """From here on the write goes to scratch."""
        self._write = None
        self._refusal = reason
        self._receiver.counters.writes_refused += 1

    def _finish_write(self) -> None:
        receiver, write, counters = self._receiver, self._write, self._receiver.counters
        if write is None:
            self._acknowledge(pack_ack(self._write_id, AckStatus.REFUSED, self._refusal))
            return
        self._write = None
        grant_id = write.header.grant_id
        reason = write.check()
        receiver.grants.finish(grant_id, write.header.epoch)
        if reason is None:
            counters.writes_landed += 1
            counters.bytes_landed += write.header.size_bytes
            receiver.deliver(WriteLanded(grant_id))
            self._acknowledge(pack_ack(self._write_id, AckStatus.TAKEN))
        else:
            counters.writes_corrupt += 1
            receiver.deliver(LandingRefused(grant_id, reason))
            self._acknowledge(pack_ack(self._write_id, AckStatus.REFUSED, reason))

    # --- the kernel's side ---------------------------------------------------------------------------------------

    def _tune_wakeups(self) -> None:
        """Wake when the rest of the write is there, or a good part of it; for a header, at its first byte."""
        if self._phase is _Phase.CLOSED:
            return
        lowat = min(self._left, self._receiver.lowat_bytes) if self._phase is _Phase.WRITE else 1
        if lowat != self._lowat:
            self._lowat = lowat
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lowat)

    def _acknowledge(self, packet: bytes) -> None:
        """Send a reverse packet; keep it if the kernel's buffer is full (bounded)."""
        self._acks += packet
        if len(self._acks) > len(packet):
            if len(self._acks) > _UNSENT_ACKS:
                raise PeerError("the source does not read its acknowledgements")
            return
        self._send_acks()
        if self._acks:
            self._loop.add_writer(self._socket, self._on_writable)

    def _send_acks(self) -> None:
        try:
            sent = self._socket.send(self._acks)
        except NO_MORE_YET:
            return
        self._acks = self._acks[sent:]

    def _on_writable(self) -> None:
        try:
            self._send_acks()
        except OSError as error:
            self._lost(f"connection lost: {error}")
            return
        if not self._acks:
            self._loop.remove_writer(self._socket)

    # --- the end -------------------------------------------------------------------------------------------------

    def _lost(self, reason: str) -> None:
        """The connection is no more: a grant that was being written is used up, and its owner is told."""
        receiver, write = self._receiver, self._write
        if self._left:
            receiver.counters.connections_lost += 1
        if write is not None and receiver.grants.finish(write.header.grant_id, write.header.epoch):
            receiver.deliver(LandingRefused(write.header.grant_id, reason))
        self._end()

    def _end(self) -> None:
        if self._phase is _Phase.CLOSED:
            return
        self._phase, self._write, self._left = _Phase.CLOSED, None, 0
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._on_closed(self)
