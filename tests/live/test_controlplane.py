"""Control messages over real sockets: in order, to those who belong to the cluster, and bounded against the rest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from testbed.errors import BugError
from testbed.fabric.live import controlplane
from testbed.fabric.live.controlplane import Address, ControlPlane
from testbed.protocol import codec
from testbed.protocol.messages import Message, PrefillStarted, SubmitRequest
from tests.support.loopback import address

LAYOUT = 42


class Peer:
    """A control plane and what it was told."""

    def __init__(self, role: str, book: dict[str, Address], layout: int = LAYOUT) -> None:
        self.inbox: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()
        self.lost: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.log: list[str] = []
        self.plane = ControlPlane(
            role, layout, book, lambda *pair: self.inbox.put_nowait(pair),
            on_peer_lost=lambda *pair: self.lost.put_nowait(pair), log=self.log.append,
        )  # fmt: skip

    async def next(self) -> tuple[str, Message]:
        return await asyncio.wait_for(self.inbox.get(), 5)


@asynccontextmanager
async def peers(*names: str, **layouts: int) -> AsyncIterator[list[Peer]]:
    """Peers that listen, on one host with different ports."""
    host = address()
    book = {name: (host, 7600 + k) for k, name in enumerate(names)}
    them = [Peer(name, book, layouts.get(name, LAYOUT)) for name in names]
    try:
        for peer in them:
            await peer.plane.listen()
        yield them
    finally:
        for peer in them:
            await peer.plane.close()


async def test_first_in_first_out_between_every_two() -> None:
    async with peers("a", "b", "c") as (a, b, c):
        for k in range(200):
            a.plane.send("c", PrefillStarted(f"a{k}"))
            b.plane.send("c", PrefillStarted(f"b{k}"))
        seen: dict[str, list[str]] = {"a": [], "b": []}
        for _ in range(400):
            sender, message = await c.next()
            assert isinstance(message, PrefillStarted)
            seen[sender].append(message.request_id)
        assert seen == {name: [f"{name}{k}" for k in range(200)] for name in "ab"}
        c.plane.send("a", PrefillStarted("back"))
        assert await a.next() == ("c", PrefillStarted("back"))


async def test_large_messages_pass() -> None:
    async with peers("a", "b") as (a, b):
        message = SubmitRequest("r", random.Random(0).randbytes(4_000_000), 1)
        a.plane.send("b", message)
        assert await b.next() == ("a", message)


async def test_another_layout_is_refused_by_name() -> None:
    async with peers("a", "b", b=7) as (a, b):
        a.plane.send("b", PrefillStarted("r"))
        lost, reason = await asyncio.wait_for(a.lost.get(), 5)
        assert lost == "b"
        assert "must agree" in reason
        assert b.inbox.empty()
        assert a.plane.counters.peers_refused == 1


async def test_nobody_there_then_somebody() -> None:
    host = address()
    book = {"a": (host, 7600), "b": (host, 7601)}
    a, b = Peer("a", book), Peer("b", book)
    await a.plane.listen()
    a.plane.send("b", PrefillStarted("lost"))
    lost, reason = await asyncio.wait_for(a.lost.get(), 5)
    assert (lost, a.plane.counters.peers_lost) == ("b", 1)
    assert "cannot connect" in reason
    await b.plane.listen()
    a.plane.send("b", PrefillStarted("found"))
    assert await b.next() == ("a", PrefillStarted("found"))
    await a.plane.close()
    await b.plane.close()


async def test_a_peer_that_restarts_is_dialled_again() -> None:
    async with peers("a", "b") as (a, b):
        a.plane.send("b", PrefillStarted("1"))
        await b.next()
        await b.plane.close()
        assert (await asyncio.wait_for(a.lost.get(), 5))[0] == "b"
        again = Peer("b", dict(a.plane.address_book))
        await again.plane.listen()
        a.plane.send("b", PrefillStarted("2"))
        assert await again.next() == ("a", PrefillStarted("2"))
        await again.plane.close()


async def test_unknown_role_is_our_own_bug() -> None:
    async with peers("a") as (a,):
        with pytest.raises(BugError, match="no role"):
            a.plane.send("nobody", PrefillStarted("r"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xff\xff\xff", "announced"),
        (b"\0\0\0\x01\xc1", "malformed"),
        (codec.encode(PrefillStarted("r")), "must be a hello"),
        (codec.encode(codec.hello("a", 7)), "must agree"),
        (codec.encode(codec.hello("stranger", LAYOUT)), "no role"),
        (b"\0\x10\0\0" + bytes(100_000), "too large for a hello"),
        (codec.encode(codec.hello("a", LAYOUT)) + b"\0\0\0\x02\x90\x90", "malformed"),
        (codec.encode(codec.hello("a", LAYOUT)) + b"\x7f\xff\xff\xff", "announced"),
    ],
)
async def test_malformed_peers_are_closed_and_counted(data: bytes, said: str) -> None:
    async with peers("a", "b") as (a, b):
        reader, writer = await asyncio.open_connection(*b.plane.address_book["b"])
        writer.write(data)
        with suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)  # to its end
        writer.close()
        assert said in b.log[0]
        assert b.plane.counters.peers_refused == 1
        a.plane.send("b", PrefillStarted("well"))
        assert await b.next() == ("a", PrefillStarted("well"))


@pytest.mark.parametrize("seed", range(5))
async def test_random_bytes(seed: int) -> None:
    async with peers("a", "b") as (_, b):
        reader, writer = await asyncio.open_connection(*b.plane.address_book["b"])
        writer.write(random.Random(seed).randbytes(20_000))
        with suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert len(b.log) == 1


async def test_a_peer_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controlplane, "_MAX_UNSENT_BYTES", 2_000_000)
    host = address()
    book = {"a": (host, 7600), "b": (host, 7601)}

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(codec.encode(codec.hello("b", LAYOUT)))
        await writer.drain()

    server = await asyncio.start_server(deaf, *book["b"], limit=1024)
    a = Peer("a", book)
    await a.plane.listen()
    async with asyncio.timeout(5):
        while a.lost.empty():
            a.plane.send("b", SubmitRequest("r", bytes(100_000), 1))
            await asyncio.sleep(0)
    assert "does not read" in a.lost.get_nowait()[1]
    server.close()
    await a.plane.close()


async def test_silence_instead_of_a_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controlplane, "_HELLO_TIMEOUT_S", 0.0)
    async with peers("b") as (b,):
        reader, writer = await asyncio.open_connection(*b.plane.address_book["b"])
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert "no hello in time" in b.log[0]
