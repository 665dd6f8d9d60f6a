"""The shell around a machine: events one at a time, actions in order, time kept, deaths told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import HostError
from testbed.fabric.live.blockstore import DiskCounters
from testbed.fabric.live.gpu import Gpu
from testbed.fabric.live.memory import Memory
from testbed.fabric.live.roles import LiveCluster, LiveRole, RoleContext
from testbed.fabric.live.timer import Alarm, Deadlines
from testbed.fabric.live.vitals import LagMeter, private_memory_bytes
from testbed.protocol import machine as m
from testbed.protocol.grants import GrantRef, Landing
from testbed.protocol.layout import BlockLayout, seal_pieces
from testbed.protocol.messages import PrefillStarted
from tests.support.loopback import LoopbackEndpoint, address

LAYOUT = BlockLayout(model="roles", layers=4, block_tokens=8, bytes_per_token_layer=4)
MS = 1_000_000


class Script:
    """A machine that answers each event with what ``answer`` says, and remembers the events."""

    def __init__(self, role: str, answer: Callable[[m.Event], list[m.Action]] = lambda event: []) -> None:
        self.role = role
        self.answer = answer
        self.seen: list[tuple[int, m.Event]] = []
        self.events: asyncio.Queue[m.Event] = asyncio.Queue()
        self.depth = 0

    def handle(self, event: m.Event, now_ns: int) -> list[m.Action]:
        assert self.depth == 0, "handle is never entered twice"
        self.depth += 1
        self.seen.append((now_ns, event))
        self.events.put_nowait(event)
        actions = self.answer(event)
        self.depth -= 1
        return actions

    async def next(self) -> m.Event:
        return await asyncio.wait_for(self.events.get(), 5)


@dataclass
class Stage:
    """A cluster on loopback, and its roles."""

    run_dir: Path
    cluster: LiveCluster
    roles: list[LiveRole]

    async def play(self, machine: Script, **kwargs: Any) -> LiveRole:
        role = LiveRole(machine, RoleContext(name=machine.role, run_dir=self.run_dir), self.cluster, **kwargs)
        self.roles.append(role)
        await role.open()
        return role


@pytest.fixture
async def stage(tmp_path: Path) -> Any:
    names = ("a", "b")
    host = address()
    cluster = LiveCluster(
        layout=LAYOUT,
        address_book={name: (host, 7600 + k) for k, name in enumerate(names)},
        endpoints={end: LoopbackEndpoint(end, address()) for name in names for end in (name, f"{name}.cnic")},
    )
    it = Stage(tmp_path, cluster, [])
    yield it
    for role in it.roles:
        await role.close()


def on(kind: type, *actions: m.Action) -> Callable[[m.Event], list[m.Action]]:
    """Answer events of one kind."""
    return lambda event: list(actions) if isinstance(event, kind) else []


async def test_messages_between_roles_and_to_itself(stage: Stage) -> None:
    sends = [m.Send(to, PrefillStarted(name)) for to, name in (("b", "1"), ("a", "2"), ("b", "3"))]
    a, b = Script("a", on(m.Started, *sends)), Script("b")
    for role in [await stage.play(machine) for machine in (b, a)]:
        role.start()
    assert [await a.next() for _ in range(2)] == [m.Started(), m.Received("a", PrefillStarted("2"))]
    received = [await b.next() for _ in range(3)][1:]
    assert received == [m.Received("a", PrefillStarted("1")), m.Received("a", PrefillStarted("3"))]


async def test_a_write_from_role_to_role(stage: Stage) -> None:
    memories = [Memory(8 * LAYOUT.full_block_bytes, LAYOUT) for _ in "ab"]
    landing = Landing(pieces=(0,), piece_bytes=LAYOUT.full_block_bytes, keys=(5,), layer_begin=0, layer_end=4)
    ref = GrantRef("b", 1, 1, landing.size_bytes)
    memories[0].data[:] = 7
    memories[0].seals[:4] = seal_pieces(memories[0].view[: landing.size_bytes], (5,), 0, 4, LAYOUT.layer_block_bytes)
    a = Script("a", on(m.Received, m.Write(9, ref, "a", (0,), landing.piece_bytes)))
    b = Script("b", on(m.Started, m.OpenGrant(ref, landing), m.Send("a", PrefillStarted("granted"))))
    roles = [
        await stage.play(machine, memory=memory, listen=[machine.role])
        for machine, memory in zip((a, b), memories, strict=True)
    ]
    for role in roles:
        role.start()
    assert [await a.next() for _ in range(3)][-1] == m.WriteCompleted(9)
    assert [await b.next() for _ in range(2)][-1] == m.WriteLanded(1)
    assert (memories[1].data[: landing.size_bytes] == 7).all()
    report = roles[1].quiesce()
    assert report["data"]["bytes_landed"] == landing.size_bytes
    assert report["open_grants"] == 0


async def test_events_before_start_are_not_heard(stage: Stage) -> None:
    a = Script("a")
    role = await stage.play(a)
    role.deliver(m.WriteLanded(1))
    role.start()
    assert await a.next() == m.Started()


async def test_deadlines_fire_in_order_and_not_when_cleared_or_replaced(stage: Stage) -> None:
    begin = time.monotonic_ns()
    a = Script(
        "a",
        on(
            m.Started,
            m.SetDeadline("late", begin + 6 * MS),
            m.SetDeadline("soon", begin + 2 * MS),
            m.SetDeadline("cleared", begin + 3 * MS),
            m.SetDeadline("moved", begin + 1 * MS),
            m.ClearDeadline("cleared"),
            m.ClearDeadline("unknown"),
            m.SetDeadline("moved", begin + 4 * MS),
            m.SetDeadline("past", begin - MS),
        ),
    )
    (await stage.play(a)).start()
    fired = [await a.next() for _ in range(5)][1:]
    assert fired == [m.DeadlinePassed(key) for key in ("past", "soon", "moved", "late")]
    for (now_ns, _), due in zip(a.seen[2:], (2, 4, 6), strict=True):
        assert now_ns >= begin + due * MS, "never early"


class Device:
    """A GPU that takes ``spin_ns`` of real time."""

    def __init__(self, spin_ns: int = 0) -> None:
        self.spin_ns = spin_ns
        self.calls: list[object] = []

    def prefill(self, action: m.ComputePrefill) -> dict[str, int]:
        self.calls.append(action.compute_id)
        return self._work(action.compute_id)

    def decode(self, action: m.ComputeDecode) -> dict[str, int]:
        self.calls.append(action.compute_id)
        return self._work(action.compute_id)

    def _work(self, compute_id: int) -> dict[str, int]:
        end = time.monotonic_ns() + self.spin_ns
        while time.monotonic_ns() < end:
            pass
        return {"r": compute_id}

    def load_sequence(self, request_id: str, tokens: bytes, pages: tuple[int, ...]) -> None:
        self.calls.append(("load", request_id, tokens, pages))

    def forget(self, request_id: str) -> None:
        self.calls.append(("forget", request_id))


async def test_one_gpu_computes_one_thing_at_a_time(stage: Stage) -> None:
    device = Device()
    a = Script(
        "a",
        on(
            m.Started,
            m.LoadSequence("r", b"1234", (0, 64)),
            m.ComputePrefill(1, 3 * MS, 0, 4, ()),
            m.ComputeDecode(2, 2 * MS, ()),
            m.ComputeDecode(3, 1 * MS, ()),
            m.ForgetSequence("r"),
        ),
    )
    role = await stage.play(a, device=device)
    role.start()
    assert [await a.next() for _ in range(4)][1:] == [m.ComputeFinished(k, {"r": k}) for k in (1, 2, 3)]
    begin = a.seen[0][0]
    for (now_ns, _), due in zip(a.seen[1:], (3, 5, 6), strict=True):
        assert now_ns >= begin + due * MS, "queued work starts where the one before ended"
    assert device.calls == [("load", "r", b"1234", (0, 64)), 1, ("forget", "r"), 2, 3]
    compute = role.quiesce()["compute"]
    assert (compute["computes"], compute["busy_ns"]) == (3, 6 * MS)


def test_a_device_that_keeps_up_is_no_overrun() -> None:
    gpu = Gpu()
    for k in (1, 2):  # the second is queued, and begins where the first ended
        gpu.submit(Device(), m.ComputeDecode(k, 60_000 * MS, ()))
    assert gpu.finish(time.monotonic_ns()) is None
    assert gpu.end_ns is not None
    assert gpu.finish(gpu.end_ns) == m.ComputeFinished(1, {"r": 1})
    assert (gpu.counters.computes, gpu.counters.overruns, gpu.counters.overrun_ns) == (2, 0, 0)


def test_a_device_slower_than_what_it_stands_for_is_an_overrun() -> None:
    gpu = Gpu()
    gpu.submit(Device(spin_ns=2 * MS), m.ComputeDecode(1, MS, ()))
    assert gpu.counters.overruns == 1
    assert gpu.counters.overrun_ns >= MS
    assert gpu.finish(time.monotonic_ns()) == m.ComputeFinished(1, {"r": 1})


class Disk:
    """A store that fails odd keys."""

    counters = DiskCounters()

    async def fetch(self, key: int, offset: int) -> None:
        if key % 2:
            raise HostError(f"no {key}")

    store = fetch

    def close(self) -> None:
        pass


async def test_a_collective_between_roles_and_what_is_reported_of_it(stage: Stage) -> None:
    tag = m.ExchangeTag(3, 0, False)
    machines = [Script(me, on(m.Started, m.Exchange(tag, 9, ((peer, 5000),)))) for me, peer in ("ab", "ba")]
    roles = [await stage.play(machine, peers={*"ab"} - {machine.role}) for machine in machines]
    for role in roles:
        role.start()
    for machine, peer in zip(machines, "ba", strict=True):
        assert await machine.next() == m.Started()
        arrived = await machine.next()
        assert isinstance(arrived, m.ShardArrived)
        assert (arrived.sender, arrived.tag, arrived.tokens) == (peer, tag, 9)
    reports = [role.quiesce()["exchange"] for role in roles]
    assert all((r["shards_sent"], r["bytes_sent"], r["shards_arrived"], r["bytes_arrived"]) == (1, 5000, 1, 5000)
               for r in reports)  # fmt: skip
    await stage.roles.pop(0).close()
    await asyncio.sleep(0)
    assert not roles[1].failure.done(), "who has stopped may be left"


async def test_what_comes_before_the_start_waits_for_it(stage: Stage) -> None:
    tag = m.ExchangeTag(0, 0, False)
    early = Script("a", on(m.Started, m.Exchange(tag, 1, (("b", 10),)), m.Send("b", PrefillStarted("r"))))
    late = Script("b")
    sender, receiver = [await stage.play(x, peers=[y]) for x, y in ((early, "b"), (late, "a"))]
    sender.start()
    async with asyncio.timeout(5):
        while len(receiver._events) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert late.seen == []
    receiver.start()
    kinds = [type(await late.next()) for _ in range(3)]
    assert kinds[0] is m.Started and set(kinds[1:]) == {m.Received, m.ShardArrived}


async def test_a_role_dies_of_a_lost_collective(stage: Stage) -> None:
    a, b = [await stage.play(Script(me), peers=[peer]) for me, peer in ("ab", "ba")]
    for role in (a, b):
        role.start()
    await stage.roles.pop().close()
    await asyncio.wait((a.failure,), timeout=5)
    assert "the exchange with b failed" in str(a.failure.exception())


async def test_disk_outcomes(stage: Stage) -> None:
    a = Script("a", on(m.Started, *(kind(k, k, 0) for k in (2, 3) for kind in (m.FetchBlock, m.StoreBlock))))
    (await stage.play(a, store=Disk())).start()
    outcomes = [await a.next() for _ in range(5)][1:]
    expected = [m.BlockFetched(2, 2), m.BlockWritten(2, 2), m.FetchFailed(3, 3, "no 3"), m.StoreFailed(3, 3, "no 3")]
    assert sorted(map(repr, outcomes)) == sorted(map(repr, expected))


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (m.ComputeDecode(1, 1, ()), "has no GPU"),
        (m.FetchBlock(1, 0, 0), "has no disk"),
        (m.Exchange(m.ExchangeTag(0, 0, False), 1, ()), "no peers"),
        (m.Write(1, GrantRef("b", 1, 1, 1), "a", (0,), 1), "has no memory"),
        (m.Send("nobody", PrefillStarted("r")), "no role of the cluster"),
    ],
)
async def test_what_a_role_cannot_do_is_its_death(stage: Stage, action: m.Action, said: str) -> None:
    role = await stage.play(Script("a", on(m.Started, action)))
    role.start()
    with pytest.raises(Exception, match=said):
        await asyncio.wait_for(role.failure, 5)


async def test_an_exception_in_the_machine_is_its_death(stage: Stage) -> None:
    def boom(event: m.Event) -> list[m.Action]:
        raise KeyError("transition")

    a = Script("a", boom)
    role = await stage.play(a)
    role.start()
    with pytest.raises(KeyError, match="transition"):
        await asyncio.wait_for(role.failure, 5)
    role.deliver(m.WriteLanded(1))
    assert len(a.seen) == 1, "the dead handle nothing"


async def test_a_flood_of_events_leaves_room_for_others(stage: Stage) -> None:
    a = Script("a")
    role = await stage.play(a)
    role.start()
    turns = 0
    for k in range(1000):
        role.deliver(m.WriteLanded(k))
    while len(a.seen) < 1001:
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 1000 // 64, "the loop came round between batches"
    assert role.quiesce()["peak_events"] >= 1000


async def test_observer_and_trace(stage: Stage) -> None:
    told: list[tuple[m.Event, int]] = []
    a = Script("a", on(m.Started, m.Send("a", PrefillStarted("r7")), m.SetDeadline("x", 2**62)))
    role = await stage.play(a, observer=lambda now_ns, event, actions: told.append((event, len(actions))))
    role.start()
    for _ in range(2):
        await a.next()
    role.quiesce()
    assert told == [(m.Started(), 2), (m.Received("a", PrefillStarted("r7")), 0)]
    lines = [json.loads(line) for line in (stage.run_dir / "trace" / "a.jsonl").read_text().splitlines()]
    assert [line.pop("t") for line in lines] == sorted(now for now, _ in a.seen[:1] * 3 + a.seen[1:])
    assert lines == [
        {"k": "Started"},
        {"k": "Send", "m": "PrefillStarted", "to": "a", "r": "r7"},
        {"k": "SetDeadline", "d": "x", "at": 2**62},
        {"k": "Received", "m": "PrefillStarted", "from": "a", "r": "r7"},
    ]


def test_every_event_and_action_can_be_traced() -> None:
    from typing import get_args

    from testbed.trace.tracefile import DESCRIBE

    assert set(DESCRIBE) == {*get_args(m.Event), *get_args(m.Action)}


def test_deadlines_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for k in range(10_000):
        deadlines.set("same", k)
        deadlines.set(f"gone{k}", k)
        deadlines.clear(f"gone{k}")
    assert len(deadlines._heap) < 200
    assert deadlines.take_passed(10_000) == ["same"]
    deadlines.set("same", 9_999)
    assert deadlines.take_passed(10_000) == ["same"], "what has passed may be set again"
    assert deadlines.next_ns() is None


async def test_the_alarm_is_never_early_and_rings_once() -> None:
    rings: asyncio.Queue[int] = asyncio.Queue()
    alarm = Alarm(lambda: rings.put_nowait(time.monotonic_ns()))
    for delay_ns in (300_000, -1, 1_500_000):
        due = time.monotonic_ns() + delay_ns
        alarm.set(due + 10 * MS)
        alarm.set(due)
        assert await asyncio.wait_for(rings.get(), 5) >= due
    alarm.set(time.monotonic_ns() + MS)
    alarm.set(None)
    alarm.close()
    alarm.close()
    assert rings.empty()


async def test_the_lag_meter_sees_a_blocked_loop_and_sleeps_when_idle() -> None:
    lag = LagMeter()
    lag.working()
    due = lag._due_ns
    while time.monotonic_ns() < due + 30 * MS:  # block the loop over the time of the alarm
        pass
    async with asyncio.timeout(5):
        while lag.samples == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert lag.max_ns >= 30 * MS
        assert lag.quantile_ns(0.99) <= lag.max_ns
        while lag._armed:
            lag._ring()
    lag.stop()


def test_private_memory_is_told() -> None:
    assert private_memory_bytes() > 1_000_000
