"""``testbed lanes``: what a discipline, or tables in OpenSM's words, become on each world, and what they promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from rich.console import Console
from rich.table import Table

from scenarios.loader import read_scenario
from scenarios.resolve import arbiter_of, cluster_of, model_of, scale_of
from testbed.analysis.lanes import LaneOutlook, outlook, shares_of_vls
from testbed.errors import ConfigError
from testbed.fabric.arbiter import DEFAULT_PACKET_BYTES, KV_VL, MODEL_VLS
from testbed.fabric.live.lanes import PACKET_BYTES, QUANTUM_BYTES, QUEUE_PACKETS, burst_bytes
from testbed.fabric.spec import ClusterSpec, LaneDiscipline
from testbed.models.hardware import PAPER_HARDWARE
from testbed.units import GBIT, MBIT, NS_PER_S
from topologies.tomlinput import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesRequest:
    """The arguments of ``testbed lanes``. ``discipline`` empty: all; ``rate_gbps`` 0: the paper's CNIC."""

    discipline: str = ""
    opensm: str = ""
    scenario: str = "quickstart"
    rate_gbps: float = 0.0
    overrides: Sequence[str] = ()


def lanes(request: LanesRequest) -> int:
    """Print the outlook.

    Raises:
        ConfigError: an unknown discipline, tables that do not parse, shares or quanta that cannot be.
    """
    chosen = _chosen(request)
    if not 0 <= request.rate_gbps < float("inf"):
        raise ConfigError(f"--rate-gbps is {request.rate_gbps:g}, but a link has a positive rate.")
    paper_bps = round(request.rate_gbps * GBIT) or PAPER_HARDWARE.cnic_rate_bps
    scenario = read_scenario(request.scenario, request.overrides)
    spec = cluster_of(scenario, scale_of(scenario, model_of(scenario)))
    if request.opensm:
        spec = replace(spec, arbiter=arbiter_of(request.opensm))
    out = Console(highlight=False)
    table = Table(title="Model traffic / KV on one CNIC, worst case", title_justify="left")
    for column in ("lanes", "both want more", "the other idles", f"longest wait at {_rate(paper_bps)}"):
        table.add_column(column)
    table.add_column(f"... emulated, {_rate(spec.cnic_rate_bps)}")
    details: list[str] = []
    for discipline in chosen:
        of_one = replace(spec, lanes=discipline)
        found = outlook(of_one)
        live = _live_outlook(of_one)
        table.add_row(
            discipline.value,
            _shares(found),
            " / ".join(map(_percent, found.alone)),
            _waits(found, paper_bps),
            _waits(live, spec.cnic_rate_bps) if live else "-",
        )
        details += _details(of_one, found)
    out.print(table)
    out.print(
        f"A wait is of the packet that is first of its lane, with the packet itself: {DEFAULT_PACKET_BYTES} bytes "
        f"(emulated: super-packets of {PACKET_BYTES}).",
        soft_wrap=True,
    )
    for line in details:
        out.print(line, soft_wrap=True, markup=False)
    return 0


def _chosen(request: LanesRequest) -> tuple[LaneDiscipline, ...]:
    names = [discipline.value for discipline in LaneDiscipline]
    if request.discipline and request.discipline not in names:
        raise ConfigError(
            f"unknown lanes {request.discipline!r}{nearest(request.discipline, names)}; choose from {', '.join(names)}."
        )
    if request.opensm and request.discipline not in ("", LaneDiscipline.INFINIBAND.value):
        raise ConfigError(f"--opensm holds the tables of infiniband, not of {request.discipline}; give one of the two.")
    if request.opensm:
        return (LaneDiscipline.INFINIBAND,)
    return (LaneDiscipline(request.discipline),) if request.discipline else tuple(LaneDiscipline)


def _live_outlook(spec: ClusterSpec) -> LaneOutlook | None:
    if spec.lanes is LaneDiscipline.INFINIBAND:
        return None
    return outlook(spec, packet_bytes=PACKET_BYTES, bucket_bytes=burst_bytes(spec.cnic_rate_bps))


def _details(spec: ClusterSpec, found: LaneOutlook) -> list[str]:
    lines = [
        f"{spec.lanes.value}:",
        f"  live: {_live_parameters(spec)}",
        f"  sim: {_sim_parameters(spec)}",
    ]
    if spec.lanes is LaneDiscipline.INFINIBAND:
        vls = sorted({vl for vl, weight in spec.arbiter.high if weight} - {KV_VL})
        one, whole = shares_of_vls(spec.arbiter, vls or MODEL_VLS)
        names = ", ".join(f"VL{vl}" for vl in vls or MODEL_VLS)
        lines.append(
            f"  KV beside {names}: {_percent(one)} (one low packet per expiry of the limit), "
            f"{_percent(whole)} if a whole low round went"
        )
    lines += [f"  warning: {warning}" for warning in found.warnings]
    lines.append(f"  not modelled: {'; '.join(found.not_modelled)}")
    return lines


def _live_parameters(spec: ClusterSpec) -> str:
    rate = _rate(spec.cnic_rate_bps)
    bounded = f"fifos of at most {QUEUE_PACKETS} packets"
    turns = f"between KV's source memories drr, quantum {QUANTUM_BYTES}; {bounded}"
    if spec.lanes is LaneDiscipline.HTB:
        high = round(spec.cnic_rate_bps * spec.high_share)
        return (
            f"htb: high rate {_rate(high)} ceil {rate} prio 0; KV rate {_rate(spec.cnic_rate_bps - high)} ceil {rate} "
            f"prio 1, below it one class per source memory; {bounded}"
        )
    if spec.lanes is LaneDiscipline.PRIO:
        return f"htb {rate}, in it prio bands 2 (0 high, 1 KV); {turns}"
    if spec.lanes is LaneDiscipline.ETS:
        return f"htb {rate}, in it ets bands 2 quanta {spec.ets_quanta[0]} {spec.ets_quanta[1]}; {turns}"
    if spec.lanes is LaneDiscipline.NONE:
        return f"htb {rate}, in it one fifo of at most {QUEUE_PACKETS} packets"
    return "none: no queue of a kernel is an InfiniBand arbiter (ets with quanta 983040 4096 is nearest)"


def _sim_parameters(spec: ClusterSpec) -> str:
    if spec.lanes is LaneDiscipline.PRIO:
        return "strict: KV shares what the high lane leaves"
    if spec.lanes is LaneDiscipline.NONE:
        return "one queue, shared in proportion to what each flow has in it"
    if spec.lanes is LaneDiscipline.HTB:
        high = Fraction(spec.high_share).limit_denominator(1_000_000)
        return f"weighted {float(high) * 100:g} : {float(1 - high) * 100:g}, an idle lane's part is borrowed"
    if spec.lanes is LaneDiscipline.ETS:
        ratio = Fraction(*spec.ets_quanta)
        return f"weighted {ratio.numerator} : {ratio.denominator}, an idle lane's part is borrowed"
    high_weight, kv_weight = spec.arbiter.lane_weights(MODEL_VLS, KV_VL)
    return f"weighted {high_weight} : {kv_weight} by the tables (model traffic on VL{MODEL_VLS[0]}, KV on VL{KV_VL})"


def _shares(found: LaneOutlook) -> str:
    return "as offered" if found.shares is None else " / ".join(map(_percent, found.shares))


def _percent(share: Fraction) -> str:
    return f"{float(share) * 100:.3g} %" if share < Fraction(9, 10) or share == 1 else f"{float(share) * 100:.2f} %"


def _waits(found: LaneOutlook, rate_bps: int) -> str:
    unbounded = "the whole queue" if found.lanes is LaneDiscipline.NONE else "for ever"
    return " / ".join(unbounded if ns is None else _duration(ns) for ns in found.waits_ns(rate_bps))


def _duration(ns: int) -> str:
    for unit_ns, unit in ((NS_PER_S, "s"), (1_000_000, "ms"), (1_000, "us")):
        if ns >= unit_ns:
            return f"{ns / unit_ns:.3g} {unit}"
    return f"{ns} ns"


def _rate(rate_bps: int) -> str:
    return f"{rate_bps / GBIT:g} Gbit/s" if rate_bps >= GBIT else f"{rate_bps / MBIT:.4g} Mbit/s"
