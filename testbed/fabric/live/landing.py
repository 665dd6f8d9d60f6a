"""One write on its way into memory: where its bytes go, and whether they are the ones that the owner expects.

Two ways for the bytes, chosen by how scattered the landing is:

* long runs of memory: the kernel scatters straight into them (``recvmsg_into``);
* runs of a few hundred bytes (one small Layer Block per block, the usual layer step at emulated scale): the kernel
  fills a small stage, numpy scatters. One more copy, and still a tenth of the cost of an I/O vector entry per run.

Either way seals are recomputed from the bytes where they landed, run by run, while they are in cache.
"""

from __future__ import annotations

import numpy as np
import xxhash

from testbed.errors import BugError
from testbed.fabric.live.memory import Memory, Offsets
from testbed.fabric.live.wire import WriteHeader, seal_bytes
from testbed.protocol.grants import Landing
from testbed.protocol.layout import BlockLayout, seal_blocks, seal_seeds

_READ_BYTES = 512 * 1024  # per system call: what landed is still in cache when it is sealed
_READ_BUFFERS = 1000  # below IOV_MAX (1024)
_STAGE_BYTES = 64 * 1024
SHORT_RUN_BYTES = 4096  # runs shorter than this on average are staged


class LandingWrite:
    """A write that a grant allows. ``targets`` says where the next bytes go, ``landed`` takes note of them."""

    def __init__(self, header: WriteHeader, landing: Landing, layout: BlockLayout, memory: Memory) -> None:
        block = layout.layer_block_bytes
        layers = landing.layer_end - landing.layer_begin
        if landing.piece_bytes != layers * block or len(landing.keys) != len(landing.pieces):
            raise BugError(f"grant {header.grant_id}: {landing.piece_bytes} bytes per piece for {layers} layers")
        pieces = memory.offsets(landing.pieces, landing.piece_bytes)
        self.header = header
        self._landing = landing
        self._memory = memory
        self._block = block
        self._index = block_numbers(pieces, landing.piece_bytes, block)
        self._seeds = seal_seeds(landing.keys, landing.layer_begin, landing.layer_end)
        self._seals: list[int] = []
        self._tail = memoryview(bytearray(seal_bytes(header.size_bytes, layout)))
        self._tail_have = 0
        self._left = header.size_bytes  # payload that has not come yet
        self._stage: memoryview | None = None
        self._staged = 0
        self._runs: list[memoryview] = []
        self._run = 0
        if has_short_runs(pieces, landing.piece_bytes):
            self._stage = memoryview(bytearray(min(header.size_bytes, max(block, _STAGE_BYTES // block * block))))
        else:
            self._runs = [memory.view[begin:end] for begin, end in merge_pieces(pieces, landing.piece_bytes)]

    def targets(self) -> list[memoryview]:
        """Where the next bytes go, bounded for one system call; the seals follow when the payload fits."""
        targets: list[memoryview] = []
        size = 0
        if self._stage is not None and self._left:
            size = min(self._left, len(self._stage) - self._staged)
            targets.append(self._stage[self._staged : self._staged + size])
        else:
            for k in range(self._run, min(len(self._runs), self._run + _READ_BUFFERS)):
                run = self._runs[k]
                if size + len(run) > _READ_BYTES:
                    run = run[: _READ_BYTES - size]
                targets.append(run)
                size += len(run)
                if size >= _READ_BYTES:
                    break
        if size == self._left:
            targets.append(self._tail[self._tail_have :])
        return targets

    def landed(self, count: int) -> None:
        """``count`` bytes have come."""
        payload = min(count, self._left)
        self._left -= payload
        self._tail_have += count - payload
        if self._stage is not None:
            self._unstage(payload)
        else:
            self._advance(payload)
        self._seal(len(self._seeds) - -(-(self._left + self._staged) // self._block))

    def _unstage(self, count: int) -> None:
        """Scatter the whole Layer Blocks of the stage."""
        stage, block = self._stage, self._block
        assert stage is not None
        self._staged += count
        whole = self._staged // block
        if not whole:
            return
        done = len(self._seals)
        self._memory.blocks[self._index[done : done + whole]] = np.frombuffer(stage, dtype=f"V{block}", count=whole)
        rest = self._staged - whole * block
        stage[:rest] = bytes(stage[whole * block : self._staged])
        self._staged = rest

    def _advance(self, count: int) -> None:
        runs = self._runs
        while count:
            run = runs[self._run]
            if count < len(run):
                runs[self._run] = run[count:]
                return
            count -= len(run)
            self._run += 1

    def _seal(self, whole: int) -> None:
        """Seal the landed Layer Blocks up to ``whole`` from the bytes in memory."""
        seals, block, memory = self._seals, self._block, self._memory
        done = len(seals)
        if done == whole:
            return
        index, seeds = self._index[done:whole], self._seeds[done:whole]
        if block < SHORT_RUN_BYTES:
            seals.extend(seal_blocks(memory.blocks[index].view(np.uint8).data, seeds, block))
            return
        view, digest = memory.view, xxhash.xxh3_64_intdigest
        for at, seed in zip((index * block).tolist(), seeds, strict=True):
            seals.append(digest(view[at : at + block], seed))

    def check(self) -> str | None:
        """All has come: keep the seals if all match; otherwise the reason, naming block and layer."""
        brought = np.frombuffer(self._tail, dtype="<u8")
        expected = brought.tolist()
        if self._seals != expected:
            landing = self._landing
            wrong = next(k for k, seal in enumerate(self._seals) if seal != expected[k])
            piece, layer = divmod(wrong, landing.layer_end - landing.layer_begin)
            return f"block {landing.keys[piece]:016x} layer {landing.layer_begin + layer}: not its bytes"
        self._memory.seals[self._index] = brought
        return None


def has_short_runs(pieces: Offsets, piece_bytes: int) -> bool:
    """Whether the contiguous runs of ``pieces`` are so short that staging is cheaper than an I/O vector entry each."""
    return len(pieces) * piece_bytes < SHORT_RUN_BYTES * (1 + len(_breaks(pieces, piece_bytes)))


def merge_pieces(pieces: Offsets, piece_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges ``[begin, end)`` of pieces in order, adjacent ones merged: fewer, longer runs for the kernel."""
    breaks = _breaks(pieces, piece_bytes)
    begins = pieces[np.concatenate(([0], breaks))]
    ends = pieces[np.concatenate((breaks - 1, [-1]))] + piece_bytes
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


def _breaks(pieces: Offsets, piece_bytes: int) -> Offsets:
    """Numbers of the pieces that do not begin where the one before ends."""
    return np.flatnonzero(pieces[1:] != pieces[:-1] + piece_bytes) + 1


def block_numbers(pieces: Offsets, piece_bytes: int, block: int) -> Offsets:
    """Numbers of the Layer Blocks of ``pieces`` in their memory, in payload order."""
    first = pieces // block
    return first if piece_bytes == block else (first[:, None] + np.arange(piece_bytes // block)).ravel()
