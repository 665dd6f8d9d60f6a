"""Exhaustive exploration, breadth first, so that the first violation comes with a shortest trace.

States are remembered by a 64-bit fingerprint (as other explicit-state checkers do): with a million states, the chance
that two share one is below 3e-8. States of the frontier alone are kept whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from testbed.fabric.check.checkers import progress
from testbed.fabric.check.hosted import judge_end
from testbed.fabric.check.inputs import Violation
from testbed.fabric.check.reduction import Reduction
from testbed.fabric.check.world import DEADLINE, EARLY, FAULTS, CheckWorld, Move, State

_LOOK_EVERY = 4096  # states between two looks at the bounds


@dataclass(slots=True, kw_only=True)
class Bounds:
    """Where an exploration stops; ``memory_bytes()`` reads what the process takes, ``clock_s()`` a clock."""

    max_states: int
    max_memory_bytes: int
    memory_bytes: Callable[[], int]
    clock_s: Callable[[], float]
    on_progress: Callable[[int, int, float], None] = lambda states, depth, seconds: None


@dataclass(slots=True, kw_only=True)
class Found:
    """A violation: the moves that lead to it from the start, and what is wrong.

    ``at_end``: it shows where nothing happens any more, not in the last move.
    """

    moves: list[Move]
    violations: list[Violation]
    at_end: bool = False


@dataclass(slots=True, kw_only=True)
class Coverage:
    """What an exploration has covered. ``stopped`` says why it ended early, or nothing."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    ends: int = 0
    seconds: float = 0.0
    stopped: str = ""
    found: Found | None = None
    outcomes: set[tuple[object, ...]] = field(default_factory=set)
    """How requests ended and what was left, over all ends."""

    @property
    def rate(self) -> float:
        """States per second."""
        return self.states / self.seconds if self.seconds else 0.0


class Explorer:
    """Explores a world from its start with at most ``faults`` faults."""

    def __init__(
        self,
        world: CheckWorld,
        faults: int,
        bounds: Bounds,
        *,
        reduction: Reduction | None,
        kinds: frozenset[str] = FAULTS,
    ) -> None:
        """``reduction`` None: every order of everything; ``kinds``: which faults may strike."""
        self._world = world
        self._faults = faults
        self._bounds = bounds
        self._kinds = kinds
        self._reduction = reduction
        self._number: dict[int, int] = {}
        self._parents = array("q")
        self._moves: list[Move] = []
        self._sources, self._targets = array("q"), array("q")
        self._ends: list[int] = []
        self.coverage = Coverage()

    def run(self) -> Coverage:
        """Explore to the end, to a violation, or to a bound."""
        coverage, bounds = self.coverage, self._bounds
        start_s = bounds.clock_s()
        start = self._world.initial(self._faults)
        self._add(start, -1, Move("start", -1))
        if self._world.initial_violations:
            coverage.found = Found(moves=[], violations=self._world.initial_violations)
        frontier = [start]
        while frontier and coverage.found is None and not coverage.stopped:
            frontier = self._level(frontier, start_s)
            coverage.depth += bool(frontier)
        coverage.states, coverage.transitions = len(self._number), len(self._sources)
        if coverage.found is None and not coverage.stopped:
            self._check_progress()
        coverage.seconds = bounds.clock_s() - start_s
        return coverage

    def _level(self, frontier: list[State], start_s: float) -> list[State]:
        following: list[State] = []
        for state in frontier:
            number = self._number[hash(state)]
            for move in self.moves(state):
                after, violations = self._world.apply(state, move)
                if violations:
                    self._report(number, move, violations)
                    return following
                if self._add(after, number, move):
                    following.append(after)
                    if len(self._number) % _LOOK_EVERY == 0:
                        self._look_at_bounds(start_s)
            if self.coverage.found is not None or self.coverage.stopped:
                break
        return following

    def moves(self, state: State) -> list[Move]:
        """The moves to try from a state; at an end, what must hold there is checked."""
        world = self._world
        due = world.due(state)
        chosen = due if self._reduction is None else self._reduction.choose(state, due)
        concerned = {world.role_of(move) for move in chosen} if len(chosen) < len(due) else None
        late = world.late(state)
        if concerned is not None:  # what is held back commutes with the moves of other roles, unless it ends a request
            late = [x for x in late if world.owner[x.at] in concerned or world.spreads_failure(state, x)]
        moves = [*chosen, *late]
        if world.is_quiet(state, due):
            if state.hurt:
                moves += world.deadlines(state, DEADLINE)
            if not moves:
                self._at_end(state)
        if state.left:
            moves += [fault for fault in world.faults_on(state, chosen) if fault.kind in self._kinds]
            if EARLY in self._kinds:
                moves += world.deadlines(state, EARLY, concerned)
        return moves

    def _add(self, state: State, parent: int, move: Move) -> bool:
        number = self._number.setdefault(hash(state), len(self._number))
        if parent >= 0:
            self._sources.append(parent)
            self._targets.append(number)
        if number < len(self._moves):
            return False
        self._parents.append(parent)
        self._moves.append(move)
        return True

    # --- what must hold ------------------------------------------------------------------------------------------

    def _at_end(self, state: State) -> None:
        number = self._number[hash(state)]
        self._ends.append(number)
        self.coverage.ends += 1
        world = self._world
        outcome, violations = judge_end(world.roles_in(world.after_reports(state)), world.shared.expected)
        self.coverage.outcomes.add(outcome)
        if violations and self.coverage.found is None:
            self.coverage.found = Found(moves=self._path(number), violations=violations, at_end=True)

    def _check_progress(self) -> None:
        stuck = progress.unable_to_end(len(self._number), self._sources, self._targets, self._ends)
        if stuck:
            text = "from here no end is reached, whatever happens: a livelock"
            self.coverage.found = Found(moves=self._path(stuck[0]), violations=[Violation(progress.NAME, text)])

    def _report(self, number: int, move: Move, violations: list[Violation]) -> None:
        if self.coverage.found is None:
            self.coverage.found = Found(moves=[*self._path(number), move], violations=violations)

    def _path(self, number: int) -> list[Move]:
        moves: list[Move] = []
        while self._parents[number] >= 0:
            moves.append(self._moves[number])
            number = self._parents[number]
        return moves[::-1]

    def _look_at_bounds(self, start_s: float) -> None:
        states, bounds = len(self._number), self._bounds
        bounds.on_progress(states, self.coverage.depth, bounds.clock_s() - start_s)
        if states >= bounds.max_states:
            self.coverage.stopped = f"{states} states were reached"
        elif (taken := bounds.memory_bytes()) > bounds.max_memory_bytes:
            self.coverage.stopped = f"memory has grown to {taken / 1e9:.1f} GB"
