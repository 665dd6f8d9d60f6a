"""Netlink messages that make and address the devices of a network.

Messages that differ only in addresses are encoded once with a stand-in and patched, because pyroute2 needs about
0.2 ms for a link message and a cluster has thousands of them.
"""

from __future__ import annotations

import functools
import ipaddress
import struct
from typing import Any

from pyroute2.netlink.rtnl.fibmsg import fibmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import IFF_UP, ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import NTF_MASTER, NUD_NOARP, NUD_PERMANENT, ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from testbed.fabric.live.addresses import mac_of
from testbed.fabric.live.lanes import PACKET_BYTES, QUEUE_PACKETS
from testbed.fabric.live.netlink import CHANGE, CREATE, RTM_NEWLINK, Message, at_index, encode

_RTM_NEWADDR = 20
_RTM_NEWROUTE = 24
_RTM_NEWNEIGH = 28
_RTM_NEWRULE = 32
_AF_INET = 2
_AF_BRIDGE = 7

_STAND_IN_ADDRESS = "127.17.34.51"
_STAND_IN_BYTES = ipaddress.IPv4Address(_STAND_IN_ADDRESS).packed
_STAND_IN_MAC = mac_of(_STAND_IN_ADDRESS)

_EMULATED = [["IFLA_TXQLEN", QUEUE_PACKETS], ["IFLA_GSO_MAX_SIZE", PACKET_BYTES]]


@functools.cache
def _packed(address: str) -> bytes:
    return ipaddress.IPv4Address(address).packed


def patched(template: bytes, address: str) -> bytes:
    """``template`` with the stand-in (as IPv4 address and as the tail of a MAC address) replaced by ``address``."""
    return template.replace(_STAND_IN_BYTES, _packed(address))


def _link(attrs: list[list[Any]], index: int) -> bytes:
    message = ifinfmsg()
    message["index"] = index
    message["attrs"] = attrs
    return encode(message, RTM_NEWLINK, CREATE)


def bridge_message(index: int) -> Message:
    """A bridge that forwards by its static table only: no learning is needed, no multicast snooping wanted."""
    data = [["IFLA_BR_MCAST_SNOOPING", 0], ["IFLA_BR_AGEING_TIME", 0]]
    linkinfo = {"attrs": [["IFLA_INFO_KIND", "bridge"], ["IFLA_INFO_DATA", {"attrs": data}]]}
    return Message(_link([["IFLA_IFNAME", "br0"], ["IFLA_LINKINFO", linkinfo]], index), "make a bridge")


@functools.cache
def _ifb(name: str) -> bytes:
    return _link([["IFLA_IFNAME", name], *_EMULATED, ["IFLA_LINKINFO", {"attrs": [["IFLA_INFO_KIND", "ifb"]]}]], 0)


def ifb_message(name: str, index: int) -> Message:
    """An ifb: an interface whose egress queue everything redirected to it has to pass."""
    return Message(at_index(_ifb(name), index), f"make ifb {name}")


def veth_message(
    name: str,
    index: int,
    *,
    peer: str,
    peer_index: int,
    peer_fd: int | None = None,
    master: int = 0,
    address: str = "",
    peer_address: str = "",
    emulated: bool = True,
) -> Message:
    """A veth pair; the peer is made in the namespace behind ``peer_fd``. Addresses give the MACs only."""
    sizes = _EMULATED if emulated else []
    peer_attrs: list[list[Any]] = [["IFLA_IFNAME", peer], *sizes]
    if peer_fd is not None:
        peer_attrs.append(["IFLA_NET_NS_FD", peer_fd])
    if peer_address:
        peer_attrs.append(["IFLA_ADDRESS", mac_of(peer_address)])
    peer_info = {"index": peer_index, "attrs": peer_attrs}
    linkinfo = {"attrs": [["IFLA_INFO_KIND", "veth"], ["IFLA_INFO_DATA", {"attrs": [["VETH_INFO_PEER", peer_info]]}]]}
    attrs: list[list[Any]] = [["IFLA_IFNAME", name], *sizes, ["IFLA_LINKINFO", linkinfo]]
    if master:
        attrs.append(["IFLA_MASTER", master])
    if address:
        attrs.append(["IFLA_ADDRESS", mac_of(address)])
    return Message(_link(attrs, index), f"make veth {name}")


@functools.cache
def _macvlan(name: str, lower: int, mode: str, namespace_fd: int | None, emulated: bool) -> bytes:
    linkinfo = {
        "attrs": [
            ["IFLA_INFO_KIND", "macvlan"],
            ["IFLA_INFO_DATA", {"attrs": [["IFLA_MACVLAN_MODE", mode]]}],
        ]
    }
    attrs: list[list[Any]] = [
        ["IFLA_IFNAME", name],
        ["IFLA_LINK", lower],
        ["IFLA_ADDRESS", _STAND_IN_MAC],
        *(_EMULATED if emulated else []),
        ["IFLA_LINKINFO", linkinfo],
    ]
    if namespace_fd is not None:
        attrs.append(["IFLA_NET_NS_FD", namespace_fd])
    return _link(attrs, 0)


def macvlan_message(
    name: str, index: int, *, lower: int, mode: str, address: str, namespace_fd: int | None = None
) -> Message:
    """A macvlan child of ``lower`` ("vepa": an end of a CNIC; "bridge": a host of the control network)."""
    template = _macvlan(name, lower, mode, namespace_fd, mode == "vepa")
    return Message(at_index(patched(template, address), index), f"make macvlan {name}")


@functools.cache
def _bridge_port(hairpin: bool) -> bytes:
    settings = [
        ["IFLA_BRPORT_MODE", int(hairpin)],
        ["IFLA_BRPORT_LEARNING", 0],
        ["IFLA_BRPORT_UNICAST_FLOOD", 0],
        ["IFLA_BRPORT_MCAST_FLOOD", 0],
    ]
    message = ifinfmsg()
    message["flags"] = message["change"] = IFF_UP
    slave = [["IFLA_INFO_SLAVE_KIND", "bridge"], ["IFLA_INFO_SLAVE_DATA", {"attrs": settings}]]
    message["attrs"] = [["IFLA_LINKINFO", {"attrs": slave}]]
    return encode(message, RTM_NEWLINK, CHANGE)


def bridge_port_message(index: int, *, hairpin: bool) -> Message:
    """Set up and raise a bridge port: static forwarding; ``hairpin`` sends a frame back where it came from."""
    return Message(at_index(_bridge_port(hairpin), index), f"set up bridge port {index}")


@functools.cache
def _neighbour(family: int, state: int, flags: int) -> bytes:
    message = ndmsg()
    message["family"] = family
    message["state"] = state
    message["flags"] = flags
    attrs = [["NDA_LLADDR", _STAND_IN_MAC]]
    if family == _AF_INET:
        attrs.insert(0, ["NDA_DST", _STAND_IN_ADDRESS])
    message["attrs"] = attrs
    return encode(message, _RTM_NEWNEIGH, CREATE)


def neighbour_messages(index: int, neighbours: list[str]) -> list[Message]:
    """Static neighbours of an interface: no ARP, and no limit on their number (gc_thresh3 spares permanent ones)."""
    template = at_index(_neighbour(_AF_INET, NUD_PERMANENT, 0), index)
    return [Message(patched(template, address), f"add neighbour {address}") for address in neighbours]


def forwarding_message(index: int, address: str) -> Message:
    """A static entry of the bridge's table: the device owning ``address`` is behind port ``index``."""
    template = _neighbour(_AF_BRIDGE, NUD_NOARP, NTF_MASTER)  # NUD_PERMANENT would mean the bridge itself
    return Message(at_index(patched(template, address), index), f"add {address} to a bridge's table")


@functools.cache
def _address(prefix_length: int) -> bytes:
    message = ifaddrmsg()
    message["family"] = _AF_INET
    message["prefixlen"] = prefix_length
    message["attrs"] = [["IFA_LOCAL", _STAND_IN_ADDRESS], ["IFA_ADDRESS", _STAND_IN_ADDRESS]]
    return encode(message, _RTM_NEWADDR, CREATE)


def address_message(index: int, address: str, prefix_length: int) -> Message:
    """Give an interface an IPv4 address."""
    return Message(at_index(patched(_address(prefix_length), address), index), f"add address {address}")


def source_route_messages(index: int, address: str) -> list[Message]:
    """Traffic from ``address`` leaves by its own device, whatever else is on the same subnet.

    A node has one address per CNIC, all in one subnet. Without this, a socket that binds by address alone would
    send through the first CNIC.
    """
    table = 1000 + index
    route = rtmsg()
    for key, value in (("family", _AF_INET), ("dst_len", 16), ("proto", 4), ("scope", 253), ("type", 1)):
        route[key] = value
    network = str(ipaddress.IPv4Network(f"{address}/16", strict=False).network_address)
    route["attrs"] = [["RTA_DST", network], ["RTA_OIF", index], ["RTA_TABLE", table]]
    rule = fibmsg()
    for key, value in (("family", _AF_INET), ("src_len", 32), ("action", 1)):
        rule[key] = value
    rule["attrs"] = [["FRA_SRC", address], ["FRA_TABLE", table], ["FRA_PRIORITY", table]]
    return [
        Message(encode(route, _RTM_NEWROUTE, CREATE), f"route from {address}"),
        Message(encode(rule, _RTM_NEWRULE, CREATE), f"add the rule from {address}"),
    ]


@functools.cache
def _state(up: bool) -> bytes:
    message = ifinfmsg()
    message["flags"] = IFF_UP if up else 0
    message["change"] = IFF_UP
    return encode(message, RTM_NEWLINK, CHANGE)


def raise_message(index: int) -> Message:
    """Bring an interface up."""
    return Message(at_index(_state(True), index), f"raise interface {index}")


def lower_message(index: int) -> Message:
    """Take an interface down."""
    return Message(at_index(_state(False), index), f"take interface {index} down")


def flags_of(link: bytes) -> tuple[int, int]:
    """Index and IFF_ flags of an answer to RTM_GETLINK, without decoding the rest."""
    index, flags = struct.unpack_from("=iI", link, 20)
    return index, flags
