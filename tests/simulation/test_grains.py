"""Two grains of one simulation: machines with every block and token, arrays with every request; the same cluster.

The machines run in the sim world on the paper's hardware, unscaled; the flow simulation gets the same workload and its
constants from the same plan. What differs in kind is set equal: every PE runs its forwards alone, no overheads of
reads and allocations, rates are what the transport of the sim world leaves of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from emulators.agent_driver import Outcome
from scenarios.resolve import resolve
from scenarios.schema import ClusterSection, GpuSection, ProtocolSection, ScaleSection, Scenario, WorkloadSection
from testbed.fabric.sim.params import SimParams, payload_bytes, wire_bytes
from testbed.flowsim.run import FlowCase, simulate
from testbed.flowsim.state import SIDE_DE, Settings
from testbed.protocol.params import SystemConfig
from testbed.runtime.plan import RunPlan
from testbed.runtime.sim_run import run_sim
from tests.support.flow_world import FlowWorld, arrive, flow_world, settings_for

MEAN_TOLERANCE = 0.05
JCT_TOLERANCE = 0.03
SYSTEMS = ("oracle", "dualpath", "basic")
FAST_GPU = GpuSection(effective_flops=1e15, effective_attention_flops=1e15, prefill_base_s=0.01, decode_base_s=0.005)
BUSY = {
    "one GPU a node": (ClusterSection(gpus_per_node=1, s=0.02), GpuSection(), 16, 5),
    "two fast GPUs a node": (ClusterSection(gpus_per_node=2, s=0.1), FAST_GPU, 24, 4),
}
"""Cluster, GPU, agents and turns. SNICs of 1 and 5 GB/s, so that reads count beside what the GPU computes.

With slower ones the order in which agents finish their first round decides over the rest: what one round generated is
written back block by block by the machines, together at its end by the arrays.
"""


def plan_of(name: str, system: str, run_dir: Path) -> RunPlan:
    """DS 27B on 1P1D at scale 1; windows and staging so deep that only rates are limits."""
    cluster, gpu, agents, turns = BUSY[name]
    scenario = Scenario(
        title=name,
        description="",
        topology="1p1d",
        model="ds-27b",
        systems=(system,),
        scale=ScaleSection(bandwidth=1, time=1),
        workload=WorkloadSection(agents=agents, source="table2:32K", max_turns=turns),
        seed=3,
        cluster=cluster,
        gpu=gpu,
        protocol=ProtocolSection(
            wait_deadline_s=3_600.0,
            read_window_blocks=512,
            persist_window_blocks=512,
            storage_pages=1_024,
            stage_pages=4_096,
        ),
        sim=SimParams(message_latency_s=5e-5, message_jitter_s=0.0, disk_latency_s=1e-6),
    )
    return resolve("grains", scenario, run_dir)


def flow_settings(plan: RunPlan, system: SystemConfig) -> Settings:
    """The flow simulation's constants, all of them from the plan."""
    p, cluster, model, gpu = plan.params, plan.cluster, plan.cost.model, plan.cost.gpu
    layout, steps = p.layout, len(p.steps)
    block = layout.full_block_bytes
    goodput = block / wire_bytes(payload_bytes(block, layout.layers)) / 8e9
    attention_flops_per_ns, linear_flops_per_ns = gpu.effective_attention_flops / 1e9, gpu.effective_flops / 1e9
    heads = model.attention_heads * (model.attention_qk_dim + model.attention_v_dim)
    in_flight = 2 * min(p.layers_in_flight, steps)
    case = FlowCase(
        model=model.name,
        trace="32K",
        system=system.name,
        prefill_nodes=cluster.prefill_nodes,
        decode_nodes=cluster.decode_nodes,
        agents=len(plan.scripts),
    )
    return settings_for(
        case,
        gpus=cluster.gpus_per_node,
        unit_engines=1,
        block_tokens=layout.block_tokens,
        kv_bytes=float(layout.bytes_per_token_layer * layout.layers),
        steps=steps if system.layerwise else 1,
        layers_in_flight=p.layers_in_flight,
        cnic_rate=cluster.cnic_rate_bps * goodput,
        snic_rate=cluster.snic_rate_bps * goodput,
        dram_rate=cluster.dram_rate_bps * goodput,
        read_overhead_ns=0,
        allocation_overhead_ns=0,
        message_ns=plan.sim.message_latency_ns,
        persist_ns=0,
        fetch_ns=p.fetch_interval_ns,
        alpha_tokens=p.alpha_tokens,
        beta_tokens=p.beta_tokens,
        z_factor=p.z_factor,
        quota_ns=p.compute_quota_ns if system.balanced else 1 << 62,
        forward_tokens=1 << 62,  # the machines of systems without the quota pack by memory alone
        dram_pages=p.dram_pages,
        pe_batch_blocks=p.pe_hbm_pages // in_flight if system.layerwise else p.pe_hbm_bytes // block,
        de_hbm_pages=p.de_hbm_pages,
        replicas=p.replicas,
        prefill_base_ns=gpu.prefill_base_s * 1e9,
        linear_ns=model.linear_flops_per_token / linear_flops_per_ns,
        main_attention_ns=2 * model.layers * heads / attention_flops_per_ns,
        indexer_ns=2 * model.layers * model.indexer_heads * model.indexer_dim / attention_flops_per_ns,
        decode_base_ns=gpu.decode_base_s * 1e9,
        decode_sequence_ns=gpu.decode_per_sequence_s * 1e9,
        decode_context_ns=gpu.decode_per_context_token_s * 1e9,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is compared; mean times over all requests."""

    jct_s: float
    ttft_s: float
    decode_s: float
    hit_tokens: int
    read_by_decode_side: float


def of_machines(outcomes: Sequence[Outcome]) -> Figures:
    """From what the agents of the sim world saw."""
    assert not [o.error for o in outcomes if o.error]
    reads = [o.read_side for o in outcomes if o.hit_tokens]
    return Figures(
        jct_s=max(o.completed_ns for o in outcomes) / 1e9,
        ttft_s=float(np.mean([o.first_token_ns - o.submitted_ns for o in outcomes])) / 1e9,
        decode_s=float(np.mean([o.last_token_ns - o.first_token_ns for o in outcomes])) / 1e9,
        hit_tokens=sum(o.hit_tokens for o in outcomes),
        read_by_decode_side=reads.count("de") / len(reads),
    )


def of_flow(world: FlowWorld) -> Figures:
    """From the arrays."""
    r = world.requests
    return Figures(
        jct_s=float(r.completed.max()) / 1e9,
        ttft_s=float((r.first - r.submitted).mean()) / 1e9,
        decode_s=float((r.last - r.first).mean()) / 1e9,
        hit_tokens=int(r.hit.sum()),
        read_by_decode_side=float((r.side[r.hit > 0] == SIDE_DE).mean()),
    )


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", BUSY)
def test_both_grains_give_the_same_times(name: str, system: str, tmp_path: Path) -> None:
    plan = plan_of(name, system, tmp_path)
    machines = of_machines(run_sim(plan, lambda *_: None, traced=False).systems[0].outcomes)
    turns = [[(t.append_tokens, t.generate_tokens) for t in script.trajectory.turns] for script in plan.scripts]
    world = arrive(flow_world(flow_settings(plan, plan.systems[0]), turns))
    world.run()
    flow = of_flow(world)
    print(f"{name}, {system}: machines {machines}, flow {flow}")
    assert flow.hit_tokens == machines.hit_tokens > 0
    assert flow.jct_s == pytest.approx(machines.jct_s, rel=JCT_TOLERANCE)
    assert flow.ttft_s == pytest.approx(machines.ttft_s, rel=MEAN_TOLERANCE)
    assert flow.decode_s == pytest.approx(machines.decode_s, rel=MEAN_TOLERANCE)
    assert flow.read_by_decode_side == pytest.approx(machines.read_by_decode_side, abs=0.1)


@pytest.mark.parametrize(
    ("model", "trace", "shape", "agents", "layers"),
    [("ds-660b", "64K", (2, 4), 128, 61), ("ds-27b", "32K", (1, 1), 200, 30), ("qwen-32b", "64K", (1, 2), 64, 64)],
)
def test_a_forward_in_one_piece_gives_the_times_of_its_layers(
    model: str, trace: str, shape: tuple[int, int], agents: int, layers: int
) -> None:
    results = [
        simulate(
            FlowCase(
                model=model,
                trace=trace,
                system="dualpath",
                prefill_nodes=shape[0],
                decode_nodes=shape[1],
                agents=agents,
                options=(("steps", float(steps)),),
            )
        )
        for steps in (1, layers)
    ]
    (grouped, grouped_ttft), (layered, layered_ttft) = (
        (result.jct_s, float((result.first_token_s - result.submitted_s).mean())) for result in results
    )
    print(f"{model} {trace}: JCT {grouped:.1f} and {layered:.1f} s, TTFT {grouped_ttft:.3f} and {layered_ttft:.3f} s")
    assert results[1].events > 1.3 * results[0].events
    assert grouped == pytest.approx(layered, rel=JCT_TOLERANCE)
    assert grouped_ttft == pytest.approx(layered_ttft, rel=MEAN_TOLERANCE)
