"""The KV index (paper A.5): a trie whose nodes are Full Blocks.

A block is reached through its parent, so trajectories with a common prefix share the nodes of that prefix. A node
exists only when its block is durable on every replica; a prefix is hit up to the first node that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ROOT = 0


@dataclass(slots=True)
class _Node:
    parent: int
    children: set[int] = field(default_factory=set)


class PrefixTrie:
    """Durable blocks by key. Keys are prefix hashes, so a key determines its whole path."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {ROOT: _Node(ROOT)}
        self._orphans: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._nodes) - 1

    def insert(self, key: int, parent: int) -> None:
        """Add a durable block below ``parent`` (ROOT for the first block). Adding it again changes nothing.

        Blocks of one request become durable in any order: a block whose parent is not here yet is kept aside, unseen,
        until the parent comes.
        """
        if key in self._nodes:
            return
        if parent not in self._nodes:
            self._orphans.setdefault(parent, set()).add(key)
            return
        todo = [(key, parent)]
        while todo:
            child, above = todo.pop()
            self._nodes[child] = _Node(above)
            self._nodes[above].children.add(child)
            todo.extend((grandchild, child) for grandchild in sorted(self._orphans.pop(child, ())))

    def __contains__(self, key: int) -> bool:
        return key in self._nodes

    def longest_prefix(self, keys: Sequence[int]) -> int:
        """How many leading blocks of ``keys`` are in the trie, following the path from the root."""
        above = ROOT
        for count, key in enumerate(keys):
            if key not in self._nodes[above].children:
                return count
            above = key
        return len(keys)

    def depth(self, key: int) -> int:
        """Distance of a block from the root, in blocks (KeyError when it is not there)."""
        depth = 0
        while key != ROOT:
            key = self._nodes[key].parent
            depth += 1
        return depth
