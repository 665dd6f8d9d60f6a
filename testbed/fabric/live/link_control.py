"""Changes links of a running network: slower, down, without a lane. For fault scenarios and for tests of the checks.

Everything here is a difference from the spec on purpose, so ``verify_shaping`` names it until it is undone.
"""

from __future__ import annotations

from dataclasses import replace

from testbed.errors import ConfigError
from testbed.fabric.live import devices
from testbed.fabric.live.addresses import ShapedPort
from testbed.fabric.live.lanes import (
    RTM_DELQDISC,
    RTM_DELTFILTER,
    filter_info,
    port_messages,
    rate_messages,
    tc_request,
)
from testbed.fabric.live.netlink import CHANGE, Message, at_index
from testbed.fabric.live.network import Network

_ETH_P_IP = 0x0800
_TC_H_ROOT = 0xFFFFFFFF
_FIRST_FILTER = 0x80000800  # handle that u32 gives to the first filter of a port


def set_rate(network: Network, port_name: str, rate_bps: int) -> None:
    """Shape one direction of one link to ``rate_bps`` from now on; lanes keep their shares."""
    port = replace(_port(network, port_name), rate_bps=rate_bps)
    network.socket(port.host).run(rate_messages(port, network.spec.high_share))


def restore_rate(network: Network, port_name: str) -> None:
    """Undo ``set_rate``."""
    set_rate(network, port_name, _port(network, port_name).rate_bps)


def set_up(network: Network, port_name: str, up: bool) -> None:
    """Take a link down, or raise it again. A NIC's cable is pulled at the switch's end, for both directions.

    That end loses what is queued there; the NIC loses its carrier but keeps its routes and neighbours. A PCIe link or
    DRAM stops in the direction named.
    """
    port = _port(network, port_name)
    host, index = port.host, port.index
    for link in network.plan.links:
        if port_name in (f"{link.port}.tx", f"{link.port}.rx", f"{link.port}.read", f"{link.port}.write"):
            host, index = link.switch, link.port_index
    message = devices.raise_message(index) if up else devices.lower_message(index)
    network.socket(host).run([message])


def remove_filter(network: Network, port_name: str, position: int) -> None:
    """Remove the filter at ``position`` of a port (0: acknowledgements, 1: high lane, 2...: sources of KV)."""
    port = _port(network, port_name)
    request = tc_request(
        RTM_DELTFILTER, "u32", parent=0x10000, handle=_FIRST_FILTER + position,
        info=filter_info(1, _ETH_P_IP), flags=CHANGE,
    )  # fmt: skip
    label = f"remove filter {position} of {port_name}"
    network.socket(port.host).run([Message(at_index(request, port.index), label)])


def unshape(network: Network, port_name: str) -> None:
    """Remove the shaping of a port altogether."""
    port = _port(network, port_name)
    request = tc_request(RTM_DELQDISC, "htb", parent=_TC_H_ROOT, handle=0x10000, flags=CHANGE)
    network.socket(port.host).run([Message(at_index(request, port.index), f"unshape {port_name}")])


def shape(network: Network, port_name: str) -> None:
    """Undo ``unshape``."""
    port = _port(network, port_name)
    network.socket(port.host).run(port_messages(port, network.spec.high_share))


def _port(network: Network, port_name: str) -> ShapedPort:
    try:
        return network.plan.ports[port_name]
    except KeyError:
        raise ConfigError(f"there is no shaped link {port_name} in topology {network.spec.name}.") from None
