"""One simulation: a case in paper units in, arrays of paper seconds out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from testbed.errors import BugError, ConfigError
from testbed.flowsim import events
from testbed.flowsim.calibration import Calibration, load_calibration
from testbed.flowsim.engine import run
from testbed.flowsim.heap import make_heap, push
from testbed.flowsim.state import (
    I32,
    I64,
    Cluster,
    Requests,
    Settings,
    make_agents,
    make_cluster,
    make_queues,
    make_requests,
)
from testbed.models.compute import GpuSpec
from testbed.models.hardware import ALPHA_S, PAPER_HARDWARE, beta_tokens, kv_dram_bytes_per_node, kv_hbm_bytes_per_gpu
from testbed.models.model import ModelSpec, model_named
from testbed.units import NS_PER_S
from testbed.workload.agents import SYNTHETIC_TOKENS, poisson_starts_ns
from testbed.workload.table2 import TRACE_SIZE, generate, profile_named

Floats = npt.NDArray[np.float64]
BLOCK_TOKENS = 64
MAX_WINDOWS = 1 << 16
SGL_DRAM_BYTES_PER_NODE = 1.5e12  # A.4
_MESSAGE_NS = 50_000  # a control message among processes of one data centre
_PERSIST_NS = 2_000_000  # a block on flash, acknowledged by all replicas
_REPLICAS = 2
_Z_FACTOR = 1.05
_QUOTA_NS = 300_000_000
_NO_LIMIT = 1 << 62
_SIDES = {"dual-path-rr": 1, "dualpath": 2}
SYSTEM_NAMES = ("oracle", "dualpath", "dual-path-rr", "layerwise", "basic", "sgl-mc")
OPTIONS: dict[str, tuple[float, float]] = {
    "recompute_fraction": (0.0, 1.0),
    "kv_byte_scale": (0.001, 1_000.0),
    "tool_delay_s": (0.0, 1e6),
    "dram_tier_bytes": (0.0, 1e18),
    "storage_limit_gb_s": (0.001, 1e6),
    "s": (0.001, 1_000.0),
    "steps": (1.0, 64.0),
}
"""Options of a case, and the range of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowCase:
    """One simulation, in the paper's units.

    ``aps`` 0: all agents start together (offline). ``horizon_s`` 0: until all are done. ``options`` stack on any
    system: ``recompute_fraction`` (part of the hits computed again, KVPR), ``kv_byte_scale`` (fewer bytes per token,
    TailorKV), ``tool_delay_s`` (between rounds), ``dram_tier_bytes`` (of the whole cluster, in front of storage),
    ``storage_limit_gb_s`` (all storage servers together), ``s`` (SNIC over CNIC), ``steps`` (layer groups simulated).
    """

    model: str
    trace: str
    system: str
    prefill_nodes: int
    decode_nodes: int
    agents: int
    aps: float = 0.0
    seed: int = 0
    append_scale: float = 1.0
    generate_scale: float = 1.0
    horizon_s: float = 0.0
    options: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated.

        Raises:
            ConfigError: an unknown system, trace, model or option, or a value out of range.
        """
        if self.system not in SYSTEM_NAMES:
            raise ConfigError(f"unknown system {self.system!r}; choose one of {', '.join(SYSTEM_NAMES)}.")
        for name, value in self.options:
            if name not in OPTIONS:
                raise ConfigError(f"unknown option {name!r}; choose one of {', '.join(OPTIONS)}.")
            low, high = OPTIONS[name]
            if not low <= value <= high:
                raise ConfigError(f"option {name} is {value:g}, but it must be between {low:g} and {high:g}.")
        for key, least in (("prefill_nodes", 1), ("decode_nodes", 1), ("agents", 1), ("seed", 0)):
            if getattr(self, key) < least:
                raise ConfigError(f"{key} is {getattr(self, key)}, but it must be at least {least}.")
        if not (self.aps >= 0 and self.horizon_s >= 0 and self.append_scale > 0 and self.generate_scale > 0):
            raise ConfigError("aps and horizon_s must not be negative; append_scale and generate_scale are positive.")
        model_named(self.model)
        profile_named(self.trace)

    def option(self, name: str, default: float) -> float:
        """An option, or its default."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowResult:
    """What happened. Request arrays have one entry per completed request, in order of submission; times in s.

    ``snic_bytes`` [windows, nodes] are bytes read from storage, ``attention_s`` [windows, PEs] GPU seconds of
    attention, prefill nodes first, windows of ``window_s``. ``finished``: all agents are done. ``events`` were
    processed. ``utilisation``: of the busiest resource of each kind, over the whole run.
    """

    case: FlowCase
    jct_s: float
    requests: int
    finished: bool
    events: int
    submitted_s: Floats
    scheduled_s: Floats
    allocated_s: Floats
    read_s: Floats
    first_token_s: Floats
    second_token_s: Floats
    last_token_s: Floats
    completed_s: Floats
    prompt_tokens: I64
    hit_tokens: I64
    append_tokens: I64
    generate_tokens: I64
    agent: I64
    side: I64
    snic_node: tuple[str, ...]
    window_s: float
    snic_bytes: Floats
    attention_s: Floats
    utilisation: dict[str, float]


def simulate(case: FlowCase, calibration: Calibration | None = None) -> FlowResult:
    """Run a case. The same case and calibration give the same result.

    Raises:
        ConfigError: a request that no memory of the cluster can hold.
        BugError: the simulation stands still with agents left.
    """
    settings = _settings(case, _model(case), calibration or load_calibration())
    offset, append, generated = _workload(case)
    _check_fits(case, settings, offset, append, generated)
    agents = make_agents(offset)
    cluster = make_cluster(settings, case.agents, MAX_WINDOWS)
    queues = make_queues(settings, len(append))
    requests = make_requests(offset, append, generated)
    engines = len(cluster.pe_tokens) + len(cluster.de_tokens)
    heap = make_heap(32 * case.agents + 64 * engines + 10_000)
    for agent, start_ns in enumerate(_starts_ns(case)):
        push(heap, start_ns, events.ARRIVE, agent, 0)
    cluster.counts[0] = case.agents
    processed = run(settings, cluster, queues, requests, agents, heap, _NO_LIMIT)
    if cluster.counts[0] and not case.horizon_s:
        raise BugError(f"{case}: the simulation stands still with {cluster.counts[0]} agents left")
    return _result(case, settings, cluster, requests, agents.turn, processed)


def _model(case: FlowCase) -> ModelSpec:
    """The model with what storage keeps of it: the keys of the indexer belong to the KV."""
    model = model_named(case.model)
    return model.with_indexer() if model.indexer_bytes_per_token_layer else model


def _settings(case: FlowCase, model: ModelSpec, fit: Calibration) -> Settings:
    hardware = PAPER_HARDWARE
    flops_per_ns = fit.effective_pflops * 1e15 / NS_PER_S
    gpu = GpuSpec(
        effective_flops=fit.effective_pflops * 1e15,
        effective_attention_flops=fit.effective_pflops * 1e15,
        prefill_base_s=fit.prefill_layer_overhead_ms * 1e-3 * model.layers,
        decode_base_s=0.0,  # beta is about prefill
        decode_per_sequence_s=0.0,
        decode_per_context_token_s=0.0,
    )
    kv = fit.kv_bytes_per_token_27b if case.model == "ds-27b" else float(model.kv_bytes_per_token)
    kv *= case.option("kv_byte_scale", 1.0)
    oracle, sgl = case.system == "oracle", case.system == "sgl-mc"
    balanced = case.system in ("oracle", "dualpath")
    layerwise = case.system != "basic"
    pe_hbm, de_hbm = kv_hbm_bytes_per_gpu(model)
    if case.model == "ds-660b":
        pe_hbm, de_hbm = int(fit.pe_kv_hbm_gb_660b * 1e9), int(fit.de_kv_hbm_gb_660b * 1e9)
    pe_blocks = int(pe_hbm / (kv * BLOCK_TOKENS))
    layers_in_flight = 2
    nodes = case.prefill_nodes + case.decode_nodes
    tier = case.option("dram_tier_bytes", SGL_DRAM_BYTES_PER_NODE * nodes if sgl else 0.0)
    main = 2 * model.layers * model.attention_heads * (model.attention_qk_dim + model.attention_v_dim)
    dense = model.attention_top_k is None
    layer_ms = {
        "ds-660b": fit.decode_layer_ms_660b,
        "ds-27b": fit.decode_layer_ms_27b,
        "qwen-32b": fit.decode_layer_ms_qwen,
    }[case.model]
    storage_rate = min(fit.storage_rate_gb_s, hardware.snic_rate_bps / 8e9) * case.option("s", 1.0)
    return Settings(
        prefill_nodes=case.prefill_nodes,
        decode_nodes=case.decode_nodes,
        gpus=hardware.gpus_per_node,
        unit_engines=_unit_engines(case, model),
        block_tokens=BLOCK_TOKENS,
        kv_bytes=kv,
        layers=model.layers,
        steps=int(case.option("steps", 1.0)),
        layers_in_flight=layers_in_flight,
        cnic_rate=hardware.cnic_rate_bps / 8e9,
        snic_rate=storage_rate,
        cluster_rate=case.option("storage_limit_gb_s", 1e6),
        dram_rate=hardware.dram_rate_bps / 8e9,
        read_overhead_ns=int(fit.read_overhead_s * NS_PER_S),
        allocation_overhead_ns=int(fit.allocation_overhead_s * NS_PER_S) if case.system in _SIDES else 0,
        message_ns=_MESSAGE_NS,
        persist_ns=_PERSIST_NS,
        fetch_ns=int(fit.fetch_interval_s * NS_PER_S),
        alpha_tokens=int(storage_rate * 1e9 * ALPHA_S / kv),
        beta_tokens=beta_tokens(model, gpu),
        z_factor=_Z_FACTOR,
        quota_ns=_QUOTA_NS if balanced else _NO_LIMIT,
        forward_tokens=_NO_LIMIT if balanced else int(fit.forward_tokens),
        balanced=balanced,
        moves_kv=not oracle,
        layerwise=layerwise,
        side_policy=_SIDES.get(case.system, 0),
        dram_pages=int(kv_dram_bytes_per_node(model) / (kv * BLOCK_TOKENS)),
        pe_batch_blocks=pe_blocks * model.layers // (2 * layers_in_flight) if layerwise else pe_blocks,
        de_hbm_pages=int(de_hbm / (kv * BLOCK_TOKENS)),
        replicas=_REPLICAS,
        prefill_base_ns=fit.prefill_layer_overhead_ms * 1e6 * model.layers,
        linear_ns=model.linear_flops_per_token / flops_per_ns,
        main_attention_ns=main / flops_per_ns,
        indexer_ns=2 * model.layers * model.indexer_heads * model.indexer_dim / flops_per_ns,
        top_k=model.attention_top_k or 0,
        decode_base_ns=layer_ms * 1e6 * model.layers,
        # A sequence of a step costs the FLOPs of one token; dense attention also reads its KV.
        decode_sequence_ns=(model.linear_flops_per_token if dense else model.flops_per_new_token(32_721))
        / flops_per_ns,
        decode_context_ns=kv / (fit.hbm_read_tb_s * 1e3) if dense else 0.0,
        recompute_fraction=case.option("recompute_fraction", 0.0),
        tool_delay_ns=int(case.option("tool_delay_s", 0.0) * NS_PER_S),
        tier_bytes=tier,
        window_ns=NS_PER_S,
        horizon_ns=int(case.horizon_s * NS_PER_S) if case.horizon_s else _NO_LIMIT,
    )


def _unit_engines(case: FlowCase, model: ModelSpec) -> int:
    """Prefill engines that synchronise: the expert-parallel unit of A.2 (all prefill GPUs of the default cluster), or
    those of one node where more do not divide the cluster; a model without experts synchronises nothing."""
    if model.attention_top_k is None:
        return 1
    nodes = model.prefill_nodes if case.prefill_nodes % model.prefill_nodes == 0 else 1
    return nodes * PAPER_HARDWARE.gpus_per_node


# --- workload ------------------------------------------------------------------------------------------------------


def _workload(case: FlowCase) -> tuple[I64, I32, I32]:
    """Rounds of all agents, flat: offsets, appended and generated tokens.

    Agents beyond the trace replay one drawn again behind a synthetic round (paper A.3). Scaled lengths are cut where
    the trajectory reaches the trace's MaxLen.
    """
    profile = profile_named(case.trace)
    trace = generate(profile, TRACE_SIZE, case.seed)
    lengths = [
        _scaled(
            np.array([t.append_tokens for t in trajectory.turns], np.int64),
            np.array([t.generate_tokens for t in trajectory.turns], np.int64),
            case,
            profile.max_tokens,
        )
        for trajectory in trace
    ]
    rng = np.random.default_rng([case.seed, 1])
    drawn = np.concatenate([rng.permutation(TRACE_SIZE), rng.integers(TRACE_SIZE, size=max(0, case.agents))])
    synthetic = (np.array([SYNTHETIC_TOKENS], np.int64), np.ones(1, np.int64))
    appends, generations = [], []
    for i in range(case.agents):
        append, generated = lengths[drawn[i]]
        if i >= TRACE_SIZE:
            append, generated = np.concatenate([synthetic[0], append]), np.concatenate([synthetic[1], generated])
        appends.append(append)
        generations.append(generated)
    offset = np.concatenate([[0], np.cumsum([len(x) for x in appends])]).astype(np.int64)
    return offset, np.concatenate(appends).astype(np.int32), np.concatenate(generations).astype(np.int32)


def _scaled(append: I64, generated: I64, case: FlowCase, max_tokens: int) -> tuple[I64, I64]:
    if case.append_scale == 1.0 and case.generate_scale == 1.0:
        return append, generated
    append = np.maximum(1, np.round(append * case.append_scale)).astype(np.int64)
    generated = np.maximum(1, np.round(generated * case.generate_scale)).astype(np.int64)
    kept = max(1, int(np.searchsorted(np.cumsum(append + generated), max_tokens, side="right")))
    return append[:kept], generated[:kept]


def _starts_ns(case: FlowCase) -> list[int]:
    return poisson_starts_ns(case.agents, case.aps, case.seed) if case.aps else [0] * case.agents


def _check_fits(case: FlowCase, s: Settings, offset: I64, append: I32, generated: I32) -> None:
    """Raises ConfigError for a request that would wait for ever."""
    ends = np.cumsum(append.astype(np.int64) + generated)
    before = np.concatenate([[0], ends])[offset[:-1]]
    longest = int((ends[offset[1:] - 1] - before).max())
    blocks = -(-longest // s.block_tokens)
    for memory, have in (
        ("the DRAM of a node", s.dram_pages),
        ("the HBM of a DE", s.de_hbm_pages),
        ("the HBM of a PE", s.pe_batch_blocks),
    ):
        if blocks > have:
            raise ConfigError(f"{case.model} {case.trace}: a request takes {blocks} blocks, {memory} holds {have}.")


# --- result --------------------------------------------------------------------------------------------------------


def _result(case: FlowCase, s: Settings, c: Cluster, r: Requests, turns: I32, processed: int) -> FlowResult:
    done = np.flatnonzero(r.completed >= 0)
    order = done[np.argsort(r.submitted[done], kind="stable")]
    end_ns = int(r.completed[order].max()) if len(order) else 0
    begin_ns = int(r.submitted[order].min()) if len(order) else 0
    windows = min(end_ns // s.window_ns + 1, MAX_WINDOWS)

    def seconds(times: I64) -> Floats:
        return np.asarray(times[order] / NS_PER_S, dtype=np.float64)

    nodes = [f"pe{i}" for i in range(s.prefill_nodes)] + [f"de{i}" for i in range(s.decode_nodes)]
    return FlowResult(
        case=case,
        jct_s=(end_ns - begin_ns) / NS_PER_S,
        requests=len(order),
        finished=len(order) == len(r.append),
        events=processed,
        submitted_s=seconds(r.submitted),
        # The scheduler that DualPath replaces keeps a request until its memory is there: the paper's Basic has no
        # allocation in its TTFT (Figure 12), whatever the load, so its wait for memory counts as scheduling.
        scheduled_s=seconds(r.scheduled if s.balanced or s.side_policy else r.allocated),
        allocated_s=seconds(r.allocated),
        read_s=seconds(r.started),
        first_token_s=seconds(r.first),
        second_token_s=seconds(r.second),
        last_token_s=seconds(r.last),
        completed_s=seconds(r.completed),
        prompt_tokens=r.prompt[order].astype(np.int64),
        hit_tokens=r.hit[order].astype(np.int64),
        append_tokens=r.append[order].astype(np.int64),
        generate_tokens=r.generate[order].astype(np.int64),
        agent=r.agent[order].astype(np.int64),
        side=r.side[order].astype(np.int64),
        snic_node=tuple(nodes),
        window_s=s.window_ns / NS_PER_S,
        snic_bytes=c.snic_window[:windows].astype(np.float64),
        attention_s=c.attention_window[:windows].astype(np.float64) / NS_PER_S,
        utilisation=_utilisation(s, c, max(end_ns - begin_ns, 1)),
    )


def _utilisation(s: Settings, c: Cluster, span_ns: int) -> dict[str, float]:
    pes = s.prefill_nodes * s.gpus

    def share(sizes: Floats, rate: float) -> float:
        return float(sizes.max()) / rate / span_ns

    reads = c.snic_window.sum(axis=0, dtype=np.float64)
    return {
        "pe_snic_read": share(reads[: s.prefill_nodes], s.snic_rate),
        "de_snic_read": share(reads[s.prefill_nodes :], s.snic_rate),
        "pe_cnic_read": share(c.cnic_read_bytes[:pes], s.cnic_rate),
        "pe_cnic_write": share(c.cnic_write_bytes[:pes], s.cnic_rate),
        "de_cnic_read": share(c.cnic_read_bytes[pes:], s.cnic_rate),
        "de_cnic_write": share(c.cnic_write_bytes[pes:], s.cnic_rate),
        "pe_dram": share(c.dram_bytes[: s.prefill_nodes], s.dram_rate),
        "de_dram": share(c.dram_bytes[s.prefill_nodes :], s.dram_rate),
    }
