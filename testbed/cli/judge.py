"""From a plan and its result to a judged ``Summary``: joins what metrics must not know of runtime and fabric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emulators.cluster import params_for
from scenarios.loader import LoadedScenario
from scenarios.schema import Expectation
from testbed.fabric.live.blockstore import NO_DEVICE
from testbed.fabric.live.wire import HEADER_BYTES, SEAL_BYTES
from testbed.fabric.spec import LaneDiscipline
from testbed.metrics.collectives import expected_exchanges
from testbed.metrics.ledger import FLOOR_BLOCKS, LedgerEntry, ServedBy, WireCosts, expected_traffic, settle
from testbed.metrics.metrics import LinkRates, system_metrics
from testbed.metrics.summary import LinkRow, PaperUnits, Summary
from testbed.metrics.verdict import Claim, Limits, failure_reasons, invalid_reasons, judge
from testbed.protocol.params import SystemConfig
from testbed.runtime.plan import RunPlan, World
from testbed.runtime.result import RunResult, SystemRun


def summarise(loaded: LoadedScenario, result: RunResult, world: World = "live") -> Summary:
    """Judge a run in a world.

    Raises:
        ConfigError: an expectation names a metric that does not exist.
    """
    plan, scale = loaded.plan, loaded.plan.scale
    configs = {system.name: system for system in plan.systems}
    nodes = [node.name for node in plan.cluster.nodes]
    rates = LinkRates(
        snic_bps=plan.cluster.snic_rate_bps,
        cnic_bps=plan.cluster.cnic_rate_bps,
        pcie_bps=plan.cluster.pcie_rate_bps,
        dram_bps=plan.cluster.dram_rate_bps,
    )
    metrics = tuple(
        system_metrics(run, kv_bytes_per_token=scale.kv_bytes_per_token, nodes=nodes, rates=rates, groups=_groups(plan))
        for run in result.systems
    )
    ledger = tuple(entry for run in result.systems for entry in _ledger(plan, configs[run.system], run))
    limits = Limits(
        link_tolerance=plan.limits.link_tolerance,
        ledger_tolerance=plan.limits.ledger_tolerance,
        lag_p99_ms=plan.limits.lag_p99_ms,
        cpu_share=plan.limits.cpu_share,
    )
    return Summary(
        scenario=plan.scenario,
        world=world,
        seed=plan.seed,
        stands_for=loaded.stands_for,
        scale={
            "bandwidth": float(scale.bandwidth_scale),
            "bytes": float(scale.byte_scale),
            "time": float(scale.time_scale),
            "length": scale.length_scale,
            "agents": scale.agents_scale,
            "gpus": scale.gpus_scale,
        },
        units=PaperUnits(time=float(scale.time_scale), length=scale.length_scale, bytes=float(scale.byte_scale)),
        systems=metrics,
        titles={system.name: system.title for system in plan.systems},
        links=tuple(_link_row(link) for link in result.links),
        ledger=ledger,
        verdicts=tuple(judge(claims(loaded.expectations), metrics)),
        failures=tuple(failure_reasons(result.systems, sum(script.turns for script in plan.scripts))),
        invalid_reasons=tuple(invalid_reasons(result, ledger, limits)),
    )


def claims(expectations: Iterable[Expectation]) -> list[Claim]:
    """A scenario's expectations as metrics judge them."""
    return [Claim(name=e.name, metric=e.metric, text=e.text) for e in expectations]


def _ledger(plan: RunPlan, system: SystemConfig, run: SystemRun) -> Sequence[LedgerEntry]:
    params = params_for(system, plan.params)
    how = ServedBy(
        layout=params.layout,
        step_layers=tuple(end - begin for begin, end in params.steps),
        replicas=min(params.replicas, len(plan.roles.storage)),
        moves_kv=system.moves_kv,
        direct_copies=system.direct_copies,
        writes_back=params.write_back == "real",
        wire=WireCosts(header_bytes=HEADER_BYTES, seal_bytes=SEAL_BYTES),
    )
    exchanges = expected_exchanges(run.outcomes, _groups(plan), params.collectives, params.layout.layers, run.reports)
    traffic = settle(
        run.system,
        expected_traffic(run.outcomes, how),
        run.counters,
        params.layout,
        high=exchanges,
        lanes=plan.cluster.lanes is not LaneDiscipline.NONE,
    )
    return [*traffic, *_disk_reads(run, FLOOR_BLOCKS * params.layout.full_block_bytes)]


def _groups(plan: RunPlan) -> list[tuple[str, ...]]:
    return [group.engines for group in plan.roles.groups]


def _disk_reads(run: SystemRun, floor_bytes: int) -> Sequence[LedgerEntry]:
    """Bytes of blocks served by storage servers against what the kernel fetched from a device for them: a block that
    came from the page cache is missing there. Left out where storage lies in memory and there is no device.
    """
    disks = [d for report in run.reports.values() if isinstance(d := report.get("disk"), dict)]
    if not disks or any(disk.get("method", NO_DEVICE) == NO_DEVICE for disk in disks):
        return []
    served, fetched = (sum(disk[key] for disk in disks) for key in ("bytes_served", "device_read_bytes"))
    error = (fetched - served) / max(served, floor_bytes)
    entry = LedgerEntry(
        system=run.system, resource="st.disk", expected_bytes=served, measured_bytes=fetched, error=error
    )
    return [entry]


def _link_row(link: object) -> LinkRow:
    return LinkRow(**{name: getattr(link, name) for name in LinkRow.__dataclass_fields__})
