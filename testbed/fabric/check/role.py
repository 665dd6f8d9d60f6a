"""One role of the check world: its machine with memory, grants, disk, GPU and deadlines, and one transition of it.

Everything that an input can change belongs to one role, so inputs of different roles commute; that is what makes both
the memory of transitions (world.py) and the reduction (reduction.py) possible. Where the other worlds have a wire, the
outputs name a channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from testbed.errors import BugError, PeerError, TestbedError
from testbed.fabric.check import inputs as i
from testbed.fabric.check.checkers import conservation, lane, provenance, queues, tokens
from testbed.fabric.check.content import NOTHING, Cell
from testbed.fabric.check.freeze import PLACING
from testbed.fabric.check.gpu import CheckGpu
from testbed.fabric.check.memory import CellMemory, held_cells, pools_of
from testbed.ids import SCHEDULER
from testbed.protocol import machine as mc
from testbed.protocol.grants import GrantIssuer, GrantRef, GrantTable, Landing
from testbed.protocol.layout import BlockLayout

NOW_NS = 1
"""There is no time: every event but a deadline comes at this one."""


class Description(Protocol):
    """What the world must be told of a role."""

    @property
    def name(self) -> str:
        """Name of the role."""
        ...

    @property
    def make(self) -> Callable[[], Any]:
        """Makes its machine."""
        ...

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where its memory can be written."""
        ...

    @property
    def has_gpu(self) -> bool:
        """Whether it computes."""
        ...


class GrantNames:
    """Numbers for what grants are for, the same whatever the order in which grants are issued, in every run."""

    def __init__(self) -> None:
        self._purposes: dict[int, tuple[Any, ...]] = {}

    def number(self, purpose: tuple[Any, ...]) -> int:
        """The number of a purpose: 32 bits of a digest; no two purposes share one."""
        number = xxhash.xxh3_64_intdigest(repr(purpose).encode()) & 0xFFFFFFFF
        while self._purposes.setdefault(number, purpose) != purpose:
            number += 1
        return number


class StructuralIssuer(GrantIssuer):
    """Issues grant ids by purpose: the nth grant for these layers of these blocks here. No id comes twice."""

    def __init__(self, names: GrantNames, epoch: int) -> None:
        super().__init__(endpoint_epoch=epoch)
        self._names = names
        self._issued: dict[tuple[Any, ...], int] = {}

    def issue(self, endpoint: str, landing: Landing) -> GrantRef:
        """A fresh reference."""
        purpose = (endpoint, landing.keys, landing.layer_begin, landing.layer_end)
        count = self._issued[purpose] = self._issued.get(purpose, 0) + 1
        return GrantRef(endpoint, self._names.number((*purpose, count)), self.epoch, landing.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all roles know and no state changes."""

    layout: BlockLayout
    owner_of: dict[str, str]
    names: GrantNames
    expected: dict[str, tuple[int, ...]]
    """The oracle: tokens of every request."""
    limits: queues.Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A cluster to explore: its roles, what they share, and what is on disks from the start."""

    descriptions: tuple[Description, ...]
    shared: Shared
    constants: tuple[Any, ...]
    """What machines refer to and never change: parameters, plans, scripts."""
    replicas: Callable[[int], Sequence[str]]
    """Servers that must hold a block."""
    stored: dict[str, dict[int, tuple[Cell, ...]]]
    """What disks hold from the start, by server."""
    late_reports: bool
    """A leader's report takes its time to the scheduler, also one that changes only figures; else it is there at once,
    and is made only when a request is placed by it."""
    roomy: bool
    caching: bool
    """Every pool and window holds all that the workload ever needs, so nobody waits for memory."""


@dataclass(slots=True)
class Step:
    """What a transition puts on channels, and what checkers say: ``calm`` holds only while nothing has failed."""

    outputs: list[tuple[i.Channel, i.Input]] = field(default_factory=list)
    always: list[i.Violation] = field(default_factory=list)
    calm: list[i.Violation] = field(default_factory=list)
    published: tuple[int, ...] = ()
    """Keys that became visible: the world checks them against the disks."""

    def report(self, checker: str, texts: Sequence[str]) -> None:
        """Note violations that no fault excuses."""
        self.always += [i.Violation(checker, text) for text in texts]


@dataclass(slots=True)
class Role:
    """A role in one state; ``step`` takes it to the next."""

    name: str
    machine: Any
    shared: Shared
    endpoints: tuple[str, ...]
    memory: CellMemory
    grants: GrantTable = field(default_factory=GrantTable)
    deadlines: dict[str, int] = field(default_factory=dict)
    disk: dict[int, tuple[Cell, ...]] = field(default_factory=dict)
    gpu: CheckGpu | None = None
    posted: dict[tuple[int, int], tuple[int, tuple[int, ...], int]] = field(default_factory=dict)
    """Own writes in flight, by grant and use of it: write id, pieces, cells per piece."""
    used: dict[int, int] = field(default_factory=dict)
    """How often own writes have used each grant of others."""
    landed: set[int] = field(default_factory=set)
    """Own grants that a write has consumed."""
    jobs: list[tuple[str, mc.Event, Any]] = field(default_factory=list)
    """Operations of own devices in flight: lane, event at the end, and what becomes durable then."""

    def step(self, given: i.Input) -> Step:
        """Take one input."""
        step = Step()
        try:
            self._take(given, step)
        except (TestbedError, AssertionError, LookupError) as error:
            step.report("machine", [f"{self.name}: {type(error).__name__}: {error}"])
        self._settle(step)
        return step

    def _take(self, given: i.Input, step: Step) -> None:
        match given:
            case i.Begin():
                self._handle(mc.Started(), step)
            case i.Deliver():
                step.calm += tokens.at_delivery(self.name, self.machine, given.message)
                self._handle(mc.Received(given.sender, given.message), step)
                step.published = tokens.published(self.name, given.message)
            case i.Arrive():
                self._arrive(given, step)
            case i.Ended():
                self._ended(given, step)
            case i.Finish():
                at = next(k for k, job in enumerate(self.jobs) if job[0] == given.lane)
                _, event, stored = self.jobs.pop(at)
                if isinstance(event, mc.BlockWritten):
                    self.disk[event.key] = stored
                self._handle(event, step)
            case i.Pass():
                self._handle(mc.DeadlinePassed(given.key), step, self.deadlines.pop(given.key))

    def _handle(self, event: mc.Event, step: Step, now_ns: int = NOW_NS) -> None:
        strays = getattr(self.machine, "strays", 0)
        for action in self.machine.handle(event, now_ns):
            self._perform(action, step)
        if getattr(self.machine, "strays", 0) != strays:
            step.calm.append(i.Violation("tokens", f"{self.name} has no use for a message, and nothing has failed"))

    def _settle(self, step: Step) -> None:
        """After a transition: memory that was handed back is wiped, and what must always hold of a role is checked."""
        pools = list(pools_of(self.machine))
        for _, pool, _ in pools:
            pool._free.sort(reverse=True)
        if pools:
            held = held_cells(self.machine, self.memory.cell_bytes)
            self.memory.wipe(held)
        step.report(conservation.NAME, list(conservation.of_role(self)))
        step.report(queues.NAME, list(queues.of_role(self.name, self.machine, self.shared.limits)))

    # --- actions -------------------------------------------------------------------------------------------------

    def _perform(self, action: mc.Action, step: Step) -> None:
        match action:
            case mc.Send():
                step.calm += tokens.at_send(self.name, action.message)
                channel = i.Channel(i.CONTROL, self.name, action.to, action.to)
                step.outputs.append((channel, i.Deliver(self.name, action.message)))
            case mc.OpenGrant():
                if action.ref.grant_id in self.landed:
                    step.report(conservation.NAME, [f"{self.name} opens grant {action.ref.grant_id} a second time"])
                self.grants.open(action.ref.grant_id, action.ref.epoch, action.landing)
            case mc.CloseGrant():
                self.grants.close(action.grant_id)
            case mc.Write():
                self._post(action, step)
            case mc.ComputePrefill() | mc.ComputeDecode():
                self._compute(action, step)
            case mc.LoadSequence():
                assert self.gpu is not None
                self.gpu.load(action)
            case mc.ForgetSequence():
                assert self.gpu is not None
                self.gpu.forget(action.request_id)
            case mc.FetchBlock():
                self._fetch(action, step)
            case mc.StoreBlock():
                cells = self.memory.read(action.offset, self.shared.layout.layers)
                self.jobs.append((f"disk page {action.page}", mc.BlockWritten(action.key, action.page), cells))
            case mc.SetDeadline():
                self.deadlines[action.key] = action.at_ns
            case mc.ClearDeadline():
                self.deadlines.pop(action.key, None)
            case mc.Exchange() | mc.Compute():
                raise BugError(f"{self.name} asks for a collective, and the check world has none")

    def _compute(self, action: mc.ComputePrefill | mc.ComputeDecode, step: Step) -> None:
        assert self.gpu is not None
        wrong: list[str] = []
        if isinstance(action, mc.ComputePrefill):
            emitted = self.gpu.prefill(action, self.memory, wrong)
        else:
            emitted = self.gpu.decode(action, self.memory, wrong)
        step.report(provenance.NAME, [f"{self.name}: {text}" for text in wrong])
        self.jobs.append(("GPU", mc.ComputeFinished(0, emitted), None))

    def _fetch(self, action: mc.FetchBlock, step: Step) -> None:
        lane_name, stored = f"disk page {action.page}", self.disk.get(action.key)
        if stored is None:
            self.jobs.append((lane_name, mc.FetchFailed(action.key, action.page, "no such block"), None))
            return
        wrong: list[str] = []
        self.memory.write(action.offset, stored, wrong)
        step.report(conservation.NAME, [f"{self.name}: {text}" for text in wrong])
        self.jobs.append((lane_name, mc.BlockFetched(action.key, action.page), None))

    def _post(self, action: mc.Write, step: Step) -> None:
        ref, per_piece = action.ref, action.piece_bytes // self.memory.cell_bytes
        step.report(lane.NAME, list(lane.at_write(self.name, self.endpoints, self.shared.owner_of, action)))
        use = self.used.get(ref.grant_id, 0)
        if use:
            text = f"{self.name} uses grant {ref.grant_id} of {ref.endpoint} a second time"
            step.calm.append(i.Violation(conservation.NAME, text))
        self.used[ref.grant_id] = use + 1
        cells = tuple(cell for piece in action.pieces for cell in self.memory.read(piece, per_piece))
        for piece in action.pieces:
            self.memory.reserve(piece, per_piece, 1)
        self.posted[ref.grant_id, use] = (action.write_id, action.pieces, per_piece)
        size = len(action.pieces) * action.piece_bytes
        arrival = i.Arrive(self.name, ref.endpoint, ref.grant_id, ref.epoch, size, cells, use)
        owner = self.shared.owner_of.get(ref.endpoint, self.name)
        step.outputs.append((i.Channel(i.WRITES, action.via, ref.endpoint, owner), arrival))

    # --- writes --------------------------------------------------------------------------------------------------

    def _arrive(self, write: i.Arrive, step: Step) -> None:
        """What the destination does: judge the grant, take the cells, notify its machine and the source."""
        failure = ""
        try:
            landing = self.grants.begin(write.grant_id, write.epoch, write.size_bytes)
        except PeerError as error:
            failure = str(error)
            step.calm.append(i.Violation(conservation.NAME, f"{self.name}: {failure}, and nothing has failed"))
        else:
            failure = self._land(write, landing, step)
        if not write.echo:
            channel = i.Channel(i.ENDS, self.name, write.source, write.source)
            step.outputs.append((channel, i.Ended(write.grant_id, write.use, failure)))

    def _land(self, write: i.Arrive, landing: Landing, step: Step) -> str:
        wrong = list(provenance.at_landing(landing, write.cells))
        step.report(provenance.NAME, [f"{self.name}: {text}" for text in wrong])
        if wrong:
            self.grants.close(write.grant_id)
            self.jobs.append((f"NIC {write.source}", mc.LandingRefused(write.grant_id, wrong[0]), None))
            return wrong[0]
        held, per_piece = (
            held_cells(self.machine, self.memory.cell_bytes),
            landing.piece_bytes // self.memory.cell_bytes,
        )
        for k, piece in enumerate(landing.pieces):
            if piece // self.memory.cell_bytes not in held:
                wrong.append(f"a write from {write.source} lands in memory that nobody holds")
            self.memory.write(piece, write.cells[k * per_piece :][:per_piece], wrong)
        step.report(conservation.NAME, [f"{self.name}: {text}" for text in wrong])
        self.grants.finish(write.grant_id, write.epoch)
        self.landed.add(write.grant_id)
        self.jobs.append((f"NIC {write.source}", mc.WriteLanded(write.grant_id), None))
        return ""

    def _ended(self, end: i.Ended, step: Step) -> None:
        write_id, pieces, per_piece = self.posted.pop((end.grant_id, end.use))
        for piece in pieces:
            self.memory.reserve(piece, per_piece, -1)
        event = mc.WriteFailed(write_id, end.failure) if end.failure else mc.WriteCompleted(write_id)
        self._handle(event, step)

    # --- what may happen next ------------------------------------------------------------------------------------

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes of own devices on which something is in flight."""
        return tuple(sorted({lane for lane, _, _ in self.jobs}))

    def frozen(self) -> tuple[Any, ...]:
        """All that the state is, for a freezer."""
        gpu = self.gpu and (self.gpu.votes, self.gpu.sequences)
        posted = {name: (pieces, size) for name, (_, pieces, size) in self.posted.items()}
        cells = {k: cell for k, cell in self.memory.cells.items() if cell != NOTHING}
        return (
            self.machine,
            cells,
            self.grants,
            set(self.deadlines),
            self.disk,
            gpu,
            posted,
            self.used,
            self.landed,
            sorted(self.jobs, key=_lane),
        )

    @property
    def left_out(self) -> frozenset[str]:
        """Fields that do not matter any more: figures of the scheduler and leaders when every request is placed."""
        records = getattr(self.machine, "records", {})
        placed = [r for r, record in records.items() if record.state.name == "ASSIGNED"]
        if self.name == SCHEDULER or self.name.startswith("leader-"):
            ended: set[str] = set(self.machine._ended)
            if len(placed) == len(records) and ended.union(placed) >= self.shared.expected.keys():
                return PLACING
        return frozenset()

    @property
    def write_names(self) -> dict[int, tuple[int, int]]:
        """Grant and use of it of every own write in flight, by write id."""
        return {write_id: name for name, (write_id, _, _) in self.posted.items()}


def _lane(job: tuple[str, mc.Event, Any]) -> str:
    return job[0]


def make_role(setup: Setup, description: Description) -> Role:
    """A role that has not started: its machine with a grant issuer of this world."""
    machine, shared = description.make(), setup.shared
    if hasattr(machine, "issuer"):
        machine.issuer = StructuralIssuer(shared.names, machine.issuer.epoch)
    return Role(
        description.name,
        machine,
        shared,
        description.endpoints,
        CellMemory(shared.layout.layer_block_bytes),
        disk=dict(setup.stored.get(description.name, {})),
        gpu=CheckGpu(shared.layout) if description.has_gpu else None,
    )
