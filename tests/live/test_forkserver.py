"""Processes of roles: ready together, watched, ended without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from testbed.errors import BugError, HostError, RunFailedError
from testbed.fabric.live.forkserver import RoleDied, RoleGroup
from testbed.fabric.live.memory import Memory
from testbed.fabric.live.roleprocess import RoleSpec
from testbed.fabric.live.roles import LiveCluster, LiveRole, RoleContext
from testbed.protocol import machine as m
from testbed.protocol.layout import BlockLayout
from testbed.protocol.messages import PrefillStarted
from tests.support.loopback import LoopbackEndpoint, address

LAYOUT = BlockLayout(model="fork", layers=61, block_tokens=64, bytes_per_token_layer=4)


class Ring:
    """Passes a message around a ring of roles; the first one reports each lap."""

    def __init__(self, context: RoleContext, following: str) -> None:
        self.role = context.name
        self._context = context
        self._following = following
        self._laps = 0

    def handle(self, event: m.Event, now_ns: int) -> list[m.Action]:
        first = self.role == "r0"
        if isinstance(event, m.Started):
            self._context.progress({"started": self.role, "incarnation": self._context.incarnation})
            return [m.Send(self._following, PrefillStarted("lap"))] if first else []
        if isinstance(event, m.Received):
            if first:
                self._laps += 1
                self._context.progress({"lap": self._laps})
                if self._laps == 3:
                    return []
            if event.message == PrefillStarted("die"):
                raise ZeroDivisionError("told to die")
            return [m.Send(self._following, PrefillStarted("lap"))]
        return []


def ring(count: int) -> list[RoleSpec]:
    """Specs of a ring of ``count`` roles on loopback."""
    names = [f"r{k}" for k in range(count)]
    host = address()
    cluster = LiveCluster(
        layout=LAYOUT,
        address_book={name: (host, 20_000 + k) for k, name in enumerate(names)},
        endpoints={name: LoopbackEndpoint(name, address()) for name in names},
    )

    def make(context: RoleContext) -> LiveRole:
        memory = Memory(100 * LAYOUT.full_block_bytes, LAYOUT)
        following = names[(names.index(context.name) + 1) % count]
        return LiveRole(Ring(context, following), context, cluster, memory=memory, listen=[context.name])

    return [RoleSpec(name=name, enter=lambda: None, build=make) for name in names]


def gone(pids: list[int]) -> bool:
    """Whether none of these processes is left, zombies included."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def laps(group: RoleGroup, count: int) -> None:
    while True:
        _, payload = await asyncio.wait_for(group.next_progress(), 10)
        if payload == {"lap": count}:
            return


async def test_a_run_from_ready_to_report(tmp_path: Path) -> None:
    async with RoleGroup(ring(5), tmp_path) as group:
        pids = [process.pid for process in group.processes.values()]
        await group.ready()
        await group.start()
        await laps(group, 3)
        reports = await group.stop()
    assert gone(pids)
    assert sorted(reports) == [f"r{k}" for k in range(5)]
    first = reports["r0"]
    assert first["events"] == 4
    assert first["control"]["messages_received"] == 3
    assert first["private_bytes"] < 25_000_000
    assert (tmp_path / "trace" / "r4.jsonl").read_text().count("\n") == 7


async def test_sixty_roles_are_ready_in_time_and_small(tmp_path: Path) -> None:
    begin = time.monotonic()
    async with RoleGroup(ring(60), tmp_path) as group:
        await group.ready()
        took = time.monotonic() - begin
        await group.start()
        await laps(group, 3)
        reports = await group.stop()
    assert took < 30, "about 1 s on two idle cores; this bound is for a slow host that does other things as well"
    assert max(report["private_bytes"] for report in reports.values()) < 25_000_000


async def test_a_role_that_is_killed(tmp_path: Path) -> None:
    async with RoleGroup(ring(3), tmp_path) as group:
        await group.ready()
        victim = group.processes["r1"]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(RoleDied, match=r"role r1 died \(SIGKILL\)") as caught:
            await asyncio.wait_for(group.watch(asyncio.get_running_loop().create_future()), 5)
        assert caught.value.exit_code == 1
        pids = [process.pid for process in group.processes.values()]
        with pytest.raises(RoleDied):
            await group.stop()
    assert gone(pids)


async def test_last_words_and_traceback(tmp_path: Path) -> None:
    specs = ring(3)

    def fatal(context: RoleContext) -> LiveRole:
        role = specs[0].build(context)
        asyncio.get_running_loop().call_later(0, role.deliver, m.Received("r2", PrefillStarted("die")))
        role.start()
        return role

    specs[2] = RoleSpec(name="r2", enter=lambda: None, build=fatal)
    async with RoleGroup(specs, tmp_path) as group:
        with pytest.raises(RoleDied, match=r"exit code 1\): ZeroDivisionError: told to die"):
            await group.ready()
            await group.watch(asyncio.get_running_loop().create_future())
    assert "in handle" in (tmp_path / "crash" / "r2.txt").read_text()


@pytest.mark.parametrize("where", ["enter", "build"])
async def test_a_role_that_cannot_begin(tmp_path: Path, where: str) -> None:
    def fail(*_: object) -> LiveRole:
        raise HostError("no such device: pe0-cnic0")

    good = ring(2)
    bad = RoleSpec(name="r9", enter=fail if where == "enter" else lambda: None, build=fail)  # type: ignore[arg-type]
    async with RoleGroup([*good, bad], tmp_path) as group:
        with pytest.raises(RoleDied, match="HostError: no such device"):
            await group.ready()
        pids = [process.pid for process in group.processes.values()]
    assert gone(pids)


async def test_two_roles_at_one_address(tmp_path: Path) -> None:
    specs = ring(2)

    def again(context: RoleContext) -> LiveRole:
        return specs[0].build(RoleContext(name="r0", run_dir=context.run_dir))

    twin = RoleSpec(name="twin", enter=lambda: None, build=again)
    async with RoleGroup([*specs, twin], tmp_path) as group:
        with pytest.raises(RoleDied, match="cannot listen at"):
            await group.ready()
            await group.watch(asyncio.get_running_loop().create_future())


async def test_a_killed_role_comes_back_with_a_new_epoch(tmp_path: Path) -> None:
    async with RoleGroup(ring(3), tmp_path) as group:
        await group.ready()
        await group.start()
        await laps(group, 3)
        old = group.processes["r1"].pid
        await group.kill("r1")
        assert gone([old])
        with pytest.raises(BugError):
            await group.respawn("r2")
        await group.respawn("r1")
        again = ("r1", {"started": "r1", "incarnation": 2})
        while await asyncio.wait_for(group.next_progress(), 5) != again:
            pass  # a slow host has not read all yet that was said before
        reports = await group.stop()
    assert reports["r1"]["incarnation"] == 2


async def test_leaving_early_leaves_nobody(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        async with RoleGroup(ring(4), tmp_path) as group:
            pids = [process.pid for process in group.processes.values()]
            raise KeyboardInterrupt
    assert gone(pids)


async def test_a_stopped_process_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testbed.fabric.live.forkserver._REPORT_TIMEOUT_S", 2.0)
    monkeypatch.setattr("testbed.fabric.live.forkserver._EXIT_TIMEOUT_S", 0.2)
    async with RoleGroup(ring(3), tmp_path) as group:
        await group.ready()
        await group.start()
        pids = [process.pid for process in group.processes.values()]
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(RunFailedError, match=r"no report after 2.* s from r1$"):
            await group.stop()
    assert gone(pids)


async def test_children_die_with_the_supervisor(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:

        async def main() -> None:
            async with RoleGroup(ring(3), tmp_path) as group:
                await group.ready()
                os.write(writing, " ".join(str(process.pid) for process in group.processes.values()).encode())
                await asyncio.get_running_loop().create_future()

        asyncio.run(main())
    pids = [int(pid) for pid in os.read(reading, 100).split()]
    fds = [os.pidfd_open(pid) for pid in pids]
    os.kill(pids[1], signal.SIGSTOP)  # one that could not notice by itself
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)  # noqa: ASYNC222 - it has just been killed
    loop = asyncio.get_running_loop()
    for fd in fds:
        ended = loop.create_future()
        loop.add_reader(fd, lambda ended=ended: ended.done() or ended.set_result(None))
        await asyncio.wait_for(ended, 5)
        loop.remove_reader(fd)
        os.close(fd)
    assert len(pids) == 3


def test_names_are_unique(tmp_path: Path) -> None:
    with pytest.raises(BugError):
        RoleGroup(ring(1) + ring(1), tmp_path)
