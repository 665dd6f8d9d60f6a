"""Removes the blocks of a run whose supervisor was killed: what a process cannot do after its own SIGKILL.

A child in a session of its own waits on a pipe whose other end the supervisor and all processes of the sandbox hold.
When the supervisor ends it says so; when the pipe closes without a word, all of them are dead, and the child cleans up.
Namespaces and mounts need no janitor, the kernel drops them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from testbed.report import run_folder

_ENDED = b"."
_PATIENCE_S, _RETRY_S = 10.0, 0.1


@contextmanager
def cleaning_up(folder: Path) -> Iterator[None]:
    """While this is open, the blocks in ``folder`` go away however the process ends."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(writer)
            _wait_and_clean(reader, folder)
        finally:
            os._exit(0)
    os.close(reader)
    try:
        yield
    finally:
        run_folder.drop_blocks(folder)
        with suppress(BrokenPipeError):  # the janitor was killed: nobody is left to be told
            os.write(writer, _ENDED)
        os.close(writer)
        os.waitpid(child, 0)


def _wait_and_clean(reader: int, folder: Path) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # a pipe that our caller reads must not stay open because of us
        os.dup2(nowhere, fd)
    if os.read(reader, 1) != _ENDED:
        run_folder.write_failure(folder, "killed")
        deadline = time.monotonic() + _PATIENCE_S
        while not run_folder.drop_blocks(folder) and time.monotonic() < deadline:
            time.sleep(_RETRY_S)  # a dying storage server may still write
