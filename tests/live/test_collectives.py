"""Collectives live: engines of a group exchange real bytes in the high lane, beside KV in the low one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.small import run_judged

pytestmark = pytest.mark.live

SMALL = (
    "cluster.gpus_per_node=2", "workload.source=shipped", "workload.agents=2", "workload.start_turn=3",
    "workload.max_turns=1", "gpu.speedup=20",
)  # fmt: skip


def test_model_traffic_has_its_lane_and_its_ledger(tmp_path: Path) -> None:
    summary, outcomes = run_judged(tmp_path, "collectives", SMALL)
    assert not summary.failures
    (system,) = summary.systems
    assert system.tokens_verified == system.tokens_emitted > 0
    assert not any(o.error for o in outcomes["dualpath"])
    seen = system.collectives
    assert seen is not None
    assert seen.given_up == 0
    assert all(latency[kind].p50 > 0 for latency in (seen.dispatch_s, seen.combine_s) for kind in ("pe", "de"))
    high = {e.resource: e for e in summary.ledger if e.resource.endswith("(high lane)")}
    assert {"pe0.cnic0.read (high lane)", "de0.cnic1.write (high lane)"} <= high.keys()
    assert all(abs(e.measured_bytes - e.expected_bytes) <= 0.02 * e.expected_bytes > 0 for e in high.values())
    assert all(abs(e.error) < 0.02 for e in summary.ledger)
