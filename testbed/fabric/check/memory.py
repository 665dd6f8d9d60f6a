"""A role's memory in cells, and the pages of it that somebody holds.

Memory that is handed back is wiped at once, so that a read of it is seen; memory that a write in flight is gathered
from must not change until the write has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from testbed.fabric.check.content import NOTHING, Cell
from testbed.protocol.pages import PagePool


@dataclass(slots=True)
class CellMemory:
    """Cells by number (byte offset over the size of a Layer Block)."""

    cell_bytes: int
    cells: dict[int, Cell] = field(default_factory=dict)
    busy: dict[int, int] = field(default_factory=dict)
    """Cells that writes in flight or the disk read, and how many of them."""

    def read(self, offset: int, count: int) -> tuple[Cell, ...]:
        """``count`` cells from a byte offset."""
        at = offset // self.cell_bytes
        return tuple([self.cells.get(k, NOTHING) for k in range(at, at + count)])

    def write(self, offset: int, cells: tuple[Cell, ...], wrong: list[str]) -> None:
        """Put cells at a byte offset; ``wrong`` learns of memory that is still being read."""
        at = offset // self.cell_bytes
        for k, cell in enumerate(cells, start=at):
            if k in self.busy and self.cells.get(k, NOTHING) != cell:
                wrong.append(f"memory at {k * self.cell_bytes} changes while a write in flight reads it")
            self.cells[k] = cell

    def reserve(self, offset: int, count: int, by: int) -> None:
        """One reader more (``by`` 1) or less (-1) of these cells."""
        at = offset // self.cell_bytes
        for k in range(at, at + count):
            left = self.busy.get(k, 0) + by
            if left:
                self.busy[k] = left
            else:
                self.busy.pop(k, None)

    def wipe(self, held: set[int]) -> None:
        """Forget the cells that nobody holds."""
        for k in [k for k in self.cells if k not in held]:
            del self.cells[k]


def pools_of(machine: Any) -> Iterator[tuple[str, PagePool, int]]:
    """A machine's pools with their byte offsets: they lie one after the other in the order of their definition."""
    offset = 0
    for name, value in vars(machine).items():
        if isinstance(value, PagePool):
            yield name, value, offset
            offset += value.capacity * value.page_bytes


def held_cells(machine: Any, cell_bytes: int) -> set[int]:
    """Numbers of all cells of all pages that somebody holds."""
    held: set[int] = set()
    for _, pool, offset in pools_of(machine):
        for page in pool._holds:
            at = (offset + page * pool.page_bytes) // cell_bytes
            held.update(range(at, at + pool.page_bytes // cell_bytes))
    return held
