"""What each lane discipline promises on one link: shares while both lanes want more, and the longest wait of either.

Paper 5.1 and A.1. Two lanes, model traffic and KV, in packets of one size. All figures are of the worst case, and in
bytes of the link: what passes while a lane waits, divided by the link's rate, is the time. They count from the moment
a packet is first of its lane, and end when it has passed whole:

* htb: after a packet of its own KV has to earn the next one at its guaranteed rate; what either lane has saved up
  while it was idle (its bucket) may pass at once.
* prio: a packet of KV that has begun ends; apart from that KV waits as long as there is model traffic.
* ets: deficit round robin. What is left of a turn is kept, so a packet larger than its lane's quantum takes several
  turns of the other lane, and the ratio of bytes is that of the quanta whatever the packets' size.
* none: one queue, so a packet waits for all that is in it, and shares are as what is offered.
* infiniband: the arbiter's tables, packet by packet; the wait is the longest seen over whole cycles of both tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from testbed.fabric.arbiter import DEFAULT_PACKET_BYTES, KV_VL, MODEL_VLS, UNLIMITED, ArbiterTables, PacketArbiter
from testbed.fabric.spec import ClusterSpec, LaneDiscipline
from testbed.units import NS_PER_S

_MOST_PACKETS = 400_000
"""Of an arbiter that are followed; whole cycles of the paper's tables take some thousands."""

_CREDITS = "credits per lane: a lane whose receiver is slow keeps its queue and takes none of the other's"
_NOT_MODELLED = {
    LaneDiscipline.HTB: (_CREDITS, "PFC between switch and NIC", "a guaranteed rate is a token bucket, not a table"),
    LaneDiscipline.PRIO: (_CREDITS, "PFC between switch and NIC", "the low table: KV has no guarantee at all"),
    LaneDiscipline.ETS: (
        _CREDITS,
        "PFC between switch and NIC",
        "one turn is bytes, where InfiniBand sends one packet",
    ),
    LaneDiscipline.NONE: (_CREDITS, "PFC between switch and NIC", "lanes"),
    LaneDiscipline.INFINIBAND: (_CREDITS, "packets: the sim world takes the long-run shares", "VL15 (management)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOutlook:
    """What the model lane (first of each pair) and the KV lane (second) get of one link.

    ``shares``: of the link, while both want more (None: in proportion to what each offers). ``alone``: while the other
    idles. ``waits_bytes``: what passes at most before a packet that is first of its lane has passed, that packet
    included (None: no bound).
    """

    lanes: LaneDiscipline
    shares: tuple[Fraction, Fraction] | None
    alone: tuple[Fraction, Fraction]
    waits_bytes: tuple[int | None, int | None]
    warnings: tuple[str, ...]
    not_modelled: tuple[str, ...]

    def waits_ns(self, rate_bps: int) -> tuple[int | None, int | None]:
        """The waits on a link of ``rate_bps``."""
        high, kv = (None if size is None else size * 8 * NS_PER_S // rate_bps for size in self.waits_bytes)
        return high, kv


def outlook(spec: ClusterSpec, *, packet_bytes: int = DEFAULT_PACKET_BYTES, bucket_bytes: int = 0) -> LaneOutlook:
    """What the cluster's discipline does with packets of ``packet_bytes``.

    ``bucket_bytes``: what htb lets a lane save up while it idles.
    """
    lanes, one = spec.lanes, Fraction(1)
    shares: tuple[Fraction, Fraction] | None = (one, Fraction(0))
    waits: tuple[int | None, int | None]
    warnings: tuple[str, ...] = ()
    if lanes is LaneDiscipline.HTB:
        high = Fraction(spec.high_share).limit_denominator(1_000_000)
        shares = (high, 1 - high)
        waits = (bucket_bytes + 2 * packet_bytes, bucket_bytes + _up(packet_bytes / (1 - high)))
    elif lanes is LaneDiscipline.PRIO:
        waits = (2 * packet_bytes, None)
        warnings = ("KV has a share of 0 while model traffic wants the whole link: it may starve for ever.",)
    elif lanes is LaneDiscipline.ETS:
        of_high, of_kv = spec.ets_quanta
        shares = (Fraction(of_high, of_high + of_kv), Fraction(of_kv, of_high + of_kv))
        waits = (_ets_wait(of_high, of_kv, packet_bytes), _ets_wait(of_kv, of_high, packet_bytes))
    elif lanes is LaneDiscipline.NONE:
        shares, waits = None, (None, None)
        warnings = ("there is no isolation: model traffic waits for all KV that is queued before it.",)
    else:
        return _of_tables(spec.arbiter, packet_bytes)
    return LaneOutlook(
        lanes=lanes, shares=shares, alone=(one, one), waits_bytes=waits, warnings=warnings,
        not_modelled=_NOT_MODELLED[lanes],
    )  # fmt: skip


def _up(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def _ets_wait(own: int, other: int, packet_bytes: int) -> int:
    """A packet takes so many turns; in each of them the other lane may send its quantum, and in one of them what it
    had left, which is less than a packet."""
    turns = -(-packet_bytes // own)
    of_other = (turns * other + packet_bytes - 1) // packet_bytes * packet_bytes
    return of_other + packet_bytes


def _of_tables(tables: ArbiterTables, packet_bytes: int) -> LaneOutlook:
    everything = sorted({vl for vl, weight in (*tables.high, *tables.low) if weight} | {*MODEL_VLS, KV_VL})
    both = tables.shares((*MODEL_VLS, KV_VL), packet_bytes=packet_bytes)
    kv = both[KV_VL]
    alone = (
        sum(tables.shares(MODEL_VLS, packet_bytes=packet_bytes).values(), Fraction(0)),
        tables.shares((KV_VL,), packet_bytes=packet_bytes)[KV_VL],
    )
    in_full = tables.shares(everything, packet_bytes=packet_bytes)[KV_VL]
    high = sum((both[vl] for vl in MODEL_VLS), Fraction(0))
    return LaneOutlook(
        lanes=LaneDiscipline.INFINIBAND,
        shares=(high, kv),
        alone=alone,
        waits_bytes=(
            _arbiter_wait(tables, MODEL_VLS[0], (*MODEL_VLS, KV_VL), packet_bytes) if high else None,
            _arbiter_wait(tables, KV_VL, everything, packet_bytes) if in_full else None,
        ),
        warnings=tuple(_starved(tables, in_full, high)),
        not_modelled=_NOT_MODELLED[LaneDiscipline.INFINIBAND],
    )


def shares_of_vls(tables: ArbiterTables, vls: Sequence[int]) -> tuple[Fraction, Fraction]:
    """KV's share while it and the model VLs ``vls`` want more: under the one-packet rule, and if each expiry of the
    limit served a whole round of the low table."""
    one, whole = (tables.shares((*vls, KV_VL), whole_low_round=reading)[KV_VL] for reading in (False, True))
    return one, whole


def _starved(tables: ArbiterTables, kv: Fraction, high: Fraction) -> list[str]:
    """Lanes that get nothing for ever, each with the number that says so."""
    served = {vl for vl, weight in (*tables.high, *tables.low) if weight}
    in_high = {vl for vl, weight in tables.high if weight}
    warnings = []
    if KV_VL not in served:
        warnings.append(f"KV's VL {KV_VL} has a weight in neither table: its share is 0 even when all others idle.")
    elif not kv:
        limit = f"qos_high_limit is {tables.high_limit}, which is no limit" if tables.high_limit == UNLIMITED else ""
        reason = limit or "the high table never lets it"
        warnings.append(
            f"KV has a share of 0 while model traffic wants the whole link: {reason}; it may starve for ever."
        )
    for vl in MODEL_VLS:
        if vl not in served:
            warnings.append(f"model traffic's VL {vl} has a weight in neither table: its share is 0.")
        elif not high:
            warnings.append(f"model traffic on VL {vl} has a share of 0 while KV wants the whole link.")
        elif vl not in in_high and KV_VL in in_high:
            warnings.append(
                f"model traffic's VL {vl} is in the low table only and KV in the high one: lanes are swapped."
            )
    return warnings


def _arbiter_wait(tables: ArbiterTables, vl: int, backlogged: Sequence[int], packet_bytes: int) -> int:
    """The most that passes from the end of a packet of ``vl`` to the end of its next one, all of ``backlogged``
    waiting, in bytes."""
    arbiter = PacketArbiter(tables, packet_bytes=packet_bytes)
    in_round = sum(-(-weight * 64 // packet_bytes) for _, weight in (*tables.high, *tables.low))
    cycle = ((tables.high_packets(packet_bytes) or 0) + 1) * max(in_round, 1)
    longest = gap = 0
    for _ in range(min(3 * cycle, _MOST_PACKETS)):
        gap += 1
        if arbiter.next_vl(backlogged) == vl:
            longest, gap = max(longest, gap), 0
    return max(longest, gap, 2) * packet_bytes  # at least: one of the other lane's has just begun
