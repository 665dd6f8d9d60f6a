"""One QEMU guest: a stock kernel on the host's files (read-only), running one command."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.errors import TestbedError
from tests.kernel import initramfs
from tests.kernel.packages import find_tool, kernel_of, library_path
from tests.kernel.tsc import tsc_khz

MEMORY_MIB = 2048
PROCESSORS = 2
_CONSOLE_LINES = 15  # of the kernel's messages, shown when the guest ended badly


class GuestError(TestbedError):
    """The guest gave no answer: the kernel or QEMU is at fault, or time ran out."""


def run(root: Path, checkout: Path, command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> int:
    """Boot the kernel of ``root``, run ``command`` in ``checkout`` as the calling user, and return its exit code.

    What the command writes goes to stdout as it comes.

    Raises:
        GuestError: no exit code came back within ``limit_s`` seconds.
    """
    modules, kernel = kernel_of(root)
    with tempfile.TemporaryDirectory(prefix="run-", dir=root.parent) as folder:
        results = Path(folder)
        _write_inputs(results, root, modules.parent, checkout, command, environment)
        image = results / "initramfs"
        image.write_bytes(initramfs.build(modules, find_tool(root, "busybox")))
        _boot(_qemu_command(root, kernel, image, results), library_path(root), limit_s, results / "console")
        code = results / "code"
        if not code.exists() or not code.read_text().strip():
            raise GuestError(f"the guest ended without a result; its kernel's last words:\n{_last_words(results)}")
        return int(code.read_text())


def _write_inputs(
    results: Path, root: Path, modules: Path, checkout: Path, command: Sequence[str], environment: Mapping[str, str]
) -> None:
    """The scripts and settings that the guest reads from its results folder."""
    shutil.copy(Path(__file__).with_name("guest.sh"), results)
    settings = {
        "MODULES": modules,
        "KMOD": find_tool(root, "kmod"),
        "BUSYBOX": find_tool(root, "busybox"),
        "CHECKOUT": checkout,
        "GUEST_UID": os.geteuid(),
        "GUEST_GID": os.getegid(),
    }
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in settings.items()]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    (results / "environment").write_text("\n".join(lines) + "\n")
    (results / "command").write_text(f"exec {shlex.join(command)}\n")


def _qemu_command(root: Path, kernel: Path, image: Path, results: Path) -> list[str]:
    """TCG only: the same everywhere, and KVM is not for everybody. tsc=reliable: else the clock has steps of 4 ms."""
    firmware = [root / "usr/share" / name for name in ("qemu", "seabios", "ipxe")]
    shares = {"host": ("/", "readonly=on"), "results": (str(results), "readonly=off")}
    append = "console=ttyS0 panic=-1 quiet mitigations=off tsc=reliable"
    if (khz := tsc_khz()) is not None:
        append += f" tsc_early_khz={khz}"
    return [
        str(find_tool(root, "qemu-system-x86_64")),
        *(word for folder in firmware if folder.is_dir() for word in ("-L", str(folder))),
        *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", str(PROCESSORS)),
        *("-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-serial", f"file:{results / 'console'}", "-serial", "stdio"),
        *("-kernel", str(kernel), "-initrd", str(image), "-append", append),
        *(
            word
            for tag, (path, how) in shares.items()
            for word in (
                *("-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap,{how}"),
                *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
            )
        ),
    ]


def _boot(command: Sequence[str], libraries: str, limit_s: float, console: Path) -> None:
    """Run QEMU to its end, copying the guest's output; kill it after ``limit_s`` or when we are interrupted."""
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    late = threading.Event()
    command = ["setpriv", "--pdeathsig", "KILL", *command]  # so that no SIGKILL of ours leaves it behind
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as qemu:

        def stop() -> None:
            late.set()
            qemu.kill()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        try:
            assert qemu.stdout is not None
            while text := qemu.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                sys.stdout.buffer.write(text)
                sys.stdout.buffer.flush()
        finally:
            timer.cancel()
            qemu.kill()
    if late.is_set():
        raise GuestError(
            f"the guest was ended after {limit_s:g} s (its tests hang, or this host is busy: --limit SECONDS gives "
            f"it more); its kernel's last words:\n{_last_words(console.parent)}"
        )


def _last_words(results: Path) -> str:
    try:
        lines = (results / "console").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join(lines[-_CONSOLE_LINES:]) or "(none)"
