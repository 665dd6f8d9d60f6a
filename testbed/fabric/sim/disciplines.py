"""How a resource divides its rate between the flows that cross it: the named disciplines, and the filling of rates.

Paper sections 4.2 (the resources: SNIC, CNIC read and write, PCIe, DRAM, storage) and 5.1 (lanes). A resource is
one direction of a link, or a memory's bandwidth; it has a rate and one of six disciplines:

* ``fifo``: all of the rate to the flow that came first; what that flow cannot use goes to the next.
* ``fair``: equal shares (max-min: what a flow cannot use is shared among the others).
* ``packets``: one queue of packets, shared in proportion to what each flow has in it (its ``weight``).
* ``strict``: equal shares within the high lane; the KV lane shares what the high lane leaves.
* ``weighted``: the lanes have weights, flows of a lane share equally, an idle lane's part is borrowed (HTB 99:1).
* ``infiniband``: ``weighted`` with the long-run shares of the InfiniBand arbiter's tables (``arbiter.py``).

With ``turns`` a resource with lanes is the live world's CNIC: the high lane is one queue of packets, the KV lane one
for each source memory, served in turns (max-min between the queues, by weight within each).

Rates over several resources come from progressive filling: a resource *settles* when it is the narrowest one of
every flow that still waits for a rate there (of the lane that is next, where lanes are strict; of the first flow,
where it is fifo); the rates it offers become final and the rest is offered again. With ``fair`` everywhere this is
the usual max-min allocation. Whom to serve first is a question only where something is full, so all resources are
filled as if fair to begin with, and again with the disciplines of those that this fills, until no others are.

Where two resources wait for each other (possible only if disciplines are mixed on one path, say lanes at the CNIC and
fair shares at a PCIe link no narrower, or if a flow's part of its queue differs) lanes go before queues, queues before
shares, and a lane's weight before a flow's equal part; what that leaves unused is filled up fairly at the end.

Invariants: rates are integers in bits per second, no resource is given out beyond its rate, and every flow crosses
at least one resource that has less than one bit per second left for each flow on it. Ports and flows are visited in
order of name and of start, so the result depends on nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.errors import ConfigError
from testbed.fabric.arbiter import KV_VL, MODEL_VLS, PAPER_TABLES, ArbiterTables


class Lane(enum.IntEnum):
    """The two virtual lanes of paper 5.1: model traffic (HIGH), and everything else, KV included."""

    HIGH = 0
    KV = 1


class Discipline(enum.Enum):
    """How a resource divides its rate, see the module's text."""

    FIFO = "fifo"
    FAIR = "fair"
    PACKETS = "packets"
    STRICT = "strict"
    WEIGHTED = "weighted"
    INFINIBAND = "infiniband"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """What flows share: ``name`` ("pe0.snic"), ``rate_bps`` in bits per second, and how it is divided.

    ``turns``: within the KV lane turns between source memories, and within a queue by what flows have in it.
    ``high_weight`` and ``kv_weight`` count for ``weighted`` only: the lanes' shares while both want more. The other
    three count for ``infiniband`` only: the arbiter's tables, the VLs that model traffic is on, and the VL of KV.
    """

    name: str
    rate_bps: int
    discipline: Discipline
    turns: bool = False
    high_weight: int = 99
    kv_weight: int = 1
    tables: ArbiterTables = PAPER_TABLES
    high_vls: tuple[int, ...] = MODEL_VLS
    kv_vl: int = KV_VL

    def __post_init__(self) -> None:
        """Refuse what cannot carry anything.

        Raises:
            ConfigError: a rate below 1 bit/s, a negative weight, or no weight at all, in numbers or in the tables.
        """
        if self.rate_bps < 1:
            raise ConfigError(f"resource {self.name}: rate_bps is {self.rate_bps}, but it must be at least 1.")
        if self.high_weight < 0 or self.kv_weight < 0 or not self.high_weight + self.kv_weight:
            raise ConfigError(
                f"resource {self.name}: lane weights {self.high_weight}:{self.kv_weight} divide nothing; "
                "give two numbers of which none is negative and one is above 0."
            )
        if self.discipline is Discipline.INFINIBAND:
            self.tables.lane_weights(self.high_vls, self.kv_vl)

    @property
    def lane_weights(self) -> tuple[int, int]:
        """Weights of the high and the KV lane, by number or by the arbiter's tables."""
        if self.discipline is Discipline.INFINIBAND:
            return self.tables.lane_weights(self.high_vls, self.kv_vl)
        return self.high_weight, self.kv_weight


UNKNOWN = -1
"""An offer, or a rate, that depends on one not yet final."""


class Port:
    """A resource while it is being filled, with the flows that compete for it now (in order of start).

    ``rule`` is its discipline where it is known to be full, else ``fair``.
    """

    __slots__ = (
        "discipline",
        "flows",
        "high_share",
        "name",
        "offer",
        "queues",
        "rate_bps",
        "rule",
        "turns",
        "unrated",
        "usable_bps",
        "used_bps",
    )

    def __init__(self, spec: Resource) -> None:
        self.name = spec.name
        self.rate_bps = spec.rate_bps
        self.discipline = spec.discipline
        self.turns = spec.turns or spec.discipline is Discipline.PACKETS
        self.rule = Discipline.FAIR
        high_weight, kv_weight = spec.lane_weights
        self.high_share = spec.rate_bps * high_weight // (high_weight + kv_weight)
        self.flows: dict[int, Contender] = {}
        self.usable_bps = spec.rate_bps
        self.used_bps = [0, 0]
        self.unrated = [0, 0]
        self.offer = [UNKNOWN, UNKNOWN]
        self.queues: dict[tuple[int, str], _Queue] = {}

    @property
    def left_bps(self) -> int:
        """What is not given out."""
        return self.usable_bps - self.used_bps[0] - self.used_bps[1]

    @property
    def is_full(self) -> bool:
        """Whether less than one bit per second is left for each flow."""
        return self.left_bps < len(self.flows)

    def first(self) -> Contender | None:
        """The earliest flow without a final rate."""
        return next((flow for flow in self.flows.values() if flow.rate_bps == UNKNOWN), None)

    def make_offer(self) -> None:
        """Compute what each flow would get here, given the rates that are final."""
        if not (self.unrated[0] or self.unrated[1]):
            self.offer = [UNKNOWN, UNKNOWN]
        elif self.turns and self.rule is not Discipline.FAIR:
            self._offer_in_turns()
        else:
            self._offer_to_lanes()

    def offer_to(self, flow: Contender) -> int:
        """The rate that a flow without one would get here; UNKNOWN where it depends on others'."""
        if self.rule is Discipline.FAIR or not self.turns:
            return UNKNOWN if self.rule is Discipline.FIFO and self.first() is not flow else self.offer[flow.lane]
        if self.offer[flow.lane] == UNKNOWN:
            return UNKNOWN
        queue = self.queues[self._queue_of(flow)]
        return queue.share_bps * self.weight_of(flow) // queue.weight

    def weight_of(self, flow: Contender) -> int:
        """What ``flow`` has in this queue, in bytes."""
        return flow.weight

    def _queue_of(self, flow: Contender) -> tuple[int, str]:
        if self.rule is Discipline.PACKETS:
            return 0, ""
        return flow.lane, flow.source if flow.lane is Lane.KV else ""

    def _offer_in_turns(self) -> None:
        """Lanes first, queues in turns within a lane, and within a queue by weight."""
        if self.rule is Discipline.PACKETS:
            self.offer = [self.left_bps, self.left_bps]
        else:
            lefts = self._lefts_of_lanes()
            self.offer = [left if self.unrated[lane] else UNKNOWN for lane, left in enumerate(lefts)]
        queues = self.queues = {}
        for flow in self.flows.values():
            key = self._queue_of(flow)
            queue = queues.get(key)
            if queue is None:
                queue = queues[key] = _Queue()
            if flow.rate_bps == UNKNOWN:
                queue.weight += self.weight_of(flow)
            else:
                queue.used_bps += flow.rate_bps
        if len(queues) == 1:
            for key, queue in queues.items():
                queue.share_bps = self.offer[key[0]]
            return
        for lane in (0, 1):
            waiting = [queue for key, queue in queues.items() if key[0] == lane and queue.weight]
            if waiting:
                _fill_up(waiting, self.offer[lane])

    def _lefts_of_lanes(self) -> tuple[int, int]:
        """What each lane may still give out; UNKNOWN for the KV lane behind a strict high one."""
        left = self.left_bps
        if not (self.unrated[0] and self.unrated[1]):
            return left, left
        if self.rule is Discipline.STRICT:
            return left, UNKNOWN
        # A lane that has more than its share already (given while the other was held back) keeps it.
        high = min(max(0, self.high_share - self.used_bps[0]), left)
        return high, min(max(0, self.usable_bps - self.high_share - self.used_bps[1]), left)

    def _offer_to_lanes(self) -> None:
        """The same rate to each flow of a lane."""
        high, kv = self.unrated
        left = self.left_bps
        if self.rule is Discipline.FIFO:
            self.offer = [left, left]
        elif self.rule is Discipline.FAIR:
            self.offer = [left // (high + kv)] * 2 if high + kv else [UNKNOWN, UNKNOWN]
        else:
            lefts = zip(self._lefts_of_lanes(), self.unrated, strict=True)
            self.offer = [of_lane // count if count and of_lane != UNKNOWN else UNKNOWN for of_lane, count in lefts]

    def next_in_turn(self) -> list[Contender]:
        """Flows without a rate whose rates become final together once this resource settles."""
        if not self.left_bps:
            return [flow for flow in self.flows.values() if flow.rate_bps == UNKNOWN]
        if self.rule is Discipline.FIFO:
            first = self.first()
            return [first] if first is not None else []
        return [f for f in self.flows.values() if f.rate_bps == UNKNOWN and self.offer[f.lane] != UNKNOWN]


class _Queue:
    """A queue of a resource with turns: the weight of its flows that have no rate yet, their part of the rest, and what
    its other flows have."""

    __slots__ = ("share_bps", "used_bps", "weight")

    def __init__(self) -> None:
        self.weight = self.used_bps = self.share_bps = 0


def _fill_up(queues: Sequence[_Queue], left_bps: int) -> None:
    """Divide ``left_bps`` so that those queues that have least get most: max-min of what each has in all."""
    behind = sorted(queues, key=lambda queue: queue.used_bps)
    total = left_bps
    for count, queue in enumerate(behind, 1):
        total += queue.used_bps
        if count == len(behind) or total // count <= behind[count].used_bps:
            level = total // count
            break
    for queue in behind:
        queue.share_bps = max(0, level - queue.used_bps)


class Contender:
    """A flow while rates are filled: ``order`` of start, the ports of its path, its lane, its source memory, what it
    has in a queue of packets (``weight``, in bytes), its rate."""

    __slots__ = ("lane", "order", "path", "rate_bps", "source", "weight")

    def __init__(self, order: int, path: tuple[Port, ...], lane: Lane, source: str = "", weight: int = 1) -> None:
        self.order = order
        self.path = path
        self.lane = lane
        self.source = source
        self.weight = weight
        self.rate_bps = 0


def _compete(ports: Sequence[Port], flows: Sequence[Contender]) -> None:
    """Count those of ``flows`` that have no rate at each port, and offer to so many."""
    for port in ports:
        port.unrated = [0, 0]
    for flow in flows:
        if flow.rate_bps == UNKNOWN:
            for port in flow.path:
                port.unrated[flow.lane] += 1
    for port in ports:
        port.make_offer()


def _give(rates: Sequence[tuple[Contender, int]]) -> None:
    """Make rates final, and offer anew wherever these flows pass."""
    passed: dict[str, Port] = {}
    for flow, rate_bps in rates:
        flow.rate_bps = rate_bps
        lane = flow.lane
        for port in flow.path:
            port.used_bps[lane] += rate_bps
            port.unrated[lane] -= 1
            passed[port.name] = port
    for port in passed.values():
        port.make_offer()


def _narrowness(port: Port) -> int:
    """What it offers at least, to a lane."""
    high, kv = port.offer
    return kv if high == UNKNOWN else high if kv == UNKNOWN else min(high, kv)


def _settle(ports: Sequence[Port]) -> bool:
    """Make the rates of one settled resource final; False if none is settled."""
    waiting = [port for port in ports if port.unrated[0] or port.unrated[1]]
    for port in sorted(waiting, key=_narrowness):
        turn = port.next_in_turn()
        if not turn:
            continue
        if port.left_bps:
            rates = [(flow, port.offer_to(flow)) for flow in turn]
            if any(other.offer_to(flow) < rate for flow, rate in rates for other in flow.path):
                continue
        else:
            rates = [(flow, 0) for flow in turn]
        _give(rates)
        return True
    return False


def _untie(ports: Sequence[Port], flows: Sequence[Contender]) -> None:
    """Resources wait for each other: make the smallest known offer final, of those flows that others stand behind.

    A flow that must wait for another (in the KV lane of a strict resource, or not the first of a fifo one) does not
    compete with it elsewhere: what it could be given there would not get through.
    """
    waiting = [flow for flow in flows if flow.rate_bps == UNKNOWN]
    behind = [flow for flow in waiting if any(port.offer_to(flow) == UNKNOWN for port in flow.path)]
    held = {port.name: port for flow in behind for port in flow.path if port.offer_to(flow) == UNKNOWN}
    ready = [flow for flow in waiting if all(port.offer_to(flow) != UNKNOWN for port in flow.path)]
    if not ready:  # first in a queue, but in the KV lane elsewhere: lanes go before queues
        _give([(waiting[0], 0)])
        return
    ahead = [flow for flow in ready if any(port.name in held for port in flow.path)]
    if ahead:
        _compete(ports, ready)
    offers = [(min(port.offer_to(flow) for port in flow.path), flow) for flow in ahead or ready]
    least = min(offer for offer, _ in offers)
    _give([(flow, offer) for offer, flow in offers if offer == least])
    _compete(ports, flows)


def _top_up(ports: Sequence[Port], flows: Sequence[Contender]) -> None:
    """Share out what `_untie` left unused, fairly: raise all flows together, stopping each at its first full port."""
    rising = list(flows)
    while rising:
        counts = {port.name: 0 for port in ports}
        for flow in rising:
            for port in flow.path:
                counts[port.name] += 1
        step = min(port.left_bps // counts[port.name] for port in ports if counts[port.name])
        for flow in rising:
            flow.rate_bps += step
            for port in flow.path:
                port.used_bps[flow.lane] += step
        rising = [f for f in rising if all(port.left_bps >= counts[port.name] for port in f.path)]


def fill(ports: Sequence[Port], flows: Sequence[Contender]) -> None:
    """Give each flow its rate.

    Args:
        ports: every port that any of ``flows`` crosses, in a fixed order; ``usable_bps`` is what it may give out.
        flows: flows in order of start; ``rate_bps`` of each is set.
    """
    if len(flows) == 1:
        flow = flows[0]
        flow.rate_bps = min(port.usable_bps for port in flow.path)
        for port in ports:
            port.used_bps = [0, 0]
        for port in flow.path:
            port.used_bps[flow.lane] = flow.rate_bps
        return
    for port in ports:
        port.rule = Discipline.FAIR
        if port.turns:
            high = sum(flow.lane is Lane.HIGH for flow in port.flows.values())
            if high in (0, len(port.flows)):  # nobody goes first
                port.rule = port.discipline
    while True:
        _fill_by_rule(ports, flows)
        full = [port for port in ports if port.rule is not port.discipline and port.is_full]
        if not full:
            return
        for port in full:
            port.rule = port.discipline


def _fill_by_rule(ports: Sequence[Port], flows: Sequence[Contender]) -> None:
    for flow in flows:
        flow.rate_bps = UNKNOWN
    for port in ports:
        port.used_bps = [0, 0]
    _compete(ports, flows)
    tied = False
    while any(port.unrated[0] or port.unrated[1] for port in ports):
        if not _settle(ports):
            tied = True
            _untie(ports, flows)
    if tied:
        _top_up(ports, flows)
