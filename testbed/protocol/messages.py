"""Control messages between roles. Bulk KV never travels in them: they carry grants, keys and sizes.

Every message is a tagged msgspec structure: decoding validates types, and an unknown tag or field type is a PeerError
(see codec). Tokens travel as little-endian uint32 bytes.
"""

from __future__ import annotations

import msgspec

from testbed.protocol.grants import GrantRef


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="t", gc=False):
    """Base of all control messages."""


class Hello(Message, frozen=True):
    """First frame on every connection, both ways: who speaks, which protocol version and which block layout."""

    role: str
    version: int
    layout: int


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """One request with everything that was decided for it (paper 8.2-8.4).

    Of the ``hit_blocks`` leading blocks, which are in storage, the DE node reads the first ``de_blocks``, the PE node
    the other ``pe_blocks``: all on one side in the paper, none where no KV moves. The PE's are the last ones, so that
    what the DE buffer does not have yet, they and the misses, is one range. ``prefill_node`` and ``decode_node`` name
    the DRAM roles.
    """

    request_id: str
    tokens: bytes
    keys: tuple[int, ...]
    hit_blocks: int
    generate_tokens: int
    pe_blocks: int
    de_blocks: int
    prefill_engine: str
    decode_engine: str
    prefill_node: str
    decode_node: str

    @property
    def prompt_tokens(self) -> int:
        """Prompt length in tokens."""
        return len(self.tokens) // 4

    @property
    def read_side(self) -> str:
        """Who reads: "pe", "de", "split" between both, or "none" (no hits to read)."""
        if self.pe_blocks and self.de_blocks:
            return "split"
        return "pe" if self.pe_blocks else "de" if self.de_blocks else "none"

    def read_by(self, side: str) -> range:
        """Blocks that the node of a side, "pe" or "de", reads from storage."""
        return range(self.de_blocks, self.de_blocks + self.pe_blocks) if side == "pe" else range(self.de_blocks)


# --- driver <-> scheduler, index ---------------------------------------------------------------------------------


class SubmitRequest(Message, frozen=True):
    """Driver -> scheduler: one turn of one agent."""

    request_id: str
    tokens: bytes
    generate_tokens: int


class LookupPrefix(Message, frozen=True):
    """Scheduler -> index: how many leading blocks are durable?"""

    request_id: str
    keys: tuple[int, ...]


class PrefixFound(Message, frozen=True):
    """Index -> scheduler."""

    request_id: str
    hit_blocks: int


class PublishBlock(Message, frozen=True):
    """DRAM -> index: this block is durable on every replica."""

    request_id: str
    key: int
    parent: int


class BlockPublished(Message, frozen=True):
    """Index -> DRAM: lookups see the block from now on."""

    request_id: str
    key: int


# --- scheduler <-> leaders <-> engines ---------------------------------------------------------------------------


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """What an engine reports (paper 8.1): seq_e, tok_e, and for DEs the free HBM in tokens.

    The HBM of all unfinished requests is off ``free_hbm_tokens``, taken by them yet or not. It is below 0 when more has
    been assigned than there is room for: round robin does not look at it.
    """

    engine: str
    node: str
    sequences: int
    tokens: int
    free_hbm_tokens: int


class FetchRequests(Message, frozen=True):
    """Leader -> scheduler, at every fetch interval: load of all engines and read queues (in tokens) of the nodes.

    ``serial`` is the last message of the scheduler that these figures include.
    """

    group: str
    kind: str
    serial: int
    engines: tuple[EngineLoad, ...]
    read_queues: dict[str, int]


class RequestsAssigned(Message, frozen=True):
    """Scheduler -> leader: what the group fetched, and requests whose other half has been chosen since."""

    serial: int
    assignments: tuple[Assignment, ...]


class EnginesChosen(Message, frozen=True):
    """Scheduler -> leader: requests reserved on engines of the group, other half pending.

    They count at once: in seq_e, in tok_e by ``tokens``, and in a DE's free HBM by ``hbm_tokens`` (0 for PEs).
    """

    serial: int
    request_ids: tuple[str, ...]
    engines: tuple[str, ...]
    tokens: tuple[int, ...]
    hbm_tokens: tuple[int, ...]


class AssignPrefill(Message, frozen=True):
    """Leader -> PE."""

    assignment: Assignment


class AssignDecode(Message, frozen=True):
    """Leader -> DE."""

    assignment: Assignment


class RequestReleased(Message, frozen=True):
    """Engine -> leader, leader -> scheduler: the engine has finished (or given up) its part."""

    request_id: str
    engine: str


class ReadFinished(Message, frozen=True):
    """DRAM -> its group's leader: the request's hits have been read here (or given up), its tokens leave read_q."""

    request_id: str
    node: str


# --- engines <-> DRAM --------------------------------------------------------------------------------------------


class LoadPrefix(Message, frozen=True):
    """PE -> its node's DRAM: read its share of the hits from storage into the PE buffer (Figure 4, PE path 1-2)."""

    assignment: Assignment


class ReserveBuffer(Message, frozen=True):
    """DE -> its node's DRAM: hold the whole prompt KV in the DE buffer; read its share of the hits into it."""

    assignment: Assignment


class BufferReserved(Message, frozen=True):
    """DE DRAM -> PE: space for the request's prompt KV is held; layers may be sent."""

    request_id: str


class PrefixLoaded(Message, frozen=True):
    """DRAM (of either side) -> PE: all hit blocks that this node reads are in its DRAM, verified.

    ``cached_blocks`` of them were there already.
    """

    request_id: str
    cached_blocks: int = 0


class LoadLayers(Message, frozen=True):
    """PE -> DRAM that holds the blocks: write layers of these blocks under the grant (PE path 3-4, DE path 3-5)."""

    request_id: str
    first_block: int
    block_count: int
    layer_begin: int
    layer_end: int
    grant: GrantRef


class OpenLayerWrites(Message, frozen=True):
    """PE -> DE DRAM: open one grant per layer step for these blocks of the request."""

    request_id: str
    chunk: int
    first_block: int
    block_count: int


class LayerWritesOpened(Message, frozen=True):
    """DE DRAM -> PE: the grants, one per layer step, in layer order."""

    request_id: str
    chunk: int
    grants: tuple[GrantRef, ...]


class PrefillFinished(Message, frozen=True):
    """PE -> DE: the first token; every layer of every block has been posted to the DE buffer."""

    request_id: str
    token: int


class PrefixReleased(Message, frozen=True):
    """PE -> PE DRAM: the hit blocks in the PE buffer are not needed any more."""

    request_id: str


class PromptBuffered(Message, frozen=True):
    """DE DRAM -> DE: the full prompt KV (hits and misses of all layers) is in the DE buffer."""

    request_id: str


class LoadPrompt(Message, frozen=True):
    """DE -> its DRAM: write the prompt's Full Blocks into HBM under the grant (H2D through the CNIC)."""

    request_id: str
    grant: GrantRef


class SkipPrompt(Message, frozen=True):
    """DE -> its DRAM: no token is left to decode, the buffer may go once its blocks are durable."""

    request_id: str


class StageBlock(Message, frozen=True):
    """DE -> its DRAM: a full block has accumulated in HBM; room to copy it out, please (D2H, paper 5.2)."""

    request_id: str
    key: int
    parent: int


class StageOpened(Message, frozen=True):
    """DRAM -> DE: room for the block."""

    request_id: str
    key: int
    grant: GrantRef


class BlockSettled(Message, frozen=True):
    """DRAM -> DE: persisting a block has ended; ``durable``: on every replica, and visible in the index."""

    request_id: str
    key: int
    durable: bool


# --- DRAM <-> storage --------------------------------------------------------------------------------------------


class ReadBlock(Message, frozen=True):
    """DRAM -> storage server: write this Full Block under the grant."""

    request_id: str
    key: int
    grant: GrantRef


class BlockUnreadable(Message, frozen=True):
    """Storage server -> DRAM: the block cannot be served."""

    request_id: str
    key: int
    reason: str


class PersistBlock(Message, frozen=True):
    """DRAM -> storage server: room for a Full Block to store, please."""

    request_id: str
    key: int


class PersistOpened(Message, frozen=True):
    """Storage server -> DRAM: room for the block."""

    request_id: str
    key: int
    grant: GrantRef


class BlockStored(Message, frozen=True):
    """Storage server -> DRAM: the block is durable here (written, fsynced, renamed)."""

    request_id: str
    key: int


class BlockNotStored(Message, frozen=True):
    """Storage server -> DRAM: the block could not be stored (disk full, corrupt on arrival)."""

    request_id: str
    key: int
    reason: str


# --- to the driver -----------------------------------------------------------------------------------------------


class RequestScheduled(Message, frozen=True):
    """Scheduler -> driver: engines and read side are chosen (for the TTFT shares of Figure 12).

    ``de_hit_tokens``: hits that the DE node reads; the PE node reads the others, unless ``read_side`` is "none".
    """

    request_id: str
    read_side: str
    hit_tokens: int
    de_hit_tokens: int
    prefill_engine: str
    decode_engine: str


class PrefillStarted(Message, frozen=True):
    """PE -> driver: the hits are in DRAM and the request has entered a forward batch.

    So many of the hits that each node was to read were in its DRAM already.
    """

    request_id: str
    pe_cached_blocks: int = 0
    de_cached_blocks: int = 0


class ChunkStarted(Message, frozen=True):
    """PE -> driver: another chunk of the prompt has entered a forward; it loads ``cached_blocks`` blocks again."""

    request_id: str
    chunk: int
    cached_blocks: int


class TokensEmitted(Message, frozen=True):
    """Engine -> driver: tokens ``first_index, ...`` of the request."""

    request_id: str
    first_index: int
    tokens: tuple[int, ...]


class RequestCompleted(Message, frozen=True):
    """DE -> driver: all tokens emitted and every full block of the context durable; the next turn will hit."""

    request_id: str


class RequestFailed(Message, frozen=True):
    """Any role -> driver: the request ended with a named error; ``role`` gave up on it."""

    request_id: str
    error: str
    role: str
    detail: str


class AbortRequest(Message, frozen=True):
    """Any role -> the request's other participants: release everything the request holds."""

    request_id: str
    error: str


AnyMessage = (
    Hello
    | SubmitRequest
    | LookupPrefix
    | PrefixFound
    | PublishBlock
    | BlockPublished
    | FetchRequests
    | RequestsAssigned
    | EnginesChosen
    | AssignPrefill
    | AssignDecode
    | RequestReleased
    | ReadFinished
    | LoadPrefix
    | ReserveBuffer
    | BufferReserved
    | PrefixLoaded
    | LoadLayers
    | OpenLayerWrites
    | LayerWritesOpened
    | PrefillFinished
    | PrefixReleased
    | PromptBuffered
    | LoadPrompt
    | SkipPrompt
    | StageBlock
    | StageOpened
    | BlockSettled
    | ReadBlock
    | BlockUnreadable
    | PersistBlock
    | PersistOpened
    | BlockStored
    | BlockNotStored
    | RequestScheduled
    | PrefillStarted
    | ChunkStarted
    | TokensEmitted
    | RequestCompleted
    | RequestFailed
    | AbortRequest
)


def requests_of(message: Message) -> tuple[str, ...]:
    """The requests that a message is about; none for a hello or a report."""
    match message:
        case RequestsAssigned():
            return tuple(assignment.request_id for assignment in message.assignments)
        case EnginesChosen():
            return message.request_ids
        case AssignPrefill() | AssignDecode() | LoadPrefix() | ReserveBuffer():
            return (message.assignment.request_id,)
        case Hello() | FetchRequests():
            return ()
    request_id: str = message.request_id  # type: ignore[attr-defined]
    return (request_id,)
