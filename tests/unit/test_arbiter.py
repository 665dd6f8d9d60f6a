"""The InfiniBand arbiter: its rules packet by packet, its fluid limit, the paper's tables."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import groupby

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from testbed.errors import ConfigError
from testbed.fabric.arbiter import PAPER_TABLES, ArbiterTables, PacketArbiter

SETTINGS = settings(max_examples=60, derandomize=True)
OPENSM = """
qos_max_vls    4      # as in the paper's appendix A.1
qos_high_limit 240
qos_vlarb_high 0:192,1:192,2:0,3:192
qos_vlarb_low\t0:192,1:192,2:64, 3:192
"""


def sent(arbiter: PacketArbiter, waiting: tuple[int, ...], packets: int) -> list[int | None]:
    return [arbiter.next_vl(waiting) for _ in range(packets)]


def test_parses_the_tables_of_the_paper() -> None:
    assert ArbiterTables.parse(OPENSM) == PAPER_TABLES


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("2:64", "2-64", 'qos_vlarb_low: entry "2-64"'),
        ("2:0,", "2:,", 'qos_vlarb_high: entry "2:"'),
        ("0:192,1:192,2:0", "0:192,,2:0", 'qos_vlarb_high: entry ""'),
        ("2:64", "2:256", "qos_vlarb_low: entry 2:256 has weight 256"),
        ("2:64", "5:64", "qos_vlarb_low: entry 5:64 names VL 5, but qos_max_vls is 4"),
        ("qos_max_vls    4", "qos_max_vls    many", 'qos_max_vls: "many"'),
        ("qos_high_limit 240", "qos_high_limit 256", "qos_high_limit: 256"),
        ("qos_high_limit 240", "", "qos_high_limit: missing"),
        ("qos_high_limit 240", "qos_high_limit", 'qos_high_limit: ""'),
        ("qos_high_limit 240", "qos_sl2vl 240", "qos_sl2vl: no key"),
        ("qos_max_vls    4", "qos_high_limit 7", "qos_high_limit: given twice"),
    ],
)
def test_refuses_bad_tables_and_names_the_entry(old: str, new: str, names: str) -> None:
    assert old in OPENSM
    with pytest.raises(ConfigError) as caught:
        ArbiterTables.parse(OPENSM.replace(old, new))
    assert str(caught.value).startswith(names)


def test_refuses_a_table_that_no_port_holds() -> None:
    with pytest.raises(ConfigError, match="holds at most 64"):
        ArbiterTables(high=((0, 1),) * 65, low=(), high_limit=0)
    with pytest.raises(ConfigError, match="entry 15:1 names VL 15"):
        ArbiterTables(high=((15, 1),), low=(), high_limit=0)


@pytest.mark.parametrize(
    ("backlogged", "one_packet", "whole_round"),
    [
        ((0, 2), Fraction(1, 964), Fraction(1, 244)),  # 0.10 % and 0.41 %
        ((0, 1, 2, 3), Fraction(1, 2410), Fraction(1, 250)),  # 0.042 % and 0.40 %
        ((2,), Fraction(1), Fraction(1)),
    ],
)
def test_worst_case_share_of_kv(backlogged: tuple[int, ...], one_packet: Fraction, whole_round: Fraction) -> None:
    assert PAPER_TABLES.shares(backlogged)[2] == one_packet
    assert PAPER_TABLES.shares(backlogged, whole_low_round=True)[2] == whole_round


@pytest.mark.parametrize(
    ("backlogged", "one_packet", "whole_round"),
    [((0, 2), 0.10, 0.41), ((0, 1, 2, 3), 0.042, 0.40)],
)
def test_worst_case_shares_as_printed(backlogged: tuple[int, ...], one_packet: float, whole_round: float) -> None:
    """The reference's table, in percent; its 0.042 is 1/2410 = 0.0415 rounded once more."""
    assert float(PAPER_TABLES.shares(backlogged)[2]) * 100 == pytest.approx(one_packet, rel=0.04)
    whole = PAPER_TABLES.shares(backlogged, whole_low_round=True)[2]
    assert float(whole) * 100 == pytest.approx(whole_round, abs=0.005)


def test_longest_wait_of_the_low_table() -> None:
    """983,040 B of high packets, about 20 us at 50 GB/s: the packet model never has a longer run."""
    assert PAPER_TABLES.high_packets() == 240
    packets = sent(PacketArbiter(PAPER_TABLES), (0, 4, 2), 10_000)
    tables = ArbiterTables(high=((0, 192),), low=((2, 64),), high_limit=240)
    runs = [(vl, len(list(run))) for vl, run in groupby(sent(PacketArbiter(tables), (0, 2), 10_000))]
    assert runs[:4] == [(0, 240), (2, 1), (0, 240), (2, 1)]
    assert packets[240] == 0 and packets.index(2) == 240 + 3 * 241  # VL0 has three turns of the low table first


def test_a_turn_lasts_until_its_weight_is_used_and_may_overshoot() -> None:
    tables = ArbiterTables(high=((0, 65), (1, 64), (0, 0), (3, 1)), low=(), high_limit=255)
    assert sent(PacketArbiter(tables), (0, 1, 3), 8) == [0, 0, 1, 3, 0, 0, 1, 3]
    arbiter = PacketArbiter(tables)
    assert [arbiter.next_vl(waiting) for waiting in ((0, 1), (1,), (0,), (0,))] == [0, 1, 0, 0]
    assert arbiter.next_vl((0, 3)) == 3  # the turn of VL0 was fresh, and is over


def test_limits_at_both_ends() -> None:
    tables = {limit: ArbiterTables(high=((0, 64),), low=((2, 64),), high_limit=limit) for limit in (0, 1, 2, 255)}
    assert sent(PacketArbiter(tables[0]), (0, 2), 4) == [0, 2, 0, 2]
    assert sent(PacketArbiter(tables[1]), (0, 2), 4) == [0, 2, 0, 2]
    assert sent(PacketArbiter(tables[2]), (0, 2), 6) == [0, 0, 2, 0, 0, 2]
    assert sent(PacketArbiter(tables[0], packet_bytes=256), (0, 2), 4) == [0, 2, 0, 2]
    assert sent(PacketArbiter(tables[1], packet_bytes=2048), (0, 2), 6) == [0, 0, 2, 0, 0, 2]
    assert sent(PacketArbiter(tables[255]), (0, 2), 999) == [0] * 999
    assert tables[255].high_packets() is None and tables[255].shares((0, 2)) == {0: 1, 2: 0}


def test_an_exhausted_limit_waits_for_a_low_packet() -> None:
    arbiter = PacketArbiter(ArbiterTables(high=((0, 64),), low=((2, 64),), high_limit=2))
    assert sent(arbiter, (0,), 5) == [0] * 5
    assert sent(arbiter, (0, 2), 4) == [2, 0, 0, 2]
    assert arbiter.next_vl((7,)) is None
    assert [arbiter.next_vl(waiting) for waiting in ((0,), (2,), (0, 2), (0, 2))] == [0, 2, 0, 2]


def test_lane_weights() -> None:
    assert PAPER_TABLES.lane_weights() == (963, 1)
    assert PAPER_TABLES.lane_weights((0, 1, 3)) == (2409, 1)
    with pytest.raises(ConfigError, match="VL 2 cannot carry both"):
        PAPER_TABLES.lane_weights((0, 2))
    with pytest.raises(ConfigError, match="no arbiter table serves"):
        PAPER_TABLES.lane_weights((5,), 6)


entries = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), max_size=4).map(tuple)
limits = st.one_of(st.integers(0, 12), st.just(255))
backlogs = st.lists(st.integers(0, 3), min_size=1, unique=True).map(tuple)


@SETTINGS
@example(((0, 1),), ((2, 64),), 0, (0, 2), 4096, False)
@example(((0, 1), (1, 200)), ((2, 64), (1, 9)), 0, (0, 1, 2), 1024, True)
@given(entries, entries, limits, backlogs, st.sampled_from((1024, 2048, 4096)), st.booleans())
def test_the_fluid_limit_is_what_the_packet_model_sends(
    high: tuple[tuple[int, int], ...],
    low: tuple[tuple[int, int], ...],
    limit: int,
    backlogged: tuple[int, ...],
    packet_bytes: int,
    whole_low_round: bool,
) -> None:
    """Over a long run each VL's packets are its share, give or take its own turns and one cycle's low packets."""
    tables = ArbiterTables(high=high, low=low, high_limit=limit)
    shares = tables.shares(backlogged, packet_bytes=packet_bytes, whole_low_round=whole_low_round)
    arbiter = PacketArbiter(tables, packet_bytes=packet_bytes, whole_low_round=whole_low_round)
    counts = Counter(sent(arbiter, backlogged, 20_000))
    if not any(shares.values()):
        assert counts == {None: 20_000}
        return
    assert sum(shares.values()) == 1
    turn = {entry: -(-entry[1] * 64 // packet_bytes) for entry in (*high, *low)}
    in_cycle = sum(turn[entry] for entry in low if entry[0] in backlogged) if whole_low_round else 1
    for vl in backlogged:
        own = sum(turn[entry] for entry in (*high, *low) if entry[0] == vl)
        assert abs(counts[vl] - shares[vl] * 20_000) <= own + in_cycle
