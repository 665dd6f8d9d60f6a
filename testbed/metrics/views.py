"""What metrics need to see of a run, as structural types: any world's results fit, no world is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class RoundView(Protocol):
    """One round of an agent (``emulators.agent_driver.Outcome``). Times in ns; 0 where it never happened."""

    agent: int
    turn: int
    prompt_tokens: int
    generate_tokens: int
    submitted_ns: int
    scheduled_ns: int
    prefill_started_ns: int
    first_token_ns: int
    second_token_ns: int
    last_token_ns: int
    completed_ns: int
    read_side: str
    hit_tokens: int
    de_hit_tokens: int
    dram_hit_tokens: int
    de_dram_hit_tokens: int
    prefill_engine: str
    decode_engine: str
    chunk_blocks: dict[int, int]
    tokens: dict[int, int]
    error: str
    error_detail: str


class ClassView(Protocol):
    """Bytes on the wire of one traffic class, and how many of them are TCP payload."""

    @property
    def bytes(self) -> int:
        """With all headers."""
        ...

    @property
    def payload_bytes(self) -> int:
        """Without Ethernet, IP and TCP headers."""
        ...


class CounterView(Protocol):
    """What crossed one shaped resource during a run."""

    @property
    def data(self) -> ClassView:
        """Everything but acknowledgements."""
        ...

    @property
    def high(self) -> ClassView:
        """The high lane's part of it: model traffic. None where there are no lanes, or where they are not counted."""
        ...

    @property
    def drops(self) -> int:
        """Packets dropped."""
        ...


class SampleView(Protocol):
    """What every SNIC direction had carried at a time, headers included, by resource name."""

    @property
    def at_ns(self) -> int:
        """When."""
        ...

    @property
    def wire_bytes(self) -> Mapping[str, int]:
        """How much."""
        ...


class LinkView(Protocol):
    """Calibration of one link."""

    @property
    def name(self) -> str:
        """Resource and direction."""
        ...

    @property
    def error(self) -> float:
        """Relative error against its theoretical goodput."""
        ...


class SystemView(Protocol):
    """One system's run (``testbed.runtime.result.SystemRun``)."""

    @property
    def system(self) -> str:
        """Name of the system."""
        ...

    @property
    def outcomes(self) -> Sequence[RoundView]:
        """All rounds."""
        ...

    @property
    def counters(self) -> Mapping[str, CounterView]:
        """Kernel counters, by resource name."""
        ...

    @property
    def samples(self) -> Sequence[SampleView]:
        """SNIC counters during the run."""
        ...

    @property
    def pcie_peaks_bps(self) -> Mapping[str, float]:
        """Rate on the wire in the busiest second of every PCIe link, by resource name."""
        ...

    @property
    def reports(self) -> Mapping[str, Mapping[str, object]]:
        """Final report of every role."""
        ...

    @property
    def host_cpu_share(self) -> float:
        """Share of the host's CPU time in use during the run."""
        ...

    @property
    def packets_dropped(self) -> int:
        """Packets dropped anywhere in the cluster during the run."""
        ...

    @property
    def segments_resent(self) -> Mapping[str, int]:
        """TCP segments sent again during the run, by host."""
        ...

    @property
    def tokens_verified(self) -> int:
        """Tokens that equal the reference's."""
        ...

    @property
    def wrong_tokens(self) -> Sequence[str]:
        """One sentence per round whose tokens differ."""
        ...


class ResultView(Protocol):
    """All systems of a run (``testbed.runtime.result.RunResult``)."""

    @property
    def links(self) -> Sequence[LinkView]:
        """Calibration."""
        ...

    @property
    def shaping_faults(self) -> Sequence[str]:
        """Where the kernel's settings differ from the specification."""
        ...

    @property
    def systems(self) -> Sequence[SystemView]:
        """In the order in which they ran."""
        ...
