"""The DRAM cache against a model too simple to be wrong: a list of keys, and who else holds a page."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emulators.dram_cache import DramCache
from testbed.protocol.pages import PagePool

PAGES, CAPACITY = 5, 3


class Cache(RuleBasedStateMachine):
    """Requests take pages, leave them as blocks, hit blocks and end; writes in flight hold pages a while longer."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(capacity=PAGES, page_bytes=1)
        self.cache = DramCache(self.pool, CAPACITY)
        self.kept: list[tuple[int, int]] = []  # (key, page), least recently used first
        self.others: Counter[int] = Counter()

    @rule(count=st.integers(1, 3))
    def take(self, count: int) -> None:
        mine = {page for _, page in self.kept}
        need = count - (PAGES - len(mine | set(self.others)))
        for entry in [e for e in self.kept if not self.others[e[1]]][: max(0, need)]:
            self.kept.remove(entry)
        pages = self.cache.take(count)
        assert (pages is None) == (count > PAGES - len(set(self.others))), "never refused for what the cache holds"
        if pages is not None:
            assert not set(pages) & (set(self.others) | {page for _, page in self.kept}), "used after release"
            self.others.update(pages)

    @precondition(lambda self: self.others)
    @rule(data=st.data(), keys=st.lists(st.integers(0, 4), unique=True, max_size=3))
    def keep(self, data: st.DataObject, keys: list[int]) -> None:
        free = sorted(set(self.others) - {page for _, page in self.kept})
        keys = keys[: len(free)]
        pages = data.draw(st.permutations(free))[: len(keys)]
        self.cache.keep(keys, pages)
        for key, page in zip(keys, pages, strict=True):
            there = next((e for e in self.kept if e[0] == key), (key, page))
            self.kept = [e for e in self.kept if e[0] != key] + [there]
        self.kept = self.kept[-CAPACITY:]

    @rule(keys=st.lists(st.integers(0, 4), unique=True, max_size=3))
    def lend(self, keys: list[int]) -> None:
        used = [e for key in keys for e in self.kept if e[0] == key]
        assert self.cache.lend(keys) == dict(used)
        self.kept = [e for e in self.kept if e not in used] + used
        self.others.update(page for _, page in used)

    @precondition(lambda self: self.others)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.others)))
        self.pool.release((page,))
        self.others -= Counter((page,))

    @invariant()
    def adds_up(self) -> None:
        assert list(self.cache.lru.items()) == self.kept
        assert len(self.kept) <= CAPACITY
        holds = self.others + Counter(page for _, page in self.kept)
        assert {page: self.pool.holds(page) for page in range(PAGES) if self.pool.holds(page)} == dict(holds)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=40, derandomize=True)


def test_without_capacity_nothing_is_kept() -> None:
    pool = PagePool(capacity=2, page_bytes=1)
    cache = DramCache(pool, 0)
    pages = cache.take(2)
    assert pages is not None
    cache.keep((1, 2), pages)
    pool.release(pages)
    assert cache.lend((1, 2)) == {} and pool.free == 2
