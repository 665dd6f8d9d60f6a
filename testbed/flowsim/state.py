"""What the compiled engine sees: settings, resources, engines and requests as flat arrays.

Times are integer ns, sizes bytes, rates bytes per ns (1 byte/ns = 1 GB/s), lengths tokens. Engines are numbered PE
first, node after node; nodes likewise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
I8 = npt.NDArray[np.int8]
F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]

NONE = -1
SIDE_NONE, SIDE_PE, SIDE_DE = 0, 1, 2
MAX_ITEMS = 1024
"""Requests in one forward of a PE, at most."""


class Settings(NamedTuple):
    """One simulation's constants. ``side_policy``: 0 always PE, 1 in turn, 2 the shorter read queue."""

    prefill_nodes: int
    decode_nodes: int
    gpus: int
    unit_engines: int  # PEs that run their forwards together
    block_tokens: int
    kv_bytes: float  # per token, all layers
    layers: int
    steps: int  # layer groups of a forward; 1: one group, its pipeline in closed form
    layers_in_flight: int
    cnic_rate: float
    snic_rate: float
    cluster_rate: float  # all storage servers together
    dram_rate: float
    read_overhead_ns: int
    allocation_overhead_ns: int
    message_ns: int
    persist_ns: int
    fetch_ns: int
    alpha_tokens: int
    beta_tokens: int
    z_factor: float
    quota_ns: int
    forward_tokens: int  # new tokens that an engine computes in one forward, at most
    balanced: bool
    moves_kv: bool
    layerwise: bool
    side_policy: int
    dram_pages: int
    pe_batch_blocks: int
    de_hbm_pages: int
    replicas: int
    prefill_base_ns: float
    linear_ns: float  # per new token
    main_attention_ns: float  # per pair of tokens, all layers
    indexer_ns: float  # per pair of tokens, all layers
    top_k: int
    decode_base_ns: float
    decode_sequence_ns: float
    decode_context_ns: float
    recompute_fraction: float
    tool_delay_ns: int
    tier_bytes: float
    window_ns: int
    horizon_ns: int


class Cluster(NamedTuple):
    """Resources and engines. ``counts``: agents left, side turn, PE turn, DE turn, tick pending."""

    snic_rx_free: I64  # [nodes]: when the FIFO of the resource is empty
    snic_tx_free: I64
    dram_free: I64
    cluster_free: I64  # [1]
    cnic_read_free: I64  # [engines]
    cnic_write_free: I64
    cnic_read_bytes: F64
    cnic_write_bytes: F64
    snic_tx_bytes: F64  # [nodes]
    dram_bytes: F64
    pages_free: I64  # [nodes] buffer pages in DRAM
    read_queue: I64  # [nodes] tokens
    pe_tokens: I64  # [PEs]
    de_tokens: I64  # [DEs]
    de_sequences: I64
    hbm_free: I64  # [DEs] pages that no sequence holds
    hbm_unplanned: I64  # [DEs] pages that no assigned request will hold
    group_tokens: I64  # [decode nodes]: running and privately queued
    busy: I8  # [units]: a forward runs
    item_count: I64  # [PEs]
    item_request: I32  # [PEs, MAX_ITEMS]
    item_cached: I32
    item_new: I32
    item_flush_ns: I64
    step: I64  # [units]: layer step that computes
    step_ns: F64  # [units]: duration of one step
    load_end: I64  # [units, layers_in_flight + 1]
    decode_steps: I64  # [DEs]: steps done at the last boundary
    boundary_ns: I64
    tau_ns: F64
    active: I64
    contexts: I64  # [DEs]: tokens of all active contexts
    stamp: I64
    leave_size: I64
    leave_step: I64  # [DEs, capacity]: heap
    leave_request: I32
    snic_window: F32  # [windows, nodes] bytes read
    attention_window: F32  # [windows, PEs] ns
    counts: I64


class Queues(NamedTuple):
    """FIFO queues as linked lists: a request is in one list of each kind at most."""

    prefill: I32  # [2] head, tail of the global prefill queue
    decode: I32  # [2] of the global decode queue
    private: I32  # [decode nodes, 2]
    memory: I32  # [nodes, 2] waiting for DRAM pages
    runnable: I32  # [PEs, 2]
    hbm: I32  # [DEs, 2]
    joining: I32  # [DEs, 2]
    next_prefill: I32  # [requests]
    next_decode: I32
    next_wait: I32


class Requests(NamedTuple):
    """Every round of every agent, agent after agent."""

    agent: I32
    append: I32
    generate: I32
    prompt: I32
    hit: I32
    computed: I32
    prefill_engine: I32
    decode_engine: I32
    chosen: I8  # bit 0: PE chosen, bit 1: DE chosen
    side: I8
    submitted: I64
    scheduled: I64
    allocated: I64
    started: I64
    first: I64
    second: I64
    last: I64
    completed: I64
    durable: I64


class Agents(NamedTuple):
    """``offset`` [agents + 1] into the requests; the LRU list of a DRAM tier has its sentinel at the end."""

    offset: I64
    turn: I32
    context: I32
    stored_blocks: I32
    tier_bytes: F64
    newer: I32
    older: I32
    tier_used: F64  # [1]


def make_cluster(s: Settings, agents: int, windows: int) -> Cluster:
    """Resources of an idle cluster."""
    nodes, pes, des = s.prefill_nodes + s.decode_nodes, s.prefill_nodes * s.gpus, s.decode_nodes * s.gpus
    units = pes // s.unit_engines
    sequences = int(min(agents, 4096)) + 1

    def i64(*shape: int) -> I64:
        return np.zeros(shape, np.int64)

    return Cluster(
        snic_rx_free=i64(nodes),
        snic_tx_free=i64(nodes),
        dram_free=i64(nodes),
        cluster_free=i64(1),
        cnic_read_free=i64(pes + des),
        cnic_write_free=i64(pes + des),
        cnic_read_bytes=np.zeros(pes + des),
        cnic_write_bytes=np.zeros(pes + des),
        snic_tx_bytes=np.zeros(nodes),
        dram_bytes=np.zeros(nodes),
        pages_free=np.full(nodes, s.dram_pages, np.int64),
        read_queue=i64(nodes),
        pe_tokens=i64(pes),
        de_tokens=i64(des),
        de_sequences=i64(des),
        hbm_free=np.full(des, s.de_hbm_pages, np.int64),
        hbm_unplanned=np.full(des, s.de_hbm_pages, np.int64),
        group_tokens=i64(s.decode_nodes),
        busy=np.zeros(units, np.int8),
        item_count=i64(pes),
        item_request=np.zeros((pes, MAX_ITEMS), np.int32),
        item_cached=np.zeros((pes, MAX_ITEMS), np.int32),
        item_new=np.zeros((pes, MAX_ITEMS), np.int32),
        item_flush_ns=i64(pes, MAX_ITEMS),
        step=i64(units),
        step_ns=np.zeros(units),
        load_end=i64(units, s.layers_in_flight + 1),
        decode_steps=i64(des),
        boundary_ns=i64(des),
        tau_ns=np.ones(des),
        active=i64(des),
        contexts=i64(des),
        stamp=i64(des),
        leave_size=i64(des),
        leave_step=i64(des, sequences),
        leave_request=np.zeros((des, sequences), np.int32),
        snic_window=np.zeros((windows, nodes), np.float32),
        attention_window=np.zeros((windows, pes), np.float32),
        counts=i64(5),
    )


def make_queues(s: Settings, requests: int) -> Queues:
    """Empty queues."""
    pes, des = s.prefill_nodes * s.gpus, s.decode_nodes * s.gpus

    def empty(*shape: int) -> I32:
        return np.full(shape, NONE, np.int32)

    return Queues(
        prefill=empty(2),
        decode=empty(2),
        private=empty(s.decode_nodes, 2),
        memory=empty(s.prefill_nodes + s.decode_nodes, 2),
        runnable=empty(pes, 2),
        hbm=empty(des, 2),
        joining=empty(des, 2),
        next_prefill=empty(requests),
        next_decode=empty(requests),
        next_wait=empty(requests),
    )


def make_requests(offset: I64, append: I32, generate: I32) -> Requests:
    """All rounds, none submitted (times are -1)."""
    total = len(append)
    agent = np.repeat(np.arange(len(offset) - 1, dtype=np.int32), np.diff(offset))

    def never() -> I64:
        return np.full(total, -1, np.int64)

    def zero() -> I32:
        return np.zeros(total, np.int32)

    return Requests(
        agent=agent,
        append=append,
        generate=generate,
        prompt=zero(),
        hit=zero(),
        computed=zero(),
        prefill_engine=zero(),
        decode_engine=zero(),
        chosen=np.zeros(total, np.int8),
        side=np.zeros(total, np.int8),
        submitted=never(),
        scheduled=never(),
        allocated=never(),
        started=never(),
        first=never(),
        second=never(),
        last=never(),
        completed=never(),
        durable=never(),
    )


def make_agents(offset: I64) -> Agents:
    """Agents before their first round."""
    count = len(offset) - 1
    ring = np.full(count + 1, NONE, np.int32)
    older = ring.copy()
    ring[count] = older[count] = count
    return Agents(
        offset=offset,
        turn=np.zeros(count, np.int32),
        context=np.zeros(count, np.int32),
        stored_blocks=np.zeros(count, np.int32),
        tier_bytes=np.zeros(count),
        newer=ring,
        older=older,
        tier_used=np.zeros(1),
    )
