"""What memory holds in the check world: not bytes but where they come from, and tokens made of what was really read.

A *cell* is one Layer Block: ``(layer, chain, valid)`` is the KV at ``layer`` of ``valid`` tokens of a block, and
``chain`` the digest of all tokens up to the last of them (the key of the block, section 4 of docs/protocol.md). Equal
cells are equal KV: a cell that is not the one expected is the wrong block, the wrong layer, a stale or a torn one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import xxhash

from testbed.protocol.layout import BlockLayout

VOCAB = 32_000
Cell = tuple[int, int, int]
NOTHING: Cell = (-1, 0, 0)
"""Memory that nobody has written since it was last handed out."""


@functools.lru_cache(maxsize=65_536)
def chain_of(tokens: bytes, seed: int) -> int:
    """Digest of a token prefix (little-endian uint32); of a whole block's end it is the block's key."""
    return xxhash.xxh3_64_intdigest(tokens, seed)


def right_cells(layout: BlockLayout, tokens: bytes, block: int, end: int, layers: range) -> tuple[Cell, ...]:
    """The KV of block ``block`` of a sequence of which ``end`` tokens have KV, for each layer."""
    last = min(end, (block + 1) * layout.block_tokens)
    chain, valid = chain_of(tokens[: 4 * last], layout.fingerprint), last - block * layout.block_tokens
    return tuple((layer, chain, valid) for layer in layers)


def vote(cells: Sequence[Cell]) -> int:
    """What one layer adds to the next token: a digest of that layer's cells of all blocks, in order."""
    return xxhash.xxh3_64_intdigest(repr(list(cells)).encode())


def token_of(votes: int) -> int:
    """The token that the sum of all layers' votes stands for."""
    return votes % VOCAB


def expected_tokens(layout: BlockLayout, prompt: bytes, count: int) -> tuple[int, ...]:
    """The oracle: tokens that a sequence must emit, from the definition alone."""
    tokens, emitted = prompt, []
    for _ in range(count):
        length = len(tokens) // 4
        votes = 0
        for layer in range(layout.layers):
            only = range(layer, layer + 1)
            blocks = range(layout.blocks(length))
            votes += vote([right_cells(layout, tokens, block, length, only)[0] for block in blocks])
        emitted.append(token_of(votes))
        tokens += token_of(votes).to_bytes(4, "little")
    return tuple(emitted)
