"""What a run stands for, in one line: the paper's model and hardware, the scale, and every departure from them."""

from __future__ import annotations

from dataclasses import fields

from scenarios.schema import GpuSection, Scenario
from testbed.models.hardware import PAPER_HARDWARE
from testbed.runtime.plan import RunPlan
from testbed.units import GBIT, MBIT


def stands_for(scenario: Scenario, plan: RunPlan) -> str:
    """The first line that a run prints."""
    scale, cluster = plan.scale, plan.cluster
    gpus = cluster.gpus_per_node * scale.gpus_scale
    agents = f"{len(plan.scripts)} agents"
    if scale.agents_scale > 1:
        agents += f", each for {scale.agents_scale} of the paper's in lock-step"
    parts = [
        f"{scale.model.title} on {cluster.prefill_nodes}P{cluster.decode_nodes}D with {gpus} GPUs per node",
        f"CNIC {_rate(PAPER_HARDWARE.cnic_rate_bps)} and SNIC {_rate(scale.to_paper_rate_bps(cluster.snic_rate_bps))} "
        f"as {_rate(cluster.cnic_rate_bps)} and {_rate(cluster.snic_rate_bps)} "
        f"(1:{float(scale.bandwidth_scale):,.0f})",
        f"lanes {cluster.lanes.value}",
        f"KV bytes 1:{float(scale.byte_scale):,.0f}",
        f"time {float(scale.time_scale):.3g}:1",
    ]
    if scale.length_scale > 1:
        parts.append(f"{scale.length_scale} tokens as one")
    parts.append(agents)
    parts += gpu_departures(scenario.gpu)
    if (s := scenario.submission).on:
        request = (s.work_request_s + s.doorbell_s / s.doorbell_batch) * 1e6
        parts.append(f"submission of {s.copy_s * 1e6:g} us per copy, {request:.3g} us per RDMA write request")
    parts += _departures(scenario)
    return "Stands for " + "; ".join(parts) + "."


def _departures(scenario: Scenario) -> list[str]:
    """What the paper's testbed and replay do not have."""
    p = scenario.protocol
    parts = []
    if scenario.cluster.storage_share:
        parts.append(f"storage limited to {scenario.cluster.storage_share:g} of all SNICs")
    if p.dram_cache_bytes:
        parts.append(f"{p.dram_cache_bytes / 1e9:g} GB of DRAM cache per node")
    if p.write_back == "free":
        parts.append("new blocks in storage from the start, written back for nothing")
    if scenario.workload.tool_delay_s:
        parts.append(f"tool calls of {scenario.workload.tool_delay_s:g} s")
    return parts


def gpu_departures(section: GpuSection) -> list[str]:
    """Every way in which the emulated GPU is not the paper's."""
    parts = []
    if section.speedup != 1:
        parts.append(f"GPUs {section.speedup:g}x as fast as the paper's")
    for f in fields(section):
        if f.name != "speedup" and (value := getattr(section, f.name)) is not None:
            parts.append(f"gpu.{f.name} set to {value:g}")
    return parts


def _rate(rate_bps: float) -> str:
    return f"{rate_bps / GBIT:g} Gbit/s" if rate_bps >= GBIT else f"{rate_bps / MBIT:.4g} Mbit/s"
