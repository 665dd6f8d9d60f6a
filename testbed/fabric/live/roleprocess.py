"""The role's side of the fork: what a child does between ``os.fork`` and ``os._exit``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from testbed.errors import RunFailedError, TestbedError
from testbed.fabric.live import channel as line
from testbed.fabric.live.channel import Channel
from testbed.fabric.live.roles import LiveRole, RoleContext
from testbed.fabric.live.syscalls import die_with_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A role to run in a process of its own.

    ``enter`` moves the child into its host's network namespace. ``build`` makes the role there, inside the child's
    running event loop; what it closes over is inherited through the fork, not pickled.
    """

    name: str
    enter: Callable[[], None]
    build: Callable[[RoleContext], LiveRole]


def run_role(spec: RoleSpec, run_dir: Path, incarnation: int, sock: socket.socket, parent_pid: int) -> NoReturn:
    """Be the role until the supervisor ends the line; never returns into the frames inherited from the parent."""
    code = 1
    try:
        _become_child(parent_pid)
        spec.enter()
        asyncio.run(_serve(spec, run_dir, incarnation, sock))
        code = 0
    except BaseException as error:
        _say_last_words(spec.name, run_dir, sock, error)
    finally:
        os._exit(code)


def _become_child(parent_pid: int) -> None:
    """Shed what belongs to the parent: its signal handlers, its garbage, and life after its death."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
    signal.set_wakeup_fd(-1)
    # A Ctrl-C reaches every process of the terminal; only the supervisor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    gc.enable()


async def _serve(spec: RoleSpec, run_dir: Path, incarnation: int, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[str | None] = asyncio.Queue()
    channel = Channel(lambda kind, payload: orders.put_nowait(kind), lambda: orders.put_nowait(None))
    # A duplicate, so that the last words still have a line after the event loop has closed its own.
    await loop.create_unix_connection(lambda: channel, sock=sock.dup())
    role = spec.build(
        RoleContext(
            name=spec.name,
            run_dir=run_dir,
            incarnation=incarnation,
            progress=lambda payload: channel.send(line.PROGRESS, payload),
        )
    )
    await role.open()
    channel.send(line.READY)
    order = asyncio.ensure_future(orders.get())
    while True:
        await asyncio.wait((order, role.failure), return_when=asyncio.FIRST_COMPLETED)
        if role.failure.done():
            role.failure.result()
        match order.result():
            case line.START:
                role.start()
            case line.STOP:
                channel.send(line.REPORT, role.quiesce())
            case _:
                await role.close()
                return
        order = asyncio.ensure_future(orders.get())


def _say_last_words(name: str, run_dir: Path, sock: socket.socket, error: BaseException) -> None:
    """One line to the supervisor, the traceback to a file of the run."""
    with contextlib.suppress(OSError):
        path = run_dir / "crash" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    code = error.exit_code if isinstance(error, TestbedError) else RunFailedError.exit_code
    words = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        sock.settimeout(1.0)
        sock.sendall(line.encode(line.DIED, (words, code)))
    except OSError:
        sys.stderr.write(f"{name}: {words}\n")
