"""Block layout (paper A.5) and block identity.

A Layer Block is the KV of ``block_tokens`` tokens at one layer: bytes ``[tokens, bytes_per_token_layer]``. A Full Block
is the plain concatenation of the Layer Blocks of all layers: ``[layers, tokens, bytes]``. Storage I/O uses Full Blocks;
everything that touches PE HBM uses Layer Blocks. There is no conversion anywhere: a Layer Block is a slice.

Identity: the **key** of block k is a hash of the model, the layout and all tokens up to the end of the block, so equal
prefixes share keys and nothing else does. The **seal** of a Layer Block is a checksum of its bytes seeded with its key
and layer: it is made by the engine that computed the KV, travels beside the bytes, and is recomputed from the bytes
wherever they land. Right bytes at the wrong place do not match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from testbed.errors import ConfigError

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

MASK64 = (1 << 64) - 1
_BULK_CUT_BYTES = 1024  # up to here one numpy call cuts blocks faster than one slice each
_BULK_CUT_BLOCKS = 128  # at a time: what has been cut is still in cache when it is hashed
_LAYER_STEP = 0x9E3779B97F4A7C15  # odd: distinct layers of a block never share a seed


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Shape of a block: both ends of every connection must agree on it (checked at hello)."""

    model: str
    layers: int
    block_tokens: int
    bytes_per_token_layer: int

    def __post_init__(self) -> None:
        """Raises ConfigError for a layout that has no bytes."""
        if min(self.layers, self.block_tokens, self.bytes_per_token_layer) < 1:
            raise ConfigError(f"block layout of {self.model}: layers, block_tokens and token bytes must be positive.")

    @property
    def layer_block_bytes(self) -> int:
        """Size of a Layer Block."""
        return self.block_tokens * self.bytes_per_token_layer

    @property
    def full_block_bytes(self) -> int:
        """Size of a Full Block."""
        return self.layers * self.layer_block_bytes

    @property
    def fingerprint(self) -> int:
        """64-bit hash of the layout; peers whose fingerprints differ refuse each other."""
        text = f"{self.model}/{self.layers}/{self.block_tokens}/{self.bytes_per_token_layer}"
        return xxhash.xxh3_64_intdigest(text.encode())

    def blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens occupy, the partial tail included."""
        return -(-tokens // self.block_tokens)

    def full_blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill."""
        return tokens // self.block_tokens

    def sequence_blocks(self, prompt_tokens: int, generate_tokens: int) -> int:
        """Blocks that a sequence takes in HBM in the end: the KV of the last token generated is never computed."""
        return self.blocks(prompt_tokens + generate_tokens - 1)

    def reusable_blocks(self, prompt_tokens: int) -> int:
        """Most blocks of a prompt that may be hits: at least one token must be computed to emit the first token."""
        return max(0, prompt_tokens - 1) // self.block_tokens

    def view(self, full_block: U8) -> U8:
        """A Full Block's bytes ``[full_block_bytes]`` seen as ``[layers, tokens, bytes]``; no copy."""
        return full_block.reshape(self.layers, self.block_tokens, self.bytes_per_token_layer)

    def layer_slice(self, layer_begin: int, layer_end: int) -> tuple[int, int]:
        """Offset and length in bytes of layers ``[begin, end)`` inside a Full Block."""
        size = self.layer_block_bytes
        return layer_begin * size, (layer_end - layer_begin) * size

    def keys(self, tokens: U32) -> tuple[int, ...]:
        """Key of every block of ``tokens`` (uint32 ids); a partial tail has a key of its own, which is never stored."""
        state = xxhash.xxh3_64(seed=self.fingerprint)
        raw = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
        step = 4 * self.block_tokens
        keys = []
        for at in range(0, len(raw), step):
            state.update(raw[at : at + step])
            keys.append(state.intdigest())
        return tuple(keys)


class KeyChain:
    """Keys of a growing sequence: ``full`` holds the key of every block filled so far."""

    def __init__(self, layout: BlockLayout) -> None:
        self._step = 4 * layout.block_tokens
        self._state = xxhash.xxh3_64(seed=layout.fingerprint)
        self._pending = b""
        self.full: list[int] = []

    def extend(self, tokens: U32) -> list[int]:
        """Append token ids; the keys of the blocks that they fill."""
        self._pending += tokens.astype("<u4").tobytes()
        before = len(self.full)
        while len(self._pending) >= self._step:
            self._state.update(self._pending[: self._step])
            self._pending = self._pending[self._step :]
            self.full.append(self._state.intdigest())
        return self.full[before:]


def seal_seed(key: int, layer: int) -> int:
    """Seed of the seal of one Layer Block."""
    return (key + (layer + 1) * _LAYER_STEP) & MASK64


def seal_seeds(keys: Sequence[int], layer_begin: int, layer_end: int) -> list[int]:
    """Seeds of the seals of layers ``[begin, end)`` of every block: all layers of the first block first."""
    steps = np.arange(layer_begin + 1, layer_end + 1, dtype=np.uint64) * np.uint64(_LAYER_STEP)  # modulo 2**64
    seeds: list[int] = np.add.outer(np.array(keys, dtype=np.uint64), steps).ravel().tolist()
    return seeds


def seal_blocks(data: memoryview, seeds: Sequence[int], layer_block_bytes: int) -> list[int]:
    """Seals of the ``len(seeds)`` Layer Blocks that lie back to back in ``data``.

    Small blocks are cut in bulk by numpy: cutting costs more than hashing them (256 bytes: 0.1 us instead of 0.25).
    """
    digest, size = xxhash.xxh3_64_intdigest, layer_block_bytes
    if size > _BULK_CUT_BYTES or len(seeds) < 8:
        return [digest(data[k * size : (k + 1) * size], seed) for k, seed in enumerate(seeds)]
    blocks = np.frombuffer(data, dtype=f"V{size}")
    seals: list[int] = []
    for at in range(0, len(seeds), _BULK_CUT_BLOCKS):
        seals.extend(map(digest, blocks[at : at + _BULK_CUT_BLOCKS].tolist(), seeds[at : at + _BULK_CUT_BLOCKS]))
    return seals


def seal_pieces(
    data: memoryview, keys: Sequence[int], layer_begin: int, layer_end: int, layer_block_bytes: int
) -> list[int]:
    """Recompute the seals of ``len(keys)`` consecutive pieces of ``layer_end - layer_begin`` Layer Blocks each.

    ``data`` holds them back to back; the result is piece-major: all layers of the first block, then of the second.
    """
    return seal_blocks(data, seal_seeds(keys, layer_begin, layer_end), layer_block_bytes)
