"""What can happen to one role: the inputs of its transitions, and the channels that carry them.

A channel keeps the order of what it carries; different channels keep none among each other. Control messages go from
role to role as over one TCP connection, writes from one NIC side to one landing endpoint, completions back.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.fabric.check.content import Cell
from testbed.protocol.messages import Message

CONTROL, WRITES, ENDS = "control", "writes", "ends"


@dataclass(frozen=True, slots=True)
class Begin:
    """The role starts."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """A control message arrives."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class Arrive:
    """A write arrives: ``cells`` are the Layer Blocks that it brings, gathered when it was posted."""

    source: str
    endpoint: str
    grant_id: int
    epoch: int
    size_bytes: int
    cells: tuple[Cell, ...]
    use: int
    """How often the source has used the grant before: once is all that is allowed, a repeated request makes it more."""
    echo: bool = False
    """The second copy of a write that was delivered twice: nobody waits for its end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """At its source: the write under ``grant_id`` has ended; ``failure`` says why it was refused, or nothing."""

    grant_id: int
    use: int
    failure: str


@dataclass(frozen=True, slots=True)
class Finish:
    """An operation of the role's own device ends: the first of ``lane`` (its GPU, a page of its disk, its NIC)."""

    lane: str


@dataclass(frozen=True, slots=True)
class Pass:
    """A deadline of the role passes."""

    key: str


Input = Begin | Deliver | Arrive | Ended | Finish | Pass


@dataclass(frozen=True, slots=True)
class Channel:
    """``kind`` is one of CONTROL, WRITES, ENDS; ``source`` and ``target`` are roles, or endpoints for writes."""

    kind: str
    source: str
    target: str
    owner: str
    """The role that takes what arrives."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What a checker found wrong: its name and one sentence."""

    checker: str
    text: str
