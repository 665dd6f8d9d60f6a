"""Group leader (paper 8.1): rank 0 of a group pulls work for all its engines at a fixed interval and hands it out.

It keeps what the engines would report: seq_e, tok_e and free HBM over requests assigned and unfinished, and read_q of
the group's nodes (tokens of hits assigned to be read there and not read yet: thresholds are in tokens). A request's HBM
counts from its assignment (paper 8.3), long before the DE takes it: else a DE looks free while it waits for prefill.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from emulators.base import Record, RoleMachine, participants
from testbed.errors import PeerError
from testbed.fabric.spec import NodeKind
from testbed.ids import SCHEDULER, node_of
from testbed.protocol import messages as m
from testbed.protocol.machine import DeadlinePassed, Event, SetDeadline, Started
from testbed.protocol.params import ProtocolParams
from testbed.protocol.plan import GroupPlan
from testbed.protocol.transitions import TransitionTable

FETCH = "fetch"


class LeaderState(enum.Enum):
    """A request at the leader."""

    RESERVED = "reserved"
    ASSIGNED = "assigned"
    RELEASED = "released"


TABLE = TransitionTable(
    role="group leader",
    start=LeaderState.RESERVED,
    ends=frozenset({LeaderState.RELEASED}),
    edges={
        LeaderState.RESERVED: {"RequestsAssigned": (LeaderState.ASSIGNED,)},
        LeaderState.ASSIGNED: {
            "RequestReleased": (LeaderState.RELEASED,),
            "ReadFinished": (LeaderState.ASSIGNED,),
        },
    },
    ignored={
        LeaderState.RESERVED: frozenset({"EnginesChosen"}),
        LeaderState.ASSIGNED: frozenset({"EnginesChosen", "RequestsAssigned"}),
    },
    patience={LeaderState.RESERVED: 2, LeaderState.ASSIGNED: 20},
)


@dataclass(slots=True, kw_only=True)
class _Held(Record):
    engine: str
    tokens: int
    hbm_tokens: int
    read_node: str = ""
    read_tokens: int = 0


class GroupLeader(RoleMachine[_Held]):
    """The leader of one group."""

    table = TABLE  # type: ignore[assignment]  # enum.Enum is the common base of all state sets

    def __init__(self, group: GroupPlan, params: ProtocolParams) -> None:
        super().__init__(group.leader, params)
        self.group = group
        self.serial = 0
        """Of the last message of the scheduler: what the next report includes."""

    def on_event(self, event: Event) -> None:
        """The interval has passed, or the run starts: pull."""
        if isinstance(event, Started) or (isinstance(event, DeadlinePassed) and event.key == FETCH):
            self._fetch()
            self.out.add(SetDeadline(FETCH, self.now_ns + self.params.fetch_interval_ns))

    def _fetch(self) -> None:
        sequences = dict.fromkeys(self.group.engines, 0)
        tokens = dict.fromkeys(self.group.engines, 0)
        hbm = dict.fromkeys(self.group.engines, 0)
        queues = dict.fromkeys(self.group.nodes, 0)
        for held in self.records.values():
            sequences[held.engine] += 1
            tokens[held.engine] += held.tokens
            hbm[held.engine] += held.hbm_tokens
            if held.read_node:
                queues[held.read_node] += held.read_tokens
        capacity = self.params.de_hbm_pages * self.params.layout.block_tokens
        loads = tuple(
            m.EngineLoad(e, node_of(e), sequences[e], tokens[e], capacity - hbm[e]) for e in self.group.engines
        )
        report = m.FetchRequests(self.group.name, self.group.kind.value, self.serial, loads, queues)
        self.out.send(SCHEDULER, report)

    def on_message(self, sender: str, message: m.Message) -> None:
        """Reservations and assignments by the scheduler, releases by engines, finished reads by DRAM."""
        match message:
            case m.EnginesChosen():
                self.serial = max(self.serial, message.serial)
                reserved = zip(message.request_ids, message.engines, message.tokens, message.hbm_tokens, strict=True)
                for request_id, engine, tokens, hbm_tokens in reserved:
                    self._reserve(request_id, engine, tokens, hbm_tokens)
            case m.RequestsAssigned():
                self.serial = max(self.serial, message.serial)
                for assignment in message.assignments:
                    self._assign(assignment)
            case m.RequestReleased():
                if (held := self.find(message.request_id, "RequestReleased")) is not None:
                    self.move(held, "RequestReleased", LeaderState.RELEASED)
            case m.ReadFinished():
                if (held := self.find(message.request_id, "ReadFinished")) is not None:
                    held.read_tokens = 0
                    self.move(held, "ReadFinished", LeaderState.ASSIGNED)
            case _:
                raise PeerError(f"{self.role}: {type(message).__name__} from {sender} is not for a leader")

    def _reserve(self, request_id: str, engine: str, tokens: int, hbm_tokens: int) -> None:
        held = _Held(
            request_id=request_id, state=LeaderState.RESERVED, engine=engine, tokens=tokens, hbm_tokens=hbm_tokens
        )
        self.begin(held)

    def _assign(self, assignment: m.Assignment) -> None:
        prefill = self.group.kind is NodeKind.PE
        engine = assignment.prefill_engine if prefill else assignment.decode_engine
        prompt, generate, layout = assignment.prompt_tokens, assignment.generate_tokens, self.params.layout
        if prefill:
            self._reserve(assignment.request_id, engine, prompt, 0)
        else:
            hbm_tokens = layout.sequence_blocks(prompt, generate) * layout.block_tokens
            self._reserve(assignment.request_id, engine, prompt + generate, hbm_tokens)
        held = self.find(assignment.request_id, "RequestsAssigned")
        if held is None:
            return
        held.participants = participants(assignment)
        held.read_node = node_of(engine)
        held.read_tokens = len(assignment.read_by(self.group.kind.value)) * layout.block_tokens
        self.move(held, "RequestsAssigned", LeaderState.ASSIGNED)
        self.out.send(engine, m.AssignPrefill(assignment) if prefill else m.AssignDecode(assignment))

    def release(self, record: _Held) -> None:
        """Nothing but the record itself is held."""
