"""Exactly once: every request is assigned once and every token is emitted once, and it is the right one.

While nothing has failed, a second assignment, a second token at one place, a named error or a stray message is the
protocol's. After a fault each of them has its excuse, but never a wrong token: that is checked always, against the
oracle (content.py), and so is that a request ends with all of its tokens or with a named error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from testbed.fabric.check.inputs import Violation
from testbed.ids import DRIVER, INDEX
from testbed.protocol import messages as m

NAME = "tokens"


def at_send(role: str, message: m.Message) -> Iterator[Violation]:
    """A role gives up on a request although nothing has failed."""
    if isinstance(message, m.RequestFailed):
        text = f"{role} ends {message.request_id} with {message.error} ({message.detail}), and nothing has failed"
        yield Violation(NAME, text)


def at_delivery(role: str, machine: Any, message: m.Message) -> Iterator[Violation]:
    """Something arrives that must come once per request; ``machine`` has not seen it yet."""
    records = getattr(machine, "records", {})
    match message:
        case m.TokensEmitted() if role == DRIVER:
            record = records.get(message.request_id)
            had = record.outcome.tokens if record is not None else ()
            for at in range(message.first_index, message.first_index + len(message.tokens)):
                if record is None or at in had:
                    yield Violation(NAME, f"token {at} of {message.request_id} is emitted a second time")
        case m.AssignPrefill() | m.AssignDecode():
            request_id = message.assignment.request_id
            if request_id in records or request_id in machine._ended:
                yield Violation(NAME, f"{request_id} is assigned to {role} a second time")
        case m.RequestsAssigned():
            for one in message.assignments:
                held = records.get(one.request_id)
                if one.request_id in machine._ended or (held is not None and held.state.name == "ASSIGNED"):
                    yield Violation(NAME, f"{one.request_id} is assigned to the group of {role} a second time")


def published(role: str, message: m.Message) -> tuple[int, ...]:
    """Keys that a message makes visible in the index."""
    return (message.key,) if role == INDEX and isinstance(message, m.PublishBlock) else ()


def of_driver(machine: Any, expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Wrong tokens, and rounds that ended without all of theirs or an error."""
    for outcome in machine.outcomes:
        request_id = f"{outcome.agent}.{outcome.turn}"
        right = expected[request_id]
        wrong = sorted(at for at, token in outcome.tokens.items() if at >= len(right) or token != right[at])
        if wrong:
            yield f"token {wrong[0]} of {request_id} is {outcome.tokens[wrong[0]]}, which is wrong"
        if request_id not in machine.records and not outcome.error and len(outcome.tokens) < len(right):
            yield f"{request_id} has ended with {len(outcome.tokens)} of {len(right)} tokens and no error"
