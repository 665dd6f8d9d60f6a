"""Reads a capture that a run has recorded (``testbed.fabric.live.recorder``) into what lanes are about.

The file is a plain pcap of nanosecond stamps; this reads 128 bytes of headers per packet in a few microseconds. Tests
hold it against scapy, which takes the same files apart.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import ConfigError
from testbed.fabric.live.recorder import (
    COOKED_HEADER,
    FILE_HEADER,
    LEAVING,
    LINK_TYPE_SLL2,
    PCAP_MAGIC_NS,
    RECORD_HEADER,
)
from testbed.units import NS_PER_S

_IPV4, _TCP = 0x0800, 6
_IP = struct.Struct(">BBHHHBBHII")
_TCP_HEADER = struct.Struct(">HHIIBB")

Flow = tuple[int, int, int, int]
"""Source and destination address, source and destination port."""


@dataclass(frozen=True, slots=True)
class Packet:
    """One TCP packet (or super-packet). ``leaving``: through the device, else it entered. ``tos``: the IP TOS byte;
    ``flags``: TCP's."""

    at_ns: int
    leaving: bool
    flow: Flow
    tos: int
    ip_bytes: int
    payload_bytes: int
    sequence: int
    flags: int


def read_packets(path: Path) -> Iterator[Packet]:
    """The TCP packets of a capture, in the order of the wire; a record that was cut short ends it.

    Raises:
        ConfigError: not a file that a run has recorded.
    """
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    if len(data) < FILE_HEADER.size:
        raise ConfigError(f"{path} is not a capture of this testbed: it is too short; give one of capture/*.pcap.")
    magic, *_, link_type = FILE_HEADER.unpack_from(data)
    if magic != PCAP_MAGIC_NS or link_type != LINK_TYPE_SLL2:
        raise ConfigError(f"{path} is not a capture of this testbed; give one of a run folder's capture/*.pcap.")
    return _records(data[FILE_HEADER.size :])


def _records(data: memoryview) -> Iterator[Packet]:
    at = 0
    while at + RECORD_HEADER.size <= len(data):
        seconds, ns, kept, _ = RECORD_HEADER.unpack_from(data, at)
        at += RECORD_HEADER.size
        record = data[at : at + kept]
        at += kept
        if len(record) == kept >= COOKED_HEADER.size:
            packet = _packet(seconds * NS_PER_S + ns, record)
            if packet is not None:
                yield packet


def _packet(at_ns: int, record: memoryview) -> Packet | None:
    protocol, _, _, _, direction, _, _ = COOKED_HEADER.unpack_from(record)
    ip = record[COOKED_HEADER.size :]
    if protocol != _IPV4 or len(ip) < _IP.size:
        return None
    version, tos, ip_bytes, _, _, _, transport, _, source, destination = _IP.unpack_from(ip)
    head = 4 * (version & 0xF)
    if transport != _TCP or len(ip) < head + _TCP_HEADER.size:
        return None
    source_port, destination_port, sequence, _, offset, flags = _TCP_HEADER.unpack_from(ip, head)
    payload = ip_bytes - head - 4 * (offset >> 4)
    return Packet(
        at_ns, direction == LEAVING, (source, destination, source_port, destination_port), tos, ip_bytes, payload,
        sequence, flags,
    )  # fmt: skip
