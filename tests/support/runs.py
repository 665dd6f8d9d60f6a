"""Runs made by hand, for tests of metrics, verdicts and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emulators.agent_driver import Outcome
from testbed.fabric.live.counters import ClassCount, LinkCounter
from testbed.metrics.metrics import LinkRates
from testbed.runtime.result import SnicSample

S = 1_000_000_000
RATES = LinkRates(snic_bps=8_000, cnic_bps=16_000, pcie_bps=32_000, dram_bps=64_000)


def outcome(agent: int = 0, turn: int = 0, *, start_s: float = 0.0, **more: object) -> Outcome:
    """A round that takes 10 s: scheduled at 1, prefill at 3, tokens at 5, 6 and 9, complete at 10."""
    at = int(start_s * S)
    values: dict[str, object] = {
        "prompt_tokens": 100, "generate_tokens": 3, "hit_tokens": 64, "read_side": "pe", "prefill_engine": "pe0gpu1",
        "decode_engine": "de0gpu2", "scheduled_ns": at + 1 * S, "prefill_started_ns": at + 3 * S,
        "first_token_ns": at + 5 * S, "second_token_ns": at + 6 * S, "last_token_ns": at + 9 * S,
        "completed_ns": at + 10 * S, "tokens": {0: 1, 1: 2, 2: 3},
    }  # fmt: skip
    return Outcome(agent=agent, turn=turn, submitted_ns=at, **{**values, **more})  # type: ignore[arg-type]


def counter(name: str, payload: int, drops: int = 0) -> LinkCounter:
    """A counter whose data class carried ``payload`` bytes of TCP payload in full segments."""
    packets = -(-payload // 1448)
    none = ClassCount()
    kv = ClassCount(bytes=payload + packets * 66, packets=packets)
    return LinkCounter(
        name=name, kv=kv, high=none, shared=none, ack=none, rest=none, drops=drops, overlimits=0, backlog_bytes=0
    )


def sample(at_s: float, **rx_bytes: int) -> SnicSample:
    """Bytes that the SNICs of the named nodes had taken in."""
    return SnicSample(at_ns=int(at_s * S), wire_bytes={f"{node}.snic.rx": size for node, size in rx_bytes.items()})


@dataclass(slots=True, kw_only=True)
class Run:
    """A ``SystemView``."""

    system: str = "basic"
    outcomes: list[Outcome] = field(default_factory=list)
    counters: Mapping[str, LinkCounter] = field(default_factory=dict)
    samples: list[SnicSample] = field(default_factory=list)
    pcie_peaks_bps: Mapping[str, float] = field(default_factory=dict)
    reports: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    host_cpu_share: float = 0.5
    packets_dropped: int = 0
    segments_resent: Mapping[str, int] = field(default_factory=dict)
    tokens_verified: int = 0
    wrong_tokens: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Link:
    """A ``LinkView``."""

    name: str
    error: float


@dataclass(slots=True, kw_only=True)
class Result:
    """A ``ResultView``."""

    links: list[Link] = field(default_factory=list)
    shaping_faults: list[str] = field(default_factory=list)
    systems: list[Run] = field(default_factory=list)
