"""The table at the end of a run: what every system reached, what DualPath gained, whether it can be trusted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from testbed.metrics.collectives import CollectiveMetrics, Latency
from testbed.metrics.ledger import LedgerEntry
from testbed.metrics.metrics import Distribution, SystemMetrics
from testbed.metrics.summary import Summary

_BASELINE = "basic"


def render(summary: Summary) -> RenderableType:
    """Everything that is shown at the end of a run."""
    parts: list[RenderableType] = [systems_table(summary)]
    if summary.verdicts:
        parts.append(verdict_table(summary))
    parts += [Text(line) for line in gain_lines(summary)]
    parts.append(Text(trust_line(summary)))
    parts += [Text(f"FAILED: {reason}") for reason in summary.failures]
    parts += [Text(f"INVALID: {reason}") for reason in summary.invalid_reasons]
    return Group(*parts)


def print_summary(console: Console, summary: Summary) -> None:
    """Print it."""
    console.print(render(summary), soft_wrap=False)


def systems_table(summary: Summary) -> Table:
    """One column per system; times in emulated seconds, JCT in the paper's as well."""
    table = Table(title=f"{summary.scenario} (emulated seconds; mean / p50 / p99)", title_justify="left")
    table.add_column("")
    for m in summary.systems:
        table.add_column(summary.titles.get(m.system, m.system), justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("JCT", [f"{m.jct_s:.2f}" for m in summary.systems]),
        ("JCT, paper's seconds", [f"{m.jct_s / summary.units.time:.1f}" for m in summary.systems]),
        ("TTFT", [_times(m.ttft_s) for m in summary.systems]),
        ("TTST", [_times(m.ttst_s) for m in summary.systems]),
        ("TPOT", [_times(m.tpot_s) for m in summary.systems]),
        ("TTFT spent on sched/read/prefill", [_shares(m) for m in summary.systems]),
        ("requests", [_requests(m) for m in summary.systems]),
        ("hit rate", [f"{m.hit_rate:.1%}" for m in summary.systems]),
        ("KV read by PE side, MB", [f"{m.bytes_by_path['pe'] / 1e6:.1f}" for m in summary.systems]),
        ("KV read by DE side, MB", [f"{m.bytes_by_path['de'] / 1e6:.1f}" for m in summary.systems]),
    ]
    if any(m.dram_hit_share for m in summary.systems):
        rows.append(("of the hits, from DRAM", [f"{m.dram_hit_share:.1%}" for m in summary.systems]))
    if any(m.first_turn_hit_tokens for m in summary.systems):
        rows.append(("hits of first turns, tokens", [f"{m.first_turn_hit_tokens:,}" for m in summary.systems]))
    for node in summary.systems[0].snic_utilisation if summary.systems else ():
        rows.append((f"{node} SNIC busy, run / plateau", [_use(m, node) for m in summary.systems]))
    rows += _collective_rows(summary)
    if any(m.pcie_utilisation for m in summary.systems):
        rows.append(("busiest PCIe link, run / max", [_pcie(m) for m in summary.systems]))
    if any(m.submission_busy for m in summary.systems):
        busy = [f"{max(m.submission_busy.values(), default=0.0):.0%}" for m in summary.systems]
        rows.append(("busiest submitting thread", busy))
    rows.append(("tokens verified", [f"{m.tokens_verified:,} of {m.tokens_emitted:,}" for m in summary.systems]))
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _collective_rows(summary: Summary) -> list[tuple[str, list[str]]]:
    """Latencies of collectives, bubbles and balance, if any system had collectives."""
    seen = [m.collectives for m in summary.systems]
    if not any(seen):
        return []

    def cells(show: Callable[[CollectiveMetrics], str]) -> list[str]:
        return [show(c) if c is not None else "" for c in seen]

    rows = []
    for kind, title in (("pe", "prefill"), ("de", "decode")):
        for name in ("dispatch", "combine"):
            latencies = cells(partial(_latency_cell, name=f"{name}_s", kind=kind))
            rows.append((f"{name} in {title}, ms", latencies))
    shares = cells(lambda c: f"{c.bubble_share['pe']:.0%} / {c.bubble_share['de']:.0%}")
    rows.append(("bubbles of PEs / DEs", shares))
    rows.append(("attention time, max/avg", cells(lambda c: f"{c.attention_balance:.2f}")))
    return rows


def _latency_cell(collectives: CollectiveMetrics, name: str, kind: str) -> str:
    latency: Latency = getattr(collectives, name)[kind]
    return " / ".join(f"{1000 * value:.2f}" for value in (latency.mean, latency.p50, latency.p99))


def verdict_table(summary: Summary) -> Table:
    """What the scenario expected, and what became of it."""
    table = Table(title="expectations", title_justify="left")
    for column in ("", "expectation", "measured", "holds"):
        table.add_column(column)
    for v in summary.verdicts:
        table.add_row(v.text or v.name, v.expectation, f"{v.measured:.3g}", "yes" if v.holds else "NO")
    return table


def gain_lines(summary: Summary) -> list[str]:
    """What each system gained over the baseline: Basic if it ran, else the first."""
    if len(summary.systems) < 2:
        return []
    base = next((m for m in summary.systems if m.system == _BASELINE), summary.systems[0])
    name = summary.titles.get(base.system, base.system)
    return [
        f"{summary.titles.get(m.system, m.system)}: {base.jct_s / m.jct_s:.2f}x the speed of {name} "
        f"(JCT {base.jct_s:.2f} s -> {m.jct_s:.2f} s)."
        for m in summary.systems
        if m is not base and m.jct_s > 0
    ]


def trust_line(summary: Summary) -> str:
    """One line on calibration, ledger and tokens."""
    worst = _worst(summary.ledger)
    verified, emitted = (sum(getattr(m, key) for m in summary.systems) for key in ("tokens_verified", "tokens_emitted"))
    state = "FAILED" if summary.failures else "valid" if summary.valid else "INVALID: do not use these numbers"
    ledger = f"largest ledger error {abs(worst.error):.2%} ({worst.system}, {worst.resource})" if worst else "no ledger"
    return f"Run {state}: {_links(summary)}; {ledger}; {verified:,} of {emitted:,} tokens equal the reference."


def _links(summary: Summary) -> str:
    if not summary.links:
        return "virtual time, links as specified"
    read_back = sum(link.measured_bps is None for link in summary.links)
    off = max(abs(link.error) for link in summary.links)
    return f"{len(summary.links) - read_back} links measured, {read_back} read back, largest error {off:.2%}"


def _worst(ledger: tuple[LedgerEntry, ...]) -> LedgerEntry | None:
    return max(ledger, key=lambda e: abs(e.error), default=None)


def _times(values: Distribution) -> str:
    return f"{values.mean:.3f} / {values.p50:.3f} / {values.p99:.3f}"


def _shares(m: SystemMetrics) -> str:
    return " / ".join(f"{m.ttft_shares[part]:.0%}" for part in ("sched", "read", "prefill"))


def _requests(m: SystemMetrics) -> str:
    return f"{m.requests}" + (f" (+{m.failed_requests} failed)" if m.failed_requests else "")


def _pcie(m: SystemMetrics) -> str:
    uses = [use for directions in m.pcie_utilisation.values() for use in directions.values()]
    return f"{max((u.run for u in uses), default=0.0):.0%} / {max((u.max for u in uses), default=0.0):.0%}"


def _use(m: SystemMetrics, node: str) -> str:
    use = m.snic_utilisation[node]
    return f"{use.run:.0%} / {use.plateau:.0%}"
