"""What the sim world charges besides the links: the transport, the control plane, the disks.

Everything here is a property of the emulated transport, the same for every scenario: either what the live world is
made of, or a named latency with its reason. Nothing is fitted to a scenario.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from testbed.errors import ConfigError
from testbed.units import MBIT, NS_PER_S

SEGMENT_PAYLOAD_BYTES = 1448
"""TCP payload of a full segment at an MTU of 1500, with timestamps: what the live world's links carry."""
SEGMENT_HEADER_BYTES = 14 + 20 + 32
"""Ethernet, IPv4 and TCP with timestamps: what a shaper charges for a segment besides its payload."""
WRITE_HEADER_BYTES = 32
"""What the data plane puts before each write."""
SEAL_BYTES = 8
"""What the data plane puts behind each Layer Block of a write."""

_LONGEST_S = 10.0

LANES = "lanes"
DisciplineName = Literal["lanes", "fifo", "fair", "packets", "strict", "weighted", "infiniband"]
"""How a resource divides its rate (``disciplines.Discipline``). ``lanes``: as the cluster's ``lanes`` says, with turns
between source memories within the KV lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimParams:
    """Latencies and rates of the emulated cluster (seconds and bit/s of this host's scale, not of the paper's).

    The defaults are the live world's on an idle machine; they were not chosen by looking at results.
    """

    message_latency_s: float = 0.0003
    """A control message, or the acknowledgement of a write: two event loops and one trip through a socket. Measured
    round trips of the live control plane are 0.4 to 1 ms."""
    message_jitter_s: float = 0.00015
    """How far a message may be earlier or later than that, evenly spread; what a role sends to another stays in order,
    and what it sends at one instant arrives at one, as in one segment.
    Without any, roles that are in lock-step in the live world for an instant would be so for ever."""
    draw: int = 0
    """Which of the possible timings of messages: a run of the live world is one of them, and no draw is the right one.
    ``testbed parity`` looks at several."""
    shard_latency_s: float = 0.0002
    """Behind the network time of a shard of a collective: an event loop that wakes to read it. Not in its latency."""
    disk_latency_s: float = 0.0007
    """Before a disk's first byte: a hop to a thread, a direct read or a synced write, and the hop back."""
    disk_rate_bps: int = 0
    """What one storage server's disk reads or writes; 0: the links are slower by far, as live."""
    storage_rate_bps: int = 0
    """What all storage servers together read or write (the storage cluster's aggregate); 0: unlimited."""
    snic: DisciplineName = "fifo"
    """How each kind of resource divides its rate. First in, first out: a NIC takes the work requests of its queue pairs
    in turn, transfers are of a few kB to a few MB, and nothing but KV is on these links. With ``fair`` all of them are
    shared evenly at every instant, as endless streams would be."""
    cnic: DisciplineName = "lanes"
    pcie: DisciplineName = "packets"
    dram: DisciplineName = "packets"
    disk: DisciplineName = "fifo"

    def __post_init__(self) -> None:
        """Raises ConfigError for a latency or a rate that no transport has."""
        for key in ("message_latency_s", "shard_latency_s", "disk_latency_s"):
            value = getattr(self, key)
            if not 1e-6 <= value <= _LONGEST_S:
                raise ConfigError(f"sim.{key} is {value:g}, but it must be between 0.000001 and {_LONGEST_S:g} s.")
        if not 0 <= self.message_jitter_s < self.message_latency_s:
            raise ConfigError(
                f"sim.message_jitter_s is {self.message_jitter_s:g}, but it must be between 0 and less than "
                f"sim.message_latency_s = {self.message_latency_s:g}: no message comes before it is sent."
            )
        for key in ("disk_rate_bps", "storage_rate_bps"):
            rate = getattr(self, key)
            if rate and rate < MBIT:
                raise ConfigError(f"sim.{key} is {rate}; use 0 (unlimited) or at least 1 Mbit/s.")

    @property
    def message_latency_ns(self) -> int:
        """The latency of a control message."""
        return round(self.message_latency_s * NS_PER_S)

    @property
    def message_jitter_ns(self) -> int:
        """Half the width of its spread."""
        return round(self.message_jitter_s * NS_PER_S)

    @property
    def shard_latency_ns(self) -> int:
        """What a receiver adds to a shard."""
        return round(self.shard_latency_s * NS_PER_S)

    @property
    def disk_latency_ns(self) -> int:
        """The latency of a disk."""
        return round(self.disk_latency_s * NS_PER_S)


def payload_bytes(size_bytes: int, layer_blocks: int) -> int:
    """Payload of the transport for a write of ``size_bytes`` in ``layer_blocks`` Layer Blocks."""
    return WRITE_HEADER_BYTES + size_bytes + SEAL_BYTES * layer_blocks


def wire_bytes(payload: int) -> int:
    """What a shaper charges for ``payload`` bytes, in full segments but for the last."""
    return payload + -(-payload // SEGMENT_PAYLOAD_BYTES) * SEGMENT_HEADER_BYTES
