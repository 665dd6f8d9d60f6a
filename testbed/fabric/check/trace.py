"""A trace on paper: named moves, lines to read, and the JSON file that `testbed check --replay` follows.

The file holds the configuration, the moves, and what is wrong. It depends on no numbers of an exploration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from testbed.errors import ConfigError
from testbed.fabric.check import inputs as i
from testbed.fabric.check.hosted import NamedMove
from testbed.fabric.check.words import of_input
from testbed.fabric.check.world import FINISH, LATE, LOCAL, CheckWorld, Move

FORMAT = 1


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace file holds. ``config``: the keys of the configuration; ``violations``: (checker, text)."""

    format: int
    config: dict[str, Any]
    faults: int
    at_end: bool
    violations: list[i.Violation]
    moves: list[NamedMove]


def named(world: CheckWorld, faults: int, moves: Sequence[Move]) -> list[NamedMove]:
    """The moves of an exploration by name."""
    state, found = world.initial(faults), []
    for move in moves:
        role = world.names[world.role_of(move)]
        if move.kind in LOCAL:
            given = world.inputs[move.given]
            what = given.lane if move.kind == FINISH else given.key  # type: ignore[union-attr]
            found.append(NamedMove(kind=move.kind, role=role, what=what))
        else:
            number = move.given if move.kind == LATE else dict(state.flight)[move.at][0]
            channel, what = world.channels[move.at], of_input(world.inputs[number])
            found.append(NamedMove(kind=move.kind, role=role, what=what, channel=channel))
        state, _ = world.apply(state, move)
    return found


def lines(moves: Sequence[NamedMove], violations: Sequence[i.Violation]) -> list[str]:
    """Steps to read, and what is wrong at the end of them."""
    width = len(str(len(moves)))
    steps = [f"{number:{width}}. {move.line()}" for number, move in enumerate(moves, start=1)]
    return [*steps, *(f"VIOLATION of {violation.checker}: {violation.text}" for violation in violations)]


def encode(trace: TraceFile) -> bytes:
    """The file's bytes."""
    return msgspec.json.format(msgspec.json.encode(trace), indent=1)


def decode(name: str, data: bytes) -> TraceFile:
    """The trace in a file.

    Raises:
        ConfigError: not a trace file, or one of another format.
    """
    try:
        trace = msgspec.json.decode(data, type=TraceFile)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name} is no trace file: {error}.") from error
    if trace.format != FORMAT:
        raise ConfigError(f"{name} is a trace of format {trace.format}; this version reads format {FORMAT}.")
    return trace
