"""A node's DRAM as a tier in front of storage: Full Blocks of ended requests, least recently used out first.

Not in the paper, whose nodes read every hit from storage. Blocks are kept in the pages in which they came, counted by
reference like any other holder's, so nothing is copied: a request that hits shares the page, and a page that is evicted
while somebody reads it stays until that has ended. Buffers come first: a page that one of them needs and that only the
cache holds is given up, so the cache never keeps a request waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from testbed.protocol.pages import PagePool


class DramCache:
    """At most ``capacity`` blocks in pages of ``pool``, which others use too; 0: nothing is kept."""

    def __init__(self, pool: PagePool, capacity: int) -> None:
        self.pool = pool
        self.capacity = capacity
        self.lru: OrderedDict[int, int] = OrderedDict()  # key -> page, least recently used first

    def lend(self, keys: Iterable[int]) -> dict[int, int]:
        """Pages of those blocks that are here, by key; each is used now, and held once more for the caller."""
        lent = {key: self.lru[key] for key in keys if key in self.lru}
        for key in lent:
            self.lru.move_to_end(key)
        self.pool.retain(lent.values())
        return lent

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take pages of the pool, from the cache if need be; None when others hold too many."""
        if count > self.pool.free:
            self._give_up(count - self.pool.free)
        return self.pool.take(count)

    def _give_up(self, count: int) -> None:
        """Free ``count`` pages, or as many as nobody else holds: whoever asks is the next to get them anyway."""
        for key in list(islice((k for k, page in self.lru.items() if self.pool.holds(page) == 1), count)):
            self.pool.release((self.lru.pop(key),))

    def keep(self, keys: Iterable[int], pages: Iterable[int]) -> None:
        """Keep whole blocks that the caller holds; of a block that is here already, the page that is here."""
        if not self.capacity:
            return
        for key, page in zip(keys, pages, strict=True):
            if key not in self.lru:
                self.pool.retain((page,))
                self.lru[key] = page
            self.lru.move_to_end(key)
        while len(self.lru) > self.capacity:
            self.pool.release((self.lru.popitem(last=False)[1],))
