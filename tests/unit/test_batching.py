"""Packing of a forward (reference 8.5): quota, largest chunk that fits, block boundaries, progress."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from testbed.protocol.batching import Candidate, Chunk, pack_forward

BLOCK = 4


class Quadratic:
    """Attention time that grows with what is attended to: new * (cached + new / 2), in ns."""

    calls = 0

    def attention_layer_time_ns(self, batch: Sequence[tuple[int, int]]) -> int:
        self.calls += 1
        return sum(new * (2 * cached + new) for cached, new in batch) // 2

    def prefill_layer_time_ns(self, batch: Sequence[tuple[int, int]], layers: int = 1) -> int:
        raise AssertionError("only attention counts")

    def decode_step_time_ns(self, context_tokens: Sequence[int]) -> int:
        raise AssertionError("only attention counts")


def _pack(queue: list[tuple[int, int]], quota_ns: int, memory: int = 1000, layers: int = 1) -> list[Chunk]:
    candidates = [Candidate(f"r{i}", cached, new) for i, (cached, new) in enumerate(queue)]
    return pack_forward(
        candidates,
        Quadratic(),
        quota_ns=quota_ns,
        attention_layers=layers,
        block_tokens=BLOCK,
        memory_blocks=memory,
    )


def _time(chunks: Sequence[Chunk]) -> int:
    return Quadratic().attention_layer_time_ns([(c.cached_tokens, c.new_tokens) for c in chunks])


def test_requests_are_packed_in_order_while_the_quota_lasts() -> None:
    # 50 + 50 ns each; the third would overflow, and not even one block of it (4 * 4 / 2 = 8 ns) fits.
    assert _pack([(0, 10), (0, 10), (0, 10)], 100) == [Chunk("r0", 0, 10), Chunk("r1", 0, 10)]
    # It does with 8 ns more; with 7 it does not.
    assert _pack([(0, 10), (0, 10), (0, 10)], 108)[2:] == [Chunk("r2", 0, 4)]
    assert _pack([(0, 10), (0, 10), (0, 10)], 107)[2:] == []


def test_packing_ends_at_the_first_that_overflows() -> None:
    assert _pack([(0, 40), (0, 1)], 100) == [Chunk("r0", 0, 12)]  # r1 would fit, but it is not its turn


@pytest.mark.parametrize("quota", range(8, 800, 37))
@pytest.mark.parametrize("cached", [0, 4, 16])
def test_cut_is_the_largest_block_aligned_share_that_fits(quota: int, cached: int) -> None:
    chunks = _pack([(0, 3), (cached, 41)], quota)
    fits = [n for n in range(0, 41, BLOCK) if _time([Chunk("", 0, 3), Chunk("", cached, n)]) <= quota]
    whole = _time([Chunk("", 0, 3), Chunk("", cached, 41)]) <= quota
    assert chunks[0] == Chunk("r0", 0, 3)
    if whole:
        assert chunks[1:] == [Chunk("r1", cached, 41)]
    else:
        assert [c.new_tokens for c in chunks[1:]] == [n for n in fits[-1:] if n]


def test_the_end_of_a_prompt_need_not_be_aligned_but_a_cut_is() -> None:
    assert _pack([(8, 6)], 10**6) == [Chunk("r0", 8, 6)]
    assert _pack([(8, 6)], 65) == [Chunk("r0", 8, 4)]  # 66 ns for the whole, 40 for a block


def test_quota_covers_all_layers_of_the_forward() -> None:
    assert _pack([(0, 10)], 100, layers=2) == [Chunk("r0", 0, 10)]
    assert _pack([(0, 10)], 99, layers=2) == [Chunk("r0", 0, 8)]


def test_an_empty_batch_takes_one_block_whatever_the_quota() -> None:
    assert _pack([(100, 50)], 0) == [Chunk("r0", 100, 4)]
    assert _pack([(100, 3)], 0) == [Chunk("r0", 100, 3)]
    assert _pack([], 100) == []


def test_chunks_of_a_prompt_add_up_to_it() -> None:
    cached, new, rounds = 8, 43, 0
    while new:
        chunk = _pack([(cached, new)], 60)[0]
        cached, new, rounds = cached + chunk.new_tokens, new - chunk.new_tokens, rounds + 1
        assert cached % BLOCK == 0 or new == 0
    assert cached == 51 and rounds > 3


def test_memory_bounds_the_blocks_of_a_batch() -> None:
    # 10 tokens take 3 blocks, 8 tokens 2.
    assert _pack([(0, 10), (0, 8)], 10**6, memory=5) == [Chunk("r0", 0, 10), Chunk("r1", 0, 8)]
    assert _pack([(0, 10), (0, 8)], 10**6, memory=4) == [Chunk("r0", 0, 10), Chunk("r1", 0, 4)]
    assert _pack([(0, 10), (0, 8)], 10**6, memory=3) == [Chunk("r0", 0, 10)]
    assert _pack([(16, 8)], 10**6, memory=5) == [Chunk("r0", 16, 4)]  # what is cached takes memory, too
    assert _pack([(16, 8)], 10**6, memory=4) == []


def test_search_is_binary() -> None:
    cost = Quadratic()
    candidates = [Candidate("r0", 0, 4 * 4096)]
    pack_forward(candidates, cost, quota_ns=10**6, attention_layers=1, block_tokens=4, memory_blocks=10**6)
    assert cost.calls <= 1 + 12 + 1
