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
from testbed.protocol.params import SYSTEMS, ProtocolParams
from testbed.protocol.plan import plan_cluster

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
        if shared:
            self._ids[0][:shared] = np.random.default_rng(seed).integers(0, VOCAB, shared)

    @property
    def turns(self) -> int:
        return len(self._turns)

    def generate_tokens(self, turn: int) -> int:
        return self._turns[turn][1]

    def append_ids(self, turn: int) -> Any:
        return self._ids[turn]


class _Role:
    def __init__(self, description: RoleDescription, layout: BlockLayout, oracle: bool) -> None:
        self.machine = description.make()
        self.data = np.zeros(description.memory_bytes, dtype=np.uint8)
        self.seals = np.zeros(description.memory_bytes // layout.layer_block_bytes, dtype=np.uint64)
        self.grants = GrantTable()
        self.deadlines: dict[str, int] = {}
        self.disk: dict[int, tuple[bytes, Any]] = {}
        self.device = KvDevice(layout, VOCAB, self.data, self.seals, materialise=oracle) if description.has_gpu else None
        self.gpu_free_ns = 0


class LocalWorld:
    """Hosts every role; ``hooks`` may alter or drop an action before it is performed (fault injection in tests)."""

    def __init__(
        self,
        spec: ClusterSpec,
        params: ProtocolParams,
        system: str,
        scripts: Sequence[Script],
        *,
        seed: int = 0,
        hook: Callable[[str, mc.Action], list[mc.Action]] | None = None,
        cost: Any = None,
    ) -> None:
        self.layout = params.layout
        plan = plan_cluster(spec)
        config = SYSTEMS[system]
        roles = describe_roles(
            plan, config, params, cost or FlatCost(), scripts, [0] * len(scripts), central_host="ctl0"
        )
        self.roles = {r.name: _Role(r, params.layout, not config.moves_kv) for r in roles}
        self.owner_of = {endpoint: r.name for r in roles for endpoint in r.endpoints}
        self.scripts = scripts
        self.now_ns = 0
        self.counts: Counter[str] = Counter()
        self.bytes_via: Counter[tuple[str, str]] = Counter()
        self._hook = hook
        self._rng = random.Random(seed)
        self._heap: list[tuple[int, int, str, Any]] = []
        self._sequence = 0
        self._channel: dict[tuple[str, str], int] = {}

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
            if not any(not isinstance(e[3], mc.DeadlinePassed) for e in self._heap if not _is_fetch(e[3])):
                if all(not r.deadlines or set(r.deadlines) <= {"fetch"} for r in self.roles.values()):
                    return
            self.step()
        raise AssertionError("the cluster never calms down")

    def step(self) -> None:
        """Deliver the next event."""
        at, _, name, event = heapq.heappop(self._heap)
        self.now_ns = max(self.now_ns, at)
        role = self.roles[name]
        if callable(event):
            event()
            return
        if isinstance(event, mc.DeadlinePassed):
            if role.deadlines.get(event.key) != at:
                return
            del role.deadlines[event.key]
        for action in role.machine.handle(event, self.now_ns):
            for performed in self._hook(name, action) if self._hook else [action]:
                self._perform(name, role, performed)

    @property
    def driver(self) -> AgentDriver:
        """The agent driver machine."""
        machine = self.roles[DRIVER].machine
        assert isinstance(machine, AgentDriver)
        return machine

    def check_tokens(self) -> int:
        """Compare every emitted token with the reference; how many were compared."""
        compared = 0
        for agent, script in enumerate(self.scripts):
            turns = [(script.append_ids(t), script.generate_tokens(t)) for t in range(script.turns)]
            done = [o for o in self.driver.outcomes if o.agent == agent and o.completed_ns and not o.error]
            for outcome, expected in zip(done, reference_turns(self.layout, VOCAB, turns[: len(done)]), strict=True):
                assert [outcome.tokens[i] for i in range(outcome.generate_tokens)] == expected, (agent, outcome.turn)
                compared += len(expected)
        return compared

    # --- performing ----------------------------------------------------------------------------------------------

    def _at(self, at_ns: int, name: str, event: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_ns, self._sequence, name, event))

    def _later(self, name: str, event: Any, channel: tuple[str, str], low: int, high: int) -> None:
        """Deliver after a random delay, but not before what the channel carried earlier."""
        at = self.now_ns + self._rng.randrange(low, high)
        at = max(at, self._channel.get(channel, 0))
        self._channel[channel] = at
        self._at(at, name, event)

    def _perform(self, name: str, role: _Role, action: mc.Action) -> None:
        self.counts[type(action).__name__] += 1
        match action:
            case mc.Send():
                self._later(action.to, mc.Received(name, action.message), (name, action.to), 1_000, 200_000)
            case mc.OpenGrant():
                role.grants.open(action.ref.grant_id, action.ref.epoch, action.landing)
            case mc.CloseGrant():
                role.grants.close(action.grant_id)
            case mc.Write():
                self._write(name, role, action)
            case mc.ComputePrefill() | mc.ComputeDecode():
                assert role.device is not None
                run = role.device.prefill if isinstance(action, mc.ComputePrefill) else role.device.decode
                tokens = run(action)  # type: ignore[operator]
                role.gpu_free_ns = max(role.gpu_free_ns, self.now_ns) + action.duration_ns
                self._at(role.gpu_free_ns, name, mc.ComputeFinished(action.compute_id, tokens))
            case mc.LoadSequence():
                assert role.device is not None
                role.device.load_sequence(action.request_id, action.tokens, action.pages)
            case mc.ForgetSequence():
                assert role.device is not None
                role.device.forget(action.request_id)
            case mc.FetchBlock():
                self._fetch(name, role, action)
            case mc.StoreBlock():
                size = self.layout.full_block_bytes
                at, n = action.offset // self.layout.layer_block_bytes, self.layout.layers
                role.disk[action.key] = (
                    role.data[action.offset : action.offset + size].tobytes(),
                    role.seals[at : at + n].copy(),
                )
                self._later(name, mc.BlockWritten(action.key, action.page), (name, "disk"), 10_000, 500_000)
            case mc.SetDeadline():
                role.deadlines[action.key] = action.at_ns
                self._at(action.at_ns, name, mc.DeadlinePassed(action.key))
            case mc.ClearDeadline():
                role.deadlines.pop(action.key, None)

    def _fetch(self, name: str, role: _Role, action: mc.FetchBlock) -> None:
        stored = role.disk.get(action.key)
        if stored is None:
            self._later(name, mc.FetchFailed(action.key, action.page, "no such block"), (name, "disk"), 1, 2)
            return
        data, seals = stored
        role.data[action.offset : action.offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        at = action.offset // self.layout.layer_block_bytes
        role.seals[at : at + len(seals)] = seals
        self._later(name, mc.BlockFetched(action.key, action.page), (name, f"disk{action.page}"), 10_000, 500_000)

    def _write(self, name: str, role: _Role, action: mc.Write) -> None:
        """Bytes are read when posted and when landing is delayed: a source that frees its memory early is caught."""
        target_name = self.owner_of[action.ref.endpoint]
        target = self.roles[target_name]
        lb = self.layout.layer_block_bytes
        self.bytes_via[action.via, action.ref.endpoint] += len(action.pieces) * action.piece_bytes

        def land() -> None:
            channel = (target_name, f"ack:{name}:{action.via}")
            try:
                landing = target.grants.begin(action.ref.grant_id, action.ref.epoch, len(action.pieces) * action.piece_bytes)
            except PeerError as error:
                self._later(name, mc.WriteFailed(action.write_id, str(error)), channel, 1_000, 50_000)
                return
            data = np.concatenate([role.data[p : p + action.piece_bytes] for p in action.pieces])
            seals = np.concatenate([role.seals[p // lb : (p + action.piece_bytes) // lb] for p in action.pieces])
            at = 0
            for piece in landing.pieces:
                target.data[piece : piece + landing.piece_bytes] = data[at : at + landing.piece_bytes]
                at += landing.piece_bytes
            found = seal_pieces(data.data, landing.keys, landing.layer_begin, landing.layer_end, lb)
            if found != seals.tolist():
                target.grants.close(action.ref.grant_id)
                reason = f"seal mismatch under grant {action.ref.grant_id}"
                self._later(target_name, mc.LandingRefused(action.ref.grant_id, reason), channel, 0, 1)
                self._later(name, mc.WriteFailed(action.write_id, reason), channel, 1_000, 50_000)
                return
            per_piece = landing.piece_bytes // lb
            for k, piece in enumerate(landing.pieces):
                target.seals[piece // lb : piece // lb + per_piece] = seals[k * per_piece : (k + 1) * per_piece]
            target.grants.finish(action.ref.grant_id, action.ref.epoch)
            self._at(self.now_ns, target_name, mc.WriteLanded(action.ref.grant_id))
            self._later(name, mc.WriteCompleted(action.write_id), channel, 1_000, 50_000)

        self._later(target_name, land, (action.via, action.ref.endpoint), 10_000, 400_000)


def _is_fetch(event: Any) -> bool:
    return isinstance(event, mc.DeadlinePassed)
