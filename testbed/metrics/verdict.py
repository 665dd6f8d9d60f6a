"""Whether a run failed, whether its numbers can be trusted, and whether the scenario's expectations hold.

Failed: a token differs from the reference, or a round ended with an error. Invalid: the emulation was not what it
claims to be, for a link, a drop, the ledger or an overloaded host. An expectation that does not hold is a result, not
a fault: it changes neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from testbed.metrics.expression import UnknownMetricError, evaluate, systems_named
from testbed.metrics.ledger import LedgerEntry
from testbed.metrics.metrics import SystemMetrics
from testbed.metrics.views import ResultView, SystemView

_MOST_OVERRUN = 0.02
"""Share of a GPU's time by which the emulation of its arithmetic may exceed it."""
_NS_PER_MS = 1e6
_NAMED = 3
"""So many of a kind are named in a sentence; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run must keep to be called valid; see ``testbed.runtime.plan.TrustLimits``."""

    link_tolerance: float
    ledger_tolerance: float
    lag_p99_ms: float
    cpu_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An expectation of a scenario."""

    name: str
    metric: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of an expectation; ``measured`` is the left side of its comparison."""

    name: str
    expectation: str
    measured: float
    holds: bool
    text: str


def failure_reasons(systems: Sequence[SystemView], rounds_expected: int) -> list[str]:
    """Why the run failed, one sentence each; empty if it did not."""
    reasons = []
    for run in systems:
        wrong, errors = run.wrong_tokens, [r for r in run.outcomes if r.error]
        if wrong:
            reasons.append(f"{run.system}: {len(wrong)} rounds emitted wrong tokens; {_first(wrong)}.")
        if errors:
            named = [f"agent{r.agent} turn {r.turn + 1}: {r.error} ({r.error_detail})" for r in errors]
            reasons.append(f"{run.system}: {len(errors)} rounds ended with an error; {_first(named)}.")
        complete = sum(1 for r in run.outcomes if r.completed_ns and not r.error)
        if complete < rounds_expected and not errors:
            reasons.append(f"{run.system}: {complete} of {rounds_expected} rounds were completed.")
        unchecked = sum(len(r.tokens) for r in run.outcomes if not r.error) - run.tokens_verified
        if unchecked > 0 and not wrong:
            reasons.append(f"{run.system}: {unchecked} tokens were never compared with the reference.")
    return reasons


def invalid_reasons(result: ResultView, ledger: Sequence[LedgerEntry], limits: Limits) -> list[str]:
    """Why the numbers cannot be trusted, one full sentence each; empty for a valid run."""
    reasons = [f"Shaping differs from the specification: {fault.rstrip('.')}." for fault in result.shaping_faults]
    off = [f"{link.name} {link.error:+.1%}" for link in result.links if abs(link.error) > limits.link_tolerance]
    if off:
        reasons.append(f"Calibration: {_listed(off, 'links')} beyond the tolerance of {limits.link_tolerance:.1%}.")
    for run in result.systems:
        reasons += _system_reasons(run, [e for e in ledger if e.system == run.system], limits)
    return reasons


def _resent(run: SystemView) -> str:
    """What of a wrong ledger may be TCP's doing."""
    most = max(run.segments_resent, key=run.segments_resent.__getitem__, default="")
    if not most or not run.segments_resent[most]:
        return ""
    total = sum(run.segments_resent.values())
    return f"; TCP sent {total} segments twice, {run.segments_resent[most]} of them from {most}"


def _system_reasons(run: SystemView, ledger: Sequence[LedgerEntry], limits: Limits) -> list[str]:
    reasons = []
    if run.packets_dropped:
        named = [f"{name} {c.drops}" for name, c in run.counters.items() if c.drops] or ["at interfaces"]
        reasons.append(
            f"{run.system}: {run.packets_dropped} packets were dropped, {_listed(named, 'resources')}; RDMA drops none."
        )
    reasons += [f"{run.system}: {fault}." for name, report in run.reports.items() for fault in _faults(name, report)]
    wrong = sorted((e for e in ledger if abs(e.error) > limits.ledger_tolerance), key=lambda e: -abs(e.error))
    if wrong:
        named = [f"{e.resource} {e.error:+.1%}" for e in wrong]
        reasons.append(
            f"{run.system}: the traffic ledger is off by more than {limits.ledger_tolerance:.1%}, "
            f"{_listed(named, 'resources')}{_resent(run)}."
        )
    late = [(name, ms) for name, report in run.reports.items() if (ms := _lag_ms(report)) > limits.lag_p99_ms]
    if late:
        named = [f"{name} {ms:.0f} ms" for name, ms in sorted(late, key=lambda item: -item[1])]
        reasons.append(
            f"{run.system}: event loops were late (99th percentile above {limits.lag_p99_ms:g} ms), "
            f"{_listed(named, 'roles')}; the host was too busy."
        )
    if run.host_cpu_share > limits.cpu_share:
        reasons.append(
            f"{run.system}: {run.host_cpu_share:.0%} of the host's CPU time was in use (limit {limits.cpu_share:.0%}): "
            "the host was the bottleneck; raise scale.bandwidth or close other programs."
        )
    return reasons


def _faults(name: str, report: Mapping[str, object]) -> list[str]:
    """What a role went through that no shipped scenario injects, and that would otherwise pass in silence."""
    faults = []
    machine, data, compute = (_figures(report, key) for key in ("machine", "data", "compute"))
    if given_up := machine.get("blocks_given_up", 0):
        faults.append(f"{name} gave up storing {given_up:g} blocks")
    for key, what in (
        ("writes_corrupt", "writes landed with a wrong seal"),
        ("writes_refused", "writes were refused"),
        ("connections_lost", "connections were lost"),
    ):
        if count := data.get(key, 0):
            faults.append(f"{name}: {count:g} {what}")
    busy, overrun = compute.get("busy_ns", 0), compute.get("overrun_ns", 0)
    if overrun > _MOST_OVERRUN * busy:
        excess = f"{overrun / _NS_PER_MS:.0f} ms more than the GPU's own {busy / _NS_PER_MS:.0f} ms"
        faults.append(f"{name}: emulating the GPU took {excess}; lower gpu.speedup or raise scale.time")
    return faults


def _figures(report: Mapping[str, object], key: str) -> dict[str, float]:
    part = report.get(key)
    return {k: v for k, v in part.items() if isinstance(v, int | float)} if isinstance(part, Mapping) else {}


def _lag_ms(report: Mapping[str, object]) -> float:
    lag = report.get("lag_p99_ns", 0)
    return lag / _NS_PER_MS if isinstance(lag, int | float) else 0.0


def _first(items: Sequence[str]) -> str:
    return f"the first: {items[0].rstrip('.')}"


def _listed(items: Sequence[str], kind: str) -> str:
    named = ", ".join(items[:_NAMED])
    more = len(items) - _NAMED
    return f"{named} and {more} more {kind}" if more > 0 else named


# --- expectations ------------------------------------------------------------------------------------------------


def judge(claims: Iterable[Claim], metrics: Sequence[SystemMetrics]) -> list[Verdict]:
    """A verdict per claim; claims about systems that did not run are left out.

    Raises:
        ConfigError: a claim that names a metric no system has.
    """
    flat = flatten(metrics)
    ran = {identifier(m.system) for m in metrics}
    verdicts = []
    for claim in claims:
        try:
            outcome = evaluate(claim.metric, flat)
        except UnknownMetricError:
            if systems_named(claim.metric) <= ran:
                raise
            continue
        verdicts.append(
            Verdict(
                name=claim.name,
                expectation=claim.metric,
                measured=outcome.measured,
                holds=outcome.holds,
                text=claim.text,
            )
        )
    return verdicts


def flatten(metrics: Sequence[SystemMetrics]) -> dict[str, float]:
    """``{"dual_path_rr.ttft_s.mean": 1.2}``: every number of every system under the name that expectations use."""
    flat: dict[str, float] = {}
    for system in metrics:
        _flatten(identifier(system.system), system, flat)
    return flat


def flatten_document(document: Mapping[str, Any]) -> dict[str, float]:
    """The same of a ``metrics.json``, figures in the paper's units (``dualpath.paper.jct_s``) included."""
    flat: dict[str, float] = {}
    for system, values in document["systems"].items():
        _flatten(identifier(system), values, flat)
    return flat


def identifier(name: str) -> str:
    """A system's or a variant's name as expressions write it."""
    return name.replace("-", "_")


def _flatten(prefix: str, value: object, flat: dict[str, float]) -> None:
    if is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            _flatten(f"{prefix}.{f.name}", getattr(value, f.name), flat)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}", inner, flat)
    elif isinstance(value, int | float):
        flat[prefix] = float(value)
