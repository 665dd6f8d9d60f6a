"""A cluster of live machines that is led through one order of events: to replay a trace, and for random walks.

It shares the roles' transitions (role.py) with the exploration and nothing else: no copies, no numbers, no memory of
transitions, no reduction. Each machine is made once and handles its events one after the other, as the sim world hosts
it, and the same grant table judges its writes. A trace that an exploration found and that shows nothing here would be a
fault of the exploration.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from testbed.errors import ConfigError
from testbed.fabric.check import inputs as i
from testbed.fabric.check.checkers import conservation, progress, queues, tokens, visibility
from testbed.fabric.check.role import Role, Setup, Step, make_role
from testbed.fabric.check.words import of_input, of_step
from testbed.fabric.check.world import (
    DEADLINE,
    DELAY,
    DELIVER,
    EARLY,
    FAULTS,
    FETCH,
    FETCHING,
    FINISH,
    LATE,
    LOSE,
    REFUSE,
    REPEAT,
)
from testbed.ids import DRIVER, INDEX, SCHEDULER

_REPORT = "takes FetchRequests("


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedMove:
    """A move that needs no numbers: ``channel`` for what arrives, ``what`` says what arrives, ends or passes."""

    kind: str
    role: str
    what: str
    channel: i.Channel | None = None

    @property
    def reports(self) -> bool:
        """Is it a leader's periodic report, made or arriving?"""
        return self.kind == FETCHING or self.what.startswith(_REPORT)

    def line(self) -> str:
        """The move in words."""
        if self.kind in (FINISH, DEADLINE, EARLY, FETCHING):
            given: i.Input = i.Finish(self.what) if self.kind == FINISH else i.Pass(self.what)
            return of_step(self.kind, self.role, of_input(given))
        return of_step(self.kind, self.role, self.what)


class Cluster:
    """Live roles, and what is in flight between them."""

    def __init__(self, setup: Setup, faults: int) -> None:
        self.setup = setup
        self.left = faults
        self.hurt = False
        self.roles: dict[str, Role] = {}
        self.flight: dict[i.Channel, deque[i.Input]] = {}
        self.limbo: list[tuple[i.Channel, i.Input]] = []
        self.violations: list[i.Violation] = []
        for description in setup.descriptions:
            role = self.roles[description.name] = make_role(setup, description)
            step = role.step(i.Begin())
            reports = step.outputs if setup.late_reports else [o for o in step.outputs if o[0].target != SCHEDULER]
            step.outputs = reports if role.name.startswith("leader-") else step.outputs
            self._take(step)

    # --- moves ---------------------------------------------------------------------------------------------------

    def due(self) -> list[NamedMove]:
        """What happens of itself, and what a fault holds back."""
        moves = [self._arrival(DELIVER, channel, queue[0]) for channel, queue in self.flight.items() if queue]
        for name, role in self.roles.items():
            moves += [NamedMove(kind=FINISH, role=name, what=lane) for lane in role.lanes]
            if FETCH in role.deadlines and self.roles[SCHEDULER].machine.records and not self._reporting(name):
                moves.append(NamedMove(kind=FETCHING, role=name, what=FETCH))
        return moves

    def late(self) -> list[NamedMove]:
        """What a fault holds back."""
        return [self._arrival(LATE, channel, given) for channel, given in self.limbo]

    def deadlines(self, kind: str) -> list[NamedMove]:
        """All deadlines that are set."""
        return [
            NamedMove(kind=kind, role=name, what=key)
            for name, role in self.roles.items()
            for key in sorted(role.deadlines)
            if key != FETCH
        ]

    def faults(self, due: Iterable[NamedMove]) -> Iterator[NamedMove]:
        """What may go wrong now."""
        for move in due:
            if move.kind == DELIVER and move.channel is not None and move.channel.kind != i.ENDS:
                kinds = (LOSE, REPEAT, DELAY) if move.channel.kind == i.CONTROL else (LOSE, REPEAT, DELAY, REFUSE)
                yield from (dataclasses.replace(move, kind=kind) for kind in kinds)
        yield from self.deadlines(EARLY)

    def _arrival(self, kind: str, channel: i.Channel, given: i.Input) -> NamedMove:
        return NamedMove(kind=kind, role=channel.owner, what=of_input(given), channel=channel)

    def _reporting(self, leader: str) -> bool:
        return any(queue and c.source == leader and c.target == SCHEDULER for c, queue in self.flight.items())

    # --- one step ------------------------------------------------------------------------------------------------

    def apply(self, move: NamedMove) -> None:
        """Make a move; ``violations`` grows by what its checkers say.

        Raises:
            ConfigError: the move is not possible here: the trace is of another cluster or version.
        """
        if move.kind in FAULTS:
            self.left -= 1
            self.hurt = True
        if move.channel is None:
            role = self._role(move)
            given: i.Input = i.Finish(move.what) if move.kind == FINISH else i.Pass(move.what)
            if move.what not in (role.lanes if move.kind == FINISH else role.deadlines):
                raise _impossible(move)
            self._take(role.step(given), at_once=move.kind == FETCHING and not self.setup.late_reports)
            return
        given = self._picked(move, move.channel)
        if move.kind in (DELAY, REPEAT):
            copy = given
            if move.kind == REPEAT and isinstance(given, i.Arrive):
                copy = dataclasses.replace(given, echo=True)
            self.limbo.append((move.channel, copy))
        if move.kind in (LOSE, REFUSE):
            self._drop(move, given)
        elif move.kind != DELAY:
            self._take(self._role(move).step(given))

    def _role(self, move: NamedMove) -> Role:
        if move.role not in self.roles:
            raise _impossible(move)
        return self.roles[move.role]

    def _picked(self, move: NamedMove, channel: i.Channel) -> i.Input:
        if move.kind == LATE:
            for at, (held_on, given) in enumerate(self.limbo):
                if held_on == channel and of_input(given) == move.what:
                    del self.limbo[at]
                    return given
            raise _impossible(move)
        queue = self.flight.get(channel)
        if not queue or of_input(queue[0]) != move.what:
            raise _impossible(move)
        return queue.popleft()

    def _drop(self, move: NamedMove, lost: i.Input) -> None:
        if isinstance(lost, i.Arrive):
            failure = "unreachable" if move.kind == REFUSE else ""
            channel = i.Channel(i.ENDS, move.role, lost.source, lost.source)
            self.flight.setdefault(channel, deque()).append(i.Ended(lost.grant_id, lost.use, failure))

    def _take(self, step: Step, *, at_once: bool = False) -> None:
        self.violations += step.always
        if not self.hurt:
            self.violations += step.calm
        for channel, given in step.outputs:
            if channel.owner not in self.roles:
                text = f"{channel.source} sends to {channel.owner}, which is no role"
                self.violations.append(i.Violation("machine", text))
            elif at_once and channel.target == SCHEDULER:
                self._take(self.roles[SCHEDULER].step(given))
            else:
                queue = self.flight.setdefault(channel, deque())
                queue.append(given)
                name = f"{channel.source} to {channel.target}"
                texts = queues.of_channel(name, len(queue), self.setup.shared.limits)
                self.violations += [i.Violation(queues.NAME, text) for text in texts]
        if step.published:
            known = self.roles[INDEX].machine.trie
            visible = [key for key in step.published if key in known]
            disks = {name: set(role.disk) for name, role in self.roles.items()}
            texts = visibility.at_publication(visible, self.setup.replicas, disks)
            self.violations += [i.Violation(visibility.NAME, text) for text in texts]

    # --- the end -------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Have all agents ended?"""
        return bool(self.roles[DRIVER].machine.finished)

    def judge_end(self) -> None:
        """Nothing happens any more: all requests must have ended, and everything must be back."""
        for name in [n for n, role in self.roles.items() if FETCH in role.deadlines]:
            self._take(self.roles[name].step(i.Pass(FETCH)), at_once=True)
        self.violations += judge_end(self.roles.values(), self.setup.shared.expected)[1]


def judge_end(
    roles: Iterable[Role], expected: dict[str, tuple[int, ...]]
) -> tuple[tuple[object, ...], list[i.Violation]]:
    """How requests ended where nothing happens any more, and what is wrong with that."""
    violations: list[i.Violation] = []
    ended: list[object] = []
    left: list[str] = []
    for role in roles:
        left += conservation.at_rest(role)
        if role.name == DRIVER:
            machine = role.machine
            waiting = [f"{r.request_id} is still {r.state.value}" for r in machine.records.values()]
            if waiting:
                text = f"nothing happens any more, but {', '.join(waiting)}"
                violations.append(i.Violation(progress.NAME, text))
            violations += [i.Violation(tokens.NAME, t) for t in tokens.of_driver(machine, expected)]
            ended += sorted((o.agent, o.turn, o.error) for o in machine.outcomes)
    if not violations:
        violations += [i.Violation(conservation.NAME, f"left behind: {text}") for text in left]
    return (*ended, *left), violations


def replay(setup: Setup, faults: int, moves: Sequence[NamedMove], *, at_end: bool) -> list[i.Violation]:
    """Lead fresh machines through a trace; ``at_end``: judge what holds when nothing happens any more.

    Raises:
        ConfigError: a move is not possible: the trace is of another cluster or version.
    """
    cluster = Cluster(setup, faults)
    for move in moves:
        cluster.apply(move)
    if at_end and not cluster.violations and all(move.reports for move in cluster.due()):
        cluster.judge_end()
    return cluster.violations


def shortened(setup: Setup, faults: int, moves: Sequence[NamedMove], violation: i.Violation) -> list[NamedMove]:
    """The trace without the moves that its last one does not need: what is left is all in its past.

    An exploration that is reduced moves every role as early as it can, also roles that have no part in the violation.
    """
    needed = list(moves)
    for at in range(len(moves) - 2, -1, -1):
        fewer = needed[:at] + needed[at + 1 :]
        try:
            shows = replay(setup, faults, fewer, at_end=False)
        except ConfigError:  # a later move needs this one
            continue
        if shows and shows[0] == violation:
            needed = fewer
    return needed


def _impossible(move: NamedMove) -> ConfigError:
    return ConfigError(f"The trace cannot be followed at: {move.line()}. It is of another cluster or version.")
