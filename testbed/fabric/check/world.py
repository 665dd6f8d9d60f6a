"""States of a whole cluster and what leads from one to the next.

A state is small: a number for the state of every role, what is in flight on every channel, and the faults left. Since a
transition belongs to one role, it is looked up by (state of the role, input) and computed once, however many states of
the cluster it occurs in: that is what makes states cheap. Copies of machines are made only where something new happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from testbed.fabric.check import inputs as i
from testbed.fabric.check.checkers import queues, visibility
from testbed.fabric.check.freeze import Copier, Freezer
from testbed.fabric.check.role import Role, Setup, make_role
from testbed.ids import DRIVER, INDEX, SCHEDULER
from testbed.protocol import messages as m

FETCH = "fetch"
Flight = tuple[tuple[int, tuple[int, ...]], ...]


class State(NamedTuple):
    """One state of the cluster. ``flight``: inputs on every channel that carries any, by channel.

    ``limbo``: what a fault holds back, as (channel, input): it may arrive whenever it likes. ``left``: faults that may
    still strike; ``hurt``: whether one has.
    """

    roles: tuple[int, ...]
    flight: Flight
    limbo: tuple[tuple[int, int], ...]
    left: int
    hurt: bool


class Move(NamedTuple):
    """One step: ``kind`` with the channel or the role (``at``) and the input that it concerns."""

    kind: str
    at: int
    given: int = 0


DELIVER, FINISH, FETCHING, DEADLINE, LATE = "deliver", "finish", "fetch", "deadline", "late"
LOSE, REPEAT, DELAY, REFUSE, EARLY = "lose", "repeat", "delay", "refuse", "early"
FAULTS = frozenset({LOSE, REPEAT, DELAY, REFUSE, EARLY})
LOCAL = frozenset({FINISH, FETCHING, DEADLINE, EARLY})


@dataclass(slots=True)
class Local:
    """A state of one role, and what it offers."""

    role: int
    packed: bytes
    finishes: tuple[int, ...]
    deadlines: tuple[int, ...]
    fetch: int
    waiting: bool
    """Scheduler: some request is not assigned. Driver: some agent has not ended."""
    kept: frozenset[int]
    """Storage server: blocks on its disk. Index: blocks that it names."""


@dataclass(slots=True)
class Transition:
    """What an input does to a role in a state."""

    after: int
    outputs: tuple[tuple[int, int], ...]
    always: tuple[i.Violation, ...]
    calm: tuple[i.Violation, ...]
    published: tuple[int, ...]


class CheckWorld:
    """The roles of a cluster, their states by number, and the transitions known so far."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.shared = setup.shared
        self.names = [d.name for d in setup.descriptions]
        self.index_of = {name: k for k, name in enumerate(self.names)}
        constants = [*setup.constants, setup.shared, setup.shared.names, setup.shared.layout]
        self._freezer, self._copier = Freezer(constants), Copier(constants)
        self.inputs: list[i.Input] = []
        self.failing: list[bool] = []
        self._input_of: dict[Any, int] = {}
        self.channels: list[i.Channel] = []
        self.owner: list[int] = []
        self._channel_of: dict[i.Channel, int] = {}
        self.locals: list[Local] = []
        self._local_of: dict[Any, int] = {}
        self._known: dict[tuple[int, int], Transition] = {}
        self._scheduler, self._driver = self.index_of[SCHEDULER], self.index_of[DRIVER]
        self._index = self.index_of[INDEX]
        self._reports: dict[int, int] = {}  # leader -> channel of its reports
        self.initial_violations: list[i.Violation] = []
        self._begin()

    # --- the start -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        local: list[int] = []
        flight: dict[int, tuple[int, ...]] = {}
        for number, description in enumerate(self.setup.descriptions):
            role = make_role(self.setup, description)
            before = self._intern(number, role)
            done = self.transition(before, self.number(i.Begin()))
            local.append(done.after)
            for channel, given in done.outputs:
                if self.setup.late_reports or channel not in self._reports.values():
                    flight[channel] = (*flight.get(channel, ()), given)
            self.initial_violations += [*done.always, *done.calm]
        self.start = (tuple(local), tuple(sorted(flight.items())))

    def initial(self, faults: int) -> State:
        """All roles have started; their first messages are in flight."""
        return State(*self.start, (), faults, False)

    # --- numbers -------------------------------------------------------------------------------------------------

    def number(self, given: i.Input) -> int:
        """The number of an input."""
        key = self._freezer.freeze(given)
        number = self._input_of.get(key)
        if number is None:
            number = self._input_of[key] = len(self.inputs)
            self.inputs.append(given)
            self.failing.append(_fails(given))
        return number

    def channel(self, channel: i.Channel) -> int:
        """The number of a channel."""
        number = self._channel_of.get(channel)
        if number is None:
            number = self._channel_of[channel] = len(self.channels)
            self.channels.append(channel)
            self.owner.append(self.index_of[channel.owner])
            if channel.target == SCHEDULER and channel.source.startswith("leader-"):
                self._reports[self.index_of[channel.source]] = number
        return number

    def role_at(self, local: int) -> Role:
        """A fresh copy of a role in a state."""
        role = self._copier.unpack(self.locals[local].packed)
        assert isinstance(role, Role)
        return role

    def _intern(self, number: int, role: Role) -> int:
        key = (number, self._freezer.freeze(role.frozen(), role.write_names, role.left_out))
        local = self._local_of.get(key)
        if local is None:
            local = self._local_of[key] = len(self.locals)
            self.locals.append(self._describe(number, role))
        return local

    def _describe(self, number: int, role: Role) -> Local:
        machine, name = role.machine, role.name
        kept: Iterable[int] = role.disk
        waiting = False
        if name == SCHEDULER:
            waiting = bool(machine.records)
        elif name == DRIVER:
            waiting = not machine.finished
        elif name == INDEX:
            kept = [key for key in machine.trie._nodes if key]
        deadlines = [self.number(i.Pass(key)) for key in sorted(role.deadlines) if key != FETCH]
        return Local(
            role=number,
            packed=self._copier.pack(role),
            finishes=tuple(self.number(i.Finish(lane)) for lane in role.lanes),
            deadlines=tuple(deadlines),
            fetch=self.number(i.Pass(FETCH)) if FETCH in role.deadlines else -1,
            waiting=waiting,
            kept=frozenset(kept),
        )

    def transition(self, local: int, given: int) -> Transition:
        """What an input does to a role in a state; computed once."""
        known = self._known.get((local, given))
        if known is None:
            role = self.role_at(local)
            step = role.step(self.inputs[given])
            known_owner = [(c, g) for c, g in step.outputs if c.owner in self.index_of]
            outputs = tuple((self.channel(c), self.number(g)) for c, g in known_owner)
            nobody = sorted({c.owner for c, _ in step.outputs} - set(self.index_of))
            step.report("machine", [f"{role.name} sends to {owner}, which is no role" for owner in nobody])
            after = self._intern(self.locals[local].role, role)
            known = Transition(after, outputs, tuple(step.always), tuple(step.calm), step.published)
            self._known[local, given] = known
        return known

    @property
    def size(self) -> tuple[int, int]:
        """States of roles and transitions known."""
        return len(self.locals), len(self._known)

    # --- moves ---------------------------------------------------------------------------------------------------

    def due(self, state: State) -> list[Move]:
        """What happens of itself: arrivals, ends of operations, and reports while some request is unassigned."""
        moves = [Move(DELIVER, channel) for channel, _ in state.flight]
        table = self.locals
        reporting = table[state.roles[self._scheduler]].waiting
        carried = {channel for channel, _ in state.flight} if reporting else set()
        for at, local in enumerate(state.roles):
            entry = table[local]
            for given in entry.finishes:
                moves.append(Move(FINISH, at, given))
            if reporting and entry.fetch >= 0 and self._reports.get(at, -1) not in carried:
                move = Move(FETCHING, at, entry.fetch)
                if self.setup.late_reports or not self._is_idle(state, move):
                    moves.append(move)
        return moves

    def late(self, state: State) -> list[Move]:
        """What a fault holds back may arrive at any time."""
        return [Move(LATE, channel, given) for channel, given in dict.fromkeys(state.limbo)]

    def role_of(self, move: Move) -> int:
        """The role that a move concerns."""
        return move.at if move.kind in LOCAL else self.owner[move.at]

    def spreads_failure(self, state: State, move: Move) -> bool:
        """Would what a fault holds back make a role give up a request, if it arrived now?"""
        done = self.transition(state.roles[self.owner[move.at]], move.given)
        return any(self.failing[given] for _, given in done.outputs)

    def is_quiet(self, state: State, due: Sequence[Move]) -> bool:
        """Nothing happens any more of itself but reports that change nothing."""
        return all(move.kind == FETCHING and self._is_idle(state, move) for move in due)

    def _is_idle(self, state: State, move: Move) -> bool:
        report = self.transition(state.roles[move.at], move.given)
        scheduler = state.roles[self._scheduler]
        (_, given), *rest = report.outputs
        taken = self.transition(scheduler, given)
        if self.setup.late_reports:
            return not rest and report.after == state.roles[move.at] and taken.after == scheduler and not taken.outputs
        return not taken.outputs

    def deadlines(self, state: State, kind: str, roles: Iterable[int] | None = None) -> list[Move]:
        """Deadlines that are set, at all roles or at some."""
        chosen = range(len(state.roles)) if roles is None else roles
        return [Move(kind, at, given) for at in chosen for given in self.locals[state.roles[at]].deadlines]

    def faults_on(self, state: State, moves: Iterable[Move]) -> list[Move]:
        """What may go wrong with the arrivals among ``moves``."""
        faults: list[Move] = []
        for move in moves:
            if move.kind == DELIVER:
                kind = self.channels[move.at].kind
                if kind == i.CONTROL:
                    faults += [Move(what, move.at) for what in (LOSE, REPEAT, DELAY)]
                elif kind == i.WRITES:
                    faults += [Move(what, move.at) for what in (LOSE, REPEAT, DELAY, REFUSE)]
        return faults

    # --- one step ------------------------------------------------------------------------------------------------

    def apply(self, state: State, move: Move) -> tuple[State, list[i.Violation]]:
        """The state after a move, and what its checkers say."""
        flight, limbo = dict(state.flight), state.limbo
        left, hurt, kind = state.left, state.hurt, move.kind
        if kind in FAULTS:
            left, hurt = left - 1, True
        if kind in LOCAL:
            role, given = move.at, move.given
        else:
            role = self.owner[move.at]
            if kind == LATE:
                given = move.given
                limbo = _without(limbo, (move.at, given))
            else:
                given, *queue = flight[move.at]
                if queue:
                    flight[move.at] = tuple(queue)
                else:
                    del flight[move.at]
        if kind in (LOSE, DELAY, REFUSE):
            if kind == DELAY:
                limbo = tuple(sorted((*limbo, (move.at, given))))
            else:
                self._drop(move, self.inputs[given], flight)
            return State(state.roles, tuple(sorted(flight.items())), limbo, left, hurt), []
        if kind == REPEAT:
            limbo = tuple(sorted((*limbo, (move.at, self._copy_of(given)))))
        done = self.transition(state.roles[role], given)
        roles = (*state.roles[:role], done.after, *state.roles[role + 1 :])
        if kind == FETCHING and not self.setup.late_reports:
            done = self.transition(roles[self._scheduler], done.outputs[0][1])
            roles = (*roles[: self._scheduler], done.after, *roles[self._scheduler + 1 :])
        for channel, output in done.outputs:
            flight[channel] = (*flight.get(channel, ()), output)
        after = State(roles, tuple(sorted(flight.items())), limbo, left, hurt)
        violations = [*done.always, *(() if hurt else done.calm)]
        if done.published:
            violations += self._visible(after, done.published)
        for channel, _ in done.outputs:
            if len(flight[channel]) > self.shared.limits.channel:
                name = self.channels[channel]
                texts = queues.of_channel(f"{name.source} to {name.target}", len(flight[channel]), self.shared.limits)
                violations += [i.Violation(queues.NAME, text) for text in texts]
        return after, violations

    def _drop(self, move: Move, lost: i.Input, flight: dict[int, tuple[int, ...]]) -> None:
        """A write that is lost: its source believes it done; one that is refused: its source learns it."""
        if isinstance(lost, i.Arrive):
            failure = "unreachable" if move.kind == REFUSE else ""
            channel = self.channel(i.Channel(i.ENDS, self.channels[move.at].owner, lost.source, lost.source))
            ended = self.number(i.Ended(lost.grant_id, lost.use, failure))
            flight[channel] = (*flight.get(channel, ()), ended)

    def _copy_of(self, given: int) -> int:
        original = self.inputs[given]
        if not isinstance(original, i.Arrive):
            return given
        copy = i.Arrive(
            original.source,
            original.endpoint,
            original.grant_id,
            original.epoch,
            original.size_bytes,
            original.cells,
            original.use,
            echo=True,
        )
        return self.number(copy)

    def _visible(self, state: State, keys: Sequence[int]) -> list[i.Violation]:
        visible = self.locals[state.roles[self._index]].kept
        disks = {name: self.locals[state.roles[k]].kept for k, name in enumerate(self.names)}
        texts = visibility.at_publication([k for k in keys if k in visible], self.setup.replicas, disks)
        return [i.Violation(visibility.NAME, text) for text in texts]

    # --- views ---------------------------------------------------------------------------------------------------

    def has_ended(self, state: State) -> bool:
        """Have all agents ended?"""
        return not self.locals[state.roles[self._driver]].waiting

    def after_reports(self, state: State) -> State:
        """The state after every leader has reported once more: queues forget requests that have ended."""
        roles = list(state.roles)
        for at, local in enumerate(state.roles):
            fetch = self.locals[local].fetch
            if fetch >= 0:
                report = self.transition(local, fetch)
                roles[at] = report.after
                roles[self._scheduler] = self.transition(roles[self._scheduler], report.outputs[0][1]).after
        return state._replace(roles=tuple(roles))

    def roles_in(self, state: State) -> Iterator[Role]:
        """Fresh copies of all roles."""
        return (self.role_at(local) for local in state.roles)


def _without(items: tuple[tuple[int, int], ...], one: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    at = items.index(one)
    return items[:at] + items[at + 1 :]


def _fails(given: i.Input) -> bool:
    match given:
        case i.Deliver():
            return isinstance(given.message, m.AbortRequest | m.RequestFailed | m.BlockUnreadable | m.BlockNotStored)
        case i.Ended():
            return bool(given.failure)
    return False
