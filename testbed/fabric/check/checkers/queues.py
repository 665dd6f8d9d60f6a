"""Bounded queues: no queue, table or channel grows beyond what the parameters or the workload allow.

Windows are the parameters' (reads and persists out, open grants); a queue that no parameter bounds below the workload's
size may hold what the workload has of blocks times layers, and no more: growth beyond it is a leak or a storm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NAME = "queues"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``windows``: most entries of containers by name; ``rest``: of any other; ``channel``: things on one channel."""

    windows: dict[str, int]
    rest: int
    channel: int


def of_role(role: str, machine: Any, limits: Limits) -> Iterator[str]:
    """Containers of a machine that hold too much."""
    for owner in (machine, getattr(machine, "persister", None)):
        for key, held in vars(owner).items() if owner is not None else ():
            if isinstance(held, dict | list | set | deque):
                most = limits.windows.get(key, limits.rest)
                if len(held) > most:
                    yield f"{role}.{key} holds {len(held)}, at most {most} are allowed"


def of_channel(name: str, length: int, limits: Limits) -> Iterator[str]:
    """A channel that carries too much at once."""
    if length > limits.channel:
        yield f"{name} carries {length} messages at once, at most {limits.channel} are expected"
