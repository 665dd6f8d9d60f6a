"""Shipped scenarios made small enough for a test, run in a sandbox and judged."""

from __future__ import annotations

from pathlib import Path

from emulators.agent_driver import Outcome
from scenarios.loader import load_scenario
from testbed.cli.judge import summarise
from testbed.metrics.summary import Summary
from testbed.runtime import live_run
from tests.live.sandboxed import in_sandbox

ONE_GPU = ("cluster.gpus_per_node=1", "protocol.wait_deadline_s=30")
BUSY_HOST = ("trust.lag_p99_ms=10000", "trust.cpu_share=1.0")  # other tests may share it: that is no fault of the run


def run_judged(
    tmp_path: Path, scenario: str, overrides: tuple[str, ...], *systems: str
) -> tuple[Summary, dict[str, list[Outcome]]]:
    """Run a scenario with one GPU per node; what it is judged to be, and every round of every system."""
    loaded = load_scenario(
        scenario, overrides=(*ONE_GPU, *BUSY_HOST, *overrides), systems=systems or ("dualpath",), run_dir=tmp_path
    )

    def body() -> tuple[Summary, dict[str, list[Outcome]]]:
        result = live_run.run_live(loaded.plan, lambda what, share: None)
        return summarise(loaded, result), {run.system: run.outcomes for run in result.systems}

    return in_sandbox(body)


def run_small(tmp_path: Path, *systems: str, agents: int = 1, turns: int = 2, deadline_s: float = 30) -> Summary:
    """The quickstart with few rounds; their past lies in storage, so the first of them reads."""
    small = (
        f"workload.agents={agents}",
        "workload.start_turn=3",
        f"workload.max_turns={turns}",
        f"protocol.wait_deadline_s={deadline_s}",
    )
    return run_judged(tmp_path, "quickstart", small, *systems)[0]
