"""Grants: the right to write, once, into named memory.

Grant, write, notify (docs/protocol.md): the owner of the destination opens a grant, the owner of the source posts one
write for it, both learn of its completion. A grant is consumed by its write, carries an epoch, and is refused where it
lands when it is unknown, stale, already used, or of another size. The table is the only judge, in every world.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from testbed.errors import BugError, PeerError


class GrantRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the source needs to write: where (``endpoint``), which grant and epoch, how many bytes."""

    endpoint: str
    grant_id: int
    epoch: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """What the owner keeps of a grant: where each piece goes and which block it must be.

    ``pieces`` are byte offsets in the owner's memory, one per block, each ``piece_bytes`` long and holding layers
    ``[layer_begin, layer_end)`` of the block whose key is at the same place in ``keys``.
    """

    pieces: tuple[int, ...]
    piece_bytes: int
    keys: tuple[int, ...]
    layer_begin: int
    layer_end: int

    @property
    def size_bytes(self) -> int:
        """Bytes that the write must bring."""
        return len(self.pieces) * self.piece_bytes


class GrantState(enum.Enum):
    """Life of a grant."""

    OPEN = "open"
    LANDING = "landing"


@dataclass(slots=True)
class _Entry:
    epoch: int
    landing: Landing
    state: GrantState


class GrantTable:
    """All grants that one owner has out. Bounded: ``limit`` grants at most."""

    def __init__(self, *, limit: int = 65_536) -> None:
        self._entries: dict[int, _Entry] = {}
        self._limit = limit

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, grant_id: int, epoch: int, landing: Landing) -> None:
        """Open a grant.

        Raises:
            BugError: the id is open already, or the table is full.
        """
        if grant_id in self._entries:
            raise BugError(f"grant {grant_id} is open already")
        if len(self._entries) >= self._limit:
            raise BugError(f"more than {self._limit} grants are open at once")
        self._entries[grant_id] = _Entry(epoch, landing, GrantState.OPEN)

    def close(self, grant_id: int) -> None:
        """Revoke a grant (idempotent): a write that comes later, or is landing now, is refused."""
        self._entries.pop(grant_id, None)

    def begin(self, grant_id: int, epoch: int, size_bytes: int) -> Landing:
        """A write for the grant arrives.

        Raises:
            PeerError: unknown or closed grant, stale epoch, grant used before, or another size.
        """
        entry = self._entries.get(grant_id)
        if entry is None:
            raise PeerError(f"write refused: grant {grant_id} is not open (used before, closed, or never granted)")
        if entry.epoch != epoch:
            raise PeerError(f"write refused: grant {grant_id} has epoch {entry.epoch}, the write says {epoch}")
        if entry.state is not GrantState.OPEN:
            raise PeerError(f"write refused: grant {grant_id} is being written already")
        if entry.landing.size_bytes != size_bytes:
            granted = entry.landing.size_bytes
            raise PeerError(f"write refused: grant {grant_id} is for {granted} bytes, the write has {size_bytes}")
        entry.state = GrantState.LANDING
        return entry.landing

    def is_landing(self, grant_id: int, epoch: int) -> bool:
        """Whether a write for the grant is landing and may go on: false as soon as the grant is closed."""
        entry = self._entries.get(grant_id)
        return entry is not None and entry.epoch == epoch and entry.state is GrantState.LANDING

    def finish(self, grant_id: int, epoch: int) -> bool:
        """All bytes of a write have landed: consume the grant. False when it was closed in the meantime."""
        entry = self._entries.get(grant_id)
        if entry is None or entry.epoch != epoch or entry.state is not GrantState.LANDING:
            return False
        del self._entries[grant_id]
        return True


class GrantIssuer:
    """Hands out grant ids; the epoch grows with every restart of the owner, so that grants of its past are stale.

    A world that restarts a role sets ``epoch`` before the machine sees its first event.
    """

    def __init__(self, *, endpoint_epoch: int = 1) -> None:
        self.epoch = endpoint_epoch
        self._next = 0

    def issue(self, endpoint: str, landing: Landing) -> GrantRef:
        """A fresh reference for ``landing`` at one of the owner's ``endpoint`` names."""
        self._next += 1
        return GrantRef(endpoint, self._next, self.epoch, landing.size_bytes)
