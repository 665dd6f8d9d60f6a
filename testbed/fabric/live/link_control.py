"""Changes links of a running network: slower, down, without a lane. For fault scenarios and for tests of the checks.

Everything here is a difference from the spec on purpose, so ``verify_shaping`` names it until it is undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from testbed.errors import ConfigError
from testbed.fabric.live import devices, tc
from testbed.fabric.live.addresses import ShapedPort
from testbed.fabric.live.lanes import (
    HIGH_BAND,
    HIGH_CLASS,
    KV_BAND,
    ROOT,
    Match,
    match_request,
    port_messages,
    queues_of,
    rate_messages,
)
from testbed.fabric.live.netlink import CHANGE, Message, at_index
from testbed.fabric.live.network import Network


def set_rate(network: Network, port_name: str, rate_bps: int) -> None:
    """Shape one direction of one link to ``rate_bps`` from now on; lanes keep their shares."""
    port = replace(_port(network, port_name), rate_bps=rate_bps)
    network.socket(port.host).run(rate_messages(port))


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


def remove_lane_filter(network: Network, port_name: str) -> None:
    """Remove the filter that puts model traffic of a port into the high lane.

    Raises:
        ConfigError: the port's lanes are not told apart by filters.
    """
    port = _port(network, port_name)
    matches = queues_of(port).matches
    network.socket(port.host).run([_removal(port, matches, _lane_filter(port, matches))])


def _lane_filter(port: ShapedPort, matches: Sequence[Match]) -> int:
    at = next((k for k, match in enumerate(matches) if match.target in (HIGH_CLASS, HIGH_BAND)), None)
    if at is None:
        raise ConfigError(f"{port.name} has no filter that tells lanes apart under {port.lanes.value}.")
    return at


def _removal(port: ShapedPort, matches: Sequence[Match], position: int) -> Message:
    qdisc = matches[position].parent
    of_qdisc = sum(match.parent == qdisc for match in matches[:position])
    request = tc.tc_request(
        tc.RTM_DELTFILTER, "u32", parent=qdisc, handle=tc.FIRST_FILTER + of_qdisc,
        info=tc.LANE_FILTERS, flags=CHANGE,
    )  # fmt: skip
    return Message(at_index(request, port.index), f"remove filter {position} of {port.name}")


def swap_lanes(network: Network, port_name: str) -> None:
    """Send model traffic of a port into the KV lane and all else into the high one; ``unshape``, ``shape`` undo it.

    Raises:
        ConfigError: the port's lanes are not told apart by filters.
    """
    port = _port(network, port_name)
    queues = queues_of(port)
    at = _lane_filter(port, queues.matches)
    lane = queues.matches[at]
    behind = [k for k, match in enumerate(queues.matches) if k >= at and match.parent == lane.parent]
    swapped = (
        replace(lane, target=queues.rest if lane.parent == ROOT else KV_BAND),
        Match(parent=lane.parent, target=lane.target),
    )
    messages = [_removal(port, queues.matches, k) for k in behind]
    messages += [Message(at_index(match_request(m), port.index), f"swap the lanes of {port_name}") for m in swapped]
    network.socket(port.host).run(messages)


def unshape(network: Network, port_name: str) -> None:
    """Remove the shaping of a port altogether."""
    port = _port(network, port_name)
    request = tc.tc_request(tc.RTM_DELQDISC, "htb", parent=tc.TC_H_ROOT, handle=ROOT, flags=CHANGE)
    network.socket(port.host).run([Message(at_index(request, port.index), f"unshape {port_name}")])


def shape(network: Network, port_name: str) -> None:
    """Undo ``unshape``."""
    port = _port(network, port_name)
    network.socket(port.host).run(port_messages(port))


def _port(network: Network, port_name: str) -> ShapedPort:
    try:
        return network.plan.ports[port_name]
    except KeyError:
        raise ConfigError(f"there is no shaped link {port_name} in topology {network.spec.name}.") from None
