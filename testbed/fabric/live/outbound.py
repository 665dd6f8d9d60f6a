"""The source's side of a data connection: posts one-sided writes, in order, and learns of their fate.

Bytes go from the memory to the kernel by gathering ``sendmsg``: adjacent pieces merged, no copy in user space, except
of runs of a few hundred bytes (numpy gathers those at a tenth of the cost of an I/O vector entry each).

The connection is opened by the first write, bound to the NIC that the write names, and writes nothing before the
destination has accepted the hello. When the connection is lost every posted write fails: none is silently repeated,
because a repeated write could land in memory that has been granted to someone else since.
"""

from __future__ import annotations

import asyncio
import enum
import socket
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from testbed.errors import PeerError
from testbed.fabric.live.landing import block_numbers, has_short_runs, merge_pieces
from testbed.fabric.live.memory import Memory, Offsets
from testbed.fabric.live.sockets import NO_MORE_YET, Endpoint, SocketOptions, connecting_socket, describe
from testbed.fabric.live.wire import AckReader, AckStatus, WriteHeader, pack_header
from testbed.protocol.machine import Event, Write, WriteCompleted, WriteFailed

_SEND_BYTES = 512 * 1024  # gathered per system call: above what a socket buffer takes at once
_STAGE_BYTES = 64 * 1024
_SEND_BUFFERS = 1000  # below IOV_MAX (1024)
_SENDS_PER_WAKE = 4  # then let the event loop serve others


class _State(enum.Enum):
    CONNECTING = "connecting"
    HELLO_SENT = "hello sent"
    READY = "ready"
    CLOSED = "closed"


class Outbound:
    """One connection from an own NIC to a destination endpoint. ``on_closed`` is called once, after all failures."""

    def __init__(
        self,
        *,
        source: Endpoint,
        destination: Endpoint,
        options: SocketOptions,
        tos: int,
        hello: bytes,
        memory: Memory,
        deliver: Callable[[Event], None],
        on_closed: Callable[[Outbound, str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._deliver = deliver
        self._on_closed = on_closed
        self._hello = hello
        self._acks = AckReader()
        self._waiting: deque[tuple[Write, Offsets]] = deque()  # not yet gathered
        self._posted: deque[int] = deque()  # gathered or waiting, not yet acknowledged: ids in order
        self._current: Iterator[memoryview] = iter(())  # what is left of the write that is being sent
        self._gathered: deque[memoryview] = deque()
        self._gathered_bytes = 0
        self._writing = False
        self._flush_due = False
        self.bytes_sent = 0
        self.name = f"{source.name}>{destination.name}"
        self._state = _State.CONNECTING
        self._timeout = self._loop.call_later(options.connect_timeout_s, self._fail, "no answer to the connect")
        self._socket: socket.socket | None = None
        try:
            self._socket = connecting_socket(source, destination, options, tos)
        except OSError as error:
            self._loop.call_soon(self._fail, f"cannot connect: {error}")
        else:
            self._loop.add_writer(self._socket, self._on_connected)

    @property
    def outstanding(self) -> int:
        """Writes posted and not yet acknowledged."""
        return len(self._posted)

    @property
    def closed(self) -> bool:
        """Whether nothing can be posted any more."""
        return self._state is _State.CLOSED

    def post(self, write: Write, pieces: Offsets) -> None:
        """Queue a write of ``pieces``; it leaves after those posted before."""
        self._waiting.append((write, pieces))
        self._posted.append(write.write_id)
        if self._state is _State.READY and not self._flush_due and not self._writing:
            self._flush_due = True  # once per pass of the event loop: writes posted together leave together
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close; every outstanding write fails."""
        self._fail("connection closed by this side")

    # --- opening -------------------------------------------------------------------------------------------------

    def _on_connected(self) -> None:
        sock = self._live_socket()
        self._loop.remove_writer(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._fail(f"cannot connect: {describe(error)}")
            return
        self._state = _State.HELLO_SENT
        self._loop.add_reader(sock, self._on_readable)
        try:
            sock.send(self._hello)  # far below any socket buffer: never partial
        except OSError as failure:
            self._fail(f"connection lost: {failure}")

    def _live_socket(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    # --- acknowledgements ----------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            data = self._live_socket().recv(65_536)
        except NO_MORE_YET:
            return
        except OSError as error:
            self._fail(f"connection lost: {error}")
            return
        if not data:
            self._fail("connection closed by the destination")
            return
        try:
            for ack in self._acks.feed(data):
                self._take_ack(ack.write_id, ack.status, ack.reason)
        except PeerError as error:
            self._fail(str(error))

    def _take_ack(self, write_id: int, status: AckStatus, reason: str) -> None:
        if self._state is _State.HELLO_SENT:
            if status is not AckStatus.WELCOME:
                raise PeerError(f"destination refused the connection: {reason}")
            self._timeout.cancel()
            self._state = _State.READY
            self._flush()
            return
        if status is AckStatus.WELCOME or not self._posted or self._posted[0] != write_id:
            raise PeerError(f"acknowledgement of write {write_id}, which is not the oldest outstanding")
        self._posted.popleft()
        if status is AckStatus.TAKEN:
            self._deliver(WriteCompleted(write_id))
        else:
            self._deliver(WriteFailed(write_id, f"destination refused it: {reason}"))

    # --- writes --------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Give the kernel what it takes now; come back when it takes more."""
        self._flush_due = False
        if self._state is not _State.READY:
            return
        sock = self._live_socket()
        busy = True
        try:
            for _ in range(_SENDS_PER_WAKE):
                buffers = self._gather()
                if not buffers:
                    busy = False
                    break
                size = sum(map(len, buffers))
                sent = sock.sendmsg(buffers)
                self._advance(sent)
                if sent < size:
                    break
        except NO_MORE_YET:
            pass
        except OSError as error:
            self._fail(f"connection lost: {error}")
            return
        if busy != self._writing:
            self._writing = busy
            if busy:
                self._loop.add_writer(sock, self._flush)
            else:
                self._loop.remove_writer(sock)

    def _gather(self) -> list[memoryview]:
        """Buffers for one system call."""
        while self._gathered_bytes < _SEND_BYTES:
            buffer = next(self._current, None)
            if buffer is not None:
                self._gathered.append(buffer)
                self._gathered_bytes += len(buffer)
            elif self._waiting:
                self._current = write_buffers(*self._waiting.popleft(), self._memory)
            else:
                break
        buffers: list[memoryview] = []
        size = 0
        for buffer in self._gathered:
            buffers.append(buffer)
            size += len(buffer)
            if size >= _SEND_BYTES or len(buffers) == _SEND_BUFFERS:
                break
        return buffers

    def _advance(self, sent: int) -> None:
        """Drop what the kernel has taken."""
        self.bytes_sent += sent
        self._gathered_bytes -= sent
        gathered = self._gathered
        while sent:
            head = gathered[0]
            if sent < len(head):
                gathered[0] = head[sent:]
                return
            sent -= len(head)
            gathered.popleft()

    # --- the end -------------------------------------------------------------------------------------------------

    def _fail(self, reason: str) -> None:
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        self._timeout.cancel()
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        self._current = iter(())
        self._gathered.clear()
        self._waiting.clear()
        while self._posted:
            self._deliver(WriteFailed(self._posted.popleft(), f"{self.name}: {reason}"))
        self._on_closed(self, reason)


def write_buffers(write: Write, pieces: Offsets, memory: Memory) -> Iterator[memoryview]:
    """A write as the kernel gets it: header, payload, seals. Made as it is sent, so that a large write costs little."""
    ref, size, block = write.ref, len(write.pieces) * write.piece_bytes, memory.layer_block_bytes
    yield memoryview(pack_header(WriteHeader(ref.epoch, ref.grant_id, write.write_id, size)))
    index = block_numbers(pieces, write.piece_bytes, block)
    if has_short_runs(pieces, write.piece_bytes):
        step = max(1, _STAGE_BYTES // block)
        for at in range(0, len(index), step):
            yield memory.blocks[index[at : at + step]].view(np.uint8).data
    else:
        for begin, end in merge_pieces(pieces, write.piece_bytes):
            yield memory.view[begin:end]
    yield memory.seals[index].astype("<u8", copy=False).view(np.uint8).data
