"""Roles in their namespaces: real writes through shaped NICs, from one process to another."""

from __future__ import annotations

import asyncio
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed.fabric.live.forkserver import RoleGroup
from testbed.fabric.live.memory import Memory
from testbed.fabric.live.network import Network
from testbed.fabric.live.roleprocess import RoleSpec
from testbed.fabric.live.roles import LiveCluster, LiveRole, RoleContext
from testbed.protocol import machine as m
from testbed.protocol.grants import GrantIssuer, Landing
from testbed.protocol.layout import BlockLayout, seal_pieces
from testbed.protocol.messages import LoadLayers
from tests.live.sandboxed import MBIT, in_sandbox, small_spec

LAYOUT = BlockLayout(model="live", layers=8, block_tokens=64, bytes_per_token_layer=8)
BLOCKS = 64  # of a write: one layer of each, 32 KiB, scattered
DEPTH = 8
LINK_MBIT = 100


class Source:
    """Writes one layer of all its blocks whenever it is asked."""

    def __init__(self, context: RoleContext) -> None:
        self.role = context.name
        self._writes = 0

    def handle(self, event: m.Event, now_ns: int) -> list[m.Action]:
        if isinstance(event, m.Received):
            message = event.message
            assert isinstance(message, LoadLayers)
            self._writes += 1
            offsets = piece_offsets(message.layer_begin)
            return [m.Write(self._writes, message.grant, f"{self.role}.cnic0", offsets, LAYOUT.layer_block_bytes)]
        assert isinstance(event, m.Started | m.WriteCompleted), event
        return []


class Sink:
    """Keeps ``DEPTH`` grants open until ``count`` writes have landed, then reports when they began and ended."""

    def __init__(self, context: RoleContext, source: str, count: int) -> None:
        self.role = context.name
        self._progress = context.progress
        self._issuer = GrantIssuer(endpoint_epoch=context.incarnation)
        self._source = source
        self._count = count
        self._asked = self._landed = self._started_ns = 0

    def handle(self, event: m.Event, now_ns: int) -> list[m.Action]:
        if isinstance(event, m.Started):
            self._started_ns = now_ns
            return [action for _ in range(DEPTH) for action in self._ask()]
        assert isinstance(event, m.WriteLanded), event
        self._landed += 1
        if self._landed == self._count:
            self._progress([self._started_ns, now_ns])
        return self._ask() if self._asked < self._count else []

    def _ask(self) -> list[m.Action]:
        layer = self._asked % LAYOUT.layers
        self._asked += 1
        landing = Landing(
            pieces=piece_offsets(layer),
            piece_bytes=LAYOUT.layer_block_bytes,
            keys=tuple(range(BLOCKS)),
            layer_begin=layer,
            layer_end=layer + 1,
        )
        ref = self._issuer.issue(f"{self.role}.cnic" if "gpu" in self.role else f"{self.role}.cnic0", landing)
        return [m.OpenGrant(ref, landing), m.Send(self._source, LoadLayers("r", 0, BLOCKS, layer, layer + 1, ref))]


def piece_offsets(layer: int) -> tuple[int, ...]:
    """Layer ``layer`` of every block, in pages one Full Block apart."""
    page, first = LAYOUT.full_block_bytes, layer * LAYOUT.layer_block_bytes
    return tuple(range(first, first + BLOCKS * page, page))


def run(sinks: tuple[str, ...], count: int) -> dict[str, Any]:
    """``pe0`` writes to every sink at once. Result: seconds that all took, and the reports."""
    network = Network(small_spec(mbit=LINK_MBIT))
    network.build()
    roles = ("pe0", *sinks)
    cluster = LiveCluster(
        layout=LAYOUT,
        address_book={role: (network.endpoints[f"{role}.control"].address, 7000) for role in roles},
        endpoints=network.endpoints,
    )

    def build(context: RoleContext) -> LiveRole:
        memory = Memory(BLOCKS * LAYOUT.full_block_bytes, LAYOUT)
        if context.name == "pe0":
            memory.data[:] = np.random.default_rng(3).integers(0, 256, memory.size_bytes, dtype=np.uint8)
            memory.seals[:] = seal_pieces(memory.view, range(BLOCKS), 0, LAYOUT.layers, LAYOUT.layer_block_bytes)
            return LiveRole(Source(context), context, cluster, memory=memory)
        listen = [f"{context.name}.cnic" if "gpu" in context.name else f"{context.name}.cnic0"]
        return LiveRole(Sink(context, "pe0", count), context, cluster, memory=memory, listen=listen)

    async def main() -> dict[str, Any]:
        specs = [RoleSpec(name=role, enter=partial(network.enter, role), build=build) for role in roles]
        with tempfile.TemporaryDirectory() as folder:
            async with RoleGroup(specs, Path(folder)) as group:
                await group.ready()
                await group.start()
                said = [(await asyncio.wait_for(group.next_progress(), 30))[1] for _ in sinks]
                times = [int(at_ns) for span in said if isinstance(span, list) for at_ns in span]
                took_s = (max(times) - min(times)) / 1e9  # the sinks do not begin in one instant
                return {"took_s": took_s, "reports": await group.stop()}

    begin = time.monotonic()
    result = asyncio.run(main())
    return {**result, "wall": time.monotonic() - begin}


@pytest.mark.live
@pytest.mark.parametrize("sinks", [("pe0gpu0",), ("de0",), ("pe0gpu0", "de0")], ids="+".join)
def test_writes_through_a_shaped_nic(sinks: tuple[str, ...]) -> None:
    """A local H2D and a transfer to another node both take the CNIC's rate, and share it; seals hold."""
    count = 48
    result = in_sandbox(partial(run, sinks, count))
    size = count * BLOCKS * LAYOUT.layer_block_bytes
    total_mbit = len(sinks) * size * 8 / result["took_s"] / MBIT
    assert total_mbit < LINK_MBIT, result
    for sink in sinks:
        data = result["reports"][sink]["data"]
        assert data["bytes_landed"] == size
        assert data["writes_corrupt"] == data["writes_refused"] == 0
