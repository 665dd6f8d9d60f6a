"""Simulations over processes: once each, the longest first, the same whatever the number of workers."""

from __future__ import annotations

import os
import signal

import pytest

from testbed.errors import BugError, HostError
from testbed.flowsim.run import FlowCase, FlowResult
from testbed.paper.cases import Scope
from testbed.paper.lab import Lab
from tests.support.paper_world import fake_simulate

SCOPE = Scope()
CASES = [SCOPE.offline("ds-660b", "64K", "dualpath", agents) for agents in (10, 30, 20)]


def quiet(stage: str, share: float) -> None:
    pass


def stuck(case: FlowCase) -> FlowResult:
    if case.agents == 20:
        raise BugError("stands still")
    return fake_simulate(case)


def killed(case: FlowCase) -> FlowResult:
    os.kill(os.getpid(), signal.SIGKILL)
    return fake_simulate(case)


def interrupted(case: FlowCase) -> FlowResult:
    raise KeyboardInterrupt


def test_each_case_once_and_the_longest_first() -> None:
    order: list[int] = []
    shares: list[float] = []

    def simulate(case: FlowCase) -> FlowResult:
        order.append(case.agents)
        return fake_simulate(case)

    lab = Lab(workers=1, report=lambda stage, share: shares.append(share), simulate=simulate)
    lab.run([*CASES, *CASES])
    assert order == [30, 20, 10] and shares == pytest.approx([0.0, 0.5, 5 / 6, 1.0])
    assert lab(CASES[0]).jct_s == 10.0 and len(order) == 3
    assert lab(SCOPE.offline("ds-660b", "64K", "dualpath", 40)).jct_s == 40.0 and order[-1] == 40
    lab.run(CASES)
    assert len(order) == 4


def test_workers_do_not_change_results() -> None:
    one, two = (Lab(workers=n, report=quiet, simulate=fake_simulate) for n in (1, 2))
    one.run(CASES)
    two.run(CASES)
    assert set(two.done) == set(CASES)
    for case in CASES:
        assert one(case).jct_s == two(case).jct_s and one(case).ttft_parts_s == two(case).ttft_parts_s


@pytest.mark.parametrize("workers", [1, 2])
def test_a_simulation_that_fails_leaves_the_others(workers: int) -> None:
    lab = Lab(workers=workers, report=quiet, simulate=stuck)
    lab.run(CASES)
    assert [lab.done[case].error for case in CASES] == ["", "", "stands still"]
    assert not lab(CASES[2]).finished and lab(CASES[1]).finished


def test_a_killed_worker_is_a_sentence() -> None:
    with pytest.raises(HostError, match=r"a simulation was killed.*use fewer --workers"):
        Lab(workers=2, report=quiet, simulate=killed).run(CASES)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interruption_ends_it(workers: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        Lab(workers=workers, report=quiet, simulate=interrupted).run(CASES)


def test_quick_runs_a_tenth() -> None:
    full, quick = Scope(), Scope(quick=True)
    assert quick.offline("ds-660b", "64K", "basic", 2048).agents == 205
    assert quick.offline("ds-660b", "64K", "basic", 3).agents == 1
    online, tenth = (scope.online("ds-660b", "basic", 0.4) for scope in (full, quick))
    assert (tenth.aps, tenth.horizon_s) == (0.4, online.horizon_s / 10)
    assert online.agents >= 0.4 * online.horizon_s + 4 * (0.4 * online.horizon_s) ** 0.5  # never too few arrivals


def test_equal_cells_are_equal_cases() -> None:
    assert SCOPE.offline("ds-27b", "64K", "basic", 512) == SCOPE.offline("ds-27b", "64K", "basic", 512, nodes=(1, 1))
    assert SCOPE.offline("ds-660b", "64K", "basic", 5).prefill_nodes == 2
