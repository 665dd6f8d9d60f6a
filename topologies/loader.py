"""Topologies: how many prefill and decode nodes, GPUs per node, storage servers (paper A.2, P x D notation).

A file says only what is counted. Rates are the paper's hardware (``testbed.models.hardware``) divided by a scenario's
scale, so that one file serves every scale. Names are those of the paper: ``1p1d``, ``2p4d``, ``48p96d``.

What a world cannot build is refused by that world: the paper's large cluster is a shape for the sim world.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from testbed.errors import ConfigError
from testbed.fabric.spec import ClusterSpec
from testbed.models.hardware import PAPER_HARDWARE, Hardware
from testbed.models.scale import FittedScale
from testbed.units import MBIT
from topologies.tomlinput import fill, nearest, read_toml

SUFFIX = ".toml"
MOST_NODES = 4096
"""Nodes of a kind beyond which a shape is taken for a slip of the pen; the paper's largest cluster has 96."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """A cluster in the paper's terms: P, D, g, s, and the storage servers behind it.

    ``s``: bandwidth of a node's SNIC in units of one CNIC (paper 4.2; 1 in its testbed).
    ``storage_share``: what the storage servers together can send, and take in, over (P + D) s B, all SNICs of nodes;
    evenly over their ports. 0: their ports are not limited.
    """

    name: str
    prefill_nodes: int
    decode_nodes: int
    gpus_per_node: int = 8
    storage_servers: int = 2
    s: float = 1.0
    storage_share: float = 0.0
    title: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no cluster in any world.

        Raises:
            ConfigError: a count below 1, or s outside (0, g].
        """
        for key, letter in (("prefill_nodes", "P"), ("decode_nodes", "D")):
            value = getattr(self, key)
            if not 1 <= value <= MOST_NODES:
                raise ConfigError(
                    f"topology {self.name}: {key} ({letter}) is {value}, but it must be between 1 and {MOST_NODES}."
                )
        if self.gpus_per_node < 1 or self.storage_servers < 1:
            raise ConfigError(
                f"topology {self.name}: gpus_per_node (g) is {self.gpus_per_node} and storage_servers is "
                f"{self.storage_servers}, but both must be at least 1."
            )
        if not 0 < self.s <= self.gpus_per_node:
            raise ConfigError(
                f"topology {self.name}: s is {self.s:g}, but it must be above 0 and at most g = {self.gpus_per_node}: "
                "an SNIC faster than all CNICs of its node together could not be emptied."
            )
        if self.storage_share < 0:
            raise ConfigError(
                f"topology {self.name}: storage_share is {self.storage_share:g}, but it must be positive, or 0 for "
                "storage servers without a limit."
            )

    @property
    def hardware(self) -> Hardware:
        """The paper's node with this g and s."""
        snic_rate_bps = round(self.s * PAPER_HARDWARE.cnic_rate_bps)
        return replace(PAPER_HARDWARE, gpus_per_node=self.gpus_per_node, snic_rate_bps=snic_rate_bps)


def topology_names() -> list[str]:
    """Names of the topologies that ship, in order of size."""
    names = [f.name.removesuffix(SUFFIX) for f in resources.files("topologies").iterdir() if f.name.endswith(SUFFIX)]
    return sorted(names, key=lambda name: (len(name), name))


def load_topology(name_or_path: str) -> ClusterShape:
    """A shipped topology by name, or any by the path of its TOML file.

    Raises:
        ConfigError: no such topology (with the nearest name), an unknown key, or a shape that is none.
    """
    if name_or_path.endswith(SUFFIX) or "/" in name_or_path:
        path = Path(name_or_path)
        return _read(path, path.stem)
    names = topology_names()
    if name_or_path not in names:
        hint = nearest(name_or_path, names) or f"; choose one of {', '.join(names)}"
        raise ConfigError(f"unknown topology {name_or_path!r}{hint}.")
    with resources.as_file(resources.files("topologies") / f"{name_or_path}{SUFFIX}") as path:
        return _read(path, name_or_path)


def _read(path: Path, name: str) -> ClusterShape:
    return fill(ClusterShape, {"name": name, **read_toml(path)}, f"topology {path}")


def cluster_spec(shape: ClusterShape, scale: FittedScale) -> ClusterSpec:
    """The shape at the paper's rates divided by ``scale``.

    Raises:
        ConfigError: links below the rate that the kernel shapes well.
    """
    small = scale.emulated_hardware(shape.hardware)
    slowest = min(small.cnic_rate_bps, small.snic_rate_bps)
    if slowest < MBIT:
        raise ConfigError(
            f"topology {shape.name}: at a bandwidth scale of {float(scale.bandwidth_scale):g} its slowest link has "
            f"{slowest / MBIT:.3g} Mbit/s, below the 1 Mbit/s that can be shaped; lower scale.bandwidth."
        )
    return ClusterSpec(
        name=shape.name,
        prefill_nodes=shape.prefill_nodes,
        decode_nodes=shape.decode_nodes,
        gpus_per_node=small.gpus_per_node,
        storage_servers=shape.storage_servers,
        cnic_rate_bps=small.cnic_rate_bps,
        snic_rate_bps=small.snic_rate_bps,
        pcie_rate_bps=small.pcie_rate_bps,
        dram_rate_bps=small.dram_rate_bps,
        storage_rate_bps=_storage_rate_bps(shape, small.snic_rate_bps),
    )


def _storage_rate_bps(shape: ClusterShape, snic_rate_bps: int) -> int:
    """One storage server's part of the aggregate; 0 where there is no limit."""
    nodes = shape.prefill_nodes + shape.decode_nodes
    return round(shape.storage_share * nodes * snic_rate_bps / shape.storage_servers)
