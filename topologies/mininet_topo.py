"""The cluster as Mininet topology classes, for people who think in Mininet.

``ClusterTopo(spec)`` is any cluster; ``topos`` is Mininet's convention for ``mn --custom``. Stock Mininet can draw
such a topology but not realise it: lanes, loopback through a CNIC, PCIe and DRAM need the classes of
``testbed.fabric.live.mininet_face``, whose ``interactive`` runs Mininet's CLI on them.
"""

from __future__ import annotations

from testbed.fabric.live.mininet_face import PlanTopo
from testbed.fabric.spec import ClusterSpec
from testbed.units import MBIT


class ClusterTopo(PlanTopo):
    """A DualPath cluster: storage, compute and control switches, nodes, GPUs, storage servers and ctl0."""


def cluster(
    prefill: str = "1", decode: str = "1", gpus: str = "8", mbit: str = "100", servers: str = "2"
) -> ClusterTopo:
    """``cluster,2,4,8,40`` on a command line: 2P4D with 8 GPUs per node at 40 Mbit/s, proportions as in the paper."""
    rate_bps = int(mbit) * MBIT
    spec = ClusterSpec(
        name=f"{prefill}P{decode}D",
        prefill_nodes=int(prefill),
        decode_nodes=int(decode),
        gpus_per_node=int(gpus),
        storage_servers=int(servers),
        cnic_rate_bps=rate_bps,
        snic_rate_bps=rate_bps,
        pcie_rate_bps=rate_bps * 128 // 100,
        dram_rate_bps=rate_bps * 10,
    )
    return ClusterTopo(spec)


topos = {"cluster": cluster}
