"""A write lands exactly, however TCP cuts it and however its pieces are scattered."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import BugError
from testbed.fabric.live import landing as under_test
from testbed.fabric.live.landing import LandingWrite, merge_pieces
from testbed.fabric.live.memory import Memory
from testbed.fabric.live.outbound import write_buffers
from testbed.fabric.live.wire import HEADER_BYTES, WriteHeader
from testbed.protocol.grants import GrantRef, Landing
from testbed.protocol.layout import BlockLayout, seal_pieces
from testbed.protocol.machine import Write

PAGES = 24


@st.composite
def cases(draw: st.DrawFn) -> tuple[BlockLayout, Landing, int]:
    """A layout, a landing of it, and a seed for the cuts."""
    layout = BlockLayout(
        model="any",
        layers=draw(st.integers(1, 6)),
        block_tokens=draw(st.sampled_from((1, 7, 64))),
        bytes_per_token_layer=draw(st.sampled_from((1, 4, 31, 656))),
    )
    begin = draw(st.integers(0, layout.layers - 1))
    end = draw(st.integers(begin + 1, layout.layers))
    slots = draw(st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=PAGES, unique=True))
    landing = Landing(
        pieces=tuple(slot * layout.full_block_bytes for slot in slots),
        piece_bytes=(end - begin) * layout.layer_block_bytes,
        keys=tuple(draw(st.lists(st.integers(0, 2**64 - 1), min_size=len(slots), max_size=len(slots)))),
        layer_begin=begin,
        layer_end=end,
    )
    return layout, landing, draw(st.integers(0, 2**32))


def filled(layout: BlockLayout, landing: Landing, seed: int) -> Memory:
    """A source memory that holds the landing's blocks at the same places."""
    memory = Memory(PAGES * layout.full_block_bytes, layout)
    memory.data[:] = np.random.default_rng(seed).integers(0, 256, memory.size_bytes, dtype=np.uint8)
    block = layout.layer_block_bytes
    for key, at in zip(landing.keys, landing.pieces, strict=True):
        view = memory.view[at : at + landing.piece_bytes]
        seals = seal_pieces(view, (key,), landing.layer_begin, landing.layer_end, block)
        memory.seals[at // block : at // block + len(seals)] = seals
    return memory


def stream(memory: Memory, landing: Landing) -> bytes:
    """Payload and seals as they go over the wire."""
    write = Write(1, GrantRef("b", 1, 1, landing.size_bytes), "a", landing.pieces, landing.piece_bytes)
    pieces = memory.offsets(landing.pieces, landing.piece_bytes)
    return b"".join(write_buffers(write, pieces, memory))[HEADER_BYTES:]


def land(write: LandingWrite, data: bytes, seed: int) -> None:
    """Deliver ``data`` in random cuts, as ``recvmsg_into`` would."""
    cut = random.Random(seed)
    at = 0
    while at < len(data):
        targets = write.targets()
        room = sum(map(len, targets))
        assert 0 < room <= len(data) - at, "never a target beyond the write"
        left = count = min(room, cut.choice((1, 3, 100, 700, 5_000, 10**9)))
        for target in targets:
            size = min(left, len(target))
            target[:size] = data[at : at + size]
            at, left = at + size, left - size
        write.landed(count)


@settings(max_examples=150)
@given(cases(), st.sampled_from((0, 4096, 10**9)), st.sampled_from((300, 64 * 1024)))
def test_it_lands_exactly(case: tuple[BlockLayout, Landing, int], short_run: int, stage: int) -> None:
    layout, landing, seed = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "SHORT_RUN_BYTES", short_run)  # straight, by size, staged
        patch.setattr(under_test, "_STAGE_BYTES", stage)
        source, memory = filled(layout, landing, seed), Memory(PAGES * layout.full_block_bytes, layout)
        write = LandingWrite(WriteHeader(1, 1, 1, landing.size_bytes), landing, layout, memory)
        land(write, stream(source, landing), seed)
        assert write.check() is None
    inside = np.zeros(memory.size_bytes, dtype=bool)
    for at in landing.pieces:
        inside[at : at + landing.piece_bytes] = True
    assert (memory.data[inside] == source.data[inside]).all()
    assert not memory.data[~inside].any()
    blocks = inside[:: layout.layer_block_bytes]
    assert (memory.seals[blocks] == source.seals[blocks]).all()
    assert not memory.seals[~blocks].any()


@settings(max_examples=60)
@given(cases(), st.data())
def test_any_flipped_bit_is_found_and_named(case: tuple[BlockLayout, Landing, int], draw: st.DataObject) -> None:
    layout, landing, seed = case
    source, memory = filled(layout, landing, seed), Memory(PAGES * layout.full_block_bytes, layout)
    data = bytearray(stream(source, landing))
    where = draw.draw(st.integers(0, len(data) - 1))
    data[where] ^= 1 << draw.draw(st.integers(0, 7))
    write = LandingWrite(WriteHeader(1, 1, 1, landing.size_bytes), landing, layout, memory)
    land(write, bytes(data), seed)
    number = where // layout.layer_block_bytes if where < landing.size_bytes else (where - landing.size_bytes) // 8
    piece, layer = divmod(number, landing.layer_end - landing.layer_begin)
    assert write.check() == f"block {landing.keys[piece]:016x} layer {landing.layer_begin + layer}: not its bytes"
    assert not memory.seals.any()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30, unique=True))
def test_merged_runs_are_the_pieces_in_order(slots: list[int]) -> None:
    runs = merge_pieces(np.array(slots) * 10, 10)
    assert [at for begin, end in runs for at in range(begin, end, 10)] == [slot * 10 for slot in slots]
    assert all(first[1] != second[0] for first, second in itertools.pairwise(runs)), "nothing left to merge"


@pytest.mark.parametrize("pieces", [(-6144,), (PAGES * 6144,), (0, 100)])
def test_a_grant_outside_the_memory_is_our_own_bug(pieces: tuple[int, ...]) -> None:
    layout = BlockLayout(model="any", layers=6, block_tokens=64, bytes_per_token_layer=16)
    memory = Memory(PAGES * layout.full_block_bytes, layout)
    landing = Landing(pieces=pieces, piece_bytes=6144, keys=(1,) * len(pieces), layer_begin=0, layer_end=6)
    with pytest.raises(BugError):
        LandingWrite(WriteHeader(1, 1, 1, landing.size_bytes), landing, layout, memory)
