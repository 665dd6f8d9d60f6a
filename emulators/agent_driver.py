"""Agent driver: replays trajectories against the cluster (paper A.3, A.4) and keeps what the agents saw.

Round i's prompt is all of the context so far, generated tokens included, plus the appended tokens; sampling is forced
to exactly the recorded count. Tool time is zero: the next round is sent when the last one is complete.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from emulators.base import Record, RoleMachine, unexpected
from testbed.errors import PeerError
from testbed.ids import DRIVER, SCHEDULER, node_of
from testbed.protocol import messages as m
from testbed.protocol.layout import U32
from testbed.protocol.machine import DeadlinePassed, Event, SetDeadline, Started
from testbed.protocol.params import ProtocolParams
from testbed.protocol.transitions import TransitionTable

ARRIVAL_PREFIX = "arrival/"


class AgentState(enum.Enum):
    """A request as its agent sees it."""

    SUBMITTED = "submitted"
    SCHEDULED = "scheduled"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    COMPLETED = "completed"


_S, _C, _P, _D, _X = AgentState

TABLE = TransitionTable(
    role="agent driver",
    start=_S,
    ends=frozenset({_X}),
    edges={
        # Roles speak to the driver over connections of their own, so the news of a request may overtake each other.
        _S: {
            "RequestScheduled": (_C,),
            "PrefillStarted": (_P,),
            "TokensEmitted": (_D,),
            "RequestCompleted": (_D,),
        },
        _C: {"PrefillStarted": (_P,), "TokensEmitted": (_D,), "RequestCompleted": (_D,)},
        _P: {
            "RequestScheduled": (_P,),
            "ChunkStarted": (_P,),
            "TokensEmitted": (_D,),
            "RequestCompleted": (_D,),
        },
        _D: {
            "RequestScheduled": (_D,),
            "PrefillStarted": (_D,),
            "ChunkStarted": (_D,),
            "TokensEmitted": (_D, _X),
            "RequestCompleted": (_D, _X),
        },
    },
    ignored={_C: frozenset({"RequestScheduled"}), _P: frozenset({"PrefillStarted"})},
    patience={_S: 4, _C: 10, _P: 4, _D: 6},
)


class Script(Protocol):
    """One agent's replay; turns are 0-based."""

    @property
    def name(self) -> str:
        """Name of the agent."""
        ...

    @property
    def turns(self) -> int:
        """Number of rounds."""
        ...

    def generate_tokens(self, turn: int) -> int:
        """Tokens to emit in a round."""
        ...

    def append_ids(self, turn: int) -> U32:
        """Token ids appended in a round, uint32 [n]."""
        ...


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One round as the agent saw it. Times in ns on the world's clock; 0 where it never happened."""

    agent: int
    turn: int
    prompt_tokens: int
    generate_tokens: int
    submitted_ns: int
    scheduled_ns: int = 0
    prefill_started_ns: int = 0
    first_token_ns: int = 0
    second_token_ns: int = 0
    last_token_ns: int = 0
    completed_ns: int = 0
    read_side: str = ""
    hit_tokens: int = 0
    de_hit_tokens: int = 0
    """Hits that the DE node reads; the PE node reads the others (unless ``read_side`` is "none")."""
    dram_hit_tokens: int = 0
    de_dram_hit_tokens: int = 0
    """Of the hits, and of those that the DE node reads: what was in the DRAM of the reader already."""
    prefill_engine: str = ""
    decode_engine: str = ""
    chunk_blocks: dict[int, int] = field(default_factory=dict)
    """Blocks loaded again for each chunk after the first (chunked prefill)."""
    tokens: dict[int, int] = field(default_factory=dict)
    error: str = ""
    error_detail: str = ""


@dataclass(slots=True, kw_only=True)
class _Round(Record):
    """A round in progress."""

    outcome: Outcome
    durable: bool = False


class AgentDriver(RoleMachine[_Round]):
    """All agents of a run. ``outcomes`` grows by one entry per round submitted."""

    table = TABLE  # type: ignore[assignment]

    def __init__(
        self, scripts: Sequence[Script], starts_ns: Sequence[int], params: ProtocolParams, tool_delay_ns: int = 0
    ) -> None:
        super().__init__(DRIVER, params)
        self.scripts = scripts
        self.starts_ns = starts_ns
        self.tool_delay_ns = tool_delay_ns
        self.contexts: list[U32] = [np.empty(0, dtype=np.uint32) for _ in scripts]
        self.outcomes: list[Outcome] = []
        self.started_ns = 0
        self.agents_left = len(scripts)

    @property
    def finished(self) -> bool:
        """Have all agents ended?"""
        return self.agents_left == 0

    def on_event(self, event: Event) -> None:
        """The run starts; an agent arrives."""
        match event:
            case Started():
                self.started_ns = self.now_ns
                for agent, start_ns in enumerate(self.starts_ns):
                    if start_ns == 0:
                        self._submit(agent, 0)
                    else:
                        self._submit_later(agent, 0, start_ns)
            case DeadlinePassed() if event.key.startswith(ARRIVAL_PREFIX):
                agent, turn = map(int, event.key.removeprefix(ARRIVAL_PREFIX).split("."))
                self._submit(agent, turn)
            case DeadlinePassed():
                pass  # of a round that has just ended
            case _:
                raise unexpected(self.role, event)

    def _submit_later(self, agent: int, turn: int, delay_ns: int) -> None:
        self.out.add(SetDeadline(f"{ARRIVAL_PREFIX}{agent}.{turn}", self.now_ns + delay_ns))

    def _submit(self, agent: int, turn: int) -> None:
        script = self.scripts[agent]
        prompt = np.concatenate([self.contexts[agent], script.append_ids(turn).astype(np.uint32)])
        self.contexts[agent] = prompt
        outcome = Outcome(
            agent=agent,
            turn=turn,
            prompt_tokens=len(prompt),
            generate_tokens=script.generate_tokens(turn),
            submitted_ns=self.now_ns,
        )
        self.outcomes.append(outcome)
        record = _Round(request_id=f"{agent}.{turn}", state=_S, participants=(SCHEDULER,), outcome=outcome)
        self.begin(record)
        tokens = prompt.astype("<u4").tobytes()
        self.out.send(SCHEDULER, m.SubmitRequest(record.request_id, tokens, outcome.generate_tokens))

    def on_message(self, sender: str, message: m.Message) -> None:
        """News of requests."""
        match message:
            case m.RequestScheduled():
                self._scheduled(message)
            case m.PrefillStarted():
                if (record := self.find(message.request_id, "PrefillStarted")) is not None:
                    self._prefill_started(record, message)
            case m.ChunkStarted():
                if (record := self.find(message.request_id, "ChunkStarted")) is not None:
                    record.outcome.chunk_blocks[message.chunk] = message.cached_blocks
                    self.move(record, "ChunkStarted", record.state)
            case m.TokensEmitted():
                if (record := self.find(message.request_id, "TokensEmitted")) is not None:
                    self._tokens(record, message)
            case m.RequestCompleted():
                if (record := self.find(message.request_id, "RequestCompleted")) is not None:
                    record.durable = True
                    self._check_completed(record, "RequestCompleted")
            case m.RequestFailed():
                self._failed(message.request_id, message.error, f"{message.role}: {message.detail}")
            case _:
                raise PeerError(f"{self.role}: {type(message).__name__} from {sender} is not for an agent driver")

    def _scheduled(self, message: m.RequestScheduled) -> None:
        holders = _holders(message)
        record = self.find(message.request_id, "RequestScheduled")
        if record is None:
            if message.request_id not in self.records:  # given up before its engines were known: let go of it there too
                self._abort(message.request_id, holders, "GivenUp")
            return
        outcome = record.outcome
        record.participants = (SCHEDULER, *holders)
        outcome.scheduled_ns = outcome.scheduled_ns or self.now_ns
        outcome.read_side = message.read_side
        outcome.hit_tokens, outcome.de_hit_tokens = message.hit_tokens, message.de_hit_tokens
        outcome.prefill_engine, outcome.decode_engine = message.prefill_engine, message.decode_engine
        self.move(record, "RequestScheduled", _C if record.state is _S else record.state)

    def _prefill_started(self, record: _Round, message: m.PrefillStarted) -> None:
        outcome, block_tokens = record.outcome, self.params.layout.block_tokens
        outcome.prefill_started_ns = outcome.prefill_started_ns or self.now_ns
        outcome.de_dram_hit_tokens = message.de_cached_blocks * block_tokens
        outcome.dram_hit_tokens = outcome.de_dram_hit_tokens + message.pe_cached_blocks * block_tokens
        self.move(record, "PrefillStarted", _P if record.state in (_S, _C) else record.state)

    def _tokens(self, record: _Round, message: m.TokensEmitted) -> None:
        outcome = record.outcome
        for at, token in enumerate(message.tokens, start=message.first_index):
            if not 0 <= at < outcome.generate_tokens or outcome.tokens.get(at, token) != token:
                detail = f"{message.first_index}+{len(message.tokens)} tokens, or two at one place"
                self.fail(record, "WrongTokenCount", detail)
                return
            if at in outcome.tokens:
                continue
            outcome.tokens[at] = token
            if at == 0:
                outcome.first_token_ns = self.now_ns
            elif at == 1:
                outcome.second_token_ns = self.now_ns
        if len(outcome.tokens) == outcome.generate_tokens and not outcome.last_token_ns:
            outcome.last_token_ns = self.now_ns
        self._check_completed(record, "TokensEmitted")

    def _check_completed(self, record: _Round, event: str) -> None:
        """The round ends when all tokens are here and its blocks are durable; the next one follows after the tool."""
        outcome = record.outcome
        if not record.durable or len(outcome.tokens) < outcome.generate_tokens:
            self.move(record, event, _D)
            return
        outcome.completed_ns = self.now_ns
        generated = np.array([outcome.tokens[i] for i in range(outcome.generate_tokens)], dtype=np.uint32)
        self.contexts[outcome.agent] = np.concatenate([self.contexts[outcome.agent], generated])
        self.move(record, event, _X)
        if outcome.turn + 1 == self.scripts[outcome.agent].turns:
            self.agents_left -= 1
        elif self.tool_delay_ns:
            self._submit_later(outcome.agent, outcome.turn + 1, self.tool_delay_ns)
        else:
            self._submit(outcome.agent, outcome.turn + 1)

    def fail(self, record: _Round, error: str, detail: str) -> None:
        """Our own deadline or check."""
        self._failed(record.request_id, error, detail)

    def _failed(self, request_id: str, error: str, detail: str) -> None:
        """A round ends with a named error; its agent stops (retries come with the recovery policy).

        Whoever reported it has told the others; the driver tells them again, for it may be that nobody held the
        request, or that the report came from a role that has nothing to do with it.
        """
        record = self.records.get(request_id)
        if record is None:
            return
        self.failures += 1
        record.outcome.error, record.outcome.error_detail = error, detail
        record.outcome.completed_ns = self.now_ns
        self.end(record)
        self._abort(request_id, record.participants, error)
        self.agents_left -= 1

    def _abort(self, request_id: str, roles: Sequence[str], error: str) -> None:
        for role in roles:
            self.out.send(role, m.AbortRequest(request_id, error))

    def _aborted(self, request_id: str) -> None:
        """Another role gives up a request: never in silence."""
        self._failed(request_id, "Aborted", "another role gave up on it and did not say why")

    def release(self, record: _Round) -> None:
        """Nothing is held."""


def _holders(message: m.RequestScheduled) -> tuple[str, ...]:
    pe, de = message.prefill_engine, message.decode_engine
    return (pe, de, node_of(pe), node_of(de))
