"""A role in the sim world: its machine, its memory, what it has out, and the figures it reports at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from testbed.fabric.sim.gpu import SimGpu
from testbed.fabric.sim.memory import TaggedMemory, Tags
from testbed.protocol import machine as m
from testbed.protocol.grants import GrantTable
from testbed.protocol.layout import U64, BlockLayout


@dataclass(frozen=True, slots=True)
class Flow:
    """What is to happen when a transfer, or a wait of the world's own, ends."""

    end: Callable[[], None]


@dataclass(slots=True)
class SimCounter:
    """What has crossed a link, in one direction: with all headers, and without those of TCP and below."""

    bytes: int = 0
    payload_bytes: int = 0
    drops: int = 0

    @property
    def data(self) -> SimCounter:
        """Everything: there are no acknowledgements apart."""
        return self


class SimRole:
    """A hosted role.

    ``deadlines``: time by key; ``armed``: the time of the earliest entry in the world's heap for it. ``channels``: when
    the last message to a role arrives there. ``disk``: tags of every stored block, of a storage server only.
    """

    __slots__ = (
        "actions", "armed", "blocks_fetched", "blocks_stored", "bytes_sent", "channels", "deadlines", "disk", "events",
        "gpu", "grants", "handle", "machine", "memory", "name", "writes_corrupt", "writes_landed", "writes_refused",
    )  # fmt: skip

    def __init__(self, name: str, machine: m.Machine, memory_bytes: int, layout: BlockLayout, tags: Tags) -> None:
        self.name = name
        self.machine = machine
        self.handle = machine.handle
        self.memory = TaggedMemory(memory_bytes, layout, tags)
        self.grants = GrantTable()
        self.deadlines: dict[str, int] = {}
        self.armed: dict[str, int] = {}
        self.channels: dict[str, int] = {}
        self.gpu: SimGpu | None = None
        self.disk: dict[int, U64] | None = None
        self.events = self.actions = 0
        self.bytes_sent = self.writes_landed = self.writes_refused = self.writes_corrupt = 0
        self.blocks_fetched = self.blocks_stored = 0

    def report(self) -> dict[str, object]:
        """Figures by name, those of the live world as far as there are any here."""
        report: dict[str, object] = {
            "role": self.name,
            "events": self.events,
            "actions": self.actions,
            "open_grants": len(self.grants),
            "data": {
                "writes_landed": self.writes_landed,
                "writes_refused": self.writes_refused,
                "writes_corrupt": self.writes_corrupt,
                "bytes_sent": self.bytes_sent,
            },
        }
        if self.gpu is not None:
            report["compute"] = asdict(self.gpu.use)
        if isinstance(self.machine, m.Reporting):
            report["machine"] = self.machine.report()
        if self.disk is not None:
            report["disk"] = {"blocks_fetched": self.blocks_fetched, "blocks_stored": self.blocks_stored}
        return report
