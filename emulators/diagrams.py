"""State diagrams of the machines, drawn from the tables that they obey, into docs/protocol.md.

    python -m emulators.diagrams docs/protocol.md

rewrites what is between ``<!-- states: <role> -->`` and ``<!-- end -->``; a test compares the page with the tables.
"""

from __future__ import annotations

import enum
import re
import sys
from pathlib import Path
from typing import Any

from emulators.agent_driver import AgentDriver
from emulators.base import RoleMachine, timeout_error
from emulators.central_scheduler import CentralScheduler
from emulators.decode_engine import DecodeEngine
from emulators.dram_buffer import DramBuffer
from emulators.group_leader import GroupLeader
from emulators.prefill_engine import PrefillEngine
from testbed.protocol.transitions import TransitionTable

MACHINES: dict[str, type[RoleMachine[Any]]] = {
    machine.table.role: machine
    for machine in (AgentDriver, CentralScheduler, GroupLeader, DramBuffer, PrefillEngine, DecodeEngine)
}
_SECTION = re.compile(r"(<!-- states: (?P<role>[^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def draw(table: TransitionTable[enum.Enum]) -> str:
    """A Mermaid state diagram: one arrow per pair of states, labelled with the events that take it."""
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {state.name}: {state.value}" for state in table.states]
    lines.append(f"    [*] --> {table.start.name}")
    labels: dict[tuple[str, str], list[str]] = {}
    for before, event, after in table.arrows():
        labels.setdefault((before.name, after.name), []).append(event)
    lines += [f"    {before} --> {after}: {', '.join(events)}" for (before, after), events in labels.items()]
    lines += [f"    {state.name} --> [*]" for state in table.states if state in table.ends]
    return "\n".join([*lines, "```"])


def waits(machine: type[RoleMachine[Any]]) -> str:
    """A table of the states' deadlines, what is ignored there, and the error that a deadline ends in."""
    table = machine.table
    lines = ["| state | deadlines | ignored | when they pass |", "|---|---|---|---|"]
    for state in table.states:
        if state not in table.ends:
            ignored = ", ".join(sorted(table.ignored.get(state, ()))) or "–"
            patience, error = table.patience.get(state, 1), timeout_error(machine, state)
            lines.append(f"| {state.name} | {patience} | {ignored} | `{error}` |")
    return "\n".join(lines)


def fill(page: str) -> str:
    """The page with every section drawn anew."""

    def section(match: re.Match[str]) -> str:
        machine = MACHINES[match["role"]]
        return f"{match[1]}{draw(machine.table)}\n\n{waits(machine)}\n{match[3]}"

    return _SECTION.sub(section, page)


def sections(page: str) -> list[str]:
    """Roles that the page has a section for, in order."""
    return [match["role"] for match in _SECTION.finditer(page)]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(fill(target.read_text(encoding="utf-8")), encoding="utf-8")
