"""Faults that a world can perform in place of an action: what the network, the disk or a peer does wrong.

A hook given to ``LocalWorld`` returns these instead of (or around) the action that a machine asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.protocol.machine import Action, FetchBlock, StoreBlock, Write


@dataclass(frozen=True, slots=True)
class Delayed:
    """The action is performed ``by_ns`` later; what its channel carries meanwhile overtakes it."""

    action: Action
    by_ns: int


@dataclass(frozen=True, slots=True)
class RefusedWrite:
    """The destination is not reached: the source learns that the write failed."""

    action: Write


@dataclass(frozen=True, slots=True)
class LateWrite:
    """The bytes arrive ``by_ns`` later than they should; until then the source believes them on their way."""

    action: Write
    by_ns: int


@dataclass(frozen=True, slots=True)
class LostWrite:
    """A layer is skipped: nothing lands, the source believes that it did."""

    action: Write


@dataclass(frozen=True, slots=True)
class MisplacedWrite:
    """Every piece lands one place further within the landing (a single piece: shifted within itself)."""

    action: Write


@dataclass(frozen=True, slots=True)
class FlippedWrite:
    """One bit of what lands is not what was sent."""

    action: Write


@dataclass(frozen=True, slots=True)
class RepeatedWrite:
    """The write is delivered twice under the one grant."""

    action: Write


@dataclass(frozen=True, slots=True)
class StaleFetch:
    """The disk serves another block (its bytes and its own seals) as the one asked for."""

    action: FetchBlock


@dataclass(frozen=True, slots=True)
class RottenFetch:
    """The disk serves the block with one bit flipped; the seals are those that were stored."""

    action: FetchBlock


@dataclass(frozen=True, slots=True)
class FailedFetch:
    """The disk reports an error."""

    action: FetchBlock


@dataclass(frozen=True, slots=True)
class FailedStore:
    """The disk is full."""

    action: StoreBlock


Fault = (
    Delayed
    | RefusedWrite
    | LateWrite
    | LostWrite
    | MisplacedWrite
    | FlippedWrite
    | RepeatedWrite
    | StaleFetch
    | RottenFetch
    | FailedFetch
    | FailedStore
)
