"""The sandbox: everything the live world makes lives in namespaces that die with one process.

``run_in_sandbox(entry)`` forks this chain::

    caller -- mediator -- init (pid 1 of a new pid namespace) -- entry

The mediator unshares user (not as root), mount, pid, network, IPC and host-name namespaces; init mounts a fresh /proc
and a private /run, raises lo, reaps orphans; entry runs the caller's function. Invariants:

* When entry ends, init ends, and the kernel kills every process left inside and drops every namespace and mount.
* When the caller ends, however it ends (SIGKILL included), mediator and init are killed by their parent-death signal,
  and with init everything inside. Nothing on the host was changed, so there is nothing to clean.
* SIGINT and SIGTERM sent to the caller reach entry exactly once. A Ctrl-C at the terminal reaches entry directly,
  because the whole chain stays in the terminal's foreground process group; only signals sent by a process are
  passed on (the kernel marks the difference in ``si_code``).
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from testbed.errors import HostError, TestbedError
from testbed.fabric.live import devices, syscalls
from testbed.fabric.live.netlink import NetlinkSocket

_FORWARDED = frozenset({signal.SIGINT, signal.SIGTERM})
_WATCHED = _FORWARDED | {signal.SIGCHLD}
_SENT_BY_A_PROCESS = (0, -1, -6)  # si_code: SI_USER (kill), SI_QUEUE (sigqueue), SI_TKILL (tgkill)

_NAMESPACES = (
    syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
)

PRIVATE_PATH = "/run"
"""What the host has here cannot be seen inside."""

_INSIDE = "TESTBED_SANDBOX"
_APPARMOR = "kernel.apparmor_restrict_unprivileged_userns"


def inside_sandbox() -> bool:
    """Whether this process runs in a sandbox made by ``run_in_sandbox``."""
    return os.environ.get(_INSIDE) == "1"


def run_in_sandbox(entry: Callable[[], int]) -> int:
    """Run ``entry`` in fresh namespaces and return its exit code (128 + n if signal n killed it).

    ``entry`` runs in a forked child, so it sees the caller's memory as of now and changes none of it. Standard streams
    and the terminal are the caller's own. A ``TestbedError`` in ``entry`` is written to stderr and its exit code
    returned; any other exception is written with its traceback and gives 1. Call it from the main thread, before others
    are started: SIGINT, SIGTERM and SIGCHLD are blocked in this thread meanwhile.

    Raises:
        HostError: the host forbids the namespaces; the message names the setting.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    report_read, report_write = os.pipe()
    try:
        caller_pid = os.getpid()
        mediator = os.fork()
        if mediator == 0:
            os.close(report_read)
            _run_child(lambda: _mediate(entry, caller_pid, report_write, old_mask), report_write)
        os.close(report_write)
        status = _supervise(mediator)
        with os.fdopen(report_read, "rb") as report:
            failure = report.read()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    if failure:
        raise HostError(json.loads(failure)["error"])
    return status


def _run_child(body: Callable[[], int], report_fd: int | None) -> NoReturn:
    """Run ``body`` in a fresh child and exit with its code, never returning into the parent's stack."""
    code = 1
    try:
        code = body()
    except HostError as error:
        if report_fd is None:
            sys.stderr.write(f"error: {error}\n")
        else:
            os.write(report_fd, json.dumps({"error": str(error)}).encode())
        code = error.exit_code
    except TestbedError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:  # a fork must not unwind into its parent's frames, whatever was raised
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)


def _supervise(child: int) -> int:
    """Pass signals on to ``child`` and reap every child of ours until it ends; returns its exit code.

    Needs _WATCHED to be blocked. Callers other than init have one child only.
    """
    while True:
        while True:
            try:
                pid, status = os.waitpid(-1 if os.getpid() == 1 else child, os.WNOHANG)
            except ChildProcessError:
                return 1
            if pid == 0:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        info = signal.sigwaitinfo(_WATCHED)
        if info.si_signo in _FORWARDED and info.si_code in _SENT_BY_A_PROCESS:
            os.kill(child, info.si_signo)


def _mediate(entry: Callable[[], int], caller_pid: int, report_fd: int, entry_mask: set[int]) -> int:
    """The mediator: leave the caller's namespaces, start init, pass signals on."""
    _enter_namespaces()
    syscalls.die_with_parent(signal.SIGKILL)  # after unshare: a change of credentials clears it
    if os.getppid() != caller_pid:
        return 1  # the caller died before the parent-death signal was armed
    alive_read, alive_write = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(alive_write)
        _run_child(lambda: _be_init(entry, alive_read, report_fd, entry_mask), report_fd)
    os.close(alive_read)
    os.close(report_fd)
    return _supervise(init)


def _be_init(entry: Callable[[], int], alive_fd: int, report_fd: int, entry_mask: set[int]) -> int:
    """Pid 1: prepare mounts and lo, start entry, reap orphans."""
    syscalls.die_with_parent(signal.SIGKILL)
    os.set_blocking(alive_fd, False)
    try:
        if os.read(alive_fd, 1) == b"":
            return 1  # the mediator died before the parent-death signal was armed (getppid() is 0 in here)
    except BlockingIOError:
        os.close(alive_fd)
    _mount_private()
    with NetlinkSocket.here("the sandbox") as socket:
        socket.run([devices.raise_message(1)])
    child = os.fork()
    if child == 0:
        os.close(report_fd)
        os.environ[_INSIDE] = "1"
        signal.pthread_sigmask(signal.SIG_SETMASK, entry_mask)
        _run_child(entry, None)
    os.close(report_fd)
    return _supervise(child)


def _enter_namespaces() -> None:
    """Unshare everything; as an ordinary user (or a root without the capability) through a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        try:
            syscalls.unshare(_NAMESPACES)
            return
        except OSError as error:
            if error.errno != errno.EPERM:
                raise HostError(_explain(error)) from error
            # root of a container without CAP_SYS_ADMIN: try as an ordinary user would
    try:
        syscalls.own_proc_files()
        syscalls.unshare(_NAMESPACES | syscalls.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise HostError(_explain(error)) from error


def _mount_private() -> None:
    """A mount tree nobody else sees: fresh /proc, private /run (namespace names), fresh /sys where allowed."""
    plain = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    try:
        syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("proc", "/proc", "proc", plain)
        syscalls.mount("tmpfs", PRIVATE_PATH, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755,size=64m")
        os.mkdir(f"{PRIVATE_PATH}/netns")
    except OSError as error:
        if _read_setting(_APPARMOR) == "1" and _is_mapped():
            raise HostError(_explain(error)) from error  # the namespace was allowed, but no capability in it
        raise HostError(
            f"cannot prepare the sandbox's mounts ({error.strerror}); in a container run it with an unmasked /proc "
            "(docker: --privileged, or --security-opt systempaths=unconfined --security-opt apparmor=unconfined)."
        ) from error
    try:
        syscalls.mount("sysfs", "/sys", "sysfs", plain)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EBUSY, errno.ENOENT):
            raise HostError(f"cannot mount a fresh /sys in the sandbox ({error.strerror}).") from error


def _is_mapped() -> bool:
    """Whether this process is in a user namespace of its own (the host's first one maps every id)."""
    return "4294967295" not in Path("/proc/self/uid_map").read_text()


def _read_setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", name.replace(".", "/")).read_text().strip()
    except OSError:
        return None


def _explain(error: OSError) -> str:
    """One sentence: which setting forbids user namespaces here, and the way out."""
    way_out = "or run the testbed with sudo"
    if _read_setting("kernel.unprivileged_userns_clone") == "0":
        return f"user namespaces are forbidden: set `sysctl kernel.unprivileged_userns_clone=1`, {way_out}."
    if _read_setting("user.max_user_namespaces") == "0":
        return f"user namespaces are forbidden: set `sysctl user.max_user_namespaces=15000`, {way_out}."
    if _read_setting(_APPARMOR) == "1":
        return f"user namespaces are restricted by AppArmor: set `sysctl {_APPARMOR}=0`, {way_out}."
    if error.errno == errno.ENOSPC:
        limits = ", ".join(f"user.max_{kind}_namespaces" for kind in ("user", "net", "pid", "mnt"))
        return f"no more namespaces may be made: raise the sysctls {limits}, or nest fewer sandboxes."
    if error.errno == errno.EINVAL:
        return f"this kernel lacks user, pid or network namespaces ({error.strerror}): use a stock kernel, {way_out}."
    return (
        f"the host forbids user namespaces ({error.strerror}; probably the seccomp filter of a container): "
        f"run the container with --security-opt seccomp=unconfined or --cap-add SYS_ADMIN, {way_out}."
    )
