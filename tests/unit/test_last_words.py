"""What becomes of a run when the host fails a role: its sentence and exit code, at the supervisor."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from testbed.cli.blame import explained
from testbed.errors import HostError
from testbed.fabric.live.forkserver import RoleDied, RoleGroup
from testbed.fabric.live.roleprocess import RoleSpec
from testbed.fabric.live.roles import LiveRole, RoleContext
from testbed.runtime.warm import WarmBlocks, place
from testbed.trace.tracefile import TraceWriter

FULL = Path("/dev/full")


@pytest.mark.parametrize(("error", "code"), [(HostError("disk st0 is full"), 2), (ValueError("disk st0 is full"), 1)])
async def test_a_run_ends_with_the_exit_code_of_what_a_role_died_of(
    error: Exception, code: int, tmp_path: Path
) -> None:
    def build(_context: RoleContext) -> LiveRole:
        raise error

    async with RoleGroup([RoleSpec(name="st0", enter=lambda: None, build=build)], tmp_path) as group:
        with pytest.raises(RoleDied, match=r"role st0 died .* disk st0 is full") as caught:
            await group.ready()
    assert caught.value.exit_code == code and explained(caught.value) == (str(caught.value), code)


@pytest.mark.skipif(not FULL.exists(), reason="the host has no /dev/full")
def test_a_trace_on_a_full_disk_is_the_hosts_fault() -> None:
    trace = TraceWriter(FULL)
    trace.note(1, "Warning", why="x")
    with pytest.raises(HostError, match=r"/dev/full: the trace cannot be written \(No space left on device\)"):
        trace.flush()
    trace.close()  # what could not be written is not tried again


def test_a_trace_that_cannot_be_made_is_the_hosts_fault(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("")
    with pytest.raises(HostError, match="the trace cannot be written"):
        TraceWriter(tmp_path / "trace" / "st0.jsonl")


@pytest.fixture
def warm(tmp_path: Path) -> WarmBlocks:
    block = tmp_path / "warm" / "0a" / f"{10:016x}.kv"
    block.parent.mkdir(parents=True)
    block.write_text("kv")
    return WarmBlocks(entries=((10, 0),), keys=(10,), directory=tmp_path / "warm")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV])
def test_where_there_are_no_links_warm_blocks_are_copied(
    number: int, warm: WarmBlocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_paths: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    place(warm, ["st0", "st1"], 2, tmp_path / "storage")
    copies = list((tmp_path / "storage").rglob("*.kv"))
    assert [copy.read_text() for copy in copies] == ["kv", "kv"] and all(c.stat().st_nlink == 1 for c in copies)


def test_warm_blocks_that_cannot_be_placed_are_the_hosts_fault(
    warm: WarmBlocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(HostError, match=r"cannot place warm blocks .* No space left"):
        place(warm, ["st0"], 1, tmp_path / "storage")
