"""Visibility: the index names only blocks that are durable on all of their replicas.

A look-up that hits a block which is not durable makes a promise that no server can keep. Judged in the state in which
the index takes a publication, against the disks in that state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

NAME = "visibility"


def at_publication(
    keys: Sequence[int], replicas: Callable[[int], Sequence[str]], disks: Mapping[str, Set[int]]
) -> Iterator[str]:
    """``keys`` have become visible; ``replicas``: servers that must hold each; ``disks``: what each server holds."""
    for key in keys:
        for server in replicas(key):
            if key not in disks[server]:
                yield f"the index names block {key:016x}, which is not durable on {server}"
