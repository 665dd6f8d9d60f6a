"""The event loop of the flow simulation."""

from __future__ import annotations

from testbed.flowsim import events
from testbed.flowsim.compiled import compiled
from testbed.flowsim.decode import boundary, buffered, complete, join
from testbed.flowsim.heap import Heap, drop_first
from testbed.flowsim.prefill import chunk_flushed, forward_end, make_runnable, step_end
from testbed.flowsim.selection import submit, tick
from testbed.flowsim.state import SIDE_DE, SIDE_PE, Agents, Cluster, Queues, Requests, Settings
from testbed.flowsim.transfers import pump_memory


@compiled
def _read_done(s: Settings, c: Cluster, q: Queues, r: Requests, h: Heap, request: int, now: int) -> None:
    if r.side[request] == SIDE_PE:
        c.read_queue[r.prefill_engine[request] // s.gpus] -= r.hit[request]
    elif r.side[request] == SIDE_DE:
        c.read_queue[s.prefill_nodes + r.decode_engine[request] // s.gpus] -= r.hit[request]
    r.computed[request] = r.hit[request]
    make_runnable(s, c, q, r, h, request, now)


@compiled
def run(s: Settings, c: Cluster, q: Queues, r: Requests, a: Agents, h: Heap, limit: int) -> int:
    """Process events until all agents are done, the horizon, or ``limit`` events; how many were processed."""
    done = 0
    while h.size[0] > 0 and c.counts[0] > 0 and done < limit:
        now, kind, arg, stamp = h.time_ns[0], h.kind[0], h.arg[0], h.stamp[0]
        if now > s.horizon_ns:
            c.counts[0] = 0
            break
        drop_first(h)
        done += 1
        if kind == events.STEP_END:
            step_end(s, c, q, r, a, h, arg, now)
        elif kind == events.BOUNDARY:
            if stamp == c.stamp[arg]:
                boundary(s, c, q, r, h, arg, now)
        elif kind == events.TICK:
            tick(s, c, q, r, a, h, now)
        elif kind == events.READ_DONE:
            _read_done(s, c, q, r, h, arg, now)
        elif kind == events.PUMP_MEMORY:
            pump_memory(s, c, q, r, a, h, arg, now)
        elif kind == events.FORWARD_END:
            forward_end(s, c, q, r, a, h, arg, now)
        elif kind == events.BUFFERED:
            buffered(s, c, q, r, h, arg, now)
        elif kind == events.JOIN:
            join(s, c, q, r, a, h, arg, now)
        elif kind == events.COMPLETE:
            complete(s, c, q, r, a, h, arg, now)
        elif kind == events.CHUNK_FLUSHED:
            chunk_flushed(s, c, q, r, h, arg, now)
        else:
            submit(s, c, q, r, a, h, arg, now)
    return done
