"""Decode engines in compiled form (paper 4.1): HBM after prefill, one copy in, continuous batching, write-back.

All sequences of a DE advance together, one token per step, so between two changes of the batch time passes in whole
steps of one length: only the steps at which a sequence joins or leaves are events.
"""

from __future__ import annotations

from testbed.flowsim import events
from testbed.flowsim.compiled import compiled
from testbed.flowsim.heap import Heap, push
from testbed.flowsim.queues import append, drop_head
from testbed.flowsim.selection import hbm_need, submit
from testbed.flowsim.state import NONE, Agents, Cluster, Queues, Requests, Settings
from testbed.flowsim.transfers import (
    blocks_of,
    cnic_in,
    cnic_out,
    pump_memory,
    reserve_dram,
    tier_keep,
    write_back,
)


@compiled
def buffered(s: Settings, c: Cluster, q: Queues, r: Requests, h: Heap, request: int, now: int) -> None:
    """The prompt's KV is in the DE buffer: persist its new blocks, wait for HBM."""
    engine = r.decode_engine[request]
    c.pe_tokens[r.prefill_engine[request]] -= r.prompt[request]
    r.durable[request] = now
    if s.moves_kv:
        new_blocks = r.prompt[request] // s.block_tokens - r.hit[request] // s.block_tokens
        write_back(s, c, r, request, new_blocks, now)
    if r.generate[request] <= 1:
        r.second[request] = r.last[request] = r.first[request]
        if s.moves_kv:
            node = s.prefill_nodes + engine // s.gpus
            c.pages_free[node] += blocks_of(r.prompt[request], s.block_tokens)
            push(h, now, events.PUMP_MEMORY, node, 0)
        push(h, r.durable[request], events.COMPLETE, request, 0)
        return
    append(q.hbm[engine], q.next_wait, request)
    pump_hbm(s, c, q, r, h, engine, now)


@compiled
def pump_hbm(s: Settings, c: Cluster, q: Queues, r: Requests, h: Heap, engine: int, now: int) -> None:
    """HBM in FIFO order, then the prompt's Full Blocks through the CNIC (PE path 8-9, DE path 6-7)."""
    ends = q.hbm[engine]
    while ends[0] != NONE:
        request = ends[0]
        need = hbm_need(s, r, request)
        if c.hbm_free[engine] < need:
            return
        c.hbm_free[engine] -= need
        drop_head(ends, q.next_wait)
        landed = now
        if s.moves_kv:
            size = blocks_of(r.prompt[request], s.block_tokens) * s.block_tokens * s.kv_bytes
            cnic = len(c.pe_tokens) + engine
            landed = max(cnic_out(s, c, cnic, now, size), cnic_in(s, c, cnic, now, size))
            landed = max(landed, reserve_dram(s, c, s.prefill_nodes + engine // s.gpus, now, size)) + s.message_ns
        push(h, landed, events.JOIN, request, 0)


@compiled
def join(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, request: int, now: int) -> None:
    """KV is in HBM: the DE buffer is free, the sequence joins at the next step."""
    engine = r.decode_engine[request]
    append(q.joining[engine], q.next_wait, request)
    _schedule(s, c, q, h, engine, now)
    if s.moves_kv:
        node = s.prefill_nodes + engine // s.gpus
        c.pages_free[node] += blocks_of(r.prompt[request], s.block_tokens)
        pump_memory(s, c, q, r, a, h, node, now)


@compiled
def _schedule(s: Settings, c: Cluster, q: Queues, h: Heap, engine: int, now: int) -> None:
    """The next step boundary at which the batch changes."""
    if c.active[engine] == 0:
        if q.joining[engine, 0] == NONE:
            return
        c.boundary_ns[engine] = now
        at = now
    else:
        steps = c.leave_step[engine, 0] - c.decode_steps[engine]
        if q.joining[engine, 0] != NONE:
            passed = (now - c.boundary_ns[engine]) / c.tau_ns[engine]
            up = int(passed)
            steps = min(steps, up if up == passed else up + 1)
        at = c.boundary_ns[engine] + int(steps * c.tau_ns[engine])
    c.stamp[engine] += 1
    push(h, max(at, now), events.BOUNDARY, engine, c.stamp[engine])


@compiled
def boundary(s: Settings, c: Cluster, q: Queues, r: Requests, h: Heap, engine: int, now: int) -> None:
    """A step ends: who has all tokens leaves, who waits joins."""
    if c.active[engine] > 0:
        steps = round((now - c.boundary_ns[engine]) / c.tau_ns[engine])
        c.decode_steps[engine] += steps
        c.contexts[engine] += steps * c.active[engine]
        c.boundary_ns[engine] = now
    while c.leave_size[engine] > 0 and c.leave_step[engine, 0] <= c.decode_steps[engine]:
        _leave(s, c, r, h, engine, now)
    first = q.joining[engine, 0]
    while q.joining[engine, 0] != NONE:
        request = q.joining[engine, 0]
        _push_leave(c, engine, c.decode_steps[engine] + r.generate[request] - 1, request)
        c.active[engine] += 1
        c.contexts[engine] += r.prompt[request] + 1
        q.joining[engine, 0] = q.next_wait[request]
    q.joining[engine, 1] = NONE
    batch = c.active[engine]
    if batch == 0:
        return
    c.tau_ns[engine] = s.decode_base_ns + s.decode_sequence_ns * batch + s.decode_context_ns * c.contexts[engine]
    while first != NONE:
        r.second[first] = now + int(c.tau_ns[engine])
        first = q.next_wait[first]
    _schedule(s, c, q, h, engine, now)


@compiled
def _push_leave(c: Cluster, engine: int, step: int, request: int) -> None:
    steps, requests, at = c.leave_step[engine], c.leave_request[engine], c.leave_size[engine]
    if at >= len(steps):
        raise IndexError("more sequences decode on one engine than there are agents")
    c.leave_size[engine] += 1
    while at > 0 and steps[(at - 1) >> 1] > step:
        steps[at], requests[at] = steps[(at - 1) >> 1], requests[(at - 1) >> 1]
        at = (at - 1) >> 1
    steps[at], requests[at] = step, request


@compiled
def _leave(s: Settings, c: Cluster, r: Requests, h: Heap, engine: int, now: int) -> None:
    """The first of the leave heap has its last token; its generated blocks are copied out and persisted."""
    steps, requests = c.leave_step[engine], c.leave_request[engine]
    request = requests[0]
    c.leave_size[engine] -= 1
    size = c.leave_size[engine]
    step, moved = steps[size], requests[size]
    at = 0
    while True:
        least = 2 * at + 1
        if least >= size:
            break
        if least + 1 < size and steps[least + 1] < steps[least]:
            least += 1
        if steps[least] >= step:
            break
        steps[at], requests[at] = steps[least], requests[least]
        at = least
    steps[at], requests[at] = step, moved
    total = r.prompt[request] + r.generate[request]
    c.active[engine] -= 1
    c.contexts[engine] -= total
    r.last[request] = now
    if s.moves_kv:
        blocks = (total - 1) // s.block_tokens - r.prompt[request] // s.block_tokens
        copied = now
        if blocks > 0:
            cnic, copy = len(c.pe_tokens) + engine, blocks * s.block_tokens * s.kv_bytes
            copied = max(cnic_out(s, c, cnic, now, copy), cnic_in(s, c, cnic, now, copy))
        write_back(s, c, r, request, blocks, copied)
    push(h, max(now, r.durable[request]), events.COMPLETE, request, 0)


@compiled
def complete(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, request: int, now: int) -> None:
    """A round is done: its memory is free, its blocks are hits, the agent's next round follows."""
    engine, agent = r.decode_engine[request], r.agent[request]
    total = r.prompt[request] + r.generate[request]
    r.completed[request] = now
    c.de_tokens[engine] -= total
    c.de_sequences[engine] -= 1
    c.group_tokens[engine // s.gpus] -= total
    c.hbm_unplanned[engine] += hbm_need(s, r, request)
    a.context[agent] = total
    a.stored_blocks[agent] = (total - 1) // s.block_tokens
    tier_keep(s, a, agent, total * s.kv_bytes)
    if r.generate[request] > 1:
        c.hbm_free[engine] += hbm_need(s, r, request)
        pump_hbm(s, c, q, r, h, engine, now)
    a.turn[agent] += 1
    if a.offset[agent] + a.turn[agent] == a.offset[agent + 1]:
        c.counts[0] -= 1
    elif s.tool_delay_ns > 0:
        push(h, now + s.tool_delay_ns, events.ARRIVE, agent, 0)
    else:
        submit(s, c, q, r, a, h, agent, now)
