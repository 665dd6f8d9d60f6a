"""What a shaped interface carries: its htb classes and u32 filters, as data, and their netlink messages.

A port with lanes (paper section 5.1: model traffic is guaranteed about 99 %, KV takes what is left)::

    1:  htb root, unknown traffic to 1:5f
    |-- 1:5   pure acknowledgements (IP length below 128), outside the rate: RDMA has none on its data path
    `-- 1:1   the link rate
        |-- 1:10  high lane: DSCP EF, 99 % guaranteed, 100 % ceiling, prio 0
        `-- 1:20  KV lane: 1 % guaranteed, 100 % ceiling, prio 1
            |-- 1:21 ... one queue per source memory; htb's round robin stands for the NIC's between queue pairs
            `-- 1:5f whatever has no queue of its own

A shared resource (a PCIe link, a node's DRAM) has 1:5 and one class 1:20 at the resource's rate, no lanes.

Each leaf's queue is the pfifo that htb makes by itself; its limit is the interface's transmit queue length
(QUEUE_PACKETS), which saves a message per class. Its memory is bounded further by what the senders may have in flight.

htb charges a packet with its Ethernet header, per segment of a super-packet; a 1514-byte frame carries 1448 bytes
of TCP payload (14 Ethernet, 20 IP, 32 TCP with timestamps).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from pyroute2.netlink.rtnl.tcmsg import cls_u32, sched_htb, tcmsg
from pyroute2.netlink.rtnl.tcmsg.common import calc_xmittime

from testbed.fabric.live.addresses import PortKind, ShapedPort
from testbed.fabric.live.netlink import CHANGE, CREATE, Message, at_index, encode

QUEUE_PACKETS = 20_000
PACKET_BYTES = 8_000  # largest super-packet: with 64 KB ones lanes and round robin work in 64 KB lumps
QUANTUM_BYTES = 9_000  # above PACKET_BYTES, so that one turn of htb's round robin is one super-packet
LEAST_BURST_BYTES = 15_000
BURST_SECONDS = 0.002  # what a late timer may give back at once
ACK_RATE_BPS = 1_000_000_000
SMALL_PACKET_BYTES = 128  # a datagram below this is taken for a pure acknowledgement

EXPEDITED_FORWARDING = 0xB8
"""The TOS byte (DSCP EF) that puts a socket's traffic in the high lane."""

ROOT = 0x10000
ACK_CLASS = 0x10005
LINK_CLASS = 0x10001
HIGH_CLASS = 0x10010
KV_CLASS = 0x10020
SHARED_CLASS = 0x10020
FIRST_SOURCE_CLASS = 0x10021
REST_CLASS = 0x1005F

INGRESS_HOOK = 0xFFFFFFF2
EGRESS_HOOK = 0xFFFFFFF3

RTM_NEWQDISC, RTM_DELQDISC, RTM_GETQDISC = 36, 37, 38
RTM_NEWTCLASS, RTM_GETTCLASS = 40, 42
RTM_NEWTFILTER, RTM_DELTFILTER, RTM_GETTFILTER = 44, 45, 46

_ETH_P_ALL = 0x0003
_ETH_P_IP = 0x0800
_TC_H_ROOT = 0xFFFFFFFF
_TC_H_CLSACT = 0xFFFFFFF1
_LANE_PRIO = 1


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
    """One u32 filter of a port: IP packets whose 32-bit word at ``offset`` equals ``value`` under ``mask``."""

    target: int
    value: int
    mask: int
    offset: int


_ACKS = Match(target=ACK_CLASS, value=0, mask=0xFFFF & ~(SMALL_PACKET_BYTES - 1), offset=0)
_HIGH = Match(target=HIGH_CLASS, value=EXPEDITED_FORWARDING << 16, mask=0x00FC0000, offset=0)


def classes_of(port: ShapedPort, high_share: float) -> tuple[HtbClass, ...]:
    """The classes that the spec demands of a port."""
    rate = port.rate_bps
    ack_rate = max(ACK_RATE_BPS, rate)
    acks = HtbClass(classid=ACK_CLASS, parent=ROOT, rate_bps=ack_rate, ceil_bps=ack_rate)
    if port.kind is PortKind.SHARED:
        return (acks, HtbClass(classid=SHARED_CLASS, parent=ROOT, rate_bps=rate, ceil_bps=rate))
    high_rate = round(rate * high_share)
    kv_rate = rate - high_rate
    leaf_ids = (*(FIRST_SOURCE_CLASS + k for k in range(len(port.sources))), REST_CLASS)
    return (
        acks,
        HtbClass(classid=LINK_CLASS, parent=ROOT, rate_bps=rate, ceil_bps=rate, leaf=False),
        HtbClass(classid=HIGH_CLASS, parent=LINK_CLASS, rate_bps=high_rate, ceil_bps=rate),
        HtbClass(classid=KV_CLASS, parent=LINK_CLASS, rate_bps=kv_rate, ceil_bps=rate, prio=1, leaf=False),
        *(
            HtbClass(classid=leaf, parent=KV_CLASS, rate_bps=kv_rate // len(leaf_ids), ceil_bps=rate, prio=1)
            for leaf in leaf_ids
        ),
    )


def matches_of(port: ShapedPort) -> tuple[Match, ...]:
    """The filters that the spec demands of a port, in the order in which they are tried."""
    if port.kind is PortKind.SHARED:
        return (_ACKS,)
    return (
        _ACKS,
        _HIGH,
        *(
            Match(
                target=FIRST_SOURCE_CLASS + k,
                value=int(source.network.network_address),
                mask=int(source.network.netmask),
                offset=12,
            )
            for k, source in enumerate(port.sources)
        ),
    )


def burst_bytes(rate_bps: int) -> int:
    """Bucket size of a class: a few super-packets, or BURST_SECONDS of a fast link."""
    return max(LEAST_BURST_BYTES, int(rate_bps / 8 * BURST_SECONDS))


def port_messages(port: ShapedPort, high_share: float, *, classes: bool = True, filters: bool = True) -> list[Message]:
    """Everything to shape one interface; send before the interface is up, or each root qdisc waits for RCU."""
    templates: list[bytes] = []
    if classes:
        templates.append(_htb_root(SHARED_CLASS if port.kind is PortKind.SHARED else REST_CLASS))
        templates += [_htb_class(cls, CREATE) for cls in classes_of(port, high_share)]
    if filters:
        templates += [_u32_match(match) for match in matches_of(port)]
    return [Message(at_index(data, port.index), f"shape {port.name}") for data in templates]


def rate_messages(port: ShapedPort, high_share: float) -> list[Message]:
    """Change the classes of a shaped interface to the rates of ``port``."""
    templates = [_htb_class(cls, CHANGE) for cls in classes_of(port, high_share)]
    return [Message(at_index(data, port.index), f"change the rate of {port.name}") for data in templates]


def redirect_messages(index: int, *, ingress_to: int, egress_to: int) -> list[Message]:
    """Send all that enters (leaves) interface ``index`` through the ifb ``ingress_to`` (``egress_to``)."""
    templates = (_clsact(), _redirect(INGRESS_HOOK, ingress_to), _redirect(EGRESS_HOOK, egress_to))
    return [Message(at_index(data, index), f"redirect interface {index} to its ifb") for data in templates]


@functools.cache
def _htb_root(default: int) -> bytes:
    options = sched_htb.get_parameters({"default": default})
    return tc_request(RTM_NEWQDISC, "htb", handle=ROOT, parent=_TC_H_ROOT, options=options)


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
    return tc_request(RTM_NEWTCLASS, "htb", handle=cls.classid, parent=cls.parent, options=options, flags=flags)


@functools.cache
def _u32_match(match: Match) -> bytes:
    # pyroute2 wants the mask in full: it drops leading zero bytes of a hexadecimal mask and moves the offset along
    key = f"{match.value:#x}/0x{match.mask:08x}+{match.offset}"
    options = cls_u32.get_parameters({"target": match.target, "keys": [key]})
    return tc_request(RTM_NEWTFILTER, "u32", parent=ROOT, info=filter_info(_LANE_PRIO, _ETH_P_IP), options=options)


@functools.cache
def _clsact() -> bytes:
    return tc_request(RTM_NEWQDISC, "clsact", handle=0xFFFF0000, parent=_TC_H_CLSACT)


@functools.cache
def _redirect(hook: int, ifb_index: int) -> bytes:
    action = {"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": ifb_index}
    options = cls_u32.get_parameters({"target": SHARED_CLASS, "keys": ["0x0/0x0+0"], "action": [action]})
    # u32 lists the filters of both hooks of a clsact under either if their preferences are equal: keep them apart
    prio = 1 if hook == INGRESS_HOOK else 2
    return tc_request(RTM_NEWTFILTER, "u32", parent=hook, info=filter_info(prio, _ETH_P_ALL), options=options)


def filter_info(prio: int, protocol: int) -> int:
    """The ``info`` word of a filter request: preference and (big-endian) protocol."""
    return (prio << 16) | ((protocol & 0xFF) << 8) | (protocol >> 8)


def tc_request(
    kind: int,
    name: str | None,
    *,
    handle: int = 0,
    parent: int = 0,
    info: int = 0,
    options: Any = None,
    flags: int = CREATE,
) -> bytes:
    """An encoded tc request for interface 0; patch the interface with ``at_index``."""
    message = tcmsg()
    message["handle"] = handle
    message["parent"] = parent
    message["info"] = info
    attrs: list[list[Any]] = []
    if name is not None:
        attrs.append(["TCA_KIND", name])
    if options is not None:
        attrs.append(["TCA_OPTIONS", options])
    message["attrs"] = attrs
    return encode(message, kind, flags)
