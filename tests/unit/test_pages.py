"""Page pools: exact accounting, holds by reference, refusals by name."""

from __future__ import annotations

import pytest

from testbed.errors import BugError
from testbed.protocol.pages import PagePool


def test_takes_what_is_free_and_nothing_else() -> None:
    pool = PagePool(capacity=3, page_bytes=10)
    assert pool.take(0) == ()
    assert pool.take(2) == (0, 1)
    assert (pool.free, pool.used) == (1, 2)
    assert pool.take(2) is None
    assert (pool.free, pool.used) == (1, 2)  # a refusal takes nothing
    assert pool.take(1) == (2,)
    assert pool.take(1) is None
    assert pool.offset(2) == 20


def test_pages_come_back_last_freed_first() -> None:
    pool = PagePool(capacity=4, page_bytes=1)
    pool.take(3)
    pool.release((0, 2))
    assert pool.take(3) == (2, 0, 3)


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(capacity=1, page_bytes=1)
    pages = pool.take(1)
    assert pages == (0,)
    pool.retain(pages)
    pool.retain(pages)
    for _ in range(2):
        pool.release(pages)
        assert (pool.free, pool.used) == (0, 1)
    pool.release(pages)
    assert (pool.free, pool.used) == (1, 0)


def test_what_nobody_holds_is_refused() -> None:
    pool = PagePool(capacity=2, page_bytes=1)
    with pytest.raises(BugError, match="page 0 is released but nobody holds it"):
        pool.release((0,))
    with pytest.raises(BugError, match="page 1 is retained but nobody holds it"):
        pool.retain((1,))
    pool.take(1)
    pool.release((0,))
    with pytest.raises(BugError, match="page 0 is released"):
        pool.release((0,))
    with pytest.raises(BugError, match="page 7 is released"):
        pool.release((7,))
    assert (pool.free, pool.used) == (2, 0)


def test_peak_remembers_the_most_that_was_used() -> None:
    pool = PagePool(capacity=5, page_bytes=1)
    pool.release(pool.take(3) or ())
    pool.take(2)
    assert pool.peak == 3
