"""Names of roles and of the endpoints that their memory is reached through. One scheme for all worlds.

Roles: ``scheduler``, ``index``, ``driver``, one DRAM role per node (named as the node: ``pe0``), one engine per GPU
(``pe0gpu3``), one leader per group (``leader-pe0``: by the node of its rank 0), storage servers (``st0``).
"""

from __future__ import annotations

SCHEDULER = "scheduler"
INDEX = "index"
DRIVER = "driver"


def node_of(engine: str) -> str:
    """Node of an engine: ``pe0gpu3`` -> ``pe0``."""
    return engine.split("gpu", 1)[0]


def gpu_index(engine: str) -> int:
    """Number of an engine's GPU in its node: ``pe0gpu3`` -> 3."""
    return int(engine.split("gpu", 1)[1])


def cnic_dram_endpoint(engine: str) -> str:
    """DRAM side of the engine's paired CNIC: ``pe0gpu3`` -> ``pe0.cnic3``."""
    return f"{node_of(engine)}.cnic{gpu_index(engine)}"


def cnic_hbm_endpoint(engine: str) -> str:
    """HBM side of the engine's paired CNIC: ``pe0gpu3`` -> ``pe0gpu3.cnic``."""
    return f"{engine}.cnic"


def copy_dram_endpoint(engine: str) -> str:
    """DRAM side of the engine's direct PCIe link, which its copy engine uses: ``pe0gpu3`` -> ``pe0.copy3``."""
    return f"{node_of(engine)}.copy{gpu_index(engine)}"


def copy_hbm_endpoint(engine: str) -> str:
    """HBM side of the engine's direct PCIe link: ``pe0gpu3`` -> ``pe0gpu3.copy``."""
    return f"{engine}.copy"


def dram_endpoint(engine: str, *, direct: bool) -> str:
    """DRAM side of the engine's CNIC, or of its direct PCIe link."""
    return copy_dram_endpoint(engine) if direct else cnic_dram_endpoint(engine)


def hbm_endpoint(engine: str, *, direct: bool) -> str:
    """HBM side of the engine's CNIC, or of its direct PCIe link."""
    return copy_hbm_endpoint(engine) if direct else cnic_hbm_endpoint(engine)


def is_copy_endpoint(endpoint: str) -> bool:
    """Whether an endpoint is a side of a direct PCIe link."""
    return ".copy" in endpoint


def engine_of(endpoint: str) -> str:
    """The engine that a side of a CNIC or direct link belongs to: ``pe0.cnic3`` or ``pe0gpu3.copy`` -> ``pe0gpu3``."""
    host, port = endpoint.split(".")
    number = port.lstrip("abcdefghijklmnopqrstuvwxyz")
    return f"{host}gpu{number}" if number else host


def snic_endpoint(host: str) -> str:
    """SNIC of a node or storage server: ``pe0`` -> ``pe0.snic``."""
    return f"{host}.snic"


def leader_role(rank0_engine: str) -> str:
    """Leader of the group whose rank 0 is ``rank0_engine``."""
    return f"leader-{node_of(rank0_engine)}"
