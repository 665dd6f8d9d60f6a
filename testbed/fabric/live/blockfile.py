"""The format of a stored block, and the synchronous file operations that one executor hop performs.

A file holds one Full Block::

    header, a multiple of 4096 bytes | Full Block, padded with zeros to a multiple of 4096

Header: magic, version, layout fingerprint, key, number of layers, payload bytes, a checksum of the payload, the seals
of all layers, zeros, and in its last 8 bytes a checksum of all before. Everything is a multiple of 4096 so that
O_DIRECT can read and write the file in one call. A flipped bit on disk shows in the checksums. The seals, which the
computing engine made, are not recomputed here: that happens where the block lands next, and one hash instead of one
per layer keeps the disk's threads from fighting the event loop for the interpreter.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from testbed.errors import HostError
from testbed.protocol.layout import U64, BlockLayout

PAGE = 4096
_MAGIC = b"DPBlock\0"
_VERSION = 1
_HEAD = struct.Struct("<8sIIQQQQ")  # magic, version, layers, layout fingerprint, key, payload bytes, payload checksum
_SUM = struct.Struct("<Q")


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Sizes that follow from a layout."""

    layout: BlockLayout

    @property
    def header_bytes(self) -> int:
        """Header pages."""
        return _round_up(_HEAD.size + 8 * self.layout.layers + _SUM.size)

    @property
    def file_bytes(self) -> int:
        """Size of every block file."""
        return self.header_bytes + _round_up(self.layout.full_block_bytes)

    def pack(self, buffer: memoryview, key: int, seals: U64, payload: memoryview) -> None:
        """Fill ``buffer`` [file_bytes] with a block's file."""
        layout, end = self.layout, self.header_bytes
        size, content = layout.full_block_bytes, xxhash.xxh3_64_intdigest(payload)
        _HEAD.pack_into(buffer, 0, _MAGIC, _VERSION, layout.layers, layout.fingerprint, key, size, content)
        raw = seals.astype("<u8", copy=False).tobytes()
        buffer[_HEAD.size : _HEAD.size + len(raw)] = raw
        buffer[_HEAD.size + len(raw) : end] = bytes(end - _HEAD.size - len(raw))
        _SUM.pack_into(buffer, end - _SUM.size, xxhash.xxh3_64_intdigest(buffer[: end - _SUM.size]))
        buffer[end : end + layout.full_block_bytes] = payload
        buffer[end + layout.full_block_bytes :] = bytes(self.file_bytes - end - layout.full_block_bytes)

    def check(self, buffer: memoryview, key: int) -> U64:
        """Judge a file that was read whole. Result: its seals [layers].

        Raises:
            HostError: torn, damaged, or not the block that it is named.
        """
        layout, end = self.layout, self.header_bytes
        magic, version, layers, fingerprint, stored_key, payload, content = _HEAD.unpack_from(buffer)
        (checksum,) = _SUM.unpack_from(buffer, end - _SUM.size)
        if magic != _MAGIC or version != _VERSION:
            raise HostError(f"block {key:016x}: its file is no block file of version {_VERSION}")
        if checksum != xxhash.xxh3_64_intdigest(buffer[: end - _SUM.size]):
            raise HostError(f"block {key:016x}: its header is damaged")
        if (layers, fingerprint, payload) != (layout.layers, layout.fingerprint, layout.full_block_bytes):
            raise HostError(f"block {key:016x}: stored with layout {fingerprint:016x}, not {layout.fingerprint:016x}")
        if stored_key != key:
            raise HostError(f"block {key:016x}: its file holds block {stored_key:016x}")
        if content != xxhash.xxh3_64_intdigest(buffer[end : end + payload]):
            raise HostError(f"block {key:016x}: its payload is damaged")
        return np.frombuffer(buffer, dtype="<u8", count=layers, offset=_HEAD.size)


def aligned_buffer(size_bytes: int) -> memoryview:
    """Memory that O_DIRECT accepts."""
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def read_file(path: str, buffer: memoryview, *, direct: bool) -> int:
    """Read a file into ``buffer`` with one call, not from the page cache. Result: bytes read.

    Without O_DIRECT the pages are dropped before and after, so that the next read comes from the disk again.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        count = os.readv(fd, [buffer])
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return count
    finally:
        os.close(fd)


def write_file(path: str, temporary: str, buffer: memoryview, *, direct: bool, durable: bool) -> None:
    """Make ``path`` hold ``buffer``, durably and all or nothing: it appears whole or not at all, also after a crash.

    The file is fsynced before the rename, or the name could survive without the bytes; the directory after it, or the
    name itself could be lost, and the index would have been told of a block that is not there. Without ``durable``
    neither is done: for blocks that can be made again.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    fd = os.open(temporary, flags, 0o600)
    try:
        try:
            written = os.writev(fd, [buffer])
            if written != len(buffer):
                raise OSError(errno.ENOSPC, f"only {written} of {len(buffer)} bytes were taken")
            if durable:
                os.fsync(fd)
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
