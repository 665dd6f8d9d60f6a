"""How fast one pair of processes moves KV over loopback, seals checked, beside a raw TCP stream of the same run.

Run: ``python tests/bench/bench_dataplane.py``. Target (docs: the live world must not be its own bottleneck): Layer
Blocks of 41,984 bytes (DeepSeek-V3.2, 64 tokens) at 1 GB/s or more. Small Layer Blocks are for information: there the
cost per Layer Block counts, not the bytes.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from testbed.fabric.live.dataplane import DataPlane
from testbed.fabric.live.memory import Memory
from testbed.fabric.live.sockets import Endpoint, SocketOptions
from testbed.protocol.grants import GrantIssuer, GrantRef, GrantTable, Landing
from testbed.protocol.layout import BlockLayout, seal_pieces
from testbed.protocol.machine import Event, Write, WriteCompleted, WriteLanded

TARGET_BYTES_PER_S = 1e9
SOURCE, DESTINATION = "127.0.0.21", "127.0.0.22"


@dataclass(frozen=True)
class LoopbackEndpoint:
    """An endpoint without a device."""

    name: str
    address: str
    device: str | None = None


ENDPOINTS: Mapping[str, Endpoint] = {
    "a": LoopbackEndpoint("a", SOURCE),
    "b": LoopbackEndpoint("b", DESTINATION),
}
WIDE = SocketOptions(receive_buffer_bytes=2 * 1024 * 1024, send_buffer_bytes=2 * 1024 * 1024)


@dataclass(frozen=True)
class Case:
    """``blocks`` pieces of ``piece_layers`` layers per write, ``depth`` writes outstanding; scattered on both sides."""

    name: str
    layout: BlockLayout
    blocks: int
    piece_layers: int
    depth: int
    seconds: float = 2.0

    @property
    def piece_bytes(self) -> int:
        return self.piece_layers * self.layout.layer_block_bytes

    @cache  # noqa: B019 - a handful of cases
    def slots(self, slot: int) -> tuple[int, ...]:
        """Offsets of one write's pieces: every other slot, so that nothing is adjacent."""
        first = slot * 2 * self.blocks
        return tuple((first + 2 * k) * self.piece_bytes for k in range(self.blocks))

    @cache  # noqa: B019
    def landing(self, slot: int) -> Landing:
        return Landing(
            pieces=self.slots(slot),
            piece_bytes=self.piece_bytes,
            keys=tuple(range(self.blocks)),
            layer_begin=0,
            layer_end=self.piece_layers,
        )

    @property
    def memory_bytes(self) -> int:
        return self.depth * 2 * self.blocks * self.piece_bytes


def fill(case: Case, memory: Memory) -> None:
    """Random KV with the right seals."""
    memory.data[:] = np.random.default_rng(1).integers(0, 256, memory.size_bytes, dtype=np.uint8)
    block = case.layout.layer_block_bytes
    for write in range(case.depth):
        for key, at in enumerate(case.slots(write)):
            seals = seal_pieces(memory.view[at : at + case.piece_bytes], (key,), 0, case.piece_layers, block)
            memory.seals[at // block : at // block + case.piece_layers] = seals


async def destination(
    case: Case, line: socket.socket, endpoints: Mapping[str, Endpoint] = ENDPOINTS, options: SocketOptions = WIDE
) -> None:
    """Opens ``depth`` grants and a new one for every write that landed."""
    memory, grants, issuer = Memory(case.memory_bytes, case.layout), GrantTable(), GrantIssuer()
    opened: dict[int, int] = {}

    def grant(write: int) -> None:
        landing = case.landing(write % case.depth)
        ref = issuer.issue("b", landing)
        grants.open(ref.grant_id, ref.epoch, landing)
        opened[ref.grant_id] = write

    def deliver(event: Event) -> None:
        assert isinstance(event, WriteLanded), event
        grant(opened.pop(event.grant_id))

    plane = DataPlane("b", case.layout, memory, grants, endpoints, deliver, options=options)
    plane.listen(endpoints["b"])
    for write in range(case.depth):
        grant(write)
    before = resource.getrusage(resource.RUSAGE_SELF)
    line.send(b"r")
    await asyncio.get_running_loop().run_in_executor(None, line.recv, 1)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    user, system = usage.ru_utime - before.ru_utime, usage.ru_stime - before.ru_stime
    line.send(f"{user:.3f} {system:.3f}".encode())


async def source(
    case: Case, endpoints: Mapping[str, Endpoint] = ENDPOINTS, options: SocketOptions = WIDE
) -> tuple[float, float]:
    """Result: bytes per second, CPU seconds per GB."""
    memory = Memory(case.memory_bytes, case.layout)
    fill(case, memory)
    done = asyncio.get_running_loop().create_future()
    size = case.blocks * case.piece_bytes
    state = {"next": 0, "moved": 0}

    def post() -> None:
        number = state["next"]
        state["next"] += 1
        ref = GrantRef("b", number + 1, 1, size)
        plane.post(Write(number + 1, ref, "a", case.slots(number % case.depth), case.piece_bytes))

    def deliver(event: Event) -> None:
        assert isinstance(event, WriteCompleted), event
        state["moved"] += size
        if time.perf_counter() < end:
            post()
        elif not done.done():
            done.set_result(None)

    plane = DataPlane("a", case.layout, memory, GrantTable(), endpoints, deliver, options=options, log=str)
    begin, cpu = time.perf_counter(), time.process_time()
    end = begin + case.seconds
    for _ in range(case.depth):
        post()
    await done
    took = time.perf_counter() - begin
    return state["moved"] / took, (time.process_time() - cpu) / (state["moved"] / 1e9)


def forked(child: Callable[[socket.socket], None], parent: Callable[[socket.socket], None]) -> None:
    """Run ``child`` in another process, ``parent`` here."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            child(theirs)
        finally:
            os._exit(0)
    theirs.close()
    ours.recv(1)
    parent(ours)
    os.waitpid(pid, 0)


def run(case: Case) -> float:
    """Print one case; bytes per second."""
    result = 0.0

    def drive(line: socket.socket) -> None:
        nonlocal result
        result, cpu = asyncio.run(source(case))
        line.send(b"s")
        user, system = (float(text) / (result * case.seconds / 1e9) for text in line.recv(64).split())
        rate = result / case.layout.layer_block_bytes
        print(
            f"{case.name:34} {result / 1e9:6.2f} GB/s {rate / 1e3:8.1f} K Layer Blocks/s   "
            f"CPU s/GB: source {cpu:.2f}, destination {user:.2f} user + {system:.2f} system"
        )

    forked(lambda line: asyncio.run(destination(case, line)), drive)
    return result


def raw_tcp(seconds: float = 2.0, chunk: int = 256 * 1024) -> float:
    """A plain stream between two processes, the reference of this host at this moment."""
    listener = socket.create_server((DESTINATION, 7470))
    result = 0.0

    def child(line: socket.socket) -> None:
        line.send(b"r")
        peer, _ = listener.accept()
        buffer = bytearray(chunk)
        while peer.recv_into(buffer):
            pass

    def parent(line: socket.socket) -> None:
        nonlocal result
        with socket.create_connection((DESTINATION, 7470)) as sock:
            data, sent, begin = bytes(chunk), 0, time.perf_counter()
            while time.perf_counter() - begin < seconds:
                sent += sock.send(data)
            result = sent / (time.perf_counter() - begin)

    forked(child, parent)
    listener.close()
    print(f"{'raw TCP stream, 256 KiB':34} {result / 1e9:6.2f} GB/s")
    return result


def layout(bytes_per_token_layer: int) -> BlockLayout:
    """61 layers of 64 tokens."""
    return BlockLayout(model="bench", layers=61, block_tokens=64, bytes_per_token_layer=bytes_per_token_layer)


def main() -> int:
    """Exit code 1 below the target."""
    raw = raw_tcp()
    large = run(Case("41,984 B Layer Blocks, 1 layer", layout(656), blocks=64, piece_layers=1, depth=4))
    run(Case("Full Blocks of 61 x 41,984 B", layout(656), blocks=2, piece_layers=61, depth=4))
    run(Case("1,536 B Layer Blocks, 1 layer", layout(24), blocks=256, piece_layers=1, depth=8))
    run(Case("256 B Layer Blocks, 1 layer", layout(4), blocks=512, piece_layers=1, depth=8))
    run(Case("Full Blocks of 61 x 256 B", layout(4), blocks=16, piece_layers=61, depth=8))
    print(f"{large / raw:.0%} of the raw stream; target {TARGET_BYTES_PER_S / 1e9:.0f} GB/s")
    return 0 if large >= TARGET_BYTES_PER_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
