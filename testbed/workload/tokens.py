"""Token ids without a tokenizer: of text, of text we only know the length of, and of groups of tokens.

All three are deterministic functions with no state. Ids are 32 bits wide; whoever replays them reduces them modulo
the model's vocabulary.

Invariants: the ids of a prefix of a text are, but for the last one, a prefix of the ids of the text; equal prefixes of
ids stay equal when grouped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

Ids = npt.NDArray[np.uint32]

# Bounded pieces, read left to right without lookahead past the piece: about 4 characters of English or code each.
_PIECE = re.compile(r" ?[A-Za-z]{1,7}| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]{1,3}|\s{1,8}")


def tokenize(text: str) -> tuple[int, ...]:
    """Ids of a text: a stable hash of each piece."""
    return tuple(xxhash.xxh32_intdigest(piece.encode("utf-8", "surrogatepass")) for piece in _PIECE.findall(text))


def random_ids(label: str, start: int, count: int) -> Ids:
    """Ids of the ``count`` tokens from position ``start`` of the endless text called ``label`` (splitmix64)."""
    with np.errstate(over="ignore"):
        z = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(xxhash.xxh3_64_intdigest(label.encode("utf-8", "surrogatepass")))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def group_ids(ids: Sequence[int], size: int, groups: int) -> tuple[int, ...]:
    """Ids of the first ``groups`` groups of ``size`` consecutive ids (the last group may be short)."""
    if size == 1:
        return tuple(ids[:groups])
    return tuple(
        xxhash.xxh32_intdigest(np.asarray(ids[i * size : (i + 1) * size], dtype=np.uint32).tobytes())
        for i in range(groups)
    )
