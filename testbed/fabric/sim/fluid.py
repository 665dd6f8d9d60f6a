"""Fluid flows over shared resources, in integer nanoseconds: what a transfer costs in the sim world.

Paper sections 4.2 and 5.1. A flow has a size and crosses all resources of its path at once (cut-through): a read
from storage crosses the server's SNIC, the node's SNIC and the node's DRAM; a local copy crosses the CNIC's read side,
its write side, PCIe and DRAM. Two regimes:

**Reserved** (every resource of the path is ``fifo``, and no shared flow is on any of them): the completion is known
at the start, at a cost of O(log n) for the heap and nothing later.

* the flow begins at ``max(now, free_at of each resource)`` and ends ``size / lowest rate`` later;
* each resource's ``free_at`` advances by its own service time: ``max(now, free_at) + size / own rate``.

So a resource is a queue that never idles while it holds work, and a wide resource (DRAM) is not held back by the
queue of a narrow one (SNIC). The resource *carries* the flow in its own slot, ``size / own rate`` long, which lies
no later than the flow's end.

**Shared** (any other path): the flow gets a rate by progressive filling (``disciplines.py``) over the flows that
are active, again whenever one starts or ends, within the connected part of the network that this touches. A ``fifo``
resource on such a path gives all it has to the flow that came first, what that one cannot use to the next, and
nothing until it is through with the slots reserved before. A flow on ``fifo`` resources only is shared too while a
shared flow is on one of them. Where a flow passes several queues of packets that are full, its rate is that of the
one that holds it back; in each of the others its last packet waits for what others have there. Where two queues of
packets are the narrowest of a path alike (CNICs without lanes), its window is in the one or the other, and others that
pass one of them push it to and fro (``_Stream.moved_bytes``).

Invariants: time, sizes, rates and progress are integers; bytes carried are exact once a flow has completed, and
linear in between; no resource carries more than rate x time in any window; tokens come back in order of (completion,
start). Times are rounded up to a whole nanosecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush

from testbed.errors import BugError
from testbed.fabric.sim.disciplines import Contender, Discipline, Lane, Port, Resource, fill
from testbed.units import NS_PER_S

__all__ = ["Discipline", "FluidNetwork", "Lane", "Resource"]

WINDOW_BYTES = 368 * 1024
"""What a stream has in a queue of packets at most: the payload that the send buffer of a live data socket holds."""
_NEARLY = 1000  # rates are rounded: a flow within a thousandth of its part of a queue is held back there
WORK_PER_BYTE = 8 * NS_PER_S
"""Work is bits x 1e9, so that rate (bits per second) x time (ns) is work, without a division."""


class _State(Port):
    """A resource with its accounts. ``slots``: (begin, end, size, lane) reserved and not over, in order.

    ``gates`` counts the shared flows here by what holds them back first (``_Route.gates``), ``reserved_gates`` are
    those that reserved flows come through, ``is_binding`` is whether it had a part in the rates that its flows have.
    """

    __slots__ = (
        "carried_work",
        "free_at_ns",
        "gates",
        "held_bytes",
        "is_binding",
        "reserved_bytes",
        "reserved_gates",
        "slots",
        "wake_at_ns",
    )

    def __init__(self, spec: Resource) -> None:
        super().__init__(spec)
        self.gates: dict[_State | None, int] = {}
        self.reserved_gates: dict[_State, None] = {}
        self.is_binding = True
        self.held_bytes = [0, 0]
        self.free_at_ns = 0
        self.wake_at_ns = 0
        self.slots: deque[tuple[int, int, int, Lane]] = deque()
        self.reserved_bytes = [0, 0]
        self.carried_work = [0, 0]

    @property
    def is_gated(self) -> bool:
        """Whether it is a queue of packets that no flow here can fill by itself."""
        return self.discipline is Discipline.PACKETS and None not in self.gates

    def load_bps(self, now_ns: int, joining: _State | None = None) -> int:
        """What its flows have in all; with a reserved flow through the gate ``joining`` if that is given."""
        load_bps = sum(flow.rate_bps for flow in self.flows.values()) + (joining.rate_bps if joining else 0)
        for gate in self.reserved_gates:
            if gate is not joining and gate.free_at_ns > now_ns:
                load_bps += gate.rate_bps
        return load_bps

    def wait_ns(self, flow: Contender) -> int:
        """How long the last packet of ``flow`` is in this queue behind what others have in it, if another resource
        holds ``flow`` back: those that this queue holds back keep their windows in it all the time."""
        if not self.is_binding or self.rule is not Discipline.PACKETS or not self.is_full:
            return 0
        held = max(self.flows.values(), key=lambda other: other.rate_bps / self.weight_of(other))
        weight = self.weight_of(held)
        if (flow.rate_bps + 1) * weight * _NEARLY >= held.rate_bps * self.weight_of(flow) * (_NEARLY - 1):
            return 0
        return -(-weight * WORK_PER_BYTE // held.rate_bps)

    def weight_of(self, flow: Contender) -> int:
        """What ``flow`` has here: the part of its window that is not in the other of its queues, and as much more as
        comes in while another does, which is no more than that one has."""
        part = flow.part_bytes(self) if isinstance(flow, _Flow) else flow.weight
        if part >= flow.weight:
            return flow.weight
        return min(flow.weight, part + max((f.weight for f in self.flows.values() if f is not flow), default=0)) or 1

    def set_usable(self, now_ns: int) -> int:
        """Compute what shared flows may have. Result: when that changes; 0: not by itself."""
        if self.free_at_ns > now_ns:
            self.usable_bps = 0
            return self.free_at_ns
        busy = [gate for gate in self.reserved_gates if gate.free_at_ns > now_ns]
        self.usable_bps = max(0, self.rate_bps - sum(gate.rate_bps for gate in busy))
        return min((gate.free_at_ns for gate in busy), default=0)

    def add_slot(self, now_ns: int, begin_ns: int, end_ns: int, size_bytes: int, lane: Lane) -> None:
        """Book a reserved flow."""
        slots = self.slots
        if slots and slots[0][1] <= now_ns:
            slots.popleft()
        slots.append((begin_ns, end_ns, size_bytes, lane))
        self.reserved_bytes[lane] += size_bytes

    def slot_bytes_left(self, now_ns: int, lane: Lane) -> int:
        """Bytes of ``lane`` that the reserved slots have yet to carry."""
        while self.slots and self.slots[0][1] <= now_ns:
            self.slots.popleft()
        left = 0
        for begin, end, size, of in self.slots:
            if of is lane and end > now_ns:  # slots of two gates are in no order
                left += size if begin >= now_ns else size - size * (now_ns - begin) // (end - begin)
        return left


class _Route:
    """A path looked up once: its resources, its lowest rate, what else is the same for all its flows.

    ``gates``: for each resource that the next one along the path always holds back, that one; only the ends of a path
    can have one, so that the next one has none. ``may_reserve``: the first resource is not shared between flows but by
    order; ``in_order``: all are queues, so that of the flows of a stream only the oldest can have a rate. ``pair``: the
    first and the last queue of packets, if two are equally narrow. ``arrivals``: by lane and source, when the last flow
    that had to wait once more is there.
    """

    __slots__ = ("arrivals", "gates", "in_order", "may_reserve", "pair", "rate_bps", "states")

    def __init__(self, states: tuple[_State, ...]) -> None:
        self.states = states
        self.arrivals: dict[tuple[Lane, str], int] = {}
        self.rate_bps = min(state.rate_bps for state in states)
        self.may_reserve = any(state.discipline is Discipline.FIFO for state in states)
        self.in_order = all(state.turns for state in states)
        queues = [state for state in states if state.discipline is Discipline.PACKETS]
        narrow = [state for state in queues if state.rate_bps == self.rate_bps]
        self.pair = (narrow[0], narrow[-1]) if len(narrow) > 1 else None
        self.gates = tuple(self._gate(i) for i in range(len(states)))
        for state, gate in zip(states, self.gates, strict=True):
            packets = gate is not None and state.discipline is Discipline.PACKETS and gate.discipline is Discipline.FIFO
            if state.discipline is not Discipline.FIFO and not packets:
                self.may_reserve = False

    def _gate(self, i: int) -> _State | None:
        if len(self.states) < 2 or i not in (0, len(self.states) - 1):
            return None
        beside = self.states[1 if i == 0 else i - 1]
        return beside if beside.rate_bps < self.states[i].rate_bps else None

    def is_free(self, now_ns: int) -> bool:
        """Whether a flow can be reserved now: no shared flow is in the way."""
        for state, gate in zip(self.states, self.gates, strict=True):
            if state.discipline is Discipline.FIFO:
                if state.flows:
                    return False
            elif state.load_bps(now_ns, gate) > state.rate_bps:
                return False
        return True


class _Flow(Contender):
    """A shared flow: its work left at ``since_ns``, its end at its present rate (0: none), and its token."""

    __slots__ = ("end_ns", "route", "since_ns", "size_bytes", "states", "stream", "token", "work")

    def __init__(
        self, order: int, route: _Route, lane: Lane, source: str, now_ns: int, size_bytes: int, token: object
    ) -> None:
        super().__init__(order, route.states, lane, source, min(size_bytes, WINDOW_BYTES))
        self.route = route
        self.states = route.states
        self.size_bytes = size_bytes
        self.work = size_bytes * WORK_PER_BYTE
        self.since_ns = now_ns
        self.end_ns = 0
        self.token = token
        self.stream: _Stream | None = None

    def part_bytes(self, state: _State) -> int:
        """What of its window is in the queue ``state``, while nobody else is."""
        pair, stream = self.route.pair, self.stream
        if pair is None or stream is None or state not in pair:
            return self.weight
        return stream.moved_bytes if state is pair[1] else self.weight - stream.moved_bytes

    def work_done(self, now_ns: int) -> int:
        """Work since ``since_ns``; the last nanosecond of a flow is rounded up, hence the bound."""
        return min(self.work, self.rate_bps * (now_ns - self.since_ns))

    def catch_up(self, now_ns: int) -> None:
        """Book the work done at the present rate."""
        work = self.work_done(now_ns)
        self.since_ns = now_ns
        self.work -= work
        for state in self.states:
            state.carried_work[self.lane] += work


class _Stream:
    """Flows of one path, lane and source over queues of packets: they are sent one after the other.

    ``weight_bytes`` is what it has in the queue that holds it back: all that it has been given to send since it was
    last idle, as far as its window reaches. ``moved_bytes`` of it are in the second of two equally narrow queues: what
    others bring through that one holds up as much of the stream there, for it keeps coming at its rate; what others
    bring through the first one lets as much drain from the second.
    """

    __slots__ = ("behind", "head", "left_bytes", "moved_bytes", "weight_bytes")

    def __init__(self) -> None:
        self.head: _Flow | None = None
        self.behind: deque[_Flow] = deque()
        self.left_bytes = 0
        self.moved_bytes = 0
        self.weight_bytes = 0

    def add(self, size_bytes: int) -> bool:
        """Count what it is given to send; whether its weight has grown."""
        self.left_bytes += size_bytes
        before, self.weight_bytes = self.weight_bytes, max(self.weight_bytes, min(self.left_bytes, WINDOW_BYTES))
        return self.weight_bytes > before


class FluidNetwork:
    """All resources of a cluster and the flows on them. Times passed in never go back, nor past a completion."""

    def __init__(self, resources: tuple[Resource, ...]) -> None:
        """Build from specs.

        Raises:
            BugError: two resources of one name.
        """
        self._states = {spec.name: _State(spec) for spec in resources}
        if len(self._states) != len(resources):
            raise BugError("two resources of a fluid network have the same name")
        self._rank = {name: rank for rank, name in enumerate(self._states)}
        self._routes: dict[tuple[str, ...], _Route] = {}
        self._now_ns = 0
        self._order = 0
        self._reserved: list[tuple[int, int, object]] = []
        self._shared: list[tuple[int, int, _Flow | _State]] = []
        self._pushes = 0
        self._flows: dict[int, _Flow] = {}
        self._streams: dict[tuple[_Route, Lane, str], _Stream] = {}
        self._touched: dict[str, _State] = {}

    def start(
        self, now_ns: int, size_bytes: int, path: tuple[str, ...], lane: Lane, token: object, source: str = ""
    ) -> None:
        """Begin a flow of ``size_bytes`` over all resources of ``path`` at once; ``token`` comes back at its end.

        ``source`` is the memory whose queue it is in where a KV lane has one for each. A flow of no bytes ends at once.

        Raises:
            BugError: an unknown resource, an empty path, one resource twice, a negative size, or a time that goes
                back or past a completion not yet taken.
        """
        if now_ns != self._now_ns:
            self._move_to(now_ns)
        order = self._order
        self._order = order + 1
        route = self._routes.get(path) or self._new_route(path)
        if size_bytes <= 0:
            if size_bytes < 0:
                raise BugError(f"a flow of {size_bytes} bytes over {path}")
            heappush(self._reserved, (now_ns, order, token))
        elif route.may_reserve and (not self._flows or route.is_free(now_ns)):
            self._reserve(order, route, lane, size_bytes, token)
        else:
            self._share(_Flow(order, route, lane, source, now_ns, size_bytes, token))

    def _reserve(self, order: int, route: _Route, lane: Lane, size_bytes: int, token: object) -> None:
        """Give a flow its slots. A queue of packets that is wider than its gate has the slot of the gate."""
        begin_ns = now_ns = self._now_ns
        work = size_bytes * WORK_PER_BYTE
        through: list[tuple[_State, _State]] = []
        for state, gate in zip(route.states, route.gates, strict=True):
            if gate is not None and state.discipline is Discipline.PACKETS:
                through.append((state, gate))
                continue
            free_ns = state.free_at_ns
            if free_ns < now_ns:
                free_ns = now_ns
            elif free_ns > begin_ns:
                begin_ns = free_ns
            state.free_at_ns = end_ns = free_ns - (-work // state.rate_bps)
            state.add_slot(now_ns, free_ns, end_ns, size_bytes, lane)
        for state, gate in through:
            state.reserved_gates[gate] = None
            state.add_slot(now_ns, *gate.slots[-1])
        end_ns = begin_ns - (-work // route.rate_bps)
        if route.arrivals:  # behind whatever still waits on this way
            end_ns = max(end_ns, *route.arrivals.values())
        heappush(self._reserved, (end_ns, order, token))

    def _share(self, flow: _Flow) -> None:
        """Let a flow compete, behind those of its stream where all of its path are queues."""
        if flow.route.in_order:
            key = (flow.route, flow.lane, flow.source)
            stream = self._streams.get(key)
            if stream is None:
                stream = self._streams[key] = _Stream()
            flow.stream = stream
            grown, head = stream.add(flow.size_bytes), stream.head
            if head is not None:
                stream.behind.append(flow)
                for state in flow.states:
                    state.held_bytes[flow.lane] += flow.size_bytes
                if grown:
                    head.weight = stream.weight_bytes
                    self._touched.update((state.name, state) for state in flow.states)
                return
            stream.head = flow
            flow.weight = stream.weight_bytes
        self._admit(flow)

    def _admit(self, flow: _Flow) -> None:
        self._flows[flow.order] = flow
        for state, gate in zip(flow.states, flow.route.gates, strict=True):
            state.flows[flow.order] = flow
            state.gates[gate] = state.gates.get(gate, 0) + 1
            self._touched[state.name] = state

    def next_ns(self) -> int | None:
        """Time of the next completion; ``None`` if no flow can end. It may also be a time at which rates change."""
        if self._touched:
            self._refill()
        shared = self._shared
        while shared and isinstance(flow := shared[0][2], _Flow) and flow.end_ns != shared[0][0]:
            heappop(shared)  # its rate has changed since
        if not self._reserved:
            return shared[0][0] if shared else None
        return min(self._reserved[0][0], shared[0][0]) if shared else self._reserved[0][0]

    def complete(self, now_ns: int) -> list[object]:
        """Tokens of the flows that end at ``now_ns``, in order of start. Empty where only rates change.

        Raises:
            BugError: a time that goes back or past a completion not yet taken.
        """
        if now_ns != self._now_ns:
            self._move_to(now_ns)
        if self._touched:
            self._refill()
        reserved = self._reserved
        if not self._shared:
            tokens = []
            while reserved and reserved[0][0] <= now_ns:
                tokens.append(heappop(reserved)[2])
            return tokens
        ended: list[tuple[int, object]] = []
        while reserved and reserved[0][0] <= now_ns:
            ended.append(heappop(reserved)[1:])
        while self._shared and self._shared[0][0] <= now_ns:
            at_ns, _, what = heappop(self._shared)
            if isinstance(what, _State):
                self._touched[what.name] = what
            elif what.end_ns == at_ns:
                arrives_ns = self._arrival_ns(what)
                self._end(what)
                if arrives_ns > now_ns:
                    heappush(reserved, (arrives_ns, what.order, what.token))
                else:
                    ended.append((what.order, what.token))
        ended.sort(key=lambda entry: entry[0])
        return [token for _, token in ended]

    def carried_bytes(self, name: str, now_ns: int, lane: Lane | None = None) -> int:
        """Bytes that resource ``name`` has carried until ``now_ns`` (of one lane, or of both), rounded down.

        Raises:
            BugError: an unknown resource, or a time that goes back or past a completion not yet taken.
        """
        if now_ns != self._now_ns:
            self._move_to(now_ns)
        state = self._state(name)
        if lane is None:
            return self.carried_bytes(name, now_ns, Lane.HIGH) + self.carried_bytes(name, now_ns, Lane.KV)
        work = state.carried_work[lane] + sum(flow.work_done(now_ns) for flow in self._on(state, lane))
        return state.reserved_bytes[lane] - state.slot_bytes_left(now_ns, lane) + work // WORK_PER_BYTE

    def backlog_bytes(self, name: str, now_ns: int, lane: Lane | None = None) -> int:
        """Bytes of started flows that resource ``name`` has yet to carry at ``now_ns``, rounded up.

        Raises:
            BugError: as ``carried_bytes``.
        """
        if now_ns != self._now_ns:
            self._move_to(now_ns)
        state = self._state(name)
        if lane is None:
            return self.backlog_bytes(name, now_ns, Lane.HIGH) + self.backlog_bytes(name, now_ns, Lane.KV)
        work = sum(flow.work - flow.work_done(now_ns) for flow in self._on(state, lane))
        return state.slot_bytes_left(now_ns, lane) + state.held_bytes[lane] - (-work // WORK_PER_BYTE)

    def _on(self, state: _State, lane: Lane) -> list[_Flow]:
        return [flow for flow in (self._flows[order] for order in state.flows) if flow.lane is lane]

    def _state(self, name: str) -> _State:
        state = self._states.get(name)
        if state is None:
            raise BugError(f"a fluid network knows no resource {name}")
        return state

    def _new_route(self, path: tuple[str, ...]) -> _Route:
        if not path or len(dict.fromkeys(path)) != len(path):
            raise BugError(f"a flow needs a path over one or more different resources, not {path}")
        route = self._routes[path] = _Route(tuple(self._state(name) for name in path))
        return route

    def _move_to(self, now_ns: int) -> None:
        """Advance the clock, once the rates until then are known."""
        if now_ns < self._now_ns:
            raise BugError(f"time goes back in a fluid network: from {self._now_ns} to {now_ns} ns")
        if self._touched:
            self._refill()
        if (self._reserved and self._reserved[0][0] < now_ns) or (self._shared and self._shared[0][0] < now_ns):
            upcoming = self.next_ns()
            if upcoming is not None and upcoming < now_ns:
                raise BugError(f"a fluid network is asked for {now_ns} ns, but a flow ended at {upcoming} ns")
        self._now_ns = now_ns

    def _arrival_ns(self, flow: _Flow) -> int:
        """When a flow whose last byte has been sent is through all queues, behind those of its connection."""
        arrives_ns = self._now_ns + sum(state.wait_ns(flow) for state in flow.states)
        arrivals, key = flow.route.arrivals, (flow.lane, flow.source)
        if arrives_ns > self._now_ns or key in arrivals:
            arrivals[key] = arrives_ns = max(arrives_ns, arrivals.get(key, 0))
        return arrives_ns

    def _end(self, flow: _Flow) -> None:
        flow.catch_up(self._now_ns)
        flow.end_ns = 0
        del self._flows[flow.order]
        for state, gate in zip(flow.states, flow.route.gates, strict=True):
            del state.flows[flow.order]
            self._touched[state.name] = state
            state.gates[gate] -= 1
            if not state.gates[gate]:
                del state.gates[gate]
            self._move_queues(state, flow)
        stream = flow.stream
        if stream is not None:
            stream.left_bytes -= flow.size_bytes
            stream.head = stream.behind.popleft() if stream.behind else None
            if stream.head is None:
                stream.weight_bytes = stream.moved_bytes = 0
            else:
                self._succeed(stream.head, stream.weight_bytes)

    def _move_queues(self, state: _State, passed: _Flow) -> None:
        """``passed`` has gone through the queue ``state``: streams that share one of their two with it move."""
        for other in state.flows.values():
            if not isinstance(other, _Flow) or other.stream is None or other.route.pair is None:
                continue
            first, last = (end in passed.states for end in other.route.pair)
            if first == last or state not in other.route.pair:
                continue
            moved = other.stream.moved_bytes + (passed.size_bytes if last else -passed.size_bytes)
            other.stream.moved_bytes = min(max(0, moved), other.weight)
            self._touched.update((each.name, each) for each in other.states)

    def _succeed(self, flow: _Flow, weight_bytes: int) -> None:
        """The flow before it in its stream is through."""
        for state in flow.states:
            state.held_bytes[flow.lane] -= flow.size_bytes
        flow.since_ns = self._now_ns
        flow.weight = weight_bytes
        self._admit(flow)

    def _refill(self) -> None:
        """Give new rates to every flow connected with a resource whose flows have changed.

        A memory or a PCIe link takes part only where its gates would fill it, and connects nothing otherwise.
        """
        now_ns = self._now_ns
        states: dict[str, _State] = {}
        flows: dict[int, _Flow] = {}
        self._reach(self._touched.values(), states, flows)
        self._touched.clear()
        for flow in flows.values():
            flow.catch_up(now_ns)
        for state in states.values():
            state.is_binding = not state.is_gated
        while True:
            ordered = self._fill(states, flows)
            over = [s for s in states.values() if not s.is_binding and s.load_bps(now_ns) > s.rate_bps]
            if not over:
                break
            before = set(flows)
            for state in over:
                state.is_binding = True
            self._reach(over, states, flows)
            for order in flows.keys() - before:
                flows[order].catch_up(now_ns)
        for flow in ordered:
            if not flow.work:  # it ends now, whatever its rate
                continue
            end_ns = now_ns - (-flow.work // flow.rate_bps) if flow.rate_bps else 0
            if end_ns != flow.end_ns:
                flow.end_ns = end_ns
                if end_ns:
                    self._push(end_ns, flow)

    def _reach(self, begin: Iterable[_State], states: dict[str, _State], flows: dict[int, _Flow]) -> None:
        """Add what is connected with ``begin``."""
        queue = list(begin)
        states.update((state.name, state) for state in queue)
        while queue:
            for order in queue.pop().flows:
                if order in flows:
                    continue
                flow = flows[order] = self._flows[order]
                for state in flow.states:
                    if state.name not in states:
                        states[state.name] = state
                        if state.is_binding:
                            queue.append(state)

    def _fill(self, states: dict[str, _State], flows: dict[int, _Flow]) -> list[_Flow]:
        """Rates of ``flows`` over those of ``states`` that bind. Result: the flows in order of start."""
        ports = sorted((s for s in states.values() if s.is_binding and s.flows), key=lambda s: self._rank[s.name])
        for state in ports:
            changes_ns = state.set_usable(self._now_ns)
            if changes_ns and state.wake_at_ns != changes_ns:
                state.wake_at_ns = changes_ns
                self._push(changes_ns, state)
        ordered = [flows[order] for order in sorted(flows)]
        for flow in ordered:
            flow.path = tuple(state for state in flow.states if state.is_binding)
        fill(ports, ordered)
        return ordered

    def _push(self, at_ns: int, what: _Flow | _State) -> None:
        self._pushes += 1
        heappush(self._shared, (at_ns, self._pushes, what))
