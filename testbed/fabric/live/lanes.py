"""What a shaped interface carries: its classes, queues and filters, as data, and their netlink messages.

A port with lanes (paper section 5.1: model traffic is guaranteed about 99 %, KV takes what is left). All of them::

    1:  htb root
    |-- 1:5   acknowledgements, outside the rate: RDMA has none on its data path
    `-- 1:1   the link rate; what divides it depends on the discipline

htb: classes below 1:1 with guaranteed rates; what one leaves the other takes::

    |-- 1:10  high lane: DSCP EF, 99 % guaranteed, 100 % ceiling, prio 0
    `-- 1:20  KV lane: 1 % guaranteed, 100 % ceiling, prio 1
        |-- 1:21 ... one queue per source memory; htb's round robin stands for the NIC's between queue pairs
        `-- 1:5f whatever has no queue of its own

prio, ets: two bands in the class 1:1; below the second drr takes turns between the source memories::

    2:  prio (strict) or ets (quanta 983040 and 4096)
    |-- 2:1   high lane: DSCP EF
    `-- 2:2   KV lane: everything else
        3:  drr
        |-- 3:21 ... one queue per source memory
        `-- 3:5f whatever has no queue of its own

none: one queue in 1:1 for everything, lanes and sources alike.

A shared resource (a PCIe link, a node's DRAM) has 1:5 and one class 1:20 at the resource's rate, no lanes.

Acknowledgements are TCP's pure ones (IP length below 128, neither PSH nor FIN) and all that a destination answers on a
data connection (from its port). A small segment of data has PSH, because it ends what was sent, and stays in its lane:
if it overtook its own stream, TCP would take what it overtook for lost, and send it twice.

Each leaf's queue is the pfifo that its parent makes by itself; its limit is the interface's transmit queue length
(QUEUE_PACKETS), which saves a message per class. Its memory is bounded further by what the senders may have in flight.

htb charges a packet with its Ethernet header, per segment of a super-packet; a 1514-byte frame carries 1448 bytes
of TCP payload (14 Ethernet, 20 IP, 32 TCP with timestamps).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from pyroute2.netlink.rtnl.tcmsg.common import calc_xmittime

from testbed.fabric.live import tc
from testbed.fabric.live.addresses import PortKind, ShapedPort
from testbed.fabric.live.netlink import CHANGE, CREATE, Message, at_index
from testbed.fabric.live.sockets import DATA_PORT
from testbed.fabric.live.tc import Key
from testbed.fabric.spec import LaneDiscipline

QUEUE_PACKETS = 20_000
PACKET_BYTES = 8_000  # largest super-packet: with 64 KB ones lanes and round robin work in 64 KB lumps
QUANTUM_BYTES = 9_000  # above PACKET_BYTES, so that one turn of a round robin between sources is one super-packet
LEAST_BURST_BYTES = 1_600  # a segment: what a link that was idle may send for nothing
BURST_SECONDS = 0.0005  # what a late timer may give back at once
ACK_RATE_BPS = 1_000_000_000
SMALL_PACKET_BYTES = 128  # acknowledgements are below this, with all their options
PUSH_OR_FIN = 0x09  # TCP flags; acknowledgements have neither

EXPEDITED_FORWARDING = 0xB8
"""The TOS byte (DSCP EF) that puts a socket's traffic in the high lane."""

ROOT = 0x10000
ACK_CLASS = 0x10005
LINK_CLASS = 0x10001
HIGH_CLASS = 0x10010
KV_CLASS = 0x10020
SHARED_CLASS = 0x10020
BANDS = 0x20000
HIGH_BAND = 0x20001
KV_BAND = 0x20002
TURNS = 0x30000
_FIRST_SOURCE = 0x21
REST = 0x5F
"""Minor number of the queue for whatever has none of its own."""
_BANDED = (LaneDiscipline.PRIO, LaneDiscipline.ETS)
_SOURCE_ADDRESS_OFFSET, _PORTS_OFFSET, _FLAGS_OFFSET = 12, 20, 32  # in IPv4 without options, then TCP


@dataclass(frozen=True, slots=True, kw_only=True)
class HtbClass:
    """One htb class; ``leaf`` if it has a queue."""

    classid: int
    parent: int
    rate_bps: int
    ceil_bps: int
    prio: int = 0
    leaf: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One u32 filter of the qdisc ``parent``: IP packets to which all ``keys`` apply go into its class ``target``."""

    parent: int
    target: int
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PortQueues:
    """All that hangs on a port: htb's classes, ``bands`` ("prio", "ets" or "") below the link's class, the drr classes
    of the KV band, and the filters in the order in which each qdisc tries its own.

    ``default``: htb's class of unknown traffic; ``rest``: where KV without a queue of its own ends.
    """

    default: int
    rest: int
    classes: tuple[HtbClass, ...]
    bands: str = ""
    turns: tuple[int, ...] = ()
    matches: tuple[Match, ...]


_ACKNOWLEDGEMENTS = (
    Match(
        parent=ROOT,
        target=ACK_CLASS,
        keys=(
            Key(value=0, mask=0xFFFF & ~(SMALL_PACKET_BYTES - 1), offset=0),
            Key(value=0, mask=PUSH_OR_FIN << 16, offset=_FLAGS_OFFSET),
        ),
    ),
    Match(parent=ROOT, target=ACK_CLASS, keys=(Key(value=DATA_PORT << 16, mask=0xFFFF0000, offset=_PORTS_OFFSET),)),
)


def queues_of(port: ShapedPort) -> PortQueues:
    """What the spec demands of a port."""
    rate = port.rate_bps
    ack_rate = max(ACK_RATE_BPS, rate)
    acks = HtbClass(classid=ACK_CLASS, parent=ROOT, rate_bps=ack_rate, ceil_bps=ack_rate)
    if port.kind is PortKind.SHARED:
        shared = HtbClass(classid=SHARED_CLASS, parent=ROOT, rate_bps=rate, ceil_bps=rate)
        return PortQueues(default=SHARED_CLASS, rest=SHARED_CLASS, classes=(acks, shared), matches=_ACKNOWLEDGEMENTS)
    link = HtbClass(classid=LINK_CLASS, parent=ROOT, rate_bps=rate, ceil_bps=rate)
    if port.lanes is LaneDiscipline.NONE:
        return PortQueues(default=LINK_CLASS, rest=LINK_CLASS, classes=(acks, link), matches=_ACKNOWLEDGEMENTS)
    if port.lanes in _BANDED:
        turns = _source_queues(port, TURNS)
        # drr drops what no filter claims, so the last one claims everything
        others = Match(parent=TURNS, target=TURNS | REST)
        return PortQueues(
            default=LINK_CLASS,
            rest=TURNS | REST,
            classes=(acks, link),
            bands=port.lanes.value,
            turns=turns,
            matches=(*_ACKNOWLEDGEMENTS, _model_traffic(BANDS, HIGH_BAND), *_source_matches(port, TURNS), others),
        )
    return PortQueues(
        default=ROOT | REST,
        rest=ROOT | REST,
        classes=(acks, *_guaranteed(port)),
        matches=(*_ACKNOWLEDGEMENTS, _model_traffic(ROOT, HIGH_CLASS), *_source_matches(port, ROOT)),
    )


def _guaranteed(port: ShapedPort) -> tuple[HtbClass, ...]:
    """The classes of the link with htb's lanes."""
    rate = port.rate_bps
    high_rate = round(rate * port.high_share)
    kv_rate = rate - high_rate
    leaves = _source_queues(port, ROOT)
    return (
        HtbClass(classid=LINK_CLASS, parent=ROOT, rate_bps=rate, ceil_bps=rate, leaf=False),
        HtbClass(classid=HIGH_CLASS, parent=LINK_CLASS, rate_bps=high_rate, ceil_bps=rate),
        HtbClass(classid=KV_CLASS, parent=LINK_CLASS, rate_bps=kv_rate, ceil_bps=rate, prio=1, leaf=False),
        *(
            HtbClass(classid=leaf, parent=KV_CLASS, rate_bps=kv_rate // len(leaves), ceil_bps=rate, prio=1)
            for leaf in leaves
        ),
    )


def _source_queues(port: ShapedPort, qdisc: int) -> tuple[int, ...]:
    return (*(qdisc | (_FIRST_SOURCE + k) for k in range(len(port.sources))), qdisc | REST)


def _model_traffic(qdisc: int, target: int) -> Match:
    return Match(parent=qdisc, target=target, keys=(Key(value=EXPEDITED_FORWARDING << 16, mask=0x00FC0000, offset=0),))


def _source_matches(port: ShapedPort, qdisc: int) -> tuple[Match, ...]:
    return tuple(
        Match(
            parent=qdisc,
            target=qdisc | (_FIRST_SOURCE + k),
            keys=(
                Key(
                    value=int(source.network.network_address),
                    mask=int(source.network.netmask),
                    offset=_SOURCE_ADDRESS_OFFSET,
                ),
            ),
        )
        for k, source in enumerate(port.sources)
    )


def burst_bytes(rate_bps: int) -> int:
    """Bucket size of a class: one segment, or BURST_SECONDS of a fast link."""
    return max(LEAST_BURST_BYTES, int(rate_bps / 8 * BURST_SECONDS))


def port_messages(port: ShapedPort, *, classes: bool = True, filters: bool = True) -> list[Message]:
    """Everything to shape one interface; send before the interface is up, or each root qdisc waits for RCU."""
    queues = queues_of(port)
    templates: list[bytes] = []
    if classes:
        templates.append(tc.htb_qdisc(ROOT, queues.default))
        templates += [_htb_class(cls, CREATE) for cls in queues.classes]
        if queues.bands == "prio":
            templates.append(tc.prio_qdisc(BANDS, LINK_CLASS, 2))
        elif queues.bands:
            templates.append(tc.ets_qdisc(BANDS, LINK_CLASS, port.ets_quanta))
        if queues.turns:
            templates.append(tc.drr_qdisc(TURNS, KV_BAND))
            templates += [tc.drr_class(classid, TURNS, QUANTUM_BYTES) for classid in queues.turns]
    if filters:
        templates += [match_request(match) for match in queues.matches]
    return [Message(at_index(data, port.index), f"shape {port.name}") for data in templates]


def rate_messages(port: ShapedPort) -> list[Message]:
    """Change the classes of a shaped interface to the rates of ``port``."""
    templates = [_htb_class(cls, CHANGE) for cls in queues_of(port).classes]
    return [Message(at_index(data, port.index), f"change the rate of {port.name}") for data in templates]


def match_request(match: Match) -> bytes:
    """The request to add a filter."""
    return tc.u32_filter(match.parent, match.target, match.keys)


def redirect_messages(index: int, *, ingress_to: int, egress_to: int) -> list[Message]:
    """Send all that enters (leaves) interface ``index`` through the ifb ``ingress_to`` (``egress_to``)."""
    hooks = ((tc.INGRESS_HOOK, ingress_to), (tc.EGRESS_HOOK, egress_to))
    templates = (tc.clsact(), *(tc.redirect(hook, SHARED_CLASS, ifb) for hook, ifb in hooks))
    return [Message(at_index(data, index), f"redirect interface {index} to its ifb") for data in templates]


@functools.cache
def _htb_class(cls: HtbClass, flags: int) -> bytes:
    """htb takes the rate from PARMS alone: the rate tables that pyroute2 adds (2 KB a class) only served ATM links."""
    rate, ceil = cls.rate_bps // 8, cls.ceil_bps // 8
    burst = burst_bytes(cls.ceil_bps)
    parameters = {
        "rate": min(rate, 0xFFFFFFFF),
        "ceil": min(ceil, 0xFFFFFFFF),
        "buffer": min(calc_xmittime(rate, burst), 0xFFFFFFFF),
        "cbuffer": calc_xmittime(ceil, burst),
        "quantum": QUANTUM_BYTES,
        "prio": cls.prio,
    }
    attrs: list[list[Any]] = [["TCA_HTB_PARMS", parameters]]
    if ceil > 0xFFFFFFFF:
        attrs += [["TCA_HTB_RATE64", rate], ["TCA_HTB_CEIL64", ceil]]
    options = {"attrs": attrs}
    return tc.tc_request(tc.RTM_NEWTCLASS, "htb", handle=cls.classid, parent=cls.parent, options=options, flags=flags)
