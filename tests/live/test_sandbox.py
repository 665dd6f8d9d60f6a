"""The sandbox: what entry sees, what the caller gets, and that nothing is ever left behind."""

from __future__ import annotations

import errno
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.errors import ConfigError, HostError
from testbed.fabric.live import sandbox, syscalls
from testbed.fabric.live.sandbox import inside_sandbox, run_in_sandbox
from tests.live.sandboxed import in_sandbox

pytestmark = pytest.mark.live

PATIENCE_S = 10.0


def fork(body: Callable[[], int]) -> int:
    """Run ``body`` in a child that never returns into pytest."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = body()
        finally:
            os._exit(code)
    return pid


def await_end_of(pipe: int) -> bytes:
    """All that is written to a pipe until the last process that holds it has died."""
    data = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], PATIENCE_S)
        assert ready, "somebody still holds the pipe: a process was left behind"
        chunk = os.read(pipe, 4096)
        if not chunk:
            return data
        data += chunk


def read_line(pipe: int) -> bytes:
    ready, _, _ = select.select([pipe], [], [], PATIENCE_S)
    assert ready, "the sandbox said nothing"
    return os.read(pipe, 4096)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_entry_has_namespaces_of_its_own() -> None:
    kinds = ("net", "mnt", "pid", "ipc", "uts")
    outside = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in kinds}
    inside = in_sandbox(lambda: {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in kinds})
    assert all(inside[kind] != outside[kind] for kind in kinds)


def test_entry_sees_a_private_world() -> None:
    def look() -> tuple[bool, int, list[str], list[str], str]:
        interfaces = os.listdir("/sys/class/net") if os.path.isdir("/sys/class/net") else ["lo"]
        flags = Path("/proc/net/dev").read_text()
        return inside_sandbox(), os.getppid(), os.listdir("/run"), interfaces, flags

    inside, parent, run, interfaces, _ = in_sandbox(look)
    assert inside
    assert parent == 1
    assert run == ["netns"]
    assert interfaces == ["lo"]
    assert not inside_sandbox()


def test_lo_is_up() -> None:
    def connect() -> int:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            return 1

    assert in_sandbox(connect) == 1


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exit_code_of_entry_is_returned(code: int) -> None:
    assert run_in_sandbox(lambda: code) == code


def test_killed_entry_gives_128_and_the_signal() -> None:
    def entry() -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert run_in_sandbox(entry) == 128 + signal.SIGKILL


def test_error_of_the_user_keeps_its_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    def entry() -> int:
        raise ConfigError("no such topology.")

    assert run_in_sandbox(entry) == 2
    assert capfd.readouterr().err == "error: no such topology.\n"


def test_bug_in_entry_shows_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def entry() -> int:
        raise ZeroDivisionError("oops")

    assert run_in_sandbox(entry) == 1
    assert "ZeroDivisionError: oops" in capfd.readouterr().err


def test_orphans_are_reaped() -> None:
    def entry() -> list[int]:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            if os.fork() == 0:
                os.write(write, b"%d" % os.getpid())
            os._exit(0)
        os.waitpid(child, 0)
        orphan = int(os.read(read, 20))
        while os.path.exists(f"/proc/{orphan}"):  # a zombie has a folder too: it is gone once init has reaped it
            select.select([], [], [], 0.002)
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]

    assert sorted(in_sandbox(entry)) == [1, 2]


def start_crowd(ready: int) -> int:
    """In the sandbox: a child, a child in a session of its own, and a busy parent; all hold the pipe."""
    for detached in (False, True):
        if os.fork() == 0:
            if detached:
                os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.pause()
    os.write(ready, os.readlink("/proc/self/ns/net").encode())
    signal.pause()
    return 0


def all_network_namespaces() -> set[str]:
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_caller_leaves_nothing(number: signal.Signals) -> None:
    mounts = Path("/proc/mounts").read_text()
    read, write = os.pipe()
    caller = fork(lambda: run_in_sandbox(lambda: start_crowd(write)))
    os.close(write)
    namespace = read_line(read).decode()
    assert namespace in all_network_namespaces()
    os.kill(caller, number)
    await_end_of(read)
    exit_code(caller)
    assert namespace not in all_network_namespaces()
    assert Path("/proc/mounts").read_text() == mounts


def count_interrupts(ready: int) -> int:
    """In the sandbox: report ready, count SIGINTs until 0.2 s pass without one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    os.write(ready, b"ready")
    count = 0
    while signal.sigtimedwait([signal.SIGINT], 0.2 if count else PATIENCE_S):
        count += 1
    return 10 + count


def test_an_interrupt_sent_to_the_caller_reaches_entry_once() -> None:
    read, write = os.pipe()
    caller = fork(lambda: run_in_sandbox(lambda: count_interrupts(write)))
    read_line(read)
    os.kill(caller, signal.SIGINT)
    assert exit_code(caller) == 11


def test_ctrl_c_at_the_terminal_reaches_entry_once() -> None:
    read, write = os.pipe()
    caller, terminal = pty.fork()
    if caller == 0:
        os._exit(run_in_sandbox(lambda: count_interrupts(write)))
    read_line(read)
    os.write(terminal, b"\x03")
    assert exit_code(caller) == 11
    os.close(terminal)


def test_standard_streams_are_the_callers() -> None:
    script = "import sys\nfrom testbed.fabric.live.sandbox import run_in_sandbox\n"
    script += "sys.exit(run_in_sandbox(lambda: print(sys.stdin.read().upper()) or 0))"
    done = subprocess.run([sys.executable, "-c", script], input="typed", capture_output=True, text=True, check=True)
    assert done.stdout == "TYPED\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become an ordinary user")
def test_an_ordinary_user_can_do_it_too() -> None:
    read, write = os.pipe()

    def as_nobody() -> int:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        code = run_in_sandbox(lambda: os.getuid() + 7)
        os.write(write, b"%d" % code)
        return 0

    assert exit_code(fork(as_nobody)) == 0
    assert os.read(read, 10) == b"7"


@pytest.mark.parametrize(
    ("setting", "value", "number", "needle"),
    [
        ("kernel.unprivileged_userns_clone", "0", errno.EPERM, "sysctl kernel.unprivileged_userns_clone=1"),
        ("user.max_user_namespaces", "0", errno.ENOSPC, "sysctl user.max_user_namespaces="),
        ("kernel.apparmor_restrict_unprivileged_userns", "1", errno.EACCES, "apparmor_restrict_unprivileged_userns=0"),
        ("", "", errno.EPERM, "seccomp=unconfined"),
    ],
)
def test_a_host_that_forbids_it_is_told_which_setting(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: str, number: int, needle: str
) -> None:
    def refuse(flags: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sandbox, "_read_setting", lambda name: value if name == setting else None)
    monkeypatch.setattr(syscalls, "unshare", refuse)
    with pytest.raises(HostError, match=needle) as caught:
        run_in_sandbox(lambda: 0)
    assert "sudo" in str(caught.value)
    assert caught.value.exit_code == 2
