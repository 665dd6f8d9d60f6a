"""A judged run: everything that is reported, and its ``metrics.json`` (docs/contract.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from testbed.metrics.ledger import LedgerEntry
from testbed.metrics.metrics import Distribution, SystemMetrics
from testbed.metrics.verdict import Verdict

EXIT_VALID, EXIT_FAILED, EXIT_INVALID = 0, 1, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """Calibration of one link: rate on the wire, TCP payload expected and measured, both in bit/s.

    ``measured_bps`` is None where the kernel's settings were read back instead.
    """

    name: str
    rate_bps: int
    expected_bps: float
    measured_bps: float | None
    error: float
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperUnits:
    """How emulated figures become the paper's: seconds divided by ``time``, TPOT by ``length`` too, bytes times
    ``bytes``."""

    time: float
    length: int
    bytes: float

    def seconds(self, values: Distribution) -> dict[str, float]:
        """Durations that do not depend on how many paper tokens one emulated token stands for: TTFT."""
        return self._convert(values, lambda value: value)

    def seconds_per_token(self, values: Distribution) -> dict[str, float]:
        """TPOT: one emulated step stands for ``length`` of the paper's."""
        return self._convert(values, lambda value: value / self.length)

    def seconds_to_second_token(self, values: Distribution, step_s: float) -> dict[str, float]:
        """TTST: the load of HBM and the wait for a batch stay, the one decode step in it (of ``step_s`` seconds, TPOT)
        becomes one of the paper's."""
        surplus = 1 - 1 / self.length
        return self._convert(values, lambda value: value - surplus * min(step_s, value))

    def _convert(self, values: Distribution, convert: Callable[[float], float]) -> dict[str, float]:
        return {key: convert(getattr(values, key)) / self.time for key in ("mean", "p50", "p99")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run, judged. ``scale``: the scales by name, for the record."""

    scenario: str
    world: str
    seed: int
    stands_for: str
    scale: Mapping[str, float]
    units: PaperUnits
    systems: tuple[SystemMetrics, ...]
    titles: Mapping[str, str]
    links: tuple[LinkRow, ...]
    ledger: tuple[LedgerEntry, ...]
    verdicts: tuple[Verdict, ...]
    failures: tuple[str, ...]
    invalid_reasons: tuple[str, ...]

    @property
    def valid(self) -> bool:
        """Nothing failed and the numbers can be trusted."""
        return not self.failures and not self.invalid_reasons

    @property
    def exit_code(self) -> int:
        """0 valid, 1 failed, 3 invalid."""
        if self.failures:
            return EXIT_FAILED
        return EXIT_INVALID if self.invalid_reasons else EXIT_VALID

    def document(self) -> dict[str, Any]:
        """The content of ``metrics.json``."""
        return {
            "scenario": self.scenario,
            "world": self.world,
            "seed": self.seed,
            "stands_for": self.stands_for,
            "scale": dict(self.scale),
            "valid": self.valid,
            "failures": list(self.failures),
            "invalid_reasons": list(self.invalid_reasons),
            "systems": {m.system: self._system(m) for m in self.systems},
            "links": [asdict(link) for link in self.links],
            "ledger": [asdict(entry) for entry in self.ledger],
            "verdicts": [{**asdict(v), "measured": finite(v.measured)} for v in self.verdicts],
        }

    def _system(self, m: SystemMetrics) -> dict[str, Any]:
        document = asdict(m)
        del document["system"]
        if m.collectives is None:
            del document["collectives"]
        document["paper"] = {
            "jct_s": m.jct_s / self.units.time,
            "ttft_s": self.units.seconds(m.ttft_s),
            "ttst_s": self.units.seconds_to_second_token(m.ttst_s, m.tpot_s.mean),
            "tpot_s": self.units.seconds_per_token(m.tpot_s),
            "bytes_by_path": {side: round(size * self.units.bytes) for side, size in m.bytes_by_path.items()},
        }
        return document


def finite(value: float) -> float | None:
    """JSON has no NaN: a ratio to nothing is null."""
    return value if math.isfinite(value) else None
