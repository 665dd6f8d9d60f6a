"""Placement: replicas on different servers, evenly, and stable when a server comes."""

from __future__ import annotations

from collections import Counter

from testbed.protocol.placement import choose_replica, replicas_of

SERVERS = tuple(f"st{k}" for k in range(4))
KEYS = [k * 0x9E3779B97F4A7C15 % 2**64 for k in range(1, 2001)]


def test_replicas_are_on_different_servers() -> None:
    for key in KEYS[:200]:
        assert len(set(replicas_of(key, SERVERS, 3))) == 3
    assert sorted(replicas_of(1, SERVERS, 9)) == sorted(SERVERS)  # no more than there are
    assert replicas_of(1, SERVERS, 2) == replicas_of(1, SERVERS, 4)[:2]


def test_blocks_spread_evenly() -> None:
    for place in (0, 1):
        load = Counter(replicas_of(key, SERVERS, 2)[place] for key in KEYS)
        assert max(load.values()) / min(load.values()) < 1.25
    first_of = Counter(replicas_of(k, SERVERS, 2) for k in range(2000))  # small keys mix as well as large ones
    assert len(first_of) == 12 and max(first_of.values()) < 2 * min(first_of.values())


def test_a_new_server_takes_its_share_and_moves_nothing_else() -> None:
    moved = 0
    for key in KEYS:
        before, after = replicas_of(key, SERVERS, 1)[0], replicas_of(key, (*SERVERS, "st4"), 1)[0]
        moved += before != after
        assert after in (before, "st4")
    assert 0.15 < moved / len(KEYS) < 0.25


def test_reader_takes_the_holder_with_the_fewest_reads_outstanding() -> None:
    assert choose_replica(("st2", "st1"), {"st1": 1, "st2": 1}) == "st2"  # equal: the one ranked first
    assert choose_replica(("st2", "st1"), {"st1": 0, "st2": 1}) == "st1"
    assert choose_replica(("st2", "st1"), {"st2": 3}) == "st1"  # not counted yet: none
