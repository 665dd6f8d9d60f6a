"""``testbed sweep``: a file of settings, every run in its own process, one table."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from testbed.cli.blame import INTERRUPTED, code_of_run
from testbed.cli.progress import reporting
from testbed.cli.run import RunRequest, prepare, refuse_hidden, run
from testbed.errors import ConfigError, HostError
from testbed.metrics.summary import EXIT_FAILED, EXIT_INVALID, EXIT_VALID
from testbed.sweep.file import Sweep, read_sweep
from testbed.sweep.jobs import Job
from testbed.sweep.sweep import Outcome, done_of, jobs_of, run_sweep
from testbed.sweep.table import Row

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """The arguments of ``testbed sweep``. ``workers`` 0: one per CPU, or one in the live world."""

    file: Path
    workers: int = 0
    out: Path = Path("runs/sweeps")
    resume: bool = False


def sweep(request: SweepRequest) -> int:
    """Run a sweep; the exit code of docs/contract.md over all its runs.

    Raises:
        TestbedError: the file, a point of it, or the folder cannot be used; nothing has been started then.
        HostError: the host (a full disk) stopped runs.
    """
    wanted = read_sweep(request.file)
    workers = workers_for(wanted, request.workers)
    folder = request.out / wanted.name
    if wanted.world == "live":
        refuse_hidden(folder)
    with reporting(Console(stderr=True), quiet=False) as progress:
        progress("resolving every point", 0.0)
        jobs = jobs_of(wanted, _resolved)
        try:
            with ended_like_ctrl_c():
                outcome = run_sweep(
                    wanted, jobs, run_job, folder, workers=workers, resume=request.resume, progress=progress
                )
        except KeyboardInterrupt as interruption:
            done = done_of(jobs, folder)
            sys.stderr.write(
                f"error: interrupted; {done} of {len(jobs)} runs are in {folder}, --resume does the rest\n"
            )
            return code_of(interruption)
    _tell(outcome)
    if outcome.by_host:
        raise HostError("this host stopped runs, see above; mend that, then --resume does what is missing.")
    return EXIT_FAILED if outcome.failed else EXIT_INVALID if outcome.invalid else EXIT_VALID


class EndedError(KeyboardInterrupt):
    """Interrupted, by a signal that is not Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def code_of(interruption: KeyboardInterrupt) -> int:
    """The exit code of docs/contract.md."""
    return interruption.exit_code if isinstance(interruption, EndedError) else INTERRUPTED


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """A sweep that is told to end, or whose terminal closes, ends its runs too: they are no part of its terminal."""

    def end(number: int, frame: FrameType | None) -> None:
        raise EndedError(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def workers_for(wanted: Sweep, asked: int) -> int:
    """How many runs at a time.

    Raises:
        ConfigError: fewer than one, or more than one in the live world.
    """
    if asked < 0:
        raise ConfigError(f"--workers is {asked}, but it must be at least 1.")
    if wanted.world == "live":
        if asked > 1:
            raise ConfigError(
                f"--workers {asked}: live runs share this host's CPUs and would falsify each other; use 1, "
                'or world = "sim".'
            )
        return 1
    return asked or os.cpu_count() or 1


def run_job(job: Job, out: Path) -> int:
    """One run as ``testbed run --quiet`` does it."""
    return code_of_run(lambda: run(_request(job, out)))


def _resolved(job: Job) -> Mapping[str, Any]:
    return {**prepare(_request(job, Path())).resolved, "world": job.world}


def _request(job: Job, out: Path) -> RunRequest:
    return RunRequest(
        scenario=job.scenario,
        systems=job.systems,
        seed=job.seed,
        overrides=job.overrides,
        out=out,
        quiet=True,
        world=job.world,
    )


def _tell(outcome: Outcome) -> None:
    kept = f", {outcome.kept} of them from before" if outcome.kept else ""
    Console(highlight=False).print(f"{len(outcome.rows)} runs{kept}: {outcome.table}", soft_wrap=True)
    _complain("failed", outcome.failed)
    _complain("invalid", outcome.invalid)


def _complain(what: str, rows: Sequence[Row]) -> None:
    for row in rows[:_MOST_NAMED]:
        settings = ", ".join(f"{key}={value}" for key, value in row.settings.items())
        reason = row.error or "; ".join((row.document or {})["invalid_reasons"])
        sys.stderr.write(f"{what}: point {row.point} ({settings}), seed {row.seed}: {reason}\n")
    if len(rows) > _MOST_NAMED:
        sys.stderr.write(f"{what}: {len(rows) - _MOST_NAMED} more, see the table\n")
