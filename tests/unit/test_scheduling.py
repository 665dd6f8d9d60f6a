"""Algorithm 1 and the two levels of DE selection (reference 8.2-8.4), by small examples worked out by hand."""

from __future__ import annotations

import pytest

from testbed.protocol.scheduling import (
    EngineView,
    Waiting,
    select_decode,
    select_decode_group,
    select_prefill,
    select_side,
    select_split,
)

ALPHA, BETA = 100, 1000


def _pe(name: str, tokens: int, node: str = "") -> EngineView:
    return EngineView(name, node or name.split("gpu", maxsplit=1)[0], 0, tokens)


def _requests(*tokens: int) -> list[Waiting]:
    return [Waiting(f"r{i}", t, t, t) for i, t in enumerate(tokens)]


def _prefill(queue: list[Waiting], engines: list[EngineView], queues: dict[str, int]) -> list[tuple[str, str]]:
    return select_prefill(queue, engines, queues, alpha_tokens=ALPHA, beta_tokens=BETA)


def test_engines_over_beta_are_never_assigned() -> None:
    engines = [_pe("pe0gpu0", BETA + 1), _pe("pe1gpu0", BETA)]
    assert _prefill(_requests(1, 1), engines, {}) == [("r0", "pe1gpu0")]  # then pe1 is over beta, too
    assert [e.tokens for e in engines] == [BETA + 1, BETA + 1]


def test_short_disk_queues_come_first_even_when_more_loaded() -> None:
    engines = [_pe("pe0gpu0", 0), _pe("pe1gpu0", 900)]
    queues = {"pe0": ALPHA + 1, "pe1": ALPHA}
    # pe1 is in C2 until its load crosses beta; only then is pe0, in C3, a candidate.
    assert _prefill(_requests(50, 51, 10, 10), engines, queues) == [
        ("r0", "pe1gpu0"),
        ("r1", "pe1gpu0"),
        ("r2", "pe0gpu0"),
        ("r3", "pe0gpu0"),
    ]


def test_long_disk_queues_are_better_than_none() -> None:
    engines = [_pe("pe0gpu0", 5), _pe("pe1gpu0", 4)]
    assert _prefill(_requests(3, 3), engines, {"pe0": 500, "pe1": 500}) == [("r0", "pe1gpu0"), ("r1", "pe0gpu0")]


def test_fewest_tokens_wins_and_ties_go_by_position() -> None:
    engines = [_pe("pe0gpu0", 7), _pe("pe0gpu1", 7), _pe("pe0gpu2", 6)]
    assert [e for _, e in _prefill(_requests(2, 1, 1, 1), engines, {})] == ["pe0gpu2", "pe0gpu0", "pe0gpu1", "pe0gpu0"]
    assert [(e.tokens, e.sequences) for e in engines] == [(9, 2), (8, 1), (8, 1)]


def test_prefill_stops_at_the_first_that_nobody_can_take() -> None:
    engines = [_pe("pe0gpu0", BETA)]
    assert _prefill(_requests(1, 1, 1), engines, {}) == [("r0", "pe0gpu0")]
    assert _prefill([], engines, {}) == []
    assert _prefill(_requests(1), [], {}) == []


def test_node_that_reports_no_queue_has_none() -> None:
    engines = [_pe("pe0gpu0", 10), _pe("pe1gpu0", 0)]
    assert _prefill(_requests(1), engines, {"pe1": ALPHA + 1}) == [("r0", "pe0gpu0")]


def test_decode_groups_get_the_queue_by_their_token_sums() -> None:
    sums = {"b": 10, "a": 10, "c": 12}
    chosen = select_decode_group(_requests(3, 1, 1, 5), sums)
    # a (tie by name) -> 13; b -> 11; b -> 12; b and c tie at 12: b
    assert chosen == [("r0", "a"), ("r1", "b"), ("r2", "b"), ("r3", "b")]
    assert sums == {"b": 17, "a": 13, "c": 12}


def _de(name: str, sequences: int, tokens: int, free: int) -> EngineView:
    return EngineView(name, "de0", sequences, tokens, free)


def test_light_engines_are_chosen_by_fewest_sequences() -> None:
    engines = [_de("e0", 3, 10, 500), _de("e1", 1, 40, 500)]
    # R is both requests: Z = 1.05 * (20 + 20 + 50) / 2 = 47.25; e1 would reach 60 and is not light.
    assert select_decode(_requests(20, 20), engines, z_factor=1.05) == [("r0", "e0"), ("r1", "e0")]
    engines = [_de("e0", 3, 10, 500), _de("e1", 1, 20, 500)]
    # Z = 1.05 * (20 + 20 + 30) / 2 = 36.75: e0 takes one (30); then neither is light (50, 40): fewest tokens, e1.
    assert select_decode(_requests(20, 20), engines, z_factor=1.05) == [("r0", "e0"), ("r1", "e1")]
    engines = [_de("e0", 3, 10, 500), _de("e1", 1, 12, 500)]
    # Z = 1.05 * (20 + 22) / 2 = 22.05 for one request of 10 + another: both light for 10: fewest sequences, e1.
    assert select_decode(_requests(10, 10), engines, z_factor=1.05) == [("r0", "e1"), ("r1", "e0")]


def test_z_counts_only_what_fits_in_the_groups_hbm() -> None:
    # Both fit: Z = 1.05 * (30 + 30 + 0) / 1 = 63, and e0 is light for both. With HBM for one: Z = 31.5.
    engines = [_de("e0", 0, 0, 60)]
    assert len(select_decode(_requests(30, 30), engines, z_factor=1.05)) == 2
    engines = [_de("e0", 0, 0, 40), _de("e1", 5, 2, 40)]
    # R = r0, r1 (30 + 30 <= 80): Z = 1.05 * (60 + 2) / 2 = 32.55; e0 and e1 (32) are light, e0 has fewer sequences.
    assert select_decode(_requests(30, 30), engines, z_factor=1.05) == [("r0", "e0"), ("r1", "e1")]


def test_fallback_is_fewest_tokens_among_those_with_hbm() -> None:
    engines = [_de("e0", 0, 100, 50), _de("e1", 0, 200, 50), _de("e2", 0, 0, 9)]
    # Z = 1.05 * (10 + 300) / 3 = 108.5: e0 would reach 110, e1 210; e2 has no room for 10.
    assert select_decode(_requests(10), engines, z_factor=1.05) == [("r0", "e0")]


def test_decode_stops_at_the_head_that_fits_nowhere() -> None:
    engines = [_de("e0", 0, 0, 30), _de("e1", 0, 0, 30)]
    # 40 fits in sum, but on no engine: it waits, and so does what is behind it.
    assert select_decode(_requests(40, 1), engines, z_factor=1.05) == []
    assert select_decode([], engines, z_factor=1.05) == select_decode(_requests(1), [], z_factor=1.05) == []


def test_hbm_is_counted_in_whole_blocks() -> None:
    engine = _de("e0", 0, 0, 8)
    queue = [Waiting("r0", 4, 5, 8), Waiting("r1", 1, 3, 4)]
    assert select_decode(queue, [engine], z_factor=1.05) == [("r0", "e0")]  # 5 + 3 tokens fit, 2 + 1 blocks do not
    assert (engine.free_hbm_tokens, engine.tokens) == (0, 5)


def test_an_engine_with_more_assigned_than_it_holds_is_given_nothing() -> None:
    engines = [_de("e0", 0, 0, -8), _de("e1", 3, 90, 16)]
    assert select_decode(_requests(10, 10), engines, z_factor=1.05) == [("r0", "e1")]
    assert [e.free_hbm_tokens for e in engines] == [-8, 6]


@pytest.mark.parametrize(("prefill", "decode", "side"), [(5, 4, "de"), (4, 5, "pe"), (4, 4, "pe"), (0, 0, "pe")])
def test_shorter_read_queue_reads_and_ties_go_to_the_prefill_side(prefill: int, decode: int, side: str) -> None:
    assert select_side(prefill, decode) == side


@pytest.mark.parametrize(
    ("prefill", "decode", "hits", "least", "by_decode"),
    [
        (0, 0, 10, 1, 5),
        (0, 0, 11, 1, 5),  # the odd block: prefill side
        (16, 0, 10, 1, 7),  # 16 tokens are four blocks: 4 + 3 = 0 + 7
        (0, 16, 10, 1, 3),
        (40, 0, 10, 1, 10),  # the other queue is longer than all hits
        (0, 400, 10, 1, 0),
        (24, 0, 10, 3, 10),  # 8 and 2: two are not worth it
        (24, 0, 10, 2, 8),
        (0, 24, 10, 3, 0),
        (0, 0, 5, 3, 0),  # no share can be worth it: one side, ties as ever
        (5, 0, 5, 3, 5),
        (0, 5, 5, 3, 0),
        (0, 0, 1, 1, 0),
    ],
)
def test_a_split_read_ends_on_both_sides_at_once(
    prefill: int, decode: int, hits: int, least: int, by_decode: int
) -> None:
    assert select_split(prefill, decode, hit_blocks=hits, block_tokens=4, least_blocks=least) == by_decode
