"""Provenance: only the right blocks where they are used.

A block is judged where it lands (the grant names the keys and layers) and where it is used (a GPU knows the tokens). No
fault of the check world changes what a block holds, so a wrong block is always the protocol's: one merged at the wrong
place, read before it came, or overwritten by another request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from testbed.fabric.check.content import NOTHING, Cell
from testbed.protocol.grants import Landing

NAME = "provenance"


def at_compute(what: str, block: int, found: Cell, right: Cell) -> Iterator[str]:
    """A GPU reads one cell."""
    if found != right:
        yield f"{what} reads {named(found)} as block {block}, which is {named(right)}"


def at_landing(landing: Landing, cells: Sequence[Cell]) -> Iterator[str]:
    """A write brings ``cells`` for a grant: all layers of the first piece, then of the second."""
    layers = range(landing.layer_begin, landing.layer_end)
    expected = [(layer, key) for key in landing.keys for layer in layers]
    for found, (layer, key) in zip(cells, expected, strict=True):
        if found[:2] != (layer, key):
            yield f"{named(found)} lands where layer {layer} of block {key:016x} is granted"


def named(cell: Cell) -> str:
    """A cell in words."""
    layer, chain, valid = cell
    return "memory never written" if cell == NOTHING else f"layer {layer} of block {chain:016x} ({valid} tokens)"
