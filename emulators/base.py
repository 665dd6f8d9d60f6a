"""What all roles share: requests by id, their states by table, deadlines, and the one way a request fails."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from testbed.errors import BugError, PeerError
from testbed.ids import DRIVER, SCHEDULER
from testbed.protocol import messages as m
from testbed.protocol.machine import Action, ClearDeadline, DeadlinePassed, Event, Outbox, Received, Send, SetDeadline
from testbed.protocol.params import ProtocolParams
from testbed.protocol.transitions import TransitionTable

_REMEMBERED = 8192  # ended requests whose late messages are known to be late
_EARLY_PER_REQUEST = 8  # messages that may overtake the assignment of their request
_EARLY_PREFIX = "early/"


@dataclass(slots=True, kw_only=True)
class Record:
    """A request as one role sees it; roles extend it."""

    request_id: str
    state: enum.Enum
    participants: tuple[str, ...] = ()
    """Roles to tell when this one gives up."""
    deadline_ns: int = 0


R = TypeVar("R", bound=Record)


class RoleMachine(Generic[R]):
    """A machine that holds one record per request.

    Subclasses set ``table``, implement ``on_message``/``on_event`` and ``release``, and move records only through
    ``move``, which checks the table and renews the deadline: every wait has one.
    """

    table: TransitionTable[enum.Enum]

    def __init__(self, role: str, params: ProtocolParams) -> None:
        self.role = role
        self.params = params
        self.records: dict[str, R] = {}
        self.out = Outbox()
        self.now_ns = 0
        self.failures = 0
        self.strays = 0
        """Messages that no request and no role of this kind could have been meant by."""
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._early: dict[str, list[tuple[str, m.Message]]] = {}

    # --- entry ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take one event; what to do about it. Never raises for what a peer does: its request fails by name.

        Raises:
            BugError: the own world delivered what no role of this kind asks for, or the own table was violated.
        """
        self.now_ns = now_ns
        match event:
            case Received():
                self._receive(event.sender, event.message)
            case DeadlinePassed() if event.key in self.records:
                self._deadline_passed(self.records[event.key])
            case DeadlinePassed() if event.key.startswith(_EARLY_PREFIX):
                self._early.pop(event.key.removeprefix(_EARLY_PREFIX), None)
            case _:
                self.on_event(event)
        return self.out.take()

    def _deadline_passed(self, record: R) -> None:
        if self.now_ns < record.deadline_ns:  # renewed while this one was on its way here
            return
        self.fail(record, timeout_error(type(self), record.state), "the deadline of this state passed")

    def _receive(self, sender: str, message: m.Message) -> None:
        if isinstance(message, m.AbortRequest):
            self._aborted(message.request_id)
            return
        try:
            self.on_message(sender, message)
        except PeerError as error:
            known = [self.records[r] for r in m.requests_of(message) if r in self.records]
            for record in known:
                self.fail(record, "UnexpectedMessage", str(error))
            if not known:
                self.strays += 1
                self.out.actions.extend(report_stray(self.role, sender, message))

    def _aborted(self, request_id: str) -> None:
        record = self.records.get(request_id)
        if record is not None:
            self._drop(record)
        else:
            self._remember(request_id)

    def on_message(self, sender: str, message: m.Message) -> None:
        """A control message from a peer."""
        raise NotImplementedError

    def on_event(self, event: Event) -> None:
        """Any other event."""
        raise NotImplementedError

    def release(self, record: R) -> None:
        """Give back everything the record holds; called once, when it fails or is aborted."""
        raise NotImplementedError

    # --- records -------------------------------------------------------------------------------------------------

    def begin(self, record: R) -> bool:
        """Adopt a new record; False when the request is known to have ended, or is here already (a repeat)."""
        if record.request_id in self._ended or record.request_id in self.records:
            return False
        self.records[record.request_id] = record
        self._renew(record)
        return True

    def release_ended(self, request_id: str, leader: str) -> None:
        """An engine is assigned a request that it has been told to abort before: its leader must not count it."""
        if request_id in self._ended:
            self.out.send(leader, m.RequestReleased(request_id, self.role))

    def hold_if_early(self, sender: str, request_id: str, message: m.Message) -> bool:
        """Keep a message that overtook the assignment of its request (it came over another connection).

        Bounded: so many requests, so many messages each, and only until the deadline of a wait.
        """
        if request_id in self.records or request_id in self._ended:
            return False
        if request_id not in self._early:
            if len(self._early) >= self.params.queue_limit:
                return False
            self._early[request_id] = []
            self.out.add(SetDeadline(_EARLY_PREFIX + request_id, self.now_ns + self.params.wait_deadline_ns))
        held = self._early[request_id]
        if len(held) >= _EARLY_PER_REQUEST:
            return False
        held.append((sender, message))
        return True

    def replay_early(self, request_id: str) -> None:
        """The request is here now: take the messages that were early."""
        for sender, message in self._forget_early(request_id):
            self._receive(sender, message)

    def _forget_early(self, request_id: str) -> list[tuple[str, m.Message]]:
        if request_id not in self._early:
            return []
        self.out.add(ClearDeadline(_EARLY_PREFIX + request_id))
        return self._early.pop(request_id)

    def find(self, request_id: str, event: str) -> R | None:
        """The record that an event is for, if the table accepts it in its state; None when it is to be ignored.

        Raises:
            PeerError: the request was never here, or the table refuses the event.
        """
        record = self.records.get(request_id)
        if record is None:
            if request_id in self._ended:
                return None
            raise PeerError(f"{self.role}: {event} for request {request_id}, which was never here")
        verdict = self.table.verdict(record.state, event)
        if verdict == "refuse":
            raise PeerError(f"{self.role}: {event} for request {request_id} comes in state {record.state.name}")
        return record if verdict == "accept" else None

    def move(self, record: R, event: str, following: enum.Enum) -> None:
        """Change state; checked against the table; the deadline starts anew, and ends with the record."""
        self.table.check(record.state, event, following)
        record.state = following
        if following in self.table.ends:
            self.end(record)
        else:
            self._renew(record)

    def end(self, record: R) -> None:
        """Forget a record that has ended well."""
        self.records.pop(record.request_id, None)
        self.out.add(ClearDeadline(record.request_id))
        self._remember(record.request_id)

    def fail(self, record: R, error: str, detail: str) -> None:
        """End a request with a named error: tell the driver and every participant, release what it held here."""
        self.failures += 1
        self.out.send(DRIVER, m.RequestFailed(record.request_id, error, self.role, detail))
        for peer in dict.fromkeys((*record.participants, SCHEDULER)):
            if peer != self.role:
                self.out.send(peer, m.AbortRequest(record.request_id, error))
        self._drop(record)

    def _drop(self, record: R) -> None:
        self.records.pop(record.request_id, None)
        self.out.add(ClearDeadline(record.request_id))
        self._remember(record.request_id)
        self.release(record)

    def _renew(self, record: R) -> None:
        patience = self.table.patience.get(record.state, 1)
        record.deadline_ns = self.now_ns + patience * self.params.wait_deadline_ns
        self.out.add(SetDeadline(record.request_id, record.deadline_ns))

    def _remember(self, request_id: str) -> None:
        self._forget_early(request_id)
        self._ended[request_id] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)


def participants(assignment: m.Assignment) -> tuple[str, ...]:
    """Roles that hold something for an assigned request."""
    a = assignment
    return (a.prefill_engine, a.decode_engine, a.prefill_node, a.decode_node)


def report_stray(role: str, sender: str, message: m.Message) -> list[Action]:
    """A message that no record here is for. The driver knows whether its request still runs, and ends it by name."""
    if role == DRIVER:
        return []
    detail = f"{role} has no use for {type(message).__name__} from {sender}"
    failed = (m.RequestFailed(request_id, "UnexpectedMessage", role, detail) for request_id in m.requests_of(message))
    return [Send(DRIVER, message) for message in failed]


def unexpected(role: str, event: Event) -> BugError:
    """An event that the machine never asked its world for."""
    return BugError(f"{role}: {type(event).__name__} is not for this kind of role")


def timeout_error(machine: type[RoleMachine[R]], state: enum.Enum) -> str:
    """Name of the error that a deadline in a state ends in: ``DramBufferReadingTimedOut``."""
    return machine.__name__ + "".join(part.capitalize() for part in state.name.split("_")) + "TimedOut"
