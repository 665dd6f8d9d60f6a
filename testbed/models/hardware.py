"""The paper's node and what its schedulers derive from it (paper sections 2.3, 4.2, 6.1, A.2, A.4).

All in paper units; ``testbed.models.scale`` maps them to the emulated cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from testbed.errors import ConfigError
from testbed.models.compute import GpuSpec
from testbed.models.model import ModelSpec
from testbed.units import GBIT

GB = 10**9

ALPHA_S = 3.0  # A.4: alpha is what a node's SNIC reads in 3 s
BETA_S = 5.0  # A.4: beta is what one GPU processes in 5 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node of the paper's cluster. Rates in bit/s, sizes in bytes.

    ``pcie_rate_bps`` (PCIe 5.0 x16, per direction) and ``dram_rate_bps`` (half duplex, per node) are not stated in
    the evaluation; section 4.2 argues with M of about 500 GB/s.
    """

    gpus_per_node: int = 8
    cnic_rate_bps: int = 400 * GBIT
    snic_rate_bps: int = 400 * GBIT
    pcie_rate_bps: int = 512 * GBIT
    dram_rate_bps: int = 4000 * GBIT

    def __post_init__(self) -> None:
        """Refuse a node without parts.

        Raises:
            ConfigError: a value that is not positive.
        """
        for key in ("gpus_per_node", "cnic_rate_bps", "snic_rate_bps", "pcie_rate_bps", "dram_rate_bps"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"hardware: {key} is {getattr(self, key)}, but it must be positive.")

    @property
    def s(self) -> float:
        """Storage bandwidth of a node in units of one CNIC (section 4.2)."""
        return self.snic_rate_bps / self.cnic_rate_bps


PAPER_HARDWARE = Hardware()

KV_DRAM_BYTES_PER_NODE: Mapping[str, int] = MappingProxyType(
    {"ds-660b": 80 * GB, "ds-27b": 80 * GB, "qwen-32b": 320 * GB}
)
"""Host DRAM for KV per node (A.4). How a node splits it between its engines is UNKNOWN."""

KV_HBM_BYTES_PER_GPU: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        # UNKNOWN in the paper. 72 of 80 GB usable, less the weights of the engine's share and ~10 GB of activations:
        "ds-660b": (20 * GB, 30 * GB),  # experts over 16 (PE) or 32 (DE) GPUs, attention replicated
        "ds-27b": (60 * GB, 60 * GB),  # 27 GB of experts over 8 GPUs
        "qwen-32b": (30 * GB, 30 * GB),  # 33 GB of FP8 weights on every GPU
    }
)
"""HBM for KV of one (prefill, decode) GPU; assumptions, see the source."""


def kv_dram_bytes_per_node(model: ModelSpec) -> int:
    """Host DRAM for KV per node of a model (A.4).

    Raises:
        ConfigError: a model the paper does not serve.
    """
    if model.name not in KV_DRAM_BYTES_PER_NODE:
        raise ConfigError(f"the paper states no KV DRAM for model {model.name!r}; give it in the scenario.")
    return KV_DRAM_BYTES_PER_NODE[model.name]


def kv_hbm_bytes_per_gpu(model: ModelSpec) -> tuple[int, int]:
    """HBM for KV of one (prefill, decode) GPU.

    Raises:
        ConfigError: a model without an assumption.
    """
    if model.name not in KV_HBM_BYTES_PER_GPU:
        raise ConfigError(f"no KV HBM is assumed for model {model.name!r}; give it in the scenario.")
    return KV_HBM_BYTES_PER_GPU[model.name]


def alpha_tokens(model: ModelSpec, hardware: Hardware = PAPER_HARDWARE, seconds: float = ALPHA_S) -> int:
    """Read-queue threshold alpha: paper tokens whose KV one SNIC reads in ``seconds`` (A.4). DS 660B: 3.7 M."""
    return int(hardware.snic_rate_bps / 8 * seconds / model.kv_bytes_per_token)


def beta_tokens(
    model: ModelSpec, gpu: GpuSpec, *, context_tokens: int = 32_721, append_tokens: int = 429, seconds: float = BETA_S
) -> int:
    """Load threshold beta: paper tokens, hits included, that one GPU processes in ``seconds`` (A.4).

    "Process" is UNKNOWN; taken as prefilling average requests of the 64K trace one after the other, without the base
    of a forward. DS 660B: 1.2 M; the plateau of Figure 15 implies 0.8 M.
    """
    request_s = (
        append_tokens * model.linear_flops_per_token / gpu.effective_flops
        + model.attention_flops(context_tokens, append_tokens) / gpu.effective_attention_flops
    )
    return int((context_tokens + append_tokens) * seconds / request_s)
