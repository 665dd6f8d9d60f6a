"""Queues of requests for compiled code: ``ends`` is [head, tail], ``following`` the link of each request."""

from __future__ import annotations

from testbed.flowsim.compiled import inlined
from testbed.flowsim.state import I32, NONE


@inlined
def append(ends: I32, following: I32, request: int) -> None:
    """Add at the tail."""
    following[request] = NONE
    if ends[0] == NONE:
        ends[0] = request
    else:
        following[ends[1]] = request
    ends[1] = request


@inlined
def append_left(ends: I32, following: I32, request: int) -> None:
    """Add at the head."""
    following[request] = ends[0]
    ends[0] = request
    if ends[1] == NONE:
        ends[1] = request


@inlined
def drop_head(ends: I32, following: I32) -> None:
    """Remove the head of a queue that has one."""
    ends[0] = following[ends[0]]
    if ends[0] == NONE:
        ends[1] = NONE
