"""Requests to the kernel's traffic control: queueing disciplines, classes, filters.

pyroute2 encodes htb and u32. It has no encoder for the options of prio, ets and drr, so those are packed here as the
kernel's pkt_sched.h has them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from pyroute2.netlink.rtnl.tcmsg import cls_u32, sched_htb, tcmsg

from testbed.fabric.live.netlink import CREATE, attributes, encode

RTM_NEWQDISC, RTM_DELQDISC, RTM_GETQDISC = 36, 37, 38
RTM_NEWTCLASS, RTM_GETTCLASS = 40, 42
RTM_NEWTFILTER, RTM_DELTFILTER, RTM_GETTFILTER = 44, 45, 46

TCA_KIND, TCA_OPTIONS, TCA_STATS2 = 1, 2, 7
TC_ATTRIBUTES = 36
"""Where the attributes of a tc message begin."""
TC_HEADER = struct.Struct("=iIII")
"""At byte 20 of a tc message: interface, handle, parent, info."""

TC_H_ROOT = 0xFFFFFFFF
INGRESS_HOOK = 0xFFFFFFF2
EGRESS_HOOK = 0xFFFFFFF3
ETH_P_IP = 0x0800
FIRST_FILTER = 0x80000800
"""Handle that u32 gives to the first filter of a qdisc; the next ones count up."""

_ETH_P_ALL = 0x0003
_TC_H_CLSACT = 0xFFFFFFF1
_PRIORITIES = 16  # of a packet (TC_PRIO_MAX + 1)
_NESTED = 0x8000
_PRIO = struct.Struct(f"=i{_PRIORITIES}B")
_ETS_BANDS, _ETS_STRICT, _ETS_QUANTA, _ETS_QUANTUM, _ETS_PRIOMAP, _ETS_BAND = 1, 2, 3, 4, 5, 6
_DRR_QUANTUM = 1
_LANE_PRIO = 1
_ANYTHING = "0x0/0x0+0"


class Key(NamedTuple):
    """The 32-bit word at ``offset`` of an IP packet equals ``value`` under ``mask``."""

    value: int
    mask: int
    offset: int


def filter_info(prio: int, protocol: int) -> int:
    """The ``info`` word of a filter request: preference and (big-endian) protocol."""
    return (prio << 16) | ((protocol & 0xFF) << 8) | (protocol >> 8)


LANE_FILTERS = filter_info(_LANE_PRIO, ETH_P_IP)
"""The ``info`` word of all filters of lanes."""


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
    """An encoded tc request for interface 0; patch the interface with ``at_index``.

    ``options``: what pyroute2 encodes, or the bytes of a whole TCA_OPTIONS attribute.
    """
    message = tcmsg()
    message["handle"] = handle
    message["parent"] = parent
    message["info"] = info
    attrs: list[list[Any]] = []
    if name is not None:
        attrs.append(["TCA_KIND", name])
    if options is not None and not isinstance(options, bytes):
        attrs.append(["TCA_OPTIONS", options])
    message["attrs"] = attrs
    data = encode(message, kind, flags)
    if isinstance(options, bytes):
        data += b"\0" * (-len(data) & 3) + options
        data = struct.pack("=I", len(data)) + data[4:]
    return data


def _attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + b"\0" * (-len(payload) & 3)


@functools.cache
def htb_qdisc(handle: int, default: int) -> bytes:
    """An htb root that sends unknown traffic to the class ``default``."""
    options = sched_htb.get_parameters({"default": default})
    return tc_request(RTM_NEWQDISC, "htb", handle=handle, parent=TC_H_ROOT, options=options)


@functools.cache
def prio_qdisc(handle: int, parent: int, bands: int) -> bytes:
    """Strict priority between ``bands``; what no filter sends elsewhere goes into the last."""
    options = _attribute(TCA_OPTIONS, _PRIO.pack(bands, *[bands - 1] * _PRIORITIES))
    return tc_request(RTM_NEWQDISC, "prio", handle=handle, parent=parent, options=options)


@functools.cache
def ets_qdisc(handle: int, parent: int, quanta: Sequence[int]) -> bytes:
    """Deficit round robin between bands with ``quanta`` (bytes); what no filter sends elsewhere goes into the last."""
    weights = b"".join(_attribute(_ETS_QUANTUM, struct.pack("=I", quantum)) for quantum in quanta)
    priomap = _attribute(_ETS_BAND, bytes((len(quanta) - 1,))) * _PRIORITIES
    inner = (
        _attribute(_ETS_BANDS, bytes((len(quanta),)))
        + _attribute(_ETS_QUANTA | _NESTED, weights)
        + _attribute(_ETS_PRIOMAP | _NESTED, priomap)
    )
    options = _attribute(TCA_OPTIONS | _NESTED, inner)
    return tc_request(RTM_NEWQDISC, "ets", handle=handle, parent=parent, options=options)


@functools.cache
def drr_qdisc(handle: int, parent: int) -> bytes:
    """Deficit round robin; its classes and filters say between what. A packet without a class would be dropped."""
    return tc_request(RTM_NEWQDISC, "drr", handle=handle, parent=parent)


@functools.cache
def drr_class(classid: int, parent: int, quantum_bytes: int) -> bytes:
    """One class of a drr qdisc."""
    inner = _attribute(_DRR_QUANTUM, struct.pack("=I", quantum_bytes))
    options = _attribute(TCA_OPTIONS | _NESTED, inner)
    return tc_request(RTM_NEWTCLASS, "drr", handle=classid, parent=parent, options=options)


@functools.cache
def u32_filter(parent: int, target: int, keys: tuple[Key, ...]) -> bytes:
    """IP packets to which all ``keys`` apply go into class ``target``."""
    # pyroute2 wants the mask in full: it drops leading zero bytes of a hexadecimal mask and moves the offset along
    texts = [f"{key.value:#x}/0x{key.mask:08x}+{key.offset}" for key in keys] or [_ANYTHING]
    options = cls_u32.get_parameters({"target": target, "keys": texts})
    return tc_request(RTM_NEWTFILTER, "u32", parent=parent, info=LANE_FILTERS, options=options)


@functools.cache
def clsact() -> bytes:
    """The hooks for ``redirect``."""
    return tc_request(RTM_NEWQDISC, "clsact", handle=0xFFFF0000, parent=_TC_H_CLSACT)


@functools.cache
def redirect(hook: int, target: int, ifb_index: int) -> bytes:
    """Everything that passes ``hook`` leaves through the interface ``ifb_index``."""
    action = {"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": ifb_index}
    options = cls_u32.get_parameters({"target": target, "keys": [_ANYTHING], "action": [action]})
    # u32 lists the filters of both hooks of a clsact under either if their preferences are equal: keep them apart
    prio = 1 if hook == INGRESS_HOOK else 2
    return tc_request(RTM_NEWTFILTER, "u32", parent=hook, info=filter_info(prio, _ETH_P_ALL), options=options)


def read_bands(kind: str, options: memoryview) -> tuple[list[int], set[int]]:
    """Of a prio or ets qdisc: the quantum of each band (0: strict), and the bands that unknown traffic enters.

    ``options`` is the payload of TCA_OPTIONS as the kernel dumps it.
    """
    if kind == "prio":
        bands, *priomap = _PRIO.unpack_from(options)
        return [0] * bands, set(priomap)
    found = attributes(options, 0)
    strict = found[_ETS_STRICT][0] if _ETS_STRICT in found else 0
    quanta = [struct.unpack("=I", payload)[0] for payload in _each(found.get(_ETS_QUANTA))]
    return [0] * strict + quanta, {payload[0] for payload in _each(found.get(_ETS_PRIOMAP))}


def read_drr_quantum(options: memoryview) -> int:
    """Quantum of a drr class in bytes."""
    quantum: int = struct.unpack("=I", attributes(options, 0)[_DRR_QUANTUM])[0]
    return quantum


def _each(nested: memoryview | None) -> list[memoryview]:
    """Payloads of attributes that repeat."""
    found: list[memoryview] = []
    at = 0
    while nested is not None and at + 4 <= len(nested):
        length, _ = struct.unpack_from("=HH", nested, at)
        found.append(nested[at + 4 : at + length])
        at += (length + 3) & ~3
    return found
