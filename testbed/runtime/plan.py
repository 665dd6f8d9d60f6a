"""Everything a run needs, resolved: no file is read and no default is chosen after this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from testbed.errors import ConfigError
from testbed.fabric.sim.params import SimParams
from testbed.fabric.spec import ClusterSpec
from testbed.models.compute import ComputeModel
from testbed.models.scale import FittedScale
from testbed.protocol.params import ProtocolParams, SystemConfig
from testbed.protocol.plan import ClusterPlan
from testbed.workload.trajectory import AgentScript

World = Literal["live", "sim"]
"""Where a plan can run: real bytes in the kernel, or sizes in virtual time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustLimits:
    """What a run must keep to be called valid."""

    link_tolerance: float = 0.02
    """Largest error of a calibrated link against its theoretical goodput."""
    ledger_tolerance: float = 0.02
    """Largest error of the bytes counted by the kernel against the step counts of the paper."""
    lag_p99_ms: float = 50.0
    """Largest 99th percentile of any role's event-loop lag."""
    cpu_share: float = 0.95
    """Largest share of the host's CPU time used during a run; beyond, the host was the bottleneck."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a limit that nothing can keep."""
        for key in ("link_tolerance", "ledger_tolerance", "lag_p99_ms", "cpu_share"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"trust.{key} is {getattr(self, key):g}, but it must be positive.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One scenario, ready to run. ``starts_ns`` are agents' arrival times in emulated ns, one per script.

    ``tool_delay_ns``: between the end of a round and the agent's next one, emulated."""

    scenario: str
    seed: int
    cluster: ClusterSpec
    roles: ClusterPlan
    params: ProtocolParams
    systems: tuple[SystemConfig, ...]
    cost: ComputeModel
    scale: FittedScale
    scripts: tuple[AgentScript, ...]
    starts_ns: tuple[int, ...]
    tool_delay_ns: int
    vocab_size: int
    limits: TrustLimits
    sim: SimParams
    run_dir: Path
    capture: tuple[str, ...] = ()
    """Live only: links whose packets are recorded (``testbed.fabric.live.recorder.capture_points``)."""
