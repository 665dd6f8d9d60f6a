"""Mininet as the face of the live network: its CLI on our namespaces.

``PlanTopo`` describes a cluster in Mininet's terms; ``ClusterMininet`` realises it through ``Network``; the node, link
and interface classes here only name what exists. Mininet's own means are not used: no mnexec, no Open vSwitch, no
ifconfig, and no shell per node until somebody types a command for it (the shell then enters the node's namespace
before it starts).

What Mininet sees: three switches (storage, compute, control), a host per node, GPU, storage server and ctl0. A node's
first interface is on the control network, so a node's name in a command means its control address; all other
endpoints have names of their own ("pe0.cnic3", "pe0gpu3.cnic", "st0.snic"), known to every program through /etc/hosts.
``pingall`` and ``iperf`` use for each pair of hosts the network on which they would exchange KV: storage between nodes
and storage servers, compute between nodes and GPUs, and control for every other pair.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mininet.cli import CLI
from mininet.link import Intf, Link
from mininet.log import output
from mininet.net import Mininet
from mininet.node import Host, Node, Switch
from mininet.topo import Topo

from testbed.errors import HostError
from testbed.fabric.live import addresses, node_tools, syscalls
from testbed.fabric.live.addresses import Endpoint, Plan, mac_of
from testbed.fabric.live.devices import flags_of, lower_message, raise_message
from testbed.fabric.live.netlink import RTM_GETLINK, attributes, encode_dump
from testbed.fabric.live.network import Network
from testbed.fabric.live.pings import ping_all
from testbed.fabric.live.streams import Flow, run_streams
from testbed.fabric.spec import ClusterSpec

_TOOLS_DIRECTORY = "/run/testbed-tools"
_HOSTS_FILE = "/run/testbed-hosts"
_IFLA_IFNAME = 3
_LINK_ATTRIBUTES = 32
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_LINKS = encode_dump(RTM_GETLINK)
_CARRIER_WAIT_S = 2.0


class PlanTopo(Topo):  # type: ignore[misc]
    """A cluster as a Mininet topology."""

    def build(self, spec: ClusterSpec) -> None:
        """Called by Topo's constructor: ``PlanTopo(spec)``."""
        plan = Plan(spec)
        for switch in addresses.SWITCHES:
            self.addSwitch(switch)
        for host in plan.hosts:
            self.addHost(host)
            self.addLink(host, addresses.CONTROL_SWITCH, intfName1="control", intfName2=f"to-{host}")
        for link in plan.links:
            for endpoint in link.behind:
                self.addLink(endpoint.host, link.switch, intfName1=endpoint.device, intfName2=link.port)
        for node in plan.nodes:
            for i in range(node.gpus):
                self.addLink(node.name, node.gpu(i), intfName1=f"copy{i}", intfName2="copy")


class ClusterIntf(Intf):  # type: ignore[misc]
    """Names an interface that the network has made; nothing is configured through it but up and down."""

    def __init__(self, name: str, node: Any, port: int, link: Any, endpoint: Endpoint | None) -> None:
        self.name = name
        self.node = node
        self.link = link
        self.params: dict[str, Any] = {}
        self.ip = endpoint.address if endpoint else None
        self.prefixLen = 16
        self.mac = mac_of(endpoint.address) if endpoint else None
        node.addIntf(self, port=port, moveIntfFn=lambda *_: None)

    def _flags(self) -> tuple[int, int] | None:
        """Index and flags from the kernel, None if the interface is gone."""
        for message in self.node.network.socket(self.node.name).dump(_LINKS):
            name = bytes(attributes(message, _LINK_ATTRIBUTES)[_IFLA_IFNAME])
            if name.rstrip(b"\0").decode() == self.name:
                return flags_of(message)
        return None

    def ifconfig(self, *arguments: str) -> str:
        """Only ``up``, ``down`` and the question; Mininet's ``link`` command needs no more.

        A cable is pulled at the switch's end: the host's end then loses its carrier but keeps routes and neighbours.
        """
        found = self._flags()
        if found is None:  # a port of the control switch: stands for its macvlan, which has the other end's state
            return "UP"
        index, flags = found
        if arguments in (("up",), ("down",)):
            other = self.link.intf2 if self.link.intf1 is self else self.link.intf1
            if isinstance(other.node, ClusterSwitch):
                return ""
            message = raise_message(index) if arguments == ("up",) else lower_message(index)
            self.node.network.socket(self.node.name).run([message])
            if arguments == ("up",):
                _await_carrier(lambda: "NO-CARRIER" not in (self.status(), other.status()))
            else:
                _await_carrier(lambda: other.status() != "OK")
            return ""
        return "UP" if flags & _IFF_UP else "DOWN"

    def updateIP(self) -> str | None:
        """The address: never changes."""
        return self.ip

    def updateMAC(self) -> str | None:
        """The MAC address: never changes."""
        return self.mac

    def updateAddr(self) -> tuple[str | None, str | None]:
        """Both addresses."""
        return self.ip, self.mac

    def status(self) -> str:
        """OK, DOWN (this end) or NO-CARRIER (the other end)."""
        found = self._flags()
        if found is None or found[1] & _IFF_RUNNING:
            return "OK"
        return "NO-CARRIER" if found[1] & _IFF_UP else "DOWN"

    def delete(self) -> None:
        """The network deletes its own interfaces."""
        self.node.delIntf(self)


def _await_carrier(arrived: Callable[[], bool]) -> None:
    """Carriers come and go through a kernel work queue, up to a second late; what is sent before is lost."""
    deadline = time.monotonic() + _CARRIER_WAIT_S
    while not arrived() and time.monotonic() < deadline:
        time.sleep(0.01)


class ClusterLink(Link):  # type: ignore[misc]
    """A link that the network has made."""

    def __init__(self, node1: Any, node2: Any, *, intfName1: str, intfName2: str, **params: Any) -> None:
        self.fast = True
        ends = []
        for node, name, port in ((node1, intfName1, params.get("port1")), (node2, intfName2, params.get("port2"))):
            endpoint = node.endpoint_of(name)
            ends.append(ClusterIntf(name, node, node.newPort() if port is None else port, self, endpoint))
        self.intf1, self.intf2 = ends

    def stop(self) -> None:
        """Nothing to stop: the network closes as a whole."""


class _NamespaceNode:
    """What our hosts and switches share: a namespace instead of a shell, a shell when one is needed."""

    network: Network
    name: str
    shell: subprocess.Popen[bytes] | None
    waiting: bool
    _wanted = False

    @classmethod
    def checkSetup(cls) -> None:
        """Mininet looks for mnexec and ifconfig here; neither is used."""

    def startShell(self, mnopts: str | None = None) -> None:
        """Called by the constructor, when nobody has typed anything yet: only remember to start one later."""
        if self._wanted:
            super().startShell(mnopts)  # type: ignore[misc]

    def _ensure_shell(self) -> None:
        if self.shell is None:
            self._wanted = True
            self.startShell()

    def sendCmd(self, *args: Any, **kwargs: Any) -> None:
        """Start the shell with the first command."""
        self._ensure_shell()
        kwargs.pop("printPid", None)  # would need mnexec
        super().sendCmd(*args, **kwargs)  # type: ignore[misc]

    def cmd(self, *args: Any, **kwargs: Any) -> Any:
        """Start the shell with the first command."""
        self._ensure_shell()
        return super().cmd(*args, **kwargs)  # type: ignore[misc]

    def _popen(self, cmd: list[str], **params: Any) -> subprocess.Popen[bytes]:
        """Run in the node's namespace what Mininet wants to run through mnexec."""
        if cmd[0] == "mnexec":
            cmd = cmd[3:] if cmd[1] == "-da" else cmd[2:]
        has_terminal = isinstance(params.get("stdin"), int) and os.isatty(params["stdin"])
        if "bash" in cmd and shutil.which("bash") is None:
            cmd = [*cmd[: cmd.index("bash")], "sh", "-is"]
        params["close_fds"] = True

        def enter() -> None:
            os.setsid()
            if has_terminal:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that ^C written to the terminal interrupts the command
            self.network.enter(self.name)

        return subprocess.Popen(cmd, preexec_fn=enter, **params)  # noqa: PLW1509 - no threads run while the CLI does

    def endpoint_of(self, device: str) -> Endpoint | None:
        """The endpoint on one of this node's interfaces."""
        for endpoint in self.network.endpoints.values():
            if (endpoint.host, endpoint.device) == (self.name, device):
                return endpoint
        return None


class ClusterHost(_NamespaceNode, Host):  # type: ignore[misc]
    """A node, a GPU, a storage server or ctl0."""

    def __init__(self, name: str, *, network: Network, **params: Any) -> None:
        self.network = network
        super().__init__(name, inNamespace=False, **params)

    def configDefault(self, **_: Any) -> None:
        """Addresses are the network's business."""


class ClusterSwitch(_NamespaceNode, Switch):  # type: ignore[misc]
    """The bridge of one of the three networks."""

    def __init__(self, name: str, *, network: Network, **params: Any) -> None:
        self.network = network
        self.dpid, self.opts, self.listenPort = "0", "", None
        # Node's constructor, not Switch's: that one configures an interface lo and starts a shell to do so
        Node.__init__(self, name, **{**params, "inNamespace": False})

    def defaultDpid(self, dpid: str | None = None) -> str:
        """No OpenFlow here."""
        return dpid or self.dpid

    def start(self, controllers: Sequence[Any]) -> None:
        """It runs since the network was built."""

    def stop(self, deleteIntfs: bool = False) -> None:
        """The network stops as a whole."""


class ClusterMininet(Mininet):  # type: ignore[misc]
    """A Mininet whose ``start`` has nothing left to do: building it builds the network."""

    def __init__(self, topo: Topo, network: Network) -> None:
        self.network = network
        Mininet.inited = True  # its own initialisation would change sysctls of the host
        super().__init__(
            topo=topo,
            switch=lambda name, **params: ClusterSwitch(name, network=network, **params),
            host=lambda name, **params: ClusterHost(name, network=network, **params),
            link=ClusterLink,
            controller=None,
        )

    def shared_endpoints(self, one: str, other: str) -> tuple[Endpoint, Endpoint]:
        """Endpoints of two hosts on the network where they would exchange KV, else on the control network."""
        first, second = self._data_endpoints(one), self._data_endpoints(other)
        for network, endpoint in first.items():
            if network in second:
                return endpoint, second[network]
        return self.network.endpoints[f"{one}.control"], self.network.endpoints[f"{other}.control"]

    def _data_endpoints(self, host: str) -> dict[str, Endpoint]:
        endpoints = self.network.endpoints
        if f"{host}.cnic" in endpoints:  # a GPU
            return {"compute": endpoints[f"{host}.cnic"]}
        found = {"compute": endpoints.get(f"{host}.cnic0"), "storage": endpoints.get(f"{host}.snic")}
        return {network: endpoint for network, endpoint in found.items() if endpoint}

    def ping(self, hosts: Sequence[Any] | None = None, timeout: str | None = None) -> float:
        """Ping between all pairs at once; prints what Mininet prints. Returns the loss in percent."""
        if not hosts:
            hosts = self.hosts
            output("*** Ping: testing ping reachability\n")
        names = [host.name for host in hosts]
        pairs = [self.shared_endpoints(a, b) for a in names for b in names if a != b]
        answered = iter(ping_all(self.network, pairs, float(timeout or 1)))
        received = 0
        for name in names:
            answers = [(other, next(answered) is not None) for other in names if other != name]
            received += sum(good for _, good in answers)
            output(f"{name} -> {' '.join(other if good else 'X' for other, good in answers)} \n")
        loss = 100.0 * (len(pairs) - received) / max(len(pairs), 1)
        output(f"*** Results: {loss:.0f}% dropped ({received}/{len(pairs)} received)\n")
        return loss

    def pingFull(self, hosts: Sequence[Any] | None = None, timeout: str | None = None) -> list[Any]:
        """Like ``ping``, with round-trip times; returns what Mininet's returns."""
        hosts = hosts or self.hosts
        pairs = [(a, b) for a in hosts for b in hosts if a is not b]
        endpoints = [self.shared_endpoints(a.name, b.name) for a, b in pairs]
        results = []
        output("*** Results: \n")
        for (a, b), trip in zip(pairs, ping_all(self.network, endpoints, float(timeout or 1)), strict=True):
            figures = (1, 0, 0, 0, 0, 0) if trip is None else (1, 1, trip, trip, trip, 0)
            results.append((a, b, figures))
            time_ms = f"{trip or 0:.3f}"
            output(f" {a}->{b}: 1/{figures[1]}, rtt min/avg/max/mdev {time_ms}/{time_ms}/{time_ms}/0.000 ms\n")
        return results

    def iperf(self, hosts: Sequence[Any] | None = None, seconds: float = 2.0, **_: Any) -> list[str]:
        """TCP between two hosts; prints and returns the receiver's rate twice, as Mininet does for both ends."""
        source, destination = hosts or (self.hosts[0], self.hosts[-1])
        start, end = self.shared_endpoints(source.name, destination.name)
        output(f"*** Iperf: testing TCP bandwidth between {start.name} and {end.name}\n")
        flow = Flow(name="iperf", source=start.name, destination=end.name)
        rate = run_streams(self.network, [flow], seconds=seconds, warm_up_s=0.2)["iperf"].mean_bps
        result = [f"{rate / 1e6:.1f} Mbits/sec"] * 2
        output(f"*** Results: {result}\n")
        return result


def interactive(spec: ClusterSpec, commands: list[str] | None = None, topo: Topo | None = None) -> int:
    """Build ``spec`` through Mininet and run its CLI; with ``commands`` run those and end. Call it in the sandbox.

    Raises:
        HostError: the kernel refuses something, or there is no shell.
    """
    if shutil.which("bash") is None and shutil.which("sh") is None:
        raise HostError("Mininet's nodes need a shell: install bash.")
    with Network(spec) as network:
        _install_tools()
        _install_names(network)
        net = ClusterMininet(topo or PlanTopo(spec), network)
        net.start()
        try:
            if commands is None:
                CLI(net)
            else:
                _run_commands(net, commands)
        finally:
            net.stop()
    return 0


def _run_commands(net: ClusterMininet, commands: list[str]) -> None:
    nobody_types, keep_open = os.pipe()
    with tempfile.NamedTemporaryFile("w", suffix=".cli") as script, os.fdopen(nobody_types) as silent_input:
        script.write("".join(f"{command}\n" for command in commands))
        script.flush()
        CLI(net, stdin=silent_input, script=script.name)
    os.close(keep_open)


def _install_tools() -> None:
    """Put stand-ins for missing programs on the PATH of every shell to come."""
    os.makedirs(_TOOLS_DIRECTORY, exist_ok=True)
    for program in ("ping", "iperf3", "iperf"):
        if shutil.which(program) is None:
            path = Path(_TOOLS_DIRECTORY, program)
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{node_tools.__file__}" {program} "$@"\n')
            path.chmod(0o755)
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{_TOOLS_DIRECTORY}"


def _install_names(network: Network) -> None:
    """Let every program in the sandbox resolve endpoint names (the sandbox's mounts are private)."""
    lines = ["127.0.0.1 localhost"]
    lines += [f"{endpoint.address} {endpoint.name}" for endpoint in network.endpoints.values()]
    lines += [f"{network.endpoints[f'{host}.control'].address} {host}" for host in network.hosts]
    Path(_HOSTS_FILE).write_text("\n".join(lines) + "\n")
    if os.path.exists("/etc/hosts"):
        syscalls.mount(_HOSTS_FILE, "/etc/hosts", "", syscalls.MS_BIND)
