"""The vocabulary of machines: events in, actions out.

Every role is a synchronous reducer, ``handle(event, now_ns) -> actions``. It never awaits, reads no clock, and draws no
random numbers. A world delivers events and performs actions; the machines do not know which world it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from testbed.protocol.grants import GrantRef, Landing
from testbed.protocol.messages import Message


@dataclass(frozen=True, slots=True, order=True)
class ExchangeTag:
    """Which collective of a group: the forward (or decode step) of the group, the part of it, dispatch or combine."""

    round: int
    part: int
    combine: bool


# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The role runs; every peer can be reached."""


@dataclass(frozen=True, slots=True)
class Received:
    """A control message arrived from ``sender`` (its role name)."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class WriteLanded:
    """At the destination: the write for the grant has landed whole and every Layer Block is the one expected."""

    grant_id: int


@dataclass(frozen=True, slots=True)
class LandingRefused:
    """At the destination: what landed under the grant is not what was expected (identity or checksum)."""

    grant_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteCompleted:
    """At the source: the destination has taken the write; source memory may be reused."""

    write_id: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """At the source: the destination refused the write, or cannot be reached; source memory may be reused."""

    write_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ComputeFinished:
    """The GPU has finished; ``tokens`` maps request to the token it emitted, where one was due."""

    compute_id: int
    tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class ShardArrived:
    """A peer's shard of a collective has arrived whole (``Exchange``), ``latency_ns`` after it was posted."""

    sender: str
    tag: ExchangeTag
    tokens: int
    latency_ns: int


@dataclass(frozen=True, slots=True)
class BlockFetched:
    """Storage server: a block has been read from disk into staging memory, and its header was right."""

    key: int
    page: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Storage server: a block could not be read from disk."""

    key: int
    page: int
    reason: str


@dataclass(frozen=True, slots=True)
class BlockWritten:
    """Storage server: a block is durable on disk."""

    key: int
    page: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """Storage server: a block could not be made durable."""

    key: int
    page: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """A deadline set by the machine has passed."""

    key: str


Event = (
    Started
    | Received
    | WriteLanded
    | LandingRefused
    | WriteCompleted
    | WriteFailed
    | ComputeFinished
    | ShardArrived
    | BlockFetched
    | FetchFailed
    | BlockWritten
    | StoreFailed
    | DeadlinePassed
)

# --- actions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message to a role."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class OpenGrant:
    """Let a write land in own memory; must be performed before the reference is sent."""

    ref: GrantRef
    landing: Landing


@dataclass(frozen=True, slots=True)
class CloseGrant:
    """Revoke a grant: later bytes are refused."""

    grant_id: int


@dataclass(frozen=True, slots=True)
class Write:
    """Post a one-sided write: gather ``pieces`` of own memory, in order, to the grant.

    ``via`` is the own endpoint whose NIC carries it. Pieces are byte offsets, ``piece_bytes`` each; one post carries
    all pieces (a doorbell batch). ``submit_ns``: what submitting it takes of the thread that posts through ``via``, and
    ``window``: how many writes that may have out (0: any number); see ``testbed.protocol.submission``.
    """

    write_id: int
    ref: GrantRef
    via: str
    pieces: tuple[int, ...]
    piece_bytes: int
    submit_ns: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class PrefillItem:
    """One request's share of a prefill step.

    ``pieces``: offsets in HBM of its blocks (all context of the chunk, in order); the first ``cached_blocks`` hold KV
    that was loaded, the rest is to be computed. ``emit``: this step ends the prompt, a token is due.
    """

    request_id: str
    tokens: bytes
    keys: tuple[int, ...]
    pieces: tuple[int, ...]
    cached_blocks: int
    end_tokens: int
    emit: bool


@dataclass(frozen=True, slots=True)
class ComputePrefill:
    """Run layers ``[layer_begin, layer_end)`` for a batch; takes ``duration_ns`` of GPU time."""

    compute_id: int
    duration_ns: int
    layer_begin: int
    layer_end: int
    items: tuple[PrefillItem, ...]


@dataclass(frozen=True, slots=True)
class DecodeItem:
    """One sequence of a decode step: the KV of ``token`` is computed at position ``position``, the next token emitted.

    ``pages``: offsets in HBM of its Full Blocks in order. ``reread``: hash all bytes of KV again, trust no running sum.
    """

    request_id: str
    token: int
    position: int
    pages: tuple[int, ...]
    reread: bool


@dataclass(frozen=True, slots=True)
class ComputeDecode:
    """One decode step of a batch; takes ``duration_ns`` of GPU time."""

    compute_id: int
    duration_ns: int
    items: tuple[DecodeItem, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Keep the GPU busy for ``duration_ns``; no memory is touched (what of a layer is not in the two above)."""

    compute_id: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send a shard of a collective to each peer (its role name, bytes), through the own CNIC in the high lane.

    Expert-parallel dispatch and combine write to memory that is set aside for them (DeepEP), so no grant is asked for:
    a peer is at most one collective ahead, which bounds what can be under way. A shard of 0 bytes still arrives.
    ``tokens``: how many tokens of the sender's are in the batch.
    """

    tag: ExchangeTag
    tokens: int
    shards: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class LoadSequence:
    """The sequence's prompt KV is in HBM at ``pages`` (offsets): remember its tokens to extend it. No GPU time."""

    request_id: str
    tokens: bytes
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForgetSequence:
    """Forget a sequence's tokens and running state."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FetchBlock:
    """Storage server: read a block from disk into the page of staging memory at ``offset``."""

    key: int
    page: int
    offset: int


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """Storage server: make the block in the page at ``offset`` durable on disk."""

    key: int
    page: int
    offset: int


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Deliver DeadlinePassed(key) at ``at_ns`` unless replaced or cleared."""

    key: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class ClearDeadline:
    """Forget a deadline (idempotent)."""

    key: str


Action = (
    Send
    | OpenGrant
    | CloseGrant
    | Write
    | ComputePrefill
    | ComputeDecode
    | Compute
    | Exchange
    | LoadSequence
    | ForgetSequence
    | FetchBlock
    | StoreBlock
    | SetDeadline
    | ClearDeadline
)


class Machine(Protocol):
    """What a world needs of a role."""

    role: str

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take one event, return what to do, in order."""
        ...


@runtime_checkable
class Reporting(Protocol):
    """A machine that has figures to give at the end of a run."""

    def report(self) -> dict[str, int]:
        """Figures by name."""
        ...


@dataclass(slots=True)
class Outbox:
    """Collects a machine's actions during one ``handle``."""

    actions: list[Action] = field(default_factory=list)

    def send(self, to: str, message: Message) -> None:
        """Queue a message."""
        self.actions.append(Send(to, message))

    def add(self, action: Action) -> None:
        """Queue any other action."""
        self.actions.append(action)

    def take(self) -> list[Action]:
        """All queued actions, emptied."""
        actions, self.actions = self.actions, []
        return actions
