"""The shared-rate resources of a cluster by name, and which of them a transfer passes (paper sections 3 and 5).

The names and the steps are the live world's: a transfer leaves through its memory (DRAM or PCIe) and the NIC's sending
side, and enters through a NIC's receiving side and its memory. A local copy through a CNIC therefore counts as one CNIC
read and one CNIC write; one over the copy engine passes DRAM and PCIe alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from testbed.errors import BugError
from testbed.fabric.sim.disciplines import Discipline, Resource
from testbed.fabric.sim.params import LANES, SimParams
from testbed.fabric.spec import ClusterSpec, LaneDiscipline
from testbed.ids import copy_dram_endpoint, copy_hbm_endpoint

ALL_DISKS = "storage.disks"
"""The storage cluster's aggregate."""


def kind_of(resource: str) -> str:
    """Kind of a resource by name: "snic", "cnic", "pcie", "dram" or "disk"."""
    part = resource.split(".")[1]
    return "disk" if part.startswith("disk") else part.rstrip("0123456789")


_LANES = {
    LaneDiscipline.HTB: Discipline.WEIGHTED,
    LaneDiscipline.PRIO: Discipline.STRICT,
    LaneDiscipline.ETS: Discipline.WEIGHTED,
    LaneDiscipline.NONE: Discipline.PACKETS,
    LaneDiscipline.INFINIBAND: Discipline.INFINIBAND,
}
_WEIGHT_SCALE = 10_000
"""A share of the link as a whole number: htb's is given to two or three digits."""


def shared_resources(rates_bps: Mapping[str, int], params: SimParams, spec: ClusterSpec) -> tuple[Resource, ...]:
    """The limited resources with their disciplines."""
    high = round(spec.high_share * _WEIGHT_SCALE)
    weights = spec.ets_quanta if spec.lanes is LaneDiscipline.ETS else (high, _WEIGHT_SCALE - high)

    def resource(name: str, rate_bps: int) -> Resource:
        discipline = getattr(params, kind_of(name))
        if discipline != LANES:
            return Resource(name=name, rate_bps=rate_bps, discipline=Discipline(discipline))
        return Resource(
            name=name,
            rate_bps=rate_bps,
            discipline=_LANES[spec.lanes],
            turns=True,
            high_weight=weights[0],
            kv_weight=weights[1],
            tables=spec.arbiter,
        )

    return tuple(resource(name, rate_bps) for name, rate_bps in rates_bps.items())


def memory_of(endpoint: str) -> str:
    """The memory behind an endpoint, as the KV lane of a CNIC tells sources apart: a node's DRAM, the HBM of all its
    GPUs."""
    host = endpoint.partition(".")[0]
    node, gpu, _ = host.partition("gpu")
    return f"{node}.hbm" if gpu else f"{node}.dram"


def disk_of(server: str) -> str:
    """The disk of a storage server: ``st0`` -> ``st0.disk``."""
    return f"{server}.disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Every resource of a cluster. ``rates_bps``: those that are limited. ``leaving``, ``entering``: steps by endpoint;
    ``disk``: steps of a storage server's disk, unlimited ones left out."""

    rates_bps: Mapping[str, int]
    leaving: Mapping[str, tuple[str, ...]]
    entering: Mapping[str, tuple[str, ...]]
    disk: Mapping[str, tuple[str, ...]]
    links: tuple[str, ...] = field(default=())
    """Everything that a transfer between memories can pass, limited or not."""

    def path(self, source: str, destination: str) -> tuple[str, ...]:
        """The resources between two endpoints, in order.

        Raises:
            BugError: an endpoint that the cluster does not have.
        """
        try:
            return (*self.leaving[source], *self.entering[destination])
        except KeyError as error:
            raise BugError(f"the cluster has no endpoint {error.args[0]!r}") from None


def resources_of(spec: ClusterSpec, params: SimParams) -> Resources:
    """All resources of a cluster."""
    rates: dict[str, int] = {}
    leaving: dict[str, tuple[str, ...]] = {}
    entering: dict[str, tuple[str, ...]] = {}
    disk: dict[str, tuple[str, ...]] = {}

    def endpoint(name: str, nic: str, memory: tuple[str, ...], sides: tuple[str, str], rate_bps: int) -> None:
        """``memory``: the resource behind the NIC, leaving and entering (the same one where it is half duplex)."""
        out, into = (f"{nic}.{side}" for side in sides)
        rates[out] = rates[into] = rate_bps
        leaving[name] = (*memory[:1], out)
        entering[name] = (into, *memory[1:])

    for server in spec.storage_names:
        endpoint(f"{server}.snic", f"{server}.snic", (), ("tx", "rx"), spec.storage_rate_bps)
        rates[disk_of(server)] = params.disk_rate_bps
    rates[ALL_DISKS] = params.storage_rate_bps
    for node in spec.nodes:
        dram = f"{node.name}.dram"
        rates[dram] = spec.dram_rate_bps
        endpoint(f"{node.name}.snic", f"{node.name}.snic", (dram, dram), ("tx", "rx"), spec.snic_rate_bps)
        for i in range(node.gpus):
            cnic, gpu = f"{node.name}.cnic{i}", node.gpu(i)
            pcie = (f"{gpu}.pcie.tx", f"{gpu}.pcie.rx")
            rates[pcie[0]] = rates[pcie[1]] = spec.pcie_rate_bps
            endpoint(cnic, cnic, (dram, dram), ("read", "write"), spec.cnic_rate_bps)
            endpoint(f"{gpu}.cnic", cnic, pcie, ("read", "write"), spec.cnic_rate_bps)
            leaving[copy_dram_endpoint(gpu)] = entering[copy_dram_endpoint(gpu)] = (dram,)  # the copy engine: no NIC
            leaving[copy_hbm_endpoint(gpu)], entering[copy_hbm_endpoint(gpu)] = pcie[:1], pcie[1:]
    limited = {name: rate for name, rate in rates.items() if rate}
    for server in spec.storage_names:
        disk[server] = tuple(name for name in (disk_of(server), ALL_DISKS) if name in limited)
    links = tuple(name for name in rates if not name.endswith((".disk", ".disks")))
    return Resources(rates_bps=limited, leaving=leaving, entering=entering, disk=disk, links=links)
