"""The grant table: one write, once, of the right size, by the right epoch, while it is open."""

from __future__ import annotations

import pytest

from testbed.errors import BugError, PeerError
from testbed.protocol.grants import GrantIssuer, GrantTable, Landing


def _landing(blocks: int = 2) -> Landing:
    return Landing(
        pieces=tuple(range(0, blocks * 32, 32)),
        piece_bytes=32,
        keys=tuple(range(1, blocks + 1)),
        layer_begin=0,
        layer_end=1,
    )


def _open() -> GrantTable:
    table = GrantTable()
    table.open(1, 7, _landing())
    return table


def test_a_write_lands_once() -> None:
    table = _open()
    assert table.begin(1, 7, 64) == _landing()
    assert table.is_landing(1, 7)
    assert table.finish(1, 7)
    assert len(table) == 0
    assert not table.is_landing(1, 7)
    with pytest.raises(PeerError, match="grant 1 is not open"):
        table.begin(1, 7, 64)
    assert not table.finish(1, 7)


def test_unknown_grant_is_refused() -> None:
    with pytest.raises(PeerError, match="grant 2 is not open"):
        _open().begin(2, 7, 64)


def test_stale_epoch_is_refused_and_the_grant_stays_open() -> None:
    table = _open()
    with pytest.raises(PeerError, match="has epoch 7, the write says 6"):
        table.begin(1, 6, 64)
    assert table.begin(1, 7, 64)
    assert not table.is_landing(1, 6)
    assert not table.finish(1, 6)
    assert table.finish(1, 7)


@pytest.mark.parametrize("size", [0, 63, 65, 128])
def test_another_size_is_refused_and_the_grant_stays_open(size: int) -> None:
    table = _open()
    with pytest.raises(PeerError, match=f"is for 64 bytes, the write has {size}"):
        table.begin(1, 7, size)
    assert table.begin(1, 7, 64)


def test_second_write_while_the_first_lands_is_refused() -> None:
    table = _open()
    table.begin(1, 7, 64)
    with pytest.raises(PeerError, match="is being written already"):
        table.begin(1, 7, 64)
    assert table.finish(1, 7)


def test_closing_stops_a_landing_and_everything_later() -> None:
    table = _open()
    table.begin(1, 7, 64)
    table.close(1)
    assert not table.is_landing(1, 7)
    assert not table.finish(1, 7)
    with pytest.raises(PeerError, match="is not open"):
        table.begin(1, 7, 64)
    table.close(1)  # again: nothing
    assert len(table) == 0


def test_a_closed_grant_opened_anew_with_another_epoch_refuses_the_old_write() -> None:
    table = _open()
    table.close(1)
    table.open(1, 8, _landing(1))
    with pytest.raises(PeerError, match="has epoch 8, the write says 7"):
        table.begin(1, 7, 32)


def test_finish_without_begin_is_false() -> None:
    table = _open()
    assert not table.finish(1, 7)
    assert len(table) == 1


def test_table_is_bounded_and_ids_are_unique() -> None:
    table = GrantTable(limit=2)
    table.open(1, 1, _landing())
    with pytest.raises(BugError, match="grant 1 is open already"):
        table.open(1, 1, _landing())
    table.open(2, 1, _landing())
    with pytest.raises(BugError, match="more than 2 grants"):
        table.open(3, 1, _landing())
    table.close(1)
    table.open(3, 1, _landing())


def test_issuer_never_repeats_and_names_the_size() -> None:
    issuer = GrantIssuer(endpoint_epoch=5)
    refs = [issuer.issue("pe0.snic", _landing(n)) for n in (1, 2, 3)]
    assert len({r.grant_id for r in refs}) == 3
    assert [(r.endpoint, r.epoch, r.size_bytes) for r in refs] == [("pe0.snic", 5, n * 32) for n in (1, 2, 3)]
