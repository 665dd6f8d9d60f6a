"""Runs jobs at the same time, each in a process of its own that is forked from this one.

A process per job, and not a worker that takes many: a run may fork (the live world does), may grow large, may be killed
by the kernel; none of it reaches the next run. Nothing here starts threads, so that forking stays safe.

Invariants: at most ``workers`` processes at a time; when ``run_all`` returns or raises, none of them is left; when this
process is killed, they are interrupted.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

from testbed.errors import HostError
from testbed.fabric.live.syscalls import die_with_parent

T = TypeVar("T")

_POLL_S = 1.0
_PATIENCE_S = 20.0
"""How long an interrupted run may take to tidy up before it is killed."""
_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handlers = Mapping[signal.Signals, Any]


@contextmanager
def _uninterrupted() -> Iterator[Handlers]:
    """Interruptions wait until this is left; gives the handlers that they will then find.

    Two things are needed. The mask is what a forked process inherits, but it is this thread's alone: where a library
    has threads (NumPy's BLAS has), the kernel hands the signal to one of them, and Python runs the handler here all
    the same. So the handlers only take a note meanwhile.
    """
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {number: signal.getsignal(number) for number in _INTERRUPTIONS}
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)
        for number in _INTERRUPTIONS:
            signal.signal(number, lambda n, _: came.append(n))
        yield handlers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _set(handlers)
        for one in came:
            signal.raise_signal(one)


def _set(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Generic[T]):
    """Something to run, and the file that takes what it prints."""

    subject: T
    output: Path


def run_all(
    tasks: Sequence[Task[T]], work: Callable[[T], int], workers: int, told: Callable[[T | None, int], None]
) -> None:
    """Run ``work`` on every subject; ``told`` hears of each end with its exit code (-n: by signal n), and of None once
    a second while nothing ends.

    An interruption (KeyboardInterrupt) is passed on to the runs, waited for, and raised.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(tasks))
    running: dict[int, tuple[ForkProcess, Task[T]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                task = waiting.pop()
                with _uninterrupted() as handlers:  # a process that has started is in the list
                    process = context.Process(target=_child, args=(task, work, os.getpid(), handlers))
                    process.start()
                    running[process.sentinel] = (process, task)
            ended = multiprocessing.connection.wait(list(running), timeout=_POLL_S)
            if not ended:
                told(None, 0)
            for sentinel in ended:
                assert isinstance(sentinel, int)
                process, task = running[sentinel]
                process.join()
                assert process.exitcode is not None
                del running[sentinel]
                told(task.subject, process.exitcode)
                process.close()
    finally:
        processes = [process for process, _ in running.values()]
        try:
            _stop(processes)
        except KeyboardInterrupt:  # a second one, that came before or while they ended
            _stop(processes)
            raise


def _child(task: Task[T], work: Callable[[T], int], parent: int, handlers: Handlers) -> None:
    os.setpgid(0, 0)  # Ctrl-C reaches the sweep alone, which passes it on once
    die_with_parent(signal.SIGINT)  # it tidies up as after Ctrl-C when the sweep is killed
    if os.getppid() != parent:
        sys.exit(1)
    try:
        file = task.output.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        sys.stderr.write(f"error: {task.output}: cannot be written ({error.strerror})\n")
        sys.exit(HostError.exit_code)
    with file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        sys.stdout = sys.stderr = file  # whatever they were, a terminal or something that captures
        _set(handlers)
        # An interruption that came meanwhile strikes here, where what it prints is the run's.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTIONS)
        sys.exit(work(task.subject))


def how_ended(code: int) -> str:
    """An exit code in words; "" for 0."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else ""


def _stop(processes: Sequence[ForkProcess]) -> None:
    """End what still runs: asked first, as Ctrl-C would, then killed. Impatience must not leave a process behind."""
    with _uninterrupted():
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        for process in processes:
            process.join(_PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()
