"""All machines of a cluster in one process, real bytes in real memories, virtual time: the test bench of the protocol.

Delays of messages, writes, disk and deadlines come from a seeded generator, so every seed is another interleaving that
can be replayed. Channels keep the order of their own messages (as TCP does); everything else may overtake.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from emulators.agent_driver import AgentDriver, Outcome, Script
from emulators.cluster import RoleDescription, describe_roles
from testbed.errors import PeerError
from testbed.fabric.spec import ClusterSpec
from testbed.ids import DRIVER
from testbed.kvmodel.device import KvDevice
from testbed.kvmodel.reference import reference_turns
from testbed.protocol import machine as mc
from testbed.protocol.grants import GrantTable
from testbed.protocol.layout import BlockLayout, seal_pieces
from testbed.protocol.messages import FetchRequests
from testbed.protocol.params import ProtocolParams, system_named
from testbed.protocol.plan import plan_cluster
from tests.support import faults as ft

VOCAB = 32_000


class FlatCost:
    """A cost model for tests: time in proportion to tokens."""

    def attention_layer_time_ns(self, batch: Sequence[tuple[int, int]]) -> int:
        """1 us per new token."""
        return sum(new for _, new in batch) * 1_000

    def prefill_layer_time_ns(self, batch: Sequence[tuple[int, int]], layers: int = 1) -> int:
        """2 us per new token and layer."""
        return sum(new for _, new in batch) * 2_000 * layers

    def decode_step_time_ns(self, context_tokens: Sequence[int]) -> int:
        """100 us per step."""
        return 100_000


class ListScript:
    """An agent whose turns are given as (append length, generate count)."""

    def __init__(self, name: str, turns: Sequence[tuple[int, int]], seed: int = 0, shared: int = 0) -> None:
        self.name = name
        self._turns = list(turns)
        rng = np.random.default_rng([seed, *name.encode()])
        self._ids = [rng.integers(0, VOCAB, n).astype(np.uint32) for n, _ in turns]
        if shared := min(shared, len(self._ids[0])):
            self._ids[0][:shared] = np.random.default_rng(seed).integers(0, VOCAB, shared)

    @property
    def turns(self) -> int:
        return len(self._turns)

    def generate_tokens(self, turn: int) -> int:
        return self._turns[turn][1]

    def append_ids(self, turn: int) -> Any:
        return self._ids[turn]


class Role:
    """A machine with its memory, seals, grants, deadlines, disk and GPU."""

    def __init__(self, description: RoleDescription, layout: BlockLayout, oracle: bool) -> None:
        self.machine: Any = description.make()
        self.data = np.zeros(description.memory_bytes, dtype=np.uint8)
        self.seals = np.zeros(description.memory_bytes // layout.layer_block_bytes, dtype=np.uint64)
        self.grants = GrantTable()
        self.deadlines: dict[str, int] = {}
        self.disk: dict[int, tuple[bytes, Any]] = {}
        self.device: KvDevice | None = None
        if description.has_gpu:
            self.device = KvDevice(layout, VOCAB, self.data, self.seals, materialise=oracle)
        self.gpu_free_ns = 0


Hook = Callable[[str, mc.Action], Sequence[mc.Action | ft.Fault]]


class LocalWorld:
    """Hosts every role. ``hook`` may alter, drop or repeat an action before it is performed (fault injection);
    ``watch`` sees every event before its machine does."""

    def __init__(
        self,
        spec: ClusterSpec,
        params: ProtocolParams,
        system: str,
        scripts: Sequence[Script],
        *,
        seed: int = 0,
        hook: Hook | None = None,
        watch: Callable[[str, mc.Event, int], None] | None = None,
        cost: Any = None,
        starts_ns: Sequence[int] = (),
        message_delay_ns: tuple[int, int] = (1_000, 200_000),
    ) -> None:
        self.layout = params.layout
        self.plan = plan_cluster(spec)
        config = system_named(system)
        self.descriptions = describe_roles(
            self.plan,
            config,
            params,
            cost or FlatCost(),
            scripts,
            starts_ns or [0] * len(scripts),
            central_host="ctl0",
        )
        self.roles = {r.name: Role(r, params.layout, not config.moves_kv) for r in self.descriptions}
        self.owner_of = {endpoint: r.name for r in self.descriptions for endpoint in r.endpoints}
        self.scripts = scripts
        self.now_ns = 0
        self.counts: Counter[str] = Counter()
        self.bytes_via: Counter[tuple[str, str]] = Counter()
        self.bytes_exchanged: Counter[tuple[str, str]] = Counter()
        self.refusals: list[str] = []
        self._hook = hook
        self._watch = watch
        self._message_delay_ns = message_delay_ns
        self._rng = random.Random(seed)
        self._heap: list[tuple[int, int, str, Any]] = []
        self._sequence = 0
        self._channel: dict[tuple[str, str], int] = {}
        self._quiet = 0  # entries of the heap that a cluster at rest has

    # --- running -------------------------------------------------------------------------------------------------

    def run(self, *, limit: int = 2_000_000) -> list[Outcome]:
        """Until all agents have ended; their outcomes."""
        for name in self.roles:
            self._at(self.now_ns, name, mc.Started())
        for _ in range(limit):
            if self.driver.finished:
                return self.driver.outcomes
            self.step()
        raise AssertionError(f"not finished after {limit} events")

    def drain(self, *, limit: int = 200_000) -> None:
        """Run on until nothing but periodic fetches is left."""
        for _ in range(limit):
            busy = len(self._heap) > self._quiet
            if not busy and all(set(r.deadlines) <= {"fetch"} for r in self.roles.values()):
                return
            self.step()
        raise AssertionError("the cluster never calms down")

    def step(self) -> None:
        """Deliver the next event."""
        at, _, name, event = heapq.heappop(self._heap)
        self._quiet -= _is_quiet(event)
        self.now_ns = max(self.now_ns, at)
        if callable(event):
            event()
            return
        role = self.roles[name]
        if isinstance(event, mc.DeadlinePassed):
            if role.deadlines.get(event.key) != at:
                return
            del role.deadlines[event.key]
        if self._watch:
            self._watch(name, event, self.now_ns)
        for action in role.machine.handle(event, self.now_ns):
            for performed in self._hook(name, action) if self._hook else (action,):
                self._perform(name, role, performed)

    @property
    def driver(self) -> AgentDriver:
        """The agent driver machine."""
        machine = self.roles[DRIVER].machine
        assert isinstance(machine, AgentDriver)
        return machine

    def check_tokens(self) -> int:
        """Compare every emitted token with the reference, those of failed rounds too; how many were compared."""
        compared = 0
        for agent, script in enumerate(self.scripts):
            rounds = [o for o in self.driver.outcomes if o.agent == agent]
            turns = [(script.append_ids(t), script.generate_tokens(t)) for t in range(len(rounds))]
            for outcome, expected in zip(rounds, reference_turns(self.layout, VOCAB, turns), strict=True):
                got = {at: expected[at] for at in outcome.tokens}
                assert outcome.tokens == got, f"agent {agent} turn {outcome.turn}: wrong tokens"
                assert outcome.error or len(got) == outcome.generate_tokens, f"agent {agent}: tokens are missing"
                compared += len(got)
        return compared

    # --- performing ----------------------------------------------------------------------------------------------

    def _at(self, at_ns: int, name: str, event: Any) -> None:
        self._sequence += 1
        self._quiet += _is_quiet(event)
        heapq.heappush(self._heap, (at_ns, self._sequence, name, event))

    def _later(self, name: str, event: Any, channel: tuple[str, str], low: int, high: int) -> None:
        """Deliver after a random delay, but not before what the channel carried earlier."""
        at = self.now_ns + self._rng.randrange(low, high)
        at = max(at, self._channel.get(channel, 0))
        self._channel[channel] = at
        self._at(at, name, event)

    def _perform(self, name: str, role: Role, action: mc.Action | ft.Fault) -> None:
        self.counts[type(action).__name__] += 1
        match action:
            case mc.Send():
                low, high = self._message_delay_ns
                self._later(action.to, mc.Received(name, action.message), (name, action.to), low, high)
            case mc.OpenGrant():
                role.grants.open(action.ref.grant_id, action.ref.epoch, action.landing)
            case mc.CloseGrant():
                role.grants.close(action.grant_id)
            case mc.ComputePrefill() | mc.ComputeDecode():
                assert role.device is not None
                run = role.device.prefill if isinstance(action, mc.ComputePrefill) else role.device.decode
                tokens = run(action)  # type: ignore[operator]
                role.gpu_free_ns = max(role.gpu_free_ns, self.now_ns) + action.duration_ns
                self._at(role.gpu_free_ns, name, mc.ComputeFinished(action.compute_id, tokens))
            case mc.Compute():
                role.gpu_free_ns = max(role.gpu_free_ns, self.now_ns) + action.duration_ns
                self._at(role.gpu_free_ns, name, mc.ComputeFinished(action.compute_id, {}))
            case mc.Exchange():
                for peer, size in action.shards:
                    self.bytes_exchanged[name, peer] += size
                    delay_ns = self._rng.randrange(10_000, 400_000)
                    shard = mc.ShardArrived(name, action.tag, action.tokens, delay_ns)
                    self._at(self.now_ns + delay_ns, peer, shard)
            case mc.LoadSequence():
                assert role.device is not None
                role.device.load_sequence(action.request_id, action.tokens, action.pages)
            case mc.ForgetSequence():
                assert role.device is not None
                role.device.forget(action.request_id)
            case mc.SetDeadline():
                role.deadlines[action.key] = action.at_ns
                self._at(action.at_ns, name, mc.DeadlinePassed(action.key))
            case mc.ClearDeadline():
                role.deadlines.pop(action.key, None)
            case ft.Delayed():
                late = action.action
                self._at(self.now_ns + action.by_ns, name, lambda: self._perform(name, role, late))
            case mc.FetchBlock() | ft.StaleFetch() | ft.RottenFetch() | ft.FailedFetch():
                self._fetch(name, role, action)
            case mc.StoreBlock() | ft.FailedStore():
                self._store(name, role, action)
            case _:
                self._write(name, role, action)

    def _store(self, name: str, role: Role, action: mc.StoreBlock | ft.FailedStore) -> None:
        if isinstance(action, ft.FailedStore):
            block = action.action
            failed = mc.StoreFailed(block.key, block.page, "no space left on device")
            self._later(name, failed, (name, "disk"), 10_000, 500_000)
            return
        at, n = action.offset // self.layout.layer_block_bytes, self.layout.layers
        data = role.data[action.offset : action.offset + self.layout.full_block_bytes].tobytes()
        seals = role.seals[at : at + n].copy()
        written = mc.BlockWritten(action.key, action.page)

        def durable() -> None:
            role.disk[action.key] = (data, seals)
            self._at(self.now_ns, name, written)

        self._later(name, durable, (name, "disk"), 10_000, 500_000)

    def _fetch(
        self, name: str, role: Role, action: mc.FetchBlock | ft.StaleFetch | ft.RottenFetch | ft.FailedFetch
    ) -> None:
        block = action if isinstance(action, mc.FetchBlock) else action.action
        stored = role.disk.get(block.key)
        if isinstance(action, ft.StaleFetch):
            stored = next((v for k, v in sorted(role.disk.items()) if k != block.key), None)
        if stored is None or isinstance(action, ft.FailedFetch):
            self._later(name, mc.FetchFailed(block.key, block.page, "no such block"), (name, "disk"), 1, 2)
            return
        data, seals = stored
        landed = np.frombuffer(data, dtype=np.uint8).copy()
        if isinstance(action, ft.RottenFetch):
            landed[self._rng.randrange(len(landed))] ^= 1 << self._rng.randrange(8)
        role.data[block.offset : block.offset + len(data)] = landed
        at = block.offset // self.layout.layer_block_bytes
        role.seals[at : at + len(seals)] = seals
        self._later(name, mc.BlockFetched(block.key, block.page), (name, f"disk{block.page}"), 10_000, 500_000)

    def _write(self, name: str, role: Role, posted: Any) -> None:
        """Bytes are read when they land, not when posted: a source that frees its memory early is caught."""
        action: mc.Write = posted if isinstance(posted, mc.Write) else posted.action
        target_name = self.owner_of[action.ref.endpoint]
        if isinstance(posted, ft.RefusedWrite):
            self._later(name, mc.WriteFailed(action.write_id, "unreachable"), (name, "refused"), 1_000, 50_000)
            return
        if isinstance(posted, ft.LostWrite):
            self._later(name, mc.WriteCompleted(action.write_id), (name, "lost"), 1_000, 50_000)
            return
        self.bytes_via[action.via, action.ref.endpoint] += len(action.pieces) * action.piece_bytes

        def land() -> None:
            channel = (target_name, f"ack:{name}:{action.via}")
            failure = self._land(role, target_name, action, posted)
            if isinstance(posted, ft.RepeatedWrite):
                assert self._land(role, target_name, action, posted), "a grant was used twice"
            if failure:
                self._later(name, mc.WriteFailed(action.write_id, failure), channel, 1_000, 50_000)
            else:
                self._later(name, mc.WriteCompleted(action.write_id), channel, 1_000, 50_000)

        if isinstance(posted, ft.LateWrite):
            self._at(self.now_ns + posted.by_ns, target_name, land)
        else:
            self._later(target_name, land, (action.via, action.ref.endpoint), 10_000, 400_000)

    def _land(self, role: Role, target_name: str, action: mc.Write, posted: Any) -> str:
        """What the destination does with a write: judge the grant, take the bytes, recompute their seals in place.

        Result: why the write was refused, or "".
        """
        target, lb = self.roles[target_name], self.layout.layer_block_bytes
        ref = action.ref
        try:
            landing = target.grants.begin(ref.grant_id, ref.epoch, len(action.pieces) * action.piece_bytes)
        except PeerError as error:
            self.refusals.append(str(error))
            return str(error)
        data = np.concatenate([role.data[p : p + action.piece_bytes] for p in action.pieces])
        seals = np.concatenate([role.seals[p // lb : (p + action.piece_bytes) // lb] for p in action.pieces])
        if isinstance(posted, ft.FlippedWrite):
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        if isinstance(posted, ft.MisplacedWrite):
            within = lb if landing.piece_bytes > lb else lb // 2
            data = np.roll(data, landing.piece_bytes if len(landing.pieces) > 1 else within)
        for k, piece in enumerate(landing.pieces):
            target.data[piece : piece + landing.piece_bytes] = data[k * landing.piece_bytes :][: landing.piece_bytes]
        landed = np.concatenate([target.data[p : p + landing.piece_bytes] for p in landing.pieces])
        found = seal_pieces(landed.data, landing.keys, landing.layer_begin, landing.layer_end, lb)
        if found != seals.tolist():
            target.grants.close(ref.grant_id)
            reason = f"seal mismatch under grant {ref.grant_id}"
            self.refusals.append(reason)
            self._at(self.now_ns, target_name, mc.LandingRefused(ref.grant_id, reason))
            return reason
        per_piece = landing.piece_bytes // lb
        for k, piece in enumerate(landing.pieces):
            target.seals[piece // lb : piece // lb + per_piece] = seals[k * per_piece : (k + 1) * per_piece]
        assert target.grants.finish(ref.grant_id, ref.epoch)
        self._at(self.now_ns, target_name, mc.WriteLanded(ref.grant_id))
        return ""


def _is_quiet(event: Any) -> bool:
    """Is the event part of the rest of a cluster: a deadline, or a leader's periodic report?"""
    if isinstance(event, mc.Received):
        return isinstance(event.message, FetchRequests)
    return isinstance(event, mc.DeadlinePassed)
