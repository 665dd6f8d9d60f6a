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
shared flow is on one of them.

Invariants: time, sizes, rates and progress are integers; bytes carried are exact once a flow has completed, and
linear in between; no resource carries more than rate x time in any window; tokens come back in order of (completion,
start). Times are rounded up to a whole nanosecond.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from testbed.errors import BugError
from testbed.fabric.sim.disciplines import Contender, Discipline, Lane, Port, Resource, fill
from testbed.units import NS_PER_S

__all__ = ["Discipline", "FluidNetwork", "Lane", "Resource"]

WORK_PER_BYTE = 8 * NS_PER_S
"""Work is bits x 1e9, so that rate (bits per second) x time (ns) is work, without a division."""


class _State(Port):
    """A resource with its accounts. ``slots``: (begin, end, size, lane) reserved and not over, in order."""

    __slots__ = ("carried_work", "free_at_ns", "reserved_bytes", "slots", "wake_at_ns")

    def __init__(self, spec: Resource) -> None:
        super().__init__(spec)
        self.free_at_ns = 0
        self.wake_at_ns = 0
        self.slots: deque[tuple[int, int, int, Lane]] = deque()
        self.reserved_bytes = [0, 0]
        self.carried_work = [0, 0]

    def slot_bytes_left(self, now_ns: int, lane: Lane) -> int:
        """Bytes of ``lane`` that the reserved slots have yet to carry."""
        while self.slots and self.slots[0][1] <= now_ns:
            self.slots.popleft()
        left = 0
        for begin, end, size, of in self.slots:
            if of is lane:
                left += size if begin >= now_ns else size - size * (now_ns - begin) // (end - begin)
        return left


class _Route:
    """A path looked up once: its resources, whether all are fifo, its lowest rate."""

    __slots__ = ("all_fifo", "rate_bps", "states")

    def __init__(self, states: tuple[_State, ...]) -> None:
        self.states = states
        self.all_fifo = all(state.discipline is Discipline.FIFO for state in states)
        self.rate_bps = min(state.rate_bps for state in states)


class _Flow(Contender):
    """A shared flow: its work left at ``since_ns``, its end at its present rate (0: none), and its token."""

    __slots__ = ("end_ns", "since_ns", "states", "token", "work")

    def __init__(self, order: int, route: _Route, lane: Lane, now_ns: int, size_bytes: int, token: object) -> None:
        super().__init__(order, route.states, lane)
        self.states = route.states
        self.work = size_bytes * WORK_PER_BYTE
        self.since_ns = now_ns
        self.end_ns = 0
        self.token = token

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
        self._touched: dict[str, _State] = {}

    def start(self, now_ns: int, size_bytes: int, path: tuple[str, ...], lane: Lane, token: object) -> None:
        """Begin a flow of ``size_bytes`` over all resources of ``path`` at once; ``token`` comes back at its end.

        A flow of no bytes ends at once.

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
        elif route.all_fifo and not (self._flows and any(state.flows for state in route.states)):
            work = size_bytes * WORK_PER_BYTE
            begin_ns = now_ns
            for state in route.states:
                free_ns = state.free_at_ns
                if free_ns < now_ns:
                    free_ns = now_ns
                elif free_ns > begin_ns:
                    begin_ns = free_ns
                slots = state.slots
                if slots and slots[0][1] <= now_ns:
                    slots.popleft()
                state.free_at_ns = end_ns = free_ns - (-work // state.rate_bps)
                slots.append((free_ns, end_ns, size_bytes, lane))
                state.reserved_bytes[lane] += size_bytes
            heappush(self._reserved, (begin_ns - (-work // route.rate_bps), order, token))
        else:
            flow = _Flow(order, route, lane, now_ns, size_bytes, token)
            self._flows[order] = flow
            for state in route.states:
                state.flows[order] = flow
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
                self._end(what)
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
        return state.slot_bytes_left(now_ns, lane) - (-work // WORK_PER_BYTE)

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

    def _end(self, flow: _Flow) -> None:
        flow.catch_up(self._now_ns)
        flow.end_ns = 0
        del self._flows[flow.order]
        for state in flow.states:
            del state.flows[flow.order]
            self._touched[state.name] = state

    def _refill(self) -> None:
        """Give new rates to every flow connected with a resource whose flows have changed."""
        states = dict(self._touched)
        self._touched.clear()
        flows: dict[int, _Flow] = {}
        queue = list(states.values())
        while queue:
            for order in queue.pop().flows:
                if order not in flows:
                    flow = flows[order] = self._flows[order]
                    fresh = [state for state in flow.states if state.name not in states]
                    states.update((state.name, state) for state in fresh)
                    queue.extend(fresh)
        ports = sorted(states.values(), key=lambda state: self._rank[state.name])
        for state in ports:
            state.usable_bps = state.rate_bps if state.free_at_ns <= self._now_ns else 0
            if not state.usable_bps and state.flows and state.wake_at_ns != state.free_at_ns:
                state.wake_at_ns = state.free_at_ns
                self._push(state.free_at_ns, state)
        ordered = [flows[order] for order in sorted(flows)]
        for flow in ordered:
            flow.catch_up(self._now_ns)
        fill(ports, ordered)
        for flow in ordered:
            if not flow.work:  # it ends now, whatever its rate
                continue
            end_ns = self._now_ns - (-flow.work // flow.rate_bps) if flow.rate_bps else 0
            if end_ns != flow.end_ns:
                flow.end_ns = end_ns
                if end_ns:
                    self._push(end_ns, flow)

    def _push(self, at_ns: int, what: _Flow | _State) -> None:
        self._pushes += 1
        heappush(self._shared, (at_ns, self._pushes, what))
