"""A role in the sim world: its machine, its memory, what it has out, and the figures it reports at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from testbed.fabric.sim.disciplines import Lane
from testbed.fabric.sim.gpu import SimGpu
from testbed.fabric.sim.memory import TaggedMemory, Tags
from testbed.protocol import machine as m
from testbed.protocol.grants import GrantTable
from testbed.protocol.layout import U64, BlockLayout
from testbed.protocol.submission import Submitter


@dataclass(frozen=True, slots=True)
class Flow:
    """What is to happen when a transfer, or a wait of the world's own, ends."""

    end: Callable[[], None]


@dataclass(slots=True)
class LaneCounter:
    """Bytes with all headers, and without those of TCP and below."""

    bytes: int = 0
    payload_bytes: int = 0


@dataclass(slots=True)
class SimCounter:
    """What has crossed a link, in one direction; ``data`` is everything: there are no acknowledgements apart."""

    data: LaneCounter = field(default_factory=LaneCounter)
    high: LaneCounter = field(default_factory=LaneCounter)
    """Of it, model traffic."""
    drops: int = 0

    def add(self, wire: int, payload: int, lane: Lane) -> None:
        """A transfer has crossed."""
        self.data.bytes += wire
        self.data.payload_bytes += payload
        if lane is Lane.HIGH:
            self.high.bytes += wire
            self.high.payload_bytes += payload


class SimRole:
    """A hosted role.

    ``deadlines``: time by key; ``armed``: the time of the earliest entry in the world's heap for it. ``channels``:
    when the last message to a role was sent, and when it arrives there. ``disk``: tags of every stored block, of a
    storage server only. ``submits_ns``: the earliest entry in the world's heap for ``submitter``.
    """

    __slots__ = (
        "actions", "armed", "blocks_fetched", "blocks_stored", "bytes_sent", "channels", "deadlines", "disk", "events",
        "gpu", "grants", "handle", "machine", "memory", "name", "submits_ns", "submitter",
        "writes_corrupt", "writes_landed", "writes_refused",
    )  # fmt: skip

    def __init__(self, name: str, machine: m.Machine, memory_bytes: int, layout: BlockLayout, tags: Tags) -> None:
        self.name = name
        self.machine = machine
        self.handle = machine.handle
        self.memory = TaggedMemory(memory_bytes, layout, tags)
        self.grants = GrantTable()
        self.deadlines: dict[str, int] = {}
        self.armed: dict[str, int] = {}
        self.channels: dict[str, tuple[int, int]] = {}
        self.gpu: SimGpu | None = None
        self.disk: dict[int, U64] | None = None
        self.submitter = Submitter()
        self.submits_ns: int | None = None
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
        if isinstance(self.machine, m.Reporting) and (figures := self.machine.report()):
            report["machine"] = figures
        if submission := self.submitter.report():
            report["submission"] = submission
        if self.disk is not None:
            report["disk"] = {"blocks_fetched": self.blocks_fetched, "blocks_stored": self.blocks_stored}
        return report
