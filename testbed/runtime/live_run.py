"""The live run: build the network, check it, run every system on it, read the kernel's counters before and after.

Runs inside the sandbox, in a process without threads (roles are forked from it). Nothing here judges the result.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from emulators.agent_driver import AgentDriver, Outcome
from emulators.cluster import RoleDescription, params_for
from emulators.decode_engine import DecodeEngine
from emulators.dram_buffer import DramBuffer
from emulators.prefill_engine import PrefillEngine
from emulators.storage_server import StorageServer
from testbed.errors import HostError, RunFailedError
from testbed.fabric.live.blockstore import BlockStore
from testbed.fabric.live.calibrate import calibrate
from testbed.fabric.live.counters import LinkCounter, read_counters, segments_resent, total_drops
from testbed.fabric.live.forkserver import RoleGroup
from testbed.fabric.live.memory import Memory
from testbed.fabric.live.network import Network
from testbed.fabric.live.readback import verify_shaping
from testbed.fabric.live.recorder import check_permitted, recording
from testbed.fabric.live.roleprocess import RoleSpec
from testbed.fabric.live.roles import LiveCluster, LiveRole, RoleContext
from testbed.fabric.live.sockets import DEFAULT_OPTIONS, SocketOptions
from testbed.fabric.peaks import PEAK_WINDOW_NS, Peaks
from testbed.fabric.recording import Recording
from testbed.fabric.spec import ClusterSpec
from testbed.ids import DRIVER
from testbed.kvmodel.device import KvDevice
from testbed.kvmodel.reference import reference_turns
from testbed.protocol import machine as mc
from testbed.protocol.layout import U32
from testbed.protocol.params import SystemConfig
from testbed.runtime.oracle import verify_tokens
from testbed.runtime.past import final_prefixes
from testbed.runtime.plan import RunPlan
from testbed.runtime.result import RunResult, SnicSample, SystemRun
from testbed.runtime.roles import roles_of
from testbed.runtime.warm import WarmBlocks, place, write_warm_blocks
from testbed.workload.trajectory import AgentScript

CONTROL_PORT = 7000
_SAMPLE_S = 0.25
_QUEUED_S = 0.06
_LEAST_BUFFER_BYTES = 48 * 1024
Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is done (0 to 1)."""


def run_live(plan: RunPlan, progress: Progress) -> RunResult:
    """Run all systems of ``plan``, one after the other.

    Raises:
        HostError: the host cannot build the network.
        RunFailedError: a role died.
    """
    progress("building the network", 0.0)
    with Network(plan.cluster) as network:
        check_permitted(network, plan.capture)
        faults = verify_shaping(network)
        progress("calibrating links", 0.0)
        links = calibrate(network, tolerance=plan.limits.link_tolerance)
        warm_dir = plan.run_dir / "warm"
        warm = write_warm_blocks(
            plan.scripts,
            plan.params.layout,
            plan.vocab_size,
            warm_dir,
            lambda f: progress("warming storage", f),
            _written_ahead(plan),
        )
        runs: list[SystemRun] = []
        recordings: list[Recording] = []
        for system in plan.systems:
            with recording(network, plan.capture, plan.run_dir / system.name / "capture") as found:
                runs.append(asyncio.run(_run_system(plan, system, network, warm, progress)))
            recordings += found
        shutil.rmtree(warm_dir, ignore_errors=True)
        faults += [fault for fault in verify_shaping(network) if fault not in faults]
    progress("verifying tokens", 0.0)
    verify_tokens(plan.scripts, runs, lambda script: _reference(plan, script))
    return RunResult(links=links, shaping_faults=faults, systems=runs, recordings=recordings)


async def _run_system(
    plan: RunPlan, system: SystemConfig, network: Network, warm: WarmBlocks, progress: Progress
) -> SystemRun:
    run_dir = plan.run_dir / system.name
    storage = run_dir / "storage"
    place(warm, plan.roles.storage, plan.params.replicas, storage)
    specs = role_specs(plan, system, network, storage, warm)
    run_dir.mkdir(parents=True, exist_ok=True)
    rounds = sum(script.turns for script in plan.scripts)
    outcomes: list[Outcome] = []
    samples: list[SnicSample] = []
    async with RoleGroup(specs, run_dir) as group:
        progress(f"{system.title}: starting {len(specs)} roles", 0.0)
        await group.ready()
        before = read_counters(network)
        dropped_before = total_drops(network)
        resent_before = segments_resent(network)
        cpu_before = _host_cpu()
        started_ns = time.monotonic_ns()
        await group.start()
        peaks = Peaks()
        sampler = asyncio.create_task(_sample(network, before, samples, peaks))
        try:
            while True:
                name, payload = await group.watch(_next(group, sampler))
                assert isinstance(payload, dict) and name == DRIVER
                if "outcomes" in payload:
                    outcomes = msgspec.convert(payload["outcomes"], list[Outcome], strict=False)
                    break
                progress(system.title, payload["rounds"] / rounds)
        finally:
            sampler.cancel()
        ended_ns = time.monotonic_ns()
        cpu_after = _host_cpu()
        after = read_counters(network)
        dropped = total_drops(network) - dropped_before
        resent = segments_resent(network)
        samples.append(_snic_sample(after, before))
        peaks.look(samples[-1].at_ns, _pcie_bytes(after))
        reports = await group.stop()
    shutil.rmtree(storage, ignore_errors=True)
    _check_disks(reports)
    return SystemRun(
        system=system.name,
        started_ns=started_ns,
        ended_ns=ended_ns,
        outcomes=outcomes,
        counters={name: _delta(after[name], before[name]) for name in after},
        samples=samples,
        pcie_peaks_bps=peaks.bps,
        reports={name: report for name, report in reports.items() if isinstance(report, dict)},
        host_cpu_share=_cpu_share(cpu_before, cpu_after),
        packets_dropped=dropped,
        segments_resent={host: count - resent_before[host] for host, count in resent.items()},
    )


def _check_disks(reports: Mapping[str, object]) -> None:
    """A block that cannot be stored costs a hit, not the run; but a host whose disk fails measures nothing.

    Raises:
        HostError: naming the server and what its disk said.
    """
    for name, report in reports.items():
        disk = report.get("disk") if isinstance(report, dict) else None
        if isinstance(disk, dict) and disk["stores_failed"]:
            raise HostError(
                f"{name} could not store {disk['stores_failed']} blocks ({disk['last_failure'].rstrip('.')}): "
                "free some space, or choose another disk with --out."
            )


async def _next(group: RoleGroup, sampler: asyncio.Task[None]) -> tuple[str, object]:
    """The driver's next report; a sampler that fails ends the run too."""
    report = asyncio.ensure_future(group.next_progress())
    await asyncio.wait((report, sampler), return_when=asyncio.FIRST_COMPLETED)
    if sampler.done():
        report.cancel()
        sampler.result()
        raise RunFailedError("the counter sampler ended before the run")
    return report.result()


# --- roles ---------------------------------------------------------------------------------------------------------


def role_specs(
    plan: RunPlan, system: SystemConfig, network: Network, storage: Path, warm: WarmBlocks
) -> list[RoleSpec]:
    """The processes of a system: every role of the cluster in the namespace of its host."""
    params = params_for(system, plan.params)
    descriptions = roles_of(plan, system, warm.entries)
    addresses = {}
    for number, role in enumerate(descriptions):
        addresses[role.name] = (network.endpoints[f"{role.host}.control"].address, CONTROL_PORT + number)
    cluster = LiveCluster(
        layout=params.layout,
        address_book=addresses,
        endpoints=network.endpoints,
        sockets=_sockets(plan.cluster),
    )
    return [
        RoleSpec(
            name=role.name,
            enter=lambda host=role.host: network.enter(host),  # type: ignore[misc]
            build=_builder(plan, system, role, cluster, storage / role.name),
        )
        for role in descriptions
    ]


def _sockets(cluster: ClusterSpec) -> SocketOptions:
    """Send buffers in proportion to the links: what a stream has queued in the kernel must not outlast TCP's
    retransmission timer (200 ms at least), or it would take its own queue for a loss; and a process that is late by
    some milliseconds must not leave the NIC idle.
    """
    rate_bps = min(cluster.cnic_rate_bps, cluster.snic_rate_bps)
    size = round(rate_bps / 8 * _QUEUED_S)
    return SocketOptions(send_buffer_bytes=min(max(size, _LEAST_BUFFER_BYTES), DEFAULT_OPTIONS.send_buffer_bytes))


def _builder(
    plan: RunPlan, system: SystemConfig, role: RoleDescription, cluster: LiveCluster, directory: Path
) -> Callable[[RoleContext], LiveRole]:
    def build(context: RoleContext) -> LiveRole:
        layout = cluster.layout
        machine = role.make()
        if isinstance(machine, DecodeEngine | DramBuffer | PrefillEngine | StorageServer):
            machine.issuer.epoch = context.incarnation
        memory = Memory(role.memory_bytes, layout) if role.memory_bytes else None
        device = store = observer = None
        if role.has_gpu and memory is not None:
            materialise = not system.moves_kv
            device = KvDevice(layout, plan.vocab_size, memory.data, memory.seals, materialise=materialise)
        if role.has_disk and memory is not None:
            store = BlockStore(directory, layout, memory)
        if isinstance(machine, AgentDriver):
            observer = _watch_driver(machine, context)
        return LiveRole(
            machine,
            context,
            cluster,
            listen=role.endpoints,
            peers=role.exchanges_with,
            memory=memory,
            device=device,
            store=store,
            observer=observer,
        )

    return build


def _watch_driver(driver: AgentDriver, context: RoleContext) -> Callable[[int, mc.Event, object], None]:
    """Tell the supervisor about every round that ends, and everything at the end."""
    told = 0

    def observe(now_ns: int, event: mc.Event, actions: object) -> None:
        nonlocal told
        ended = len(driver.outcomes) - len(driver.records)
        if ended != told:
            told = ended
            context.progress({"rounds": ended})
            if driver.finished:
                context.progress({"outcomes": [asdict(outcome) for outcome in driver.outcomes]})

    return observe


# --- measuring -----------------------------------------------------------------------------------------------------


def _delta(after: LinkCounter, before: LinkCounter) -> LinkCounter:
    return replace(
        after,
        kv=after.kv - before.kv,
        high=after.high - before.high,
        shared=after.shared - before.shared,
        ack=after.ack - before.ack,
        rest=after.rest - before.rest,
        drops=after.drops - before.drops,
        overlimits=after.overlimits - before.overlimits,
    )


async def _sample(
    network: Network, before: Mapping[str, LinkCounter], samples: list[SnicSample], peaks: Peaks
) -> None:
    """Record what the SNICs have carried, a few times a second, and once a second what the PCIe links have."""
    looked_ns = 0
    while True:
        samples.append(_snic_sample(read_counters(network, ".snic."), before))
        if samples[-1].at_ns - looked_ns >= PEAK_WINDOW_NS:
            looked_ns = time.monotonic_ns()
            peaks.look(looked_ns, _pcie_bytes(read_counters(network, ".pcie.")))
        await asyncio.sleep(_SAMPLE_S)


def _pcie_bytes(counters: Mapping[str, LinkCounter]) -> dict[str, int]:
    return {name: counter.data.bytes for name, counter in counters.items() if ".pcie." in name}


def _snic_sample(counters: Mapping[str, LinkCounter], before: Mapping[str, LinkCounter]) -> SnicSample:
    carried = {
        name: counter.data.bytes - before[name].data.bytes for name, counter in counters.items() if ".snic." in name
    }
    return SnicSample(at_ns=time.monotonic_ns(), wire_bytes=carried)


def _host_cpu() -> tuple[int, int]:
    """Busy and total jiffies of the host since boot."""
    with open("/proc/stat", encoding="ascii") as stat:
        fields = [int(x) for x in stat.readline().split()[1:]]
    idle = fields[3] + fields[4]
    return sum(fields[:8]) - idle, sum(fields[:8])


def _cpu_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total else 0.0


# --- the oracle ----------------------------------------------------------------------------------------------------


def _written_ahead(plan: RunPlan) -> tuple[U32, ...]:
    """Where writing back is free: whatever the run would write."""
    if plan.params.write_back == "real":
        return ()
    return tuple(final_prefixes(plan.scripts, plan.params.layout, lambda script: _reference(plan, script)))


def _reference(plan: RunPlan, script: AgentScript) -> list[list[int]]:
    """What the single-process reference emits for an agent, turn by turn."""
    turns = [(script.append_ids(turn), script.generate_tokens(turn)) for turn in range(script.turns)]
    return [list(tokens) for tokens in reference_turns(plan.params.layout, plan.vocab_size, turns)]
