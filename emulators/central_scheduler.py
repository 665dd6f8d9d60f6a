"""Central request scheduler (paper section 6 / 8.2-8.4): assigns (PE, DE) and the read side to every request.

Groups pull. On a PE group's fetch Algorithm 1 runs on the global FIFO; on a DE group's fetch all waiting requests are
spread over the groups and the fetching group's private queue is placed. A request starts when both are chosen; then the
read side is decided. What has been assigned since a report counts at once, so that stale reports do not pile requests
onto one engine: what a report cannot include yet, by the serial that it names, is added to its figures.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

import numpy as np

from emulators.base import Record, RoleMachine
from testbed.errors import PeerError
from testbed.fabric.spec import NodeKind
from testbed.ids import DRIVER, INDEX, SCHEDULER, node_of
from testbed.protocol import messages as m
from testbed.protocol.machine import Event
from testbed.protocol.params import ProtocolParams, SystemConfig
from testbed.protocol.plan import ClusterPlan
from testbed.protocol.scheduling import (
    EngineView,
    Waiting,
    select_decode,
    select_decode_group,
    select_prefill,
    select_side,
    select_split,
)
from testbed.protocol.transitions import TransitionTable


class SchedulerState(enum.Enum):
    """A request at the scheduler."""

    LOOKING_UP = "looking-up"
    QUEUED = "queued"
    HALF_CHOSEN = "half-chosen"
    ASSIGNED = "assigned"


TABLE = TransitionTable(
    role="central scheduler",
    start=SchedulerState.LOOKING_UP,
    ends=frozenset({SchedulerState.ASSIGNED}),
    edges={
        SchedulerState.LOOKING_UP: {"PrefixFound": (SchedulerState.QUEUED,)},
        SchedulerState.QUEUED: {"EngineChosen": (SchedulerState.HALF_CHOSEN,)},
        SchedulerState.HALF_CHOSEN: {"EngineChosen": (SchedulerState.ASSIGNED,)},
    },
    ignored={
        SchedulerState.LOOKING_UP: frozenset({"SubmitRequest"}),
        SchedulerState.QUEUED: frozenset({"SubmitRequest", "PrefixFound"}),
        SchedulerState.HALF_CHOSEN: frozenset({"SubmitRequest", "PrefixFound"}),
    },
)


@dataclass(slots=True, kw_only=True)
class _Request(Record):
    tokens: bytes
    keys: tuple[int, ...]
    generate_tokens: int
    hit_blocks: int = 0
    prefill_engine: str = ""
    decode_engine: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.tokens) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a leader has been told to count, in the message with this serial."""

    serial: int
    engine: str = ""
    tokens: int = 0
    hbm_tokens: int = 0
    read_node: str = ""
    read_tokens: int = 0


class CentralScheduler(RoleMachine[_Request]):
    """The one scheduler of the cluster."""

    table = TABLE  # type: ignore[assignment]

    def __init__(self, plan: ClusterPlan, system: SystemConfig, params: ProtocolParams) -> None:
        super().__init__(SCHEDULER, params)
        self.plan = plan
        self.system = system
        self.prefill_queue: deque[str] = deque()
        self.decode_queue: deque[str] = deque()
        self.private: dict[str, deque[str]] = {g.name: deque() for g in plan.groups if g.kind is NodeKind.DE}
        self.group_tokens: dict[str, int] = dict.fromkeys(self.private, 0)
        self.read_queues: dict[str, int] = dict.fromkeys(plan.nodes, 0)
        self._serials = dict.fromkeys((g.name for g in plan.groups), 0)
        self._told: dict[str, deque[_Told]] = {g.name: deque() for g in plan.groups}  # newer than the last report
        self._turn = {NodeKind.PE: 0, NodeKind.DE: 0}
        self._side_turn = 0

    def on_event(self, event: Event) -> None:
        """Nothing but messages concerns the scheduler."""

    def on_message(self, sender: str, message: m.Message) -> None:
        """Submissions, index answers, fetches."""
        match message:
            case m.SubmitRequest():
                self._submit(message)
            case m.PrefixFound():
                self._queue(message)
            case m.FetchRequests():
                self._fetch(message)
            case _:
                raise PeerError(f"{self.role}: {type(message).__name__} from {sender} is not for the scheduler")

    def _submit(self, message: m.SubmitRequest) -> None:
        layout = self.params.layout
        keys = layout.keys(np.frombuffer(message.tokens, dtype="<u4"))
        request = _Request(
            request_id=message.request_id,
            state=SchedulerState.LOOKING_UP,
            tokens=message.tokens,
            keys=keys,
            generate_tokens=message.generate_tokens,
        )
        if not self.begin(request):
            return
        if not keys or message.generate_tokens < 1:
            self.fail(request, "EmptyRequest", "a request has at least one prompt token and one token to generate")
            return
        need = layout.sequence_blocks(request.prompt_tokens, message.generate_tokens)
        if need > self.params.de_hbm_pages:  # it would block its queue for ever
            self.fail(request, "HbmTooSmall", f"it needs {need} blocks, a DE has {self.params.de_hbm_pages}")
            return
        if len(self.records) > self.params.queue_limit:
            self.fail(request, "SchedulerQueueFull", f"more than {self.params.queue_limit} requests wait")
            return
        reusable = layout.reusable_blocks(request.prompt_tokens)
        self.out.send(INDEX, m.LookupPrefix(message.request_id, keys[:reusable]))

    def _queue(self, message: m.PrefixFound) -> None:
        request = self.find(message.request_id, "PrefixFound")
        if request is None:
            return
        request.hit_blocks = message.hit_blocks
        self.move(request, "PrefixFound", SchedulerState.QUEUED)
        self.prefill_queue.append(request.request_id)
        self.decode_queue.append(request.request_id)
        if not self.system.balanced:
            request.prefill_engine = self._round_robin(NodeKind.PE)
            request.decode_engine = self._round_robin(NodeKind.DE)

    def _round_robin(self, kind: NodeKind) -> str:
        engines = self.plan.engines(kind)
        self._turn[kind] += 1
        return engines[(self._turn[kind] - 1) % len(engines)]

    # --- fetches -------------------------------------------------------------------------------------------------

    def _fetch(self, message: m.FetchRequests) -> None:
        if message.group not in self._told:
            raise PeerError(f"{self.role}: no group is called {message.group}")
        kind, views = NodeKind(message.kind), self._views(message)
        if kind is NodeKind.PE:
            chosen = self._fetch_prefill(views)
        else:
            self.group_tokens[message.group] = sum(v.tokens for v in views) + self._private_tokens(message.group)
            chosen = self._fetch_decode(message.group, views)
        reserved: list[tuple[str, str, int, int]] = []
        for request_id, engine in chosen:
            request = self.records[request_id]
            if kind is NodeKind.PE:
                request.prefill_engine = engine
            else:
                request.decode_engine = engine
            if request.state is SchedulerState.QUEUED:
                self.move(request, "EngineChosen", SchedulerState.HALF_CHOSEN)
                reserved.append((request_id, engine, *self._counted(request, kind)))
            else:
                self._assign(request, kind)
        if reserved:
            serial = self._next_serial(message.group)
            for _, engine, tokens, hbm_tokens in reserved:
                self._tell(message.group, _Told(serial=serial, engine=engine, tokens=tokens, hbm_tokens=hbm_tokens))
            ids, engines, counted, hbm = zip(*reserved, strict=True)
            self.out.send(self.plan.leader_of(engines[0]), m.EnginesChosen(serial, ids, engines, counted, hbm))

    def _views(self, message: m.FetchRequests) -> list[EngineView]:
        """The engines as reported, plus what the report cannot include yet."""
        told = self._told[message.group]
        while told and told[0].serial <= message.serial:
            told.popleft()
        reported = (EngineView(e.engine, e.node, e.sequences, e.tokens, e.free_hbm_tokens) for e in message.engines)
        views = {view.engine: view for view in reported}
        self.read_queues.update(message.read_queues)
        for entry in told:
            if entry.engine in views:
                view = views[entry.engine]
                view.sequences += 1
                view.tokens += entry.tokens
                view.free_hbm_tokens -= entry.hbm_tokens
            if entry.read_node:
                self.read_queues[entry.read_node] += entry.read_tokens
        return list(views.values())

    def _tell(self, group: str, told: _Told) -> None:
        self._told[group].append(told)

    def _next_serial(self, group: str) -> int:
        self._serials[group] += 1
        return self._serials[group]

    def _counted(self, request: _Request, kind: NodeKind) -> tuple[int, int]:
        """What a leader counts of a request: tokens, and tokens of HBM."""
        waiting = self._waiting(request)
        return (waiting.tokens, 0) if kind is NodeKind.PE else (waiting.total_tokens, waiting.hbm_tokens)

    def _waiting(self, request: _Request) -> Waiting:
        """A request as the selection functions see it."""
        layout, prompt, generate = self.params.layout, request.prompt_tokens, request.generate_tokens
        hbm_tokens = layout.sequence_blocks(prompt, generate) * layout.block_tokens
        return Waiting(request.request_id, prompt, prompt + generate, hbm_tokens)

    def _fetch_prefill(self, views: list[EngineView]) -> list[tuple[str, str]]:
        queue = [self.records[r] for r in self.prefill_queue if r in self.records]
        if self.system.balanced:
            chosen = select_prefill(
                [self._waiting(r) for r in queue],
                views,
                self.read_queues,
                alpha_tokens=self.params.alpha_tokens,
                beta_tokens=self.params.beta_tokens,
            )
        else:
            members = {v.engine for v in views}
            chosen = [(r.request_id, r.prefill_engine) for r in queue if r.prefill_engine in members]
        taken = {request_id for request_id, _ in chosen}
        self.prefill_queue = deque(r.request_id for r in queue if r.request_id not in taken)
        return chosen

    def _fetch_decode(self, group: str, views: list[EngineView]) -> list[tuple[str, str]]:
        waiting = [self.records[r] for r in self.decode_queue if r in self.records]
        if not self.system.balanced:
            members = {v.engine for v in views}
            mine = [r for r in waiting if r.decode_engine in members]
            taken = {r.request_id for r in mine}
            self.decode_queue = deque(r.request_id for r in waiting if r.request_id not in taken)
            return [(r.request_id, r.decode_engine) for r in mine]
        for request_id, to in select_decode_group([self._waiting(r) for r in waiting], self.group_tokens):
            self.private[to].append(request_id)
        self.decode_queue.clear()
        queue = [self.records[r] for r in self.private[group] if r in self.records]
        chosen = select_decode([self._waiting(r) for r in queue], views, z_factor=self.params.z_factor)
        self.private[group] = deque(r.request_id for r in queue[len(chosen) :])
        return chosen

    def _private_tokens(self, group: str) -> int:
        return sum(self._waiting(self.records[r]).total_tokens for r in self.private[group] if r in self.records)

    # --- assignment ----------------------------------------------------------------------------------------------

    def _assign(self, request: _Request, chosen_now: NodeKind) -> None:
        prefill_node, decode_node = node_of(request.prefill_engine), node_of(request.decode_engine)
        pe_blocks, de_blocks = self._shares(request, prefill_node, decode_node)
        assignment = m.Assignment(
            request.request_id,
            request.tokens,
            request.keys,
            request.hit_blocks,
            request.generate_tokens,
            pe_blocks,
            de_blocks,
            request.prefill_engine,
            request.decode_engine,
            prefill_node,
            decode_node,
        )
        block_tokens = self.params.layout.block_tokens
        self.move(request, "EngineChosen", SchedulerState.ASSIGNED)
        for engine, node in ((request.prefill_engine, prefill_node), (request.decode_engine, decode_node)):
            group = self.plan.group_of_node(node)
            serial = self._next_serial(group.name)
            tokens, hbm_tokens = self._counted(request, group.kind)
            if group.kind is chosen_now:  # the other half has been counted since it was chosen
                self._tell(group.name, _Told(serial=serial, engine=engine, tokens=tokens, hbm_tokens=hbm_tokens))
            if read_tokens := len(assignment.read_by(group.kind.value)) * block_tokens:
                self.read_queues[node] += read_tokens
                self._tell(group.name, _Told(serial=serial, read_node=node, read_tokens=read_tokens))
            self.out.send(group.leader, m.RequestsAssigned(serial, (assignment,)))
        scheduled = m.RequestScheduled(
            request.request_id,
            assignment.read_side,
            request.hit_blocks * block_tokens,
            de_blocks * block_tokens,
            request.prefill_engine,
            request.decode_engine,
        )
        self.out.send(DRIVER, scheduled)

    def _shares(self, request: _Request, prefill_node: str, decode_node: str) -> tuple[int, int]:
        """Hit blocks that the PE node and that the DE node read (paper 8.4): all on one side, but for a split read."""
        hits, queues = request.hit_blocks, (self.read_queues[prefill_node], self.read_queues[decode_node])
        if hits == 0 or not self.system.moves_kv:
            return 0, 0
        match self.system.side_policy:
            case "split":
                block_tokens, least = self.params.layout.block_tokens, self.params.split_least_blocks
                de_blocks = select_split(*queues, hit_blocks=hits, block_tokens=block_tokens, least_blocks=least)
            case "shorter_queue":
                de_blocks = hits if select_side(*queues) == "de" else 0
            case "round_robin":
                self._side_turn += 1
                de_blocks = 0 if self._side_turn % 2 else hits
            case "pe":
                de_blocks = 0
        return hits - de_blocks, de_blocks

    def release(self, record: _Request) -> None:
        """A chosen engine was counted at its leader: uncount it. Queues skip ids whose record is gone."""
        if record.state is SchedulerState.HALF_CHOSEN:
            for engine in (record.prefill_engine, record.decode_engine):
                if engine:
                    self.out.send(self.plan.leader_of(engine), m.AbortRequest(record.request_id, "Released"))
