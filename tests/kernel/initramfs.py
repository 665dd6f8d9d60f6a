"""A small initramfs: busybox, the few modules that mounting the host's files takes, and ``init.sh``."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Mapping
from pathlib import Path

from testbed.errors import HostError

WANTED = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
_DIRECTORY, _PROGRAM, _FILE = 0o040755, 0o100755, 0o100644


def load_order(modules_dep: str, wanted: tuple[str, ...] = WANTED) -> list[str]:
    """Paths of the wanted modules and of all that they need, needs first; from the text of ``modules.dep``.

    A wanted module that is not listed is built in.
    """
    needs = {path: rest.split() for path, _, rest in (line.partition(":") for line in modules_dep.splitlines())}
    by_name = {module_name(path): path for path in needs}
    order: list[str] = []
    for name in wanted:
        if name in by_name:
            path = by_name[name]
            # depmod lists direct and indirect needs, each before those that it needs itself
            order += [module for module in [*reversed(needs[path]), path] if module not in order]
    return order


def module_name(path: str) -> str:
    """``kernel/fs/9p/9p.ko.xz`` is ``9p``; the kernel takes - and _ for the same."""
    return path.rsplit("/", 1)[-1].split(".ko", 1)[0].replace("-", "_")


def cpio(entries: Mapping[str, tuple[int, bytes]]) -> bytes:
    """An archive in the kernel's "newc" format: name -> (mode, content)."""
    parts = []
    for inode, (name, (mode, content)) in enumerate([*entries.items(), ("TRAILER!!!", (0, b""))], start=1):
        fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        parts += [header, bytes(-len(header) % 4), content, bytes(-len(content) % 4)]
    return b"".join(parts)


def build(modules: Path, busybox: Path) -> bytes:
    """The archive for the kernel whose modules are in ``modules`` (the folder with modules.dep)."""
    order = load_order((modules / "modules.dep").read_text())
    entries: dict[str, tuple[int, bytes]] = {
        "bin": (_DIRECTORY, b""),
        "modules": (_DIRECTORY, b""),
        "bin/busybox": (_PROGRAM, busybox.read_bytes()),
        "init": (_PROGRAM, Path(__file__).with_name("init.sh").read_bytes()),
        "modules/order": (_FILE, "\n".join(f"{module_name(path)}.ko" for path in order).encode()),
    }
    for path in order:
        entries[f"modules/{module_name(path)}.ko"] = (_FILE, _read_module(modules / path))
    return cpio(entries)


def _read_module(path: Path) -> bytes:
    """A module as busybox can load it."""
    data = path.read_bytes()
    match path.suffix:
        case ".ko":
            return data
        case ".xz":
            return lzma.decompress(data)
        case ".gz":
            return gzip.decompress(data)
    raise HostError(f"the kernel's modules are compressed in a way that this Python cannot undo ({path.name}).")
