"""QEMU, a stock kernel and two tools, from the host's own package mirror into a cache folder; nothing is installed.

Invariant: ``<cache>/root`` is there only when everything in it is (it is renamed into place last), so a run that was
interrupted starts over and a run after a complete one needs no network.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testbed.errors import HostError

TOOLS = ("qemu-system-x86", "busybox-static", "kmod")
KERNEL = "linux-image-amd64"
NEEDED_BYTES = 1 << 30
MOST_SECONDS = 300  # for one step of apt-get or dpkg
_NOT_FOLLOWED = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")


def kernel_names(listing: str) -> list[str]:
    """The packages of a kernel, from ``apt-cache depends --recurse`` of the one that stands for the newest.

    Names carry versions and have changed between releases, so only the prefix is trusted.
    """
    names = (line.strip() for line in listing.splitlines() if line and not line[0].isspace())
    return [name for name in names if re.match(r"linux-(image|binary|modules|base)", name) and name != KERNEL]


def tool_names(simulation: str) -> list[str]:
    """What the host lacks of the tools, from ``apt-get --simulate install``."""
    return [line.split()[1] for line in simulation.splitlines() if line.startswith("Inst ")]


def ensure(cache: Path) -> Path:
    """The folder with everything unpacked; fetched now if it is not there yet.

    Raises:
        HostError: this host cannot have it; the message names what is missing and the way out.
    """
    root = cache / "root"
    if platform.machine() != "x86_64":
        raise HostError(
            f"this is {platform.machine()}, and the stock kernel is fetched for x86_64 only: use such a host."
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache):
            if not root.is_dir():
                _fetch(cache, root)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_space(cache) from error
        raise HostError(f"cannot write {error.filename or cache} ({error.strerror}): make it writable.") from error
    return root


def kernel_of(root: Path) -> tuple[Path, Path]:
    """The folder of the kernel's modules, and the kernel.

    Raises:
        HostError: there is none.
    """
    modules = sorted(root.glob("lib/modules/*")) or sorted(root.glob("usr/lib/modules/*"))
    kernels = sorted(root.glob("boot/vmlinuz-*")) or sorted(root.glob("usr/lib/modules/*/vmlinuz"))
    if not modules or not kernels:
        raise HostError(f"{root} holds no kernel: remove that folder and try again.")
    return modules[-1], kernels[-1]


def library_path(root: Path) -> str:
    """What LD_LIBRARY_PATH must be for a program of ``root``."""
    folders = [root / base / "x86_64-linux-gnu" for base in ("usr/lib", "lib")]
    return ":".join(str(folder) for folder in [*folders, *(f / "pulseaudio" for f in folders)] if folder.is_dir())


def find_tool(root: Path, name: str) -> Path:
    """A program, unpacked or the host's.

    Raises:
        HostError: it is in neither place.
    """
    places = [str(root / folder) for folder in ("usr/bin", "bin", "usr/sbin", "sbin")]
    found = shutil.which(name, path=":".join([*places, os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if found is None:
        raise HostError(f"{name} is neither in {root} nor on this host: remove that folder and try again.")
    return Path(found)


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Of two runs at once, one fetches and the other waits."""
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(cache: Path, root: Path) -> None:
    for program in ("apt-get", "apt-cache", "dpkg"):
        if shutil.which(program) is None:
            raise HostError(
                f"{program} is missing, and the stock kernel comes from Debian's packages: use Debian or Ubuntu."
            )
    if shutil.disk_usage(cache).free < NEEDED_BYTES:
        raise _no_space(cache)
    print(f"fetching {KERNEL}, {', '.join(TOOLS)} into {cache} (once) ...", flush=True)
    for stale in cache.glob("new-*"):  # of a run that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=cache) as folder:
        new = Path(folder, "root")
        debs, apt = Path(folder, "debs"), Path(folder, "apt")
        for made in (new, debs, apt / "lists/partial", apt / "archives/partial"):
            made.mkdir(parents=True)
        options = [  # lists of our own: no root, and the host's may be old or none
            *("-o", f"Dir::State::Lists={apt / 'lists'}", "-o", f"Dir::Cache={apt}", "-o", "Debug::NoLocking=1"),
            *("-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"),
        ]
        _run(["apt-get", *options, "-q", "update"], debs)
        listing = _run(
            ["apt-cache", *options, "depends", "--recurse", *(f"--no-{kind}" for kind in _NOT_FOLLOWED), KERNEL], debs
        )
        simulation = _run(["apt-get", *options, "--simulate", "--no-install-recommends", "install", *TOOLS], debs)
        names = [*kernel_names(listing), *tool_names(simulation)]
        _run(["apt-get", *options, "-q", "download", *names], debs)
        for deb in sorted(debs.glob("*.deb")):
            _run(["dpkg", "-x", str(deb), str(new)], debs)
        _list_modules(new)
        os.rename(new, root)


def _list_modules(root: Path) -> None:
    """Make modules.dep, which the package leaves to its installation."""
    modules, _ = kernel_of(root)
    kmod = find_tool(root, "kmod")
    try:
        # kmod is depmod when called so; /lib/modules is below the base
        subprocess.run(["depmod", "-b", modules.parents[2], modules.name], executable=kmod, check=True)
    except subprocess.CalledProcessError as error:
        raise HostError(
            f"the modules of kernel {modules.name} cannot be listed (depmod: {error.returncode})."
        ) from None


def _run(command: Sequence[str], folder: Path) -> str:
    """Run an apt or dpkg command in ``folder``; its stdout.

    Raises:
        HostError: it failed; the message holds its last complaint.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise HostError(f"{command[0]} did not end within {MOST_SECONDS} s: is the package mirror reachable?") from None
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        said = next((line for line in complaints if line.startswith("E:")), complaints[-1])
        if "enough free space" in done.stderr or "No space left" in done.stderr:
            raise _no_space(folder.parents[1])
        raise HostError(
            f"the stock kernel's packages cannot be had here ({command[0]}: {said.removeprefix('E:').strip()}); "
            "a Debian or Ubuntu mirror must be in apt's sources and reachable."
        )
    return done.stdout


def _no_space(folder: Path) -> HostError:
    return HostError(f"too little disk space at {folder}: free {NEEDED_BYTES >> 20} MiB there (or remove .cache).")
