"""Whole runs: the command killed and interrupted in the middle, every system made small, trajectories from files."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.cli.blame import INTERRUPTED
from testbed.protocol.params import SYSTEMS
from tests.live.small import run_judged, run_small

pytestmark = pytest.mark.live

PATIENCE_S = 30.0
COMMAND = (sys.executable, "-c", "from testbed.cli.main import main; main()", "run", "quickstart")
LASTING = ("--set=cluster.gpus_per_node=1", "--set=workload.agents=2", "--set=workload.max_turns=7")

Process = tuple[int, str]
"""A pid and when it started: pids come again."""


def await_that(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def processes() -> dict[Process, int]:
    """Every process that lives (a zombie does not), and its parent."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                found[int(pid), fields[19]] = int(fields[1])
    return found


def family(ancestor: int) -> set[Process]:
    """A process and all that descend from it."""
    parents = processes()
    pids = {ancestor}
    while more := {pid for (pid, _), parent in parents.items() if parent in pids} - pids:
        pids |= more
    return {process for process in parents if process[0] in pids}


def namespaces(pids: set[int]) -> set[str]:
    """Network and mount namespaces that processes are in."""
    found = set()
    for pid in pids:
        for kind in ("net", "mnt"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/ns/{kind}"))
    return found


@dataclass
class Running:
    """The command in the middle of a run, and what there is of it on this host."""

    command: subprocess.Popen[bytes]
    folder: Path
    family: set[Process]
    namespaces: set[str]
    mounts: str

    def end(self) -> tuple[int, str, str]:
        """Wait for it; exit code, and all that was printed since the run began."""
        out, err = self.command.communicate(timeout=PATIENCE_S)
        return self.command.returncode, out.decode(), err.decode()

    def assert_nothing_left(self) -> None:
        await_that(lambda: not self.family & processes().keys(), "a process was left behind")
        await_that(
            lambda: not self.namespaces & namespaces({pid for pid, _ in processes()}), "a namespace was left behind"
        )
        assert Path("/proc/mounts").read_text() == self.mounts
        assert not (self.folder / "warm").exists()
        assert not list(self.folder.glob("*/storage"))


@contextmanager
def in_the_middle(out: Path) -> Iterator[Running]:
    """Start the command and go on as soon as its first system has ended its first round."""
    mounts = Path("/proc/mounts").read_text()
    ours = namespaces({os.getpid()})
    command = subprocess.Popen([*COMMAND, *LASTING, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        await_line(command, SYSTEMS["basic"].title)
        (folder,) = out.iterdir()
        assert list(folder.glob("*/storage/*")), "there are blocks to be left behind"
        them = family(command.pid)
        theirs = namespaces({pid for pid, _ in them}) - ours
        assert len(them) > 10
        assert theirs
        yield Running(command, folder, them, theirs, mounts)
    finally:
        command.kill()
        command.wait()
        for pipe in (command.stdout, command.stderr):
            assert pipe
            pipe.close()


def await_line(command: subprocess.Popen[bytes], line: str) -> None:
    """Read what the command says on stderr until it says ``line``."""
    assert command.stderr
    seen = b""
    while line.encode() not in seen.splitlines():
        assert select.select([command.stderr], [], [], PATIENCE_S)[0], f"it fell silent after {seen!r}"
        chunk = os.read(command.stderr.fileno(), 4096)
        assert chunk, f"it ended after {seen!r}"
        seen += chunk


def test_a_run_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with in_the_middle(tmp_path) as running:
        running.command.kill()
        assert running.end()[0] == -signal.SIGKILL
        running.assert_nothing_left()
        assert (running.folder / "failure.txt").read_text().strip() == "killed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_says_so_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with in_the_middle(tmp_path) as running:
        running.command.send_signal(number)
        code, out, err = running.end()
        *noise, sentence = err.splitlines()
        assert sentence.startswith("error: ")
        assert sentence.endswith(f"; what there is of the run is in {running.folder}")
        assert not [line for line in noise if line.startswith("error: ")]
        assert "Traceback" not in out + err
        running.assert_nothing_left()
        assert (running.folder / "failure.txt").read_text().strip()
        assert code == (INTERRUPTED if number == signal.SIGINT else 128 + number)
        assert ("interrupted;" if number == signal.SIGINT else "SIGTERM") in sentence
        assert not noise


@pytest.mark.parametrize("system", [*SYSTEMS, "dualpath-copy-engine"])
def test_every_system_is_green(tmp_path: Path, system: str) -> None:
    summary = run_small(tmp_path, system)
    assert (summary.failures, summary.invalid_reasons) == ((), ())
    assert summary.systems[0].tokens_verified == summary.systems[0].tokens_emitted > 0
    assert summary.ledger
    assert all(abs(entry.error) <= 0.02 for entry in summary.ledger)


def test_a_split_read_is_green(tmp_path: Path) -> None:
    small = ("workload.agents=1", "workload.start_turn=3", "workload.max_turns=2", "protocol.split_least_blocks=1")
    summary, rounds = run_judged(tmp_path, "quickstart", small, "dualpath-split")
    assert (summary.failures, summary.invalid_reasons) == ((), ())
    assert summary.systems[0].tokens_verified == summary.systems[0].tokens_emitted > 0
    assert all(abs(entry.error) <= 0.02 for entry in summary.ledger)
    assert any(o.read_side == "split" for o in rounds["dualpath-split"])


def test_hits_from_dram_are_green_and_free_write_back_writes_nothing(tmp_path: Path) -> None:
    small = ("workload.agents=1", "workload.start_turn=3", "workload.max_turns=2")
    tier = ("protocol.dram_cache_bytes=80000000000", "protocol.write_back=free")
    summary, rounds = run_judged(tmp_path, "quickstart", (*small, *tier), "basic")
    assert (summary.failures, summary.invalid_reasons) == ((), ())
    assert summary.systems[0].tokens_verified == summary.systems[0].tokens_emitted > 0
    assert all(abs(entry.error) <= 0.02 for entry in summary.ledger)
    first, second = rounds["basic"]
    assert (first.dram_hit_tokens, second.dram_hit_tokens) == (0, first.hit_tokens)
    storage = summary.systems[0].storage_bytes
    assert storage["read"] > 0 and storage["written"] == 0


def test_trajectories_from_files_share_the_blocks_of_their_system_prompt(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are a programmer. " + " ".join(f"rule {k}" for k in range(400))}
    for name in ("first", "second"):
        talk = [
            {"role": "user", "content": f"Fix the {name} bug."},
            {"role": "assistant", "content": "Let us look at it. " * 4},
            {"role": "tool", "content": f"{name}: setup.py src tests " * 10},
            {"role": "assistant", "content": "That is all. " * 4},
        ]
        (tmp_path / f"{name}.traj").write_text(json.dumps({"history": [system, *talk]}))
    late = (f"workload.path={tmp_path}", "workload.arrivals=4")  # the second finds what the first has stored
    summary, rounds = run_judged(tmp_path / "run", "swe-agent", late)
    assert summary.failures == ()
    traffic = [entry for entry in summary.ledger if entry.resource != "st.disk"]  # a few blocks: padding shows there
    assert all(abs(entry.error) <= 0.02 for entry in traffic)
    assert summary.systems[0].tokens_verified == summary.systems[0].tokens_emitted > 0
    first_turns = sorted((r for r in rounds["dualpath"] if r.turn == 0), key=lambda r: r.submitted_ns)
    assert len(first_turns) == 2
    assert first_turns[0].hit_tokens == 0
    assert first_turns[1].hit_tokens > 0
