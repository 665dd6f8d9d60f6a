"""The line between the supervisor and one role's process: a socket pair carrying ``[kind, payload]`` in msgpack.

Supervisor to role: ``start``, ``stop``. Role to supervisor: ``ready``, ``progress``, ``report``, ``died`` (its last
words, and the exit code that the run shall have for them). The end of the stream is a message too: for the role, that
the supervisor wants it gone or is gone itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from testbed.errors import BugError

START, STOP = "start", "stop"
READY, PROGRESS, REPORT, DIED = "ready", "progress", "report", "died"

_PREFIX = 4
_MAX_BYTES = 16 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[str, object])


def encode(kind: str, payload: object = None) -> bytes:
    """One message, framed."""
    body = _encoder.encode((kind, payload))
    if len(body) > _MAX_BYTES:
        raise BugError(f"{kind} of {len(body)} bytes between supervisor and role; at most {_MAX_BYTES} are sent")
    return len(body).to_bytes(_PREFIX, "big") + body


class Channel(asyncio.Protocol):
    """One end of the line. ``on_message(kind, payload)`` and ``on_end()`` must not raise."""

    def __init__(self, on_message: Callable[[str, object], None], on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _PREFIX:
            end = _PREFIX + int.from_bytes(self._buffer[:_PREFIX], "big")
            if len(self._buffer) < end:
                return
            kind, payload = _decoder.decode(bytes(self._buffer[_PREFIX:end]))
            del self._buffer[:end]
            self._on_message(kind, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def send(self, kind: str, payload: object = None) -> None:
        """Queue a message (dropped when the other end is gone)."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(kind, payload))

    def close(self) -> None:
        """End the line after what is queued."""
        if self._transport is not None:
            self._transport.close()
