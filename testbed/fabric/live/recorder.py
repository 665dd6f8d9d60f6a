"""Records the packets of chosen links into pcap files while a run goes on, in a process of its own.

The sockets are plain AF_PACKET ones, opened in the namespace of the link's device: what leaves a device is seen after
its queues, what enters it when it arrives, so both are seen in the order of the wire. A file holds the first
``SNAP_BYTES`` of each packet under a "Linux cooked v2" header (link type 276), because that tells what left from what
entered: a local copy passes its CNIC in both directions with the same addresses. Wireshark and scapy read it.

A file is bounded; packets beyond, and packets that the kernel dropped because this process was late, are counted.
A disk that is full ends the recording of a link, not the run.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from testbed.errors import HostError
from testbed.fabric.live.addresses import Plan
from testbed.fabric.live.network import Network
from testbed.fabric.live.sockets import SO_TIMESTAMPNS, STAMP_CONTROL_BYTES, stamp_ns
from testbed.fabric.live.syscalls import die_with_parent
from testbed.fabric.recording import Recording
from testbed.units import NS_PER_S

SNAP_BYTES = 128
MOST_FILE_BYTES = 64 * 1024 * 1024
PCAP_MAGIC_NS = 0xA1B23C4D
LINK_TYPE_SLL2 = 276
FILE_HEADER = struct.Struct("<IHHiIII")
RECORD_HEADER = struct.Struct("<IIII")  # seconds, ns, bytes kept, bytes there were
COOKED_HEADER = struct.Struct(">HHIHBB8s")  # protocol, -, interface, hardware type, direction, address length, address
LEAVING = 4  # PACKET_OUTGOING

_ETHERNET_BYTES = 14
_ETHERNET_TYPE = 1
_ALL_PROTOCOLS = 0x0003
_SOCKET_BUFFER_BYTES = 32 * 1024 * 1024
_SO_RCVBUFFORCE = 33
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_STATISTICS = struct.Struct("=II")
_PACKETS_PER_TURN = 64
_CHUNK_BYTES = 64 * 1024
_STOP = b"."
_STOP_TIMEOUT_S = 20.0


def capture_points(plan: Plan) -> dict[str, tuple[str, str]]:
    """Where packets can be recorded: namespace and device by name.

    A NIC ("pe0.snic", "pe0.cnic0", "st0.snic") shows what it sends and receives, after its lanes. What enters them is
    seen at the memories behind a CNIC: "pe0gpu0.cnic" is the HBM side, "pe0.mem0" the DRAM side. "pe0gpu0.copy" is the
    link of a copy engine.
    """
    points = {link.port: (link.host, link.device) for link in plan.links}
    for endpoint in plan.endpoints.values():
        if endpoint.device.rstrip("0123456789") in ("cnic", "copy", "mem"):
            points[f"{endpoint.host}.{endpoint.device}"] = (endpoint.host, endpoint.device)
    return points


def check_permitted(network: Network, names: Sequence[str]) -> None:
    """Find out before anything runs whether packets of these links can be recorded.

    Raises:
        HostError: they cannot, and why.
    """
    points = capture_points(network.plan)
    for name in names:
        _packet_socket(network, name, points[name]).close()


@contextmanager
def recording(
    network: Network, names: Sequence[str], folder: Path, *, most_bytes: int = MOST_FILE_BYTES
) -> Iterator[list[Recording]]:
    """Record ``names`` into ``folder`` meanwhile. The list is filled when the block is left.

    Call it without a running event loop and without threads: it forks. The names must be ``capture_points``.

    Raises:
        HostError: capturing is not permitted, the kernel cannot, or no file can be made.
    """
    found: list[Recording] = []
    if not names:
        yield found
        return
    points = capture_points(network.plan)
    with ExitStack() as stack:
        taps = [_Tap.open(network, name, points[name], folder, most_bytes, stack) for name in names]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            sys.stdout.flush()
            sys.stderr.flush()
            parent = os.getpid()
            child = os.fork()
            if child == 0:
                ours.close()
                _be_recorder(taps, theirs, parent)
            theirs.close()
            for tap in taps:
                tap.sock.close()  # the child has it: what nobody reads here must not pile up
            try:
                yield found
            finally:
                found += _end(child, ours, names, folder)


def _end(child: int, line: socket.socket, names: Sequence[str], folder: Path) -> list[Recording]:
    """Ask the recorder to end. Result: what it has; what it should have had, if it is not there any more."""
    line.settimeout(_STOP_TIMEOUT_S)
    answer = b""
    with suppress(OSError):
        line.sendall(_STOP)
        while part := line.recv(65_536):
            answer += part
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # it has answered, or never will
    os.waitpid(child, 0)
    try:
        return [Recording(**fields) for fields in json.loads(answer)]
    except ValueError:
        why = "the process that recorded it has died"
        return [Recording(link=n, file=str(_path(folder, n)), failure=f"Capture of {n}: {why}.") for n in names]


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.pcap"


class _Tap:
    """One link: a socket that sees its packets, and the file that they go to."""

    def __init__(self, sock: socket.socket, file: int, result: Recording, most_bytes: int) -> None:
        self.sock = sock
        self.result = result
        self._file = file
        self._left = most_bytes - FILE_HEADER.size
        self._chunk: list[bytes] = []
        self._chunk_bytes = 0
        self._buffer = memoryview(bytearray(SNAP_BYTES))

    @classmethod
    def open(
        cls, network: Network, name: str, point: tuple[str, str], folder: Path, most_bytes: int, stack: ExitStack
    ) -> _Tap:
        """Open the socket and the file.

        Raises:
            HostError: one of them cannot be opened.
        """
        sock = _packet_socket(network, name, point)
        stack.callback(sock.close)
        path = _path(folder, name)
        header = FILE_HEADER.pack(PCAP_MAGIC_NS, 2, 4, 0, 0, COOKED_HEADER.size + SNAP_BYTES, LINK_TYPE_SLL2)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, file)
            _write_all(file, header)
        except OSError as error:
            raise HostError(_unwritable(path, error)) from error
        return cls(sock, file, Recording(link=name, file=str(path)), most_bytes)

    def read(self, most_packets: int) -> bool:
        """Record what has come. Result: whether that was all."""
        for _ in range(most_packets):
            try:
                size, control, _, address = self.sock.recvmsg_into(
                    [self._buffer], STAMP_CONTROL_BYTES, socket.MSG_TRUNC | socket.MSG_DONTWAIT
                )
            except (BlockingIOError, InterruptedError):
                return True
            except OSError:  # the device went down: nothing more will come until it is up again
                return True
            self._keep(size, divmod(stamp_ns(control) or time.time_ns(), NS_PER_S), address[2])
        return False

    def _keep(self, size: int, stamp: tuple[int, int], direction: int) -> None:
        kept = min(size, SNAP_BYTES)
        payload = self._buffer[_ETHERNET_BYTES:kept]
        record_bytes = RECORD_HEADER.size + COOKED_HEADER.size + len(payload)
        result = self.result
        if result.failure or record_bytes > self._left:
            self._left = 0  # what comes later must not fill a gap: the file ends where it ends
            result.beyond += 1
            return
        self._left -= record_bytes
        cooked = COOKED_HEADER.pack(
            int.from_bytes(self._buffer[12:14], "big"), 0, 0, _ETHERNET_TYPE, direction, 6, bytes(self._buffer[6:12])
        )
        there_was = COOKED_HEADER.size + size - _ETHERNET_BYTES
        head = RECORD_HEADER.pack(*stamp, COOKED_HEADER.size + len(payload), there_was)
        self._chunk += (head, cooked, bytes(payload))
        self._chunk_bytes += record_bytes
        result.packets += 1
        if self._chunk_bytes >= _CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write out what has been kept; on a full disk say so, once."""
        if not self._chunk:
            return
        data, packets = b"".join(self._chunk), len(self._chunk) // 3
        self._chunk.clear()
        self._chunk_bytes = 0
        try:
            _write_all(self._file, data)
        except OSError as error:
            self.result.failure = _unwritable(Path(self.result.file), error)
            self.result.packets -= packets
            self.result.beyond += packets

    def finish(self) -> Recording:
        """The rest, and the figures."""
        while not self.read(_PACKETS_PER_TURN):
            pass
        self.flush()
        with suppress(OSError):
            _, self.result.lost = _STATISTICS.unpack(
                self.sock.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, _STATISTICS.size)
            )
        return self.result


def _packet_socket(network: Network, name: str, point: tuple[str, str]) -> socket.socket:
    """A socket that sees every packet of a device.

    Raises:
        HostError: naming the link and what is in the way.
    """
    host, device = point
    try:
        with network.inside(host):
            sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)  # deaf until it is bound
        _enlarge(sock)
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        sock.bind((device, _ALL_PROTOCOLS))
    except PermissionError as error:
        raise HostError(
            f"--capture {name}: raw sockets are not permitted here ({error.strerror}); "
            "allow CAP_NET_RAW inside user namespaces, or run without --capture."
        ) from error
    except OSError as error:
        missing = error.errno == errno.EAFNOSUPPORT
        why = "this kernel has no packet sockets (CONFIG_PACKET)" if missing else str(error.strerror)
        raise HostError(f"--capture {name}: {why}; run without --capture.") from error
    return sock


def _enlarge(sock: socket.socket) -> None:
    """Room for the time in which the recorder is not run: by force where that is allowed, else what the host allows."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _SOCKET_BUFFER_BYTES)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _unwritable(path: Path, error: OSError) -> str:
    return (
        f"{path}: the capture cannot be written ({error.strerror}); "
        "free some space or choose another disk with --out."
    )


def _be_recorder(taps: Sequence[_Tap], line: socket.socket, parent: int) -> NoReturn:
    """The child: record until told to stop, answer, and never return into the frames inherited from the parent."""
    try:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the supervisor decides what a Ctrl-C means
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        with selectors.DefaultSelector() as selector:
            selector.register(line, selectors.EVENT_READ)
            for tap in taps:
                selector.register(tap.sock, selectors.EVENT_READ, tap)
            over = False
            while not over:
                for key, _ in selector.select():
                    if key.data is None:
                        over = True
                    else:
                        key.data.read(_PACKETS_PER_TURN)
        line.sendall(json.dumps([asdict(tap.finish()) for tap in taps]).encode())
    finally:
        os._exit(0)
