"""Intra-engine batching of a PE (paper 8.5): FIFO packing under a compute quota, with chunked prefill on overflow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class CostModel(Protocol):
    """GPU time of the emulated engines, integer nanoseconds. Batches are ``[(cached_tokens, new_tokens)]``."""

    def attention_layer_time_ns(self, batch: Sequence[tuple[int, int]]) -> int:
        """Attention of one layer."""
        ...

    def prefill_layer_time_ns(self, batch: Sequence[tuple[int, int]], layers: int = 1) -> int:
        """Whole forward of ``layers`` layers."""
        ...

    def decode_step_time_ns(self, context_tokens: Sequence[int]) -> int:
        """One decode step of a batch of sequences."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that could run: tokens whose KV is available, tokens still to compute."""

    request_id: str
    cached_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request's share of a forward: compute ``new_tokens`` behind ``cached_tokens``."""

    request_id: str
    cached_tokens: int
    new_tokens: int


def pack_forward(
    queue: Sequence[Candidate],
    cost: CostModel,
    *,
    quota_ns: int,
    attention_layers: int,
    block_tokens: int,
    memory_blocks: int,
) -> list[Chunk]:
    """Chunks of the next forward, FIFO.

    Requests are added while the predicted attention time (``attention_layers`` times one layer's) stays within the
    quota and their blocks within ``memory_blocks``. The first that overflows is cut by binary search to the most
    blocks that fit (a chunk ends on a block boundary, so that its blocks can be loaded again); packing ends there.
    A batch that would be empty takes one block: progress does not depend on the quota.
    """
    batch: list[tuple[int, int]] = []
    chunks: list[Chunk] = []
    memory_left = memory_blocks

    def fits(cached: int, new: int) -> bool:
        return cost.attention_layer_time_ns([*batch, (cached, new)]) * attention_layers <= quota_ns

    for request in queue:
        cached, new = request.cached_tokens, request.new_tokens
        blocks = -(-(cached + new) // block_tokens)
        if blocks <= memory_left and fits(cached, new):
            batch.append((cached, new))
            chunks.append(Chunk(request.request_id, cached, new))
            memory_left -= blocks
            continue
        # Largest block-aligned share that fits: binary search over whole blocks of new tokens.
        low, high = 0, min((new - 1) // block_tokens, memory_left - cached // block_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if fits(cached, middle * block_tokens):
                low = middle
            else:
                high = middle - 1
        share = low * block_tokens
        if low <= 0 and not chunks and memory_left > cached // block_tokens:
            share = min(block_tokens, new)  # progress does not depend on the quota
        if share > 0:
            chunks.append(Chunk(request.request_id, cached, share))
        break
    return chunks
