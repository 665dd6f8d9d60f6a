"""A role's memory in the live world: the bytes themselves, and the seals that travel beside them.

One anonymous private mapping stands for the registered memory of an RDMA endpoint (a node's DRAM buffer, a GPU's HBM, a
storage server's staging area). It costs nothing until it is touched: 60 idle roles on a laptop stay small.

Beside the bytes lies one 64-bit seal per Layer Block (see ``testbed.protocol.layout``): the seal of the Layer Block at
byte offset ``o`` is ``seals[o // layer_block_bytes]``. Every offset is a multiple of ``layer_block_bytes``.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from testbed.errors import BugError, ConfigError
from testbed.protocol.layout import U8, U64, BlockLayout

Offsets = npt.NDArray[np.int64]

_MAP_NORESERVE = 0x4000  # <asm-generic/mman-common.h>; Python names it from 3.12 on


class Memory:
    """``size_bytes`` of page-aligned memory for blocks of ``layout``, with the seals of its Layer Blocks.

    ``data``, ``view`` and ``blocks`` are the same bytes: as a numpy array, as a memoryview, and as one opaque item per
    Layer Block (numpy gathers and scatters those faster than rows of bytes).

    Raises:
        ConfigError: a size that is not a positive multiple of a Layer Block.
    """

    __slots__ = ("blocks", "data", "layer_block_bytes", "seals", "size_bytes", "view")

    def __init__(self, size_bytes: int, layout: BlockLayout) -> None:
        block = layout.layer_block_bytes
        if size_bytes < 1 or size_bytes % block:
            raise ConfigError(f"memory of {size_bytes} bytes is not a multiple of a Layer Block of {block} bytes.")
        # Private, so that fork never shares it; never huge pages, or one touched byte would cost 2 MiB per role.
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self.size_bytes = size_bytes
        self.layer_block_bytes = block
        self.view = memoryview(mapping)
        self.data: U8 = np.frombuffer(mapping, dtype=np.uint8)
        self.blocks: npt.NDArray[np.void] = self.data.view(f"V{block}")
        self.seals: U64 = np.zeros(size_bytes // block, dtype=np.uint64)

    def offsets(self, pieces: Sequence[int], piece_bytes: int) -> Offsets:
        """Pieces as an array, refused if one is not whole Layer Blocks of this memory.

        Raises:
            BugError: as ``check``.
        """
        self.check(min(pieces), piece_bytes)
        self.check(max(pieces), piece_bytes)
        offsets: Offsets = np.array(pieces, dtype=np.int64)
        if (offsets % self.layer_block_bytes).any():
            raise BugError(f"pieces are not aligned to Layer Blocks of {self.layer_block_bytes} bytes")
        return offsets

    def check(self, offset: int, size_bytes: int) -> None:
        """Refuse a range that is not whole Layer Blocks of this memory.

        Raises:
            BugError: outside the memory, or not aligned to Layer Blocks.
        """
        block, end = self.layer_block_bytes, offset + size_bytes
        if not 0 <= offset < end <= self.size_bytes or offset % block or size_bytes % block:
            raise BugError(f"bytes [{offset}, {end}) are not Layer Blocks of a memory of {self.size_bytes} bytes")
