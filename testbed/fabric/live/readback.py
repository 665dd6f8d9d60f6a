"""Reads the network back from the kernel and names everything that differs from the spec.

A link that was shaped wrongly at one end only, a lane filter that is gone, a bridge port that no longer reflects: each
leaves the run looking plausible. This check knows nothing of how the network was built; it compares what the kernel
says with what the spec demands, device by device, in both directions.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator

from pyroute2.netlink.rtnl.tcmsg.common import calc_xmittime

from testbed.fabric.live import addresses
from testbed.fabric.live.addresses import Plan, PortKind, ShapedPort
from testbed.fabric.live.lanes import (
    EGRESS_HOOK,
    INGRESS_HOOK,
    PACKET_BYTES,
    QUANTUM_BYTES,
    QUEUE_PACKETS,
    REST_CLASS,
    ROOT,
    RTM_GETQDISC,
    RTM_GETTCLASS,
    RTM_GETTFILTER,
    SHARED_CLASS,
    HtbClass,
    Match,
    burst_bytes,
    classes_of,
    matches_of,
    tc_request,
)
from testbed.fabric.live.netlink import DUMP, RTM_GETLINK, NetlinkSocket, at_index, attributes, encode_dump
from testbed.fabric.live.network import Network

_IFLA_IFNAME, _IFLA_TXQLEN, _IFLA_LINKINFO, _IFLA_GSO_MAX_SIZE, _IFLA_MASTER = 3, 13, 18, 41, 10
_INFO_SLAVE_DATA = 5
_BRPORT_MODE = 4
_TCA_KIND, _TCA_OPTIONS = 1, 2
_HTB_PARMS, _HTB_INIT = 1, 2
_U32_CLASSID, _U32_SEL, _U32_ACT = 1, 5, 7
_ACT_OPTIONS, _MIRRED_PARMS = 2, 2
_LINK_ATTRIBUTES, _TC_ATTRIBUTES = 32, 36
_TC_HEADER = struct.Struct("=iIII")
_RATESPEC = struct.Struct("=BBHhHI")
_HTB_TAIL = struct.Struct("=IIIII")
_IFF_UP = 0x1

_QDISCS = tc_request(RTM_GETQDISC, None, flags=DUMP)
_CLASSES = tc_request(RTM_GETTCLASS, None, flags=DUMP)
_LINKS = encode_dump(RTM_GETLINK)

_Key = tuple[int, bytes, bytes]  # offset of the first byte that matters, value, mask


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
        defaults = _root_defaults(socket)
        for port in ports[host]:
            problems += _check_port(socket, port, network.spec.high_share, defaults.get(port.index))
        for index, device, ifb in redirects.get(host, ()):
            problems += _check_redirect(socket, f"{host}:{device}", index, ifb)
    return problems


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


def _root_defaults(socket: NetlinkSocket) -> dict[int, int]:
    """Per interface with an htb root: the class of unknown traffic."""
    defaults: dict[int, int] = {}
    for message in socket.dump(_QDISCS):
        index, handle, _, _ = _TC_HEADER.unpack_from(message, 20)
        attrs = attributes(message, _TC_ATTRIBUTES)
        if handle == ROOT and bytes(attrs[_TCA_KIND]) == b"htb\0":
            init = attributes(attrs[_TCA_OPTIONS], 0)[_HTB_INIT]
            defaults[index] = struct.unpack_from("=5I", init)[2]
    return defaults


def _check_port(socket: NetlinkSocket, port: ShapedPort, high_share: float, default: int | None) -> Iterator[str]:
    if default is None:
        yield f"{port.name} ({port.host}:{port.device}) is not shaped."
        return
    wanted_default = SHARED_CLASS if port.kind is PortKind.SHARED else REST_CLASS
    if default & 0xFFFF != wanted_default & 0xFFFF:
        yield f"{port.name} sends unknown traffic to class {_class_name(default)}, not {_class_name(wanted_default)}."
    yield from _check_classes(socket, port, high_share)
    wanted = [(match.target, _normal_key(match)) for match in matches_of(port)]
    found = [(target, key) for target, key, _ in _filters(socket, port.index, ROOT)]
    for target, key in wanted:
        if (target, key) not in found:
            yield f"{port.name} lacks the filter into class {_class_name(target)}."
    for target, key in found:
        if (target, key) not in wanted:
            yield f"{port.name} has a foreign filter into class {_class_name(target)}."
    if found != wanted and sorted(found) == sorted(wanted):
        yield f"{port.name} has its filters in the wrong order."


def _check_classes(socket: NetlinkSocket, port: ShapedPort, high_share: float) -> Iterator[str]:
    found: dict[int, tuple[int, ...]] = {}
    for message in socket.dump(at_index(_CLASSES, port.index)):
        _, handle, parent, _ = _TC_HEADER.unpack_from(message, 20)
        attrs = attributes(message, _TC_ATTRIBUTES)
        if handle >> 16 == ROOT >> 16:
            parms = attributes(attrs[_TCA_OPTIONS], 0)[_HTB_PARMS]
            rate, ceil = _RATESPEC.unpack_from(parms)[5], _RATESPEC.unpack_from(parms, _RATESPEC.size)[5]
            buffer, cbuffer, quantum, _, prio = _HTB_TAIL.unpack_from(parms, 2 * _RATESPEC.size)
            found[handle] = (parent, rate, ceil, buffer, cbuffer, quantum, prio)
    for cls in classes_of(port, high_share):
        where = f"{port.name} class {_class_name(cls.classid)}"
        values = found.pop(cls.classid, None)
        if values is None:
            yield f"{where} is missing."
        else:
            yield from _compare_class(where, cls, values)
    for classid in found:
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


def _filters(socket: NetlinkSocket, index: int, parent: int) -> Iterator[tuple[int, _Key, int]]:
    """The u32 filters of a hook in order: target class, normalised key, interface redirected to (0: none)."""
    request = tc_request(RTM_GETTFILTER, None, parent=parent, flags=DUMP)
    for message in socket.dump(at_index(request, index)):
        attrs = attributes(message, _TC_ATTRIBUTES)
        options = attributes(attrs[_TCA_OPTIONS], 0) if _TCA_OPTIONS in attrs else {}
        if _U32_SEL not in options or _U32_CLASSID not in options:
            continue  # the hash table itself
        selector = options[_U32_SEL]
        mask, value, offset = (selector[16:20], selector[20:24], struct.unpack_from("=i", selector, 24)[0])
        redirected = 0
        if _U32_ACT in options:
            for action in attributes(options[_U32_ACT], 0).values():
                parms = attributes(attributes(action, 0)[_ACT_OPTIONS], 0)[_MIRRED_PARMS]
                redirected = struct.unpack_from("=7I", parms)[6]
        target = struct.unpack("=I", options[_U32_CLASSID])[0]
        yield target, _normalise(bytes(value), bytes(mask), offset), redirected


def _normal_key(match: Match) -> _Key:
    return _normalise(match.value.to_bytes(4, "big"), match.mask.to_bytes(4, "big"), match.offset)


def _normalise(value: bytes, mask: bytes, offset: int) -> _Key:
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
    return f"1:{classid & 0xFFFF:x}"
