"""Reads the network back from the kernel and names everything that differs from the spec.

A link that was shaped wrongly at one end only, a lane filter that is gone, a bridge port that no longer reflects: each
leaves the run looking plausible. This check knows nothing of how the network was built; it compares what the kernel
says with what the spec demands, device by device, in both directions.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pyroute2.netlink.rtnl.tcmsg.common import calc_xmittime

from testbed.fabric.live import addresses
from testbed.fabric.live.addresses import Plan, ShapedPort
from testbed.fabric.live.lanes import (
    BANDS,
    KV_BAND,
    LINK_CLASS,
    PACKET_BYTES,
    QUANTUM_BYTES,
    QUEUE_PACKETS,
    ROOT,
    TURNS,
    HtbClass,
    Match,
    PortQueues,
    burst_bytes,
    queues_of,
)
from testbed.fabric.live.netlink import DUMP, RTM_GETLINK, NetlinkSocket, at_index, attributes, encode_dump
from testbed.fabric.live.network import Network
from testbed.fabric.live.tc import (
    EGRESS_HOOK,
    INGRESS_HOOK,
    RTM_GETQDISC,
    RTM_GETTCLASS,
    RTM_GETTFILTER,
    TC_ATTRIBUTES,
    TC_HEADER,
    TCA_KIND,
    TCA_OPTIONS,
    Key,
    read_bands,
    read_drr_quantum,
    tc_request,
)

_IFLA_IFNAME, _IFLA_TXQLEN, _IFLA_LINKINFO, _IFLA_GSO_MAX_SIZE, _IFLA_MASTER = 3, 13, 18, 41, 10
_INFO_SLAVE_DATA = 5
_BRPORT_MODE = 4
_HTB_PARMS, _HTB_INIT = 1, 2
_U32_CLASSID, _U32_SEL, _U32_ACT = 1, 5, 7
_U32_KEYS = 16  # where the keys of a selector begin
_U32_KEY = struct.Struct("=4s4sii")  # mask, value, offset, of the next header
_ACT_OPTIONS, _MIRRED_PARMS = 2, 2
_LINK_ATTRIBUTES = 32
_RATESPEC = struct.Struct("=BBHhHI")
_HTB_TAIL = struct.Struct("=IIIII")
_IFF_UP = 0x1

_QDISCS = tc_request(RTM_GETQDISC, None, flags=DUMP)
_CLASSES = tc_request(RTM_GETTCLASS, None, flags=DUMP)
_LINKS = encode_dump(RTM_GETLINK)

_Keys = tuple[tuple[int, bytes, bytes], ...]  # of each: offset of the first byte that matters, value, mask


class _Qdisc(NamedTuple):
    """One queueing discipline as dumped; ``options`` undecoded."""

    kind: str
    parent: int
    options: memoryview


def verify_shaping(network: Network) -> list[str]:
    """Every difference between the kernel's state and the spec, one sentence each; empty if there is none."""
    problems: list[str] = []
    ports: dict[str, list[ShapedPort]] = defaultdict(list)
    for port in network.plan.ports.values():
        ports[port.host].append(port)
    wanted = _wanted_devices(network.plan)
    redirects = _wanted_redirects(network.plan)
    for host in network.namespaces:
        socket = network.socket(host)
        problems += _check_links(socket, host, wanted.get(host, {}))
        problems += check_ports(socket, ports[host])
        for index, device, ifb in redirects.get(host, ()):
            problems += _check_redirect(socket, f"{host}:{device}", index, ifb)
    return problems


def check_ports(socket: NetlinkSocket, ports: Sequence[ShapedPort]) -> list[str]:
    """Every difference between the kernel's queues and the spec, for ports of the socket's namespace."""
    qdiscs = _qdiscs(socket)
    return [problem for port in ports for problem in _check_port(socket, port, qdiscs.get(port.index, {}))]


def _wanted_devices(plan: Plan) -> dict[str, dict[int, tuple[str, bool | None]]]:
    """Per namespace and index of an emulated device: its name; for a switch port, whether it has to reflect."""
    wanted: dict[str, dict[int, tuple[str, bool | None]]] = defaultdict(dict)
    for link in plan.links:
        wanted[link.switch][link.port_index] = (link.port, link.hairpin)
        wanted[link.host][link.index] = (link.device, None)
    for node in plan.nodes:
        wanted[node.name][addresses.DRAM_INDEX] = ("dram", None)
        for i in range(node.gpus):
            wanted[node.name][addresses.MEMORY_INDEX + i] = (f"mem{i}", None)
            wanted[node.name][addresses.COPY_INDEX + i] = (f"copy{i}", None)
            wanted[node.gpu(i)] |= {
                addresses.GPU_CNIC_INDEX: ("cnic", None),
                addresses.GPU_COPY_INDEX: ("copy", None),
                addresses.GPU_PCIE_RX_INDEX: ("pcie_rx", None),
                addresses.GPU_PCIE_TX_INDEX: ("pcie_tx", None),
            }
    return wanted


def _wanted_redirects(plan: Plan) -> dict[str, list[tuple[int, str, tuple[int, int]]]]:
    """Per namespace: index and name of a device, and the ifbs that its ingress and egress go through."""
    wanted: dict[str, list[tuple[int, str, tuple[int, int]]]] = {}
    dram = (addresses.DRAM_INDEX, addresses.DRAM_INDEX)
    pcie = (addresses.GPU_PCIE_RX_INDEX, addresses.GPU_PCIE_TX_INDEX)
    for node in plan.nodes:
        of_node = wanted[node.name] = [(addresses.SNIC_INDEX, "snic", dram)]
        for i in range(node.gpus):
            of_node.append((addresses.MEMORY_INDEX + i, f"mem{i}", dram))
            of_node.append((addresses.COPY_INDEX + i, f"copy{i}", dram))
            wanted[node.gpu(i)] = [
                (addresses.GPU_CNIC_INDEX, "cnic", pcie),
                (addresses.GPU_COPY_INDEX, "copy", pcie),
            ]
    return wanted


def _check_links(socket: NetlinkSocket, host: str, wanted: dict[int, tuple[str, bool | None]]) -> Iterator[str]:
    missing = dict(wanted)
    for message in socket.dump(_LINKS):
        index, flags = struct.unpack_from("=iI", message, 20)
        if index not in missing:
            continue
        name, hairpin = missing.pop(index)
        attrs = attributes(message, _LINK_ATTRIBUTES)
        where = f"{host}:{name}"
        if not flags & _IFF_UP:
            yield f"{where} is down."
        gso = _number(attrs.get(_IFLA_GSO_MAX_SIZE))
        if gso != PACKET_BYTES:
            yield f"{where} may send super-packets of {gso} bytes instead of {PACKET_BYTES}."
        queue = _number(attrs.get(_IFLA_TXQLEN))
        if queue != QUEUE_PACKETS:
            yield f"{where} has a queue of {queue} packets instead of {QUEUE_PACKETS}."
        if hairpin is not None:
            yield from _check_bridge_port(where, attrs, hairpin)
    for name, _ in missing.values():
        yield f"{host}:{name} does not exist."


def _check_bridge_port(where: str, attrs: dict[int, memoryview], hairpin: bool) -> Iterator[str]:
    if _number(attrs.get(_IFLA_MASTER)) != addresses.BRIDGE_INDEX:
        yield f"{where} is not a port of its switch."
        return
    slave = attributes(attrs[_IFLA_LINKINFO], 0).get(_INFO_SLAVE_DATA)
    mode = attributes(slave, 0).get(_BRPORT_MODE) if slave is not None else None
    if mode is None or bool(mode[0]) != hairpin:
        yield f"{where} has hairpin {'off' if hairpin else 'on'} instead of {'on' if hairpin else 'off'}."


def _number(value: memoryview | None) -> int | None:
    return None if value is None else struct.unpack("=I", value)[0]


def _qdiscs(socket: NetlinkSocket) -> dict[int, dict[int, _Qdisc]]:
    """Per interface, those that a port of ours has at its own handles."""
    found: dict[int, dict[int, _Qdisc]] = defaultdict(dict)
    for message in socket.dump(_QDISCS):
        index, handle, parent, _ = TC_HEADER.unpack_from(message, 20)
        attrs = attributes(message, TC_ATTRIBUTES)
        kind = bytes(attrs[TCA_KIND]).rstrip(b"\0").decode()
        if handle in (ROOT, BANDS, TURNS):
            found[index][handle] = _Qdisc(kind, parent, attrs.get(TCA_OPTIONS, memoryview(b"")))
    return found


def _check_port(socket: NetlinkSocket, port: ShapedPort, qdiscs: Mapping[int, _Qdisc]) -> Iterator[str]:
    root = qdiscs.get(ROOT)
    if root is None or root.kind != "htb":
        yield f"{port.name} ({port.host}:{port.device}) is not shaped."
        return
    queues = queues_of(port)
    init = attributes(root.options, 0)[_HTB_INIT]
    default = struct.unpack_from("=5I", init)[2]
    if default & 0xFFFF != queues.default & 0xFFFF:
        yield f"{port.name} sends unknown traffic to class 1:{default & 0xFFFF:x}, not {_class_name(queues.default)}."
    yield from _check_inner(port, queues, qdiscs)
    yield from _check_classes(socket, port, queues)
    for qdisc in (ROOT, BANDS, TURNS):
        yield from _check_filters(socket, port, qdisc, [match for match in queues.matches if match.parent == qdisc])


def _check_inner(port: ShapedPort, queues: PortQueues, qdiscs: Mapping[int, _Qdisc]) -> Iterator[str]:
    """The qdiscs below htb's classes: the bands, and the turns between sources in the KV band."""
    kinds = {BANDS: (queues.bands, LINK_CLASS), TURNS: ("drr" if queues.turns else "", KV_BAND)}
    for handle, (kind, parent) in kinds.items():
        qdisc = qdiscs.get(handle)
        there = qdisc.kind if qdisc else ""
        if there != kind:
            yield f"{port.name} has {there or 'nothing'} at {handle >> 16}: instead of {kind or 'nothing'}."
        elif qdisc and qdisc.parent != parent:
            yield f"{port.name} has its {kind} under {_class_name(qdisc.parent)} instead of {_class_name(parent)}."
        elif qdisc and handle == BANDS:
            quanta, unknown = read_bands(kind, qdisc.options)
            wanted = list(port.ets_quanta) if kind == "ets" else [0, 0]
            if quanta != wanted:
                yield f"{port.name} has bands of quanta {quanta} instead of {wanted} (0: strict)."
            if unknown != {1}:
                yield f"{port.name} sends unknown traffic to bands {sorted(unknown)} instead of KV's, 1."


def _check_filters(socket: NetlinkSocket, port: ShapedPort, qdisc: int, matches: Sequence[Match]) -> Iterator[str]:
    wanted = [(match.target, _normal_keys(match)) for match in matches]
    found = [(target, key) for target, key, _ in _filters(socket, port.index, qdisc)] if wanted else []
    for target, key in wanted:
        if (target, key) not in found:
            yield f"{port.name} lacks the filter into class {_class_name(target)}."
    for target, key in found:
        if (target, key) not in wanted:
            yield f"{port.name} has a foreign filter into class {_class_name(target)}."
    if found != wanted and sorted(found) == sorted(wanted):
        yield f"{port.name} has its filters in the wrong order."


def _check_classes(socket: NetlinkSocket, port: ShapedPort, queues: PortQueues) -> Iterator[str]:
    found: dict[int, tuple[int, ...]] = {}
    turns: dict[int, int] = {}
    for message in socket.dump(at_index(_CLASSES, port.index)):
        _, handle, parent, _ = TC_HEADER.unpack_from(message, 20)
        attrs = attributes(message, TC_ATTRIBUTES)
        if handle >> 16 == ROOT >> 16:
            parms = attributes(attrs[TCA_OPTIONS], 0)[_HTB_PARMS]
            rate, ceil = _RATESPEC.unpack_from(parms)[5], _RATESPEC.unpack_from(parms, _RATESPEC.size)[5]
            buffer, cbuffer, quantum, _, prio = _HTB_TAIL.unpack_from(parms, 2 * _RATESPEC.size)
            found[handle] = (parent, rate, ceil, buffer, cbuffer, quantum, prio)
        elif handle >> 16 == TURNS >> 16:
            turns[handle] = read_drr_quantum(attrs[TCA_OPTIONS])
    for cls in queues.classes:
        where = f"{port.name} class {_class_name(cls.classid)}"
        values = found.pop(cls.classid, None)
        if values is None:
            yield f"{where} is missing."
        else:
            yield from _compare_class(where, cls, values)
    for classid in queues.turns:
        quantum = turns.pop(classid, 0)
        if quantum != QUANTUM_BYTES:
            state = f"has quantum {quantum} instead of {QUANTUM_BYTES}" if quantum else "is missing"
            yield f"{port.name} class {_class_name(classid)} {state}."
    for classid in (*found, *turns):
        yield f"{port.name} has a foreign class {_class_name(classid)}."


def _compare_class(where: str, cls: HtbClass, values: tuple[int, ...]) -> Iterator[str]:
    parent, rate, ceil, buffer, cbuffer, quantum, prio = values
    wanted_rate, wanted_ceil = cls.rate_bps // 8, cls.ceil_bps // 8
    if parent not in (cls.parent, 0xFFFFFFFF if cls.parent == ROOT else cls.parent):
        yield f"{where} hangs under {_class_name(parent)} instead of {_class_name(cls.parent)}."
    for name, have, want in (("rate", rate, wanted_rate), ("ceiling", ceil, wanted_ceil)):
        if have != min(want, 0xFFFFFFFF):
            yield f"{where} has a {name} of {have * 8} bit/s instead of {want * 8} ({have / want - 1:+.1%})."
    burst = burst_bytes(cls.ceil_bps)
    for name, have, want in (
        ("burst", buffer, min(calc_xmittime(wanted_rate, burst), 0xFFFFFFFF)),
        ("ceiling burst", cbuffer, calc_xmittime(wanted_ceil, burst)),
    ):
        if abs(have - want) > 1 + want // 1000:
            yield f"{where} has a {name} of {have} ticks instead of {want}."
    if cls.leaf and (quantum, prio) != (QUANTUM_BYTES, cls.prio):
        yield f"{where} has quantum {quantum} and prio {prio} instead of {QUANTUM_BYTES} and {cls.prio}."


def _filters(socket: NetlinkSocket, index: int, parent: int) -> Iterator[tuple[int, _Keys, int]]:
    """The u32 filters of a hook in order: target class, normalised key, interface redirected to (0: none)."""
    request = tc_request(RTM_GETTFILTER, None, parent=parent, flags=DUMP)
    for message in socket.dump(at_index(request, index)):
        attrs = attributes(message, TC_ATTRIBUTES)
        options = attributes(attrs[TCA_OPTIONS], 0) if TCA_OPTIONS in attrs else {}
        if _U32_SEL not in options or _U32_CLASSID not in options:
            continue  # the hash table itself
        selector = options[_U32_SEL]
        words = _U32_KEY.iter_unpack(selector[_U32_KEYS:])
        keys = tuple(_normalise(value, mask, offset) for mask, value, offset, _ in words)
        redirected = 0
        if _U32_ACT in options:
            for action in attributes(options[_U32_ACT], 0).values():
                parms = attributes(attributes(action, 0)[_ACT_OPTIONS], 0)[_MIRRED_PARMS]
                redirected = struct.unpack_from("=7I", parms)[6]
        target = struct.unpack("=I", options[_U32_CLASSID])[0]
        yield target, keys, redirected


def _normal_keys(match: Match) -> _Keys:
    keys = match.keys or (Key(value=0, mask=0, offset=0),)
    return tuple(_normalise(key.value.to_bytes(4), key.mask.to_bytes(4), key.offset) for key in keys)


def _normalise(value: bytes, mask: bytes, offset: int) -> tuple[int, bytes, bytes]:
    """A key without the bytes that its mask ignores at either end (the encoder moves keys to byte boundaries)."""
    first = len(mask) - len(mask.lstrip(b"\0"))
    last = len(mask.rstrip(b"\0"))
    return offset + first, value[first:last], mask[first:last]


def _check_redirect(socket: NetlinkSocket, where: str, index: int, ifbs: tuple[int, int]) -> Iterator[str]:
    for hook, name, ifb in ((INGRESS_HOOK, "ingress", ifbs[0]), (EGRESS_HOOK, "egress", ifbs[1])):
        targets = [redirected for _, _, redirected in _filters(socket, index, hook)]
        if targets != [ifb]:
            yield f"{where} does not redirect its {name} through the resource it belongs to."


def _class_name(classid: int) -> str:
    return f"{classid >> 16:x}:{classid & 0xFFFF:x}"
