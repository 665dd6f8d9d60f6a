"""The past of agents that join in the middle (``workload.start_turn``): blocks that storage holds from the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from testbed.protocol.layout import U32, BlockLayout
from testbed.protocol.trie import ROOT
from testbed.runtime.oracle import Reference
from testbed.workload.trajectory import AgentScript


def warm_prefixes(scripts: Sequence[AgentScript], layout: BlockLayout) -> Iterator[U32]:
    """The tokens whose KV storage holds, one array of whole blocks per agent that has a past."""
    for script in scripts:
        blocks = script.warm_tokens // layout.block_tokens
        if blocks:
            yield script.append_ids(0)[: blocks * layout.block_tokens]


def final_prefixes(scripts: Sequence[AgentScript], layout: BlockLayout, reference: Reference) -> Iterator[U32]:
    """The tokens of every block that a run will have in storage at its end, one array per agent.

    The KV of an agent's last token is never computed.
    """
    for script in scripts:
        emitted = reference(script)
        parts = [ids for t in range(script.turns) for ids in (script.append_ids(t), emitted[t])]
        context = np.concatenate([np.asarray(ids, dtype=np.uint32) for ids in parts])
        yield context[: layout.full_blocks(len(context) - 1) * layout.block_tokens]


def new_entries(keys: Sequence[int], known: dict[int, int]) -> list[int]:
    """Enter the blocks of one prefix into ``known`` (parent by key); places in ``keys`` of those that are new."""
    new = [k for k, key in enumerate(keys) if key not in known]
    known.update((keys[k], keys[k - 1] if k else ROOT) for k in new)
    return new


def warm_entries(scripts: Sequence[AgentScript], layout: BlockLayout) -> tuple[tuple[int, int], ...]:
    """``(key, parent)`` of every block in storage before the start, each once, parents first."""
    known: dict[int, int] = {}
    for prefix in warm_prefixes(scripts, layout):
        new_entries(layout.keys(prefix), known)
    return tuple(known.items())
