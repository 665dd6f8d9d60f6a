"""The sim world: hosts all roles of a cluster in virtual time (integer ns).

It performs what the live world performs, by the same rules: a grant is judged by the same ``GrantTable`` where the
write lands, a write brings blocks that are identified there (``memory``), a GPU and a disk do one thing after the
other. Bytes are flows over the resources of the live world (``resources``), charged with the transport's headers.

Invariants. Events are taken in the order of (time, priority, sequence), so a run is a function of its inputs alone:
no set is iterated, and what is drawn comes from ``SimParams.draw``. Within one instant what ends is told before what
begins, deadlines last.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from testbed.errors import BugError, PeerError, RunFailedError
from testbed.fabric.peaks import PEAK_WINDOW_NS, Peaks
from testbed.fabric.sim import resources as names
from testbed.fabric.sim.disciplines import Lane
from testbed.fabric.sim.fluid import FluidNetwork
from testbed.fabric.sim.gpu import SimGpu
from testbed.fabric.sim.memory import Tags
from testbed.fabric.sim.params import SimParams, payload_bytes, wire_bytes
from testbed.fabric.sim.role import Flow, SimCounter, SimRole
from testbed.fabric.spec import ClusterSpec
from testbed.ids import cnic_hbm_endpoint
from testbed.protocol import machine as m
from testbed.protocol.layout import MASK64, BlockLayout
from testbed.protocol.shards import shard_wire_bytes
from testbed.units import NS_PER_S

_SAMPLE_NS = NS_PER_S // 4
_TICK_EVENTS = 4096  # between two looks at how far the run is
_WRITE_ENDS = (m.WriteCompleted, m.WriteFailed)
_GIVE_UP_NS = 365 * 24 * 3600 * NS_PER_S
"""A year of emulated time: a cluster that is not done by then never will be."""


class Priority(enum.IntEnum):
    """Order of events within one instant."""

    ENDED = 0
    MESSAGE = 1
    DEADLINE = 2


class Hosted(Protocol):
    """What the world needs to know of a role (``emulators.cluster.RoleDescription``)."""

    @property
    def name(self) -> str:
        """Name of the role."""
        ...

    @property
    def make(self) -> Callable[[], m.Machine]:
        """Makes its machine."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory it owns."""
        ...

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where that memory can be written."""
        ...

    @property
    def has_gpu(self) -> bool:
        """Whether it computes."""
        ...

    @property
    def has_disk(self) -> bool:
        """Whether it stores."""
        ...


Record = Callable[[str, int, m.Event, Sequence[m.Action]], None]
"""Told every event that a role handles, with its actions."""


class SimWorld:
    """``hosted`` roles on the cluster ``spec``. ``materialise``: GPUs make hits themselves (Oracle).

    ``counters`` has every link by name, ``samples`` what the SNICs had carried, a few times a second.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        layout: BlockLayout,
        hosted: Sequence[Hosted],
        params: SimParams,
        *,
        vocab_size: int,
        materialise: bool,
        record: Record | None = None,
    ) -> None:
        self.layout = layout
        self.params = params
        self.tags = Tags(layout)
        self.now_ns = 0
        self.events = 0
        self.resources = names.resources_of(spec, params)
        self.network = FluidNetwork(names.shared_resources(self.resources.rates_bps, params, spec))
        self.counters = {name: SimCounter() for name in self.resources.links}
        self.samples: list[tuple[int, dict[str, int]]] = []
        self._snics = [name for name in self.resources.rates_bps if ".snic." in name]
        self._next_sample_ns = 0
        self.pcie_peaks = Peaks()
        self._pcie = [name for name in self.resources.rates_bps if ".pcie." in name]
        self._next_peak_ns = 0
        self.roles: dict[str, SimRole] = {}
        self._owner: dict[str, SimRole] = {}
        for description in hosted:
            role = SimRole(description.name, description.make(), description.memory_bytes, layout, self.tags)
            if description.has_gpu:
                role.gpu = SimGpu(layout, vocab_size, role.memory, materialise)
            role.disk = {} if description.has_disk else None
            self.roles[description.name] = role
            self._owner.update(dict.fromkeys(description.endpoints, role))
        self._record = record
        self._heap: list[tuple[int, int, int, SimRole, Any]] = []
        self._sequence = 0
        self._paths: dict[tuple[str, str], tuple[tuple[str, ...], tuple[SimCounter, ...], str]] = {}
        self._message_ns = params.message_latency_ns
        self._shard_ns = params.shard_latency_ns
        self._earliest_ns = params.message_latency_ns - params.message_jitter_ns
        self._spread_ns = 2 * params.message_jitter_ns + 1
        self._random = _mixed(params.draw)
        self._perform: dict[type, Callable[[SimRole, Any], None]] = {
            m.Send: self._send,
            m.OpenGrant: lambda role, a: role.grants.open(a.ref.grant_id, a.ref.epoch, a.landing),
            m.CloseGrant: lambda role, a: role.grants.close(a.grant_id),
            m.Write: self._write,
            m.ComputePrefill: lambda role, a: self._compute(role, a, _gpu(role).prefill(a)),
            m.ComputeDecode: lambda role, a: self._compute(role, a, _gpu(role).decode(a)),
            m.Compute: lambda role, a: self._compute(role, a, {}),
            m.Exchange: self._exchange,
            m.LoadSequence: lambda role, a: _gpu(role).load_sequence(a.request_id, a.tokens, a.pages),
            m.ForgetSequence: lambda role, a: _gpu(role).forget(a.request_id),
            m.FetchBlock: self._disk,
            m.StoreBlock: self._disk,
            m.SetDeadline: self._set_deadline,
            m.ClearDeadline: self._clear_deadline,
        }

    # --- running -------------------------------------------------------------------------------------------------

    def run(self, finished: Callable[[], bool], tick: Callable[[], None] = lambda: None) -> None:
        """From the start of all roles until ``finished``; ``tick`` is called now and then, to show progress.

        Raises:
            RunFailedError: nothing is left to happen, and it is not finished.
            BugError: a machine asked for what no world can do.
        """
        for role in self.roles.values():
            self._at(self.now_ns, Priority.ENDED, role, m.Started())
        while not finished():
            if not self.events % _TICK_EVENTS:
                tick()
            self.step()
        self._sample()
        self._look_at_pcie()

    def step(self) -> None:
        """Let the next thing happen: flows that end, or one event."""
        heap, network = self._heap, self.network
        flow_ns = network.next_ns()
        if flow_ns is not None and (not heap or flow_ns <= heap[0][0]):
            self._advance(flow_ns)
            for flow in network.complete(flow_ns):
                assert isinstance(flow, Flow)
                flow.end()
            return
        if not heap or heap[0][0] > _GIVE_UP_NS:
            raise RunFailedError(f"the cluster came to a standstill after {self.now_ns / NS_PER_S:.1f} emulated s")
        at_ns, _, _, role, event = heapq.heappop(heap)
        self._advance(at_ns)
        if type(event) is str:
            self._deadline(role, event)
        elif isinstance(event, Flow):
            event.end()
        else:
            self._deliver(role, event)

    def _advance(self, now_ns: int) -> None:
        self.now_ns = now_ns
        if now_ns >= self._next_sample_ns:
            self._sample()
            self._next_sample_ns = now_ns // _SAMPLE_NS * _SAMPLE_NS + _SAMPLE_NS
            if now_ns >= self._next_peak_ns:
                self._look_at_pcie()
                self._next_peak_ns = now_ns // PEAK_WINDOW_NS * PEAK_WINDOW_NS + PEAK_WINDOW_NS

    def _look_at_pcie(self) -> None:
        self.pcie_peaks.look(self.now_ns, {name: self.network.carried_bytes(name, self.now_ns) for name in self._pcie})

    def _sample(self) -> None:
        network, now_ns = self.network, self.now_ns
        self.samples.append((now_ns, {name: network.carried_bytes(name, now_ns) for name in self._snics}))

    def _at(self, at_ns: int, priority: Priority, role: SimRole, event: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_ns, priority, self._sequence, role, event))

    def _deliver(self, role: SimRole, event: m.Event) -> None:
        now_ns = self.now_ns
        if isinstance(event, _WRITE_ENDS) and role.submitter.ended(event.write_id, now_ns):
            self._submit(role)
        actions = role.handle(event, now_ns)
        self.events += 1
        role.events += 1
        role.actions += len(actions)
        if self._record is not None:
            self._record(role.name, now_ns, event, actions)
        perform = self._perform
        for action in actions:
            perform[type(action)](role, action)

    # --- messages and time ---------------------------------------------------------------------------------------

    def _send(self, role: SimRole, action: m.Send) -> None:
        to = self.roles.get(action.to)
        if to is None:
            raise BugError(f"{role.name} sends to {action.to}, which the cluster does not have")
        at_ns = self.now_ns
        if to is not role:
            sent_ns, there_ns = role.channels.get(action.to, (-1, 0))
            if sent_ns != at_ns:  # what is sent together travels together, as it does in one segment
                self._random = _mixed(self._random)
                delay_ns = self._earliest_ns + (self._random >> 32) * self._spread_ns // 2**32
                there_ns = max(at_ns + delay_ns, there_ns)
                role.channels[action.to] = at_ns, there_ns
            at_ns = there_ns
        self._at(at_ns, Priority.MESSAGE, to, m.Received(role.name, action.message))

    def _set_deadline(self, role: SimRole, action: m.SetDeadline) -> None:
        """A deadline that is renewed keeps its entry in the heap, which is moved on when its time comes."""
        key, at_ns = action.key, max(action.at_ns, self.now_ns)
        role.deadlines[key] = at_ns
        armed_ns = role.armed.get(key)
        if armed_ns is None or at_ns < armed_ns:
            role.armed[key] = at_ns
            self._at(at_ns, Priority.DEADLINE, role, key)

    def _clear_deadline(self, role: SimRole, action: m.ClearDeadline) -> None:
        role.deadlines.pop(action.key, None)

    def _deadline(self, role: SimRole, key: str) -> None:
        if role.armed.get(key) == self.now_ns:
            del role.armed[key]
        at_ns = role.deadlines.get(key)
        if at_ns is None:
            return
        if at_ns <= self.now_ns:
            del role.deadlines[key]
            self._deliver(role, m.DeadlinePassed(key))
        elif key not in role.armed:
            role.armed[key] = at_ns
            self._at(at_ns, Priority.DEADLINE, role, key)

    def _compute(
        self, role: SimRole, action: m.ComputePrefill | m.ComputeDecode | m.Compute, tokens: dict[str, int]
    ) -> None:
        end_ns = _gpu(role).finish_ns(self.now_ns, action.duration_ns)
        self._at(end_ns, Priority.ENDED, role, m.ComputeFinished(action.compute_id, tokens))

    # --- writes --------------------------------------------------------------------------------------------------

    def _write(self, role: SimRole, action: m.Write) -> None:
        if action.submit_ns or action.window:
            role.submitter.ask(action, self.now_ns)
            self._submit(role)
        else:
            self._start_write(role, action)

    def _submit(self, role: SimRole) -> None:
        """Start what has been submitted; look again when the next will have been."""
        for write in role.submitter.take(self.now_ns):
            self._start_write(role, write)
        at_ns = role.submitter.next_ns()
        if at_ns is not None and (role.submits_ns is None or at_ns < role.submits_ns):
            role.submits_ns = at_ns
            self._at(at_ns, Priority.ENDED, role, Flow(lambda: self._submitted(role)))

    def _submitted(self, role: SimRole) -> None:
        if role.submits_ns is not None and role.submits_ns <= self.now_ns:
            role.submits_ns = None
        self._submit(role)

    def _start_write(self, role: SimRole, action: m.Write) -> None:
        size = len(action.pieces) * action.piece_bytes
        if size != action.ref.size_bytes or not size:
            raise BugError(f"write {action.write_id} gathers {size} bytes for a grant of {action.ref.size_bytes}")
        payload = payload_bytes(size, size // self.layout.layer_block_bytes)

        def end() -> None:
            role.bytes_sent += payload
            self._land(role, self._owner[action.ref.endpoint], action)

        self._transfer((action.via, action.ref.endpoint), payload, Lane.KV, end)

    def _transfer(self, route: tuple[str, str], payload: int, lane: Lane, then: Callable[[], None]) -> None:
        """``payload`` bytes between two endpoints, counted where they crossed when all have."""
        if route not in self._paths:
            path = self.resources.path(*route)
            limited = tuple(name for name in dict.fromkeys(path) if name in self.resources.rates_bps)
            self._paths[route] = (limited, tuple(self.counters[name] for name in path), names.memory_of(route[0]))
        limited, counters, source = self._paths[route]
        wire = wire_bytes(payload)

        def end() -> None:
            for counter in counters:
                counter.add(wire, payload, lane)
            then()

        self.network.start(self.now_ns, wire, limited, lane, Flow(end), source)

    def _land(self, source: SimRole, target: SimRole, action: m.Write) -> None:
        """What the destination does: judge the grant, identify what came, tell both ends."""
        ref, later_ns = action.ref, self.now_ns + self._message_ns
        try:
            landing = target.grants.begin(ref.grant_id, ref.epoch, ref.size_bytes)
        except PeerError as error:
            target.writes_refused += 1
            failed = m.WriteFailed(action.write_id, f"destination refused it: {error}")
            self._at(later_ns, Priority.ENDED, source, failed)
            return
        wrong = target.memory.take(landing, source.memory.read(action.pieces, action.piece_bytes))
        if wrong:
            target.writes_corrupt += 1
            target.grants.close(ref.grant_id)
            self._at(self.now_ns, Priority.ENDED, target, m.LandingRefused(ref.grant_id, wrong))
            failed = m.WriteFailed(action.write_id, f"destination refused it: {wrong}")
            self._at(later_ns, Priority.ENDED, source, failed)
            return
        target.grants.finish(ref.grant_id, ref.epoch)
        target.writes_landed += 1
        self._at(self.now_ns, Priority.ENDED, target, m.WriteLanded(ref.grant_id))
        self._at(later_ns, Priority.ENDED, source, m.WriteCompleted(action.write_id))

    # --- collectives ---------------------------------------------------------------------------------------------

    def _exchange(self, role: SimRole, action: m.Exchange) -> None:
        """Every shard is a flow of its own in the high lane, and is told to its receiver when all of it is there."""
        source, posted_ns = cnic_hbm_endpoint(role.name), self.now_ns

        def arrived(peer: SimRole) -> None:
            shard = m.ShardArrived(role.name, action.tag, action.tokens, self.now_ns - posted_ns)
            self._at(self.now_ns + self._shard_ns, Priority.ENDED, peer, shard)

        for name, size in action.shards:
            peer, payload = self._owner[cnic_hbm_endpoint(name)], shard_wire_bytes(size)
            role.bytes_sent += payload
            self._transfer((source, cnic_hbm_endpoint(name)), payload, Lane.HIGH, partial(arrived, peer))

    # --- disks ---------------------------------------------------------------------------------------------------

    def _disk(self, role: SimRole, action: m.FetchBlock | m.StoreBlock) -> None:
        """After its latency a block passes the disk, and the storage cluster's aggregate, where these are limited."""
        if role.disk is None:
            raise BugError(f"{role.name} has no disk")
        complete = self._fetched if isinstance(action, m.FetchBlock) else self._stored
        path = self.resources.disk[role.name]

        def end() -> None:
            complete(role, action)

        def begin() -> None:
            self.network.start(self.now_ns, self.layout.full_block_bytes, path, Lane.KV, Flow(end))

        after = Flow(begin if path else end)
        self._at(self.now_ns + self.params.disk_latency_ns, Priority.ENDED, role, after)

    def _fetched(self, role: SimRole, action: Any) -> None:
        assert role.disk is not None
        tags = role.disk.get(action.key)
        if tags is None:
            self._deliver(role, m.FetchFailed(action.key, action.page, f"block {action.key:016x} is not on disk"))
            return
        role.memory.write((action.offset,), self.layout.full_block_bytes, tags)
        role.blocks_fetched += 1
        self._deliver(role, m.BlockFetched(action.key, action.page))

    def _stored(self, role: SimRole, action: Any) -> None:
        assert role.disk is not None
        role.disk[action.key] = role.memory.read((action.offset,), self.layout.full_block_bytes).copy()
        role.blocks_stored += 1
        self._deliver(role, m.BlockWritten(action.key, action.page))

    def store_before(self, server: str, key: int) -> None:
        """A block has been on a server's disk since before the start (warm start)."""
        disk = self.roles[server].disk
        assert disk is not None
        disk[key] = self.tags.of(key, 0, self.layout.layers)


def _mixed(state: int) -> int:
    """The next state of a linear congruential generator modulo 2**64 (Knuth's MMIX); its upper half is used."""
    return (state * 6364136223846793005 + 1442695040888963407) & MASK64


def _gpu(role: SimRole) -> SimGpu:
    if role.gpu is None:
        raise BugError(f"{role.name} has no GPU")
    return role.gpu
