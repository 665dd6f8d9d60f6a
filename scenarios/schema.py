"""What a scenario file may hold. Every field is a key of the TOML file and can be set with ``--set key=value``.

Units are the paper's: seconds, tokens, bytes and rates of its cluster; ``resolve`` maps them to the emulated ones.
Counts of emulated things (agents that are replayed here, blocks in a window) are marked as such.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from testbed.errors import ConfigError
from testbed.fabric.sim.params import SimParams
from testbed.fabric.spec import ETS_QUANTA
from testbed.models.compute import COMPUTE_QUOTA_S
from testbed.models.scale import PAPER_BLOCK_TOKENS
from testbed.runtime.plan import TrustLimits
from testbed.workload.agents import SYNTHETIC_TOKENS

LaneName = Literal["auto", "htb", "prio", "ets", "none", "infiniband"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """Departures from the topology file (None keeps what it says), and the lanes of the CNICs.

    ``lanes``: a ``LaneDiscipline``; "auto" is the best that the kernel of a live run offers, and htb in the sim world.
    ``high_share`` and ``kv_share`` (None: the rest) of htb; ``ets_quanta``: bytes in a turn of the high and of the KV
    lane under ets. ``opensm``: a file with the tables of infiniband in OpenSM's words; empty: the paper's.
    """

    prefill_nodes: int | None = None
    decode_nodes: int | None = None
    gpus_per_node: int | None = None
    storage_servers: int | None = None
    s: float | None = None
    storage_share: float | None = None
    lanes: LaneName = "htb"
    high_share: float = 0.99
    kv_share: float | None = None
    ets_quanta: tuple[int, int] = ETS_QUANTA
    opensm: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSection:
    """The scales of ``testbed.models.scale``: paper rate : emulated rate, emulated time : paper time, and so on."""

    bandwidth: float
    time: float
    length: int = 1
    agents: int = 1
    gpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSection:
    """What the agents replay. ``agents`` are those replayed here (0: one per trajectory of the source); each stands for
    ``scale.agents`` of the paper's.

    ``tool_delay_s``: from the end of a round to the agent's next one; the paper's replay has none (A.4).
    ``source``: "shipped", "sweagent" (with ``path``), or "table2:32K", "table2:48K", "table2:64K". A ``path`` alone
    means "sweagent". ``arrivals``: agents per second of the paper (APS); 0 starts all together (offline).
    """

    agents: int
    source: str = "shipped"
    path: str = ""
    max_turns: int = 0
    start_turn: int = 0
    arrivals: float = 0.0
    tool_delay_s: float = 0.0
    synthetic_tokens: int = SYNTHETIC_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolSection:
    """``ProtocolParams`` in paper units. A 0 where 0 makes no sense means: derived from the paper's hardware."""

    block_tokens: int = PAPER_BLOCK_TOKENS
    """Paper tokens per block; UNKNOWN in its experiments. Larger blocks are fewer and cheaper to emulate."""
    layer_group: int = 1
    layers_in_flight: int = 2
    fetch_interval_s: float = 0.02
    alpha_tokens: int = 0
    beta_tokens: int = 0
    z_factor: float = 1.05
    compute_quota_s: float = COMPUTE_QUOTA_S
    quota_scope: Literal["forward", "layer"] = "forward"
    wait_deadline_s: float = 0.0
    """0: 60 s of this host, for what ends a wait is a fault of the emulation, not the paper; 22 s of the paper's where
    that is longer, for a slow scale makes every wait longer."""
    split_least_blocks: int = 4
    """Emulated blocks that a side must have of a read on both sides (systems with the option -split)."""
    read_window_blocks: int = 64
    persist_window_blocks: int = 16
    replicas: int = 2
    write_back: Literal["real", "free"] = "real"
    """free: new blocks become hits at once and no byte of them moves, to measure what writing back costs."""
    kv_dram_bytes: int = 0
    """Host DRAM for KV per node."""
    dram_cache_bytes: int = 0
    """Host DRAM per node, beside ``kv_dram_bytes``, that keeps blocks of ended requests; 0, the paper's: none."""
    pe_hbm_bytes: int = 0
    """HBM for KV of one prefill GPU."""
    de_hbm_bytes: int = 0
    """HBM for KV of one decode GPU."""
    stage_pages: int = 32
    max_decode_batch: int = 256
    storage_pages: int = 64
    queue_limit: int = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivesSection:
    """Expert-parallel dispatch and combine among the engines of a group (docs/collectives.md); off by default.

    ``transport``: "rdma" (every pair of engines over the CNIC) or "rails" (one copy of a token per remote node).
    ``layers``: whose exchanges travel as one; 0: protocol.layer_group.
    """

    transport: Literal["off", "rdma", "rails"] = "off"
    layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSection:
    """Departures from the Hopper of ``testbed.models.compute``; the first line of a run names each of them.

    ``speedup`` multiplies every rate and divides every time; the other keys then replace single values.
    """

    speedup: float = 1.0
    effective_flops: float | None = None
    effective_attention_flops: float | None = None
    prefill_base_s: float | None = None
    decode_base_s: float | None = None
    decode_per_sequence_s: float | None = None
    decode_per_context_token_s: float | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a GPU that would stand still."""
        if not 0 < self.speedup < float("inf"):
            raise ConfigError(f"gpu.speedup is {self.speedup:g}, but it must be a positive number.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionSection:
    """What submitting a copy takes of a traffic manager's serial thread (paper 5.2); ``on = false``: nothing.

    ``copy_s``: one ``cudaMemcpyAsync``. An RDMA write request takes 1 us: ``work_request_s`` to write it and
    ``doorbell_s`` to ring for it (MMIO), once per ``doorbell_batch`` requests. How the 1 us divides and how large
    batches are is UNKNOWN. ``copies_outstanding``: writes on a GPU's copy engine at once, per direction, submission on
    or off; 0: as many as memory has been granted for.
    """

    on: bool = False
    copy_s: float = 6e-6
    work_request_s: float = 0.2e-6
    doorbell_s: float = 0.8e-6
    doorbell_batch: int = 1
    copies_outstanding: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for costs that no machine has."""
        for key in ("copy_s", "work_request_s", "doorbell_s"):
            if not 0 <= getattr(self, key) < 1:
                raise ConfigError(f"submission.{key} is {getattr(self, key):g}, but it must be from 0 to 1 s.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Something that the scenario claims: ``metric`` is a comparison over the run's metrics (``testbed.metrics``)."""

    name: str
    metric: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario file."""

    title: str
    description: str
    topology: str
    model: str
    systems: tuple[str, ...]
    scale: ScaleSection
    workload: WorkloadSection
    seed: int = 0
    cluster: ClusterSection = field(default_factory=ClusterSection)
    protocol: ProtocolSection = field(default_factory=ProtocolSection)
    collectives: CollectivesSection = field(default_factory=CollectivesSection)
    gpu: GpuSection = field(default_factory=GpuSection)
    submission: SubmissionSection = field(default_factory=SubmissionSection)
    trust: TrustLimits = field(default_factory=TrustLimits)
    sim: SimParams = field(default_factory=SimParams)
    expect: tuple[Expectation, ...] = ()
