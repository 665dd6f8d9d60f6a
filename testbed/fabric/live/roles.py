"""A role in the live world: one machine, and the shell that brings it events and performs its actions with real bytes.

The machine is a pure reducer (``testbed.protocol.machine``); everything with an effect is here. Events wait in one
queue that the event loop drains, so ``handle`` is never entered twice. Actions are performed in the order in which the
machine gave them. A sleep stands for GPU compute: the device function moves the real bytes first, and the alarm
waits for what is left of the duration; or for the CPU time of submitting a copy (``protocol.submission``).

The clock is ``time.monotonic_ns``: all processes of a host share it, so the traces of all roles have one time line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from testbed.errors import BugError, HostError, TestbedError
from testbed.fabric.live.blockstore import DiskCounters
from testbed.fabric.live.controlplane import Address, ControlPlane
from testbed.fabric.live.dataplane import DataPlane
from testbed.fabric.live.exchange import ExchangePlane
from testbed.fabric.live.gpu import Compute, Device, Gpu
from testbed.fabric.live.memory import Memory
from testbed.fabric.live.sockets import DEFAULT_OPTIONS, Endpoint, SocketOptions
from testbed.fabric.live.timer import Alarm, Deadlines
from testbed.fabric.live.vitals import LagMeter, cpu_time_ns, private_memory_bytes
from testbed.protocol import machine as m
from testbed.protocol.grants import GrantTable
from testbed.protocol.layout import BlockLayout
from testbed.protocol.messages import Message
from testbed.protocol.submission import Submitter
from testbed.trace.tracefile import TraceWriter

_EVENTS_PER_PASS = 64  # then let the event loop serve sockets

_log = logging.getLogger(__name__)

Observer = Callable[[int, m.Event, Sequence[m.Action]], None]


class Store(Protocol):
    """Blocks on disk (``blockstore.BlockStore``); ``fetch`` and ``store`` raise a TestbedError whose text says why."""

    @property
    def counters(self) -> DiskCounters:
        """What the disk has done."""
        ...

    async def fetch(self, key: int, offset: int) -> None:
        """Read a block into memory."""
        ...

    async def store(self, key: int, offset: int) -> None:
        """Make a block durable."""
        ...

    def close(self) -> None:
        """Release threads."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """What the supervisor gives a role's process.

    ``incarnation`` is 1, and one more after every restart of the role: it is the epoch of the grants it issues.
    ``progress`` sends any msgpack-able value to the supervisor.
    """

    name: str
    run_dir: Path
    incarnation: int = 1
    progress: Callable[[object], None] = lambda value: None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCluster:
    """What every role knows of the others: the block layout, where to send messages, where to write."""

    layout: BlockLayout
    address_book: Mapping[str, Address]
    endpoints: Mapping[str, Endpoint]
    sockets: SocketOptions = DEFAULT_OPTIONS


class LiveRole:
    """Runs ``machine``. Create it inside a running event loop; then ``open``, ``start``, ``quiesce``, ``close``.

    ``listen`` names the own endpoints at which writes may land, ``peers`` the engines that it has collectives with.
    ``observer`` is told every event with its actions (the driver's progress). ``failure`` ends with the exception that
    the role died of.
    """

    def __init__(
        self,
        machine: m.Machine,
        context: RoleContext,
        cluster: LiveCluster,
        *,
        listen: Sequence[str] = (),
        peers: Sequence[str] = (),
        memory: Memory | None = None,
        device: Device | None = None,
        store: Store | None = None,
        observer: Observer | None = None,
        trace: bool = True,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._machine = machine
        self._context = context
        self._cluster = cluster
        self._listen = tuple(listen)
        self._device = device
        self._store = store
        self._observer = observer
        self._grants = GrantTable()
        self._control = ControlPlane(
            context.name, cluster.layout.fingerprint, cluster.address_book, self._received,
            on_peer_lost=self._peer_lost, log=self._warn,
        )  # fmt: skip
        self._data: DataPlane | None = None
        if memory is not None:
            self._data = DataPlane(
                context.name, cluster.layout, memory, self._grants, cluster.endpoints, self.deliver,
                options=cluster.sockets, log=self._warn,
            )  # fmt: skip
        self._exchange: ExchangePlane | None = None
        if peers:
            self._exchange = ExchangePlane(
                context.name, cluster.layout.fingerprint, peers, cluster.endpoints, self.deliver,
                self._exchange_failed, options=cluster.sockets, log=self._warn,
            )  # fmt: skip
        self._trace = TraceWriter(context.run_dir / "trace" / f"{context.name}.jsonl") if trace else None
        self._events: deque[m.Event] = deque()
        self._drain_due = False
        self._running = False  # between start and the end; what comes earlier waits
        self._over = False
        self._alarm = Alarm(self._ring)
        self._deadlines = Deadlines()
        self._gpu = Gpu()
        self._submitter = Submitter()
        self._disk_tasks: set[asyncio.Task[None]] = set()
        self._lag = LagMeter()
        self._cpu_started_ns = 0
        self._counts = {"events": 0, "actions": 0, "peak_events": 0, "peak_disk_tasks": 0}
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._perform_by_type: dict[type, Callable[[Any], None]] = {
            m.Send: self._send,
            m.OpenGrant: self._open_grant,
            m.CloseGrant: lambda action: self._grants.close(action.grant_id),
            m.Write: self._write,
            m.ComputePrefill: self._compute,
            m.ComputeDecode: self._compute,
            m.Compute: self._compute,
            m.Exchange: self._post_shards,
            m.LoadSequence: lambda a: self._gpu_device().load_sequence(a.request_id, a.tokens, a.pages),
            m.ForgetSequence: lambda action: self._gpu_device().forget(action.request_id),
            m.FetchBlock: lambda action: self._spawn(self._fetch(action)),
            m.StoreBlock: lambda action: self._spawn(self._persist(action)),
            m.SetDeadline: self._set_deadline,
            m.ClearDeadline: lambda action: self._deadlines.clear(action.key),
        }

    # --- life ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Listen on all planes.

        Raises:
            HostError: an address or device is not there, or is taken.
        """
        self._loop.set_exception_handler(self._loop_failed)
        await self._control.listen()
        for name in self._listen:
            if self._data is None:
                raise BugError(f"{self._context.name} listens at {name} but has no memory")
            self._data.listen(self._cluster.endpoints[name])
        if self._exchange is not None:
            self._exchange.listen()

    def start(self) -> None:
        """Every peer listens: let the machine begin."""
        self._running = True
        self._cpu_started_ns = cpu_time_ns()
        if self._exchange is not None:
            self._exchange.connect()  # now, so that no shard waits for it
        self._events.appendleft(m.Started())  # a peer that started earlier may have been heard already
        self._wake()

    def quiesce(self) -> dict[str, object]:
        """Stop the machine; peers that vanish from now on are no news. Result: the final report."""
        self._end()
        self._events.clear()
        self._alarm.set(None)
        self._lag.stop()
        if self._trace is not None:
            self._trace.flush()
        return self._report()

    async def close(self) -> None:
        """Close all connections and files."""
        self._end()
        for task in self._disk_tasks:
            task.cancel()
        if self._data is not None:
            self._data.close()
        if self._exchange is not None:
            self._exchange.close()
        await self._control.close()
        if self._store is not None:
            self._store.close()
        self._alarm.close()
        self._lag.stop()
        if self._trace is not None:
            self._trace.close()

    def _report(self) -> dict[str, object]:
        cpu_ns = cpu_time_ns()
        report: dict[str, object] = {
            "role": self._context.name,
            "incarnation": self._context.incarnation,
            **self._counts,
            "open_grants": len(self._grants),
            "lag_samples": self._lag.samples,
            "lag_p99_ns": self._lag.quantile_ns(0.99),
            "lag_max_ns": self._lag.max_ns,
            "cpu_ns": cpu_ns,
            "cpu_run_ns": cpu_ns - self._cpu_started_ns,
            "private_bytes": private_memory_bytes(),
            "compute": asdict(self._gpu.counters),
            "control": asdict(self._control.counters),
        }
        if self._data is not None:
            report["data"] = {
                **asdict(self._data.counters),
                "bytes_sent": self._data.bytes_sent,
                "peak_outstanding": self._data.peak_outstanding,
            }
        if self._exchange is not None:
            report["exchange"] = asdict(self._exchange.counters)
        if isinstance(self._machine, m.Reporting) and (figures := self._machine.report()):
            report["machine"] = figures
        if submission := self._submitter.report():
            report["submission"] = submission
        if self._store is not None:
            report["disk"] = asdict(self._store.counters)
        return report

    # --- events --------------------------------------------------------------------------------------------------

    def deliver(self, event: m.Event) -> None:
        """Queue an event for the machine."""
        if self._over:
            return
        self._events.append(event)
        if self._running:
            self._wake()

    def _wake(self) -> None:
        if not self._drain_due:
            self._drain_due = True
            self._loop.call_soon(self._drain)

    def _end(self) -> None:
        self._running, self._over = False, True

    def _drain(self) -> None:
        self._drain_due = False
        if not self._running:
            return
        self._lag.working()
        events, counts = self._events, self._counts
        counts["peak_events"] = max(counts["peak_events"], len(events))
        try:
            for _ in range(min(len(events), _EVENTS_PER_PASS)):
                self._handle(events.popleft())
        except Exception as error:
            self._die(error)
            return
        if events:
            self._wake()
        self._post_submitted()
        self._set_alarm()

    def _handle(self, event: m.Event) -> None:
        now_ns = time.monotonic_ns()
        if isinstance(event, m.WriteCompleted | m.WriteFailed):
            self._submitter.ended(event.write_id, now_ns)
        actions = self._machine.handle(event, now_ns)
        self._counts["events"] += 1
        self._counts["actions"] += len(actions)
        trace = self._trace
        if trace is not None:
            trace.record(now_ns, event)
            for action in actions:
                trace.record(now_ns, action)
        for action in actions:
            self._perform_by_type[type(action)](action)
        if self._observer is not None:
            self._observer(now_ns, event, actions)

    def _received(self, sender: str, message: Message) -> None:
        self.deliver(m.Received(sender, message))

    def _peer_lost(self, role: str, reason: str) -> None:
        self._warn(f"lost {role}: {reason}")

    def _exchange_failed(self, error: TestbedError) -> None:
        if not self._over:
            self._die(error)

    def _warn(self, text: str) -> None:
        if self._running:
            _log.info("%s: %s", self._context.name, text)  # the trace has it; stderr is for the one who failed
            if self._trace is not None:
                self._trace.note(time.monotonic_ns(), "Warning", why=text)

    def _die(self, error: BaseException) -> None:
        self._end()
        if self._trace is not None:
            with contextlib.suppress(HostError):  # the error is what counts
                self._trace.flush()
        if not self.failure.done():
            self.failure.set_exception(error)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._die(context.get("exception") or BugError(str(context.get("message"))))

    # --- actions -------------------------------------------------------------------------------------------------

    def _send(self, action: m.Send) -> None:
        if action.to == self._context.name:
            self.deliver(m.Received(action.to, action.message))
        else:
            self._control.send(action.to, action.message)

    def _open_grant(self, action: m.OpenGrant) -> None:
        self._grants.open(action.ref.grant_id, action.ref.epoch, action.landing)

    def _write(self, action: m.Write) -> None:
        if self._data is None:
            raise BugError(f"{self._context.name} posts a write but has no memory")
        if action.submit_ns or action.window:
            self._submitter.ask(action, time.monotonic_ns())
        else:
            self._data.post(action)

    def _post_submitted(self) -> None:
        for write in self._submitter.take(time.monotonic_ns()):
            assert self._data is not None
            self._data.post(write)

    def _post_shards(self, action: m.Exchange) -> None:
        if self._exchange is None:
            raise BugError(f"{self._context.name} has a collective but no peers")
        self._exchange.post(action)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._disk_tasks.add(task)
        self._counts["peak_disk_tasks"] = max(self._counts["peak_disk_tasks"], len(self._disk_tasks))
        task.add_done_callback(self._disk_done)

    def _disk_done(self, task: asyncio.Task[None]) -> None:
        self._disk_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(error)

    def _disk(self) -> Store:
        if self._store is None:
            raise BugError(f"{self._context.name} has no disk")
        return self._store

    async def _fetch(self, action: m.FetchBlock) -> None:
        try:
            await self._disk().fetch(action.key, action.offset)
        except BugError:
            raise
        except TestbedError as error:
            self.deliver(m.FetchFailed(action.key, action.page, str(error)))
        else:
            self.deliver(m.BlockFetched(action.key, action.page))

    async def _persist(self, action: m.StoreBlock) -> None:
        try:
            await self._disk().store(action.key, action.offset)
        except BugError:
            raise
        except TestbedError as error:
            self.deliver(m.StoreFailed(action.key, action.page, str(error)))
        else:
            self.deliver(m.BlockWritten(action.key, action.page))

    def _gpu_device(self) -> Device:
        if self._device is None:
            raise BugError(f"{self._context.name} has no GPU")
        return self._device

    def _compute(self, action: Compute) -> None:
        self._gpu.submit(self._gpu_device(), action)

    # --- time ----------------------------------------------------------------------------------------------------

    def _set_deadline(self, action: m.SetDeadline) -> None:
        self._deadlines.set(action.key, action.at_ns)

    def _set_alarm(self) -> None:
        times = (self._deadlines.next_ns(), self._gpu.end_ns, self._submitter.next_ns())
        self._alarm.set(min((at for at in times if at is not None), default=None))

    def _ring(self) -> None:
        if not self._running:
            return
        try:
            now_ns = time.monotonic_ns()
            while (finished := self._gpu.finish(now_ns)) is not None:
                self.deliver(finished)
            self._post_submitted()
            for key in self._deadlines.take_passed(now_ns):
                self.deliver(m.DeadlinePassed(key))
        except Exception as error:
            self._die(error)
            return
        self._set_alarm()
