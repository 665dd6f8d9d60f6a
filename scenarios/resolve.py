"""From a scenario to a ``RunPlan``: every name looked up, every number in emulated units, everything checked.

Nothing is built or started here, so that all faults of the input show before the sandbox is entered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

from scenarios.schema import (
    ClusterSection,
    GpuSection,
    ProtocolSection,
    Scenario,
    SubmissionSection,
    WorkloadSection,
)
from testbed.errors import ConfigError
from testbed.fabric.arbiter import PAPER_TABLES, ArbiterTables
from testbed.fabric.spec import ClusterSpec, LaneDiscipline
from testbed.models.compute import ComputeModel, GpuSpec, gpu_for
from testbed.models.hardware import Hardware, alpha_tokens, beta_tokens, kv_dram_bytes_per_node, kv_hbm_bytes_per_gpu
from testbed.models.model import MODELS, ModelSpec, model_named
from testbed.models.scale import FittedScale, Scale
from testbed.protocol.collectives import Collectives
from testbed.protocol.layout import BlockLayout
from testbed.protocol.params import SYSTEMS, ProtocolParams, SystemConfig, system_named
from testbed.protocol.plan import ClusterPlan, plan_cluster
from testbed.protocol.submission import SubmissionCosts
from testbed.runtime.plan import RunPlan
from testbed.units import NS_PER_S
from testbed.workload.agents import Workload, make_agents, offline_starts_ns, poisson_starts_ns, source_trajectories
from testbed.workload.table2 import TRACE_SIZE
from testbed.workload.trajectory import AgentScript
from topologies.loader import ClusterShape, cluster_spec, load_topology
from topologies.tomlinput import nearest

WAIT_DEADLINE_NS = 60 * NS_PER_S
WAIT_DEADLINE_PAPER_S = 22
"""A wait may take 60 s, or this much of the paper's time where the scale is so slow that it is longer."""
MOST_TOOL_DELAY_S = 86_400
LEAST_BANDWIDTH_SCALE = 0.001

_RATES = ("effective_flops", "effective_attention_flops")


def shape_of(scenario: Scenario) -> ClusterShape:
    """The topology with the scenario's departures.

    Raises:
        ConfigError: an unknown topology, or a shape that is none.
    """
    shape = load_topology(scenario.topology)
    counted = {f.name for f in fields(shape)} & {f.name for f in fields(scenario.cluster)}
    changed = {name: value for name in counted if (value := getattr(scenario.cluster, name)) is not None}
    return replace(shape, **changed)


def cluster_of(scenario: Scenario, scale: FittedScale) -> ClusterSpec:
    """The emulated cluster. Lanes that are still "auto" are htb: every world has it.

    Raises:
        ConfigError: an unknown topology, a shape that is none, arbiter tables that do not parse.
    """
    section = scenario.cluster
    lanes = LaneDiscipline.HTB if section.lanes == "auto" else LaneDiscipline(section.lanes)
    _check_shares(section)
    return replace(
        cluster_spec(shape_of(scenario), scale),
        lanes=lanes,
        high_share=section.high_share,
        ets_quanta=section.ets_quanta,
        arbiter=arbiter_of(section.opensm),
    )


def _check_shares(section: ClusterSection) -> None:
    """Refuse guarantees that a link cannot keep.

    Raises:
        ConfigError: a share outside 0 to 1, or two that do not make one link.
    """
    for key, share in (("high_share", section.high_share), ("kv_share", section.kv_share)):
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(
                f"cluster.{key} is {share:g}: a lane cannot be guaranteed less than nothing or more than the link."
            )
    if section.kv_share is not None and abs(section.high_share + section.kv_share - 1) > 1e-9:
        raise ConfigError(
            f"cluster.high_share {section.high_share:g} and cluster.kv_share {section.kv_share:g} add up to "
            f"{section.high_share + section.kv_share:g}, but the two lanes share one link: they must add up to 1."
        )


def arbiter_of(opensm: str) -> ArbiterTables:
    """The arbiter's tables in the file ``opensm``, or the paper's if it is empty.

    Raises:
        ConfigError: a file that cannot be read, or that holds no tables.
    """
    if not opensm:
        return PAPER_TABLES
    try:
        return ArbiterTables.parse(Path(opensm).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{opensm}: cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    except ConfigError as error:
        raise ConfigError(f"{opensm}: {error}") from error


def model_of(scenario: Scenario) -> ModelSpec:
    """The model by name.

    Raises:
        ConfigError: an unknown one, with the nearest name.
    """
    if scenario.model not in MODELS and (hint := nearest(scenario.model, MODELS)):
        raise ConfigError(f"unknown model {scenario.model!r}{hint}.")
    return model_named(scenario.model)


def scale_of(scenario: Scenario, model: ModelSpec) -> FittedScale:
    """The scales, fitted to the model.

    Raises:
        ConfigError: scales that leave no bytes, or that are none.
    """
    s = scenario.scale
    if 0 < s.bandwidth < LEAST_BANDWIDTH_SCALE:
        raise ConfigError(
            f"scale.bandwidth is {s.bandwidth:g}, but it must be at least {LEAST_BANDWIDTH_SCALE:g}: it divides the "
            "paper's rates, as 8000 does."
        )
    return Scale(
        bandwidth_scale=s.bandwidth, time_scale=s.time, length_scale=s.length, agents_scale=s.agents, gpus_scale=s.gpus
    ).fit(model)


def gpu_of(section: GpuSection, model: ModelSpec) -> GpuSpec:
    """The model's GPU with the scenario's departures."""
    gpu = gpu_for(model)
    values = {
        f.name: getattr(gpu, f.name) * section.speedup if f.name in _RATES else getattr(gpu, f.name) / section.speedup
        for f in fields(gpu)
    }
    values.update({f.name: v for f in fields(gpu) if (v := getattr(section, f.name)) is not None})
    return GpuSpec(**values)


def systems_of(names: Sequence[str]) -> tuple[SystemConfig, ...]:
    """Systems by name, options behind it, in the order given.

    Raises:
        ConfigError: none, an unknown one (with the nearest name), or one twice.
    """
    if not names:
        raise ConfigError(f"no systems to run; choose from {', '.join(SYSTEMS)}.")
    systems = tuple(system_named(name) for name in names)
    if len(set(names)) != len(names):
        raise ConfigError(f"systems {', '.join(names)}: each can run once.")
    return systems


def resolve(name: str, scenario: Scenario, run_dir: Path) -> RunPlan:
    """The whole plan of a run.

    Raises:
        ConfigError: anything in the scenario that cannot be run, in one sentence.
    """
    model = model_of(scenario)
    scale = scale_of(scenario, model)
    shape = shape_of(scenario)
    cluster = cluster_of(scenario, scale)
    gpu = gpu_of(scenario.gpu, model)
    cost = scale.compute_model(gpu)
    layout = BlockLayout(
        model=model.name,
        layers=model.layers,
        block_tokens=scale.emulated_block_tokens(scenario.protocol.block_tokens),
        bytes_per_token_layer=scale.kv_bytes_per_token_layer,
    )
    scenario = _with_agents(scenario)
    scripts = _scripts(scenario, scale)
    roles = plan_cluster(cluster)
    params = _params(scenario.protocol, layout, scale, gpu, shape.hardware)
    plan = RunPlan(
        scenario=name,
        seed=scenario.seed,
        cluster=cluster,
        roles=roles,
        params=replace(
            params,
            collectives=_collectives(scenario, scale, cost, cluster, roles),
            submission=_submission(scenario.submission, scale),
        ),
        systems=systems_of(scenario.systems),
        cost=cost,
        scale=scale,
        scripts=scripts,
        starts_ns=_starts_ns(scenario, scale),
        tool_delay_ns=_tool_delay_ns(scenario, scale),
        vocab_size=model.vocab_size,
        limits=scenario.trust,
        sim=scenario.sim,
        run_dir=run_dir,
    )
    _check_fits(plan)
    return plan


def _params(
    p: ProtocolSection, layout: BlockLayout, scale: FittedScale, gpu: GpuSpec, hardware: Hardware
) -> ProtocolParams:
    """``ProtocolParams`` in emulated units. Memories are node-wide (DRAM) or of one emulated GPU (HBM)."""
    model = scale.model
    for key in ("fetch_interval_s", "compute_quota_s", "wait_deadline_s"):
        if getattr(p, key) < 0 or (key != "wait_deadline_s" and getattr(p, key) == 0):
            raise ConfigError(f"protocol.{key} is {getattr(p, key):g}, but it must be positive.")
    page = layout.full_block_bytes
    cache_pages = int(p.dram_cache_bytes / scale.byte_scale) // page
    if p.dram_cache_bytes and cache_pages < 1:
        raise ConfigError(
            f"protocol.dram_cache_bytes is {p.dram_cache_bytes}, which is no whole block of "
            f"{math.ceil(page * scale.byte_scale)} bytes; raise it, or leave it at 0 for no cache."
        )
    pe_hbm, de_hbm = kv_hbm_bytes_per_gpu(model)
    per_gpu = Fraction(scale.gpus_scale) / scale.byte_scale
    return ProtocolParams(
        layout=layout,
        layer_group=p.layer_group,
        layers_in_flight=p.layers_in_flight,
        fetch_interval_ns=scale.emulated_duration_ns(p.fetch_interval_s),
        alpha_tokens=scale.emulated_load_tokens(p.alpha_tokens or alpha_tokens(model, hardware)),
        beta_tokens=scale.emulated_load_tokens(p.beta_tokens or beta_tokens(model, gpu), per_gpu=True),
        z_factor=p.z_factor,
        compute_quota_ns=scale.emulated_duration_ns(p.compute_quota_s),
        quota_scope=p.quota_scope,
        wait_deadline_ns=(
            scale.emulated_duration_ns(p.wait_deadline_s)
            if p.wait_deadline_s
            else max(WAIT_DEADLINE_NS, scale.emulated_duration_ns(WAIT_DEADLINE_PAPER_S))
        ),
        split_least_blocks=p.split_least_blocks,
        read_window_blocks=p.read_window_blocks,
        persist_window_blocks=p.persist_window_blocks,
        replicas=p.replicas,
        write_back=p.write_back,
        dram_pages=int((p.kv_dram_bytes or kv_dram_bytes_per_node(model)) / scale.byte_scale) // page,
        dram_cache_pages=cache_pages,
        stage_pages=p.stage_pages,
        pe_hbm_bytes=int((p.pe_hbm_bytes or pe_hbm) * per_gpu),
        de_hbm_pages=int((p.de_hbm_bytes or de_hbm) * per_gpu) // page,
        max_decode_batch=p.max_decode_batch,
        storage_pages=p.storage_pages,
        queue_limit=p.queue_limit,
    )


def _collectives(
    scenario: Scenario, scale: FittedScale, cost: ComputeModel, cluster: ClusterSpec, roles: ClusterPlan
) -> Collectives | None:
    """The exchanges of the groups, if the scenario has any.

    Raises:
        ConfigError: a model without experts, or groups that have nobody to exchange with.
    """
    section = scenario.collectives
    if section.transport == "off":
        return None
    layers = section.layers or scenario.protocol.layer_group
    if layers > scale.model.layers:
        raise ConfigError(f"collectives.layers is {layers}, but the model has {scale.model.layers} layers.")
    collectives = scale.collectives(cost, section.transport, layers, cluster.cnic_rate_bps)
    for group in roles.groups:
        if len(group.engines) < 2:
            raise ConfigError(
                f"collectives: group {group.name} is {group.engines[0]} alone, which has nobody to exchange with; "
                "raise cluster.gpus_per_node (or lower scale.gpus)."
            )
    if section.transport == "rails" and all(len(group.nodes) < 2 for group in roles.groups):
        raise ConfigError(
            "collectives: with rails, engines exchange over the CNIC with other nodes of their group only, and every "
            'group here is one node; set collectives.transport = "rdma" or raise cluster.prefill_nodes.'
        )
    return collectives


def _submission(s: SubmissionSection, scale: FittedScale) -> SubmissionCosts:
    """Costs of submission per emulated block."""
    on = SubmissionCosts(
        copy_ns=scale.emulated_submission_ns(s.copy_s),
        work_request_ns=scale.emulated_submission_ns(s.work_request_s),
        doorbell_ns=scale.emulated_submission_ns(s.doorbell_s),
        doorbell_batch=s.doorbell_batch,
        copies_outstanding=s.copies_outstanding,
    )
    return on if s.on else replace(on, copy_ns=0, work_request_ns=0, doorbell_ns=0)


def _with_agents(scenario: Scenario) -> Scenario:
    """The scenario with its number of agents: one per trajectory if it names none."""
    w = scenario.workload
    if w.agents:
        return scenario
    count = len(source_trajectories(Workload(source=_source(w), agents=TRACE_SIZE, seed=scenario.seed)))
    return replace(scenario, workload=replace(w, agents=count))


def _source(w: WorkloadSection) -> str:
    """The source as the workload layer names it.

    Raises:
        ConfigError: a path without a use, or none where one is needed.
    """
    if w.path and w.source in ("shipped", "sweagent"):
        return f"sweagent:{w.path}"
    if w.path:
        raise ConfigError(f"workload: path is for source sweagent, not for {w.source}; set one of the two.")
    if w.source == "sweagent":
        raise ConfigError("workload: source sweagent needs workload.path, a .traj file or a folder of them.")
    return w.source


def _scripts(scenario: Scenario, scale: FittedScale) -> tuple[AgentScript, ...]:
    w = scenario.workload
    return tuple(
        make_agents(
            Workload(
                source=_source(w),
                agents=w.agents,
                seed=scenario.seed,
                length_scale=scale.length_scale,
                max_turns=w.max_turns,
                start_turn=w.start_turn,
                synthetic_tokens=w.synthetic_tokens,
            ),
            scale.model.vocab_size,
        )
    )


def _starts_ns(scenario: Scenario, scale: FittedScale) -> tuple[int, ...]:
    w = scenario.workload
    if w.arrivals == 0:
        return tuple(offline_starts_ns(w.agents))
    return tuple(poisson_starts_ns(w.agents, scale.emulated_arrival_rate(w.arrivals), scenario.seed))


def _tool_delay_ns(scenario: Scenario, scale: FittedScale) -> int:
    delay_s = scenario.workload.tool_delay_s
    if not 0 <= delay_s <= MOST_TOOL_DELAY_S:
        raise ConfigError(
            f"workload.tool_delay_s is {delay_s:g}, but it must be between 0 and {MOST_TOOL_DELAY_S} s of the paper."
        )
    return scale.emulated_duration_ns(delay_s) if delay_s else 0


def _check_fits(plan: RunPlan) -> None:
    """Refuse a workload whose longest request fits no DE buffer, DE HBM or PE HBM: it would fail in the middle.

    Raises:
        ConfigError: naming the request, the memory, both numbers and the way out.
    """
    params, layout = plan.params, plan.params.layout
    prompt, total, agent, turn = max(
        (s.prompt_tokens(t), s.prompt_tokens(t) + s.generate_tokens(t) - 1, s.name, t)
        for s in plan.scripts
        for t in range(s.turns)
    )
    steps_held = 2 * min(params.layers_in_flight, len(params.steps))
    memories = [
        ("the DE buffer in a node's DRAM", layout.blocks(prompt), params.dram_pages, "protocol.kv_dram_bytes"),
        ("the HBM of a DE", layout.blocks(total), params.de_hbm_pages, "protocol.de_hbm_bytes"),
    ]
    if any(s.layerwise for s in plan.systems):
        batch = params.pe_hbm_pages // steps_held
        memories.append(
            ("the HBM of a PE beside the layer steps in flight", layout.blocks(prompt), batch, "protocol.pe_hbm_bytes")
        )
    if any(not s.layerwise for s in plan.systems):
        whole = params.pe_hbm_bytes // layout.full_block_bytes
        memory = "the HBM of a PE without layerwise prefill"
        memories.append((memory, layout.blocks(prompt), whole, "protocol.pe_hbm_bytes"))
    for memory, need, have, key in memories:
        if need > have:
            raise ConfigError(
                f"scenario {plan.scenario}: {plan.scale.model.title} does not fit: the longest request ({agent}, turn "
                f"{turn + 1}, {prompt} emulated tokens) takes {need} blocks of {layout.full_block_bytes} bytes, but "
                f"{memory} holds {have}; raise {key}, lower scale.agents, or cut workload.max_turns."
            )
