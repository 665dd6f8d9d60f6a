"""The plan of a cluster's network: every namespace, device, address and shaped port, computed from the spec alone.

Nothing here touches the kernel. Interface indexes are chosen by us (the kernel accepts an index at creation), MAC
addresses are derived from the IP addresses, so building needs no look-ups, neighbours and bridge tables can be static
(no ARP, no flooding: the counters hold nothing but payload and its headers), and every GPU namespace is the same
sequence of messages.

================  =====================================================================================
storage network   10.1.0.0/16   servers 10.1.1.(1+k), SNICs 10.1.2.(1+n)
compute network   10.2.0.0/16   DRAM side 10.2.(1+n).(1+i), HBM side 10.2.(101+n).(1+i)
copy engines      10.3.(1+n).(4i+1) DRAM end, 10.3.(1+n).(4i+2) GPU end, /30 each
control network   10.4.0.0/16   ctl0 10.4.0.1, nodes 10.4.1.(1+n), servers 10.4.2.(1+k), GPUs 10.4.(101+n).(1+i)
================  =====================================================================================

n counts nodes (prefill first), i GPUs of a node, k storage servers.
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass

from testbed.fabric.live.limits import check_buildable
from testbed.fabric.spec import CONTROL_HOST, ETS_QUANTA, ClusterSpec, LaneDiscipline, NodeKind, NodeSpec

STORAGE_SWITCH = "storage"
COMPUTE_SWITCH = "compute"
CONTROL_SWITCH = "control"
SWITCHES = (STORAGE_SWITCH, COMPUTE_SWITCH, CONTROL_SWITCH)

BRIDGE = "br0"
BRIDGE_INDEX = 10
UPLINK_INDEX = 11  # control switch only: the veth whose far end carries the macvlan children
SNIC_INDEX = 10
DRAM_INDEX = 20
CONTROL_INDEX = 21
CNIC_INDEX = 100
MEMORY_INDEX = 200
COPY_INDEX = 300
GPU_CNIC_INDEX = 11
GPU_COPY_INDEX = 12
GPU_PCIE_RX_INDEX = 13
GPU_PCIE_TX_INDEX = 14
PORT_INDEX = 1000  # switch ports; never equal to the peer's index, or the kernel delays the carrier by up to 1 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A place a socket can bind to: bind to ``address`` and, where a host has several, to ``device``."""

    name: str
    host: str
    device: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One queue of the KV lane: packets whose source address is in ``network``."""

    name: str
    network: ipaddress.IPv4Network


class PortKind(enum.Enum):
    """LANES: a NIC or switch port with a high and a KV lane. SHARED: one rate for all (PCIe link, DRAM)."""

    LANES = "lanes"
    SHARED = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedPort:
    """An interface whose egress is shaped: ``name`` is that of the emulated resource and direction.

    ``lanes``, ``high_share`` (htb) and ``ets_quanta`` (ets) are of a port with lanes.
    """

    name: str
    host: str
    device: str
    index: int
    rate_bps: int
    kind: PortKind
    sources: tuple[Source, ...] = ()
    lanes: LaneDiscipline = LaneDiscipline.HTB
    high_share: float = 0.99
    ets_quanta: tuple[int, int] = ETS_QUANTA


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A veth from a switch port to a host, shaped at both ends (rate 0: not shaped)."""

    switch: str
    port: str
    port_index: int
    host: str
    device: str
    index: int
    hairpin: bool
    tx: ShapedPort | None
    rx: ShapedPort | None
    behind: tuple[Endpoint, ...]


def mac_of(address: str) -> str:
    """The MAC address of the device that owns an IPv4 address."""
    return "02:00:" + ":".join(f"{octet:02x}" for octet in ipaddress.IPv4Address(address).packed)


class Plan:
    """Everything there is in a cluster's network, by name.

    Raises:
        ConfigError: a cluster for which there are not enough addresses.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        check_buildable(spec)
        self.spec = spec
        self.nodes = spec.nodes
        self.endpoints: dict[str, Endpoint] = {}
        self.ports: dict[str, ShapedPort] = {}
        self.links: list[Link] = []
        self.hosts: list[str] = []
        for k, server in enumerate(spec.storage_names):
            self._plan_storage(server, k)
        for n, node in enumerate(self.nodes):
            self._plan_node(node, n)
        self.hosts.append(CONTROL_HOST)
        self._endpoint(f"{CONTROL_HOST}.control", CONTROL_HOST, "control", "10.4.0.1")

    def _endpoint(self, name: str, host: str, device: str, address: str) -> Endpoint:
        endpoint = self.endpoints[name] = Endpoint(name=name, host=host, device=device, address=address)
        return endpoint

    def _port(
        self, name: str, at: tuple[str, str, int], rate_bps: int, sources: tuple[Source, ...] | None
    ) -> ShapedPort | None:
        if not rate_bps:
            return None
        host, device, index = at
        kind = PortKind.SHARED if sources is None else PortKind.LANES
        port = self.ports[name] = ShapedPort(
            name=name, host=host, device=device, index=index, rate_bps=rate_bps, kind=kind, sources=sources or (),
            lanes=self.spec.lanes, high_share=self.spec.high_share, ets_quanta=self.spec.ets_quanta,
        )  # fmt: skip
        return port

    def _plan_storage(self, server: str, k: int) -> None:
        self.hosts.append(server)
        snic = self._endpoint(f"{server}.snic", server, "snic", f"10.1.1.{k + 1}")
        self._endpoint(f"{server}.control", server, "control", f"10.4.2.{k + 1}")
        rate_bps = self.spec.storage_rate_bps
        port_index = PORT_INDEX + 512 + k
        own = (Source(name=server, network=ipaddress.IPv4Network(f"{snic.address}/32")),)
        nodes = tuple(self.snic_source(n) for n in range(len(self.nodes)))
        self.links.append(
            Link(
                switch=STORAGE_SWITCH, port=f"{server}.snic", port_index=port_index,
                host=server, device="snic", index=SNIC_INDEX, hairpin=False, behind=(snic,),
                tx=self._port(f"{server}.snic.tx", (server, "snic", SNIC_INDEX), rate_bps, own),
                rx=self._port(f"{server}.snic.rx", (STORAGE_SWITCH, f"{server}.snic", port_index), rate_bps, nodes),
            )
        )  # fmt: skip

    def _plan_node(self, node: NodeSpec, n: int) -> None:
        name = node.name
        self.hosts.append(name)
        snic = self._endpoint(f"{name}.snic", name, "snic", f"10.1.2.{n + 1}")
        self._endpoint(f"{name}.control", name, "control", f"10.4.1.{n + 1}")
        port_index = PORT_INDEX + n
        servers = tuple(
            Source(name=server, network=ipaddress.IPv4Network(f"10.1.1.{k + 1}/32"))
            for k, server in enumerate(self.spec.storage_names)
        )
        rate_bps = self.spec.snic_rate_bps
        self.links.append(
            Link(
                switch=STORAGE_SWITCH, port=f"{name}.snic", port_index=port_index,
                host=name, device="snic", index=SNIC_INDEX, hairpin=False, behind=(snic,),
                tx=self._port(f"{name}.snic.tx", (name, "snic", SNIC_INDEX), rate_bps, (self.snic_source(n),)),
                rx=self._port(f"{name}.snic.rx", (STORAGE_SWITCH, f"{name}.snic", port_index), rate_bps, servers),
            )
        )  # fmt: skip
        self._port(f"{name}.dram", (name, "dram", DRAM_INDEX), self.spec.dram_rate_bps, None)
        for i in range(node.gpus):
            self._plan_gpu(node, n, i)

    def _plan_gpu(self, node: NodeSpec, n: int, i: int) -> None:
        name, gpu, spec = node.name, node.gpu(i), self.spec
        self.hosts.append(gpu)
        cnic = f"{name}.cnic{i}"
        dram = self._endpoint(cnic, name, f"mem{i}", f"10.2.{n + 1}.{i + 1}")
        hbm = self._endpoint(f"{gpu}.cnic", gpu, "cnic", f"10.2.{n + 101}.{i + 1}")
        self._endpoint(f"{name}.copy{i}", name, f"copy{i}", f"10.3.{n + 1}.{4 * i + 1}")
        self._endpoint(f"{gpu}.copy", gpu, "copy", f"10.3.{n + 1}.{4 * i + 2}")
        self._endpoint(f"{gpu}.control", gpu, "control", f"10.4.{n + 101}.{i + 1}")
        port_index, index = PORT_INDEX + n * 16 + i, CNIC_INDEX + i
        own = (self.dram_source(n), self.hbm_source(n))
        self.links.append(
            Link(
                switch=COMPUTE_SWITCH, port=cnic, port_index=port_index,
                host=name, device=f"cnic{i}", index=index, hairpin=True, behind=(dram, hbm),
                tx=self._port(f"{cnic}.read", (name, f"cnic{i}", index), spec.cnic_rate_bps, own),
                rx=self._port(
                    f"{cnic}.write", (COMPUTE_SWITCH, cnic, port_index), spec.cnic_rate_bps, self._sources_of_writes(n)
                ),
            )
        )  # fmt: skip
        self._port(f"{gpu}.pcie.rx", (gpu, "pcie_rx", GPU_PCIE_RX_INDEX), spec.pcie_rate_bps, None)
        self._port(f"{gpu}.pcie.tx", (gpu, "pcie_tx", GPU_PCIE_TX_INDEX), spec.pcie_rate_bps, None)

    def _sources_of_writes(self, n: int) -> tuple[Source, ...]:
        """The memories whose KV can be written through a CNIC of node ``n`` (paper section 4.1, both read paths).

        A PE's CNIC: its own DRAM and HBM (loopback both ways) and the DRAM of every DE node. A DE's CNIC: its own DRAM
        and HBM, and the HBM of every PE node. Anything else falls into the lane's last queue.
        """
        own = (self.dram_source(n), self.hbm_source(n))
        if self.nodes[n].kind is NodeKind.PE:
            return own + tuple(self.dram_source(m) for m, node in enumerate(self.nodes) if node.kind is NodeKind.DE)
        return own + tuple(self.hbm_source(m) for m, node in enumerate(self.nodes) if node.kind is NodeKind.PE)

    def path(self, source: str, destination: str) -> tuple[str, ...]:
        """The resources that bytes from one endpoint to another pass, in order, shaped or not.

        Every resource is one step of the paper's counts: "pe0.cnic3.read" is one CNIC read, "pe0.dram" one DRAM access.
        """
        leaving, entering = self._steps(source, leaving=True), self._steps(destination, leaving=False)
        return (*leaving, *entering)

    def _steps(self, endpoint: str, *, leaving: bool) -> tuple[str, ...]:
        """Resources between a memory and the wire that its endpoint is on."""
        host, device = self.endpoints[endpoint].host, self.endpoints[endpoint].device
        if device == "control":
            return ()
        if host in self.spec.storage_names:
            return (f"{host}.snic.{'tx' if leaving else 'rx'}",)
        if device in ("cnic", "copy"):  # of a GPU
            memory = f"{host}.pcie.{'tx' if leaving else 'rx'}"
            node, gpu = host.split("gpu")
            nic = f"{node}.cnic{gpu}.{'read' if leaving else 'write'}" if device == "cnic" else None
        else:
            memory = f"{host}.dram"
            nic = {
                "snic": f"{host}.snic.{'tx' if leaving else 'rx'}",
                "mem": f"{host}.cnic{device[3:]}.{'read' if leaving else 'write'}",
            }.get(device.rstrip("0123456789"))
        steps = (memory,) if nic is None else (memory, nic)
        return steps if leaving else steps[::-1]

    def snic_source(self, n: int) -> Source:
        """What leaves the SNIC of node ``n``."""
        return Source(name=f"{self.nodes[n].name}.dram", network=ipaddress.IPv4Network(f"10.1.2.{n + 1}/32"))

    def dram_source(self, n: int) -> Source:
        """The DRAM of node ``n`` as seen on the compute network."""
        return Source(name=f"{self.nodes[n].name}.dram", network=ipaddress.IPv4Network(f"10.2.{n + 1}.0/24"))

    def hbm_source(self, n: int) -> Source:
        """The HBM of all GPUs of node ``n`` as seen on the compute network."""
        return Source(name=f"{self.nodes[n].name}.hbm", network=ipaddress.IPv4Network(f"10.2.{n + 101}.0/24"))
