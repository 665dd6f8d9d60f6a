"""Prefill engines in compiled form (paper 2.1, 4.1, 8.5): packing under the quota, loads, layers, flushes.

The engines of an expert-parallel unit run their forwards together (DP attention + EP: all synchronise in every layer).
A forward of the unit takes the slowest engine's loads and attention; the experts' work is spread over all of them.

Layerwise with ``steps`` > 1: every layer step loads, computes and flushes by itself, ``layers_in_flight`` loads ahead,
as ``emulators.prefill_engine`` does. With one step: the same pipeline in closed form; a forward lasts as long as its
slowest stage over all layers plus one layer of the others. Without layerwise prefill the three follow one another.
"""

from __future__ import annotations

from testbed.flowsim import events
from testbed.flowsim.compiled import compiled
from testbed.flowsim.heap import Heap, push
from testbed.flowsim.queues import append, append_left, drop_head
from testbed.flowsim.state import MAX_ITEMS, NONE, SIDE_PE, Agents, Cluster, Queues, Requests, Settings
from testbed.flowsim.transfers import blocks_of, cnic_in, cnic_out, pump_memory, reserve_dram


@compiled
def attention_ns(s: Settings, cached: int, new: int) -> float:
    """Attention of ``new`` tokens behind ``cached`` ones, all layers (``ModelSpec.attention_flops`` as time)."""
    seen = new * cached + new * (new + 1) / 2
    attended = seen
    if s.top_k > 0:
        below = min(max(s.top_k - cached, 0), new)
        attended = below * cached + below * (below + 1) / 2 + (new - below) * s.top_k
    return float(attended * s.main_attention_ns + seen * s.indexer_ns)


@compiled
def _pack(s: Settings, c: Cluster, q: Queues, r: Requests, engine: int) -> float:
    """Fill the next forward, FIFO (``testbed.protocol.batching.pack_forward``); its attention time in ns."""
    used, memory, count, block = 0.0, s.pe_batch_blocks, 0, s.block_tokens
    tokens = s.forward_tokens
    ends = q.runnable[engine]
    while ends[0] != NONE and count < MAX_ITEMS:
        request = ends[0]
        cached = r.computed[request]
        new = r.prompt[request] - cached
        share, more = new, True
        cost = attention_ns(s, cached, new)
        if blocks_of(cached + new, block) > memory or used + cost > s.quota_ns or new > tokens:
            more = False
            low, high = 0, min((new - 1) // block, memory - cached // block, tokens // block)
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
        tokens -= share
        used += cost
        count += 1
        if not more:
            break
    c.item_count[engine] = count
    return used


@compiled
def _copy_in(s: Settings, c: Cluster, engine: int, source: int, node: int, now: int, size: float) -> int:
    """From a node's DRAM, out of the CNIC of ``source``, into the HBM of ``engine``."""
    if size <= 0:
        return now
    end = max(cnic_out(s, c, source, now, size), reserve_dram(s, c, node, now, size))
    return max(end, cnic_in(s, c, engine, now, size))


@compiled
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


@compiled
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


@compiled
def make_runnable(s: Settings, c: Cluster, q: Queues, r: Requests, h: Heap, request: int, now: int) -> None:
    """Hits are in DRAM and the DE buffer is held."""
    engine = r.prefill_engine[request]
    append(q.runnable[engine], q.next_wait, request)
    try_forward(s, c, q, r, h, engine // s.unit_engines, now)


@compiled
def chunk_flushed(s: Settings, c: Cluster, q: Queues, r: Requests, h: Heap, request: int, now: int) -> None:
    """What earlier chunks computed is in the DE buffer: the next one goes first."""
    engine = r.prefill_engine[request]
    append_left(q.runnable[engine], q.next_wait, request)
    try_forward(s, c, q, r, h, engine // s.unit_engines, now)


@compiled
def _load_unit(s: Settings, c: Cluster, r: Requests, unit: int, now: int, fraction: float) -> int:
    end = now
    for engine in range(unit * s.unit_engines, (unit + 1) * s.unit_engines):
        end = max(end, _load(s, c, r, engine, now, fraction))
    return end


@compiled
def _flush_unit(s: Settings, c: Cluster, r: Requests, unit: int, now: int, fraction: float) -> None:
    for engine in range(unit * s.unit_engines, (unit + 1) * s.unit_engines):
        _flush(s, c, r, engine, now, fraction)


@compiled
def _pack_unit(s: Settings, c: Cluster, q: Queues, r: Requests, unit: int, now: int) -> float:
    """Pack every engine of the unit; the duration of the forward in ns, 0 when nothing can run."""
    count, new_tokens, slowest = 0, 0, 0.0
    window = min(now // s.window_ns, c.attention_window.shape[0] - 1)
    for engine in range(unit * s.unit_engines, (unit + 1) * s.unit_engines):
        attention = _pack(s, c, q, r, engine)
        c.attention_window[window, engine] += attention
        slowest = max(slowest, attention)
        count += c.item_count[engine]
        for k in range(c.item_count[engine]):
            new_tokens += c.item_new[engine, k]
            request = c.item_request[engine, k]
            if r.started[request] < 0:
                r.started[request] = now
            c.item_flush_ns[engine, k] = now
    if count == 0:
        return 0.0
    return s.prefill_base_ns + new_tokens / s.unit_engines * s.linear_ns + slowest


@compiled
def _restamp(s: Settings, c: Cluster, r: Requests, unit: int, now: int, loaded: int) -> None:
    """Without layerwise prefill the copy into HBM is part of reading: prefill starts when all layers are there."""
    for engine in range(unit * s.unit_engines, (unit + 1) * s.unit_engines):
        for k in range(c.item_count[engine]):
            if r.started[c.item_request[engine, k]] == now:
                r.started[c.item_request[engine, k]] = loaded


@compiled
def try_forward(s: Settings, c: Cluster, q: Queues, r: Requests, h: Heap, unit: int, now: int) -> None:
    """Start the next forward of an idle unit."""
    if c.busy[unit]:
        return
    whole = _pack_unit(s, c, q, r, unit, now)
    if whole == 0.0:
        return
    c.busy[unit] = 1
    if not s.moves_kv:
        push(h, now + int(whole), events.FORWARD_END, unit, 0)
    elif not s.layerwise:
        loaded = _load_unit(s, c, r, unit, now, 1.0)
        _restamp(s, c, r, unit, now, loaded)
        push(h, loaded + int(whole), events.FORWARD_END, unit, 0)
    elif s.steps == 1:
        _closed_form(s, c, r, h, unit, now, whole)
    else:
        c.step[unit] = 0
        c.step_ns[unit] = whole / s.steps
        for step in range(min(s.layers_in_flight, s.steps)):
            c.load_end[unit, step] = _load_unit(s, c, r, unit, now, 1.0 / s.steps)
        push(h, c.load_end[unit, 0] + int(c.step_ns[unit]), events.STEP_END, unit, 0)


@compiled
def _closed_form(s: Settings, c: Cluster, r: Requests, h: Heap, unit: int, now: int, whole: float) -> None:
    loaded = _load_unit(s, c, r, unit, now, 1.0)
    first_layer = int((loaded - now) / s.layers)
    end = max(now + first_layer + int(whole), loaded + int(whole / s.layers))
    _flush_unit(s, c, r, unit, now, 1.0)
    for engine in range(unit * s.unit_engines, (unit + 1) * s.unit_engines):
        for k in range(c.item_count[engine]):
            flushed = c.item_flush_ns[engine, k]
            last_layer = int((flushed - now) / s.layers)
            c.item_flush_ns[engine, k] = max(flushed, end + last_layer)
    push(h, end, events.FORWARD_END, unit, 0)


@compiled
def step_end(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, unit: int, now: int) -> None:
    """A layer step has been computed: flush it, load a further one, compute the next."""
    step = c.step[unit]
    _flush_unit(s, c, r, unit, now, 1.0 / s.steps)
    ring = s.layers_in_flight + 1
    if step + s.layers_in_flight < s.steps:
        c.load_end[unit, (step + s.layers_in_flight) % ring] = _load_unit(s, c, r, unit, now, 1.0 / s.steps)
    step += 1
    c.step[unit] = step
    if step == s.steps:
        _ended(s, c, q, r, a, h, unit, now)
        return
    begin = max(now, c.load_end[unit, step % ring])
    push(h, begin + int(c.step_ns[unit]), events.STEP_END, unit, 0)


@compiled
def forward_end(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, unit: int, now: int) -> None:
    """A forward whose layers were not simulated one by one has ended."""
    if s.moves_kv and not s.layerwise:
        _flush_unit(s, c, r, unit, now, 1.0)
    _ended(s, c, q, r, a, h, unit, now)


@compiled
def _ended(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, unit: int, now: int) -> None:
    first, after = unit * s.unit_engines, (unit + 1) * s.unit_engines
    for engine in range(first, after):
        for k in range(c.item_count[engine]):
            _item_ended(s, c, r, h, engine, k, now)
    c.busy[unit] = 0
    for node in range(first // s.gpus, (after - 1) // s.gpus + 1):
        pump_memory(s, c, q, r, a, h, node, now)
    try_forward(s, c, q, r, h, unit, now)


@compiled
def _item_ended(s: Settings, c: Cluster, r: Requests, h: Heap, engine: int, k: int, now: int) -> None:
    request = c.item_request[engine, k]
    flushed = max(now, c.item_flush_ns[engine, k])
    r.computed[request] += c.item_new[engine, k]
    if r.computed[request] < r.prompt[request]:
        push(h, flushed, events.CHUNK_FLUSHED, request, 0)
        return
    r.first[request] = now
    push(h, flushed, events.BUFFERED, request, 0)
    if r.side[request] == SIDE_PE:
        c.pages_free[engine // s.gpus] += blocks_of(r.hit[request], s.block_tokens)
