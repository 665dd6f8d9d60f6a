"""Pages say what the code does: diagrams, errors, messages, files of the protocol; every figure of the contract."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from emulators.central_scheduler import CentralScheduler
from emulators.diagrams import MACHINES, draw, fill, sections
from emulators.prefill_engine import TABLE
from testbed.metrics.collectives import CollectiveMetrics
from testbed.metrics.metrics import SystemMetrics
from testbed.protocol import machine, messages, scheduling
from testbed.protocol.params import SidePolicy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_state_diagrams_are_those_of_the_tables() -> None:
    assert sections(PAGE) == list(MACHINES)
    assert fill(PAGE) == PAGE, "run python -m emulators.diagrams docs/protocol.md"


def test_a_diagram_has_every_arrow() -> None:
    drawing = draw(TABLE)  # type: ignore[arg-type]
    for before, event, after in TABLE.arrows():
        assert re.search(rf"{before.name} --> {after.name}: .*\b{event}\b", drawing)
    assert "    [*] --> RESERVING" in drawing and "    FINISHED --> [*]" in drawing


def test_the_page_on_policies_names_what_there_is() -> None:
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`(\w+)`", line) for line in page.splitlines() if line.startswith("| ")]
    functions = {name for row in rows for name in row[:-1]}
    callers = {row[-1] for row in rows if row}
    assert functions == {name for name in vars(scheduling) if name.startswith("select_")}
    assert callers == {"_fetch_prefill", "_fetch_decode", "_shares"} and all(
        hasattr(CentralScheduler, c) for c in callers
    )
    (names,) = re.findall(r"SidePolicy = Literal\[(.*)\]", page)
    assert [name.strip(' "') for name in names.split(",")] == [*get_args(SidePolicy), "margin"]


def test_every_error_is_in_the_list() -> None:
    raised = {
        next(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
        for path in (ROOT / "emulators").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") in ("fail", "_failed", "_fail_batch")
        and any(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in node.args[:2])
    }
    listed = set(re.findall(r"^\| (`.*`) \|", PAGE, re.MULTILINE))
    names = set(re.findall(r"`(\w+)`", " ".join(listed)))
    assert raised == names


@pytest.mark.parametrize("kind", [k.__name__ for k in messages.AnyMessage.__args__ if k is not messages.Hello])
def test_every_message_is_mentioned(kind: str) -> None:
    assert re.search(rf"\b{kind}\b", PAGE)


def test_every_figure_is_in_the_contract() -> None:
    contract = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    figures = {field.name for kind in (SystemMetrics, CollectiveMetrics) for field in fields(kind)} - {"system"}
    assert {name for name in figures if not re.search(rf"\b{name}\b", contract)} == set()


def test_names_in_code_style_exist() -> None:
    known = {k.__name__ for k in messages.AnyMessage.__args__} | set(vars(machine))
    states_and_events = {event for m in MACHINES.values() for event in m.table.events}
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", PAGE))
    errors = {n for n in named if n.endswith("TimedOut")} | set(re.findall(r"`(\w+)`", _error_rows()))
    assert named - known - states_and_events - errors - {"GrantTable"} == set()
    for path in re.findall(r"`(\w+\.py)`", PAGE):
        assert (ROOT / "emulators" / path).exists(), path
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "emulators").glob("*.py"))
    for function in re.findall(r"`(_\w+)`", PAGE):
        assert f"def {function}(" in source, function


def _error_rows() -> str:
    return "\n".join(line for line in PAGE.splitlines() if re.match(r"^\| `[A-Z]", line))
