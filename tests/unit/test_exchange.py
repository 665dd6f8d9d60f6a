"""Collectives over real sockets on loopback: shards arrive whole, in turn, from peers only; anything else is told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from testbed.errors import BugError, PeerError, TestbedError
from testbed.fabric.live.exchange import MAX_SHARD_BYTES, ExchangePlane
from testbed.fabric.live.lanes import EXPEDITED_FORWARDING
from testbed.fabric.live.sockets import DEFAULT_OPTIONS, EXCHANGE_PORT, SocketOptions
from testbed.fabric.live.wire import ShardHead, ShardReader, pack_hello, pack_shard, seal_shard
from testbed.protocol.machine import Event, Exchange, ExchangeTag, ShardArrived
from testbed.protocol.shards import shard_wire_bytes
from tests.support.loopback import LoopbackEndpoint, address

LAYOUT = 77
FIRST = ExchangeTag(0, 0, False)
BOTH_PARTS = (False, True)


class Group:
    """Engines that exchange with each other; ``failure`` of each is what it was told."""

    def __init__(self, names: tuple[str, ...], options: SocketOptions = DEFAULT_OPTIONS) -> None:
        self.names = names
        endpoints = {f"{name}.cnic": LoopbackEndpoint(f"{name}.cnic", address()) for name in names}
        self.address = {name: endpoints[f"{name}.cnic"].address for name in names}
        self.events: dict[str, asyncio.Queue[Event]] = {name: asyncio.Queue() for name in names}
        self.failures: dict[str, asyncio.Future[None]] = {name: asyncio.Future() for name in names}
        self.log: list[str] = []
        self.planes = {
            name: ExchangePlane(
                name, LAYOUT, [other for other in names if other != name], endpoints, self.events[name].put_nowait,
                self.failures[name].set_exception, options=options, log=self.log.append,
            )
            for name in names
        }  # fmt: skip

    def post(self, name: str, tag: ExchangeTag, size: int, tokens: int = 3) -> None:
        peers = tuple(self.planes[name].peers)
        self.planes[name].post(Exchange(tag, tokens, tuple((peer, size) for peer in peers)))

    async def next(self, name: str) -> ShardArrived:
        event = await asyncio.wait_for(self.events[name].get(), 5)
        assert isinstance(event, ShardArrived)
        return event

    async def failure(self, name: str) -> str:
        with pytest.raises(TestbedError) as caught:
            await asyncio.wait_for(self.failures[name], 5)
        assert isinstance(caught.value, PeerError)
        return str(caught.value)


@contextmanager
def group(*names: str, listening: bool = True, **kwargs: Any) -> Iterator[Group]:
    it = Group(names, **kwargs)
    if listening:
        for plane in it.planes.values():
            plane.listen()
    for plane in it.planes.values():
        plane.connect()
    try:
        yield it
    finally:
        for plane in it.planes.values():
            plane.close()
        for failure in it.failures.values():
            failure.cancel()


@contextmanager
def alone() -> Iterator[Group]:
    """An engine ``a`` that listens; its peer ``b`` is the test's own socket."""
    it = Group(("a", "b"))
    it.planes["a"].listen()
    try:
        yield it
    finally:
        it.planes["a"].close()


def shard(tag: ExchangeTag, payload: bytes, **changes: int) -> bytes:
    head = pack_shard(replace(ShardHead(tag, 1, len(payload), 0), **changes))
    return head + payload + seal_shard(head, xxhash.xxh3_64_digest(payload))


async def say(it: Group, data: bytes, hello: bytes = pack_hello("b", LAYOUT)) -> socket.socket:
    """Connect to ``a`` as a peer that sends ``data``."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    await loop.sock_connect(sock, (it.address["a"], EXCHANGE_PORT))
    await loop.sock_sendall(sock, hello + data)
    return sock


@pytest.mark.parametrize("size", [0, 1, 5_000, 3_000_000])
async def test_shards_go_to_every_peer_dispatch_then_combine(size: int) -> None:
    names = ("a", "b", "c")
    with group(*names) as it:
        for of_round in range(3):
            for combine in BOTH_PARTS:
                tag = ExchangeTag(of_round, 0, combine)
                for name in names:
                    it.post(name, tag, size, tokens=len(name))
                for name in names:
                    arrived = [await it.next(name) for _ in range(2)]
                    assert {shard.sender for shard in arrived} == set(names) - {name}
                    assert {(shard.tag, shard.tokens) for shard in arrived} == {(tag, 1)}
                    assert all(0 < shard.latency_ns < 5_000_000_000 for shard in arrived)
        counters = it.planes["a"].counters
        assert counters.shards_sent == counters.shards_arrived == 12
        assert counters.bytes_sent == counters.bytes_arrived == 12 * size
        assert 1 <= counters.peak_under_way <= 4


async def test_both_ends_are_in_the_high_lane() -> None:
    with group("a", "b") as it:
        it.post("a", FIRST, 10)
        await it.next("b")
        outgoing, (incoming,) = it.planes["a"].peers["b"].outgoing, it.planes["b"]._incoming
        assert outgoing is not None
        for sock in (outgoing._socket, incoming.sock):
            assert sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == EXPEDITED_FORWARDING


def test_an_empty_shard_has_its_head_and_seal() -> None:
    assert len(shard(FIRST, b"")) == shard_wire_bytes(0)


async def test_payloads_differ_by_collective_and_engine() -> None:
    with group("a", "b") as it:
        a, b = it.planes["a"], it.planes["b"]
        tags = [ExchangeTag(r, p, c) for r in range(3) for p in range(3) for c in BOTH_PARTS]
        payloads = {b"".join(plane._payload(tag, 300_000)) for plane in (a, b) for tag in tags}
        assert len(payloads) == 2 * len(tags)
        assert {len(payload) for payload in payloads} == {300_000}


def test_a_stream_is_cut_anywhere() -> None:
    data = b"".join(shard(ExchangeTag(k, 0, True), bytes(range(k))) for k in (0, 1, 200))
    for step in (1, 7, 76, len(data)):
        reader = ShardReader(1000)
        heads = [head for at in range(0, len(data), step) for head in reader.feed(memoryview(data)[at : at + step])]
        assert [head.tag.round for head in heads] == [0, 1, 200]
        assert reader.due_bytes == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (shard(FIRST, b"payload")[:-9] + b"X" + shard(FIRST, b"payload")[-8:], "not the one that was sent"),
        (shard(FIRST, b"payload", tokens=1).replace(b"payload", b"payloae"), "not the one that was sent"),
        (b"XXXX" + shard(FIRST, b"")[4:], "no shard's head"),
        (shard(FIRST, b"", size_bytes=MAX_SHARD_BYTES + 1), "set aside"),
        (shard(FIRST, b"1") + shard(FIRST, b"2"), "after one of"),
        (shard(FIRST, b"1") + shard(ExchangeTag(0, 0, True), b"2"), "more than one collective ahead"),
    ],
    ids=["payload", "payload-too", "magic", "oversize", "again", "early"],
)
async def test_a_wrong_shard_ends_the_exchange_by_name(data: bytes, said: str) -> None:
    with alone() as it:
        with await say(it, data):
            reason = await it.failure("a")
        assert reason.startswith("a: the exchange with b failed: ")
        assert said in reason


async def test_a_flipped_bit_of_the_head_is_noticed() -> None:
    good = bytearray(shard(ExchangeTag(5, 0, False), b"payload"))
    for at in (16, 24, 28, 60):  # round, part, tokens, padding
        bad = good.copy()
        bad[at] ^= 1
        with pytest.raises(PeerError, match="not the one"):
            ShardReader(100).feed(memoryview(bytes(bad)))


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (pack_hello("stranger", LAYOUT), "not of this group"),
        (pack_hello("b", LAYOUT + 1), "layout"),
        (bytes(100), "no hello"),
        (b"", "closed"),
    ],
)
async def test_who_is_no_peer_is_turned_away_and_harms_nobody(hello: bytes, said: str) -> None:
    with alone() as it:
        with await say(it, b"", hello) as sock:
            if not hello:
                sock.close()
            async with asyncio.timeout(5):
                while not it.log:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        assert said in it.log[0]
        assert it.planes["a"].counters.connections_refused == 1
        with await say(it, shard(FIRST, b"good")):
            assert (await it.next("a")).sender == "b"


async def test_a_second_connection_of_a_peer_is_turned_away() -> None:
    with alone() as it, await say(it, b""), await say(it, b""):
        async with asyncio.timeout(5):
            while not it.log:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert "b has connected already" in it.log[0]


async def test_a_lost_peer_is_told_by_name() -> None:
    with group("a", "b") as it:
        it.post("b", FIRST, 0)
        await it.next("a")
        it.planes["b"].close()
        assert "exchange with b failed: connection closed by the peer" in await it.failure("a")


async def test_a_peer_that_does_not_listen_is_told_by_name() -> None:
    with group("a", "b", listening=False) as it:
        assert "exchange with b failed: cannot connect: [Errno 111]" in await it.failure("a")


async def test_what_the_machine_may_not_post() -> None:
    with group("a", "b") as it:
        plane = it.planes["a"]
        with pytest.raises(BugError, match="no connection"):
            plane.post(Exchange(FIRST, 1, (("c", 1),)))
        with pytest.raises(BugError, match="set aside"):
            plane.post(Exchange(FIRST, 1, (("b", MAX_SHARD_BYTES + 1),)))
        for part in range(2):
            it.post("a", ExchangeTag(0, part, False), 10)
        with pytest.raises(PeerError, match="b has not taken the last 2 shards of a"):
            it.post("a", ExchangeTag(0, 2, False), 10)


async def test_shards_posted_before_the_connection_arrive_after_it() -> None:
    with group("a", "b") as it:
        it.post("a", FIRST, 1000)
        it.post("b", FIRST, 1000)
        it.post("b", ExchangeTag(0, 0, True), 1000)
        assert [(await it.next("a")).tag.combine for _ in range(2)] == [False, True]
