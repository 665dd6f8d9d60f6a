"""The metrics of the evaluation (paper 7.2-7.5) per system, in emulated seconds and in the paper's.

=========  ==========================================================================================
JCT        from the first submission to the completion of the last round (offline: all agents start together)
TTFT       first token minus submission
TTST       second token minus first: the gap in which the prompt's KV goes to the DE's HBM
TPOT       (last token minus second) / (tokens - 2), rounds of at least three tokens: then
           TTFT + TTST + (tokens - 2) * TPOT is the round, as the paper's online JCT adds up (7.3)
=========  ==========================================================================================

SNIC utilisation is bytes on the wire into a node (headers included, as the shaper counts them) over what the link can
carry. The plateau lies between the first and the last decile of all bytes into all nodes: ramp-up and tail are outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from testbed.ids import engine_of
from testbed.metrics.collectives import CollectiveMetrics, Groups, collective_metrics
from testbed.metrics.views import RoundView, SampleView, SystemView
from testbed.metrics.workingset import WorkingSet, working_set
from testbed.protocol.params import system_named
from testbed.units import NS_PER_S

PLATEAU_DECILES = (0.1, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Mean, median and 99th percentile (linear between ranks), in seconds; all 0 without values."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SnicUse:
    """Utilisation of the direction into a node: over the whole run, and in the plateau."""

    run: float
    plateau: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieUse:
    """Utilisation of one direction of a GPU's PCIe link: over the whole run, and in its busiest second."""

    run: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Rates of the links by kind, bit/s on the wire."""

    snic_bps: int
    cnic_bps: int
    pcie_bps: int
    dram_bps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemMetrics:
    """One system. ``bytes_by_path``: KV read from storage through prefill ("pe") and decode ("de") nodes.

    ``dram_hit_share``: of the bytes hit, those that the DRAM of the node that was to read them had kept.

    ``storage_bytes``: what nodes have "read" from storage and "written" to it, counted at their SNICs: payload, headers
    and seals of writes included.

    ``requests_by_path``: whole requests read there, and requests "split" between both.

    ``first_turn_hit_tokens``: hits of first rounds. Where agents start without a past, others have stored these blocks.
    ``ttft_shares``: parts of the mean TTFT spent until scheduled ("sched"), until prefill starts ("read": buffers,
    storage, queueing at the PE), and until the first token ("prefill").
    ``snic_plateau_min``: smallest plateau of the nodes that should read: all of a system with two paths, also if one of
    them stays idle, and the prefill nodes of the others. ``snic_plateau_mean``: the mean of theirs.
    ``read_balance``: bytes into the busiest reading SNIC over the mean of all that could read (Figure 13; 1 is best).
    ``uses``: how busy all resources of a kind were together over the whole run, by the kinds of the bottleneck analysis
    (4.2): "snic" (into nodes), and of prefill and decode nodes "cnic_read", "cnic_write", "dram" ("pe_cnic_read", ...).
    ``busiest``: over the whole run, how busy the busiest of each kind was: "snic" and "cnic" (of nodes, the busier
    direction), "pcie", "dram", "gpu" (computing). The one near 1 is the one that binds.
    ``kv_bytes_per_s``: KV that left CNICs for anywhere (read side), all of them together, over the run.
    ``kv_fairness``: Jain's index over rounds of the rate at which each got its prompt's KV from storage into the HBM of
    its decode engine (prompt tokens, over the time from its assignment to its second token). 1: all the same rate.
    ``collectives``: None where there are none.
    ``pcie_utilisation``: of every engine's link, "rx" into HBM and "tx" out of it; empty where it is not limited.
    ``submission_busy``: share of the run that an engine's busier submitting thread was at work; engines that paid for
    submission only.
    """

    system: str
    jct_s: float
    ttft_s: Distribution
    ttst_s: Distribution
    tpot_s: Distribution
    requests: int
    failed_requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    dram_hit_share: float
    storage_bytes: Mapping[str, int]
    first_turn_hit_tokens: int
    tokens_emitted: int
    tokens_verified: int
    bytes_by_path: Mapping[str, int]
    requests_by_path: Mapping[str, int]
    snic_utilisation: Mapping[str, SnicUse]
    snic_plateau_min: float
    snic_plateau_mean: float
    read_balance: float
    busiest: Mapping[str, float]
    pcie_utilisation: Mapping[str, Mapping[str, PcieUse]]
    submission_busy: Mapping[str, float]
    uses: Mapping[str, float]
    working_set: WorkingSet
    ttft_shares: Mapping[str, float]
    kv_bytes_per_s: float
    kv_fairness: float
    collectives: CollectiveMetrics | None = None


def distribution(values: Sequence[float]) -> Distribution:
    """Summary of a set of values."""
    if not values:
        return Distribution(mean=0.0, p50=0.0, p99=0.0)
    ordered = sorted(values)
    return Distribution(
        mean=math.fsum(ordered) / len(ordered), p50=_quantile(ordered, 0.5), p99=_quantile(ordered, 0.99)
    )


def _quantile(ordered: Sequence[float], q: float) -> float:
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def system_metrics(
    run: SystemView, *, kv_bytes_per_token: int, nodes: Sequence[str], rates: LinkRates, groups: Groups = ()
) -> SystemMetrics:
    """All metrics of one system. ``nodes``: every node of the cluster; ``kv_bytes_per_token``: emulated, all layers;
    ``groups``: engines that may have had collectives with each other.
    """
    done = [r for r in run.outcomes if r.completed_ns and not r.error]
    begin_ns = min((r.submitted_ns for r in run.outcomes), default=0)
    end_ns = max((r.completed_ns for r in run.outcomes), default=begin_ns)
    read = {side: [r for r in done if r.read_side == side and r.hit_tokens] for side in ("pe", "de", "split")}
    in_dram, in_de_dram = (sum(r.dram_hit_tokens for r in done), sum(r.de_dram_hit_tokens for r in done))
    at_de = sum(r.de_hit_tokens for r in done)
    at_pe = sum(r.hit_tokens for rounds in read.values() for r in rounds) - at_de
    by_de, by_pe = at_de - in_de_dram, at_pe - (in_dram - in_de_dram)
    prompt, hits = sum(r.prompt_tokens for r in done), sum(r.hit_tokens for r in done)
    use = snic_use(run.samples, nodes, rates.snic_bps, begin_ns, end_ns)
    readers = [use[node].plateau for node in _readers(run.system, nodes, both=at_de > 0)]
    into = [u.run for u in use.values()]
    collectives = collective_metrics(run.reports, groups, end_ns - begin_ns)
    return SystemMetrics(
        system=run.system,
        jct_s=(end_ns - begin_ns) / NS_PER_S,
        ttft_s=distribution(_gaps(done, lambda r: (r.submitted_ns, r.first_token_ns))),
        ttst_s=distribution(_gaps(done, lambda r: (r.first_token_ns, r.second_token_ns))),
        tpot_s=distribution(
            [
                (r.last_token_ns - r.second_token_ns) / (r.generate_tokens - 2) / NS_PER_S
                for r in done
                if r.generate_tokens > 2
            ]
        ),
        requests=len(done),
        failed_requests=len(run.outcomes) - len(done),
        prompt_tokens=prompt,
        hit_tokens=hits,
        hit_rate=hits / prompt if prompt else 0.0,
        dram_hit_share=in_dram / hits if hits else 0.0,
        storage_bytes={"read": _snic_bytes(run, nodes, "rx"), "written": _snic_bytes(run, nodes, "tx")},
        first_turn_hit_tokens=sum(r.hit_tokens for r in done if r.turn == 0),
        tokens_emitted=sum(len(r.tokens) for r in run.outcomes),
        tokens_verified=run.tokens_verified,
        bytes_by_path={"pe": by_pe * kv_bytes_per_token, "de": by_de * kv_bytes_per_token},
        requests_by_path={side: len(rounds) for side, rounds in read.items()},
        snic_utilisation=use,
        snic_plateau_min=min(readers, default=0.0),
        snic_plateau_mean=sum(readers) / len(readers) if readers else 0.0,
        read_balance=max(into) / (sum(into) / len(into)) if any(into) else 0.0,
        busiest=_busiest(run, nodes, rates, end_ns - begin_ns),
        pcie_utilisation=_pcie_use(run, rates.pcie_bps, end_ns - begin_ns),
        submission_busy=_submission_busy(run, end_ns - begin_ns),
        uses=_uses(run, nodes, rates, end_ns - begin_ns),
        working_set=working_set(run.outcomes, kv_bytes_per_token),
        ttft_shares=_ttft_shares(done),
        kv_bytes_per_s=_kv_bytes(run, collectives) * NS_PER_S / (end_ns - begin_ns) if end_ns > begin_ns else 0.0,
        kv_fairness=_fairness([r.prompt_tokens / ns for r in done if (ns := r.second_token_ns - r.scheduled_ns) > 0]),
        collectives=collectives,
    )


def _snic_bytes(run: SystemView, nodes: Sequence[str], direction: str) -> int:
    counted = (run.counters.get(f"{node}.snic.{direction}") for node in nodes)
    return sum(c.data.payload_bytes for c in counted if c is not None)


def _kv_bytes(run: SystemView, collectives: CollectiveMetrics | None) -> int:
    """Payload that left CNICs, model traffic aside: what the high lane carried, or, where there are no lanes, what
    engines say that they exchanged.
    """
    cnics = [c for name, c in run.counters.items() if ".cnic" in name and name.endswith(".read")]
    exchanged = sum(collectives.exchanged_bytes.values()) if collectives is not None else 0
    model_traffic = max(exchanged, sum(c.high.payload_bytes for c in cnics))
    return sum(c.data.payload_bytes for c in cnics) - model_traffic


def _fairness(rates: Sequence[float]) -> float:
    """Jain's index: the square of the mean over the mean of squares; 1 without rates."""
    squares = len(rates) * math.fsum(rate * rate for rate in rates)
    return math.fsum(rates) ** 2 / squares if squares else 1.0


def _busiest(run: SystemView, nodes: Sequence[str], rates: LinkRates, duration_ns: int) -> dict[str, float]:
    """Of each kind, the largest share of the run's time that one of its members was at work."""
    busy_ns = dict.fromkeys(("snic", "cnic", "pcie", "dram", "gpu"), 0.0)
    by_kind = {"snic": rates.snic_bps, "cnic": rates.cnic_bps, "pcie": rates.pcie_bps, "dram": rates.dram_bps}
    for name, counter in run.counters.items():
        host, kind, *_ = name.split(".")
        kind = kind.rstrip("0123456789")
        if host.split("gpu")[0] in nodes and kind in by_kind:
            busy_ns[kind] = max(busy_ns[kind], counter.data.bytes * 8 * NS_PER_S / by_kind[kind])
    for report in run.reports.values():
        compute = report.get("compute")
        if isinstance(compute, Mapping):
            busy_ns["gpu"] = max(busy_ns["gpu"], compute.get("busy_ns", 0))
    return {kind: busy / duration_ns if duration_ns else 0.0 for kind, busy in busy_ns.items()}


def _pcie_use(run: SystemView, rate_bps: int, duration_ns: int) -> dict[str, dict[str, PcieUse]]:
    use: dict[str, dict[str, PcieUse]] = {}
    if not rate_bps or not duration_ns:
        return use
    for name, counter in run.counters.items():
        engine, kind, *direction = name.split(".")
        if kind == "pcie":
            mean = counter.data.bytes * 8 * NS_PER_S / (rate_bps * duration_ns)
            most = run.pcie_peaks_bps.get(name, 0.0) / rate_bps
            use.setdefault(engine, {})[direction[0]] = PcieUse(run=mean, max=max(mean, most))
    return use


def _submission_busy(run: SystemView, duration_ns: int) -> dict[str, float]:
    busy: dict[str, float] = {}
    for report in run.reports.values():
        threads = report.get("submission")
        for via, counters in threads.items() if isinstance(threads, Mapping) and duration_ns else ():
            engine = engine_of(via)
            busy[engine] = max(busy.get(engine, 0.0), counters["busy_ns"] / duration_ns)
    return dict(sorted(busy.items()))


def _uses(run: SystemView, nodes: Sequence[str], rates: LinkRates, duration_ns: int) -> dict[str, float]:
    """Of each kind of the bottleneck analysis, what all of its members carried over what they could have."""
    carried: dict[str, int] = {}
    could: dict[str, float] = {}
    for name, counter in run.counters.items():
        host, kind, *side = name.split(".")
        kind = kind.rstrip("0123456789")
        if host not in nodes or kind not in ("snic", "cnic", "dram") or side == ["tx"]:
            continue
        key = "snic" if kind == "snic" else "_".join((host.rstrip("0123456789"), kind, *side))
        rate_bps = {"snic": rates.snic_bps, "cnic": rates.cnic_bps, "dram": rates.dram_bps}[kind]
        carried[key] = carried.get(key, 0) + counter.data.bytes
        could[key] = could.get(key, 0.0) + rate_bps * duration_ns / (8 * NS_PER_S)
    return {key: carried[key] / could[key] if could[key] else 0.0 for key in carried}


def _readers(system: str, nodes: Sequence[str], *, both: bool) -> list[str]:
    """Nodes through whose SNICs the system reads: a side that should and never does must not be left out."""
    both = both or system_named(system).reads_on_both_sides
    return [node for node in nodes if both or node.startswith("pe")]


def _gaps(rounds: Sequence[RoundView], ends: Callable[[RoundView], tuple[int, int]]) -> list[float]:
    """Differences in seconds, of the rounds that got to the second time (0: never); a world's clock may start at 0."""
    return [(b - a) / NS_PER_S for a, b in map(ends, rounds) if b]


def _ttft_shares(rounds: Sequence[RoundView]) -> dict[str, float]:
    complete = [r for r in rounds if r.scheduled_ns and r.prefill_started_ns and r.first_token_ns]
    total = sum(r.first_token_ns - r.submitted_ns for r in complete)
    if not total:
        return {"sched": 0.0, "read": 0.0, "prefill": 0.0}
    return {
        "sched": sum(r.scheduled_ns - r.submitted_ns for r in complete) / total,
        "read": sum(r.prefill_started_ns - r.scheduled_ns for r in complete) / total,
        "prefill": sum(r.first_token_ns - r.prefill_started_ns for r in complete) / total,
    }


def snic_use(
    samples: Sequence[SampleView], nodes: Sequence[str], rate_bps: int, begin_ns: int, end_ns: int
) -> dict[str, SnicUse]:
    """Utilisation into each node from cumulative samples; linear between them."""
    names = {node: f"{node}.snic.rx" for node in nodes}
    series = {node: [(s.at_ns, s.wire_bytes.get(name, 0)) for s in samples] for node, name in names.items()}
    total = [(s.at_ns, sum(s.wire_bytes.get(name, 0) for name in names.values())) for s in samples]
    if len(samples) < 2 or not total[-1][1]:
        return {node: SnicUse(run=0.0, plateau=0.0) for node in nodes}
    first_ns, last_ns = (_time_of(total, q * total[-1][1]) for q in PLATEAU_DECILES)
    return {
        node: SnicUse(run=_share(of, begin_ns, end_ns, rate_bps), plateau=_share(of, first_ns, last_ns, rate_bps))
        for node, of in series.items()
    }


def _share(series: Sequence[tuple[int, int]], begin_ns: float, end_ns: float, rate_bps: int) -> float:
    if end_ns <= begin_ns:
        return 0.0
    carried = _value_at(series, end_ns) - _value_at(series, begin_ns)
    return carried * 8 * NS_PER_S / (rate_bps * (end_ns - begin_ns))


def _value_at(series: Sequence[tuple[int, int]], at_ns: float) -> float:
    """Bytes carried at a time; before the first sample and after the last: as there."""
    before = series[0]
    for after in series:
        if after[0] >= at_ns:
            span = after[0] - before[0]
            return after[1] if span == 0 else before[1] + (after[1] - before[1]) * (at_ns - before[0]) / span
        before = after
    return series[-1][1]


def _time_of(series: Sequence[tuple[int, int]], value: float) -> float:
    """When so many bytes had been carried."""
    before = series[0]
    for after in series:
        if after[1] >= value:
            rise = after[1] - before[1]
            return after[0] if rise <= 0 else before[0] + (after[0] - before[0]) * (value - before[1]) / rise
        before = after
    return series[-1][0]
