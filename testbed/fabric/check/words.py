"""Steps in words, for traces: who does what with which message."""

from __future__ import annotations

from typing import Any

from testbed.fabric.check import inputs as i
from testbed.fabric.check.checkers.provenance import named
from testbed.protocol import messages as m
from testbed.protocol.grants import GrantRef

_LONG = frozenset({"tokens", "keys"})
"""Fields of messages that say nothing to a reader."""


def of_input(given: i.Input) -> str:
    """What arrives or ends."""
    match given:
        case i.Begin():
            return "starts"
        case i.Deliver():
            return f"takes {of_message(given.message)} from {given.sender}"
        case i.Arrive():
            cells = ", ".join(named(cell) for cell in given.cells)
            again = ", a second time" if given.echo else ""
            return f"has a write from {given.source} land under {_grant(given.grant_id)}{again}: {cells}"
        case i.Ended():
            how = f"was refused ({given.failure})" if given.failure else "has ended"
            return f"learns that its write under {_grant(given.grant_id)} {how}"
        case i.Finish():
            return f"learns that its {given.lane} is done"
        case i.Pass():
            return "makes its report" if given.key == "fetch" else f"sees the deadline {given.key} pass"


def of_message(message: m.Message) -> str:
    """A message with its fields but the long ones."""
    fields = [(name, getattr(message, name)) for name in message.__struct_fields__]
    inside = ", ".join(f"{name} {_value(value)}" for name, value in fields if name not in _LONG)
    return f"{type(message).__name__}({inside})"


def _value(value: Any) -> str:
    match value:
        case GrantRef():
            return f"{_grant(value.grant_id)} of {value.endpoint}"
        case m.Assignment():
            a = value
            hits = f"{a.pe_blocks} hits by pe, {a.de_blocks} by de"
            return f"{a.request_id} on {a.prefill_engine} and {a.decode_engine}, {hits}"
        case m.EngineLoad():
            return f"{value.engine}: {value.sequences} sequences, {value.tokens} tokens"
        case tuple():
            return "[" + "; ".join(_value(one) for one in value) + "]"
        case int() if value > 0xFFFFFFFF:
            return f"{value:016x}"
    return str(value)


def _grant(grant_id: int) -> str:
    return f"grant {grant_id:x}"


STRUCK = {
    "lose": "FAULT: lost on its way: {role} never {what}",
    "repeat": "FAULT: delivered twice, the copy later: {role} {what}",
    "delay": "FAULT: held back, to come later: {role} does not yet do this: {what}",
    "refuse": "FAULT: the destination cannot be reached: {role} never {what}",
    "early": "FAULT: too early: {role} {what}",
    "late": "what was held back comes: {role} {what}",
    "deadline": "nothing else happens: {role} {what}",
}


def of_step(kind: str, role: str, what: str) -> str:
    """One line of a trace."""
    return STRUCK.get(kind, "{role} {what}").format(role=role, what=what)
