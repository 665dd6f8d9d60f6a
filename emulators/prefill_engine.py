"""Prefill engine (PE): layerwise prefill over both read paths (paper 2.1, 4.1; Figure 4).

Per layer step, with ``layers_in_flight`` steps ahead: take HBM pages for the batch, let the DRAM that holds the hits
write their Layer Blocks (PE path 3-4, DE path 3-5), compute, write to the DE buffer (PE path 5-7: hits and misses;
DE path: misses only), free the pages. Basic is the same machine with one step that holds all layers.

A split read is both paths at once: the PE starts when both nodes have read their hits, and asks each DRAM for its own.

A prompt that exceeds the compute quota is prefilled in chunks (paper 8.5); blocks of an earlier chunk are in the DE
buffer by then and are loaded from there, like hits on the DE path.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from emulators.base import Record, participants, unexpected
from emulators.collectives import EXPERTS_ID, ExpertGroup, Phase
from emulators.group_member import GroupMember
from testbed.errors import PeerError
from testbed.ids import DRIVER, cnic_hbm_endpoint, hbm_endpoint, node_of
from testbed.protocol import messages as m
from testbed.protocol.batching import Candidate, Chunk, CostModel, pack_forward
from testbed.protocol.grants import GrantIssuer, GrantRef, Landing
from testbed.protocol.machine import (
    CloseGrant,
    Compute,
    ComputeFinished,
    ComputePrefill,
    DeadlinePassed,
    Event,
    ForgetSequence,
    LandingRefused,
    OpenGrant,
    PrefillItem,
    ShardArrived,
    Started,
    WriteCompleted,
    WriteFailed,
    WriteLanded,
)
from testbed.protocol.pages import PagePool
from testbed.protocol.params import ProtocolParams, SystemConfig
from testbed.protocol.transitions import TransitionTable


class PrefillState(enum.Enum):
    """A request at a PE."""

    RESERVING = "reserving DE buffer"
    READING = "hits being read"
    RUNNABLE = "runnable"
    RUNNING = "in a forward"
    FLUSHING = "sending last layers"
    FINISHED = "finished"


_NO_QUOTA_NS = 1 << 62
"""The compute quota is part of the paper's scheduling (8.5: DualPath and Oracle); other systems pack by HBM alone."""

_V, _R, _Q, _C, _F, _X = PrefillState

TABLE = TransitionTable(
    role="prefill engine",
    start=_V,
    ends=frozenset({_X}),
    edges={
        _V: {"BufferReserved": (_R, _Q), "PrefixLoaded": (_V,)},
        _R: {"PrefixLoaded": (_R, _Q)},
        _Q: {"Packed": (_C,), "LayerWritesOpened": (_Q,)},
        _C: {"LayerWritesOpened": (_C,), "ChunkComputed": (_Q, _F)},
        _F: {"LayerWritesOpened": (_F,), "AllFlushed": (_X,)},
    },
    ignored={state: frozenset({"AssignPrefill", "BufferReserved", "PrefixLoaded"}) for state in (_Q, _C, _F)}
    | {_R: frozenset({"AssignPrefill", "BufferReserved"}), _V: frozenset({"AssignPrefill"})},
    patience={_V: 2, _R: 3},
)


@dataclass(slots=True, kw_only=True)
class _Prompt(Record):
    assignment: m.Assignment
    computed_tokens: int = 0
    reading: set[str] = field(default_factory=set)  # nodes that have not read their hits yet
    cached_in: dict[str, int] = field(default_factory=dict)  # node -> blocks that it need not read
    chunk: int = 0
    layer_grants: dict[int, tuple[GrantRef, ...]] = field(default_factory=dict)  # by chunk
    flushes_out: int = 0  # steps computed and not yet wholly in the DE buffer


class _Stage(enum.Enum):
    """A layer step of a forward."""

    LOADING = 1
    LOADED = 2
    COMPUTING = 3
    FLUSHING = 4


@dataclass(slots=True)
class _Share:
    """One request's share of a layer step: its pages, what is still to land, what is still to leave."""

    prompt: _Prompt
    chunk: Chunk
    number: int
    pages: tuple[int, ...]
    loads_left: int = 0
    flushed: bool = False
    posted: bool = False


@dataclass(slots=True)
class _Step:
    index: int
    begin: int
    end: int
    stage: _Stage
    shares: list[_Share]


@dataclass(slots=True)
class _Forward:
    """A batch going through the layers: ``next_load``/``next_compute`` are step numbers."""

    items: list[tuple[_Prompt, Chunk, int]]
    next_load: int = 0
    next_compute: int = 0


class PrefillEngine(GroupMember[_Prompt]):
    """One PE (one GPU). Memory: ``pe_hbm_pages`` pages of one block's share of a layer step."""

    table = TABLE  # type: ignore[assignment]

    def __init__(
        self,
        engine: str,
        leader: str,
        system: SystemConfig,
        params: ProtocolParams,
        cost: CostModel,
        group: ExpertGroup | None = None,
    ) -> None:
        super().__init__(engine, leader, system, params, cost, group)
        self.hbm = PagePool(capacity=params.pe_hbm_pages, page_bytes=params.pe_page_bytes)
        self.issuer = GrantIssuer()
        self.runnable: deque[str] = deque()
        self.forward: _Forward | None = None
        self.steps: list[_Step] = []  # steps that hold HBM, oldest first; may belong to two forwards
        self.computing: _Step | None = None
        self.emitted: dict[str, int] = {}  # tokens of the step in work, until its last part is over
        self.loads: dict[int, tuple[_Step, _Share]] = {}  # open grant -> whose
        self.flushes: dict[int, tuple[_Step, _Share]] = {}  # write out -> whose
        self._next_id = 0

    # --- admission -----------------------------------------------------------------------------------------------

    def on_message(self, sender: str, message: m.Message) -> None:
        """Assignments from the leader; progress from the DRAMs of both nodes."""
        match message:
            case m.AssignPrefill():
                self._admit(message.assignment)
                self.replay_early(message.assignment.request_id)
            case m.BufferReserved() | m.PrefixLoaded() if self.hold_if_early(sender, message.request_id, message):
                pass
            case m.BufferReserved():
                if (prompt := self.find(message.request_id, "BufferReserved")) is not None:
                    self._buffer_reserved(prompt)
            case m.PrefixLoaded():
                if (prompt := self.find(message.request_id, "PrefixLoaded")) is not None:
                    prompt.reading.discard(sender)
                    prompt.cached_in[sender] = message.cached_blocks
                    if prompt.state is _R and not prompt.reading:
                        self._make_runnable(prompt, "PrefixLoaded")
                    else:
                        self.move(prompt, "PrefixLoaded", prompt.state)
            case m.LayerWritesOpened():
                if (prompt := self.find(message.request_id, "LayerWritesOpened")) is not None:
                    prompt.layer_grants.setdefault(message.chunk, message.grants)  # a repeat brings the same
                    self.move(prompt, "LayerWritesOpened", prompt.state)
                    self._advance()
            case _:
                raise PeerError(f"{self.role}: {type(message).__name__} from {sender} is not for a prefill engine")

    def _admit(self, a: m.Assignment) -> None:
        prompt = _Prompt(request_id=a.request_id, state=_V, participants=participants(a), assignment=a)
        prompt.computed_tokens = a.hit_blocks * self.params.layout.block_tokens
        if not self.begin(prompt):
            self.release_ended(a.request_id, self.leader)
            return
        prompt.reading = {node for node, share in _shares(a) if share}
        if len(a.keys) > self._batch_blocks():
            detail = f"{len(a.keys)} blocks per layer step exceed the {self._batch_blocks()} that {self.role} can hold"
            self.fail(prompt, "HbmTooSmall", detail)
        elif not self.system.moves_kv:
            self._make_runnable(prompt, "BufferReserved")

    def _batch_blocks(self) -> int:
        """Blocks that a forward may span: HBM holds the steps in flight, and as many being sent."""
        if not self.system.layerwise:
            return self.hbm.capacity
        return self.hbm.capacity // (2 * min(self.params.layers_in_flight, len(self.params.steps)))

    def _buffer_reserved(self, prompt: _Prompt) -> None:
        a = prompt.assignment
        if a.pe_blocks:
            self.out.send(a.prefill_node, m.LoadPrefix(a))
        if prompt.reading:
            self.move(prompt, "BufferReserved", _R)
        else:
            self._make_runnable(prompt, "BufferReserved")

    def _make_runnable(self, prompt: _Prompt, event: str) -> None:
        self.move(prompt, event, _Q)
        self.runnable.append(prompt.request_id)
        self._advance()

    # --- the forward ---------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start whatever can start: a forward, loads, a compute, flushes."""
        self._start_forward()
        self._start_loads()
        self._start_compute()
        self._post_flushes()
        self.go_along()

    def _start_forward(self) -> None:
        if self.forward is not None or not self.runnable:
            return
        queue = [self.records[r] for r in self.runnable if r in self.records]
        candidates = [
            Candidate(p.request_id, p.computed_tokens, p.assignment.prompt_tokens - p.computed_tokens) for p in queue
        ]
        chunks = pack_forward(
            candidates,
            self.cost,
            quota_ns=self.params.compute_quota_ns if self.system.balanced else _NO_QUOTA_NS,
            attention_layers=self.params.layout.layers if self.params.quota_scope == "forward" else 1,
            block_tokens=self.params.layout.block_tokens,
            memory_blocks=self._batch_blocks(),
        )
        taken = {c.request_id for c in chunks}
        self.runnable = deque(p.request_id for p in queue if p.request_id not in taken)
        if not chunks:
            return
        items: list[tuple[_Prompt, Chunk, int]] = []
        for chunk in chunks:
            prompt = self.records[chunk.request_id]
            self.move(prompt, "Packed", _C)
            items.append((prompt, chunk, prompt.chunk))
            if prompt.chunk == 0:
                self.out.send(DRIVER, _started(prompt))
            else:
                cached = chunk.cached_tokens // self.params.layout.block_tokens
                self.out.send(DRIVER, m.ChunkStarted(prompt.request_id, prompt.chunk, cached))
            if self.system.moves_kv:
                self._open_layer_writes(prompt, chunk)
        self.forward = _Forward(items)

    def _sent_from(self, prompt: _Prompt, chunk: Chunk, number: int) -> int:
        """First block that this chunk sends to the DE buffer: hits that the PE node has read go along, once."""
        if number == 0:
            return prompt.assignment.de_blocks
        return chunk.cached_tokens // self.params.layout.block_tokens

    def _open_layer_writes(self, prompt: _Prompt, chunk: Chunk) -> None:
        first = self._sent_from(prompt, chunk, prompt.chunk)
        count = self.params.layout.blocks(chunk.cached_tokens + chunk.new_tokens) - first
        a = prompt.assignment
        self.out.send(a.decode_node, m.OpenLayerWrites(a.request_id, prompt.chunk, first, count))

    def _start_loads(self) -> None:
        """Take HBM for further steps and ask for their loads, as far as the depth and the memory allow."""
        forward = self.forward
        if forward is None:
            return
        ranges = self.params.steps
        while forward.next_load < len(ranges):
            ahead = sum(1 for s in self.steps if s.stage is not _Stage.FLUSHING)
            if ahead >= self.params.layers_in_flight:
                return
            needs = [self.params.layout.blocks(c.cached_tokens + c.new_tokens) for _, c, _ in forward.items]
            pages = self.hbm.take(sum(needs))
            if pages is None:
                return
            begin, end = ranges[forward.next_load]
            step = _Step(forward.next_load, begin, end, _Stage.LOADING, [])
            forward.next_load += 1
            self.steps.append(step)
            at = 0
            for (prompt, chunk, number), count in zip(forward.items, needs, strict=True):
                share = _Share(prompt, chunk, number, pages[at : at + count])
                at += count
                step.shares.append(share)
                if prompt.request_id in self.records and self.system.moves_kv:
                    self._request_loads(step, share)
            self._loaded(step)

    def _request_loads(self, step: _Step, share: _Share) -> None:
        """Ask the DRAMs that hold the blocks: hits where they were read, earlier chunks in the DE buffer."""
        a = share.prompt.assignment
        cached = share.chunk.cached_tokens // self.params.layout.block_tokens
        sources = [(node, share.start, share.stop) for node, share in _shares(a)]
        for node, first, last in (*sources, (a.decode_node, a.hit_blocks, cached)):
            if first == last:
                continue
            pieces = tuple(self.hbm.offset(p) for p in share.pages[first:last])
            size = (step.end - step.begin) * self.params.layout.layer_block_bytes
            landing = Landing(
                pieces=pieces, piece_bytes=size, keys=a.keys[first:last], layer_begin=step.begin, layer_end=step.end
            )
            # The copy engine reaches no further than the own node.
            direct = self.system.direct_copies and node == node_of(self.role)
            ref = self.issuer.issue(hbm_endpoint(self.role, direct=direct), landing)
            self.out.add(OpenGrant(ref, landing))
            self.loads[ref.grant_id] = (step, share)
            share.loads_left += 1
            self.out.send(node, m.LoadLayers(a.request_id, first, last - first, step.begin, step.end, ref))

    def _loaded(self, step: _Step) -> None:
        if step.stage is _Stage.LOADING and not any(share.loads_left for share in step.shares):
            step.stage = _Stage.LOADED

    def _start_compute(self) -> None:
        forward, group = self.forward, self.group
        if forward is None or self.computing is not None or (group is not None and not group.ready):
            return
        step = next((s for s in self.steps if s.stage is _Stage.LOADED and s.index == forward.next_compute), None)
        if step is None:
            return
        step.stage = _Stage.COMPUTING
        self.computing = step
        if group is not None and group.phase is Phase.IDLE:
            group.begin(self.cost.attention_layer_time_ns(self._batch_of(step)) * self.params.layout.layers)
        items = tuple(self._item(share) for share in self._alive(step))
        self.out.add(ComputePrefill(self._new_id(), self._duration_ns(step), step.begin, step.end, items))

    def _alive(self, step: _Step) -> list[_Share]:
        return [share for share in step.shares if share.prompt.request_id in self.records]

    def _batch_of(self, step: _Step) -> list[tuple[int, int]]:
        return [(share.chunk.cached_tokens, share.chunk.new_tokens) for share in self._alive(step)]

    def _duration_ns(self, step: _Step) -> int:
        """Time of a step; with collectives, of its next part without the experts."""
        batch, group = self._batch_of(step), self.group
        if not batch:
            return 0
        if group is None:
            return self.cost.prefill_layer_time_ns(batch, step.end - step.begin)
        whole_ns = self.cost.prefill_layer_time_ns(batch, group.current.layers)
        return group.local_ns(whole_ns, sum(new for _, new in batch))

    def _item(self, share: _Share) -> PrefillItem:
        a, chunk = share.prompt.assignment, share.chunk
        end = chunk.cached_tokens + chunk.new_tokens
        return PrefillItem(
            a.request_id,
            a.tokens,
            a.keys[: len(share.pages)],
            tuple(self.hbm.offset(p) for p in share.pages),
            chunk.cached_tokens // self.params.layout.block_tokens,
            end,
            end == a.prompt_tokens,
        )

    def _compute_finished(self, event: ComputeFinished) -> None:
        if self.group is None:
            self._computed(event.tokens)
        elif event.compute_id == EXPERTS_ID:
            self.experts_computed()
        else:
            assert self.computing is not None
            self.emitted |= event.tokens
            self.part_computed(sum(new for _, new in self._batch_of(self.computing)))

    def has_batch(self) -> bool:
        """A forward is packed."""
        return self.forward is not None

    def batch(self) -> list[_Prompt]:
        """Prompts of the forward that are still wanted."""
        items = self.forward.items if self.forward is not None else []
        return [prompt for prompt, _, _ in items if prompt.request_id in self.records]

    def part_over(self) -> None:
        """Go on with the next part of the step, or with the next step."""
        assert self.group is not None
        if self.computing is None:
            self._advance()
        elif self.group.past.ends_step:
            tokens, self.emitted = self.emitted, {}
            self._computed(tokens)
        else:
            self.out.add(Compute(self._new_id(), self._duration_ns(self.computing)))

    def _computed(self, tokens: dict[str, int]) -> None:
        step, forward = self.computing, self.forward
        assert step is not None and forward is not None
        self.computing = None
        step.stage = _Stage.FLUSHING
        forward.next_compute += 1
        for share in step.shares:
            share.prompt.flushes_out += 1
            if share.prompt.request_id not in self.records or not self.system.moves_kv:
                self._flushed(share)
        if forward.next_compute == len(self.params.steps):
            self.forward = None
            for prompt, chunk, _ in forward.items:
                if prompt.request_id in self.records:
                    self._chunk_computed(prompt, chunk, tokens)
        self._retire()
        self._advance()

    def _chunk_computed(self, prompt: _Prompt, chunk: Chunk, tokens: dict[str, int]) -> None:
        prompt.computed_tokens += chunk.new_tokens
        prompt.chunk += 1
        a = prompt.assignment
        if prompt.computed_tokens < a.prompt_tokens:
            self.move(prompt, "ChunkComputed", _Q)
            self._check_flushed(prompt)
            return
        token = tokens[a.request_id]
        self.move(prompt, "ChunkComputed", _F)
        self.out.send(DRIVER, m.TokensEmitted(a.request_id, 0, (token,)))
        self.out.send(a.decode_engine, m.PrefillFinished(a.request_id, token))
        if a.pe_blocks:
            self.out.send(a.prefill_node, m.PrefixReleased(a.request_id))
        self._check_flushed(prompt)

    # --- sending to the DE buffer --------------------------------------------------------------------------------

    def _post_flushes(self) -> None:
        for step in self.steps:
            if step.stage is not _Stage.FLUSHING:
                continue
            for share in step.shares:
                grants = share.prompt.layer_grants.get(share.number)
                if share.posted or share.flushed or grants is None:
                    continue
                first = self._sent_from(share.prompt, share.chunk, share.number)
                pieces = tuple(self.hbm.offset(p) for p in share.pages[first:])
                size = (step.end - step.begin) * self.params.layout.layer_block_bytes
                write_id = self._new_id()
                self.flushes[write_id] = (step, share)
                share.posted = True
                via, layers = cnic_hbm_endpoint(self.role), step.end - step.begin
                cost = self.params.submission
                self.out.add(cost.write(write_id, grants[step.index], via, pieces, size, blocks_each=layers))

    def _flushed(self, share: _Share) -> None:
        share.flushed = True
        share.prompt.flushes_out -= 1

    def _check_flushed(self, prompt: _Prompt) -> None:
        """All layers so far are in the DE buffer: the prompt ends here, or its next chunk may load them from there."""
        if prompt.flushes_out:
            return
        if prompt.state is _F:
            self.out.send(self.leader, m.RequestReleased(prompt.request_id, self.role))
            self.move(prompt, "AllFlushed", _X)
        elif prompt.state is _Q:
            self.runnable.appendleft(prompt.request_id)

    def _retire(self) -> None:
        """Free the HBM of steps that have left it."""
        for step in [s for s in self.steps if s.stage is _Stage.FLUSHING and all(h.flushed for h in s.shares)]:
            self.steps.remove(step)
            for share in step.shares:
                self.hbm.release(share.pages)

    # --- completions ---------------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Landings in HBM, completions of compute and of own writes."""
        match event:
            case WriteLanded():
                if (entry := self.loads.pop(event.grant_id, None)) is not None:
                    entry[1].loads_left -= 1
                    self._loaded(entry[0])
                    self._advance()
            case LandingRefused():
                entry = self.loads.get(event.grant_id)
                if entry is not None and entry[1].prompt.request_id in self.records:
                    self.fail(entry[1].prompt, "WrongBlockLanded", event.reason)
            case ComputeFinished():
                self._compute_finished(event)
            case WriteCompleted():
                self._write_ended(event.write_id, "")
            case WriteFailed():
                self._write_ended(event.write_id, event.reason)
            case ShardArrived() | DeadlinePassed():
                self.on_collective(event)
            case Started():
                pass
            case _:
                raise unexpected(self.role, event)

    def _write_ended(self, write_id: int, failure: str) -> None:
        _, share = self.flushes.pop(write_id)
        self._flushed(share)
        prompt = share.prompt
        if prompt.request_id in self.records:
            if failure:
                self.fail(prompt, "WriteRefused", failure)
            else:
                self._check_flushed(prompt)
        self._retire()
        self._advance()

    def release(self, record: _Prompt) -> None:
        """Close the request's grants; its share of every step goes on empty and is freed with the step."""
        for grant_id in [g for g, (_, share) in self.loads.items() if share.prompt is record]:
            step, share = self.loads.pop(grant_id)
            share.loads_left -= 1
            self.out.add(CloseGrant(grant_id))
            self._loaded(step)
        for step in self.steps:
            for share in step.shares:
                if share.prompt is record and step.stage is _Stage.FLUSHING and not share.posted and not share.flushed:
                    self._flushed(share)
        self.out.add(ForgetSequence(record.request_id))
        self.out.send(self.leader, m.RequestReleased(record.request_id, self.role))
        self._retire()
        self._advance()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id


def _started(prompt: _Prompt) -> m.PrefillStarted:
    a, cached = prompt.assignment, prompt.cached_in
    return m.PrefillStarted(a.request_id, cached.get(a.prefill_node, 0), cached.get(a.decode_node, 0))


def _shares(a: m.Assignment) -> tuple[tuple[str, range], ...]:
    """Which node reads which hits from storage, and has them until the prompt has been computed."""
    return (a.decode_node, a.read_by("de")), (a.prefill_node, a.read_by("pe"))
