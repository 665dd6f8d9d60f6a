"""What the live world can build on one host; larger clusters are for the sim world."""

from __future__ import annotations

from testbed.errors import ConfigError
from testbed.fabric.spec import ClusterSpec, LaneDiscipline

MAX_NODES = 16
MAX_GPUS_PER_NODE = 16
MAX_STORAGE_SERVERS = 16


def check_buildable(spec: ClusterSpec) -> None:
    """Refuse a cluster that has no place in the address plan, too many processes for a host, or lanes of no kernel.

    Raises:
        ConfigError: naming the count, the limit and the way out.
    """
    if spec.lanes is LaneDiscipline.INFINIBAND:
        raise ConfigError(
            f"topology {spec.name}: lanes infiniband exist in the sim world only, for no queue of a kernel is an "
            "InfiniBand arbiter; run it with --world sim, or set cluster.lanes to htb, ets, prio or none."
        )
    for key, value, most in (
        ("prefill_nodes (P)", spec.prefill_nodes, MAX_NODES),
        ("decode_nodes (D)", spec.decode_nodes, MAX_NODES),
        ("gpus_per_node (g)", spec.gpus_per_node, MAX_GPUS_PER_NODE),
        ("storage_servers", spec.storage_servers, MAX_STORAGE_SERVERS),
    ):
        if value > most:
            raise ConfigError(
                f"topology {spec.name}: {key} is {value}, but the live world builds at most {most}, for every GPU is a "
                "process of this host; run it with --world sim."
            )
