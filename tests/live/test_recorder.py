"""Recording packets where something is in the way: no permission, no space, a full file, a recorder that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import tempfile
from pathlib import Path

import pytest

from testbed.capture.packets import read_packets
from testbed.errors import HostError
from testbed.fabric.live import recorder, syscalls
from testbed.fabric.live.network import Network
from testbed.fabric.live.recorder import check_permitted, recording
from testbed.fabric.live.streams import Flow, run_streams
from testbed.fabric.recording import Recording
from tests.live.sandboxed import in_sandbox, small_spec

pytestmark = pytest.mark.live

CNIC, IDLE = "pe0.cnic0", "pe0.snic"
FLOW = Flow(name="kv", source="pe0.cnic0", destination="pe0gpu0.cnic", size_bytes=300_000)
TINY_BYTES = 8192
_CAP_NET_RAW = 13


def record(network: Network, folder: Path, **kwargs: int) -> list[Recording]:
    with recording(network, (CNIC, IDLE), folder, **kwargs) as found:
        run_streams(network, [FLOW], seconds=0, warm_up_s=0)
    return found


def readable(one: Recording) -> int:
    return len(list(read_packets(Path(one.file))))


def try_everything() -> dict[str, object]:
    """Result: what came of each attempt, by name."""
    with Network(small_spec(gpus=1)) as network, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, idle = record(network, folder / "whole")
        cut, _ = record(network, folder / "cut", most_bytes=2000)
        syscalls.mount("tiny", name, "tmpfs", 0, f"size={TINY_BYTES}")
        full, still = record(network, folder / "full")
        try:
            record(network, folder / "fuller")
        except HostError as error:
            refused = str(error)
        full_packets = readable(full)
        syscalls.unmount(name)
        return {
            "whole": (whole, readable(whole)), "idle": (idle, readable(idle)), "cut": (cut, readable(cut)),
            "full": (full, full_packets), "still": still, "refused": refused, "killed": killed(network, folder),
            "forbidden": forbidden(network),
        }  # fmt: skip


def killed(network: Network, folder: Path) -> list[Recording]:
    with recording(network, (CNIC,), folder / "killed") as found:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
        os.kill(int(children[-1]), signal.SIGKILL)
    return found


def forbidden(network: Network) -> str:
    """Give up CAP_NET_RAW, and try."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=II", 0x20080522, 0)
    data = ctypes.create_string_buffer(24)
    assert libc.capget(header, data) == 0
    words = list(struct.unpack("=6I", data.raw))
    words[0] &= ~(1 << _CAP_NET_RAW)
    assert libc.capset(header, struct.pack("=6I", *words)) == 0
    try:
        check_permitted(network, (CNIC,))
    except HostError as error:
        return str(error)
    return "permitted"


def test_what_is_in_the_way_is_told_and_nothing_else_is_lost() -> None:
    found = in_sandbox(try_everything)
    whole, packets = found["whole"]
    assert (whole.packets, whole.beyond, whole.lost, whole.failure) == (packets, 0, 0, "")
    assert packets > 50
    assert found["idle"] == (Recording(link=IDLE, file=found["idle"][0].file), 0)

    cut, packets = found["cut"]
    assert cut.packets == packets < whole.packets, "the file ends, and is sound"
    assert cut.beyond > 0
    assert "more are not in it" in cut.text

    full, packets = found["full"]
    assert full.packets <= packets < whole.packets
    assert "No space left" in full.failure and "--out" in full.failure
    assert found["still"].failure == "", "the other link is not to blame"
    assert "No space left" in found["refused"]

    assert [one.failure for one in found["killed"]] == [f"Capture of {CNIC}: the process that recorded it has died."]
    assert found["forbidden"].startswith(f"--capture {CNIC}: raw sockets are not permitted here")
    assert "without --capture" in found["forbidden"]


def test_a_kernel_without_packet_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(97, "Address family not supported by protocol")

    class Anywhere:
        def inside(self, host: str) -> tempfile.TemporaryDirectory[str]:
            return tempfile.TemporaryDirectory()

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(HostError, match="no packet sockets"):
        recorder._packet_socket(Anywhere(), CNIC, ("pe0", "cnic0"))  # type: ignore[arg-type]
