"""Literal transition tables: what a role may do with a request, in every state, for every event.

A table names, for each (state, event), the states that may follow. Everything else is one of two things, and the table
says which: an event that a late or repeated message may bring is *ignored*; any other is *refused* and ends the request
with a named error. The state diagrams of the docs are drawn from these tables, and a test walks the whole matrix.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from testbed.errors import BugError

S = TypeVar("S", bound=enum.Enum)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionTable(Generic[S]):
    """``edges[state][event]`` are the allowed next states; ``ignored[state]`` events that change nothing.

    ``patience[state]`` is how many deadlines a request may stay in a state (else one): a state that spans waits of
    other roles is more patient than they are, so that the one that knows what is missing is the one that reports it.
    """

    role: str
    start: S
    ends: frozenset[S]
    edges: Mapping[S, Mapping[str, tuple[S, ...]]]
    ignored: Mapping[S, frozenset[str]]
    patience: Mapping[S, int] = field(default_factory=dict)

    @property
    def states(self) -> tuple[S, ...]:
        """All states, in order of definition."""
        return tuple(type(self.start))

    @property
    def events(self) -> tuple[str, ...]:
        """All events that the table knows."""
        names = {e for row in self.edges.values() for e in row} | {e for row in self.ignored.values() for e in row}
        return tuple(sorted(names))

    def verdict(self, state: S, event: str) -> str:
        """One of "accept", "ignore" and "refuse"."""
        if event in self.edges.get(state, {}):
            return "accept"
        return "ignore" if event in self.ignored.get(state, frozenset()) else "refuse"

    def check(self, state: S, event: str, following: S) -> None:
        """Raises BugError unless ``event`` may lead from ``state`` to ``following``."""
        if following not in self.edges.get(state, {}).get(event, ()):
            raise BugError(f"{self.role}: {event} may not lead from {state.name} to {following.name}")

    def arrows(self) -> Iterator[tuple[S, str, S]]:
        """Every (state, event, next state)."""
        for state, row in self.edges.items():
            for event, following in row.items():
                for after in following:
                    yield state, event, after
