"""A machine's state as a comparable value, and copies of it. What tells no two futures apart is left out.

Left out: times (there are none here), counters that only make names unique, peaks, texts of errors, the order of free
pages (the world keeps it sorted) and the order of dicts that nobody walks in order.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import xxhash

from testbed.protocol.grants import GrantTable
from testbed.protocol.pages import PagePool

ORDERED = frozenset({"active", "lru"})
"""Dicts that a machine walks in order, so that the order belongs to its state (the DE's batch, the DRAM's cache)."""
IRRELEVANT = frozenset({"failures", "strays", "peak", "blocks_given_up", "out", "_out", "_next_write", "_next_id"})
NOTES = {
    "Outcome": frozenset(
        {
            "read_side",
            "hit_tokens",
            "de_hit_tokens",
            "dram_hit_tokens",
            "de_dram_hit_tokens",
            "prefill_engine",
            "decode_engine",
            "chunk_blocks",
            "error_detail",
        }
    )
}
"""By class: what is only kept for a report (the driver's notes on a round)."""
PLACING = frozenset({"group_tokens", "read_queues", "_serials", "_told", "_turn", "_side_turn", "serial"})
"""Figures by which requests are placed; when all have been, they do not matter any more."""
BY_WRITE = frozenset({"writes", "_writes", "flushes", "copies", "sending"})
"""Dicts by write id; a write is named after its grant instead, which does not depend on the order of posting."""

_HASHER = type(xxhash.xxh3_64())
_PLAIN = (int, str, bytes, bool, float, type(None))


class Freezer:
    """Freezes values; ``constants`` (parameters, plans, scripts) are the same in every state and are skipped."""

    def __init__(self, constants: Iterable[Any]) -> None:
        self._constants = {id(value) for value in constants}
        self._fields: dict[type, tuple[str, ...]] = {}
        self._done: dict[int, Any] = {}
        self._write_names: dict[int, tuple[int, int]] = {}
        self._left_out: frozenset[str] = frozenset()

    def freeze(
        self,
        value: Any,
        write_names: dict[int, tuple[int, int]] | None = None,
        left_out: frozenset[str] = frozenset(),
    ) -> Any:
        """A hashable value, equal for states with the same futures.

        ``write_names``: write id -> grant and use; ``left_out``: fields that do not matter any more in this state.
        """
        self._done = {}
        self._write_names = write_names or {}
        self._left_out = left_out
        return self._walk(value, "")

    def _walk(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum):
            return value
        if kind in (tuple, list, deque):
            return tuple([self._walk(v, "") for v in value])
        if kind in (dict, OrderedDict):
            return self._dict(value, name)
        if kind in (set, frozenset):
            return tuple(sorted(value))
        if id(value) in self._constants:
            return None
        done = self._done.get(id(value))
        if done is None:
            done = self._done[id(value)] = self._object(value, kind)
        return done

    def _dict(self, value: dict[Any, Any], name: str) -> Any:
        if name in BY_WRITE:
            names = self._write_names
            items = [(names.get(k, k), self._walk(v, "")) for k, v in value.items()]
        else:
            items = [(k, self._walk(v, "")) for k, v in value.items()]
        if name not in ORDERED and len(items) > 1:
            items.sort(key=_first)
        return tuple(items)

    def _object(self, value: Any, kind: type) -> Any:
        if isinstance(value, PagePool):
            return tuple(sorted(value._holds.items()))
        if isinstance(value, GrantTable):
            return tuple(sorted((g, e.epoch, e.state.value) for g, e in value._entries.items()))
        if kind is _HASHER:
            return value.intdigest()
        if kind is np.ndarray:
            return value.tobytes()
        if kind in (types.MethodType, types.FunctionType):
            return value.__qualname__
        names = self._fields.get(kind)
        if names is None:
            names = self._fields[kind] = _field_names(value, kind)
        if self._left_out:
            names = tuple(n for n in names if n not in self._left_out)
        return (kind.__name__, *[self._walk(getattr(value, n), n) for n in names])


def _first(item: tuple[Any, Any]) -> Any:
    key = item[0]
    return key.name if isinstance(key, enum.Enum) else key


def _field_names(value: Any, kind: type) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if dataclasses.is_dataclass(kind):
        names: Iterable[str] = [f.name for f in dataclasses.fields(kind)]
    elif hasattr(value, "__dict__"):
        names = list(vars(value))
    else:
        names = [n for c in kind.__mro__ for n in getattr(c, "__slots__", ())]
    left_out = IRRELEVANT | NOTES.get(kind.__name__, frozenset())
    return tuple(n for n in names if n not in left_out and not n.endswith("_ns"))


class Copier:
    """Copies of whole roles as bytes; constants are shared, and so are running hashes (copied when taken out)."""

    def __init__(self, constants: Iterable[Any]) -> None:
        self._constants = list(constants)
        self._index = {id(value): k for k, value in enumerate(self._constants)}
        self._hashers: list[Any] = []
        self._hasher_of: dict[int, int] = {}

    def pack(self, value: Any) -> bytes:
        """The value as bytes that only this copier can read."""
        stream = io.BytesIO()
        _Pickler(stream, self._name).dump(value)
        return stream.getvalue()

    def unpack(self, packed: bytes) -> Any:
        """A fresh copy."""
        return _Unpickler(io.BytesIO(packed), self._named).load()

    def _name(self, value: Any) -> tuple[str, int] | None:
        at = self._index.get(id(value))
        if at is not None:
            return ("constant", at)
        if type(value) is _HASHER:
            digest = value.intdigest()  # equal digests: the same input
            at = self._hasher_of.get(digest)
            if at is None:
                at = self._hasher_of[digest] = len(self._hashers)
                self._hashers.append(value.copy())
            return ("hasher", at)
        return None

    def _named(self, name: tuple[str, int]) -> Any:
        kind, at = name
        return self._constants[at] if kind == "constant" else self._hashers[at].copy()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, name: Callable[[Any], tuple[str, int] | None]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._persistent = name

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        return self._persistent(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, named: Callable[[tuple[str, int]], Any]) -> None:
        super().__init__(stream)
        self._resolve = named

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)
