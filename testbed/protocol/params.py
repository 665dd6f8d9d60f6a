"""Every number that the protocol needs and the paper leaves open, by name, with a default and a reason.

The list follows section 17 of the reference (UNKNOWN). Values are in emulated units; a scenario scales them.
Systems of the evaluation are configurations of the same machines, see ``SystemConfig``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from testbed.errors import ConfigError
from testbed.protocol.collectives import Collectives
from testbed.protocol.layout import BlockLayout
from testbed.protocol.submission import SubmissionCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolParams:
    """Parameters shared by all roles of a run."""

    layout: BlockLayout
    layer_group: int = 1
    """Layers per step: 1 is the paper's; more means fewer, larger transfers (cheaper to emulate)."""
    layers_in_flight: int = 2
    """Layer steps loaded ahead of compute. UNKNOWN; overlap of load and compute needs at least 2."""
    fetch_interval_ns: int = 20_000_000
    """Period at which a group pulls work. UNKNOWN; short beside a prefill, long beside a control round trip."""
    alpha_tokens: int = 3_700_000
    """Read queue above which a node is second choice: tokens readable in 3 s (paper 8.2)."""
    beta_tokens: int = 800_000
    """Engine load above which it is never assigned: tokens one GPU processes in 5 s (paper 8.2)."""
    z_factor: float = 1.05
    """Slack on the mean token count in DE selection (paper 8.3; unexplained there)."""
    compute_quota_ns: int = 300_000_000
    """Attention time a forward batch may have (paper 8.5). Scope UNKNOWN: ``quota_scope``."""
    quota_scope: Literal["forward", "layer"] = "forward"
    """Whether the quota bounds the attention of one layer or of the whole forward; per layer it rarely binds."""
    wait_deadline_ns: int = 60_000_000_000
    """Longest wait of a request in any one state of any role; then it ends with a named error."""
    read_window_blocks: int = 64
    """Full Blocks a node has requested from storage and not received: deep enough to fill the SNIC, bounded."""
    persist_window_blocks: int = 16
    """Full Blocks a node is writing back at once."""
    write_back: Literal["real", "free"] = "real"
    """Free, to measure what writing back costs: new blocks are on the disks from the start, and published when they
    would have been submitted; no byte of them moves."""
    split_least_blocks: int = 4
    """Of a read on both sides: hits that a side must have to be worth a round trip and a write per layer step."""
    replicas: int = 2
    """Copies of a block on different storage servers (3FS writes all, reads any)."""
    dram_pages: int = 1024
    """Full Blocks of buffer in a node's DRAM (KV DRAM of A.4 divided by the Full Block)."""
    dram_cache_pages: int = 0
    """Full Blocks of ended requests that a node's DRAM keeps beside its buffer; 0, the paper's: none."""
    stage_pages: int = 32
    """Full Blocks of DRAM kept apart for copying generated blocks out, so that full buffers cannot block decode."""
    pe_hbm_bytes: int = 1 << 26
    """HBM of a PE for KV in transit. UNKNOWN."""
    de_hbm_pages: int = 1024
    """Full Blocks of HBM of a DE for decode. UNKNOWN."""
    max_decode_batch: int = 256
    """Sequences a DE decodes in one step (the paper batches everything)."""
    storage_pages: int = 64
    """Full Blocks of staging memory in a storage server, for reads and for writes each."""
    queue_limit: int = 65_536
    """Requests or blocks that any queue may hold; beyond, the newcomer is refused by name."""
    collectives: Collectives | None = None
    """Expert-parallel exchanges among the engines of a group; None: engines do not meet."""
    submission: SubmissionCosts = field(default_factory=SubmissionCosts)
    """What submitting a copy costs (paper 5.2); free by default."""

    def __post_init__(self) -> None:
        """Raises ConfigError for values that no machine can work with."""
        if not 1 <= self.layer_group <= self.layout.layers:
            raise ConfigError(f"protocol.layer_group is {self.layer_group}; the model has {self.layout.layers} layers.")
        for key in (
            "layers_in_flight",
            "replicas",
            "dram_pages",
            "stage_pages",
            "de_hbm_pages",
            "read_window_blocks",
            "split_least_blocks",
            "persist_window_blocks",
            "max_decode_batch",
            "storage_pages",
            "queue_limit",
        ):
            if getattr(self, key) < 1:
                raise ConfigError(f"protocol.{key} is {getattr(self, key)}, but it must be at least 1.")
        if not 0 < self.z_factor < float("inf"):
            raise ConfigError(f"protocol.z_factor is {self.z_factor:g}, but it must be a positive number.")

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """Layer ranges ``[begin, end)`` of the steps of a forward."""
        layers, group = self.layout.layers, self.layer_group
        return tuple((a, min(a + group, layers)) for a in range(0, layers, group))

    @property
    def pe_page_bytes(self) -> int:
        """Page of PE HBM: one block's share of a layer step."""
        return self.layer_group * self.layout.layer_block_bytes

    @property
    def pe_hbm_pages(self) -> int:
        """Pages of PE HBM."""
        return self.pe_hbm_bytes // self.pe_page_bytes


SidePolicy = Literal["pe", "round_robin", "shorter_queue", "split"]
CopyPath = Literal["cnic", "copy-engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """One system of the evaluation (paper 7.2, A.2, 7.5)."""

    name: str
    title: str
    layerwise: bool
    """Layerwise prefill: only the layers in flight are in PE HBM. Without it all layers are, before compute starts."""
    side_policy: SidePolicy
    """Who reads: always the PE node; sides in turn; the side with the shorter read queue (paper 8.4); or both, each as
    many blocks as let both end together (not in the paper, which leaves it open)."""
    balanced: bool
    """Engines chosen by Algorithm 1 and the two DE levels (paper 8.2, 8.3); else round robin."""
    moves_kv: bool = True
    """False for Oracle: no storage reads, no copies, no PE-DE transfers."""
    copy_path: CopyPath = "cnic"
    """How a copy between a node's DRAM and its own GPU goes: loopback through the paired CNIC, in the low lane (paper
    5), or over the copy engine: PCIe alone, past every lane. What goes to another node always goes through CNICs."""

    @property
    def direct_copies(self) -> bool:
        """Whether local copies go over the copy engine."""
        return self.copy_path == "copy-engine"

    @property
    def reads_on_both_sides(self) -> bool:
        """Whether decode nodes read hits too."""
        return self.side_policy != "pe"


SYSTEMS: dict[str, SystemConfig] = {
    system.name: system
    for system in (
        SystemConfig(name="basic", title="Basic", layerwise=False, side_policy="pe", balanced=False),
        SystemConfig(name="layerwise", title="+ layerwise", layerwise=True, side_policy="pe", balanced=False),
        SystemConfig(
            name="dual-path-rr", title="+ dual path", layerwise=True, side_policy="round_robin", balanced=False
        ),
        SystemConfig(name="dualpath", title="DualPath", layerwise=True, side_policy="shorter_queue", balanced=True),
        SystemConfig(name="oracle", title="Oracle", layerwise=True, side_policy="pe", balanced=True, moves_kv=False),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemOption:
    """A departure that stacks on a system: ``changes`` are fields of ``SystemConfig``; ``title`` is put behind its."""

    name: str
    title: str
    sentence: str
    changes: Mapping[str, Any]


OPTIONS: dict[str, SystemOption] = {
    option.name: option
    for option in (
        SystemOption(
            name="copy-engine",
            title="copy engine",
            sentence="copies between a node's DRAM and its own GPU take PCIe alone, past the CNIC and its lanes",
            changes={"copy_path": "copy-engine"},
        ),
        SystemOption(
            name="split",
            title="split reads",
            sentence="each request's hits are read on both sides at once, so many on each that both end together",
            changes={"side_policy": "split"},
        ),
    )
}


def system_named(name: str) -> SystemConfig:
    """A system by name, with the options whose names are put behind it: ``dualpath-copy-engine``.

    Raises:
        ConfigError: an unknown system or option, with the nearest name; an option twice, or on a system without KV.
    """
    base = max((s for s in SYSTEMS if name == s or name.startswith(f"{s}-")), key=len, default="")
    if not base:
        raise _unknown_system(name)
    system, rest = SYSTEMS[base], name.removeprefix(base)
    given: list[str] = []
    while rest:
        option = next((o for o in OPTIONS.values() if f"{rest}-".startswith(f"-{o.name}-")), None)
        if option is None:
            raise _unknown_system(name)
        if option.name in given:
            raise ConfigError(f"system {name}: option {option.name} is given twice; give it once.")
        if not system.moves_kv:
            raise ConfigError(f"system {name}: {base} moves no KV; leave option {option.name} out.")
        given.append(option.name)
        system = replace(system, name=name, title=f"{system.title}, {option.title}", **option.changes)
        rest = rest.removeprefix(f"-{option.name}")
    return system


def _unknown_system(name: str) -> ConfigError:
    known = [*SYSTEMS, *(f"{s}-{o}" for s in SYSTEMS for o in OPTIONS if SYSTEMS[s].moves_kv)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return ConfigError(
        f"unknown system {name!r}{hint}; choose from {', '.join(SYSTEMS)}, with options behind it: "
        f"{', '.join(f'-{option}' for option in OPTIONS)}."
    )
