"""Each planted mistake is found, with a trace that live machines follow to the same end; else nothing is found."""

from __future__ import annotations

import pytest

from testbed.cli.check_cluster import load_config, setup_of
from testbed.errors import ConfigError
from testbed.fabric.check.hosted import replay, shortened
from testbed.fabric.check.trace import lines, named
from tests.check import planted as p
from tests.check.exploring import explore

CASES = [
    (p.GrantReused, "de0", "1p1d-1r", 0, "conservation", "a second time"),
    (p.VisibleBeforeDurable, "de0", "1p1d-1r", 0, "visibility", "not durable on st0"),
    (p.GrantsLeftOpen, "de0", "1p1d-1r", 1, "conservation", "lands in memory that nobody holds"),
    (p.LostWakeUp, "pe0gpu0", "1p1d-1r", 0, "progress", "nothing happens any more, but 0.0 is still"),
    (p.AssignedTwice, "scheduler", "1p1d-1r", 0, "tokens", "assigned to the group of leader-pe0 a second time"),
    (p.MissesMergedWrongly, "de0", "1p1d-2r", 0, "provenance", "memory never written"),
    (p.MissesMergedWrongly, "de0", "1p1d-1r-split", 0, "provenance", "lands where layer 0 of block"),
    (p.UsesEvicted, "pe0", "1p1d-2turns-cache", 0, "machine", "retained but nobody holds it"),
    (p.StartsWithOneHalf, "pe0gpu0", "1p1d-1r-split", 0, "tokens", "OpenLayerWrites for request 0.0 comes in state R"),
]


@pytest.mark.parametrize(("machine", "role", "config", "faults", "checker", "text"), CASES)
def test_a_planted_mistake_is_found(
    machine: type, role: str, config: str, faults: int, checker: str, text: str
) -> None:
    alter = p.planted(machine, role)
    world, coverage = explore(config, faults, alter=alter)
    found = coverage.found
    assert found is not None
    assert found.violations[0].checker == checker
    assert text in found.violations[0].text
    moves = named(world, faults, found.moves)
    setup = setup_of(load_config(config), alter=alter)
    assert replay(setup, faults, moves, at_end=found.at_end) == found.violations
    assert len(lines(moves, found.violations)) == len(moves) + len(found.violations)


@pytest.mark.parametrize(
    ("config", "faults"),
    [
        ("1p1d-1r-1l-cold", 1),
        ("1p1d-2r", 0),
        ("1p1d-2turns", 0),
        ("1p1d-2turns-cache", 0),
        ("1p1d-1r-split", 1),
        ("1p1d-2r-split", 0),
    ],
)
def test_nothing_is_found_where_nothing_is_planted(config: str, faults: int) -> None:
    _, coverage = explore(config, faults)
    assert coverage.found is None
    assert coverage.stopped == ""
    assert coverage.ends > 1
    errors = {ended[2] for outcome in coverage.outcomes for ended in outcome}  # type: ignore[index]
    assert errors == {""} if faults == 0 else "" in errors and len(errors) > 5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_the_trace_of_a_mistake_shows_nothing_without_it(case: tuple[type, str, str, int, str, str]) -> None:
    machine, role, config, faults, *_ = case
    world, coverage = explore(config, faults, alter=p.planted(machine, role))
    assert coverage.found is not None
    moves = named(world, faults, coverage.found.moves)
    try:
        violations = replay(setup_of(load_config(config)), faults, moves, at_end=False)
    except ConfigError as error:  # machines without the mistake say something else on the way
        assert "cannot be followed" in str(error)
    else:
        assert violations == []


def test_a_planted_mistake_is_found_without_reduction_too() -> None:
    alter = p.planted(p.VisibleBeforeDurable, "de0")
    _, full = explore("1p1d-1r-1l-cold", 0, alter=alter, full=True)
    world, reduced = explore("1p1d-1r-1l-cold", 0, alter=alter)
    assert full.found is not None
    assert reduced.found is not None
    assert full.found.violations == reduced.found.violations
    assert len(full.found.moves) == full.depth, "breadth first: no trace is shorter"
    moves = named(world, 0, reduced.found.moves)
    setup = setup_of(load_config("1p1d-1r-1l-cold"), alter=alter)
    assert len(shortened(setup, 0, moves, reduced.found.violations[0])) == full.depth < len(moves)
