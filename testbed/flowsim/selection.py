"""Scheduling in compiled form: what ``testbed.protocol.scheduling`` decides, over arrays (paper 8.2-8.4).

A property test compares the two on random queues and loads. All groups pull at the same instants; what a group is
assigned counts at once.
"""

from __future__ import annotations

from testbed.flowsim import events
from testbed.flowsim.compiled import compiled, inlined
from testbed.flowsim.heap import Heap, push
from testbed.flowsim.queues import append, drop_head
from testbed.flowsim.state import (
    I64,
    NONE,
    SIDE_DE,
    SIDE_NONE,
    SIDE_PE,
    Agents,
    Cluster,
    Queues,
    Requests,
    Settings,
)
from testbed.flowsim.transfers import blocks_of

SIDE_TURN, PE_TURN, DE_TURN, TICKING = 1, 2, 3, 4  # in Cluster.counts
_PE_CHOSEN, _DE_CHOSEN, _BOTH = 1, 2, 3


@compiled
def choose_prefill(tokens: I64, read_queue: I64, gpus: int, alpha_tokens: int, beta_tokens: int) -> int:
    """Algorithm 1 for the head of the queue: the engine, or NONE when all are overloaded."""
    best, best_short = NONE, False
    for engine in range(len(tokens)):
        if tokens[engine] > beta_tokens:
            continue
        short = read_queue[engine // gpus] <= alpha_tokens
        better = best == NONE or (short and not best_short)
        if better or (short == best_short and tokens[engine] < tokens[best]):
            best, best_short = engine, short
    return best


@compiled
def choose_decode(tokens: I64, sequences: I64, free: I64, need: int, total_tokens: int, z: float) -> int:
    """The second level for the head of a private queue: an index into the group's engines, or NONE."""
    light, roomy = NONE, NONE
    for engine in range(len(tokens)):
        if free[engine] < need:
            continue
        if roomy == NONE or tokens[engine] < tokens[roomy]:
            roomy = engine
        if tokens[engine] + total_tokens <= z and (light == NONE or sequences[engine] < sequences[light]):
            light = engine
    return light if light != NONE else roomy


@inlined
def _total(r: Requests, request: int) -> int:
    return int(r.prompt[request] + r.generate[request])


@inlined
def hbm_need(s: Settings, r: Requests, request: int) -> int:
    """Pages of HBM that a sequence takes in the end."""
    return blocks_of(_total(r, request) - 1, s.block_tokens)


@compiled
def submit(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, agent: int, now: int) -> None:
    """An agent sends its next round; hits are whole blocks of its own past that are durable."""
    request = a.offset[agent] + a.turn[agent]
    prompt = a.context[agent] + r.append[request]
    r.prompt[request] = prompt
    reusable = min(a.stored_blocks[agent], (prompt - 1) // s.block_tokens)
    r.hit[request] = int(reusable * (1.0 - s.recompute_fraction)) * s.block_tokens
    r.submitted[request] = now
    append(q.prefill, q.next_prefill, request)
    append(q.decode, q.next_decode, request)
    if not s.balanced:
        r.prefill_engine[request] = c.counts[PE_TURN] % len(c.pe_tokens)
        r.decode_engine[request] = c.counts[DE_TURN] % len(c.de_tokens)
        c.counts[PE_TURN] += 1
        c.counts[DE_TURN] += 1
    request_tick(s, c, h, now)


@compiled
def request_tick(s: Settings, c: Cluster, h: Heap, now: int) -> None:
    """Groups pull at multiples of the fetch interval; an interval in which nobody waits costs nothing."""
    if c.counts[TICKING] == 0:
        c.counts[TICKING] = 1
        push(h, (now // s.fetch_ns + 1) * s.fetch_ns, events.TICK, 0, 0)


@compiled
def tick(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, now: int) -> None:
    """Every group fetches: PEs from the global queue, DEs through their groups' private queues."""
    c.counts[TICKING] = 0
    _fetch_prefill(s, c, q, r, a, h, now)
    _spread(s, c, q, r)
    for group in range(s.decode_nodes):
        if q.private[group, 0] != NONE:
            _fetch_decode(s, c, q, r, a, h, group, now)
    waiting = q.prefill[0] != NONE
    for group in range(s.decode_nodes):
        waiting = waiting or q.private[group, 0] != NONE
    if waiting:
        request_tick(s, c, h, now)


@compiled
def _fetch_prefill(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, now: int) -> None:
    while q.prefill[0] != NONE:
        request = q.prefill[0]
        if s.balanced:
            engine = choose_prefill(c.pe_tokens, c.read_queue, s.gpus, s.alpha_tokens, s.beta_tokens)
            if engine == NONE:
                return
            r.prefill_engine[request] = engine
        drop_head(q.prefill, q.next_prefill)
        c.pe_tokens[r.prefill_engine[request]] += r.prompt[request]
        _chosen(s, c, q, r, a, h, request, _PE_CHOSEN, now)


@compiled
def _spread(s: Settings, c: Cluster, q: Queues, r: Requests) -> None:
    """First level: all of the global decode queue, each request to the group with the fewest tokens."""
    while q.decode[0] != NONE:
        request = q.decode[0]
        drop_head(q.decode, q.next_decode)
        if s.balanced:
            group = 0
            for other in range(1, s.decode_nodes):
                if c.group_tokens[other] < c.group_tokens[group]:
                    group = other
        else:
            group = r.decode_engine[request] // s.gpus
        c.group_tokens[group] += _total(r, request)
        append(q.private[group], q.next_decode, request)


@compiled
def _fetch_decode(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, group: int, now: int) -> None:
    first, after = group * s.gpus, (group + 1) * s.gpus
    tokens, sequences = c.de_tokens[first:after], c.de_sequences[first:after]
    free = c.hbm_unplanned[first:after]
    z = s.z_factor * (_fitting(s, q, r, group, free.sum()) + tokens.sum()) / s.gpus
    while q.private[group, 0] != NONE:
        request = q.private[group, 0]
        if s.balanced:
            need = hbm_need(s, r, request)
            engine = choose_decode(tokens, sequences, free, need, _total(r, request), z)
            if engine == NONE:
                return
            r.decode_engine[request] = first + engine
        engine = r.decode_engine[request] - first
        drop_head(q.private[group], q.next_decode)
        tokens[engine] += _total(r, request)
        sequences[engine] += 1
        free[engine] -= hbm_need(s, r, request)
        _chosen(s, c, q, r, a, h, request, _DE_CHOSEN, now)


@compiled
def _fitting(s: Settings, q: Queues, r: Requests, group: int, free: int) -> int:
    """Tokens of the longest prefix of a private queue that fits the group's free HBM, fragmentation ignored."""
    fitting, request = 0, q.private[group, 0]
    while request != NONE and hbm_need(s, r, request) <= free:
        free -= hbm_need(s, r, request)
        fitting += _total(r, request)
        request = q.next_decode[request]
    return fitting


@compiled
def _chosen(
    s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, request: int, half: int, now: int
) -> None:
    """One engine is known; with both the request is assigned and its read side decided."""
    r.chosen[request] |= half
    if r.chosen[request] != _BOTH:
        return
    r.scheduled[request] = now
    prefill_node = r.prefill_engine[request] // s.gpus
    decode_node = s.prefill_nodes + r.decode_engine[request] // s.gpus
    side = SIDE_NONE
    if r.hit[request] > 0 and s.moves_kv:
        side = SIDE_PE
        if s.side_policy == 1:
            c.counts[SIDE_TURN] += 1
            side = SIDE_PE if c.counts[SIDE_TURN] % 2 == 1 else SIDE_DE
        elif s.side_policy == 2 and c.read_queue[decode_node] < c.read_queue[prefill_node]:
            side = SIDE_DE
        c.read_queue[prefill_node if side == SIDE_PE else decode_node] += r.hit[request]
    r.side[request] = side
    if s.moves_kv:
        append(q.memory[decode_node], q.next_wait, request)
        push(h, now + s.message_ns + s.allocation_overhead_ns, events.PUMP_MEMORY, decode_node, 0)
    else:
        r.allocated[request] = now
        push(h, now + s.message_ns, events.READ_DONE, request, 0)
