"""Where blocks live: rendezvous hashing over the storage servers, ``replicas`` copies on different servers.

3FS writes all and reads any replica (section 15 of the reference page). The reader picks the replica on which it has
the fewest reads outstanding; equal: the one that the hash ranks first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from testbed.protocol.layout import MASK64


def _weight(key: int, server_index: int) -> int:
    x = (key ^ ((server_index + 1) * 0xD1342543DE82EF95)) & MASK64
    x = ((x ^ (x >> 32)) * 0xDABA0B6EB09322E3) & MASK64
    x = ((x ^ (x >> 32)) * 0xDABA0B6EB09322E3) & MASK64
    return x ^ (x >> 32)


def replicas_of(key: int, servers: Sequence[str], replicas: int) -> tuple[str, ...]:
    """The servers that hold ``key``, best first; fewer when there are fewer servers than replicas."""
    ranked = sorted(range(len(servers)), key=lambda i: (-_weight(key, i), i))
    return tuple(servers[i] for i in ranked[:replicas])


def choose_replica(holders: Sequence[str], outstanding: Mapping[str, int]) -> str:
    """The holder with the fewest outstanding reads, first of equals."""
    return min(holders, key=lambda server: outstanding.get(server, 0))
