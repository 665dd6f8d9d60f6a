"""The pure parts of the stock kernel's guest: which packages, which modules in which order, what it boots from."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from testbed.errors import HostError
from tests.kernel import initramfs, packages
from tests.kernel.__main__ import marked_files
from tests.kernel.tsc import tsc_khz

DEPENDS = """\
linux-image-amd64
  Depends: linux-image-6.1.0-57-amd64
linux-image-6.1.0-57-amd64
  Depends: kmod
  Depends: linux-base
 |Depends: initramfs-tools
    dracut
<linux-initramfs-tool>
linux-base
  Depends: debconf
debconf
"""

SPLIT = """\
linux-image-amd64
  Depends: linux-image-7.3.1-amd64
linux-image-7.3.1-amd64
linux-binary-7.3.1-amd64
linux-modules-7.3.1-amd64
linux-base-7.3.1-amd64
libc6
"""

SIMULATION = """\
Reading package lists...
The following NEW packages will be installed:
  kmod libfdt1 qemu-system-x86
Inst kmod (30+20221128-1 Debian:12.15/oldstable [amd64])
Inst libfdt1 (1.6.1-4 Debian:12.15/oldstable [amd64])
Inst qemu-system-x86 (1:7.2 Debian:12.15/oldstable [amd64]) []
Conf kmod (30+20221128-1 Debian:12.15/oldstable [amd64])
"""

MODULES_DEP = """\
kernel/net/9p/9pnet_virtio.ko: kernel/net/9p/9pnet.ko kernel/drivers/virtio/virtio.ko
kernel/net/9p/9pnet.ko:
kernel/fs/9p/9p.ko.xz: kernel/net/9p/9pnet.ko kernel/fs/netfs/netfs.ko
kernel/fs/netfs/netfs.ko:
kernel/drivers/virtio/virtio.ko: kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio_ring.ko:
kernel/drivers/virtio/virtio-pci.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/sound/beep.ko:
"""


def test_the_kernels_packages_are_found_under_whatever_version() -> None:
    assert packages.kernel_names(DEPENDS) == ["linux-image-6.1.0-57-amd64", "linux-base"]
    assert packages.kernel_names(SPLIT) == [
        f"linux-{part}-7.3.1-amd64" for part in ("image", "binary", "modules", "base")
    ]


def test_only_what_the_host_lacks_of_the_tools_is_fetched() -> None:
    assert packages.tool_names(SIMULATION) == ["kmod", "libfdt1", "qemu-system-x86"]
    assert packages.tool_names("0 upgraded, 0 newly installed\n") == []


def test_modules_come_after_all_that_they_need_and_once() -> None:
    order = initramfs.load_order(MODULES_DEP)
    assert sorted(map(initramfs.module_name, order)) == [
        "9p", "9pnet", "9pnet_virtio", "netfs", "virtio", "virtio_pci", "virtio_ring",
    ]  # fmt: skip
    needs = {line.split(":")[0]: line.split(":")[1].split() for line in MODULES_DEP.splitlines()}
    assert all(order.index(need) < order.index(path) for path in order for need in needs[path])


def unpack(archive: bytes) -> dict[str, tuple[int, bytes]]:
    stream, found = io.BytesIO(archive), {}
    while True:
        header = stream.read(110)
        assert header[:6] == b"070701"
        fields = [int(header[6 + 8 * k : 14 + 8 * k], 16) for k in range(13)]
        name = stream.read(fields[11])[:-1].decode()
        stream.read(-stream.tell() % 4)
        content = stream.read(fields[6])
        stream.read(-stream.tell() % 4)
        if name == "TRAILER!!!":
            return found
        found[name] = (fields[1], content)


def test_the_archive_unpacks_to_what_went_in(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text("kernel/a-b.ko:\nkernel/overlay.ko: kernel/a-b.ko\n")
    (tmp_path / "kernel").mkdir()
    for name in ("a-b", "overlay"):
        (tmp_path / f"kernel/{name}.ko").write_bytes(name.encode())
    (tmp_path / "busybox").write_bytes(b"12345")
    found = unpack(initramfs.build(tmp_path, tmp_path / "busybox"))
    assert found["bin/busybox"] == (0o100755, b"12345")
    assert found["modules/order"][1] == b"a_b.ko\noverlay.ko"
    assert found["modules/a_b.ko"] == (0o100644, b"a-b")
    assert found["init"][1].startswith(b"#!/bin/busybox sh\n")


def test_a_host_that_cannot_have_it_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="apt-get is missing"):
        packages.ensure(tmp_path / "cache")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(HostError, match="this is aarch64"):
        packages.ensure(tmp_path / "cache")


def test_a_mirror_that_does_not_answer_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in {
        "apt-get": 'case "$*" in *simulate*) echo "E: Unable to locate package kmod" >&2; exit 100;; esac',
        "apt-cache": "",
        "dpkg": "",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match=r"apt-get: Unable to locate package kmod\); a Debian or Ubuntu mirror"):
        packages.ensure(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_the_clock_rate_that_a_guest_is_told_is_this_processors() -> None:
    once, again = tsc_khz(), tsc_khz()
    if once is None or again is None:
        pytest.skip("this host allows no code in memory that can be written")
    assert once == pytest.approx(again, rel=0.001)
    assert 10**5 < once < 10**7  # 0.1 to 10 GHz


def test_files_that_the_guest_runs_are_found_by_the_marker() -> None:
    assert "tests/live/test_stock_kernel.py" in marked_files()
