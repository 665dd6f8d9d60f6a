"""A whole 2P4D cluster with 8 GPUs per node: how fast it stands, and what it costs to do nothing.

Run: ``python -m tests.bench.bench_cluster``. Network built and all role processes ready (targets 2 s and 5 s in all on
2 idle cores), teardown (1 s), CPU of the idle cluster (10 % of one core), private memory of a role (25 MB). The
reference for the network is ``bench_network``'s; for processes it is ten bare interpreters, one after the other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scenarios.loader import load_scenario
from testbed.fabric.live.forkserver import RoleGroup
from testbed.fabric.live.network import Network
from testbed.fabric.live.sandbox import run_in_sandbox
from testbed.runtime.live_run import role_specs
from testbed.runtime.plan import RunPlan
from testbed.runtime.warm import WarmBlocks

TARGETS = {
    "network s": 2.0,
    "ready s": 5.0,
    "teardown s": 1.0,
    "idle share of a core": 0.10,
    "private MB of a role": 25.0,
}
IDLE_S = 5.0


def plan_without_agents(folder: Path) -> RunPlan:
    """The shipped 2P4D scenario, with nobody to serve."""
    plan = load_scenario("two-pe-four-de", run_dir=folder).plan
    return dataclasses.replace(plan, scripts=(), starts_ns=())


def measure(plan: RunPlan) -> int:
    """In the sandbox: print every figure beside its target."""
    begin = time.perf_counter()
    network = Network(plan.cluster)
    network.build()
    figures = {"network s": time.perf_counter() - begin}
    figures |= asyncio.run(_roles(plan, network, begin))
    begin = time.perf_counter()
    network.close()
    figures["teardown s"] += time.perf_counter() - begin
    good = True
    for name, target in TARGETS.items():
        good = good and figures[name] <= target
        print(f"2P4D g=8, {name}: {figures[name]:.3f} (target {target:g})", flush=True)
    return 0 if good else 1


async def _roles(plan: RunPlan, network: Network, begin: float) -> dict[str, float]:
    nothing = WarmBlocks(entries=(), keys=(), directory=plan.run_dir)
    specs = role_specs(plan, plan.systems[-1], network, plan.run_dir / "storage", nothing)
    async with RoleGroup(specs, plan.run_dir) as group:
        await group.ready()
        ready_s = time.perf_counter() - begin
        await group.start()
        pids = [process.pid for process in group.processes.values()]
        before = sum(map(_cpu_ticks, pids))
        await asyncio.sleep(IDLE_S)
        idle = (sum(map(_cpu_ticks, pids)) - before) / _TICKS_PER_S / IDLE_S
        stop = time.perf_counter()
        reports = await group.stop()
        teardown_s = time.perf_counter() - stop
    private = max(int(str(report["private_bytes"])) for report in reports.values() if isinstance(report, dict))
    print(f"{len(specs)} roles", flush=True)
    return {
        "ready s": ready_s,
        "teardown s": teardown_s,
        "idle share of a core": idle,
        "private MB of a role": private / 1e6,
    }


_TICKS_PER_S = 100  # USER_HZ, what /proc counts in


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def bare_interpreters(count: int) -> float:
    """Seconds to start and end ``count`` Python processes that import numpy, one after the other."""
    begin = time.perf_counter()
    for _ in range(count):
        subprocess.run([sys.executable, "-c", "import numpy"], check=True)
    return time.perf_counter() - begin


def main() -> int:
    """Exit code 1 above a target."""
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
        plan = plan_without_agents(Path(folder))
        code = run_in_sandbox(lambda: measure(plan))
    print(f"reference: 10 bare interpreters that import numpy take {bare_interpreters(10):.2f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
