"""The InfiniBand arbiter between virtual lanes (VLs): its tables, a packet-level model, and its fluid limit.

Paper 5.1 and A.1 (the tables in OpenSM's words); the semantics are those of the InfiniBand specification:

* a high and a low table of (VL, weight) entries, weights in units of 64 bytes, 0 skips the entry;
* a counter of ``high_limit`` x 4096 bytes: while it lasts, packets of the high table go first and use it up; once it
  is used up the low table goes first, and **one** low packet fills it again. 255: no limit; 0: one high packet;
* within a table an entry keeps its turn until its weight is used up (the last packet may overshoot) or its VL has
  no packet; then the next entry of some weight with a packet has a fresh turn.

``whole_low_round`` is the other reading of the third rule, in which a limit that is used up serves every entry of the
low table once. Packets are all of one size (the MTU): what waits behind a saturated link.

Invariants: `ArbiterTables.shares` is what `PacketArbiter` serves in the long run, exactly; shares are fractions, add
up to 1, and no arbiter idles while some VL of either table has a packet.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from testbed.errors import ConfigError

WEIGHT_UNIT_BYTES = 64
LIMIT_UNIT_BYTES = 4096
UNLIMITED = 255
MAX_DATA_VLS = 15
MAX_ENTRIES = 64
DEFAULT_PACKET_BYTES = 4096
"""The MTU of the paper's fabric is UNKNOWN; 4 KiB is InfiniBand's largest."""

MODEL_VLS = (0,)
KV_VL = 2
"""Model traffic is on VL0 and KV on VL2. That VL2 is KV's follows from the paper's tables (A.1); which of VL0, 1 and 3
model traffic takes is UNKNOWN."""

Table = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArbiterTables:
    """Tables of a port: ``high`` and ``low`` as (VL, weight in 64-byte units), ``high_limit`` in 4 KiB units."""

    high: Table
    low: Table
    high_limit: int

    def __post_init__(self) -> None:
        """Refuse what no port can hold.

        Raises:
            ConfigError: a VL, a weight, a limit or a number of entries out of range.
        """
        for key, table in (("qos_vlarb_high", self.high), ("qos_vlarb_low", self.low)):
            if len(table) > MAX_ENTRIES:
                raise ConfigError(f"{key}: {len(table)} entries, but a table holds at most {MAX_ENTRIES}.")
            for vl, weight in table:
                if not 0 <= vl < MAX_DATA_VLS:
                    raise ConfigError(f"{key}: entry {vl}:{weight} names VL {vl}, but data VLs are 0 to 14.")
                if not 0 <= weight <= 255:
                    raise ConfigError(f"{key}: entry {vl}:{weight} has weight {weight}, but weights are 0 to 255.")
        if not 0 <= self.high_limit <= UNLIMITED:
            raise ConfigError(f"qos_high_limit: {self.high_limit}, but it must be between 0 and 255.")

    @classmethod
    def parse(cls, text: str) -> ArbiterTables:
        """Read the lines of an OpenSM configuration (``qos_vlarb_high 0:192,1:192,2:0,3:192``).

        ``qos_high_limit``, ``qos_vlarb_high`` and ``qos_vlarb_low`` must be there, ``qos_max_vls`` may be.

        Raises:
            ConfigError: an unknown, missing or repeated key, an entry that is not ``VL:WEIGHT``, a value out of range.
        """
        values: dict[str, str] = {}
        for line in text.splitlines():
            words = line.partition("#")[0].split(maxsplit=1)
            if not words:
                continue
            key, value = words[0], " ".join(words[1:])
            if key not in ("qos_max_vls", "qos_high_limit", "qos_vlarb_high", "qos_vlarb_low"):
                raise ConfigError(f"{key}: no key of the arbiter; use qos_high_limit, qos_vlarb_high, qos_vlarb_low.")
            if key in values:
                raise ConfigError(f"{key}: given twice.")
            values[key] = value.strip()
        for key in ("qos_high_limit", "qos_vlarb_high", "qos_vlarb_low"):
            if key not in values:
                raise ConfigError(f"{key}: missing; an arbiter needs both tables and the limit.")
        high, low = (_table(key, values[key]) for key in ("qos_vlarb_high", "qos_vlarb_low"))
        max_vls = _number("qos_max_vls", values.get("qos_max_vls", str(MAX_DATA_VLS)))
        for key, table in (("qos_vlarb_high", high), ("qos_vlarb_low", low)):
            for vl, weight in table:
                if vl >= max_vls:
                    raise ConfigError(f"{key}: entry {vl}:{weight} names VL {vl}, but qos_max_vls is {max_vls}.")
        return cls(high=high, low=low, high_limit=_number("qos_high_limit", values["qos_high_limit"]))

    def high_packets(self, packet_bytes: int = DEFAULT_PACKET_BYTES) -> int | None:
        """Packets of the high table that may pass before a low one; ``None``: no limit."""
        if self.high_limit == UNLIMITED:
            return None
        return max(1, -(-self.high_limit * LIMIT_UNIT_BYTES // packet_bytes))

    def shares(
        self,
        backlogged: Collection[int],
        *,
        packet_bytes: int = DEFAULT_PACKET_BYTES,
        whole_low_round: bool = False,
    ) -> dict[int, Fraction]:
        """Long-run share of the link of each VL in ``backlogged``, all of which always have packets.

        In each cycle the high table sends ``high_packets`` and the low table one packet (or one round); both tables
        share their packets in proportion to the packets of an entry's turn. A VL in neither table has 0, and if that
        is so of all, nothing is sent.
        """
        high = _packets_per_round(self.high, backlogged, packet_bytes)
        low = _packets_per_round(self.low, backlogged, packet_bytes)
        high_round, low_round = sum(high.values()), sum(low.values())
        in_cycle = self.high_packets(packet_bytes)
        if not low_round or (high_round and in_cycle is None):
            to_high, to_low = 1, 0
        elif not high_round or in_cycle is None:
            to_high, to_low = 0, 1
        else:
            to_high, to_low = in_cycle, low_round if whole_low_round else 1
        shares = {vl: Fraction(0) for vl in sorted(backlogged)}
        for packets, of_round, in_all in ((high, high_round, to_high), (low, low_round, to_low)):
            for vl, count in packets.items():
                shares[vl] += Fraction(count * in_all, of_round * (to_high + to_low))
        return shares

    def lane_weights(self, high_vls: tuple[int, ...] = MODEL_VLS, kv_vl: int = KV_VL) -> tuple[int, int]:
        """Smallest whole weights of the lanes (model traffic on ``high_vls``, KV) while all of their VLs want more.

        Raises:
            ConfigError: KV shares a VL with model traffic, or no table serves any of them.
        """
        if kv_vl in high_vls:
            raise ConfigError(f"VL {kv_vl} cannot carry both KV and model traffic; give KV a VL of its own.")
        shares = self.shares((*high_vls, kv_vl))
        if not any(shares.values()):
            raise ConfigError(f"no arbiter table serves any of the VLs {(*high_vls, kv_vl)}; give one a weight.")
        whole = lcm(*(share.denominator for share in shares.values()))
        kv = shares[kv_vl] * whole
        return int(whole - kv), int(kv)


PAPER_TABLES = ArbiterTables(
    high=((0, 192), (1, 192), (2, 0), (3, 192)),
    low=((0, 192), (1, 192), (2, 64), (3, 192)),
    high_limit=240,
)
"""The paper's tables (A.1): VL2 is the KV lane."""


class _Turns:
    """One table with the entry whose turn it is and what is left of its weight, in bytes."""

    def __init__(self, table: Table) -> None:
        self.entries = [(vl, weight * WEIGHT_UNIT_BYTES) for vl, weight in table if weight]
        self.at = 0
        self.left_bytes = self.entries[0][1] if self.entries else 0

    def serves(self, waiting: Collection[int]) -> bool:
        """Whether an entry has a packet."""
        return any(vl in waiting for vl, _ in self.entries)

    def send(self, waiting: Collection[int], packet_bytes: int) -> int:
        """VL whose packet goes next; some entry must have one."""
        while self.left_bytes <= 0 or self.entries[self.at][0] not in waiting:
            self.at = (self.at + 1) % len(self.entries)
            self.left_bytes = self.entries[self.at][1]
        self.left_bytes -= packet_bytes
        return self.entries[self.at][0]

    def round_over(self, waiting: Collection[int]) -> bool:
        """Whether no entry behind this one has a packet in this round."""
        return self.left_bytes <= 0 and not any(vl in waiting for vl, _ in self.entries[self.at + 1 :])


class PacketArbiter:
    """The reference: asked at every packet boundary which VL sends, given the VLs that have a packet and credits."""

    def __init__(
        self, tables: ArbiterTables, *, packet_bytes: int = DEFAULT_PACKET_BYTES, whole_low_round: bool = False
    ) -> None:
        self._high = _Turns(tables.high)
        self._low = _Turns(tables.low)
        self._limit_bytes = max(1, tables.high_limit * LIMIT_UNIT_BYTES)
        self._unlimited = tables.high_limit == UNLIMITED
        self._left_bytes = self._limit_bytes
        self._packet_bytes = packet_bytes
        self._whole_low_round = whole_low_round

    def next_vl(self, waiting: Collection[int]) -> int | None:
        """VL of the next packet; ``None`` if no table serves any of ``waiting``."""
        low_first = self._left_bytes <= 0 and not self._unlimited
        if self._low.serves(waiting) and (low_first or not self._high.serves(waiting)):
            vl = self._low.send(waiting, self._packet_bytes)
            if low_first and (not self._whole_low_round or self._low.round_over(waiting)):
                self._left_bytes = self._limit_bytes
            return vl
        if self._high.serves(waiting):
            self._left_bytes -= self._packet_bytes
            return self._high.send(waiting, self._packet_bytes)
        return None


def _packets_per_round(table: Table, backlogged: Collection[int], packet_bytes: int) -> dict[int, int]:
    packets: dict[int, int] = {}
    for vl, weight in table:
        if weight and vl in backlogged:
            packets[vl] = packets.get(vl, 0) - (-weight * WEIGHT_UNIT_BYTES // packet_bytes)
    return packets


def _number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f'{key}: "{text}" is not a whole number.')
    return int(text)


def _table(key: str, text: str) -> Table:
    entries = []
    for entry in text.split(","):
        vl, colon, weight = entry.strip().partition(":")
        if not colon or not all(part.isascii() and part.isdigit() for part in (vl, weight)):
            raise ConfigError(f'{key}: entry "{entry.strip()}" is not VL:WEIGHT, as in 0:192.')
        entries.append((int(vl), int(weight)))
    return tuple(entries)
