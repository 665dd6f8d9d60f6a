"""What crossed every shaped resource, from the kernel's own counters.

Which headers count. htb and its queues charge each packet with its length on the wire as the kernel sees it: the
14-byte Ethernet header (no preamble, no FCS), IP, TCP, payload; a super-packet counts as its segments, each with
headers of its own. So for TCP with timestamps (Linux's default) and a class that holds nothing but data segments::

    payload = bytes - packets * (14 + 20 + 32)

which is what ``ClassCount.payload_bytes`` computes. Pure acknowledgements do not disturb it: they have a class of their
own (``ack``). Retransmissions count as often as they crossed; ``segments_resent`` tells them. Copies through the ifbs
(PCIe, DRAM) are charged alike.

One dump per namespace: the queues under htb's classes are asked for with TCA_DUMP_INVISIBLE, so classes need no
dump of their own (those go interface by interface).
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from pyroute2.netlink.rtnl.ifstatsmsg import ifstatsmsg
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from testbed.fabric.live.addresses import BRIDGE_INDEX, PortKind, ShapedPort
from testbed.fabric.live.lanes import ACK_CLASS, BANDS, HIGH_BAND, HIGH_CLASS, LINK_CLASS, REST, ROOT, TURNS
from testbed.fabric.live.netlink import DUMP, attributes, encode
from testbed.fabric.live.network import Network
from testbed.fabric.live.readback import verify_shaping
from testbed.fabric.live.tc import RTM_GETQDISC, TC_ATTRIBUTES, TC_HEADER, TCA_STATS2

__all__ = [
    "HEADER_BYTES",
    "ClassCount",
    "LinkCounter",
    "read_counters",
    "segments_resent",
    "total_drops",
    "verify_shaping",
]

HEADER_BYTES = 14 + 20 + 32
"""Ethernet, IPv4 and TCP with timestamps: what a data segment carries besides payload."""

_RTM_GETSTATS = 94
_STATS_LINK_64 = 1
_STATS_BASIC, _STATS_QUEUE = 1, 3
_BASIC = struct.Struct("=QI")
_QUEUE = struct.Struct("=IIIII")
_DROPPED = struct.Struct("=QQ")
_DROPPED_OFFSET = 48  # rx_dropped and tx_dropped in rtnl_link_stats64
_STATS_ATTRIBUTES = 28
_OURS = (ROOT >> 16, TURNS >> 16)


class _DumpInvisible(tcmsg):  # type: ignore[misc]
    """tcmsg with the flag attribute TCA_DUMP_INVISIBLE (10), which pyroute2 0.9 does not know."""

    nla_map = (*tcmsg.nla_map, ("TCA_PAD", "hex"), ("TCA_DUMP_INVISIBLE", "flag"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCount:
    """Bytes on the wire and segments that left a class."""

    bytes: int = 0
    packets: int = 0

    @property
    def payload_bytes(self) -> int:
        """TCP payload of a class of data segments."""
        return self.bytes - self.packets * HEADER_BYTES

    def __add__(self, other: ClassCount) -> ClassCount:
        """Sum of two classes."""
        return ClassCount(bytes=self.bytes + other.bytes, packets=self.packets + other.packets)

    def __sub__(self, earlier: ClassCount) -> ClassCount:
        """What passed since ``earlier``."""
        return ClassCount(bytes=self.bytes - earlier.bytes, packets=self.packets - earlier.packets)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCounter:
    """Counters of one resource and direction.

    ``high`` and ``kv`` are the lanes of a NIC or switch port, ``shared`` all data of a PCIe link, of DRAM, or of a NIC
    whose lanes are off (the kernel does not tell them apart there), ``rest`` the part of ``kv`` that came from a source
    without a queue of its own (0 for paths of the paper).
    ``drops``, ``overlimits`` and ``backlog_bytes`` are of the whole interface.
    """

    name: str
    kv: ClassCount
    high: ClassCount
    shared: ClassCount
    ack: ClassCount
    rest: ClassCount
    drops: int
    overlimits: int
    backlog_bytes: int

    @property
    def data(self) -> ClassCount:
        """Everything but acknowledgements."""
        return self.kv + self.high + self.shared


@dataclass(slots=True)
class _Queue:
    """One qdisc of a dump."""

    handle: int
    parent: int
    count: ClassCount
    backlog_bytes: int
    drops: int
    overlimits: int


def read_counters(network: Network, containing: str = "") -> dict[str, LinkCounter]:
    """Counters of every shaped resource, by name ("pe0.snic.rx", "pe0.cnic3.read", "pe0gpu3.pcie.tx", "pe0.dram").

    ``containing`` keeps the names that contain it (".snic."), and reads only the hosts that have such.
    """
    ports: dict[str, list[ShapedPort]] = defaultdict(list)
    for port in network.plan.ports.values():
        if containing in port.name:
            ports[port.host].append(port)
    counters: dict[str, LinkCounter] = {}
    for host, of_host in ports.items():
        queues = _queues_by_index(network, host)
        for port in of_host:
            counters[port.name] = _count(port, queues.get(port.index, []))
    return {name: counters[name] for name in network.plan.ports if name in counters}


def total_drops(network: Network) -> int:
    """Packets dropped anywhere in the cluster since it was built, by queues and by interfaces."""
    total = 0
    for host in network.namespaces:
        for queues in _queues_by_index(network, host).values():
            # a leaf's drops are repeated by its parent: count every interface once
            total += max((queue.drops for queue in queues if queue.handle == ROOT), default=0)
        for message in network.socket(host).dump(_STATS_REQUEST):
            index = struct.unpack_from("=I", message, 20)[0]
            stats = attributes(message, _STATS_ATTRIBUTES).get(_STATS_LINK_64)
            if stats is not None and index >= BRIDGE_INDEX:
                total += sum(_DROPPED.unpack_from(stats, _DROPPED_OFFSET))
    return total


def segments_resent(network: Network) -> dict[str, int]:
    """Segments that TCP has sent again since the cluster was built, by host. Nothing is lost: it should send none."""
    resent = {}
    for host in network.hosts:
        with network.inside(host):
            lines = Path("/proc/thread-self/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        resent[host] = int(dict(zip(names, values, strict=True))["RetransSegs"])
    return resent


def _queues_by_index(network: Network, host: str) -> dict[int, list[_Queue]]:
    found: dict[int, list[_Queue]] = defaultdict(list)
    for message in network.socket(host).dump(_QDISC_REQUEST):
        index, handle, parent, _ = TC_HEADER.unpack_from(message, 20)
        stats = attributes(message, TC_ATTRIBUTES).get(TCA_STATS2)
        if index < BRIDGE_INDEX or stats is None:
            continue
        parts = attributes(stats, 0)
        size, packets = _BASIC.unpack_from(parts[_STATS_BASIC])
        _, backlog, drops, _, overlimits = _QUEUE.unpack_from(parts[_STATS_QUEUE])
        count = ClassCount(bytes=size, packets=packets)
        found[index].append(_Queue(handle, parent, count, backlog, drops, overlimits))
    return found


def _count(port: ShapedPort, queues: list[_Queue]) -> LinkCounter:
    none = ClassCount()
    kv = high = shared = ack = rest = none
    drops = overlimits = backlog = 0
    for queue in queues:
        if queue.handle == ROOT:
            drops, overlimits, backlog = queue.drops, queue.overlimits, queue.backlog_bytes
        elif queue.parent == ACK_CLASS:
            ack = queue.count
        elif queue.parent in (HIGH_CLASS, HIGH_BAND):
            high = queue.count
        elif queue.handle in (BANDS, TURNS) or queue.parent >> 16 not in _OURS:
            continue  # what passes these is counted in their leaves; clsact
        elif port.kind is PortKind.SHARED or queue.parent == LINK_CLASS:
            shared = queue.count
        else:
            kv += queue.count
            if queue.parent & 0xFFFF == REST:
                rest = queue.count
    return LinkCounter(
        name=port.name, kv=kv, high=high, shared=shared, ack=ack, rest=rest,
        drops=drops, overlimits=overlimits, backlog_bytes=backlog,
    )  # fmt: skip


def _qdisc_request() -> bytes:
    message = _DumpInvisible()
    message.compile_nla_table()  # or it shares its parent's table, if that was used before
    message["attrs"] = [["TCA_DUMP_INVISIBLE", True]]
    return encode(message, RTM_GETQDISC, DUMP)


def _stats_request() -> bytes:
    message = ifstatsmsg()
    message["filter_mask"] = 1 << (_STATS_LINK_64 - 1)
    return encode(message, _RTM_GETSTATS, DUMP)


_QDISC_REQUEST = _qdisc_request()
_STATS_REQUEST = _stats_request()
