"""Sockets bound to an emulated NIC: by device, because all NICs of one network share a flat subnet, and by address."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from testbed.errors import HostError
from testbed.units import NS_PER_S

DATA_PORT = 7471
EXCHANGE_PORT = DATA_PORT + 1
NO_MORE_YET = (BlockingIOError, InterruptedError)

SO_TIMESTAMPNS = 35  # <asm-generic/socket.h>; the socket module has no name for it
_TIMESTAMP = struct.Struct("@ll")
STAMP_CONTROL_BYTES = socket.CMSG_SPACE(_TIMESTAMP.size)
"""Room for ancillary data that a read with a time stamp needs."""

_TCP_USER_TIMEOUT = 18  # <linux/tcp.h>; socket.TCP_USER_TIMEOUT exists on Linux only


class Endpoint(Protocol):
    """Where bytes enter or leave: an address on a device of a host. ``device`` None: what routing says (loopback)."""

    @property
    def name(self) -> str:
        """Name of the endpoint ("pe0.cnic3")."""
        ...

    @property
    def device(self) -> str | None:
        """Network device inside the host's namespace."""
        ...

    @property
    def address(self) -> str:
        """IPv4 address."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """What is explicit about every data socket, so that TCP's own tuning does not show through.

    The buffers bound what one stream has in flight beside its grants (the kernel doubles the numbers for its own
    bookkeeping). ``stall_timeout_s`` is how long sent bytes may stay unacknowledged before the connection counts as
    lost: a peer that has stopped taking anything is given up before the waits of the protocol are over.
    """

    port: int = DATA_PORT
    send_buffer_bytes: int = 256 * 1024
    receive_buffer_bytes: int = 512 * 1024
    connect_timeout_s: float = 5.0
    stall_timeout_s: float = 20.0


DEFAULT_OPTIONS = SocketOptions()


def connecting_socket(source: Endpoint, destination: Endpoint, options: SocketOptions, tos: int) -> socket.socket:
    """A non-blocking socket on ``source``, on its way to ``destination``.

    Raises:
        OSError: refused at once, or the device is missing.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        _configure(sock, source, options)
        if tos:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        sock.bind((source.address, 0))
        sock.connect((destination.address, options.port))
    except BlockingIOError:
        pass  # in progress
    except OSError:
        sock.close()
        raise
    return sock


def listening_socket(endpoint: Endpoint, options: SocketOptions, tos: int = 0) -> socket.socket:
    """A non-blocking listening socket on ``endpoint``; accepted sockets inherit its options and its ``tos``.

    Raises:
        HostError: the address is in use or not there, or the device is missing.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restarted role listens again at once
        _configure(sock, endpoint, options)
        if tos:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        sock.bind((endpoint.address, options.port))
        sock.listen(256)
    except OSError as error:
        sock.close()
        where = f"{endpoint.address}:{options.port} on {endpoint.device or 'any device'}"
        raise HostError(f"{endpoint.name} cannot listen at {where}: {error}") from error
    return sock


def _configure(sock: socket.socket, endpoint: Endpoint, options: SocketOptions) -> None:
    if endpoint.device is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, endpoint.device.encode() + b"\0")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.send_buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.receive_buffer_bytes)  # before listen: window scale
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(options.stall_timeout_s * 1000))


def describe(error_number: int) -> str:
    """Text of an error number."""
    return f"[Errno {error_number}] {os.strerror(error_number)}"


def stamp_ns(control: Iterable[tuple[int, int, bytes]]) -> int:
    """When the kernel had what was read (SO_TIMESTAMPNS), in ns since 1970; 0 if it does not say."""
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
            seconds, ns = _TIMESTAMP.unpack(data)
            return int(seconds) * NS_PER_S + int(ns)
    return 0
