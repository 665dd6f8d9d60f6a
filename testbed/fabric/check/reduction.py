"""Fewer orders, same findings: of moves that commute with all that may happen beside them, one order is enough.

Moves of different roles commute always (role.py). Of one role's moves, a move is *alone* when it gives the same state
and the same outputs before and after every other move that this role has or gets meanwhile. Such a move is taken by
itself, with the faults that may strike it: a persistent set of one. Whether it commutes with what is in flight to its
role now is tried; what may still come is judged by kind, in ``races.py``. A move that only counts (a figure of a
later report, a note of the driver) waits until something comes to its role that does not commute with it.

A role to which news of a failure is on its way is *torn* while other things of that request come to it too, or such as
do not commute with the news: it takes them in every order, before other requests go on, and one such role after the
other unless they send each other something next. What comes for a request that has ended where it comes to is *dead*
and taken at once.

That kinds are judged rightly is an argument, not a proof: tests compare with the full exploration where that is small.
What a fault starts is tried from the states that the reduction keeps: in these a role that is ready moves as early as
it can, so a failure that overtakes a role held back for long while others go on is left to ``--random``.
"""

from __future__ import annotations

from collections.abc import Sequence

from testbed.fabric.check import inputs as i
from testbed.fabric.check.races import Races
from testbed.fabric.check.world import DELIVER, FETCHING, FINISH, CheckWorld, Move, State
from testbed.protocol import messages as m

_LIMBO, _OWN = -1, -2  # places of inputs that are on no channel


class Reduction:
    """Chooses which of the moves of a state have to be tried."""

    def __init__(self, world: CheckWorld) -> None:
        self._world = world
        self._races = Races(world)
        self._commuting: dict[tuple[int, int, int], bool] = {}
        self._about: dict[int, frozenset[str]] = {}

    def choose(self, state: State, due: Sequence[Move]) -> list[Move]:
        """A persistent set among ``due``: one move that is alone, or all of them."""
        world = self._world
        if len(due) < 2:
            return list(due)
        incoming: dict[int, list[tuple[int, int]]] = {}
        for channel, queue in state.flight:
            incoming.setdefault(world.owner[channel], []).extend((channel, given) for given in queue)
        for channel, given in state.limbo:
            incoming.setdefault(world.owner[channel], []).append((_LIMBO, given))
        for move in due:
            if move.kind == FINISH:
                incoming.setdefault(move.at, []).append((_OWN, move.given))
        told, torn, failed = self._threats(state, incoming) if state.hurt else ({}, set(), None)
        first = {channel: queue[0] for channel, queue in state.flight}
        self._races.look_at(state)
        reporting = {move.at for move in due if move.kind == FETCHING}
        racing: list[Move] = []
        for move in due:
            if move.kind == FETCHING:
                racing.append(move)
                continue
            role, given = (world.owner[move.at], first[move.at]) if move.kind == DELIVER else (move.at, move.given)
            if self._races.is_dead(role, given):
                return [move]
            behind = move.at if move.kind == DELIVER else None  # what its own channel carries cannot overtake it
            commutes = role not in reporting and all(
                self._commute(state.roles[role], given, other)
                for channel, other in incoming[role]
                if channel != behind and (other != given or channel == _LIMBO)
            )
            if torn and (role in told or self._is_apart(given, failed)):
                continue
            if commutes and not self._races.may_race(role, given):
                return [move]
            if not (commutes and self._races.only_counts(role, given)):
                racing.append(move)
        if torn:
            receivers = self._receivers(state, torn, first, due)
            apart = [at for at in sorted(torn) if all(at not in to for other, to in receivers.items() if other != at)]
            return [move for move in due if world.role_of(move) in (apart[:1] or torn)]
        return racing or list(due)

    def _threats(
        self, state: State, incoming: dict[int, list[tuple[int, int]]]
    ) -> tuple[dict[int, list[int]], set[int], frozenset[str] | None]:
        """News of failures by role that it comes to; the roles torn by it; the requests that it is about, if known."""
        failing, told = self._world.failing, dict[int, list[int]]()
        for role, arriving in incoming.items():
            if news := [given for _, given in arriving if failing[given]]:
                told[role] = news
        about = [self._requests(given) for news in told.values() for given in news]
        failed = frozenset[str]().union(*about) if all(about) else None
        torn = {
            role
            for role, news in told.items()
            for _, given in incoming[role]
            if not failing[given]
            and not (
                self._is_apart(given, failed)
                and all(self._commute(state.roles[role], given, failure) for failure in news)
            )
        }
        return told, torn, failed

    def _is_apart(self, given: int, failed: frozenset[str] | None) -> bool:
        """Is an input about other requests than those that fail, and only about such?"""
        about = self._requests(given)
        return failed is not None and bool(about) and about.isdisjoint(failed)

    def _requests(self, given: int) -> frozenset[str]:
        """What requests an input is about, where it says so."""
        known = self._about.get(given)
        if known is None:
            arrived = self._world.inputs[given]
            known = frozenset(m.requests_of(arrived.message) if isinstance(arrived, i.Deliver) else ())
            self._about[given] = known
        return known

    def _receivers(
        self, state: State, torn: set[int], first: dict[int, int], due: Sequence[Move]
    ) -> dict[int, set[int]]:
        """Roles that each torn role may send something else than news of the failure, in its next move."""
        world = self._world
        to: dict[int, set[int]] = {at: set() for at in torn}
        for move in due:
            role = world.role_of(move)
            if role in torn and move.kind != FETCHING:
                given = first[move.at] if move.kind == DELIVER else move.given
                done = world.transition(state.roles[role], given)
                to[role].update(world.owner[c] for c, output in done.outputs if not world.failing[output])
        return to

    def _commute(self, local: int, one: int, other: int) -> bool:
        key = (local, one, other) if one < other else (local, other, one)
        known = self._commuting.get(key)
        if known is None:
            first, second = self._both(local, one, other), self._both(local, other, one)
            known = self._commuting[key] = first is not None and first == second
        return known

    def _both(self, local: int, one: int, other: int) -> tuple[int, dict[int, list[int]]] | None:
        """State and outputs per channel after two inputs; None where a checker objects."""
        transition = self._world.transition
        before = transition(local, one)
        after = transition(before.after, other)
        if before.always or before.calm or after.always or after.calm or before.published or after.published:
            return None
        outputs: dict[int, list[int]] = {}
        for channel, given in (*before.outputs, *after.outputs):
            outputs.setdefault(channel, []).append(given)
        return after.after, outputs
