"""Writes a role's trace: one JSON line per event and action, with the ids that tie them together, no payload.

A line is an object: ``t`` (ns on the world's clock, shared by all roles), ``k`` (the type's name), and what
the type is about: ``r`` request, ``m`` message type, ``to``/``from`` peer, ``g`` grant, ``w`` write, ``b`` block key,
``n`` bytes, ``c`` compute, ``x`` collective (round, part, combine), ``d`` deadline, ``why``. Lines are encoded at once
and written in large chunks, so that a role spends about 2 us per line; one that is killed loses at most its last chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from testbed.errors import HostError
from testbed.protocol import machine as m
from testbed.protocol.messages import Message

_CHUNK_BYTES = 256 * 1024

Fields = dict[str, Any]


def _request_of(message: Message) -> str | None:
    """The request a message is about, if it is about one."""
    assignment = getattr(message, "assignment", message)
    return getattr(assignment, "request_id", None)


def _message(name: str, peer: str, message: Message) -> Fields:
    fields: Fields = {"m": type(message).__name__, name: peer}
    request = _request_of(message)
    if request is not None:
        fields["r"] = request
    return fields


def _collective(tag: m.ExchangeTag, tokens: int) -> Fields:
    return {"x": [tag.round, tag.part, int(tag.combine)], "tokens": tokens}


DESCRIBE: dict[type, Callable[[Any], Fields]] = {
    m.Started: lambda x: {},
    m.Received: lambda x: _message("from", x.sender, x.message),
    m.WriteLanded: lambda x: {"g": x.grant_id},
    m.LandingRefused: lambda x: {"g": x.grant_id, "why": x.reason},
    m.WriteCompleted: lambda x: {"w": x.write_id},
    m.WriteFailed: lambda x: {"w": x.write_id, "why": x.reason},
    m.ComputeFinished: lambda x: {"c": x.compute_id, "tokens": len(x.tokens)},
    m.ShardArrived: lambda x: {"from": x.sender, **_collective(x.tag, x.tokens), "ns": x.latency_ns},
    m.BlockFetched: lambda x: {"b": x.key},
    m.FetchFailed: lambda x: {"b": x.key, "why": x.reason},
    m.BlockWritten: lambda x: {"b": x.key},
    m.StoreFailed: lambda x: {"b": x.key, "why": x.reason},
    m.DeadlinePassed: lambda x: {"d": x.key},
    m.Send: lambda x: _message("to", x.to, x.message),
    m.OpenGrant: lambda x: {"g": x.ref.grant_id, "e": x.ref.endpoint, "n": x.ref.size_bytes},
    m.CloseGrant: lambda x: {"g": x.grant_id},
    m.Write: lambda x: {"w": x.write_id, "g": x.ref.grant_id, "e": x.ref.endpoint, "via": x.via, "n": x.ref.size_bytes},
    m.ComputePrefill: lambda x: {
        "c": x.compute_id,
        "ns": x.duration_ns,
        "layers": [x.layer_begin, x.layer_end],
        "r": [item.request_id for item in x.items],
    },
    m.ComputeDecode: lambda x: {"c": x.compute_id, "ns": x.duration_ns, "batch": len(x.items)},
    m.Compute: lambda x: {"c": x.compute_id, "ns": x.duration_ns},
    m.Exchange: lambda x: {
        **_collective(x.tag, x.tokens),
        "peers": len(x.shards),
        "n": sum(size for _, size in x.shards),
    },
    m.LoadSequence: lambda x: {"r": x.request_id},
    m.ForgetSequence: lambda x: {"r": x.request_id},
    m.FetchBlock: lambda x: {"b": x.key},
    m.StoreBlock: lambda x: {"b": x.key},
    m.SetDeadline: lambda x: {"d": x.key, "at": x.at_ns},
    m.ClearDeadline: lambda x: {"d": x.key},
}


class TraceWriter:
    """Appends to ``path``. ``record`` takes events and actions alike; ``note`` takes anything else.

    Raises:
        HostError: now or later, the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._refused(error) from error
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._bytes = 0
        self.lines = 0

    def record(self, now_ns: int, thing: m.Event | m.Action) -> None:
        """One event or action."""
        kind = type(thing)
        self._append({"t": now_ns, "k": kind.__name__, **DESCRIBE[kind](thing)})

    def note(self, now_ns: int, kind: str, **fields: object) -> None:
        """What is neither event nor action: a lost peer, a refused connection."""
        self._append({"t": now_ns, "k": kind, **fields})

    def _append(self, fields: Fields) -> None:
        line = self._encode(fields)
        self._lines.append(line)
        self._bytes += len(line) + 1
        self.lines += 1
        if self._bytes >= _CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write out what is buffered."""
        if not self._lines:
            return
        rest = memoryview(b"\n".join(self._lines) + b"\n")
        self._lines.clear()  # tried once: a role that dies of a full disk writes out again on its way
        self._bytes = 0
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        """Write out and close."""
        with self._file:
            self.flush()

    def _refused(self, error: OSError) -> HostError:
        return HostError(
            f"{self._path}: the trace cannot be written ({error.strerror}); "
            "free some space or choose another disk with --out."
        )
