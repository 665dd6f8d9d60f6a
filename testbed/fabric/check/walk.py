"""Random walks: one order of events after the other through a cluster too large to explore.

A walk picks among everything that may happen next; faults strike now and then while any are left. Chance is passed in,
so that a seed repeats a walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from testbed.fabric.check import inputs as i
from testbed.fabric.check.checkers import progress
from testbed.fabric.check.hosted import Cluster, NamedMove
from testbed.fabric.check.role import Setup
from testbed.fabric.check.world import DEADLINE

_FAULT_ONE_IN = 40  # moves, while faults are left
_HOLD_ONE_IN = 10  # chance that what is held back comes now, per move
_MOST_PER_ROLE = 4_000  # moves per role after which a walk is in a livelock


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """One walk: its moves, what was wrong, and whether that showed only at the end."""

    moves: list[NamedMove]
    violations: list[i.Violation]
    at_end: bool


def walk(setup: Setup, faults: int, below: Callable[[int], int]) -> Walked:
    """Walk to an end. ``below(n)`` draws an integer in [0, n)."""
    cluster = Cluster(setup, faults)
    moves: list[NamedMove] = []
    idle = 0
    for _ in range(_MOST_PER_ROLE * len(cluster.roles)):
        due = cluster.due()
        choices = due
        if late := cluster.late():
            choices = [*due, *late] if not due or below(_HOLD_ONE_IN) == 0 else due
        quiet = all(move.reports for move in due)
        idle = idle + 1 if quiet else 0
        if quiet and (not due or idle > 4 * len(cluster.roles)):  # reports alone: time passes
            choices = [*late, *(cluster.deadlines(DEADLINE) if cluster.hurt else [])]
            idle = 0
        elif cluster.left and below(_FAULT_ONE_IN) == 0:
            choices = list(cluster.faults(due)) or choices
        if not choices:
            cluster.judge_end()
            return Walked(moves=moves, violations=cluster.violations, at_end=True)
        moves.append(choices[below(len(choices))])
        cluster.apply(moves[-1])
        if cluster.violations:
            return Walked(moves=moves, violations=cluster.violations, at_end=False)
    text = f"no end after {len(moves)} steps: a livelock"
    return Walked(moves=moves, violations=[i.Violation(progress.NAME, text)], at_end=False)
