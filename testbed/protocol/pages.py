"""Bounded memory: a pool of equal pages, and the memory kinds it stands for.

Node DRAM (PE buffer, DE buffer), a GPU's HBM and a storage server's staging memory are all pools of pages: a page of
DRAM or DE HBM is one Full Block, a page of PE HBM is one block's share of a layer group. Pages do not fragment: what
fits in sum fits. A pool never grants what it does not have and refuses to take back what it did not grant.
"""

from __future__ import annotations

from collections.abc import Iterable

from testbed.errors import BugError


class PagePool:
    """``capacity`` pages of ``page_bytes`` each, handed out lowest-freed-last (deterministic)."""

    __slots__ = ("_free", "_used", "capacity", "page_bytes", "peak")

    def __init__(self, *, capacity: int, page_bytes: int) -> None:
        self.capacity = capacity
        self.page_bytes = page_bytes
        self.peak = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages taken."""
        return len(self._used)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take ``count`` pages, or None when they are not free. Result: page numbers."""
        if count > len(self._free):
            return None
        if count == 0:
            return ()
        pages = tuple(self._free[-count:][::-1])
        del self._free[-count:]
        self._used.update(pages)
        self.peak = max(self.peak, len(self._used))
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Return pages.

        Raises:
            BugError: a page that is not taken.
        """
        for page in pages:
            if page not in self._used:
                raise BugError(f"page {page} is given back but was not taken")
            self._used.discard(page)
            self._free.append(page)

    def offset(self, page: int) -> int:
        """Byte offset of a page in its memory."""
        return page * self.page_bytes
