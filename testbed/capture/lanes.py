"""The verdict on a link's lanes, from its packets alone.

A packet's lane is what the kernel's filters make of its headers: below 128 bytes without PSH and FIN, or from the port
of a data connection, an acknowledgement; DSCP EF the high lane; anything else the KV lane. What it carries is known
from its port: KV or a collective. So a byte of KV in the high lane shows, whatever our counters say.

Who waits for whom needs a second look: the packets on their way into the lanes, at the memories behind a CNIC. A packet
waits from there to where it leaves the link; what of the other lane leaves meanwhile has passed before it.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from testbed.capture.packets import Flow, Packet
from testbed.fabric.live.lanes import EXPEDITED_FORWARDING, PUSH_OR_FIN, SMALL_PACKET_BYTES
from testbed.fabric.live.sockets import DATA_PORT, EXCHANGE_PORT


class Lane(enum.Enum):
    """Where a packet's headers put it."""

    HIGH = "high"
    KV = "kv"
    ACK = "ack"


class Cargo(enum.Enum):
    """What a connection carries."""

    KV = "KV"
    MODEL = "model traffic"
    OTHER = "other"


LANE_OF = {Cargo.KV: Lane.KV, Cargo.MODEL: Lane.HIGH}
_DSCP_MASK = 0xFC


def lane_of(packet: Packet) -> Lane:
    """The lane that the filters of a port choose."""
    small = packet.ip_bytes < SMALL_PACKET_BYTES and not packet.flags & PUSH_OR_FIN
    return Lane.ACK if small or packet.flow[2] == DATA_PORT else marked(packet)


def marked(packet: Packet) -> Lane:
    """The lane that a packet's DSCP asks for."""
    return Lane.HIGH if packet.tos & _DSCP_MASK == EXPEDITED_FORWARDING & _DSCP_MASK else Lane.KV


def cargo_by_port(flow: Flow) -> Cargo:
    """What a connection of a run carries."""
    ports = flow[2:]
    if DATA_PORT in ports:
        return Cargo.KV
    return Cargo.MODEL if EXCHANGE_PORT in ports else Cargo.OTHER


@dataclass(slots=True)
class LaneCount:
    """What one lane has carried: packets (super-packets as one), TCP payload, and the DSCP values seen."""

    packets: int = 0
    payload_bytes: int = 0
    dscp: set[int] = field(default_factory=set)


@dataclass(slots=True)
class DirectionVerdict:
    """One direction of a link. ``misplaced``: payload bytes by what they were and the lane that they were in."""

    lanes: dict[Lane, LaneCount] = field(default_factory=lambda: {lane: LaneCount() for lane in Lane})
    cargo_bytes: dict[Cargo, int] = field(default_factory=lambda: dict.fromkeys(Cargo, 0))
    misplaced: dict[tuple[Cargo, Lane], int] = field(default_factory=dict)


@dataclass(slots=True)
class LaneWaits:
    """How the high lane fared in the queue of a link; bytes are payload.

    ``kv_meanwhile`` and ``high_meanwhile`` left while a packet of the high lane was waiting. ``most_kv_ahead`` is the
    most KV that left during one packet's wait, ``most_overtaken`` the most that one packet found there and left behind.
    """

    packets: int = 0
    kv_meanwhile: int = 0
    high_meanwhile: int = 0
    longest_ns: int = 0
    most_kv_ahead: int = 0
    most_overtaken: int = 0

    @property
    def kv_share(self) -> float:
        """Share of KV in what left while the high lane had something to send (0 to 1)."""
        both = self.kv_meanwhile + self.high_meanwhile
        return self.kv_meanwhile / both if both else 0.0


def judge(
    packets: Iterable[Packet], cargo_of: Callable[[Flow], Cargo] = cargo_by_port
) -> tuple[DirectionVerdict, DirectionVerdict]:
    """The verdict on what left the link's device, and on what entered it."""
    left, entered = _Direction(cargo_of), _Direction(cargo_of)
    for packet in packets:
        (left if packet.leaving else entered).take(packet)
    return left.verdict, entered.verdict


class _Direction:
    """Counts one direction, packet by packet."""

    def __init__(self, cargo_of: Callable[[Flow], Cargo]) -> None:
        self.verdict = DirectionVerdict()
        self._cargo_of = cargo_of
        self._cargo: dict[Flow, Cargo] = {}

    def take(self, packet: Packet) -> None:
        verdict, flow, size = self.verdict, packet.flow, packet.payload_bytes
        count = verdict.lanes[lane_of(packet)]
        count.packets += 1
        count.payload_bytes += size
        count.dscp.add(packet.tos >> 2)
        if not size:
            return
        cargo = self._cargo.get(flow)
        if cargo is None:
            cargo = self._cargo[flow] = self._cargo_of(flow)
        verdict.cargo_bytes[cargo] += size
        lane = marked(packet)  # what is taken for an acknowledgement must have the right mark, too
        if LANE_OF.get(cargo, lane) is not lane:
            verdict.misplaced[cargo, lane] = verdict.misplaced.get((cargo, lane), 0) + size


def waits(entering: Iterable[Packet], leaving: Iterable[Packet]) -> LaneWaits:
    """How long packets marked for the high lane waited, and what passed meanwhile.

    ``entering`` are packets on their way into a queue, from any number of captures; ``leaving`` those that come out of
    it, in order. Packets that were seen on one side only are left out.
    """
    came_ns: dict[tuple[Flow, int], int] = {}
    for packet in entering:
        if packet.payload_bytes:
            came_ns.setdefault((packet.flow, packet.sequence), packet.at_ns)
    passed = [(came_ns[key], p) for p in leaving if (key := (p.flow, p.sequence)) in came_ns]
    kv = [(at_ns, p) for at_ns, p in passed if marked(p) is Lane.KV]
    kv_left_ns = [p.at_ns for _, p in kv]
    kv_bytes = list(accumulate((p.payload_bytes for _, p in kv), initial=0))
    found = LaneWaits()
    busy_until_ns = 0
    for at_ns, packet in passed:
        if marked(packet) is Lane.KV:
            continue
        found.packets += 1
        begin, end = bisect_left(kv_left_ns, at_ns), bisect_left(kv_left_ns, packet.at_ns)
        found.longest_ns = max(found.longest_ns, packet.at_ns - at_ns)
        found.most_kv_ahead = max(found.most_kv_ahead, kv_bytes[end] - kv_bytes[begin])
        behind = end
        while behind < len(kv) and kv[behind][0] < at_ns:
            behind += 1
        found.most_overtaken = max(found.most_overtaken, kv_bytes[behind] - kv_bytes[end])
        begin = max(begin, bisect_left(kv_left_ns, busy_until_ns))  # count what passed two waiting packets once
        found.kv_meanwhile += max(kv_bytes[end] - kv_bytes[begin], 0)
        found.high_meanwhile += packet.payload_bytes
        busy_until_ns = max(busy_until_ns, packet.at_ns)
    return found
