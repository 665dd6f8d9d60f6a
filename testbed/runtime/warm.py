"""A warm start: the KV that trajectories joined in the middle would have left in storage.

A scenario with ``workload.start_turn`` begins where every agent has a past. Its blocks are computed here, by the same
KV function, and written to storage before the clock starts: real files, found by the run as any other block.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from testbed.errors import HostError
from testbed.fabric.live.blockstore import BlockStore
from testbed.fabric.live.memory import Memory
from testbed.kvmodel.device import KvDevice
from testbed.protocol.layout import U32, BlockLayout
from testbed.protocol.placement import replicas_of
from testbed.runtime.past import new_entries, warm_entries, warm_prefixes
from testbed.workload.trajectory import AgentScript

_BATCH = 32  # blocks written at once
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmBlocks:
    """Blocks in storage before a run: ``keys`` of all, one copy of each in ``directory``; those that the index knows
    from the start are ``entries``, ``(key, parent)`` each."""

    entries: tuple[tuple[int, int], ...]
    keys: tuple[int, ...]
    directory: Path


def write_warm_blocks(
    scripts: Sequence[AgentScript],
    layout: BlockLayout,
    vocab_size: int,
    directory: Path,
    progress: Callable[[float], None],
    ahead: Sequence[U32] = (),
) -> WarmBlocks:
    """Compute and store the past of all agents once; ``place`` then gives every system its own copy.

    ``ahead``: tokens of whole blocks that are stored too, although the index does not know them yet.

    Raises:
        HostError: the disk is full.
    """
    prefixes = [*warm_prefixes(scripts, layout), *ahead]
    keys = asyncio.run(_write(prefixes, layout, vocab_size, directory, progress))
    return WarmBlocks(entries=warm_entries(scripts, layout), keys=keys, directory=directory)


async def _write(
    prefixes: list[U32], layout: BlockLayout, vocab_size: int, directory: Path, progress: Callable[[float], None]
) -> tuple[int, ...]:
    entries: dict[int, int] = {}
    longest = max((len(p) for p in prefixes), default=0) // layout.block_tokens
    if not longest:
        return ()
    memory = Memory(longest * layout.full_block_bytes, layout)
    pages = tuple(k * layout.full_block_bytes for k in range(longest))
    device = KvDevice(layout, vocab_size, memory.data, memory.seals, materialise=True)
    store = BlockStore(directory, layout, memory, durable=False)  # made anew for every run: no need to sync
    try:
        for done, prefix in enumerate(prefixes):
            progress(done / len(prefixes))
            keys = layout.keys(prefix)
            device.load_sequence("warm", np.asarray(prefix, dtype="<u4").tobytes(), pages[: len(keys)])
            new = new_entries(keys, entries)
            for at in range(0, len(new), _BATCH):
                await asyncio.gather(*(store.store(keys[k], pages[k]) for k in new[at : at + _BATCH]))
    finally:
        store.close()
    return tuple(entries)


def place(warm: WarmBlocks, servers: Sequence[str], replicas: int, storage: Path) -> None:
    """Give each server its replicas: links to the one copy (a store never writes into an existing file).

    Where the file system has no links, or not so many, they are copies.

    Raises:
        HostError: the file system refuses.
    """
    paths = {int(path.stem, 16): path.relative_to(warm.directory) for path in warm.directory.rglob("*.kv")}
    try:
        for key in warm.keys:
            for server in replicas_of(key, servers, replicas):
                target = storage / server / paths[key]
                target.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(warm.directory / paths[key], target)
    except OSError as error:
        raise HostError(f"cannot place warm blocks under {storage}: {error.strerror}.") from error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
