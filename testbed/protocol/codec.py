"""Framing of the control plane: length-prefixed msgpack, bounded, opened by a hello that refuses another layout.

A frame is a 4-byte big-endian length and that many bytes of msgpack. Nothing a peer sends makes memory grow past
``MAX_FRAME_BYTES``: the length is judged before the body is awaited.
"""

from __future__ import annotations

import msgspec

from testbed.errors import PeerError
from testbed.protocol.messages import AnyMessage, Hello, Message

VERSION = 1
MAX_FRAME_BYTES = 8 * 1024 * 1024
_PREFIX = 4

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """One frame.

    Raises:
        PeerError: the message is larger than any peer would accept.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise PeerError(f"{type(message).__name__} has {len(body)} bytes; a frame holds at most {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_PREFIX, "big") + body


def decode(body: bytes | memoryview) -> Message:
    """The message in a frame's body.

    Raises:
        PeerError: not a message of this protocol.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the last: deeply nested unknown fields
        raise PeerError(f"malformed frame of {len(body)} bytes: {error}") from error


class FrameReader:
    """Cuts a byte stream into messages; holds at most one frame."""

    def __init__(self, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max = max_frame_bytes

    def feed(self, data: bytes) -> list[Message]:
        """Messages completed by ``data``, in order.

        Raises:
            PeerError: a length over the bound, or a malformed body; the connection must be closed.
        """
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        at = 0
        while len(buffer) - at >= _PREFIX:
            size = int.from_bytes(buffer[at : at + _PREFIX], "big")
            if size > self._max:
                raise PeerError(f"frame of {size} bytes announced; at most {self._max} are accepted")
            end = at + _PREFIX + size
            if len(buffer) < end:
                break
            messages.append(decode(bytes(buffer[at + _PREFIX : end])))
            at = end
        if at:
            del buffer[:at]
        return messages

    @property
    def buffered_bytes(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._buffer)


def hello(role: str, layout: int) -> Hello:
    """The frame that opens a connection."""
    return Hello(role, VERSION, layout)


def check_hello(message: Message, *, layout: int) -> str:
    """Accept a peer, or refuse it. Result: its role.

    Raises:
        PeerError: not a hello, another version, or another block layout.
    """
    if not isinstance(message, Hello):
        raise PeerError(f"the first frame must be a hello, not {type(message).__name__}")
    if message.version != VERSION:
        raise PeerError(f"{message.role} speaks protocol version {message.version}, this side version {VERSION}")
    if message.layout != layout:
        raise PeerError(
            f"{message.role} has block layout {message.layout:016x}, this side {layout:016x}: "
            "model, layers, block_tokens and bytes per token must agree"
        )
    return message.role
