"""The protocol on every lane discipline, tokens verified; chiefly for a stock kernel, which has them all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.fabric.live.counters import verify_shaping
from testbed.fabric.live.lane_offers import kernel_lanes
from testbed.fabric.live.network import Network
from testbed.fabric.spec import LaneDiscipline
from tests.live.sandboxed import in_sandbox, small_spec
from tests.live.small import run_judged

pytestmark = [pytest.mark.live, pytest.mark.stock_kernel]

NOBODY = 65_534
SMALL = ("workload.agents=1", "workload.start_turn=3", "workload.max_turns=2", "scale.bandwidth=44000")


@pytest.mark.parametrize(
    "lanes",
    [
        pytest.param(LaneDiscipline.HTB, marks=pytest.mark.nightly),  # every other live run has these lanes
        LaneDiscipline.PRIO,
        LaneDiscipline.ETS,
    ],
)
def test_a_run_moves_the_right_bytes_on_every_discipline(tmp_path: Path, lanes: LaneDiscipline) -> None:
    if problem := kernel_lanes()[lanes]:
        pytest.skip(f"this kernel has no lanes {lanes.value}: {problem}")
    summary, _ = run_judged(tmp_path, "quickstart", (*SMALL, f"cluster.lanes={lanes.value}"), "dualpath")
    assert summary.failures == ()
    assert all(system.tokens_verified == system.tokens_emitted > 0 for system in summary.systems)


def test_an_ordinary_user_builds_the_network_in_a_user_namespace() -> None:
    def body() -> list[str]:
        with Network(small_spec(gpus=1)) as network:
            return verify_shaping(network)

    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.chdir("/")
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            code = in_sandbox(body) != []
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
