"""The cluster's network in the kernel: namespaces, bridges, veths, macvlans, ifbs and their shaping.

Storage and compute are two bridges in namespaces of their own; an SNIC is a veth to the first, a CNIC a veth to the
second whose bridge port reflects (hairpin); the DRAM side and the HBM side of a CNIC are macvlan children in VEPA
mode, so a local copy leaves and re-enters the CNIC through the same lanes as network traffic (paper section 5:
CNIC-centric transfer). PCIe links and DRAM are ifb devices that everything a GPU (node) sends or receives is
redirected through, the copy engine's direct veth included. The control network is a set of macvlans in bridge mode on
one veth: unshaped, and free of DRAM and PCIe, which it is not meant to load.

Run it inside the sandbox: it changes only namespaces that it makes, and leaves their removal to the kernel.

Order matters for speed: devices are made in their final namespaces with their final indexes, shaped while they are
down, and raised last; see ``netlink`` for why messages go in batches.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from testbed.errors import BugError, HostError
from testbed.fabric.live import addresses, devices, syscalls
from testbed.fabric.live.addresses import Endpoint, Plan
from testbed.fabric.live.lanes import port_messages, redirect_messages
from testbed.fabric.live.netlink import RTM_GETLINK, Batch, Message, NetlinkSocket, encode_dump, prepare
from testbed.fabric.spec import ClusterSpec, NodeSpec

NAMESPACE_DIRECTORY = "/run/netns"

_SETTINGS = (
    ("ipv4/conf/all/arp_ignore", b"1"),
    ("ipv4/conf/all/arp_announce", b"2"),
    ("ipv4/conf/all/rp_filter", b"0"),
    ("ipv4/conf/default/rp_filter", b"0"),
    ("ipv4/ping_group_range", b"0 0"),
    ("ipv6/conf/default/disable_ipv6", b"1"),
    # RDMA neither paces itself nor starts slowly after a pause; a host's default (bbr) may do both.
    ("ipv4/tcp_congestion_control", b"reno"),
    ("ipv4/tcp_slow_start_after_idle", b"0"),
    # Nothing is lost here: what probes for a lost tail when a busy host is late would only be bytes that nobody sent.
    ("ipv4/tcp_early_retrans", b"0"),
)
# A switch is no firewall: where br_netfilter is loaded, every frame would pass the host's packet filter hooks.
_BRIDGE_FILTER = "bridge/bridge-nf-call-iptables"
_SOURCE_ROUTING_MISSING = frozenset({errno.EOPNOTSUPP, errno.EAFNOSUPPORT})
_IFF_RUNNING = 0x40
_CARRIER_WAIT_S = 5.0


class Network:
    """The network of one cluster. ``build`` once, ``close`` once; ``enter`` from role processes.

    The netlink sockets belong to the process and thread that built it: a forked role may ``enter`` and look up
    endpoints, but not read counters or change links.

    ``source_routing`` tells whether a socket on a node may bind by address alone; on a kernel without policy routing
    it has to bind to the endpoint's device as well.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.plan = Plan(spec)
        self.endpoints: dict[str, Endpoint] = self.plan.endpoints
        self.hosts: tuple[str, ...] = tuple(self.plan.hosts)
        self.namespaces: tuple[str, ...] = (*addresses.SWITCHES, *self.hosts)
        self.source_routing = True
        self._namespace_fds: dict[str, int] = {}
        self._sockets: dict[str, NetlinkSocket] = {}

    def __enter__(self) -> Network:
        try:
            self.build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def namespace_path(self, host: str) -> str:
        """Where the namespace of ``host`` has its name (inside the sandbox only)."""
        return f"{NAMESPACE_DIRECTORY}/{host}"

    def namespace_fd(self, host: str) -> int:
        """An open descriptor of the namespace of ``host``, valid until ``close`` and in forked children."""
        try:
            return self._namespace_fds[host]
        except KeyError:
            raise BugError(f"there is no namespace {host}: the network is not built, or has no such host.") from None

    def enter(self, host: str) -> None:
        """Move the calling thread into the namespace of ``host``: sockets it opens from now on are there."""
        syscalls.setns(self.namespace_fd(host), syscalls.CLONE_NEWNET)

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Run a block in the namespace of ``host`` (the calling thread only), to open sockets there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.enter(host)
            yield
        finally:
            syscalls.setns(home, syscalls.CLONE_NEWNET)
            os.close(home)

    def socket(self, host: str) -> NetlinkSocket:
        """A netlink socket in the namespace of ``host``."""
        return self._sockets[host]

    def build(self) -> None:
        """Make everything and wait until every link is up.

        Raises:
            HostError: naming the first thing that the kernel refused.
        """
        self._make_namespaces()
        self._make_links()
        self._make_control()
        for node in self.plan.nodes:
            self._make_memories(node)
        self._configure_servers()
        gpu_batches = self._gpu_batches()
        for node in self.plan.nodes:
            for i in range(node.gpus):
                self._configure_gpu(node.gpu(i), gpu_batches)
            self._configure_node(node)
        self._raise_control()
        self._configure_switches()
        self._await_carriers()

    def close(self) -> None:
        """Drop the namespaces and all in them. Processes still inside keep theirs alive until they end."""
        for socket in self._sockets.values():
            socket.close()
        for host, fd in self._namespace_fds.items():
            path = self.namespace_path(host)
            with suppress(OSError):
                syscalls.unmount(path)
                os.unlink(path)
            os.close(fd)
        self._sockets.clear()
        self._namespace_fds.clear()

    def _make_namespaces(self) -> None:
        os.makedirs(NAMESPACE_DIRECTORY, exist_ok=True)
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for name in self.namespaces:
                syscalls.unshare(syscalls.CLONE_NEWNET)
                path = self.namespace_path(name)
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o444))
                syscalls.mount("/proc/thread-self/ns/net", path, "", syscalls.MS_BIND)
                self._namespace_fds[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._sockets[name] = NetlinkSocket.here(name)
                for setting, value in _SETTINGS:
                    _write_setting(setting, value)
                if name in addresses.SWITCHES and os.path.exists(f"/proc/sys/net/{_BRIDGE_FILTER}"):
                    _write_setting(_BRIDGE_FILTER, b"0")
                self._sockets[name].run([devices.raise_message(1)])
        except OSError as error:
            raise HostError(f"cannot make a network namespace ({error}); is this process in the sandbox?") from error
        finally:
            syscalls.setns(home, syscalls.CLONE_NEWNET)
            os.close(home)

    def _make_links(self) -> None:
        """A veth per NIC, from the switch's side; the peer is made where it belongs, so nothing is moved."""
        for switch in (addresses.STORAGE_SWITCH, addresses.COMPUTE_SWITCH):
            messages = [devices.bridge_message(addresses.BRIDGE_INDEX)]
            messages += (
                devices.veth_message(
                    link.port, link.port_index, peer=link.device, peer_index=link.index,
                    peer_fd=self.namespace_fd(link.host), master=addresses.BRIDGE_INDEX,
                    peer_address="" if link.hairpin else link.behind[0].address,
                )
                for link in self.plan.links
                if link.switch == switch
            )  # fmt: skip
            self.socket(switch).run(messages)

    def _make_control(self) -> None:
        """One veth in the control switch; every host gets a macvlan child (bridge mode) of its far end."""
        lower = addresses.UPLINK_INDEX + 1
        messages = [
            devices.bridge_message(addresses.BRIDGE_INDEX),
            devices.veth_message(
                "uplink", addresses.UPLINK_INDEX, peer="hosts", peer_index=lower,
                master=addresses.BRIDGE_INDEX, emulated=False,
            ),
            *(devices.raise_message(i) for i in (addresses.BRIDGE_INDEX, addresses.UPLINK_INDEX, lower)),
        ]  # fmt: skip
        messages += (
            devices.macvlan_message(
                "control", addresses.CONTROL_INDEX, lower=lower, mode="bridge",
                address=self.endpoints[f"{host}.control"].address, namespace_fd=self.namespace_fd(host),
            )
            for host in self.hosts
        )  # fmt: skip
        self.socket(addresses.CONTROL_SWITCH).run(messages)

    def _make_memories(self, node: NodeSpec) -> None:
        """Inside a node: its DRAM; per GPU both children of the CNIC and the copy engine's veth."""
        messages = [devices.ifb_message("dram", addresses.DRAM_INDEX)]
        for i in range(node.gpus):
            gpu, cnic = node.gpu(i), addresses.CNIC_INDEX + i
            gpu_fd = self.namespace_fd(gpu)
            messages += (
                devices.macvlan_message(
                    f"mem{i}", addresses.MEMORY_INDEX + i, lower=cnic, mode="vepa",
                    address=self.endpoints[f"{node.name}.cnic{i}"].address,
                ),
                devices.macvlan_message(
                    "cnic", addresses.GPU_CNIC_INDEX, lower=cnic, mode="vepa",
                    address=self.endpoints[f"{gpu}.cnic"].address, namespace_fd=gpu_fd,
                ),
                devices.veth_message(
                    f"copy{i}", addresses.COPY_INDEX + i, peer="copy", peer_index=addresses.GPU_COPY_INDEX,
                    peer_fd=gpu_fd, address=self.endpoints[f"{node.name}.copy{i}"].address,
                    peer_address=self.endpoints[f"{gpu}.copy"].address,
                ),
            )  # fmt: skip
        self.socket(node.name).run(messages)

    def _addresses_on(self, prefix: str) -> list[str]:
        return [e.address for e in self.endpoints.values() if e.address.startswith(prefix)]

    def _shape(self, host: str) -> list[Message]:
        ports = (port for port in self.plan.ports.values() if port.host == host)
        return [message for port in ports for message in port_messages(port)]

    def _configure_servers(self) -> None:
        for server in self.spec.storage_names:
            self.socket(server).run(
                [
                    *self._shape(server),
                    devices.address_message(addresses.SNIC_INDEX, self.endpoints[f"{server}.snic"].address, 16),
                    devices.raise_message(addresses.SNIC_INDEX),
                    *devices.neighbour_messages(addresses.SNIC_INDEX, self._addresses_on("10.1.")),
                ]
            )

    def _gpu_batches(self) -> list[Batch]:
        """What every GPU's namespace gets alike: its PCIe link, redirects, neighbours; encoded once."""
        rx, tx = addresses.GPU_PCIE_RX_INDEX, addresses.GPU_PCIE_TX_INDEX
        gpu = self.plan.nodes[0].gpu(0)
        messages = [devices.ifb_message("pcie_rx", rx), devices.ifb_message("pcie_tx", tx), *self._shape(gpu)]
        for index in (addresses.GPU_CNIC_INDEX, addresses.GPU_COPY_INDEX):
            messages += redirect_messages(index, ingress_to=rx, egress_to=tx)
        indexes = (rx, tx, addresses.GPU_CNIC_INDEX, addresses.GPU_COPY_INDEX)
        messages += (devices.raise_message(index) for index in indexes)
        messages += devices.neighbour_messages(addresses.GPU_CNIC_INDEX, self._addresses_on("10.2."))
        return prepare(messages)

    def _configure_gpu(self, gpu: str, batches: list[Batch]) -> None:
        socket = self.socket(gpu)
        cnic, copy = self.endpoints[f"{gpu}.cnic"].address, self.endpoints[f"{gpu}.copy"].address
        socket.run(
            [
                devices.address_message(addresses.GPU_CNIC_INDEX, cnic, 16),
                devices.address_message(addresses.GPU_COPY_INDEX, copy, 30),
            ]
        )
        socket.run_batches(batches)
        node, i = gpu.split("gpu")
        far_end = self.endpoints[f"{node}.copy{i}"].address
        socket.run(devices.neighbour_messages(addresses.GPU_COPY_INDEX, [far_end]))

    def _configure_node(self, node: NodeSpec) -> None:
        name, dram = node.name, addresses.DRAM_INDEX
        messages = self._shape(name)
        messages += redirect_messages(addresses.SNIC_INDEX, ingress_to=dram, egress_to=dram)
        messages.append(devices.address_message(addresses.SNIC_INDEX, self.endpoints[f"{name}.snic"].address, 16))
        messages += (devices.raise_message(index) for index in (dram, addresses.SNIC_INDEX))
        messages += devices.neighbour_messages(addresses.SNIC_INDEX, self._addresses_on("10.1."))
        routes: list[Message] = []
        on_compute = self._addresses_on("10.2.")
        for i in range(node.gpus):
            memory, copy = addresses.MEMORY_INDEX + i, addresses.COPY_INDEX + i
            address = self.endpoints[f"{name}.cnic{i}"].address
            messages += redirect_messages(memory, ingress_to=dram, egress_to=dram)
            messages += redirect_messages(copy, ingress_to=dram, egress_to=dram)
            messages.append(devices.address_message(memory, address, 16))
            messages.append(devices.address_message(copy, self.endpoints[f"{name}.copy{i}"].address, 30))
            messages += (devices.raise_message(index) for index in (addresses.CNIC_INDEX + i, memory, copy))
            messages += devices.neighbour_messages(memory, on_compute)
            messages += devices.neighbour_messages(copy, [self.endpoints[f"{node.gpu(i)}.copy"].address])
            routes += devices.source_route_messages(memory, address)
        socket = self.socket(name)
        socket.run(messages)
        if socket.run(routes, tolerate=_SOURCE_ROUTING_MISSING):
            self.source_routing = False

    def _raise_control(self) -> None:
        neighbours = devices.neighbour_messages(addresses.CONTROL_INDEX, self._addresses_on("10.4."))
        batches = prepare([devices.raise_message(addresses.CONTROL_INDEX), *neighbours])
        for host in self.hosts:
            address = self.endpoints[f"{host}.control"].address
            self.socket(host).run([devices.address_message(addresses.CONTROL_INDEX, address, 16)])
            self.socket(host).run_batches(batches)

    def _configure_switches(self) -> None:
        """Shape and raise the ports last: with that every link gets its carrier."""
        for switch in (addresses.STORAGE_SWITCH, addresses.COMPUTE_SWITCH):
            messages = [devices.raise_message(addresses.BRIDGE_INDEX), *self._shape(switch)]
            for link in self.plan.links:
                if link.switch == switch:
                    messages.append(devices.bridge_port_message(link.port_index, hairpin=link.hairpin))
                    messages += (devices.forwarding_message(link.port_index, e.address) for e in link.behind)
            self.socket(switch).run(messages)

    def _await_carriers(self) -> None:
        """Carriers travel through a kernel work queue; a packet sent before would be lost and cost a second."""
        request = encode_dump(RTM_GETLINK)
        deadline = time.monotonic() + _CARRIER_WAIT_S
        waiting = list(self.namespaces)
        while waiting:
            down: list[str] = []
            for name in waiting:
                links = (devices.flags_of(link) for link in self.socket(name).dump(request))
                if not all(flags & _IFF_RUNNING for index, flags in links if index >= addresses.BRIDGE_INDEX):
                    down.append(name)
            if down and time.monotonic() > deadline:
                raise HostError(f"the links of {down[0]} did not come up within {_CARRIER_WAIT_S:.0f} s.")
            waiting = down
            if waiting:
                time.sleep(0.001)


def _write_setting(name: str, value: bytes) -> None:
    fd = os.open(f"/proc/sys/net/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value)
    except OSError as error:
        if name != "ipv4/ping_group_range":  # a comfort only
            raise HostError(f"cannot set net/{name} in a namespace of the sandbox ({error.strerror}).") from error
    finally:
        os.close(fd)
