"""The Linux calls that Python 3.11's ``os`` lacks (unshare, setns, mount, umount2, prctl), through the C library.

The ``unshare``, ``nsenter`` and ``mount`` programs are not used: a call costs microseconds where a program costs
milliseconds, and the error number tells which setting of the host forbids it.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

MNT_DETACH = 0x2

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    """Raise OSError naming ``what`` if the C library returned -1."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move the calling process (network, mount) or its children (pid) into new namespaces."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(namespace_fd: int, kind: int) -> None:
    """Move the calling thread into the namespace behind an open descriptor."""
    _check(_libc.setns(namespace_fd, kind), f"setns({kind:#x})")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount ``source`` on ``target``."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(result, f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    """Detach whatever is mounted on ``target``."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def die_with_parent(signal_number: int) -> None:
    """Ask for ``signal_number`` when the parent ends. The caller checks that it has not ended already."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def own_proc_files() -> None:
    """Let this process write its own /proc files although it changed its user: they belong to root after that."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(1), 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
