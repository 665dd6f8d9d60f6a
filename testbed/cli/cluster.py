"""Clusters by name for ``testbed shell`` and ``testbed topo``: a scenario's, or a topology at the default scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.tree import Tree

from scenarios.loader import read_scenario, scenario_names
from scenarios.resolve import cluster_of, model_of, scale_of
from testbed.errors import ConfigError
from testbed.fabric.spec import ClusterSpec
from testbed.units import MBIT
from topologies.loader import topology_names
from topologies.tomlinput import nearest

DEFAULT_SCENARIO = "quickstart"
"""Whose scale a bare topology is built at."""


def spec_named(name: str, overrides: Sequence[str] = (), lanes_for: Callable[[str], str] | None = None) -> ClusterSpec:
    """The cluster of a scenario, or of a topology at the scale of the default scenario.

    ``lanes_for``: maps the scenario's lanes to those that the cluster gets.

    Raises:
        ConfigError: neither (with the nearest name), or a cluster that cannot be built.
    """
    if name in topology_names():
        scenario = read_scenario(DEFAULT_SCENARIO, (f"topology={name}", *overrides))
    elif name in scenario_names() or name.endswith(".toml"):
        scenario = read_scenario(name, overrides)
    else:
        known = [*topology_names(), *scenario_names()]
        raise ConfigError(f"unknown topology or scenario {name!r}{nearest(name, known)}; see `testbed list`.")
    if lanes_for is not None:
        lanes = lanes_for(scenario.cluster.lanes)
        return spec_named(name, (*overrides, f"cluster.lanes={lanes}"))
    return cluster_of(scenario, scale_of(scenario, model_of(scenario)))


def tree(spec: ClusterSpec) -> Tree:
    """Switches, nodes, GPUs and links with their rates."""
    root = Tree(f"{spec.name}: {spec.prefill_nodes}P{spec.decode_nodes}D, g={spec.gpus_per_node}, s={spec.s:g}")
    storage = root.add("storage network")
    for server in spec.storage_names:
        rate = f"{_rate(spec.storage_rate_bps)}" if spec.storage_rate_bps else "unshaped"
        storage.add(f"{server}.snic, {rate}")
    for node in spec.nodes:
        storage.add(f"{node.name}.snic, {_rate(spec.snic_rate_bps)} each way")
    compute = root.add(f"compute network, lanes {spec.lanes.value}: high {spec.high_share:.0%}, KV the rest")
    for node in spec.nodes:
        branch = compute.add(f"{node.name}, DRAM {_rate(spec.dram_rate_bps)} shared")
        for i in range(node.gpus):
            branch.add(
                f"{node.gpu(i)} behind {node.name}.cnic{i}, {_rate(spec.cnic_rate_bps)} each way, "
                f"PCIe {_rate(spec.pcie_rate_bps)} each way"
            )
    root.add("control network, unshaped: ctl0 (scheduler, index, driver) and every host")
    return root


def _rate(rate_bps: int) -> str:
    return f"{rate_bps / MBIT:.4g} Mbit/s"
