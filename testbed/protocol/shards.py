"""What a shard of a collective costs on the wire beside its payload; the same in every world.

A head and a seal go with each shard, with one of 0 bytes too: an engine without tokens still takes part in the barrier.
"""

from __future__ import annotations

SHARD_HEAD_BYTES = 68  # 33 are used; figures were measured with so many
SHARD_SEAL_BYTES = 8


def shard_wire_bytes(size_bytes: int) -> int:
    """TCP payload bytes of a shard of ``size_bytes``."""
    return SHARD_HEAD_BYTES + size_bytes + SHARD_SEAL_BYTES
