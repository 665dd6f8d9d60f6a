# ruff: noqa: ASYNC222, ASYNC230, ASYNC240 - the test has the event loop to itself
"""Blocks on disk: durable, exact or refused, and never served from the page cache without saying so."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testbed.errors import BugError, HostError
from testbed.fabric.live import blockfile, blockstore
from testbed.fabric.live.blockfile import PAGE, BlockFormat
from testbed.fabric.live.blockstore import BlockStore
from testbed.fabric.live.memory import Memory
from testbed.protocol.layout import BlockLayout, seal_pieces

LAYOUT = BlockLayout(model="disk", layers=61, block_tokens=64, bytes_per_token_layer=12)
MANY_LAYERS = BlockLayout(model="deep", layers=700, block_tokens=3, bytes_per_token_layer=5)
KEY = 0xABCDEF0123456789


def memory_with_block(layout: BlockLayout, key: int = KEY) -> Memory:
    """Page 0 holds the block ``key``, sealed; page 1 is free."""
    memory, full = Memory(2 * layout.full_block_bytes, layout), layout.full_block_bytes
    memory.data[:full] = np.random.default_rng(key).integers(0, 256, full, dtype=np.uint8)
    memory.seals[: layout.layers] = seal_pieces(memory.view[:full], (key,), 0, layout.layers, layout.layer_block_bytes)
    return memory


@pytest.fixture
def memory() -> Memory:
    return memory_with_block(LAYOUT)


@pytest.fixture
def store(tmp_path: Path, memory: Memory) -> Iterator[BlockStore]:
    it = BlockStore(tmp_path / "disk", LAYOUT, memory)
    yield it
    it.close()


@pytest.mark.parametrize("layout", [LAYOUT, MANY_LAYERS], ids=lambda layout: layout.model)
async def test_what_is_stored_is_fetched(tmp_path: Path, layout: BlockLayout) -> None:
    memory, full = memory_with_block(layout), layout.full_block_bytes
    store = BlockStore(tmp_path, layout, memory)
    await store.store(KEY, 0)
    await store.fetch(KEY, full)
    assert memory.view[:full] == memory.view[full:]
    assert (memory.seals[: layout.layers] == memory.seals[layout.layers :]).all()
    path = Path(store.path(KEY))
    assert path == tmp_path / "ab" / "abcdef0123456789.kv"
    assert path.stat().st_size == BlockFormat(layout).file_bytes
    assert path.stat().st_size % PAGE == 0
    store.close()
    again = BlockStore(tmp_path, layout, memory_with_block(layout, key=1))  # after a restart
    await again.fetch(KEY, full)
    again.close()


async def test_a_block_that_is_not_there(store: BlockStore) -> None:
    with pytest.raises(HostError, match="block 0000000000000005 is not on disk"):
        await store.fetch(5, 0)
    assert store.counters.fetches_failed == 1


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (BlockFormat(LAYOUT).header_bytes + 5 * LAYOUT.layer_block_bytes + 7, "payload is damaged"),
        (BlockFormat(LAYOUT).header_bytes + LAYOUT.full_block_bytes - 1, "payload is damaged"),
        (40, "header is damaged"),
        (0, "no block file"),
        (PAGE - 1, "header is damaged"),
    ],
)
async def test_bit_rot(store: BlockStore, memory: Memory, where: int, said: str) -> None:
    await store.store(KEY, 0)
    with Path(store.path(KEY)).open("r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 0x10]))
    before = memory.data.copy()
    with pytest.raises(HostError, match=said):
        await store.fetch(KEY, LAYOUT.full_block_bytes)
    assert (memory.data == before).all(), "memory holds only what was right"


@pytest.mark.parametrize("size", [0, 100, PAGE, PAGE + 1, BlockFormat(LAYOUT).file_bytes - PAGE])
async def test_a_torn_file(store: BlockStore, size: int) -> None:
    await store.store(KEY, 0)
    os.truncate(store.path(KEY), size)
    with pytest.raises(HostError, match="is torn"):
        await store.fetch(KEY, 0)


async def test_a_file_under_another_name(store: BlockStore) -> None:
    await store.store(KEY, 0)
    os.rename(store.path(KEY), store.path(KEY + 1))
    with pytest.raises(HostError, match="holds block abcdef0123456789"):
        await store.fetch(KEY + 1, 0)


async def test_a_file_of_another_layout(tmp_path: Path) -> None:
    other = BlockLayout(model="other", layers=61, block_tokens=64, bytes_per_token_layer=12)
    one, two = (BlockStore(tmp_path, layout, memory_with_block(layout)) for layout in (other, LAYOUT))
    await one.store(KEY, 0)
    with pytest.raises(HostError, match="stored with layout"):
        await two.fetch(KEY, 0)
    one.close()
    two.close()


async def test_bad_seals_in_memory_come_back_as_bad(store: BlockStore, memory: Memory) -> None:
    """A block torn between landing and storing: disk keeps it as it is, and it is refused where it lands next."""
    memory.data[3 * LAYOUT.layer_block_bytes] ^= 1
    await store.store(KEY, 0)
    await store.fetch(KEY, LAYOUT.full_block_bytes)
    again = memory.view[LAYOUT.full_block_bytes :]
    computed = seal_pieces(again, (KEY,), 0, LAYOUT.layers, LAYOUT.layer_block_bytes)
    stored = memory.seals[LAYOUT.layers :].tolist()
    assert [k for k in range(LAYOUT.layers) if stored[k] != computed[k]] == [3]


async def test_half_written_temporaries_go_at_start(tmp_path: Path, memory: Memory) -> None:
    (tmp_path / "ab").mkdir()
    torn = tmp_path / "ab" / "abcdef0123456789.kv.7f.tmp"
    torn.write_bytes(b"half a block")
    store = BlockStore(tmp_path, LAYOUT, memory)
    assert not torn.exists()
    assert store.counters.torn_removed == 1
    with pytest.raises(HostError, match="is not on disk"):
        await store.fetch(KEY, 0)
    store.close()


@pytest.mark.parametrize("when", ["writev", "fsync", "rename", "directory"])
async def test_a_full_or_failing_disk(store: BlockStore, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC if when == "writev" else errno.EIO, os.strerror(errno.ENOSPC))

    target = (blockfile, "sync_directory") if when == "directory" else (os, when)
    monkeypatch.setattr(*target, fail)
    with pytest.raises(HostError, match="is full" if when == "writev" else "fails") as caught:
        await store.store(KEY, 0)
    monkeypatch.undo()
    assert str(store._directory) in str(caught.value)
    assert store.counters.stores_failed == 1
    assert not list(Path(store._directory).glob("??/*.tmp"))
    if when != "directory":
        assert not Path(store.path(KEY)).exists(), "nothing visible that is not durable"
    await store.store(KEY, 0)
    await store.fetch(KEY, 0)


async def test_a_store_is_synced_file_then_name(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])
    for durable, expected in ((True, ["fsync", "rename", "fsync"]), (False, ["rename"])):
        store = BlockStore(tmp_path, LAYOUT, memory, durable=durable)
        calls.clear()
        await store.store(KEY, 0)
        assert calls == expected
        await store.fetch(KEY, 0)
        store.close()


async def test_a_short_write_is_a_full_disk(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, buffers: real(fd, [buffers[0][:PAGE]]))
    with pytest.raises(HostError, match="is full"):
        await store.store(KEY, 0)
    assert not Path(store.path(KEY)).exists()


async def test_killed_in_the_middle_of_a_store(tmp_path: Path, memory: Memory) -> None:
    """SIGKILL before the rename: the name never appears, and a restart removes what was left."""
    BlockStore(tmp_path, LAYOUT, memory).close()
    pid = os.fork()
    if pid == 0:
        blockfile.os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        buffer = blockfile.aligned_buffer(BlockFormat(LAYOUT).file_bytes)
        path = f"{tmp_path}/ab/{KEY:016x}.kv"
        blockfile.write_file(path, f"{path}.1.tmp", buffer, direct=False, durable=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.glob("ab/*")) == [tmp_path / "ab" / f"{KEY:016x}.kv.1.tmp"]
    store = BlockStore(tmp_path, LAYOUT, memory)
    assert not list(tmp_path.glob("ab/*"))
    store.close()


async def test_reads_come_from_the_device(store: BlockStore) -> None:
    """The kernel counts at least as many bytes from a device as were served: none came from the page cache."""
    if store.method == blockstore.NO_DEVICE:
        pytest.skip(f"{store._directory} is memory: its reads cannot come from a device")
    await store.store(KEY, 0)
    served = 0
    before = store.counters.device_read_bytes
    for _ in range(5):
        await store.fetch(KEY, 0)
        served += BlockFormat(LAYOUT).file_bytes
    assert store.counters.device_read_bytes - before >= served
    assert store.counters.bytes_served == served


async def test_fadvise_where_there_is_no_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def without_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest)

    if blockstore.probe(tmp_path) == blockstore.NO_DEVICE:
        pytest.skip(f"{tmp_path} is memory")
    monkeypatch.setattr(os, "open", without_direct)
    memory = memory_with_block(LAYOUT)
    store = BlockStore(tmp_path, LAYOUT, memory)
    assert store.method == blockstore.FADVISE
    await store.store(KEY, 0)
    for _ in range(3):
        await store.fetch(KEY, LAYOUT.full_block_bytes)
    assert store.counters.device_read_bytes >= store.counters.bytes_served > 0
    store.close()


def test_tmpfs_is_told_apart() -> None:
    """tmpfs accepts O_DIRECT and serves from memory."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no writable /dev/shm on this host")
    assert blockstore.probe(shm) == blockstore.NO_DEVICE


async def test_many_at_once_are_bounded_and_all_done(store: BlockStore, memory: Memory) -> None:
    await store.store(KEY, 0)
    outcomes = await asyncio.gather(
        *(store.fetch(KEY if k % 3 else k, LAYOUT.full_block_bytes) for k in range(90)), return_exceptions=True
    )
    assert [isinstance(outcome, HostError) for outcome in outcomes] == [k % 3 == 0 for k in range(90)]
    assert store.counters.blocks_fetched == 60
    assert len(store._hops) == 0


async def test_memory_that_is_not_there_is_our_own_bug(store: BlockStore) -> None:
    with pytest.raises(BugError):
        await store.fetch(KEY, 2 * LAYOUT.full_block_bytes)


def test_a_directory_that_cannot_be_used(tmp_path: Path, memory: Memory) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot be used"):
        BlockStore(tmp_path / "file", LAYOUT, memory)
