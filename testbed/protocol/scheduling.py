"""Request scheduling (paper section 6 / 8.2-8.4 of the reference): who prefills, who decodes, which side reads.

Pure functions over small mutable views of the engines; the central scheduler applies their result.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class EngineView:
    """An engine as the scheduler sees it: seq_e, tok_e, free HBM in tokens."""

    engine: str
    node: str
    sequences: int
    tokens: int
    free_hbm_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in a queue: ``tokens`` is its prompt, ``total_tokens`` prompt plus generation.

    ``hbm_tokens`` is the room that it takes in a DE's HBM: whole blocks, so that what fits in tokens fits in pages.
    """

    request_id: str
    tokens: int
    total_tokens: int
    hbm_tokens: int


def select_prefill(
    queue: Sequence[Waiting],
    engines: Sequence[EngineView],
    read_queues: Mapping[str, int],
    *,
    alpha_tokens: int,
    beta_tokens: int,
) -> list[tuple[str, str]]:
    """Algorithm 1 (paper 8.2) on one PE group's fetch: ``[(request_id, engine)]`` in FIFO order.

    Engines over beta are never assigned; those whose node reads at most alpha tokens come first; among them the one
    with the fewest tokens, ties by position. Class membership follows tok_e as it grows.
    """
    assigned: list[tuple[str, str]] = []
    for request in queue:
        eligible = [e for e in engines if e.tokens <= beta_tokens]
        short = [e for e in eligible if read_queues.get(e.node, 0) <= alpha_tokens]
        candidates = short or eligible
        if not candidates:
            break
        best = min(candidates, key=lambda e: e.tokens)
        best.tokens += request.tokens
        best.sequences += 1
        assigned.append((request.request_id, best.engine))
    return assigned


def select_decode_group(queue: Sequence[Waiting], group_tokens: MutableMapping[str, int]) -> list[tuple[str, str]]:
    """Phase 1 (paper 8.3): drain the global queue, each request to the group with the least tokens, ties by name."""
    chosen: list[tuple[str, str]] = []
    for request in queue:
        group = min(sorted(group_tokens), key=lambda g: group_tokens[g])
        group_tokens[group] += request.total_tokens
        chosen.append((request.request_id, group))
    return chosen


def select_decode(queue: Sequence[Waiting], engines: Sequence[EngineView], *, z_factor: float) -> list[tuple[str, str]]:
    """Phase 2 (paper 8.3) within the fetching group: ``[(request_id, engine)]``, a prefix of the private queue.

    Z is ``z_factor`` times the mean token count once everything that fits in the group's free HBM is placed. Engines
    that stay below Z: the one with the fewest sequences; if none: the one with the fewest tokens that has the HBM.
    The length in the HBM check includes the generation, which is forced in replay (UNKNOWN in the paper).
    """
    if not engines:
        return []
    free, fitting = sum(e.free_hbm_tokens for e in engines), 0
    for request in queue:
        if request.hbm_tokens > free:
            break
        free -= request.hbm_tokens
        fitting += request.total_tokens
    z = z_factor * (fitting + sum(e.tokens for e in engines)) / len(engines)
    assigned: list[tuple[str, str]] = []
    for request in queue:
        roomy = [e for e in engines if e.free_hbm_tokens >= request.hbm_tokens]
        if not roomy:
            break
        light = [e for e in roomy if e.tokens + request.total_tokens <= z]
        best = min(light, key=lambda e: e.sequences) if light else min(roomy, key=lambda e: e.tokens)
        best.tokens += request.total_tokens
        best.sequences += 1
        best.free_hbm_tokens -= request.hbm_tokens
        assigned.append((request.request_id, best.engine))
    return assigned


def select_side(prefill_node_queue: int, decode_node_queue: int) -> str:
    """Read side (paper 8.4): the node with the shorter read queue, "pe" or "de".

    Tie (UNKNOWN in the paper): the PE side, whose path has one network hop less before prefill can start.
    """
    return "de" if decode_node_queue < prefill_node_queue else "pe"


def select_split(
    prefill_node_queue: int, decode_node_queue: int, *, hit_blocks: int, block_tokens: int, least_blocks: int
) -> int:
    """Of a split read: how many of the hit blocks the DE node reads. Queues in tokens.

    Both nodes are to end at the same time: queue + own share is equal, as far as the shares are not below 0; an odd
    block goes to the PE side, as ties do. A share below ``least_blocks`` is not worth its messages: then the larger
    one takes all.
    """
    even = (hit_blocks * block_tokens + prefill_node_queue - decode_node_queue) // (2 * block_tokens)
    share = min(max(even, 0), hit_blocks)
    if least_blocks <= share <= hit_blocks - least_blocks:
        return share
    return hit_blocks if 2 * share > hit_blocks else 0
