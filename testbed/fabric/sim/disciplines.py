"""How a resource divides its rate between the flows that cross it: the named disciplines, and the filling of rates.

Paper sections 4.2 (the resources: SNIC, CNIC read and write, PCIe, DRAM, storage) and 5.1 (lanes). A resource is
one direction of a link, or a memory's bandwidth; it has a rate and one of five disciplines:

* ``fifo``: all of the rate to the flow that came first; what that flow cannot use goes to the next.
* ``fair``: equal shares (max-min: what a flow cannot use is shared among the others).
* ``strict``: equal shares within the high lane; the KV lane shares what the high lane leaves.
* ``weighted``: the lanes have weights, flows of a lane share equally, an idle lane's part is borrowed (HTB 99:1).
* ``infiniband``: ``weighted`` with the long-run shares of the InfiniBand arbiter's tables (``arbiter.py``).

Rates over several resources come from progressive filling: a resource *settles* when it is the narrowest one of
every flow that still waits for a rate there (of the lane that is next, where lanes are strict; of the first flow,
where it is fifo); the rates it offers become final and the rest is offered again. With ``fair`` everywhere this is
the usual max-min allocation. Whom to serve first is a question only where something is full, so all resources are
filled as if fair to begin with, and again with the disciplines of those that this fills, until no others are.

Where two resources wait for each other (possible only if disciplines are mixed on one path, say lanes at the CNIC and
fair shares at a PCIe link no narrower) lanes go before queues, queues before shares, and a lane's weight before a
flow's equal part; what that leaves unused is filled up fairly at the end.

Invariants: rates are integers in bits per second, no resource is given out beyond its rate, and every flow crosses
at least one resource that has less than one bit per second left for each flow on it. Ports and flows are visited in
order of name and of start, so the result depends on nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.errors import ConfigError
from testbed.fabric.arbiter import PAPER_TABLES, ArbiterTables


class Lane(enum.IntEnum):
    """The two virtual lanes of paper 5.1: model traffic (HIGH), and everything else, KV included."""

    HIGH = 0
    KV = 1


class Discipline(enum.Enum):
    """How a resource divides its rate, see the module's text."""

    FIFO = "fifo"
    FAIR = "fair"
    STRICT = "strict"
    WEIGHTED = "weighted"
    INFINIBAND = "infiniband"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """What flows share: ``name`` ("pe0.snic"), ``rate_bps`` in bits per second, and how it is divided.

    ``high_weight`` and ``kv_weight`` count for ``weighted`` only: the lanes' shares while both want more. The other
    three count for ``infiniband`` only: the arbiter's tables, the VLs that model traffic is on, and the VL of KV.
    """

    name: str
    rate_bps: int
    discipline: Discipline
    high_weight: int = 99
    kv_weight: int = 1
    tables: ArbiterTables = PAPER_TABLES
    high_vls: tuple[int, ...] = (0,)
    kv_vl: int = 2

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
        "rate_bps",
        "rule",
        "unrated",
        "usable_bps",
        "used_bps",
    )

    def __init__(self, spec: Resource) -> None:
        self.name = spec.name
        self.rate_bps = spec.rate_bps
        self.discipline = spec.discipline
        self.rule = Discipline.FAIR
        high_weight, kv_weight = spec.lane_weights
        self.high_share = spec.rate_bps * high_weight // (high_weight + kv_weight)
        self.flows: dict[int, Contender] = {}
        self.usable_bps = spec.rate_bps
        self.used_bps = [0, 0]
        self.unrated = [0, 0]
        self.offer = [UNKNOWN, UNKNOWN]

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
        """Compute the rate that each flow of a lane would get here, given the rates that are final."""
        high, kv = self.unrated
        left = self.left_bps
        if self.rule is Discipline.FIFO:
            self.offer = [left, left]
        elif self.rule is Discipline.FAIR:
            self.offer = [left // (high + kv)] * 2 if high + kv else [UNKNOWN, UNKNOWN]
        elif not (high and kv):
            self.offer = [left // high if high else UNKNOWN, left // kv if kv else UNKNOWN]
        elif self.rule is Discipline.STRICT:
            self.offer = [left // high, UNKNOWN]
        else:
            shares = (self.high_share, self.usable_bps - self.high_share)
            # A lane that has more than its share already (given while the other was held back) keeps it.
            lefts = (min(max(0, shares[lane] - self.used_bps[lane]), left) for lane in (0, 1))
            self.offer = [of_lane // count for of_lane, count in zip(lefts, self.unrated, strict=True)]

    def next_in_turn(self) -> list[Contender]:
        """Flows without a rate whose rates become final together once this resource settles."""
        if not self.left_bps:
            return [flow for flow in self.flows.values() if flow.rate_bps == UNKNOWN]
        if self.rule is Discipline.FIFO:
            first = self.first()
            return [first] if first is not None else []
        return [f for f in self.flows.values() if f.rate_bps == UNKNOWN and self.offer[f.lane] != UNKNOWN]


class Contender:
    """A flow while rates are filled: ``order`` of start, the ports of its path, its lane, its rate."""

    __slots__ = ("lane", "order", "path", "rate_bps")

    def __init__(self, order: int, path: tuple[Port, ...], lane: Lane) -> None:
        self.order = order
        self.path = path
        self.lane = lane
        self.rate_bps = 0


def _offer_to(port: Port, flow: Contender) -> int:
    if port.rule is Discipline.FIFO and port.first() is not flow:
        return UNKNOWN
    return port.offer[flow.lane]


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


def _settle(ports: Sequence[Port]) -> bool:
    """Make the rates of one settled resource final; False if none is settled."""
    for port in sorted(ports, key=lambda p: min((o for o in p.offer if o != UNKNOWN), default=p.rate_bps)):
        turn = port.next_in_turn()
        if not turn:
            continue
        if port.left_bps:
            rates = [(flow, port.offer[flow.lane]) for flow in turn]
            if any(_offer_to(other, flow) < rate for flow, rate in rates for other in flow.path):
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
    behind = [flow for flow in waiting if any(_offer_to(port, flow) == UNKNOWN for port in flow.path)]
    held = {port.name: port for flow in behind for port in flow.path if _offer_to(port, flow) == UNKNOWN}
    ready = [flow for flow in waiting if all(_offer_to(port, flow) != UNKNOWN for port in flow.path)]
    if not ready:  # first in a queue, but in the KV lane elsewhere: lanes go before queues
        _give([(waiting[0], 0)])
        return
    ahead = [flow for flow in ready if any(port.name in held for port in flow.path)]
    if ahead:
        _compete(ports, ready)
    offers = [(min(_offer_to(port, flow) for port in flow.path), flow) for flow in ahead or ready]
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
    for port in ports:
        port.rule = Discipline.FAIR
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
