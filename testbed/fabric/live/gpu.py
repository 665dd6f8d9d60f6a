"""The time side of an emulated GPU: one compute at a time, real bytes first, then the rest of its duration.

A sleep stands for GPU compute only. What the device function takes of the duration is spent with real bytes; a device
function that takes longer than the compute it stands for is an overrun, counted: the emulator did not keep up.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from testbed.protocol import machine as m

Compute = m.ComputePrefill | m.ComputeDecode | m.Compute


class Device(Protocol):
    """The arithmetic of an emulated GPU over its HBM; results map a request to the token it emitted."""

    def prefill(self, action: m.ComputePrefill) -> dict[str, int]:
        """Run layers for a batch."""
        ...

    def decode(self, action: m.ComputeDecode) -> dict[str, int]:
        """Run one decode step."""
        ...

    def load_sequence(self, request_id: str, tokens: bytes, pages: tuple[int, ...]) -> None:
        """Remember the tokens of a sequence whose KV is in HBM."""
        ...

    def forget(self, request_id: str) -> None:
        """Forget a sequence (idempotent)."""
        ...


@dataclass(slots=True)
class GpuCounters:
    """Where GPU time went, and whether the emulator kept up with the GPU it stands for."""

    computes: int = 0
    busy_ns: int = 0  # durations asked for
    emulated_ns: int = 0  # spent in the device function
    overruns: int = 0  # device function slower than the duration it stands for
    overrun_ns: int = 0
    late_ns: int = 0  # sum of how late the alarm was; queued work starts at the ideal time, so it does not add up


class Gpu:
    """One GPU: one compute at a time, others wait in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Device, Compute]] = deque()
        self._current: m.ComputeFinished | None = None
        self.end_ns: int | None = None
        self.counters = GpuCounters()

    def submit(self, device: Device, action: Compute) -> None:
        """Run now, or after those submitted before. A plain ``Compute`` only takes its time."""
        if self._current is None:
            self._begin(device, action, time.monotonic_ns())
        else:
            self._waiting.append((device, action))

    def _begin(self, device: Device, action: Compute, start_ns: int) -> None:
        called_ns = time.monotonic_ns()
        tokens: dict[str, int] = {}
        if isinstance(action, m.ComputePrefill):
            tokens = device.prefill(action)
        elif isinstance(action, m.ComputeDecode):
            tokens = device.decode(action)
        now_ns = time.monotonic_ns()
        counters, end_ns = self.counters, start_ns + action.duration_ns
        counters.computes += 1
        counters.busy_ns += action.duration_ns
        counters.emulated_ns += now_ns - called_ns
        if now_ns > end_ns:
            counters.overruns += 1
            counters.overrun_ns += now_ns - end_ns
        self._current, self.end_ns = m.ComputeFinished(action.compute_id, tokens), end_ns

    def finish(self, now_ns: int) -> m.ComputeFinished | None:
        """The current compute, if its time has passed; the next one begins where it ended."""
        if self._current is None or self.end_ns is None or now_ns < self.end_ns:
            return None
        finished, ended_ns = self._current, self.end_ns
        self.counters.late_ns += now_ns - ended_ns
        self._current, self.end_ns = None, None
        if self._waiting:
            self._begin(*self._waiting.popleft(), ended_ns)
        return finished
