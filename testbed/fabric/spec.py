"""What a cluster is made of, independent of the world that realises it.

Paper section 2.3 and the critique 1.3: P prefill nodes and D decode nodes, g GPUs per node, each GPU paired with one
compute NIC (CNIC) of bandwidth B; one storage NIC (SNIC) of bandwidth s*B per node; two physically separate networks.

Names used everywhere (config, namespaces, trace, ledger):

==================  =====================================================================
``pe0``, ``de1``     a node (its DRAM lives here);  ``pe0gpu3`` a GPU (its HBM lives here)
``st0``              a storage server
``ctl0``             the host of the central roles (scheduler, KV index, agent driver)
``pe0.snic``         the SNIC of a node;  ``pe0.cnic3`` the CNIC paired with GPU 3 of pe0
``pe0.dram``         the DRAM bandwidth of a node;  ``pe0gpu3.pcie`` the PCIe link of a GPU
==================  =====================================================================
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from testbed.errors import ConfigError
from testbed.fabric.arbiter import PAPER_TABLES, ArbiterTables
from testbed.units import MBIT


class NodeKind(enum.Enum):
    """Role of a node: all its engines are prefill engines (PE) or all are decode engines (DE), paper section 4."""

    PE = "pe"
    DE = "de"


ETS_QUANTA = (240 * 4096, 4096)
"""Bytes in a turn of the high and of the KV lane: the paper's HighLimit (240 x 4 KiB) and its KV weight (64 x 64 B).

A super-packet of 8 KB is larger than KV's quantum: it then waits two turns instead of one, and the ratio of bytes
stays, because what is left of a turn is kept (any quanta above 0 do; larger ones only make larger lumps).
"""


class LaneDiscipline(enum.Enum):
    """How the two lanes of a CNIC, model traffic and KV (paper 5.1), divide the link. All but NONE idle for nobody.

    ==========  ===============================================================================================
    HTB         the high lane is guaranteed ``high_share``, KV the rest; what one leaves the other takes
    PRIO        strict: KV goes only while no model traffic waits, and may starve
    ETS         deficit round robin with ``ets_quanta``
    NONE        one queue for both: isolation off
    INFINIBAND  the arbiter with ``ClusterSpec.arbiter``'s tables (sim world only: no Linux queue is one)
    ==========  ===============================================================================================
    """

    HTB = "htb"
    PRIO = "prio"
    ETS = "ets"
    NONE = "none"
    INFINIBAND = "infiniband"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One node: ``name`` ("pe0"), its kind and its number of GPUs."""

    name: str
    kind: NodeKind
    index: int
    gpus: int

    def gpu(self, i: int) -> str:
        """Name of GPU ``i`` of this node ("pe0gpu1")."""
        return f"{self.name}gpu{i}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """An emulated cluster. Rates are emulated bits per second on the wire (layer 2, Ethernet header included).

    ``pcie_rate_bps`` and ``dram_rate_bps`` are the shared-rate resources of a GPU (per direction) and of a node
    (half duplex, paper section 5). ``storage_rate_bps`` shapes each storage server's own port (0: unshaped).
    ``high_share`` is the share that the high lane is guaranteed under htb (paper 5.1: about 99 %); ``ets_quanta`` are
    bytes in a turn of either lane under ets; ``arbiter`` are the tables under infiniband, with model traffic on VL0 and
    KV on VL2.
    """

    name: str
    prefill_nodes: int
    decode_nodes: int
    gpus_per_node: int
    storage_servers: int
    cnic_rate_bps: int
    snic_rate_bps: int
    pcie_rate_bps: int
    dram_rate_bps: int
    storage_rate_bps: int = 0
    lanes: LaneDiscipline = LaneDiscipline.HTB
    high_share: float = 0.99
    ets_quanta: tuple[int, int] = ETS_QUANTA
    arbiter: ArbiterTables = PAPER_TABLES

    def __post_init__(self) -> None:
        """Refuse what no world can build.

        Raises:
            ConfigError: a count or a rate out of range.
        """
        for key in ("prefill_nodes", "decode_nodes", "gpus_per_node", "storage_servers"):
            if getattr(self, key) < 1:
                raise ConfigError(f"topology {self.name}: {key} is {getattr(self, key)}, but it must be at least 1.")
        for key, rate in (
            ("cnic_rate_bps", self.cnic_rate_bps),
            ("snic_rate_bps", self.snic_rate_bps),
            ("pcie_rate_bps", self.pcie_rate_bps),
            ("dram_rate_bps", self.dram_rate_bps),
        ):
            if rate < MBIT:
                raise ConfigError(
                    f"topology {self.name}: {key} is {rate} bit/s, below the 1 Mbit/s a link can be shaped to."
                )
        if self.storage_rate_bps and self.storage_rate_bps < MBIT:
            raise ConfigError(
                f"topology {self.name}: storage_rate_bps is {self.storage_rate_bps} bit/s; use 0 or at least 1 Mbit/s."
            )
        if not 0.5 <= self.high_share <= 0.9999:
            raise ConfigError(
                f"topology {self.name}: high_share is {self.high_share}, but it must be from 0.5 to 0.9999; "
                "lanes = prio leaves KV nothing."
            )
        if len(self.ets_quanta) != 2 or not all(1 <= quantum < 1 << 32 for quantum in self.ets_quanta):
            quanta = ", ".join(map(str, self.ets_quanta))
            raise ConfigError(
                f"topology {self.name}: ets_quanta are {quanta}, but they must be two numbers of bytes, the high "
                "lane's and KV's, each from 1 to 4294967295: a lane with a quantum of 0 would never be served."
            )

    @property
    def s(self) -> float:
        """Storage bandwidth per node in units of one CNIC (the paper's s)."""
        return self.snic_rate_bps / self.cnic_rate_bps

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """All nodes, prefill first."""
        return tuple(
            NodeSpec(name=f"{kind.value}{i}", kind=kind, index=i, gpus=self.gpus_per_node)
            for kind, count in ((NodeKind.PE, self.prefill_nodes), (NodeKind.DE, self.decode_nodes))
            for i in range(count)
        )

    @property
    def storage_names(self) -> tuple[str, ...]:
        """Names of the storage servers."""
        return tuple(f"st{k}" for k in range(self.storage_servers))


CONTROL_HOST = "ctl0"
