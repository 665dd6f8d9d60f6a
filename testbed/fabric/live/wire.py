"""The data plane's wire format: what one-sided writes look like inside a TCP stream.

Forward (source to destination), after one hello per connection, per write::

    header 32 bytes | payload (pieces in order) | 8 bytes of seal per Layer Block, in payload order

Reverse: acknowledgements of at most ``ACK_MAX_BYTES``, in the order of the writes. The kernel's lanes treat what comes
from the port of data connections like TCP's own acknowledgements (an RDMA acknowledgement costs no lane bandwidth
either). Seals come last so that header, payload and seals of a write and the header of the next can be read
by one system call, and so that payload lands while nothing has to be remembered but a grant.

Where a write lands is not on the wire: the owner of the memory knows it from its grant. Nothing here is trusted.

Shards of collectives have connections of their own, after the same hello, and nothing in the other direction::

    head 68 bytes | payload | 8 bytes of seal over head and payload
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import xxhash

from testbed.errors import BugError, PeerError
from testbed.protocol.codec import VERSION
from testbed.protocol.layout import BlockLayout
from testbed.protocol.machine import ExchangeTag
from testbed.protocol.shards import SHARD_HEAD_BYTES, SHARD_SEAL_BYTES

SEAL_BYTES = 8
ACK_MAX_BYTES = 58

_MAGIC = b"DualPath"
_WRITE_MAGIC = b"DPWr"
_HELLO = struct.Struct("<8sHHQ36s")
_HEADER = struct.Struct("<4sIQQQ")
_ACK = struct.Struct("<QBB")
_SHARD_MAGIC = b"DPSh"
_SHARD = struct.Struct(f"<4sIQQIIB{SHARD_HEAD_BYTES - 33}x")
_ROLE_BYTES = 36

HELLO_BYTES = _HELLO.size
HEADER_BYTES = _HEADER.size
ACK_HEAD_BYTES = _ACK.size
_REASON_BYTES = ACK_MAX_BYTES - ACK_HEAD_BYTES


class AckStatus(enum.IntEnum):
    """Outcome told to the source: of the hello, or of one write."""

    WELCOME = 0
    TAKEN = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True)
class WriteHeader:
    """What opens one write: for which grant, how many payload bytes."""

    epoch: int
    grant_id: int
    write_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Ack:
    """What the destination says of a write (or, with ``write_id`` 0, of the hello)."""

    write_id: int
    status: AckStatus
    reason: str


def wire_bytes(size_bytes: int, layout: BlockLayout) -> int:
    """TCP payload bytes of one write of ``size_bytes`` (the traffic ledger counts them)."""
    return HEADER_BYTES + size_bytes + seal_bytes(size_bytes, layout)


def seal_bytes(size_bytes: int, layout: BlockLayout) -> int:
    """Bytes of the seals that follow ``size_bytes`` of payload."""
    return size_bytes // layout.layer_block_bytes * SEAL_BYTES


def pack_hello(role: str, layout: int) -> bytes:
    """The hello that opens a connection.

    Raises:
        BugError: a role name that does not fit.
    """
    name = role.encode()
    if len(name) > _ROLE_BYTES:
        raise BugError(f"role name {role!r} is longer than {_ROLE_BYTES} bytes")
    return _HELLO.pack(_MAGIC, VERSION, len(name), layout, name)


def check_hello(data: bytes | bytearray | memoryview, layout: int) -> str:
    """Accept a source, or refuse it. Result: its role.

    Raises:
        PeerError: not a hello, another version, or another block layout.
    """
    magic, version, length, theirs, name = _HELLO.unpack(data)
    if magic != _MAGIC or length > _ROLE_BYTES:
        raise PeerError("not a data connection: no hello")
    role = str(name[:length], "utf-8", "replace")
    if version != VERSION:
        raise PeerError(f"version {version} instead of {VERSION} at {role}")
    if theirs != layout:
        raise PeerError(f"layout {theirs:016x} not {layout:016x}")
    return role


def pack_header(header: WriteHeader) -> bytes:
    """Wire form of a write header."""
    return _HEADER.pack(_WRITE_MAGIC, header.epoch, header.grant_id, header.write_id, header.size_bytes)


def unpack_header(data: bytes | bytearray | memoryview, layout: BlockLayout, max_bytes: int) -> WriteHeader:
    """The header of the next write.

    Raises:
        PeerError: the stream is out of step, or the size is none that any grant could have.
    """
    magic, epoch, grant_id, write_id, size = _HEADER.unpack(data)
    if magic != _WRITE_MAGIC:
        raise PeerError("no write header where one is due")
    if not 0 < size <= max_bytes or size % layout.layer_block_bytes:
        raise PeerError(f"write of {size} bytes: not Layer Blocks, or above this memory's {max_bytes}")
    return WriteHeader(epoch, grant_id, write_id, size)


def pack_ack(write_id: int, status: AckStatus, reason: str = "") -> bytes:
    """Wire form of an acknowledgement; the reason is cut to what keeps the packet small."""
    text = reason.encode()[:_REASON_BYTES]
    return _ACK.pack(write_id, status, len(text)) + text


class AckReader:
    """Cuts the reverse stream into acknowledgements; holds less than one."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Ack]:
        """Acknowledgements completed by ``data``.

        Raises:
            PeerError: an unknown status or an impossible length.
        """
        buffer = self._buffer + data
        acks: list[Ack] = []
        at = 0
        while len(buffer) - at >= ACK_HEAD_BYTES:
            write_id, status, length = _ACK.unpack_from(buffer, at)
            if status > AckStatus.REFUSED or length > _REASON_BYTES:
                raise PeerError("malformed acknowledgement")
            end = at + ACK_HEAD_BYTES + length
            if len(buffer) < end:
                break
            acks.append(Ack(write_id, AckStatus(status), str(buffer[at + ACK_HEAD_BYTES : end], "utf-8", "replace")))
            at = end
        self._buffer = buffer[at:]
        return acks


# --- collectives ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardHead:
    """What opens a shard: of which collective, the sender's tokens, payload bytes, when it was posted (monotonic)."""

    tag: ExchangeTag
    tokens: int
    size_bytes: int
    posted_ns: int


def pack_shard(head: ShardHead) -> bytes:
    """Wire form of a shard's head."""
    tag = head.tag
    return _SHARD.pack(
        _SHARD_MAGIC, head.size_bytes, head.posted_ns, tag.round, tag.part, head.tokens, int(tag.combine)
    )


def seal_shard(head: bytes | bytearray, payload_digest: bytes) -> bytes:
    """The seal of a shard: over its head and the xxh3 digest of its payload, which many shards may share."""
    return xxhash.xxh3_64_digest(bytes(head) + payload_digest)


class ShardReader:
    """Cuts a stream into shards and checks their seals; holds a head, never a payload."""

    __slots__ = ("_digest", "_head", "_left", "_max_bytes", "_seal", "_shard")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head = bytearray()
        self._seal = bytearray()
        self._shard: ShardHead | None = None  # whose payload or seal is due
        self._left = 0  # of its payload
        self._digest = xxhash.xxh3_64()

    @property
    def due_bytes(self) -> int:
        """Bytes of the current shard still to come; 0 between shards and within a head."""
        return 0 if self._shard is None else self._left + SHARD_SEAL_BYTES - len(self._seal)

    def feed(self, data: memoryview) -> list[ShardHead]:
        """Shards completed by ``data``.

        Raises:
            PeerError: the stream is out of step, a shard larger than any, or one that is not what was sent.
        """
        complete: list[ShardHead] = []
        while data:
            if self._shard is None:
                data = _fill(self._head, SHARD_HEAD_BYTES, data)
                if len(self._head) == SHARD_HEAD_BYTES:
                    self._shard = self._unpack()
                    self._left = self._shard.size_bytes
            elif self._left:
                part = data[: self._left]
                self._digest.update(part)
                self._left -= len(part)
                data = data[len(part) :]
            else:
                data = _fill(self._seal, SHARD_SEAL_BYTES, data)
                if len(self._seal) == SHARD_SEAL_BYTES:
                    complete.append(self._check(self._shard))
        return complete

    def _unpack(self) -> ShardHead:
        magic, size, posted_ns, of_round, part, tokens, combine = _SHARD.unpack(self._head)
        if magic != _SHARD_MAGIC or combine > 1:
            raise PeerError("no shard's head where one is due")
        if size > self._max_bytes:
            raise PeerError(f"a shard of {size} bytes, above the {self._max_bytes} set aside")
        return ShardHead(ExchangeTag(of_round, part, bool(combine)), tokens, size, posted_ns)

    def _check(self, shard: ShardHead) -> ShardHead:
        if seal_shard(self._head, self._digest.digest()) != self._seal:
            raise PeerError(f"a shard of {shard.size_bytes} bytes ({shard.tag}) is not the one that was sent")
        self._head.clear()
        self._seal.clear()
        self._digest.reset()
        self._shard = None
        return shard


def _fill(buffer: bytearray, size: int, data: memoryview) -> memoryview:
    """Move what ``buffer`` lacks to ``size`` from ``data``. Result: the rest of it."""
    lacking = size - len(buffer)
    buffer += data[:lacking]
    return data[lacking:]
