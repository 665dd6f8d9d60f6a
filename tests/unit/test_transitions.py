"""The whole state x event matrix of every machine: what the table says, and that the machine does it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

from emulators import agent_driver, central_scheduler, decode_engine, dram_buffer, group_leader, prefill_engine
from emulators.base import RoleMachine
from testbed.errors import BugError
from testbed.ids import DRIVER, SCHEDULER
from testbed.protocol import machine as mc
from testbed.protocol import messages as m
from testbed.protocol.transitions import TransitionTable
from tests.support.faults import Delayed
from tests.support.histories import History, addressed, frozen, histories, messages_seen
from tests.support.local_world import ListScript, LocalWorld
from tests.support.worlds import SERVED, cluster, small_params

MACHINES: dict[str, type[RoleMachine[Any]]] = {
    machine.table.role: machine
    for machine in (
        agent_driver.AgentDriver,
        central_scheduler.CentralScheduler,
        group_leader.GroupLeader,
        dram_buffer.DramBuffer,
        prefill_engine.PrefillEngine,
        decode_engine.DecodeEngine,
    )
}
TABLES: dict[str, TransitionTable[Enum]] = {role: machine.table for role, machine in MACHINES.items()}

# Events that no message brings: the machine or its world causes them.
INTERNAL = {
    "agent driver": set[str](),
    "central scheduler": {"EngineChosen"},
    "group leader": set[str](),
    "DRAM buffer": {"PagesTaken", "ReadLanded", "LayersLanded", "BlockSettled", "PromptLoaded"},
    "prefill engine": {"Packed", "ChunkComputed", "AllFlushed"},
    "decode engine": {"HbmTaken", "PromptLanded", "Stepped", "BlockCopied", "AllSettled"},
}
# Messages about blocks, not about the record of a request: they leave its state alone.
BESIDE = {"DRAM buffer": {"PersistOpened", "BlockStored", "BlockNotStored", "BlockPublished"}}
# Messages that are not about one request, or end it in any state (tested apart).
UNIVERSAL = {"Hello", "FetchRequests", "AbortRequest", "RequestFailed"}
MESSAGE_KINDS = sorted(kind.__name__ for kind in m.AnyMessage.__args__)


def _states() -> Iterator[tuple[str, Enum]]:
    for role, table in TABLES.items():
        for state in table.states:
            if state not in table.ends:
                yield role, state


def _matrix() -> Iterator[Any]:
    for role, state in _states():
        for kind in MESSAGE_KINDS:
            if kind not in UNIVERSAL:
                yield pytest.param(role, state, kind, id=f"{role}-{state.name}-{kind}".replace(" ", "_"))


STATES = [pytest.param(role, state, id=f"{role}-{state.name}".replace(" ", "_")) for role, state in _states()]


def _in_state(role: str, state: Enum) -> tuple[History, int, str]:
    """A history of such a role, after how many events a request is in the state, and which."""
    for history in histories():
        if history.kind is not MACHINES[role]:
            continue
        for count, states in enumerate(history.states):
            for request_id, seen in states.items():
                if seen is state:
                    return history, count, request_id
    raise AssertionError(f"no history has a request in {state}")


def _occasion(role: str, state: Enum, kind: str) -> tuple[History, int, str, str, m.Message]:
    """Where to deliver a message of a kind in a state: where the run did, else where the state was first seen."""
    any_message = None
    for history, count, sender, message in messages_seen().get(kind, []):
        any_message = sender, message
        if history.kind is not MACHINES[role]:
            continue
        for request_id in m.requests_of(message):
            if history.states[count].get(request_id) is state:
                return history, count, request_id, sender, addressed(message, request_id)
    history, count, request_id = _in_state(role, state)
    for of, _, sender, message in messages_seen().get(kind, []):  # late or early, but the real one
        if of is history and request_id in m.requests_of(message):
            return history, count, request_id, sender, addressed(message, request_id)
    sender, message = any_message or ("st0", _never_sent(kind, request_id))
    return history, count, request_id, sender, addressed(message, request_id)


def _never_sent(kind: str, request_id: str) -> m.Message:
    """Kinds that a run without faults does not have."""
    if kind == "BlockUnreadable":
        return m.BlockUnreadable(request_id, 1, "no such block")
    assert kind in ("BlockNotStored",), kind
    return m.BlockNotStored(request_id, 1, "disk full")


@pytest.mark.parametrize(("role", "state", "kind"), list(_matrix()))
def test_message_in_state(role: str, state: Enum, kind: str) -> None:
    table = TABLES[role]
    verdict = "refuse" if kind in INTERNAL[role] else table.verdict(state, kind)
    history, count, request_id, sender, message = _occasion(role, state, kind)
    machine, now_ns = history.machine(count), history.now_ns(count)
    assert machine.records[request_id].state is state
    participants, before = machine.records[request_id].participants, frozen(machine)
    actions = machine.handle(mc.Received(sender, message), now_ns)
    if kind in BESIDE.get(role, ()):
        assert machine.records[request_id].state is state
        assert not _failures(actions)
    elif verdict == "ignore":
        assert actions == []
        assert _without_serial(frozen(machine)) == _without_serial(before)
    elif verdict == "accept":
        allowed = table.edges[state][kind]
        after = _state_after(machine, request_id, allowed)
        assert after in allowed or after in _reachable_at_once(table, allowed)
        assert not _failures(actions)
    else:
        _check_failed(machine, request_id, participants, actions, "UnexpectedMessage")


def _state_after(machine: Any, request_id: str, allowed: tuple[Enum, ...]) -> Enum:
    if request_id in machine.records:
        state: Enum = machine.records[request_id].state
        return state
    assert request_id in machine._ended
    return next(iter(machine.table.ends))


def _reachable_at_once(table: TransitionTable[Enum], states: tuple[Enum, ...]) -> set[Enum]:
    """States that an event may lead on to through internal events, in the same call."""
    found, todo = set(states), list(states)
    while todo:
        state = todo.pop()
        for event, following in table.edges.get(state, {}).items():
            if event in INTERNAL[table.role]:
                todo += [s for s in following if s not in found]
                found |= set(following)
    return found


def _without_serial(machine: dict[str, Any]) -> dict[str, Any]:
    """A leader remembers the newest serial, whatever the message says."""
    return {k: v for k, v in machine.items() if k != "serial"}


def _failures(actions: list[mc.Action]) -> list[m.RequestFailed]:
    return [a.message for a in actions if isinstance(a, mc.Send) and isinstance(a.message, m.RequestFailed)]


def _check_failed(
    machine: Any, request_id: str, participants: tuple[str, ...], actions: list[mc.Action], error: str
) -> None:
    """The request is gone here, the driver knows why, and so do all who hold something of it."""
    assert request_id not in machine.records
    if isinstance(machine, agent_driver.AgentDriver):
        outcome = next(o for o in machine.outcomes if f"{o.agent}.{o.turn}" == request_id)
        assert outcome.error == error and outcome.error_detail
    else:
        failed = _failures(actions)
        assert [(f.request_id, f.error, f.role) for f in failed] == [(request_id, error, machine.role)]
        assert failed[0].detail
        told = [a for a in actions if isinstance(a, mc.Send) and a.to == DRIVER]
        assert len(told) == 1
    aborted = {a.to for a in actions if isinstance(a, mc.Send) and isinstance(a.message, m.AbortRequest)}
    everyone = {*participants, SCHEDULER} - {machine.role}
    assert aborted == everyone or (isinstance(machine, central_scheduler.CentralScheduler) and aborted >= everyone)
    assert mc.ClearDeadline(request_id) in actions


@pytest.mark.parametrize(("role", "state"), STATES)
def test_abort_in_state(role: str, state: Enum) -> None:
    history, count, request_id = _in_state(role, state)
    machine = history.machine(count)
    participants = machine.records[request_id].participants
    actions = machine.handle(mc.Received("de0", m.AbortRequest(request_id, "Injected")), history.now_ns(count))
    if role == "agent driver":
        _check_failed(machine, request_id, participants, actions, "Aborted")
        return
    assert request_id not in machine.records
    assert mc.ClearDeadline(request_id) in actions
    assert not _failures(actions)  # whoever gave up has told the driver
    again = frozen(machine)
    assert machine.handle(mc.Received("de0", m.AbortRequest(request_id, "Injected")), history.now_ns(count)) == []
    assert frozen(machine) == again


@pytest.mark.parametrize(("role", "state"), STATES)
def test_deadline_in_state(role: str, state: Enum) -> None:
    history, count, request_id = _in_state(role, state)
    machine = history.machine(count)
    participants = machine.records[request_id].participants
    deadline_ns = machine.records[request_id].deadline_ns
    before = frozen(machine)
    assert machine.handle(mc.DeadlinePassed(request_id), deadline_ns - 1) == []  # renewed while it was on its way
    assert frozen(machine) == before
    actions = machine.handle(mc.DeadlinePassed(request_id), deadline_ns)
    name = "".join(part.capitalize() for part in state.name.split("_"))
    _check_failed(machine, request_id, participants, actions, f"{MACHINES[role].__name__}{name}TimedOut")


@pytest.mark.parametrize(("role", "state"), [s for s in STATES if s.values[0] == "agent driver"])
def test_driver_ends_a_request_that_failed(role: str, state: Enum) -> None:
    history, count, request_id = _in_state(role, state)
    machine = history.machine(count)
    participants, left = machine.records[request_id].participants, machine.agents_left
    failed = mc.Received("de0", m.RequestFailed(request_id, "SomeError", "de0", "why"))
    actions = machine.handle(failed, history.now_ns(count))
    _check_failed(machine, request_id, participants, actions, "SomeError")
    assert machine.agents_left == left - 1
    assert machine.handle(failed, history.now_ns(count)) == []
    assert machine.agents_left == left - 1


@pytest.mark.parametrize("role", TABLES)
def test_stray_messages_reach_the_driver_and_kill_nobody(role: str) -> None:
    history = next(h for h in histories() if h.kind is MACHINES[role])
    for kind in MESSAGE_KINDS:
        if kind in UNIVERSAL or kind not in messages_seen():
            continue
        seen = messages_seen()[kind][0]
        machine = history.make()
        message = addressed(seen[3], "nobody.0")
        actions = machine.handle(mc.Received(seen[2], message), 1)
        kept = "nobody.0" in machine.records or "nobody.0" in machine._early
        assert kept or machine.strays or actions == [] or _only_answers(actions), kind
        if machine.strays and role != "agent driver":
            assert [f.request_id for f in _failures(actions)] == ["nobody.0"]


def _only_answers(actions: list[mc.Action]) -> bool:
    """A repeat for a request that has ended may be answered (RequestReleased), never acted on."""
    return all(isinstance(a, mc.Send) for a in actions)


@pytest.mark.parametrize("role", TABLES)
def test_every_state_is_reached_and_every_end_from_every_state(role: str) -> None:
    table = TABLES[role]
    arrows = {(a, b) for a, _, b in table.arrows()}
    assert _closure({table.start}, arrows) == set(table.states)
    for state in table.states:
        assert table.ends <= _closure({state}, arrows), f"{state} never ends"
    assert not [a for a, _ in arrows if a in table.ends], "an end is left"


def _closure(found: set[Enum], arrows: set[tuple[Enum, Enum]]) -> set[Enum]:
    while True:
        more = {b for a, b in arrows if a in found} - found
        if not more:
            return found
        found |= more


@pytest.mark.parametrize("role", TABLES)
def test_every_pair_has_one_verdict(role: str) -> None:
    table = TABLES[role]
    assert {e for e in table.events if e not in MESSAGE_KINDS} <= INTERNAL[role]
    for state in table.states:
        both = set(table.edges.get(state, {})) & table.ignored.get(state, frozenset())
        assert not both, f"{state} both accepts and ignores {both}"
        for event in table.events:
            allowed = table.edges.get(state, {}).get(event, ())
            for following in table.states:
                if following in allowed:
                    table.check(state, event, following)
                else:
                    with pytest.raises(BugError, match=f"{event} may not lead from {state.name}"):
                        table.check(state, event, following)


# Arrows of the tables that a run without faults does not take, with the reason.
RARE = {
    ("DRAM buffer", "FLUSHING", "RequestReleased", "RELEASED"): "the request ends before its own write is acknowledged",
    ("DRAM buffer", "FLUSHING", "StageBlock", "FLUSHING"): "a block fills before that write is acknowledged",
    ("DRAM buffer", "READING", "BlockUnreadable", "READING"): "a fault",
    ("prefill engine", "RESERVING", "PrefixLoaded", "RESERVING"): "BufferReserved, which is sent first, was delayed",
}


def _slow(kinds: set[str], role: str, action: mc.Action) -> list[mc.Action | Delayed]:
    """Messages of some kinds from engines of one kind are slow: what others bring overtakes them."""
    if isinstance(action, mc.Send) and f"{type(action.message).__name__} of {role[:2]}" in kinds:
        return [Delayed(action, 100_000_000)]
    return [action]


def test_every_arrow_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[tuple[str, str, str, str]] = set()
    move = RoleMachine.move

    def watched(machine: RoleMachine[Any], record: Any, event: str, following: Enum) -> None:
        taken.add((machine.table.role, record.state.name, event, following.name))
        move(machine, record, event, following)

    monkeypatch.setattr(RoleMachine, "move", watched)
    scheduled, started, chunk, first, rest = (
        "RequestScheduled of sc",
        "PrefillStarted of pe",
        "ChunkStarted of pe",
        "TokensEmitted of pe",
        "TokensEmitted of de",
    )
    slow = (
        {started, chunk, first},
        {chunk, first},
        {scheduled},
        {scheduled, started, chunk, first},
        {first},
        {scheduled, first, rest, "RequestCompleted of de"},
        {"PrefillFinished of pe"},
    )
    plain = itertools.product([*SERVED, *SERVED], [set()], [3_000_000])
    runs = [*plain, *itertools.product(["dualpath"], slow, [20_000])]
    for seed, (system, kinds, delay_ns) in enumerate(runs):
        params = small_params(dram_pages=24, de_hbm_pages=20, compute_quota_ns=3 * 8 * 1_000, wait_deadline_ns=10**12)
        scripts = [ListScript(f"a{i}", ((21, 2), (5, 6), (9, 1), (3, 8)), seed=seed) for i in range(4)]
        delay = (1_000, delay_ns)
        hook = functools.partial(_slow, kinds)
        LocalWorld(cluster(1, 2), params, system, scripts, seed=seed, message_delay_ns=delay, hook=hook).run()
    expected = {(r, a.name, e, b.name) for r, t in TABLES.items() for a, e, b in t.arrows()}
    assert taken <= expected
    missing = sorted(expected - taken - set(RARE))
    assert not missing, "\n".join(map(str, missing))
