"""A node's DRAM: owner of the PE buffer or DE buffer, doing the traffic managers' work (paper 4.1, A.4).

PE node: reads hits from storage into the PE buffer (PE path 1-2), writes their Layer Blocks to the PE's HBM through
its CNIC (3-4; or over the copy engine, if the PE grants that). DE node: holds the whole prompt KV of a request. On the
DE path it reads the hits from storage into the DE buffer (DE path 1-2) and writes their Layer Blocks to the PE (3-5);
on both paths it takes the layers that the PE sends (PE path 5-7: hits and misses; DE path: misses only, merged at
their place), and after prefill writes Full Blocks to the DE's HBM (8-9 / 6-7) and frees the memory. A split read is
both at once, each node with its own range of blocks. It persists new full blocks: the prompt's straight from the DE
buffer, generated ones through a staging page (D2H).

Order of acquisition, the same for every request, so that waiting for memory cannot be circular: DE buffer, PE buffer,
HBM; staging pages are a pool apart.

What a request leaves behind may stay in a cache (``dram_cache.py``): hits that are found there are not read again.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field, replace

from emulators.base import Record, RoleMachine, participants, unexpected
from emulators.dram_cache import DramCache
from emulators.persister import Persister, PersistJob
from testbed.errors import PeerError
from testbed.ids import cnic_dram_endpoint, dram_endpoint, is_copy_endpoint, snic_endpoint
from testbed.protocol import messages as m
from testbed.protocol.grants import GrantIssuer, GrantRef, Landing
from testbed.protocol.machine import (
    CloseGrant,
    DeadlinePassed,
    Event,
    LandingRefused,
    OpenGrant,
    Started,
    WriteCompleted,
    WriteFailed,
    WriteLanded,
)
from testbed.protocol.pages import PagePool
from testbed.protocol.params import ProtocolParams
from testbed.protocol.placement import choose_replica, replicas_of
from testbed.protocol.plan import ClusterPlan
from testbed.protocol.transitions import TransitionTable
from testbed.protocol.trie import ROOT


class DramState(enum.Enum):
    """A request in a node's DRAM."""

    WAITING = "waiting for pages"
    READING = "reading hits"
    HOLDING = "holding"
    BUFFERED = "prompt buffered"
    FLUSHING = "loading HBM"
    DECODING = "decoding"
    RELEASED = "released"


_W, _R, _H, _B, _F, _D, _X = DramState
_ADMITTED = frozenset({"LoadPrefix", "ReserveBuffer"})
_BUFFERED = _ADMITTED | {"LoadLayers", "OpenLayerWrites", "BlockUnreadable"}

TABLE = TransitionTable(
    role="DRAM buffer",
    start=_W,
    ends=frozenset({_X}),
    edges={
        _W: {"PagesTaken": (_R, _H)},
        _R: {"ReadLanded": (_R, _H), "BlockUnreadable": (_R,)},
        _H: {
            "LoadLayers": (_H,),
            "OpenLayerWrites": (_H,),
            "LayersLanded": (_H, _B),
            "PrefixReleased": (_X,),
        },
        _B: {"LoadPrompt": (_F,), "SkipPrompt": (_D,), "BlockSettled": (_B,)},
        _F: {"PromptLoaded": (_D,), "StageBlock": (_F,), "BlockSettled": (_F,), "RequestReleased": (_X,)},
        _D: {"StageBlock": (_D,), "BlockSettled": (_D,), "RequestReleased": (_X,)},
    },
    ignored={
        _W: _ADMITTED,
        _R: _ADMITTED,
        _H: _ADMITTED | {"BlockUnreadable"},
        _B: _BUFFERED,
        _F: _BUFFERED | {"LoadPrompt"},
        _D: _BUFFERED | {"LoadPrompt", "SkipPrompt"},
    },
    patience={_H: 6, _B: 4, _D: 6},
)


@dataclass(frozen=True, slots=True)
class _Read:
    request_id: str
    block: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """A block asked of ``server`` and not landed yet."""

    request_id: str
    key: int
    server: str


@dataclass(frozen=True, slots=True)
class _Stage:
    request_id: str
    key: int
    parent: int
    cached: bool = False  # its page is one of the buffer's and stays in the cache
    page: int = -1


@dataclass(frozen=True, slots=True)
class _Posted:
    """A write in flight: it holds its pages until it ends."""

    request_id: str
    pages: tuple[int, ...]
    fills_hbm: bool


@dataclass(slots=True, kw_only=True)
class Held(Record):
    """A request's share of this node's DRAM. ``pages[i]`` holds block ``first_block + i`` of the prompt."""

    assignment: m.Assignment
    prefill_side: bool
    pages: tuple[int, ...] = ()
    cached: frozenset[int] = frozenset()  # keys of hits that were here already
    reads_left: int = 0
    layer_blocks_left: int = 0
    grants: dict[int, int] = field(default_factory=dict)  # open grant -> Layer Blocks it brings (0: a storage read)
    staged: dict[int, _Stage] = field(default_factory=dict)  # open staging grant -> what it brings
    # What has been asked for, so that a repeated message changes nothing:
    opened: dict[int, tuple[GrantRef, ...]] = field(default_factory=dict)  # by chunk
    served: set[int] = field(default_factory=set)  # grants of the PE
    generated: set[int] = field(default_factory=set)  # keys of blocks to stage

    @property
    def reads(self) -> range:
        """Blocks that this node reads from storage."""
        return self.assignment.read_by("pe" if self.prefill_side else "de")

    @property
    def first_block(self) -> int:
        """Of the blocks that have pages here: a PE node holds what it reads, a DE node the whole prompt."""
        return self.reads.start if self.prefill_side else 0

    def pages_of(self, first_block: int, count: int) -> tuple[int, ...]:
        """Pages of some blocks."""
        at = first_block - self.first_block
        return self.pages[at : at + count]


class DramBuffer(RoleMachine[Held]):
    """The DRAM of one node. Memory: pages of buffer and cache, in one pool, then ``stage_pages`` staging pages."""

    table = TABLE  # type: ignore[assignment]

    def __init__(self, node: str, plan: ClusterPlan, params: ProtocolParams, *, direct_copies: bool = False) -> None:
        super().__init__(node, params)
        self.direct_copies = direct_copies
        self.plan = plan
        self.leader = plan.group_of_node(node).leader
        page_bytes = params.layout.full_block_bytes
        self.buffer = PagePool(capacity=params.dram_pages + params.dram_cache_pages, page_bytes=page_bytes)
        self.cache = DramCache(self.buffer, params.dram_cache_pages)
        self.stage = PagePool(capacity=params.stage_pages, page_bytes=page_bytes)
        self.issuer = GrantIssuer()
        self.waiting: deque[str] = deque()
        self.reads: deque[_Read] = deque()
        self.reading: dict[int, _Reading] = {}  # by grant
        self.outstanding: dict[str, int] = dict.fromkeys(plan.storage, 0)
        self.stages: deque[_Stage] = deque()
        self.writes: dict[int, _Posted] = {}
        self.owners: dict[int, str] = {}  # open grant -> request
        self._next_write = 0
        self.persister = Persister(node, plan.storage, params, self.out, self._new_write_id, self._settled)

    def report(self) -> dict[str, int]:
        """For the end of a run: blocks that could not be stored, most pages in use."""
        return {
            "blocks_given_up": self.persister.blocks_given_up,
            "cached_blocks": len(self.cache.lru),
            "peak_buffer_pages": self.buffer.peak,
            "peak_stage_pages": self.stage.peak,
        }

    # --- admission -----------------------------------------------------------------------------------------------

    def on_message(self, sender: str, message: m.Message) -> None:
        """Requests for memory, layers and persistence from engines; answers from storage and index."""
        match message:
            case m.LoadPrefix():
                self._admit(message.assignment, prefill_side=True)
            case m.ReserveBuffer():
                self._admit(message.assignment, prefill_side=False)
            case m.LoadLayers():
                self._load_layers(message)
            case m.OpenLayerWrites():
                self._open_layer_writes(message)
            case m.LoadPrompt():
                self._load_prompt(message)
            case m.SkipPrompt():
                if (held := self.find(message.request_id, "SkipPrompt")) is not None:
                    self.move(held, "SkipPrompt", _D)
                    self._free(held)
            case m.StageBlock():
                held = self.find(message.request_id, "StageBlock")
                if held is not None and message.key not in held.generated:
                    held.generated.add(message.key)
                    self.move(held, "StageBlock", held.state)
                    self._stage_block(message)
            case m.PrefixReleased():
                if (held := self.find(message.request_id, "PrefixReleased")) is not None:
                    self.move(held, "PrefixReleased", _X)
                    self._free(held)
            case m.RequestReleased():
                if (held := self.find(message.request_id, "RequestReleased")) is not None:
                    self.move(held, "RequestReleased", _X)
                    self._free(held)
            case m.BlockUnreadable():
                held = self.find(message.request_id, "BlockUnreadable")
                if held is not None and self._is_reading(message.request_id, message.key):
                    detail = f"{sender} cannot serve block {message.key:016x}: {message.reason}"
                    self.fail(held, "BlockUnreadable", detail)
            case m.PersistOpened() | m.BlockStored() | m.BlockNotStored() | m.BlockPublished():
                self.persister.on_message(sender, message, self.now_ns)
            case _:
                raise PeerError(f"{self.role}: {type(message).__name__} from {sender} is not for a DRAM buffer")

    def _admit(self, assignment: m.Assignment, *, prefill_side: bool) -> None:
        held = Held(
            request_id=assignment.request_id,
            state=_W,
            participants=participants(assignment),
            assignment=assignment,
            prefill_side=prefill_side,
        )
        if not self.begin(held):
            return
        need = self._pages_needed(held)
        if need > self.buffer.capacity:
            detail = f"its KV takes {need} blocks, the buffer of {self.role} has {self.buffer.capacity}"
            self.fail(held, "DramTooSmall", detail)
        elif len(self.waiting) >= self.params.queue_limit:
            self.fail(held, "DramQueueFull", f"more than {self.params.queue_limit} requests wait for {self.role}")
        else:
            self.waiting.append(held.request_id)
            self._pump_waiting()

    def _pages_needed(self, held: Held) -> int:
        return len(held.reads) if held.prefill_side else len(held.assignment.keys)

    def _pump_waiting(self) -> None:
        while self.waiting:
            held = self.records.get(self.waiting[0])
            if held is None:
                self.waiting.popleft()
                continue
            if not self._take_pages(held):
                return
            self.waiting.popleft()
            self._start(held)

    def _take_pages(self, held: Held) -> bool:
        """Memory for a request: cached blocks where they are, and pages for the others. False: it has to wait."""
        keys = held.assignment.keys
        lent = self.cache.lend(keys[k] for k in held.reads)
        fresh = self.cache.take(self._pages_needed(held) - len(lent))
        if fresh is None:
            self.buffer.release(lent.values())
            return False
        left = iter(fresh)
        held.cached = frozenset(lent)
        held.pages = tuple(
            lent[keys[k]] if keys[k] in lent else next(left)
            for k in (held.reads if held.prefill_side else range(len(keys)))
        )
        return True

    def _start(self, held: Held) -> None:
        a = held.assignment
        if not held.prefill_side:
            held.layer_blocks_left = (len(a.keys) - len(held.reads)) * self.params.layout.layers
            self.out.send(a.prefill_engine, m.BufferReserved(a.request_id))
        missing = [k for k in held.reads if a.keys[k] not in held.cached]
        if missing:
            held.reads_left = len(missing)
            self.reads.extend(_Read(a.request_id, k) for k in missing)
            self.move(held, "PagesTaken", _R)
            self._pump_reads()
            return
        if held.reads:
            self._all_read(held)
        self.move(held, "PagesTaken", _H)

    def _all_read(self, held: Held) -> None:
        """All hits that are to be read here are in DRAM."""
        a = held.assignment
        self.out.send(a.prefill_engine, m.PrefixLoaded(a.request_id, len(held.cached)))
        self.out.send(self.leader, m.ReadFinished(a.request_id, self.role))

    # --- reads from storage --------------------------------------------------------------------------------------

    def _pump_reads(self) -> None:
        while self.reads and len(self.reading) < self.params.read_window_blocks:
            read = self.reads.popleft()
            held = self.records.get(read.request_id)
            if held is None:
                continue
            key = held.assignment.keys[read.block]
            holders = replicas_of(key, self.plan.storage, self.params.replicas)
            server = choose_replica(holders, self.outstanding)
            landing = self._landing(held.pages_of(read.block, 1), (key,), 0, self.params.layout.layers)
            ref = self._grant(held, snic_endpoint(self.role), landing, 0)
            self.reading[ref.grant_id] = _Reading(read.request_id, key, server)
            self.outstanding[server] += 1
            self.out.send(server, m.ReadBlock(read.request_id, key, ref))

    def _read_ended(self, grant_id: int) -> None:
        self.outstanding[self.reading.pop(grant_id).server] -= 1

    def _is_reading(self, request_id: str, key: int) -> bool:
        return any(r.request_id == request_id and r.key == key for r in self.reading.values())

    def _read_landed(self, grant_id: int, held: Held) -> None:
        self._read_ended(grant_id)
        held.reads_left -= 1
        if held.reads_left:
            self.move(held, "ReadLanded", _R)
        else:
            self._all_read(held)
            self.move(held, "ReadLanded", _H)
            self._check_buffered(held)
        self._pump_reads()

    # --- layers to and from the PE -------------------------------------------------------------------------------

    def _load_layers(self, message: m.LoadLayers) -> None:
        held = self.find(message.request_id, "LoadLayers")
        if held is None or message.grant.grant_id in held.served:
            return
        held.served.add(message.grant.grant_id)
        self.move(held, "LoadLayers", _H)
        a = held.assignment
        offset, size = self.params.layout.layer_slice(message.layer_begin, message.layer_end)
        pages = held.pages_of(message.first_block, message.block_count)
        engine = a.prefill_engine if held.prefill_side else a.decode_engine
        layers = message.layer_end - message.layer_begin
        self._write(held, message.grant, engine, pages, offset, size, fills_hbm=False, blocks_each=layers)

    def _open_layer_writes(self, message: m.OpenLayerWrites) -> None:
        held = self.find(message.request_id, "OpenLayerWrites")
        if held is None:
            return
        self.move(held, "OpenLayerWrites", _H)
        if message.chunk not in held.opened:
            held.opened[message.chunk] = self._open_steps(held, message)
        answer = m.LayerWritesOpened(message.request_id, message.chunk, held.opened[message.chunk])
        self.out.send(held.assignment.prefill_engine, answer)

    def _open_steps(self, held: Held, message: m.OpenLayerWrites) -> tuple[GrantRef, ...]:
        a = held.assignment
        pages = held.pages_of(message.first_block, message.block_count)
        keys = a.keys[message.first_block : message.first_block + message.block_count]
        refs = []
        for begin, end in self.params.steps:
            landing = self._landing(pages, keys, begin, end)
            brings = message.block_count * (end - begin)
            refs.append(self._grant(held, cnic_dram_endpoint(a.decode_engine), landing, brings))
        return tuple(refs)

    def _layers_landed(self, held: Held, layer_blocks: int) -> None:
        held.layer_blocks_left -= layer_blocks
        if self._check_buffered(held):
            return
        self.move(held, "LayersLanded", held.state)

    def _check_buffered(self, held: Held) -> bool:
        """All of the prompt's KV is here: tell the DE, and persist the prompt's new full blocks."""
        if held.prefill_side or held.layer_blocks_left or held.state is not _H:
            return False
        a = held.assignment
        self.move(held, "LayersLanded", _B)
        self.out.send(a.decode_engine, m.PromptBuffered(a.request_id))
        for k in range(a.hit_blocks, self.params.layout.full_blocks(a.prompt_tokens)):
            parent, page = a.keys[k - 1] if k else ROOT, held.pages[k]
            pages = () if self.params.write_back == "free" else (page,)
            self._persist(a.request_id, a.keys[k], parent, self.buffer, pages, self.buffer.offset(page))
        return True

    def _persist(
        self, request_id: str, key: int, parent: int, pool: PagePool, pages: tuple[int, ...], offset: int
    ) -> None:
        """Write a block back from its page, which the job holds until it is settled."""
        pool.retain(pages)
        job = PersistJob(request_id=request_id, key=key, parent=parent, pool=pool, pages=pages, offset=offset)
        self.persister.submit(job, self.now_ns)

    def _settled(self, job: PersistJob, durable: bool) -> None:
        job.pool.release(job.pages)
        held = self.records.get(job.request_id)
        if held is not None:
            self.move(held, "BlockSettled", held.state)
            self.out.send(held.assignment.decode_engine, m.BlockSettled(job.request_id, job.key, durable))
        self._pump_waiting()
        self._pump_stages()

    # --- to the DE's HBM -----------------------------------------------------------------------------------------

    def _load_prompt(self, message: m.LoadPrompt) -> None:
        held = self.find(message.request_id, "LoadPrompt")
        if held is None:
            return
        self.move(held, "LoadPrompt", _F)
        engine, size = held.assignment.decode_engine, self.params.layout.full_block_bytes
        self._write(held, message.grant, engine, held.pages, 0, size, fills_hbm=True, blocks_each=1)

    def _free(self, held: Held) -> None:
        """The request needs its buffer no more; writes in flight and blocks being persisted still hold their pages.

        Its whole blocks stay in the cache: the PE buffer's are the hits that it has read.
        """
        a = held.assignment
        blocks = held.reads if held.prefill_side else range(self.params.layout.full_blocks(a.prompt_tokens))
        if held.pages:
            self.cache.keep(a.keys[blocks.start : blocks.stop], held.pages[: len(blocks)])
        self.buffer.release(held.pages)
        held.pages = ()
        self._pump_waiting()

    # --- staging of generated blocks -----------------------------------------------------------------------------

    def _stage_block(self, message: m.StageBlock) -> None:
        if self.params.write_back == "free":
            self._persist(message.request_id, message.key, message.parent, self.stage, (), 0)
            return
        self.stages.append(_Stage(message.request_id, message.key, message.parent))
        self._pump_stages()

    def _pump_stages(self) -> None:
        while self.stages:
            stage = self.stages[0]
            held = self.records.get(stage.request_id)
            if held is None:
                self.stages.popleft()
                continue
            # What the cache will keep lands where it can stay, if there is room: staging pages never depend on buffers.
            pages = self.cache.take(1) if self.cache.capacity else None
            cached = pages is not None
            pages = pages or self.stage.take(1)
            if pages is None:
                return
            self.stages.popleft()
            stage = replace(stage, cached=cached, page=pages[0])
            offset = self._stage_offset(stage)
            landing = Landing(
                pieces=(offset,),
                piece_bytes=self.params.layout.full_block_bytes,
                keys=(stage.key,),
                layer_begin=0,
                layer_end=self.params.layout.layers,
            )
            engine = held.assignment.decode_engine
            ref = self.issuer.issue(dram_endpoint(engine, direct=self.direct_copies), landing)
            self.out.add(OpenGrant(ref, landing))
            self.owners[ref.grant_id] = stage.request_id
            held.staged[ref.grant_id] = stage
            self.out.send(held.assignment.decode_engine, m.StageOpened(stage.request_id, stage.key, ref))

    def _stage_landed(self, stage: _Stage) -> None:
        pool, offset = self._stage_pool(stage), self._stage_offset(stage)
        self._persist(stage.request_id, stage.key, stage.parent, pool, (stage.page,), offset)
        if stage.cached:
            self.cache.keep((stage.key,), (stage.page,))
        pool.release((stage.page,))

    def _stage_pool(self, stage: _Stage) -> PagePool:
        return self.buffer if stage.cached else self.stage

    def _stage_offset(self, stage: _Stage) -> int:
        """Byte offset of the page that a block is staged in: staging pages follow the buffer's."""
        before = 0 if stage.cached else self.buffer.capacity * self.buffer.page_bytes
        return before + self._stage_pool(stage).offset(stage.page)

    # --- completions ---------------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Landings in own memory, completions of own writes."""
        match event:
            case WriteLanded():
                self._landed(event.grant_id)
            case LandingRefused():
                self._refused(event.grant_id, event.reason)
            case WriteCompleted():
                self._write_ended(event.write_id, "")
            case WriteFailed():
                self._write_ended(event.write_id, event.reason)
            case DeadlinePassed():
                self.persister.deadline_passed(event.key, self.now_ns)
            case Started():
                pass
            case _:
                raise unexpected(self.role, event)

    def _landed(self, grant_id: int) -> None:
        held = self.records.get(self.owners.pop(grant_id, ""))
        if held is None:
            return
        if grant_id in held.staged:
            self._stage_landed(held.staged.pop(grant_id))
        elif layer_blocks := held.grants.pop(grant_id):
            self._layers_landed(held, layer_blocks)
        else:
            self._read_landed(grant_id, held)

    def _refused(self, grant_id: int, reason: str) -> None:
        held = self.records.get(self.owners.get(grant_id, ""))
        if held is not None:
            self.fail(held, "WrongBlockLanded", reason)

    def _write_ended(self, write_id: int, failure: str) -> None:
        if self.persister.write_ended(write_id, failure, self.now_ns):
            return
        posted = self.writes.pop(write_id)
        self.buffer.release(posted.pages)
        held = self.records.get(posted.request_id)
        if held is not None and failure:
            self.fail(held, "WriteRefused", failure)
        elif held is not None and posted.fills_hbm:
            self.move(held, "PromptLoaded", _D)
            self._free(held)
        else:
            self._pump_waiting()

    # --- helpers -------------------------------------------------------------------------------------------------

    def _landing(self, pages: tuple[int, ...], keys: tuple[int, ...], begin: int, end: int) -> Landing:
        offset, size = self.params.layout.layer_slice(begin, end)
        pieces = tuple(self.buffer.offset(p) + offset for p in pages)
        return Landing(pieces=pieces, piece_bytes=size, keys=keys, layer_begin=begin, layer_end=end)

    def _grant(self, held: Held, endpoint: str, landing: Landing, brings: int) -> GrantRef:
        ref = self.issuer.issue(endpoint, landing)
        self.out.add(OpenGrant(ref, landing))
        self.owners[ref.grant_id] = held.request_id
        held.grants[ref.grant_id] = brings
        return ref

    def _write(
        self,
        held: Held,
        ref: GrantRef,
        engine: str,
        pages: tuple[int, ...],
        offset: int,
        size: int,
        *,
        fills_hbm: bool,
        blocks_each: int,
    ) -> None:
        """Post for ``engine``'s traffic manager, by the path that the HBM's owner grants."""
        via = dram_endpoint(engine, direct=is_copy_endpoint(ref.endpoint))
        write_id = self._new_write_id()
        self.buffer.retain(pages)
        self.writes[write_id] = _Posted(held.request_id, pages, fills_hbm)
        pieces = tuple(self.buffer.offset(p) + offset for p in pages)
        self.out.add(self.params.submission.write(write_id, ref, via, pieces, size, blocks_each=blocks_each))

    def _new_write_id(self) -> int:
        self._next_write += 1
        return self._next_write

    def release(self, record: Held) -> None:
        """Close the request's grants and let go of its pages; writes in flight hold theirs until they end."""
        for grant_id in (*record.grants, *record.staged):
            self.out.add(CloseGrant(grant_id))
            self.owners.pop(grant_id, None)
            if grant_id in self.reading:
                self._read_ended(grant_id)
        for stage in record.staged.values():
            self._stage_pool(stage).release((stage.page,))
        if record.reads_left:
            self.out.send(self.leader, m.ReadFinished(record.request_id, self.role))
        self.buffer.release(record.pages)
        record.pages = ()
        self._pump_waiting()
        self._pump_reads()
        self._pump_stages()
