"""A storage server's disk: one file per Full Block, read past the page cache, written durably.

Reads must cost what a disk costs. If they came from the page cache, the testbed would measure its own memory: the
emulated 3FS has no DRAM cache (paper A.4). So blocks are read with O_DIRECT where the file system can, else with the
pages dropped around every read; which one is found out by trying on the very directory, and ``method`` says it.

Every fetch checks one checksum of the payload; seals are recomputed where the block lands next. A file that is torn,
damaged or of another block is a ``HostError`` with the reason, never bytes. Operations go to a small thread pool
(aiofiles' ``wrap``), several per hop when several wait: a hop costs as much CPU as a read of 48 KB. A block goes
through an aligned buffer of the pool's thread, because blocks are not multiples of the disk's sector.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import aiofiles.os
import numpy as np

from testbed.errors import HostError
from testbed.fabric.live import blockfile
from testbed.fabric.live.blockfile import PAGE, BlockFormat
from testbed.fabric.live.memory import Memory
from testbed.protocol.layout import BlockLayout

_THREADS = 2
_HOP_OPERATIONS = 8
_HOP_BYTES = 512 * 1024  # the first of a hop waits for its last
_PROBE_BYTES = 64 * PAGE

Operation = Callable[[int, int], None]

DIRECT = "O_DIRECT"
FADVISE = "fadvise"
NO_DEVICE = "no device"


@dataclass(slots=True)
class DiskCounters:
    """What the disk has done. ``device_read_bytes``: what the kernel says this process had fetched from a device."""

    blocks_fetched: int = 0
    fetches_failed: int = 0
    blocks_stored: int = 0
    stores_failed: int = 0
    bytes_served: int = 0
    device_read_bytes: int = 0
    torn_removed: int = 0
    method: str = ""
    last_failure: str = ""


class BlockStore:
    """Blocks of ``layout`` under ``directory``, fetched into and stored from ``memory``.

    ``_THREADS`` hops at once, each of at most ``_HOP_OPERATIONS`` operations, one after the other.

    ``durable`` False leaves out the fsyncs: for blocks that can be made again, as those of a warm start.

    Raises:
        HostError: the directory cannot be used.
    """

    def __init__(self, directory: Path, layout: BlockLayout, memory: Memory, *, durable: bool = True) -> None:
        self._durable = durable
        self._directory = str(directory)
        self._memory = memory
        self._size = layout.full_block_bytes
        self._layers = layout.layers
        self._format = BlockFormat(layout)
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="disk")
        self._hop = aiofiles.os.wrap(self._perform)
        self._hop_operations = max(1, min(_HOP_OPERATIONS, _HOP_BYTES // self._format.file_bytes))
        self._hops: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[Operation, int, int, asyncio.Future[None]]] = deque()
        self._counters = DiskCounters()
        try:
            for k in range(256):
                (directory / f"{k:02x}").mkdir(parents=True, exist_ok=True)
            for torn in directory.glob("??/*.tmp"):  # a crash in the middle of a store
                torn.unlink()
                self._counters.torn_removed += 1
            blockfile.sync_directory(self._directory)
            self._counters.method = probe(directory)
        except OSError as error:
            raise HostError(f"block directory {directory} cannot be used: {error}") from error
        self._direct = self._counters.method == DIRECT
        self._read_bytes_before = device_read_bytes()

    @property
    def method(self) -> str:
        """How reads avoid the page cache: ``O_DIRECT``, ``fadvise``, or ``no device`` (the file system is memory)."""
        return self._counters.method

    @property
    def counters(self) -> DiskCounters:
        """Counts so far; compare ``device_read_bytes`` with ``bytes_served`` to see that reads came from the disk."""
        self._counters.device_read_bytes = device_read_bytes() - self._read_bytes_before
        return self._counters

    def path(self, key: int) -> str:
        """Where a block lies."""
        name = f"{key:016x}"
        return f"{self._directory}/{name[:2]}/{name}.kv"

    async def fetch(self, key: int, offset: int) -> None:
        """Read a block into memory at ``offset``, its seals beside it; memory changes only if all is right.

        Raises:
            HostError: not there, torn, damaged, or the disk fails.
        """
        try:
            await self._submit(self._fetch, key, offset)
        except HostError:
            self._counters.fetches_failed += 1
            raise
        self._counters.blocks_fetched += 1
        self._counters.bytes_served += self._format.file_bytes

    async def store(self, key: int, offset: int) -> None:
        """Make the block in memory at ``offset`` durable, with its seals.

        Raises:
            HostError: the disk is full or fails; nothing of the block is visible then.
        """
        try:
            await self._submit(self._store, key, offset)
        except HostError as error:
            self._counters.stores_failed += 1
            self._counters.last_failure = str(error)
            raise
        self._counters.blocks_stored += 1

    def close(self) -> None:
        """End the threads; what has begun is finished, what waits is not done."""
        self._waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    # --- hops ----------------------------------------------------------------------------------------------------

    def _submit(self, operation: Operation, key: int, offset: int) -> asyncio.Future[None]:
        self._memory.check(offset, self._size)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((operation, key, offset, done))
        self._begin_hops()
        return done

    def _begin_hops(self) -> None:
        while self._waiting and len(self._hops) < _THREADS:
            share = -(-len(self._waiting) // (_THREADS - len(self._hops)))
            count = min(share, self._hop_operations)
            work = [self._waiting.popleft() for _ in range(count)]
            self._hops.add(asyncio.get_running_loop().create_task(self._run_hop(work)))

    async def _run_hop(self, work: list[tuple[Operation, int, int, asyncio.Future[None]]]) -> None:
        outcomes = await self._hop([item[:3] for item in work], executor=self._pool)
        for (_, _, _, done), error in zip(work, outcomes, strict=True):
            if done.cancelled():
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
        self._hops.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        self._begin_hops()

    # --- in the pool's threads -----------------------------------------------------------------------------------

    def _perform(self, work: list[tuple[Operation, int, int]]) -> list[Exception | None]:
        return [self._attempt(operation, key, offset) for operation, key, offset in work]

    @staticmethod
    def _attempt(operation: Operation, key: int, offset: int) -> Exception | None:
        try:
            operation(key, offset)
        except Exception as error:
            return error
        return None

    def _buffer(self) -> memoryview:
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = blockfile.aligned_buffer(self._format.file_bytes)
        return buffer

    def _fetch(self, key: int, offset: int) -> None:
        buffer, expected = self._buffer(), self._format.file_bytes
        try:
            count = blockfile.read_file(self.path(key), buffer, direct=self._direct)
        except FileNotFoundError:
            raise HostError(f"block {key:016x} is not on disk {self._directory}") from None
        except OSError as error:
            raise HostError(f"block {key:016x} cannot be read from disk {self._directory}: {error}") from error
        if count != expected:
            raise HostError(f"block {key:016x} is torn: {count} of {expected} bytes are on disk {self._directory}")
        seals = self._format.check(buffer, key)
        memory, header = self._memory, self._format.header_bytes
        # numpy releases the interpreter lock for a large copy, a memoryview would not
        memory.data[offset : offset + self._size] = np.frombuffer(buffer, np.uint8, self._size, header)
        first = offset // memory.layer_block_bytes
        memory.seals[first : first + self._layers] = seals

    def _store(self, key: int, offset: int) -> None:
        buffer, memory = self._buffer(), self._memory
        first = offset // memory.layer_block_bytes
        payload = memory.view[offset : offset + self._size]
        self._format.pack(buffer, key, memory.seals[first : first + self._layers], payload)
        path = self.path(key)
        # Per thread: two stores of one block at a time must not share a temporary.
        temporary = f"{path}.{threading.get_ident():x}.tmp"
        try:
            blockfile.write_file(path, temporary, buffer, direct=self._direct, durable=self._durable)
        except OSError as error:
            what = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "fails"
            raise HostError(f"block {key:016x} is not stored: disk {self._directory} {what} ({error})") from error


def probe(directory: Path) -> str:
    """Find out, on the very file system, how to read past the page cache; believed is only what the kernel counts.

    A file system may accept O_DIRECT and serve from memory all the same (tmpfs does): then a read of a freshly written
    file does not show among the bytes that this process had fetched from a device.
    """
    path = f"{directory}/.probe-{os.getpid()}.tmp"
    buffer = blockfile.aligned_buffer(_PROBE_BYTES)
    buffer[:] = b"\xa5" * _PROBE_BYTES
    try:
        for method in (DIRECT, FADVISE):
            direct = method == DIRECT
            try:
                blockfile.write_file(path, f"{path}.tmp", buffer, direct=direct, durable=True)
                before = device_read_bytes()
                blockfile.read_file(path, buffer, direct=direct)
            except OSError as error:
                if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                continue  # this file system has no O_DIRECT
            if device_read_bytes() - before >= _PROBE_BYTES:
                return method
        return NO_DEVICE
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def device_read_bytes() -> int:
    """Bytes that this process has caused to be fetched from a storage device (proc(5), ``read_bytes``)."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise HostError("/proc/self/io does not tell read_bytes: reads cannot be shown to come from the disk.")
