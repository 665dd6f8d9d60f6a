"""What a run yields, before anything is judged or printed; the same for every world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from emulators.agent_driver import Outcome
from testbed.fabric.recording import Recording
from testbed.metrics.views import CounterView, LinkView


@dataclass(frozen=True, slots=True, kw_only=True)
class SnicSample:
    """Bytes of KV data (headers included) that each SNIC direction had carried at ``at_ns``; by resource name."""

    at_ns: int
    wire_bytes: Mapping[str, int]


@dataclass(slots=True, kw_only=True)
class SystemRun:
    """One system's run. Times are on the world's clock; counters are deltas over the run."""

    system: str
    started_ns: int
    ended_ns: int
    outcomes: list[Outcome]
    counters: Mapping[str, CounterView]
    samples: list[SnicSample] = field(default_factory=list)
    pcie_peaks_bps: Mapping[str, float] = field(default_factory=dict)
    """Rate on the wire in the busiest second of every PCIe link, by resource name."""
    reports: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Final report of every role (event-loop lag, CPU, memory, queues), by role name."""
    host_cpu_share: float = 0.0
    """Share of the host's CPU time in use during the run, by anybody (0 to 1); 0 where time is virtual."""
    packets_dropped: int = 0
    """Packets dropped anywhere in the cluster during the run, by queues and by interfaces."""
    segments_resent: Mapping[str, int] = field(default_factory=dict)
    """TCP segments sent again during the run, by host."""
    tokens_verified: int = 0
    wrong_tokens: list[str] = field(default_factory=list)
    """One sentence per round whose tokens differ from the reference."""


@dataclass(slots=True, kw_only=True)
class RunResult:
    """All systems of a scenario, run one after the other. ``links``: calibration, none where rates are given."""

    links: Sequence[LinkView]
    shaping_faults: list[str]
    """What the kernel says differs from the specification, one sentence each."""
    systems: list[SystemRun]
    recordings: list[Recording] = field(default_factory=list)
    """Packets of chosen links, one entry per system and link."""
