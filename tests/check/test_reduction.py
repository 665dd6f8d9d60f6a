"""The reduction loses nothing where the full exploration can be had: the same ends, the same verdict."""

from __future__ import annotations

import pytest

from testbed.cli.check import DEFAULT
from testbed.fabric.check.world import LOSE, REFUSE, REPEAT
from tests.check.exploring import explore

TINY = "1p1d-1r-1l-cold"


@pytest.mark.parametrize(("faults", "kinds"), [(0, frozenset[str]()), (1, frozenset({REFUSE}))])
def test_same_ends_as_the_full_exploration(faults: int, kinds: frozenset[str]) -> None:
    _compare(TINY, faults, kinds)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [LOSE, REPEAT])
def test_same_ends_with_any_message_lost_or_repeated(kind: str) -> None:
    _compare(TINY, 1, frozenset({kind}))


@pytest.mark.nightly
def test_same_ends_for_a_request_with_hits() -> None:
    _compare("1p1d-1r-1l", 0, frozenset())


@pytest.mark.nightly
def test_same_ends_for_a_split_read() -> None:
    _compare("1p1d-1r-split", 0, frozenset())


def _compare(config: str, faults: int, kinds: frozenset[str]) -> None:
    _, full = explore(config, faults, full=True, kinds=kinds)
    _, reduced = explore(config, faults, kinds=kinds)
    assert full.found is None
    assert full.stopped == ""
    assert reduced.outcomes == full.outcomes
    assert reduced.states * 20 < full.states


@pytest.mark.nightly
@pytest.mark.parametrize(("config", "faults", "kinds"), DEFAULT)
def test_the_default_is_explored_to_the_end(config: str, faults: int, kinds: frozenset[str]) -> None:
    _, coverage = explore(config, faults, kinds=kinds)
    assert coverage.found is None, coverage.found
    assert coverage.stopped == ""
