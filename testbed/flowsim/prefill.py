"""Prefill engines in compiled form (paper 2.1, 4.1, 8.5): packing under the quota, loads, layers, flushes.

Layerwise with ``steps`` > 1: every layer step loads, computes and flushes by itself, ``layers_in_flight`` loads ahead,
as ``emulators.prefill_engine`` does. With one step: the same pipeline in closed form; a forward lasts as long as its
slowest stage over all layers plus one layer of the others. Without layerwise prefill the three follow one another.
"""

from __future__ import annotations

from numba import njit

from testbed.flowsim import events
from testbed.flowsim.heap import Heap, push
from testbed.flowsim.queues import append, append_left, drop_head
from testbed.flowsim.state import MAX_ITEMS, NONE, SIDE_PE, Agents, Cluster, Queues, Requests, Settings
from testbed.flowsim.transfers import blocks_of, cnic_in, cnic_out, pump_memory, reserve_dram


@njit(cache=True)
def attention_ns(s: Settings, cached: int, new: int) -> float:
    """Attention of ``new`` tokens behind ``cached`` ones, all layers (``ModelSpec.attention_flops`` as time)."""
    seen = new * cached + new * (new + 1) / 2
    attended = seen
    if s.top_k > 0:
        below = min(max(s.top_k - cached, 0), new)
        attended = below * cached + below * (below + 1) / 2 + (new - below) * s.top_k
    return float(attended * s.main_attention_ns + seen * s.indexer_ns)


@njit(cache=True)
def _pack(s: Settings, c: Cluster, q: Queues, r: Requests, engine: int) -> float:
    """Fill the next forward, FIFO (``testbed.protocol.batching.pack_forward``); its attention time in ns."""
    used, memory, count, block = 0.0, s.pe_batch_blocks, 0, s.block_tokens
    ends = q.runnable[engine]
    while ends[0] != NONE and count < MAX_ITEMS:
        request = ends[0]
        cached = r.computed[request]
        new = r.prompt[request] - cached
        share, more = new, True
        cost = attention_ns(s, cached, new)
        if blocks_of(cached + new, block) > memory or used + cost > s.quota_ns:
            more = False
            low, high = 0, min((new - 1) // block, memory - cached // block)
            while low < high:
                middle = (low + high + 1) // 2
                if used + attention_ns(s, cached, middle * block) <= s.quota_ns:
                    low = middle
                else:
                    high = middle - 1
            share = low * block
            if low <= 0 and count == 0 and memory > cached // block:
                share = min(block, new)
            if share <= 0:
                break
            cost = attention_ns(s, cached, share)
        drop_head(ends, q.next_wait)
        c.item_request[engine, count] = request
        c.item_cached[engine, count] = cached
        c.item_new[engine, count] = share
        memory -= blocks_of(cached + share, block)
        used += cost
        count += 1
        if not more:
            break
    c.item_count[engine] = count
    return used


@njit(cache=True)
def _copy_in(s: Settings, c: Cluster, engine: int, source: int, node: int, now: int, size: float) -> int:
    """From a node's DRAM, out of the CNIC of ``source``, into the HBM of ``engine``."""
    if size <= 0:
        return now
    end = max(cnic_out(s, c, source, now, size), reserve_dram(s, c, node, now, size))
    return max(end, cnic_in(s, c, engine, now, size))


@njit(cache=True)
def _load(s: Settings, c: Cluster, r: Requests, engine: int, now: int, fraction: float) -> int:
    """Layer Blocks of what is cached into the PE's HBM (PE path 3-4, DE path 3-5); when the last has landed."""
    end = now
    for k in range(c.item_count[engine]):
        request = c.item_request[engine, k]
        cached = c.item_cached[engine, k]
        if cached == 0:
            continue
        own = min(cached, r.hit[request]) if r.side[request] == SIDE_PE else 0
        decode = r.decode_engine[request]
        end = max(end, _copy_in(s, c, engine, engine, engine // s.gpus, now, own * s.kv_bytes * fraction))
        rest = (cached - own) * s.kv_bytes * fraction
        node = s.prefill_nodes + decode // s.gpus
        end = max(end, _copy_in(s, c, engine, len(c.pe_tokens) + decode, node, now, rest))
    return end


@njit(cache=True)
def _flush(s: Settings, c: Cluster, r: Requests, engine: int, now: int, fraction: float) -> None:
    """Layer Blocks from HBM to the DE buffers (PE path 5-7: hits too; DE path: misses only)."""
    for k in range(c.item_count[engine]):
        request = c.item_request[engine, k]
        cached, new = c.item_cached[engine, k], c.item_new[engine, k]
        hits_too = r.side[request] == SIDE_PE and cached == r.hit[request]
        first = 0 if hits_too else cached // s.block_tokens
        blocks = blocks_of(cached + new, s.block_tokens) - first
        size = blocks * s.block_tokens * s.kv_bytes * fraction
        decode = r.decode_engine[request]
        end = cnic_out(s, c, engine, now, size)
        end = max(end, cnic_in(s, c, len(c.pe_tokens) + decode, now, size))
        end = max(end, reserve_dram(s, c, s.prefill_nodes + decode // s.gpus, now, size))
        c.item_flush_ns[engine, k] = end


@njit(cache=True)
def make_runnable(s: Settings, c: Cluster, q: Queues, r: Requests, h: Heap, request: int, now: int) -> None:
    """Hits are in DRAM and the DE buffer is held."""
    engine = r.prefill_engine[request]
    append(q.runnable[engine], q.next_wait, request)
    try_forward(s, c, q, r, h, engine, now)


@njit(cache=True)
def chunk_flushed(s: Settings, c: Cluster, q: Queues, r: Requests, h: Heap, request: int, now: int) -> None:
    """What earlier chunks computed is in the DE buffer: the next one goes first."""
    engine = r.prefill_engine[request]
    append_left(q.runnable[engine], q.next_wait, request)
    try_forward(s, c, q, r, h, engine, now)


@njit(cache=True)
def try_forward(s: Settings, c: Cluster, q: Queues, r: Requests, h: Heap, engine: int, now: int) -> None:
    """Start the next forward of an idle engine."""
    if c.busy[engine] or q.runnable[engine, 0] == NONE:
        return
    attention = _pack(s, c, q, r, engine)
    count = c.item_count[engine]
    if count == 0:
        return
    new_tokens = 0
    for k in range(count):
        new_tokens += c.item_new[engine, k]
        request = c.item_request[engine, k]
        if r.started[request] < 0:
            r.started[request] = now
        c.item_flush_ns[engine, k] = now
    c.busy[engine] = 1
    whole = s.prefill_base_ns + new_tokens * s.linear_ns + attention
    window = min(now // s.window_ns, c.attention_window.shape[0] - 1)
    c.attention_window[window, engine] += attention
    if not s.moves_kv:
        push(h, now + int(whole), events.FORWARD_END, engine, 0)
    elif not s.layerwise:
        loaded = _load(s, c, r, engine, now, 1.0)
        push(h, loaded + int(whole), events.FORWARD_END, engine, 0)
    elif s.steps == 1:
        _closed_form(s, c, r, h, engine, now, whole)
    else:
        c.step[engine] = 0
        c.step_ns[engine] = whole / s.steps
        ahead = min(s.layers_in_flight, s.steps)
        for step in range(ahead):
            c.load_end[engine, step] = _load(s, c, r, engine, now, 1.0 / s.steps)
        push(h, c.load_end[engine, 0] + int(c.step_ns[engine]), events.STEP_END, engine, 0)


@njit(cache=True)
def _closed_form(s: Settings, c: Cluster, r: Requests, h: Heap, engine: int, now: int, whole: float) -> None:
    loaded = _load(s, c, r, engine, now, 1.0)
    first_layer = int((loaded - now) / s.layers)
    end = max(now + first_layer + int(whole), loaded + int(whole / s.layers))
    _flush(s, c, r, engine, now, 1.0)
    for k in range(c.item_count[engine]):
        flushed = c.item_flush_ns[engine, k]
        last_layer = int((flushed - now) / s.layers)
        c.item_flush_ns[engine, k] = max(flushed, end + last_layer)
    push(h, end, events.FORWARD_END, engine, 0)


@njit(cache=True)
def step_end(
    s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, engine: int, now: int
) -> None:
    """A layer step has been computed: flush it, load a further one, compute the next."""
    step = c.step[engine]
    _flush(s, c, r, engine, now, 1.0 / s.steps)
    ring = s.layers_in_flight + 1
    if step + s.layers_in_flight < s.steps:
        c.load_end[engine, (step + s.layers_in_flight) % ring] = _load(s, c, r, engine, now, 1.0 / s.steps)
    step += 1
    c.step[engine] = step
    if step == s.steps:
        _ended(s, c, q, r, a, h, engine, now)
        return
    begin = max(now, c.load_end[engine, step % ring])
    push(h, begin + int(c.step_ns[engine]), events.STEP_END, engine, 0)


@njit(cache=True)
def forward_end(
    s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, engine: int, now: int
) -> None:
    """A forward whose layers were not simulated one by one has ended."""
    if s.moves_kv and not s.layerwise:
        _flush(s, c, r, engine, now, 1.0)
    _ended(s, c, q, r, a, h, engine, now)


@njit(cache=True)
def _ended(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, engine: int, now: int) -> None:
    node = engine // s.gpus
    for k in range(c.item_count[engine]):
        request = c.item_request[engine, k]
        flushed = max(now, c.item_flush_ns[engine, k])
        r.computed[request] += c.item_new[engine, k]
        if r.computed[request] < r.prompt[request]:
            push(h, flushed, events.CHUNK_FLUSHED, request, 0)
            continue
        r.first[request] = now
        push(h, flushed, events.BUFFERED, request, 0)
        if r.side[request] == SIDE_PE:
            c.pages_free[node] += blocks_of(r.hit[request], s.block_tokens)
    c.busy[engine] = 0
    pump_memory(s, c, q, r, a, h, node, now)
    try_forward(s, c, q, r, h, engine, now)
