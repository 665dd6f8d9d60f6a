"""Bounded memory: a pool of equal pages, and the memory kinds it stands for.

Node DRAM (PE buffer, DE buffer), a GPU's HBM and a storage server's staging memory are all pools of pages: a page of
DRAM or DE HBM is one Full Block, a page of PE HBM is one block's share of a layer group. Pages do not fragment: what
fits in sum fits. A pool never grants what it does not have and refuses to take back what it did not grant.
"""

from __future__ import annotations

from collections.abc import Iterable

from testbed.errors import BugError


class PagePool:
    """``capacity`` pages of ``page_bytes`` each, counted by reference: a page is free when nobody holds it.

    Whoever reads or writes a page holds it (a request, a write in flight, a block being persisted), so memory cannot
    be reused under anybody's feet. Pages are handed out last-freed-first, which is deterministic.
    """

    __slots__ = ("_free", "_holds", "capacity", "page_bytes", "peak")

    def __init__(self, *, capacity: int, page_bytes: int) -> None:
        self.capacity = capacity
        self.page_bytes = page_bytes
        self.peak = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._holds: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return len(self._holds)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take ``count`` pages, held once; None when they are not free. Result: page numbers."""
        if count > len(self._free):
            return None
        if count == 0:
            return ()
        pages = tuple(self._free[-count:][::-1])
        del self._free[-count:]
        for page in pages:
            self._holds[page] = 1
        self.peak = max(self.peak, len(self._holds))
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Hold pages once more.

        Raises:
            BugError: a page that nobody holds.
        """
        for page in pages:
            if page not in self._holds:
                raise BugError(f"page {page} is retained but nobody holds it")
            self._holds[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Let go of pages; the last holder frees them.

        Raises:
            BugError: a page that nobody holds.
        """
        for page in pages:
            holds = self._holds.get(page, 0)
            if not holds:
                raise BugError(f"page {page} is released but nobody holds it")
            if holds == 1:
                del self._holds[page]
                self._free.append(page)
            else:
                self._holds[page] = holds - 1

    def holds(self, page: int) -> int:
        """How many hold a page."""
        return self._holds.get(page, 0)

    def offset(self, page: int) -> int:
        """Byte offset of a page in its memory."""
        return page * self.page_bytes
