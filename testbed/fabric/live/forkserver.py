"""Starts, watches and ends the processes of the roles, from one warm parent.

A Python process that imports numpy takes a fifth of a second of CPU to start and 30 MB; 60 of them would take a laptop
ten seconds. Forked from a parent that has imported everything they take milliseconds and share its memory.

Usage, inside an asyncio program whose process has no other threads::

    async with RoleGroup(specs, run_dir) as group:   # forks
        await group.ready()                          # every role listens
        await group.start()                          # every machine gets Started
        name, payload = await group.next_progress()  # what roles report on the way
        reports = await group.stop()                 # final reports by role name

Whatever is awaited through the group raises ``RoleDied`` as soon as a role ends that nobody asked to end
(``watch`` does the same for any other awaitable). Leaving the block leaves no process behind; a parent that is killed
takes its children with it (parent-death signal).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from testbed.errors import BugError, RunFailedError
from testbed.fabric.live import channel as line
from testbed.fabric.live.channel import Channel
from testbed.fabric.live.roleprocess import RoleSpec, run_role

_REPORT_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 3.0
_LAST_WORDS_S = 1.0

T = TypeVar("T")


class RoleDied(RunFailedError):
    """A role's process ended and nobody had asked for it. ``exit_code``: the run's, 2 if the host was to blame."""

    def __init__(self, name: str, status: str, last_words: str, exit_code: int = RunFailedError.exit_code) -> None:
        super().__init__(f"role {name} died ({status}): {last_words or 'no last words'}")
        self.name = name
        self.status = status
        self.last_words = last_words
        self.exit_code = exit_code


class _Fate(enum.Enum):
    RUNNING = "running"
    ENDING = "ending"  # asked to go: its end is no failure
    ENDED = "ended"


class RoleProcess:
    """One incarnation of a role: its process as the supervisor sees it."""

    def __init__(
        self,
        spec: RoleSpec,
        pid: int,
        sock: socket.socket,
        incarnation: int,
        on_progress: Callable[[tuple[str, object]], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.name = spec.name
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.sock = sock
        self.incarnation = incarnation
        self.fate = _Fate.RUNNING
        self.status = ""
        self.last_words = ""
        self.exit_code = RunFailedError.exit_code
        self.ready: asyncio.Future[None] = loop.create_future()
        self.report: asyncio.Future[object] = loop.create_future()
        self.hung_up: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.channel = Channel(self._heard, lambda: self.hung_up.set_result(None))
        self._on_progress = on_progress

    def _heard(self, kind: str, payload: object) -> None:
        match kind:
            case line.PROGRESS:
                self._on_progress((self.name, payload))
            case line.READY:
                self.ready.set_result(None)
            case line.REPORT:
                self.report.set_result(payload)
            case line.DIED:
                self.last_words, self.exit_code = msgspec.convert(payload, tuple[str, int])

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; safe against a recycled pid."""
        if self.fate is not _Fate.ENDED:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> None:
        """Take the exit status (waits for it) and release the descriptors (idempotent)."""
        if self.fate is _Fate.ENDED:
            return
        info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        assert info is not None
        killed = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        self.status = signal.Signals(info.si_status).name if killed else f"exit code {info.si_status}"
        self.fate = _Fate.ENDED
        os.close(self.pidfd)


class RoleGroup:
    """The processes of ``specs``; see the module's text for the order of calls."""

    def __init__(self, specs: Sequence[RoleSpec], run_dir: Path) -> None:
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names) or not names:
            raise BugError("a group has at least one role, and no two of the same name")
        self._specs = tuple(specs)
        self._run_dir = run_dir
        self._processes: dict[str, RoleProcess] = {}
        self._progress: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        self._watchers: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None]

    # --- beginning -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._failure = asyncio.get_running_loop().create_future()
        # What lives now lives in every child: keep the collector from touching, and so copying, its pages.
        gc.collect()
        gc.freeze()
        try:
            for spec in self._specs:
                await self._fork(spec, incarnation=1)
        except BaseException:
            await self._end_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end_all()

    async def _fork(self, spec: RoleSpec, incarnation: int) -> RoleProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        sys.stdout.flush()
        sys.stderr.flush()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for sibling in self._processes.values():  # or a role would not notice that the supervisor hangs up
                sibling.sock.close()
                if sibling.fate is not _Fate.ENDED:
                    os.close(sibling.pidfd)
            run_role(spec, self._run_dir, incarnation, theirs, parent_pid)
        theirs.close()
        process = RoleProcess(spec, pid, ours, incarnation, self._progress.put_nowait)
        self._processes[spec.name] = process
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: process.channel, sock=ours)
        loop.add_reader(process.pidfd, self._exited, process)
        return process

    # --- the run -------------------------------------------------------------------------------------------------

    @property
    def processes(self) -> dict[str, RoleProcess]:
        """Current incarnation of every role."""
        return dict(self._processes)

    async def ready(self, timeout_s: float = 30.0) -> None:
        """Wait until every role listens.

        Raises:
            RoleDied: one ended instead.
            RunFailedError: one has not answered in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.watch(asyncio.wait([process.ready for process in self._processes.values()]))
        except TimeoutError:
            late = [name for name, process in self._processes.items() if not process.ready.done()]
            raise RunFailedError(f"not ready after {timeout_s:g} s: {', '.join(late)}") from None

    async def start(self) -> None:
        """Every machine gets Started."""
        for process in self._processes.values():
            process.channel.send(line.START)

    async def next_progress(self) -> tuple[str, object]:
        """What a role reports next: its name and what it said.

        Raises:
            RoleDied: a role died.
        """
        return await self.watch(self._progress.get())

    async def watch(self, awaitable: Awaitable[T]) -> T:
        """Await something, or raise because a role died meanwhile.

        Raises:
            RoleDied: a role died.
        """
        task = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait((task, self._failure), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._failure.result()
            return await task
        finally:
            if not task.done():
                task.cancel()

    async def kill(self, name: str) -> None:
        """Fault injection: end a role without warning; its death is no failure of the run."""
        process = self._processes[name]
        process.fate = _Fate.ENDING
        process.kill()
        await process.exited

    async def respawn(self, name: str) -> None:
        """Start the next incarnation of a killed role, at the same addresses; it gets Started when it listens.

        Raises:
            RoleDied: a role died meanwhile.
        """
        old = self._processes[name]
        if old.fate is not _Fate.ENDED:
            raise BugError(f"{name} has not ended: it cannot be started again")
        process = await self._fork(old.spec, old.incarnation + 1)
        await self.watch(process.ready)
        process.channel.send(line.START)

    # --- the end -------------------------------------------------------------------------------------------------

    async def stop(self) -> dict[str, object]:
        """Stop all machines, collect the final report of every living role, and end the processes.

        Raises:
            RoleDied: a role died before it was asked to stop.
            RunFailedError: a role does not answer.
        """
        living = [process for process in self._processes.values() if process.fate is _Fate.RUNNING]
        for process in living:
            process.channel.send(line.STOP)
        try:
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                await self.watch(asyncio.wait([process.report for process in living]))
        except TimeoutError:
            silent = [process.name for process in living if not process.report.done()]
            raise RunFailedError(f"no report after {_REPORT_TIMEOUT_S:g} s from {', '.join(silent)}") from None
        finally:
            await self._end_all(grace_s=_EXIT_TIMEOUT_S)
        return {process.name: process.report.result() for process in living}

    async def _end_all(self, grace_s: float = 0.0) -> None:
        """Hang up, give the roles ``grace_s`` to go by themselves, kill those that stay. None is left."""
        living = [process for process in self._processes.values() if process.fate is not _Fate.ENDED]
        for process in living:
            process.fate = _Fate.ENDING
            process.channel.close()
        if living and grace_s:
            await asyncio.wait([process.exited for process in living], timeout=grace_s)
        loop = asyncio.get_running_loop()
        for process in living:
            if process.fate is not _Fate.ENDED:
                loop.remove_reader(process.pidfd)
                process.kill()
                process.reap()
                process.exited.set_result(None)
        for watcher in self._watchers:
            watcher.cancel()
        gc.unfreeze()

    def _exited(self, process: RoleProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.pidfd)
        expected = process.fate is _Fate.ENDING
        process.reap()
        process.exited.set_result(None)
        if not expected:
            watcher = asyncio.get_running_loop().create_task(self._mourn(process))
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)

    async def _mourn(self, process: RoleProcess) -> None:
        """A role died: read its last words to the end, then fail whoever waits."""
        await asyncio.wait((process.hung_up,), timeout=_LAST_WORDS_S)
        if not self._failure.done():
            self._failure.set_exception(RoleDied(process.name, process.status, process.last_words, process.exit_code))
            self._failure.exception()  # seen: it is raised to the next who waits, or nobody waits any more
