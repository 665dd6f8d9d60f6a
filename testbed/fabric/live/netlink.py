"""One netlink socket per namespace, messages encoded by pyroute2, sent in batches.

pyroute2's own sockets wait for an acknowledgement and run an event loop for every message; for the two thousand
messages of a cluster that costs more than the kernel's work. Here messages are encoded once by pyroute2's classes,
kept as bytes, patched with what differs (interface index, sequence number) and sent by the hundred. Only the last
message of a batch asks for an acknowledgement: the kernel reports every error by itself, and handles a batch in order,
so when the last one is answered all are done.

All messages used here (link, tc, address, neighbour) have the interface index at the same offset.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pyroute2.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from testbed.errors import HostError

_HEADER = struct.Struct("=IHHII")
_SEQUENCE = struct.Struct("=II")
_FLAGS = struct.Struct("=H")
_ATTRIBUTE = struct.Struct("=HH")
_ATTRIBUTE_KIND = 0x3FFF  # without the nested and byte-order bits
_NLMSG_ERROR = 2
_NLMSG_DONE = 3
_INDEX_OFFSET = 20
_BATCH_BYTES = 1 << 16
_RECEIVE_BYTES = 1 << 16  # the kernel fills at most 32 KB of a dump at a time
_QUEUE_BYTES = 1 << 20
_SOL_NETLINK = 270
_NETLINK_CAP_ACK = 10
_NETLINK_EXT_ACK = 11
_NLMSGERR_ATTR_MSG = 1

RTM_NEWLINK = 16
RTM_DELLINK = 17
RTM_GETLINK = 18

CREATE = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_EXCL
REPLACE = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_REPLACE
CHANGE = NLM_F_REQUEST
DUMP = NLM_F_REQUEST | NLM_F_DUMP


class Message(NamedTuple):
    """An encoded request and what to call it in an error."""

    data: bytes
    label: str


def encode(message: Any, kind: int, flags: int) -> bytes:
    """Encode a pyroute2 message."""
    message["header"]["type"] = kind
    message["header"]["flags"] = flags
    message.encode()
    return bytes(message.data)


def at_index(template: bytes, index: int) -> bytes:
    """``template`` for interface ``index``."""
    return template[:_INDEX_OFFSET] + struct.pack("=i", index) + template[_INDEX_OFFSET + 4 :]


def encode_dump(kind: int) -> bytes:
    """A dump request for all objects of a namespace (``kind``: RTM_GETLINK)."""
    message = ifinfmsg()
    return encode(message, kind, DUMP)


class Batch(NamedTuple):
    """Messages joined for one send, numbered from 1; the last one asks for an acknowledgement."""

    data: bytes
    labels: tuple[str, ...]


def prepare(messages: Iterable[Message]) -> list[Batch]:
    """Join messages into batches. A batch's numbers need not be unique: each is answered in full before the next."""
    batches: list[Batch] = []
    pending: list[Message] = []
    size = 0
    for message in messages:
        if size + len(message.data) > _BATCH_BYTES:
            batches.append(_join(pending))
            pending, size = [], 0
        pending.append(message)
        size += len(message.data)
    if pending:
        batches.append(_join(pending))
    return batches


def _with_flags(data: bytes, more: int) -> bytes:
    flags: int = _FLAGS.unpack_from(data, 6)[0]
    return _FLAGS.pack(flags | more)


def _join(messages: list[Message]) -> Batch:
    parts: list[bytes] = []
    last = len(messages)
    for number, (data, _) in enumerate(messages, 1):
        flags = data[6:8] if number < last else _with_flags(data, NLM_F_ACK)
        parts += (data[:6], flags, _SEQUENCE.pack(number, 0), data[16:])
        if len(data) & 3:
            parts.append(b"\0" * (-len(data) & 3))
    return Batch(b"".join(parts), tuple(label for _, label in messages))


class NetlinkSocket:
    """A route netlink socket bound to one network namespace."""

    def __init__(self, sock: socket.socket, where: str) -> None:
        self._socket = sock
        self._where = where
        self._sequence = 0  # of dumps; messages of a batch are numbered from 1
        self._buffer = bytearray(_RECEIVE_BYTES)

    @classmethod
    def here(cls, where: str) -> NetlinkSocket:
        """A socket in the namespace that the calling thread is in; ``where`` names it in errors."""
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        sock.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
        sock.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _QUEUE_BYTES)
        return cls(sock, where)

    def __enter__(self) -> NetlinkSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def run(self, messages: Iterable[Message], *, tolerate: frozenset[int] = frozenset()) -> int:
        """Send all, wait until the kernel has done all; returns how many failed with an errno in ``tolerate``.

        Raises:
            HostError: naming the first message that the kernel refused.
        """
        return self.run_batches(prepare(messages), tolerate=tolerate)

    def run_batches(self, batches: Iterable[Batch], *, tolerate: frozenset[int] = frozenset()) -> int:
        """Like ``run`` for prepared batches, which may be sent in many namespaces."""
        return sum(self._run_batch(batch, tolerate) for batch in batches)

    def _run_batch(self, batch: Batch, tolerate: frozenset[int]) -> int:
        self._socket.send(batch.data)
        last = len(batch.labels)
        tolerated, done = 0, False
        refusal: HostError | None = None
        while not done:
            for kind, _, sequence, body in self._receive():
                if kind != _NLMSG_ERROR:
                    continue
                number = -struct.unpack_from("=i", body)[0]
                done = done or sequence == last
                if number in tolerate:
                    tolerated += 1
                elif number and refusal is None:
                    label = batch.labels[sequence - 1]
                    refusal = HostError(f"the kernel refused to {label} in {self._where}: {_reason(number, body)}.")
        if refusal:
            raise refusal
        return tolerated

    def _receive(self) -> Iterator[tuple[int, int, int, memoryview]]:
        """The messages of one datagram: type, flags, sequence, body."""
        size = self._socket.recv_into(self._buffer)
        view = memoryview(self._buffer)[:size]
        at = 0
        while at + _HEADER.size <= size:
            length, kind, flags, sequence, _ = _HEADER.unpack_from(view, at)
            yield kind, flags, sequence, view[at + _HEADER.size : at + length]
            at += (length + 3) & ~3

    def dump(self, data: bytes) -> list[bytes]:
        """Run a dump request; returns whole messages, headers included, as pyroute2's decoders want them."""
        self._sequence += 1
        flags = _with_flags(data, DUMP)
        self._socket.send(data[:6] + flags + _SEQUENCE.pack(self._sequence, 0) + data[16:])
        answers: list[bytes] = []
        while True:
            for kind, kind_flags, sequence, body in self._receive():
                if sequence != self._sequence:
                    continue
                if kind == _NLMSG_DONE:
                    return answers
                if kind == _NLMSG_ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise HostError(f"the kernel refused a dump in {self._where}: {_reason(number, body)}.")
                answers.append(_HEADER.pack(_HEADER.size + len(body), kind, kind_flags, sequence, 0) + body)


def _reason(number: int, body: memoryview) -> str:
    """The kernel's own sentence (extended acknowledgement) or the name of the errno."""
    text = attributes(body, 4 + _HEADER.size).get(_NLMSGERR_ATTR_MSG)
    if text is not None:
        sentence = bytes(text).rstrip(b"\0").decode(errors="replace").rstrip(".")
        return f"{sentence} ({errno.errorcode.get(number, number)})"
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"


def attributes(message: bytes | memoryview, at: int) -> dict[int, memoryview]:
    """The attributes from offset ``at`` on, by number, undecoded.

    pyroute2's decoders build every attribute of a message, which takes 0.2 ms where two numbers are wanted, and the
    one for u32 selectors (0.9.7) reads its keys four bytes too early. So answers are read with this walker.
    """
    view = memoryview(message)
    found: dict[int, memoryview] = {}
    end = len(view)
    while at + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(view, at)
        if length < 4:
            break
        found[kind & _ATTRIBUTE_KIND] = view[at + 4 : at + length]
        at += (length + 3) & ~3
    return found
