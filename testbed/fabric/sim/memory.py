"""A memory of the sim world: no bytes, only which Layer Block each of its slots holds.

A slot's tag is the seed of the seal that the bytes would have (``layout.seal_seed``): block key and layer in 64 bits.
So the sim world refuses the same transfers as the live one does by their bytes: a block of another prefix, another
layer, another place, or a source whose memory has been given to someone else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from testbed.protocol.grants import Landing
from testbed.protocol.layout import U64, BlockLayout, seal_seeds


class Tags:
    """The tags that Layer Blocks have: ``of(key, begin, end)`` is uint64 [end - begin]."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layers = layout.layers
        self._steps = np.array(seal_seeds((0,), 0, layout.layers), dtype=np.uint64)

    def of(self, key: int, begin: int, end: int) -> U64:
        """Tags of layers ``[begin, end)`` of one block."""
        return self._steps[begin:end] + np.uint64(key)  # modulo 2**64

    def of_all(self, keys: Sequence[int], begin: int, end: int) -> U64:
        """Tags of layers ``[begin, end)`` of several blocks, uint64 [len(keys), end - begin]."""
        return np.add.outer(np.array(keys, dtype=np.uint64), self._steps[begin:end])


class TaggedMemory:
    """``size_bytes`` of memory in slots of one Layer Block; pieces are byte offsets, as machines give them."""

    def __init__(self, size_bytes: int, layout: BlockLayout, tags: Tags) -> None:
        self._slot_bytes = layout.layer_block_bytes
        self._tags = tags
        self.slots: U64 = np.zeros(size_bytes // self._slot_bytes, dtype=np.uint64)

    def read(self, pieces: Sequence[int], piece_bytes: int) -> U64:
        """Tags of the slots of all pieces, in order, uint64 [pieces * layers]; a copy or a view."""
        size, count = self._slot_bytes, piece_bytes // self._slot_bytes
        if len(pieces) == 1:
            first = pieces[0] // size
            return self.slots[first : first + count]
        return self.slots[self._index(pieces, count)].ravel()

    def write(self, pieces: Sequence[int], piece_bytes: int, tags: U64) -> None:
        """Set the slots of all pieces."""
        size, count = self._slot_bytes, piece_bytes // self._slot_bytes
        if len(pieces) == 1:
            first = pieces[0] // size
            self.slots[first : first + count] = tags
        else:
            self.slots[self._index(pieces, count)] = tags.reshape(len(pieces), count)

    def _index(self, pieces: Sequence[int], count: int) -> npt.NDArray[np.int64]:
        first = np.array(pieces, dtype=np.int64) // self._slot_bytes
        return np.add.outer(first, np.arange(count, dtype=np.int64))

    def put(self, pieces: Sequence[int], keys: Sequence[int], begin: int, end: int) -> None:
        """The pieces hold layers ``[begin, end)`` of the blocks ``keys`` from now on."""
        self.write(pieces, (end - begin) * self._slot_bytes, self._tags.of_all(keys, begin, end).ravel())

    def holds(self, pieces: Sequence[int], keys: Sequence[int], begin: int, end: int) -> bool:
        """Whether the pieces hold layers ``[begin, end)`` of the blocks ``keys``."""
        if not pieces:
            return True
        found = self.read(pieces, (end - begin) * self._slot_bytes)
        return bool((found == self._tags.of_all(keys, begin, end).ravel()).all())

    def take(self, landing: Landing, brought: U64) -> str:
        """Let a write land: "" if it brought the blocks that the landing expects, else which Layer Block is wrong.

        What was brought is in memory in either case, as bytes would be.
        """
        self.write(landing.pieces, landing.piece_bytes, brought)
        begin, end = landing.layer_begin, landing.layer_end
        expected = (
            self._tags.of(landing.keys[0], begin, end)
            if len(landing.keys) == 1
            else self._tags.of_all(landing.keys, begin, end).ravel()
        )
        right = brought == expected
        if right.all():
            return ""
        piece, layer = divmod(int(np.argmin(right)), end - begin)
        return f"block {landing.keys[piece]:016x} layer {begin + layer}: not its bytes"
