"""One-sided writes over real sockets: the right bytes land, and nothing else does.

Covers the traps of the fault list that live here: consumed-reference-reuse, stale-block-reference, late-write,
layout-changed, bit-rot on the way, malformed-peer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from testbed.errors import BugError
from testbed.fabric.live import wire
from testbed.fabric.live.sockets import DATA_PORT, SocketOptions
from testbed.fabric.live.wire import AckReader, AckStatus, WriteHeader
from testbed.protocol.grants import GrantRef, Landing
from testbed.protocol.layout import BlockLayout
from testbed.protocol.machine import LandingRefused, Write, WriteCompleted, WriteFailed, WriteLanded
from tests.support.loopback import Pair, landing

SMALL = BlockLayout(model="small", layers=6, block_tokens=64, bytes_per_token_layer=4)
LARGE = BlockLayout(model="large", layers=4, block_tokens=64, bytes_per_token_layer=656)
ODD = BlockLayout(model="odd", layers=5, block_tokens=7, bytes_per_token_layer=31)
SENTINEL = 0xEE


@contextmanager
def pair(layout: BlockLayout, **kwargs: object) -> Iterator[Pair]:
    it = Pair(layout, **kwargs)  # type: ignore[arg-type]
    it.b.memory.data[:] = SENTINEL
    try:
        yield it
    finally:
        it.close()


def untouched(it: Pair, but: Landing | None = None) -> bool:
    """Whether the destination holds only sentinels outside ``but``."""
    data = it.b.memory.data.copy()
    if but is not None:
        for at in but.pieces:
            data[at : at + but.piece_bytes] = SENTINEL
    return bool((data == SENTINEL).all())


@pytest.mark.parametrize("layout", [SMALL, LARGE, ODD], ids=lambda layout: layout.model)
@pytest.mark.parametrize("layers", [None, (1, 2), (1, 3)], ids=["full", "one-layer", "two-layers"])
@pytest.mark.parametrize("slots", [(3,), (0, 1, 2, 3), (9, 2, 40, 41, 7), tuple(range(63, 0, -2))], ids=len)
async def test_right_bytes_land(layout: BlockLayout, layers: tuple[int, int] | None, slots: tuple[int, ...]) -> None:
    with pair(layout) as it:
        there = landing(layout, slots, layers=layers)
        here = dataclasses.replace(there, pieces=there.pieces[::-1])
        it.a.fill(here)
        number = it.post(it.b.grant(there), here)
        assert (await it.b.next(WriteLanded)).grant_id == 1
        assert (await it.a.next(WriteCompleted)).write_id == number
        block = layout.layer_block_bytes
        for source, target in zip(here.pieces, there.pieces, strict=True):
            size = there.piece_bytes
            assert it.a.memory.view[source : source + size] == it.b.memory.view[target : target + size]
            seals = it.a.memory.seals[source // block : (source + size) // block]
            assert (seals == it.b.memory.seals[target // block : (target + size) // block]).all()
        assert untouched(it, but=there)
        assert len(it.b.grants) == 0


async def test_many_writes_land_in_order_through_one_connection() -> None:
    with pair(SMALL) as it:
        numbers = []
        for k in range(300):
            there = landing(SMALL, (k % 64,), first_key=k)
            if k < 64:
                it.a.fill(there, seed=k)
            else:
                it.a.fill(dataclasses.replace(there, keys=(k,)), seed=k)
            numbers.append(it.post(it.b.grant(there), there))
            if k % 16 == 15:  # the source's slots are reused after they have been sent
                for number in numbers[-16:]:
                    assert (await it.a.next(WriteCompleted)).write_id == number
        for number in numbers[288:]:
            assert (await it.a.next(WriteCompleted)).write_id == number
        assert [(await it.b.next(WriteLanded)).grant_id for _ in range(300)] == list(range(1, 301))
        assert it.a.plane.outstanding == 0


async def refused(it: Pair, ref: GrantRef, here: Landing, reason: str) -> None:
    """The write fails at the source for ``reason``, changes nothing, and does not break the connection."""
    it.post(ref, here)
    failed = await it.a.next(WriteFailed)
    assert reason in failed.reason
    assert untouched(it)
    good = landing(SMALL, (50,), first_key=99)
    it.a.fill(good)
    it.post(it.b.grant(good), good)
    await it.b.next(WriteLanded)
    await it.a.next(WriteCompleted)


async def test_stale_epoch_is_refused() -> None:
    with pair(SMALL) as it:
        here = landing(SMALL, (1, 2))
        it.a.fill(here)
        ref = it.b.grant(here)
        await refused(it, GrantRef(ref.endpoint, ref.grant_id, ref.epoch + 1, ref.size_bytes), here, "epoch")


async def test_unknown_grant_is_refused() -> None:
    with pair(SMALL) as it:
        here = landing(SMALL, (1, 2))
        it.a.fill(here)
        await refused(it, GrantRef("b", 777, 1, 2 * SMALL.full_block_bytes), here, "grant 777 is not open")
        assert it.b.plane.counters.writes_refused == 1


async def test_closed_grant_is_refused() -> None:
    with pair(SMALL) as it:
        here = landing(SMALL, (1, 2))
        it.a.fill(here)
        ref = it.b.grant(here)
        it.b.grants.close(ref.grant_id)
        await refused(it, ref, here, "not open")


async def test_another_size_is_refused() -> None:
    with pair(SMALL) as it:
        ref = it.b.grant(landing(SMALL, (1, 2)))
        here = landing(SMALL, (1,))
        it.a.fill(here)
        await refused(it, GrantRef("b", ref.grant_id, ref.epoch, SMALL.full_block_bytes), here, "is for")


async def test_a_grant_is_used_once() -> None:
    with pair(SMALL) as it:
        here = landing(SMALL, (1, 2))
        it.a.fill(here)
        ref = it.b.grant(here)
        it.post(ref, here)
        it.post(ref, here)
        await it.a.next(WriteCompleted)
        assert "not open" in (await it.a.next(WriteFailed)).reason
        await it.b.next(WriteLanded)
        assert it.b.events.empty()


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=lambda layout: layout.model)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("flipped byte", "block 0000000000000003 layer 1"),
        ("wrong block", "block 0000000000000009 layer 0"),
        ("wrong layer", "block 0000000000000001 layer 0"),
        ("wrong order", "block 0000000000000001 layer 0"),
        ("forged seal", "block 0000000000000002 layer 2"),
    ],
)
async def test_what_is_not_expected_there_is_refused(layout: BlockLayout, what: str, said: str) -> None:
    with pair(layout) as it:
        block = layout.layer_block_bytes
        there = landing(layout, (5, 6, 8), layers=(0, 3))
        sent = there
        if what == "wrong layer":
            sent = dataclasses.replace(there, layer_begin=1, layer_end=4)
        it.a.fill(sent)
        if what == "flipped byte":
            it.a.memory.data[sent.pieces[2] + block + 17] ^= 1
        if what == "wrong block":
            there = dataclasses.replace(there, keys=(1, 9, 3))
        if what == "wrong order":
            sent = dataclasses.replace(sent, pieces=sent.pieces[::-1])
        if what == "forged seal":
            it.a.memory.seals[sent.pieces[1] // block + 2] ^= np.uint64(1)
        ref = it.b.grant(there)
        it.post(ref, sent)
        landed = await it.b.next(LandingRefused)
        assert landed.grant_id == ref.grant_id
        assert said in landed.reason
        assert said in (await it.a.next(WriteFailed)).reason
        assert len(it.b.grants) == 0, "the grant is used up"
        assert not it.b.memory.seals.any(), "no seal is kept of what was refused"


# --- a peer that speaks the wire by hand -----------------------------------------------------------------------------


class RawPeer:
    """A source without a data plane."""

    def __init__(self, it: Pair) -> None:
        self._loop = asyncio.get_running_loop()
        self._it = it
        self._acks = AckReader()
        self.socket = socket.socket()
        self.socket.setblocking(False)

    async def __aenter__(self) -> RawPeer:
        await self._loop.sock_connect(self.socket, (self._it.endpoints["b"].address, DATA_PORT))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.socket, data)

    async def ack(self) -> wire.Ack:
        while True:
            data = await asyncio.wait_for(self._loop.sock_recv(self.socket, 1), 5)
            assert data, "closed"
            for ack in self._acks.feed(data):
                return ack

    async def closed(self) -> bool:
        try:
            while await asyncio.wait_for(self._loop.sock_recv(self.socket, 4096), 5):
                pass
        except ConnectionResetError:
            pass
        return True

    async def hello(self) -> None:
        await self.send(wire.pack_hello("raw", self._it.b.layout.fingerprint))
        assert (await self.ack()).status is AckStatus.WELCOME


def write_bytes(it: Pair, ref: GrantRef, here: Landing) -> bytes:
    """A write of the source's pieces as it goes over the wire."""
    memory, block = it.a.memory, it.a.layout.layer_block_bytes
    data = wire.pack_header(WriteHeader(ref.epoch, ref.grant_id, 5, ref.size_bytes))
    data += b"".join(memory.view[at : at + here.piece_bytes] for at in here.pieces)
    return data + b"".join(memory.seals[at // block : (at + here.piece_bytes) // block].tobytes() for at in here.pieces)


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until something is true."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - memory has no event to wait for
            await asyncio.sleep(0)


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=lambda layout: layout.model)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
async def test_a_grant_closed_in_mid_write_protects_reused_memory(layout: BlockLayout, share: float) -> None:
    options = SocketOptions(receive_buffer_bytes=16 * 1024)  # wake early
    with pair(layout, options=options) as it:
        there = landing(layout, tuple(range(1, 64, 2)))
        it.a.fill(there)
        ref = it.b.grant(there)
        data = write_bytes(it, ref, there)
        cut = int(len(data) * share)
        async with RawPeer(it) as peer:
            await peer.hello()
            await peer.send(data[:cut])
            await until(lambda: not untouched(it))
            it.b.grants.close(ref.grant_id)
            it.b.memory.data[:] = SENTINEL  # somebody else's bytes by now
            await peer.send(data[cut:])
            ack = await peer.ack()
        assert ack.status is AckStatus.REFUSED
        assert "closed" in ack.reason
        assert untouched(it)
        assert it.b.events.empty()
        assert it.b.plane.counters.writes_refused == 1


async def test_a_connection_lost_in_mid_write_uses_up_the_grant() -> None:
    with pair(SMALL) as it:
        there = landing(SMALL, (1, 2, 3))
        it.a.fill(there)
        ref = it.b.grant(there)
        async with RawPeer(it) as peer:
            await peer.hello()
            await peer.send(write_bytes(it, ref, there)[:-1])
        lost = await it.b.next(LandingRefused)
        assert lost.grant_id == ref.grant_id
        assert "middle of a write" in lost.reason
        assert len(it.b.grants) == 0
        assert it.b.plane.counters.connections_lost == 1


async def test_byte_by_byte() -> None:
    with pair(ODD) as it:
        there = landing(ODD, (3, 1), layers=(0, 2))
        it.a.fill(there)
        data = write_bytes(it, it.b.grant(there), there) + write_bytes(it, it.b.grant(there), there)
        async with RawPeer(it) as peer:
            peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await peer.hello()
            for k in range(len(data)):
                await peer.send(data[k : k + 1])
            assert (await peer.ack()).status is AckStatus.TAKEN
            assert (await peer.ack()).status is AckStatus.TAKEN
        await it.b.next(WriteLanded)


async def test_another_layout_is_refused_at_hello() -> None:
    with pair(SMALL, theirs=ODD) as it:
        here = landing(SMALL, (1,))
        it.a.fill(here)
        it.post(GrantRef("b", 1, 1, SMALL.full_block_bytes), here)
        reason = (await it.a.next(WriteFailed)).reason
        assert f"{SMALL.fingerprint:016x}" in reason
        assert f"{ODD.fingerprint:016x}" in reason
        assert it.b.plane.counters.connections_refused == 1
        assert untouched(it)


async def test_another_version_is_refused_at_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(SMALL) as it:
        monkeypatch.setattr(wire, "VERSION", 99)
        hello = wire.pack_hello("raw", SMALL.fingerprint)
        monkeypatch.undo()
        async with RawPeer(it) as peer:
            await peer.send(hello)
            ack = await peer.ack()
            assert ack.status is AckStatus.REFUSED
            assert "version 99" in ack.reason
            assert await peer.closed()


async def test_nobody_listens() -> None:
    with pair(SMALL, listen=False) as it:
        here = landing(SMALL, (1,))
        numbers = [it.post(GrantRef("b", k, 1, SMALL.full_block_bytes), here) for k in range(3)]
        for number in numbers:
            failed = await it.a.next(WriteFailed)
            assert failed.write_id == number
            assert "Connection refused" in failed.reason
        it.b.plane.listen(it.endpoints["b"])  # a later post dials again
        it.a.fill(here)
        it.post(it.b.grant(here), here)
        await it.a.next(WriteCompleted)


async def test_the_destination_goes_away() -> None:
    with pair(SMALL) as it:
        here = landing(SMALL, (1,))
        it.a.fill(here)
        it.post(it.b.grant(here), here)
        await it.a.next(WriteCompleted)
        it.b.plane.close()
        it.post(it.b.grant(here), here)
        assert "a>b" in (await it.a.next(WriteFailed)).reason
        assert it.a.plane.outstanding == 0


@pytest.mark.parametrize("seed", range(6))
async def test_random_bytes_close_the_connection_and_harm_nobody(seed: int) -> None:
    with pair(SMALL) as it:
        noise = random.Random(seed).randbytes(5_000)
        async with RawPeer(it) as peer:
            if seed % 2:
                await peer.hello()
            with suppress(ConnectionResetError, BrokenPipeError):
                await peer.send(noise)
            assert await peer.closed()
        assert it.b.log, "it says why"
        assert untouched(it)
        good = landing(SMALL, (50,))
        it.a.fill(good)
        it.post(it.b.grant(good), good)
        await it.b.next(WriteLanded)


async def test_a_stream_out_of_step_is_closed() -> None:
    with pair(SMALL) as it:
        async with RawPeer(it) as peer:
            await peer.hello()
            good = wire.pack_header(WriteHeader(1, 1, 1, SMALL.layer_block_bytes))
            await peer.send(b"XXXX" + good[4:])
            assert await peer.closed()
        assert "no write header" in it.b.log[0]


@pytest.mark.parametrize("size", [0, 1, 255, 2**40, 2**63, 2**64 - 1])
async def test_impossible_sizes_close_the_connection(size: int) -> None:
    with pair(SMALL) as it:
        async with RawPeer(it) as peer:
            await peer.hello()
            await peer.send(wire.pack_header(WriteHeader(1, 1, 1, size)))
            assert await peer.closed()
        assert "Layer Blocks" in it.b.log[0]


async def test_a_peer_that_reads_no_acknowledgements_is_dropped() -> None:
    options = SocketOptions(send_buffer_bytes=2048)
    with pair(ODD, options=options) as it:
        header = wire.pack_header(WriteHeader(1, 4, 1, ODD.layer_block_bytes))
        write = header + bytes(wire.wire_bytes(ODD.layer_block_bytes, ODD) - len(header))
        async with RawPeer(it) as peer:
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            await peer.hello()
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                async with asyncio.timeout(10):
                    while True:
                        await peer.send(write * 200)
        assert any("does not read" in line for line in it.b.log)


def test_acknowledgements_stay_small() -> None:
    assert len(wire.pack_ack(2**64 - 1, AckStatus.REFUSED, "x" * 1000)) <= wire.ACK_MAX_BYTES < 60


async def test_a_write_of_foreign_memory_is_our_own_bug() -> None:
    with pair(SMALL) as it:
        full = SMALL.full_block_bytes
        for pieces in ((-full,), (64 * full,), (1,), (0, 1, 2 * full), ()):
            with pytest.raises(BugError):
                it.a.plane.post(Write(1, GrantRef("b", 1, 1, len(pieces) * full), "a", pieces, full))
        with pytest.raises(BugError, match="nowhere"):
            it.a.plane.post(Write(1, GrantRef("nowhere", 1, 1, full), "a", (0,), full))
        with pytest.raises(BugError, match="gathers"):
            it.a.plane.post(Write(1, GrantRef("b", 1, 1, full), "a", (0, full), full))


async def test_another_lane_is_another_connection() -> None:
    with pair(SMALL) as it:
        here = landing(SMALL, (1,))
        it.a.fill(here)
        for tos in (0, 0x88):
            it.a.plane.post(Write(1 + tos, it.b.grant(here), "a", here.pieces, here.piece_bytes), tos=tos)
        landed = {(await it.a.next(WriteCompleted)).write_id for _ in range(2)}
        assert landed == {1, 1 + 0x88}
        sockets = [connection._live_socket() for connection in it.a.plane._outbound.values()]
        marks = {sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) for sock in sockets}
        assert marks == {0, 0x88}
