"""What collectives did in a run, from the engines' reports (``emulators.collectives``), and the bytes they should have
taken: the high lane's part of the traffic ledger.

A latency is that of the slowest shard of a collective at an engine: the network's time, without the wait for peers that
are not ready. Prefill and decode engines are told apart ("pe", "de"). All times are emulated: one exchange of a decode
step stands for ``length`` of the paper's per layer, and every exchange for those of ``collectives.layers`` layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.ids import cnic_dram_endpoint
from testbed.metrics.views import RoundView
from testbed.protocol.collectives import Collectives
from testbed.protocol.shards import shard_wire_bytes
from testbed.units import NS_PER_S

_PREFIX = "collective."
Reports = Mapping[str, Mapping[str, object]]
Groups = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Latencies in seconds, and how many there were; all 0 without any."""

    mean: float
    p50: float
    p99: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Latencies over what the bytes take into an idle CNIC: free of the sizes of batches, which differ between systems.
    1: nobody is in the way (headers of TCP add 5 %). ``mean`` weighs each collective with its bytes, so 1 over it is
    the high lane's part of the link while the lane has something to send. All 0 without any.
    """

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveMetrics:
    """Collectives of one system.

    ``stretch``: of dispatch and combine together.
    ``bubble_share``: of the engines' time in the run, what they stood at barriers with a batch in hand: for longer
    attention of others, loads of others, and the network. ``attention_balance``: largest attention time of a PE group
    in a forward over the mean of its engines (Figure 14; 1 is best), mean over forwards with work;
    ``attention_balance_full``: over those only in which every engine had some. 0: there were none.
    ``given_up``: barriers at which the wait for a peer was given up.
    """

    dispatch_s: Mapping[str, Latency]
    combine_s: Mapping[str, Latency]
    stretch: Mapping[str, Stretch]
    bubble_share: Mapping[str, float]
    attention_balance: float
    attention_balance_full: float
    exchanged_bytes: Mapping[str, int]
    given_up: int


def collective_metrics(reports: Reports, groups: Groups, duration_ns: int) -> CollectiveMetrics | None:
    """All of it, merged over engines; None if no engine of ``groups`` reports collectives."""
    seen = {e: figures for group in groups for e in group if (figures := _figures(reports.get(e, {})))}
    if not seen:
        return None
    kinds = {kind: [f for e, f in seen.items() if e.startswith(kind)] for kind in ("pe", "de")}
    full, partly = _balances([[seen[e] for e in group if e in seen] for group in groups])
    return CollectiveMetrics(
        dispatch_s={kind: _latency(of, "dispatch_ns.") for kind, of in kinds.items()},
        combine_s={kind: _latency(of, "combine_ns.") for kind, of in kinds.items()},
        stretch={kind: _stretch(of) for kind, of in kinds.items()},
        bubble_share={
            kind: sum(f["wait_ns"] for f in of) / (duration_ns * len(of)) if of and duration_ns else 0.0
            for kind, of in kinds.items()
        },
        attention_balance=_mean([*full, *partly]),
        attention_balance_full=_mean(full),
        exchanged_bytes={kind: sum(f["sent_bytes"] for f in of) for kind, of in kinds.items()},
        given_up=sum(f["given_up"] for f in seen.values()),
    )


def _figures(report: Mapping[str, object]) -> dict[str, int]:
    machine = report.get("machine")
    if not isinstance(machine, Mapping):
        return {}
    return {key.removeprefix(_PREFIX): value for key, value in machine.items() if key.startswith(_PREFIX)}


def _numbered(figures: Mapping[str, int], prefix: str) -> dict[int, int]:
    return {int(key.removeprefix(prefix)): value for key, value in figures.items() if key.startswith(prefix)}


def _latency(engines: Sequence[Mapping[str, int]], prefix: str) -> Latency:
    counted: Counter[int] = Counter()
    for figures in engines:
        counted.update(_numbered(figures, prefix))
    count = counted.total()
    if not count:
        return Latency(mean=0.0, p50=0.0, p99=0.0, count=0)
    mean_ns = sum(ns * times for ns, times in counted.items()) / count
    return Latency(
        mean=mean_ns / NS_PER_S,
        p50=_quantile(counted, 0.5) / NS_PER_S,
        p99=_quantile(counted, 0.99) / NS_PER_S,
        count=count,
    )


def _stretch(engines: Sequence[Mapping[str, int]]) -> Stretch:
    counted: Counter[int] = Counter()
    slowest_ns = idle_ns = 0
    for figures in engines:
        for kind in ("dispatch", "combine"):
            counted.update(_numbered(figures, f"{kind}_permille."))
            slowest_ns += figures.get(f"{kind}_slowest_ns", 0)
            idle_ns += figures.get(f"{kind}_idle_ns", 0)
    if not idle_ns:
        return Stretch(mean=0.0, p50=0.0, p99=0.0)
    return Stretch(
        mean=slowest_ns / idle_ns, p50=_quantile(counted, 0.5) / 1000, p99=_quantile(counted, 0.99) / 1000
    )


def _quantile(counted: Mapping[int, int], q: float) -> int:
    """The smallest value that at least a share ``q`` of all does not exceed."""
    left = q * sum(counted.values())
    for ns, times in sorted(counted.items()):
        left -= times
        if left <= 0:
            return ns
    return max(counted)


def _balances(groups: Sequence[Sequence[Mapping[str, int]]]) -> tuple[list[float], list[float]]:
    """Largest over mean attention time, of the rounds in which every engine of a group had some, and of the others.
    Engines that saw more rounds remember fewer of them: only those that all remember can be compared.
    """
    full: list[float] = []
    partly: list[float] = []
    for engines in groups:
        every = max((figures["every"] for figures in engines), default=1)
        times = [_numbered(figures, "attention_ns.") for figures in engines]
        for number in sorted({n for of in times for n in of if n % every == 0}):
            of_round = [of.get(number, 0) for of in times]
            (full if all(of_round) else partly).append(max(of_round) * len(of_round) / sum(of_round))
    return full, partly


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# --- the ledger --------------------------------------------------------------------------------------------------


def expected_exchanges(
    rounds: Sequence[RoundView], groups: Groups, collectives: Collectives | None, layers: int, reports: Reports
) -> Counter[str]:
    """Payload bytes per resource: of the tokens that the completed rounds had computed, in a model of ``layers``
    layers, and a head and a seal for every shard that was sent.
    """
    ledger: Counter[str] = Counter()
    if collectives is None:
        return ledger
    tokens: Counter[str] = Counter()
    for r in rounds:
        if r.completed_ns and not r.error:
            tokens[r.prefill_engine] += r.prompt_tokens - r.hit_tokens
            tokens[r.decode_engine] += r.generate_tokens - 1
    expert_layers = collectives.expert_layers(0, layers)
    for group in groups:
        for sender in group:
            shards = _figures(reports.get(sender, {})).get("exchanges", 0)
            for peer in group:
                if peer == sender:
                    continue
                share = collectives.share(group, sender, peer)
                there, back = (
                    collectives.shard_bytes(tokens[sender], expert_layers, share, combine=combine)
                    for combine in (False, True)
                )
                _add(ledger, sender, peer, there + shards * shard_wire_bytes(0))
                _add(ledger, peer, sender, back)
    return ledger


def _add(ledger: Counter[str], sender: str, receiver: str, size: int) -> None:
    ledger[f"{sender}.pcie.tx"] += size
    ledger[f"{cnic_dram_endpoint(sender)}.read"] += size
    ledger[f"{cnic_dram_endpoint(receiver)}.write"] += size
    ledger[f"{receiver}.pcie.rx"] += size
