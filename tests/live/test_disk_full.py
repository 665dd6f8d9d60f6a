"""A disk that is really full: a tiny tmpfs in a sandbox."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from testbed.errors import HostError
from testbed.fabric.live import syscalls
from testbed.fabric.live.blockstore import BlockStore
from testbed.fabric.live.memory import Memory
from testbed.protocol.layout import BlockLayout, seal_pieces
from tests.live.sandboxed import in_sandbox

LAYOUT = BlockLayout(model="full", layers=61, block_tokens=64, bytes_per_token_layer=12)
DISK_BYTES = 1024 * 1024


def fill_the_disk() -> tuple[int, str, int]:
    """Result: blocks stored before it was full, what was said, blocks still readable after it."""

    async def main(directory: Path) -> tuple[int, str, int]:
        memory = Memory(LAYOUT.full_block_bytes, LAYOUT)
        store = BlockStore(directory, LAYOUT, memory)
        stored = 0
        try:
            while True:
                memory.seals[:] = seal_pieces(memory.view, (stored,), 0, LAYOUT.layers, LAYOUT.layer_block_bytes)
                await store.store(stored, 0)
                stored += 1
        except HostError as error:
            reason = str(error)
        for key in range(stored):
            await store.fetch(key, 0)
        assert not list(directory.glob("??/*.tmp")), "no half block stays behind"  # noqa: ASYNC240
        with pytest.raises(HostError, match="is not on disk"):
            await store.fetch(stored, 0)
        readable = store.counters.blocks_fetched
        store.close()
        return stored, reason, readable

    with tempfile.TemporaryDirectory() as folder:
        syscalls.mount("tiny", folder, "tmpfs", 0, f"size={DISK_BYTES}")
        try:
            return asyncio.run(main(Path(folder)))
        finally:
            syscalls.unmount(folder)


@pytest.mark.live
def test_enospc() -> None:
    stored, reason, readable = in_sandbox(fill_the_disk)
    assert 1 < stored < DISK_BYTES / LAYOUT.full_block_bytes
    assert "is full" in reason
    assert readable == stored
