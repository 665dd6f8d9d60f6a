"""Two data planes on loopback, without namespaces: what the kernel does with real bytes, in one test process."""

from __future__ import annotations

import asyncio
import itertools
import os
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from testbed.fabric.live.dataplane import DataPlane
from testbed.fabric.live.memory import Memory
from testbed.fabric.live.sockets import DEFAULT_OPTIONS, Endpoint, SocketOptions
from testbed.protocol.grants import GrantIssuer, GrantRef, GrantTable, Landing
from testbed.protocol.layout import BlockLayout, seal_pieces
from testbed.protocol.machine import Event, Write

E = TypeVar("E")

_numbers = itertools.count(1)


def address() -> str:
    """A loopback address that no other test of this host uses now."""
    number = next(_numbers)
    return f"127.{20 + os.getpid() % 200}.{number // 250}.{1 + number % 250}"


@dataclass(frozen=True)
class LoopbackEndpoint:
    """An endpoint without a device."""

    name: str
    address: str
    device: str | None = None


class Side:
    """One role: memory, grants, data plane, and the events it was told."""

    def __init__(
        self,
        name: str,
        layout: BlockLayout,
        endpoints: dict[str, Endpoint],
        *,
        blocks: int = 64,
        options: SocketOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.name = name
        self.layout = layout
        self.memory = Memory(blocks * layout.full_block_bytes, layout)
        self.grants = GrantTable()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.log: list[str] = []
        self.plane = DataPlane(
            name, layout, self.memory, self.grants, endpoints, self.events.put_nowait,
            options=options, log=self.log.append,
        )  # fmt: skip
        self._issuer = GrantIssuer()

    def grant(self, landing: Landing) -> GrantRef:
        """Open a grant."""
        ref = self._issuer.issue(self.name, landing)
        self.grants.open(ref.grant_id, ref.epoch, landing)
        return ref

    def fill(self, landing: Landing, seed: int = 0) -> None:
        """Put blocks as ``landing`` describes them into the own memory, sealed."""
        block = self.layout.layer_block_bytes
        random = np.random.default_rng(seed)
        for key, at in zip(landing.keys, landing.pieces, strict=True):
            view = self.memory.view[at : at + landing.piece_bytes]
            view[:] = random.bytes(landing.piece_bytes)
            seals = seal_pieces(view, (key,), landing.layer_begin, landing.layer_end, block)
            self.memory.seals[at // block : at // block + len(seals)] = seals

    async def next(self, kind: type[E]) -> E:
        """The next event, which must be of this kind."""
        event = await asyncio.wait_for(self.events.get(), 5)
        assert isinstance(event, kind), event
        return event


class Pair:
    """A source ``a`` and a destination ``b`` that listens."""

    def __init__(
        self,
        layout: BlockLayout,
        *,
        theirs: BlockLayout | None = None,
        options: SocketOptions = DEFAULT_OPTIONS,
        listen: bool = True,
    ) -> None:
        self.endpoints: dict[str, Endpoint] = {name: LoopbackEndpoint(name, address()) for name in "ab"}
        self.a = Side("a", layout, self.endpoints, options=options)
        self.b = Side("b", theirs or layout, self.endpoints, options=options)
        self._writes = itertools.count(1)
        if listen:
            self.b.plane.listen(self.endpoints["b"])

    def post(self, ref: GrantRef, landing: Landing) -> int:
        """Post a write of the source's own pieces."""
        number = next(self._writes)
        self.a.plane.post(Write(number, ref, "a", landing.pieces, landing.piece_bytes))
        return number

    def close(self) -> None:
        """Close both."""
        self.a.plane.close()
        self.b.plane.close()


def landing(
    layout: BlockLayout, slots: tuple[int, ...], *, first_key: int = 1, layers: tuple[int, int] | None = None
) -> Landing:
    """Pieces at page ``slots``, each of ``layers`` (all by default)."""
    begin, end = layers or (0, layout.layers)
    return Landing(
        pieces=tuple(slot * layout.full_block_bytes for slot in slots),
        piece_bytes=(end - begin) * layout.layer_block_bytes,
        keys=tuple(range(first_key, first_key + len(slots))),
        layer_begin=begin,
        layer_end=end,
    )
