"""What moves KV: storage reads, write-back, copies through CNICs, and the memory that they wait for (paper 4.1, 5).

Every resource is a FIFO that a transfer reserves when it starts: it takes its service time from each resource of its
path and ends when the last of them has served it, so rates are never exceeded and no resource idles for another.
"""

from __future__ import annotations

from testbed.flowsim import events
from testbed.flowsim.compiled import compiled, inlined
from testbed.flowsim.heap import Heap, push
from testbed.flowsim.queues import append, drop_head
from testbed.flowsim.state import F32, I64, NONE, SIDE_DE, SIDE_PE, Agents, Cluster, Queues, Requests, Settings


@inlined
def blocks_of(tokens: int, block_tokens: int) -> int:
    """Blocks that ``tokens`` occupy, the partial tail included."""
    return (tokens + block_tokens - 1) // block_tokens


@inlined
def reserve(free: I64, at: int, now: int, size: float, rate: float) -> int:
    """Serve ``size`` bytes behind all that is queued at a resource; when that ends."""
    begin = now if now > free[at] else free[at]
    free[at] = begin + int(size / rate)
    return int(free[at])


@inlined
def reserve_dram(s: Settings, c: Cluster, node: int, now: int, size: float) -> int:
    """Bytes into or out of a node's DRAM (half duplex)."""
    c.dram_bytes[node] += size
    return reserve(c.dram_free, node, now, size, s.dram_rate)


@inlined
def cnic_out(s: Settings, c: Cluster, engine: int, now: int, size: float) -> int:
    """Bytes that a CNIC reads from memory."""
    c.cnic_read_bytes[engine] += size
    return reserve(c.cnic_read_free, engine, now, size, s.cnic_rate)


@inlined
def cnic_in(s: Settings, c: Cluster, engine: int, now: int, size: float) -> int:
    """Bytes that a CNIC writes to memory."""
    c.cnic_write_bytes[engine] += size
    return reserve(c.cnic_write_free, engine, now, size, s.cnic_rate)


@compiled
def _record(series: F32, column: int, begin: int, end: int, size: float, window_ns: int) -> None:
    """Spread ``size`` evenly over the windows between two times; the last window takes what is beyond the series."""
    last = series.shape[0] - 1
    first_window, last_window = min(begin // window_ns, last), min(end // window_ns, last)
    if first_window == last_window or end <= begin:
        series[first_window, column] += size
        return
    rate = size / (end - begin)
    for window in range(first_window, last_window + 1):
        low = max(begin, window * window_ns)
        high = end if window == last_window else (window + 1) * window_ns
        series[window, column] += rate * (high - low)


# --- a DRAM tier in front of storage: least recently used agents leave first -----------------------------------------


@compiled
def _unlink(a: Agents, agent: int) -> None:
    newer, older = a.newer[agent], a.older[agent]
    a.older[newer], a.newer[older] = older, newer
    a.newer[agent] = NONE


@compiled
def tier_keep(s: Settings, a: Agents, agent: int, size: float) -> None:
    """The agent's KV, ``size`` bytes in all, was just used: keep it, at the price of the least recently used."""
    if s.tier_bytes <= 0:
        return
    sentinel = len(a.context)
    if a.newer[agent] != NONE:
        _unlink(a, agent)
        a.tier_used[0] -= a.tier_bytes[agent]
    if size > s.tier_bytes:
        return
    while a.tier_used[0] + size > s.tier_bytes:
        oldest = a.newer[sentinel]
        _unlink(a, oldest)
        a.tier_used[0] -= a.tier_bytes[oldest]
    a.tier_bytes[agent] = size
    a.tier_used[0] += size
    newest = a.older[sentinel]
    a.newer[newest] = agent
    a.older[agent] = newest
    a.newer[agent] = sentinel
    a.older[sentinel] = agent


# --- reads and memory ------------------------------------------------------------------------------------------------


@compiled
def _start_read(s: Settings, c: Cluster, r: Requests, a: Agents, h: Heap, node: int, request: int, now: int) -> None:
    """Storage (or the DRAM tier) -> SNIC -> this node's DRAM (PE path 1-2, DE path 1-2)."""
    r.allocated[request] = now
    size = r.hit[request] * s.kv_bytes
    agent = r.agent[request]
    end = reserve_dram(s, c, node, now, size)
    if s.tier_bytes > 0 and a.newer[agent] != NONE:
        end = max(end, now + int(size / s.cnic_rate))  # from another node's DRAM over its compute network
    else:
        queued = max(now, c.snic_rx_free[node])
        served = reserve(c.snic_rx_free, node, now, size, s.snic_rate)
        _record(c.snic_window, node, queued, served, size, s.window_ns)
        end = max(end, served, reserve(c.cluster_free, 0, now, size, s.cluster_rate))
    push(h, end + s.read_overhead_ns, events.READ_DONE, request, 0)


@compiled
def pump_memory(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, node: int, now: int) -> None:
    """Give buffer pages to whoever waits for them, in order: first the DE buffer, then the PE buffer, then the read."""
    ends = q.memory[node]
    while ends[0] != NONE:
        request = ends[0]
        prefill_side = node < s.prefill_nodes
        tokens = r.hit[request] if prefill_side else r.prompt[request]
        need = blocks_of(tokens, s.block_tokens)
        if c.pages_free[node] < need:
            return
        c.pages_free[node] -= need
        drop_head(ends, q.next_wait)
        if prefill_side or r.side[request] == SIDE_DE:
            _start_read(s, c, r, a, h, node, request, now)
        elif r.side[request] == SIDE_PE:
            to = r.prefill_engine[request] // s.gpus
            append(q.memory[to], q.next_wait, request)
            push(h, now + s.message_ns, events.PUMP_MEMORY, to, 0)
        else:
            r.allocated[request] = now
            push(h, now + s.message_ns, events.READ_DONE, request, 0)


@compiled
def write_back(s: Settings, c: Cluster, r: Requests, request: int, blocks: int, now: int) -> None:
    """Persist new full blocks from the DE node's DRAM on every replica."""
    if blocks <= 0:
        return
    size = blocks * s.block_tokens * s.kv_bytes
    node = s.prefill_nodes + r.decode_engine[request] // s.gpus
    copies = size * s.replicas
    c.snic_tx_bytes[node] += copies
    end = max(reserve(c.snic_tx_free, node, now, copies, s.snic_rate), reserve_dram(s, c, node, now, copies))
    r.durable[request] = max(r.durable[request], end + s.persist_ns)
