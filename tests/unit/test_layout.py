"""Block layout: slices without copies, keys that are prefix hashes, seals that know where they belong."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ConfigError
from testbed.protocol.layout import BlockLayout, KeyChain, seal_blocks, seal_pieces, seal_seed, seal_seeds

LAYOUT = BlockLayout(model="m", layers=3, block_tokens=4, bytes_per_token_layer=8)
SETTINGS = settings(max_examples=60, derandomize=True)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda ids: np.array(ids, dtype=np.uint32))


def _ids(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def test_sizes() -> None:
    assert (LAYOUT.layer_block_bytes, LAYOUT.full_block_bytes) == (32, 96)
    assert [LAYOUT.blocks(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert [LAYOUT.full_blocks(n) for n in (0, 1, 4, 5, 8)] == [0, 0, 1, 1, 2]
    # A prompt is never all hits: its last token must be computed to emit the first one.
    assert [LAYOUT.reusable_blocks(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]
    # The KV of the last token generated is never computed.
    assert [LAYOUT.sequence_blocks(4, g) for g in (1, 2, 5, 6)] == [1, 2, 2, 3]


@pytest.mark.parametrize("key", ["layers", "block_tokens", "bytes_per_token_layer"])
def test_layout_without_bytes_is_refused(key: str) -> None:
    values = {"layers": 3, "block_tokens": 4, "bytes_per_token_layer": 8} | {key: 0}
    with pytest.raises(ConfigError, match="block layout of m"):
        BlockLayout(model="m", **values)


def test_view_and_slices_are_the_same_bytes() -> None:
    memory = np.arange(3 * 96, dtype=np.uint8)
    block = memory[96:192]
    view = LAYOUT.view(block)
    assert view.shape == (3, 4, 8) and np.shares_memory(view, memory)
    for begin, end in itertools.combinations(range(4), 2):
        offset, size = LAYOUT.layer_slice(begin, end)
        piece = block[offset : offset + size]
        assert np.shares_memory(piece, memory)
        assert piece.tolist() == view[begin:end].reshape(-1).tolist()
    view[1, 2, 3] = 255
    assert memory[96 + 32 + 2 * 8 + 3] == 255


def test_full_block_is_the_concatenation_of_its_layer_blocks() -> None:
    block = np.random.default_rng(1).integers(0, 256, 96).astype(np.uint8)
    parts = [block[o : o + n] for o, n in (LAYOUT.layer_slice(layer, layer + 1) for layer in range(3))]
    assert np.concatenate(parts).tolist() == block.tolist()


def test_fingerprint_tells_every_field_apart() -> None:
    values = {"model": "m", "layers": 3, "block_tokens": 4, "bytes_per_token_layer": 8}
    changed = [values, values | {"model": "n"}, *(values | {k: 5} for k in list(values)[1:])]
    assert len({BlockLayout(**v).fingerprint for v in changed}) == 5  # type: ignore[arg-type]


@SETTINGS
@given(first=tokens, second=tokens)
def test_keys_are_equal_exactly_as_far_as_the_prefixes(first: np.ndarray, second: np.ndarray) -> None:
    common = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    common = min(len(first), len(second)) if common is None else common
    keys = LAYOUT.keys(first), LAYOUT.keys(second)
    for k, (a, b) in enumerate(zip(*keys, strict=False)):
        ends = [min(len(ids), 4 * (k + 1)) for ids in (first, second)]
        assert (a == b) == (ends[0] == ends[1] <= common)  # all tokens up to the end of the block are equal


@SETTINGS
@given(ids=tokens, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_key_chain_agrees_however_it_is_fed(ids: np.ndarray, cuts: list[int]) -> None:
    chain, new = KeyChain(LAYOUT), []
    bounds = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    for begin, end in itertools.pairwise(bounds):
        new += chain.extend(ids[begin:end])
    assert tuple(new) == tuple(chain.full) == LAYOUT.keys(ids)[: len(ids) // 4]


def test_keys_depend_on_the_layout() -> None:
    other = BlockLayout(model="m", layers=4, block_tokens=4, bytes_per_token_layer=8)
    assert LAYOUT.keys(_ids(1, 2, 3, 4)) != other.keys(_ids(1, 2, 3, 4))


DATA = np.random.default_rng(2).integers(0, 256, 2 * 96).astype(np.uint8)
KEYS = (11, 12)
SEALS = seal_pieces(DATA.data, KEYS, 0, 3, 32)


def test_every_bit_of_every_layer_block_is_sealed() -> None:
    for byte, bit in itertools.product(range(len(DATA)), range(8)):
        changed = DATA.copy()
        changed[byte] ^= 1 << bit
        different = [a != b for a, b in zip(seal_pieces(changed.data, KEYS, 0, 3, 32), SEALS, strict=True)]
        assert different == [k == byte // 32 for k in range(6)]


def test_right_bytes_at_the_wrong_place_do_not_match() -> None:
    layer_blocks = [DATA[k * 32 : (k + 1) * 32] for k in range(6)]
    places = [(key, layer) for key in KEYS for layer in range(3)]
    for (k, data), (at, (key, layer)) in itertools.product(enumerate(layer_blocks), enumerate(places)):
        seal = seal_pieces(data.data, (key,), layer, layer + 1, 32)[0]
        assert (seal == SEALS[at]) == (k == at)


def test_equal_bytes_of_other_blocks_and_layers_have_other_seals() -> None:
    zeros = np.zeros(32 * 6, dtype=np.uint8)
    assert len(set(seal_pieces(zeros.data, KEYS, 0, 3, 32))) == 6


@SETTINGS
@given(
    size=st.sampled_from([8, 32, 256, 8192]),
    keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9),
    begin=st.integers(0, 3),
    layers=st.integers(1, 5),
)
def test_seals_in_bulk_are_those_of_one_layer_block_each(size: int, keys: list[int], begin: int, layers: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size * len(keys) * layers).astype(np.uint8)
    seeds = seal_seeds(keys, begin, begin + layers)
    assert seeds == [seal_seed(key, layer) for key in keys for layer in range(begin, begin + layers)]
    together = seal_blocks(data.data, seeds, size)
    single = [seal_blocks(data[k * size : (k + 1) * size].data, [s], size)[0] for k, s in enumerate(seeds)]
    assert together == single == seal_pieces(data.data, keys, begin, begin + layers, size)
