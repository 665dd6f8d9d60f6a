"""``testbed plan --confirm``: simulated clusters on both sides of each bound, and what saturates in them.

The workload is all storage: DS 27B on the 64K trace from its 61st turn on, with GPUs a thousand times as fast as the
paper's. Blocks are large, layers go in two steps and 16 tokens stand as one, which changes how many transfers there are
and hardly how many bytes: misses, which the equations leave out, stay near 3 % of a prompt.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from emulators.agent_driver import AgentDriver
from scenarios.resolve import resolve
from scenarios.schema import ClusterSection, GpuSection, ProtocolSection, ScaleSection, Scenario, WorkloadSection
from testbed.analysis.bottleneck import Resource, Setting
from testbed.analysis.confirm import Crossing, Sample, Step, bounds, step
from testbed.cli.progress import reporting
from testbed.errors import RunFailedError
from testbed.fabric.spec import ClusterSpec
from testbed.ids import DRIVER
from testbed.runtime.past import warm_entries
from testbed.runtime.plan import RunPlan
from testbed.runtime.sim_run import world_of
from testbed.sweep.pool import Task, how_ended, run_all

_AGENTS_PER_NODE = 24
"""Times s: enough work that waits for no GPU to run dry by chance, for the equations assume balance. With a third of it
storage falls short at s = 2 before anything else is full."""
_SUFFIXES = {
    ".snic.rx": (Resource.SNIC, Resource.SNIC),
    ".read": (Resource.PE_CNIC_READ, Resource.DE_CNIC_READ),
    ".write": (Resource.PE_CNIC_WRITE, Resource.DE_CNIC_WRITE),
    ".dram": (Resource.PE_DRAM, Resource.DE_DRAM),
}
"""Kinds of resources of prefill and decode nodes, by how names of the sim's counters end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulation:
    """One step to simulate."""

    at: Setting
    nodes: tuple[int, int]


def confirm(at: Setting) -> int:
    """Sweep across both ends of the interval of ``at``; 0 if both are confirmed, else 1.

    Raises:
        ConfigError: there is no interval, or no small clusters around its ends.
        RunFailedError: a simulation failed.
    """
    sweeps = bounds(at)
    wanted = [_Simulation(at=at, nodes=nodes) for _, _, steps in sweeps for nodes in steps]
    measured = _simulate(wanted)
    crossings = [
        Crossing(title=title, named=named, steps=tuple(measured[nodes] for nodes in steps))
        for title, named, steps in sweeps
    ]
    out = Console(highlight=False)
    for crossing in crossings:
        out.print(_table(crossing))
        out.print(_sentence(crossing), soft_wrap=True)
    return 0 if all(crossing.confirmed for crossing in crossings) else 1


def _simulate(wanted: list[_Simulation]) -> dict[tuple[int, int], Step]:
    """Every step once, as many at a time as there are CPUs."""
    with tempfile.TemporaryDirectory() as directory, reporting(Console(stderr=True), quiet=False) as progress:
        tasks = {
            one.nodes: Task(subject=one, output=Path(directory) / f"{one.nodes[0]}p{one.nodes[1]}d") for one in wanted
        }
        ended: list[_Simulation] = []

        def work(one: _Simulation) -> int:
            _result(tasks[one.nodes]).write_text(json.dumps(_measure(one)), encoding="utf-8")
            return 0

        def told(one: _Simulation | None, code: int) -> None:
            if one is not None:
                ended.append(one)
                if how := how_ended(code):
                    said = tasks[one.nodes].output.read_text(encoding="utf-8").strip().splitlines()
                    raise RunFailedError(f"simulating {one.nodes[0]}P{one.nodes[1]}D {how}: {(said or [''])[-1]}")
            progress(f"simulating {len(tasks)} clusters", len(ended) / len(tasks))

        run_all(list(tasks.values()), work, os.cpu_count() or 1, told)
        return {nodes: _read_step(task) for nodes, task in tasks.items()}


def _result(task: Task[_Simulation]) -> Path:
    return task.output.with_suffix(".json")


def _read_step(task: Task[_Simulation]) -> Step:
    document = json.loads(_result(task).read_text(encoding="utf-8"))
    samples = [Sample(at_ns=at, carried={Resource(k): v for k, v in c.items()}) for at, c in document["samples"]]
    capacity = {Resource(kind): rate for kind, rate in document["capacity"].items()}
    return step(task.subject.at, task.subject.nodes, samples, capacity)


def _measure(one: _Simulation) -> dict[str, object]:
    """Run one cluster to its end; cumulative samples and capacities, by kind of resource.

    Raises:
        RunFailedError: requests failed.
    """
    plan = _plan(one)
    world = world_of(plan, plan.systems[0], warm_entries(plan.scripts, plan.params.layout), None)
    driver = world.roles[DRIVER].machine
    assert isinstance(driver, AgentDriver)
    samples: list[tuple[int, dict[str, int]]] = []

    def sample() -> None:
        carried = {kind.value: 0 for kind in Resource}
        for name, counter in world.counters.items():
            if (found := kind_of(name)) is not None:
                carried[found.value] += counter.data.bytes
        samples.append((world.now_ns, carried))

    world.run(lambda: driver.finished, sample)
    sample()
    if failed := [outcome.error for outcome in driver.outcomes if outcome.error]:
        raise RunFailedError(f"{len(failed)} requests failed, the first with {failed[0]}")
    return {"samples": samples, "capacity": {kind.value: rate for kind, rate in _capacity(plan.cluster).items()}}


def kind_of(counter: str) -> Resource | None:
    """What a counter of the sim belongs to; None for what the equations leave out (PCIe, storage, sending SNIC)."""
    for suffix, (of_pe, of_de) in _SUFFIXES.items():
        if counter.endswith(suffix) and counter[:2] in ("pe", "de"):
            return of_pe if counter.startswith("pe") else of_de
    return None


def _capacity(spec: ClusterSpec) -> Mapping[Resource, float]:
    """bit/s of all resources of a kind together."""
    pe, de = spec.prefill_nodes, spec.decode_nodes
    cnics_bps = spec.gpus_per_node * spec.cnic_rate_bps
    return {
        Resource.SNIC: (pe + de) * spec.snic_rate_bps,
        Resource.PE_CNIC_READ: pe * cnics_bps,
        Resource.PE_CNIC_WRITE: pe * cnics_bps,
        Resource.DE_CNIC_READ: de * cnics_bps,
        Resource.DE_CNIC_WRITE: de * cnics_bps,
        Resource.PE_DRAM: pe * spec.dram_rate_bps,
        Resource.DE_DRAM: de * spec.dram_rate_bps,
    }


def _plan(one: _Simulation) -> RunPlan:
    """The cluster and its workload. Only M/B, s and g matter, so B stays the paper's and M follows."""
    prefill, decode = one.nodes
    scenario = Scenario(
        title="across the bounds of section 4.2",
        description="",
        topology="1p1d",
        model="ds-27b",
        systems=("dualpath",),
        seed=1,
        scale=ScaleSection(bandwidth=1, time=1, length=16),
        cluster=ClusterSection(
            prefill_nodes=prefill,
            decode_nodes=decode,
            gpus_per_node=one.at.gpus,
            s=float(one.at.s),
            storage_servers=8,
        ),
        workload=WorkloadSection(
            agents=math.ceil(_AGENTS_PER_NODE * max(1.0, float(one.at.s))) * (prefill + decode),
            source="table2:64K",
            start_turn=60,
            max_turns=6,
        ),
        protocol=ProtocolSection(block_tokens=1024, layer_group=15, fetch_interval_s=0.005),
        gpu=GpuSection(speedup=1000),
    )
    plan = resolve("confirm", scenario, Path("unmade"))
    memory_over_cnic = one.at.memory_ratio * one.at.s
    return replace(
        plan,
        cluster=replace(plan.cluster, dram_rate_bps=round(memory_over_cnic * plan.cluster.cnic_rate_bps)),
        # The equations know of rates alone: transfers wait in one queue, not for the turns of source memories.
        sim=replace(plan.sim, cnic="fifo"),
    )


def _table(crossing: Crossing) -> Table:
    names = ", ".join(resource.value for resource in crossing.named)
    table = Table(title=f"{crossing.title}, set by {names}; use while the cluster is full", title_justify="left")
    table.add_column("cluster")
    table.add_column("SNIC, predicted", justify="right")
    for kind in Resource:
        table.add_column(kind.value, justify="right")
    for each in crossing.steps:
        uses = (f"{each.measured[kind]:.0%}" for kind in Resource)
        table.add_row(f"{each.prefill}P{each.decode}D", f"{float(each.predicted_storage):.0%}", *uses)
    return table


def _sentence(crossing: Crossing) -> str:
    verdict = "confirmed" if crossing.confirmed else "not confirmed"
    if crossing.measured_at == len(crossing.steps):
        return f"{crossing.title}: {verdict}, storage is full at every step."
    first = crossing.steps[crossing.measured_at]
    full = ", ".join(r.value for r in first.full) or "nothing"
    apart = abs(crossing.measured_at - crossing.predicted_at)
    where = (
        f"{apart} steps from the prediction" if apart > 1 else "a step from the prediction" if apart else "as predicted"
    )
    gives_way = f"storage gives way at {first.prefill}P{first.decode}D, {where}"
    return f"{crossing.title}: {verdict}; {gives_way}; full there: {full}."
