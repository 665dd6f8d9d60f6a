"""A whole sweep: every job resolved, those that are not done run, one table written.

Invariants: nothing is made or started before every job has been resolved; a run that fails costs the others nothing;
what is done stays done, however the sweep ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from testbed.errors import ConfigError, HostError
from testbed.sweep.file import Sweep
from testbed.sweep.jobs import OUTPUT, RUNS, Job, clear, finished, locked, row_of
from testbed.sweep.pool import Task, how_ended, run_all
from testbed.sweep.table import Row, write_table

TABLE = "sweep.csv"

Resolve = Callable[[Job], Mapping[str, Any]]
"""The configuration that a job would run with; raises ConfigError if it cannot run."""
Run = Callable[[Job, Path], int]
"""Runs a job, makes its run folder below the path, gives the exit code of ``testbed run``."""
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a sweep came to: its rows in the order of the file, how many runs were done before, and whether the host
    (a full disk) kept some from ending."""

    rows: tuple[Row, ...]
    table: Path
    kept: int
    by_host: bool

    @property
    def failed(self) -> tuple[Row, ...]:
        """Runs without metrics, or with failed requests."""
        return tuple(row for row in self.rows if row.error)

    @property
    def invalid(self) -> tuple[Row, ...]:
        """Runs that ended and whose numbers cannot be trusted."""
        return tuple(
            row for row in self.rows if not row.error and row.document is not None and not row.document["valid"]
        )


def jobs_of(sweep: Sweep, resolve: Resolve) -> list[Job]:
    """All jobs in the order of the file, resolved.

    Raises:
        ConfigError: a point that cannot run, by its number.
    """
    jobs = []
    for number, settings in enumerate(sweep.points, start=1):
        for seed in sweep.seeds:
            job = Job(
                point=number,
                settings=settings,
                scenario=sweep.scenario,
                world=sweep.world,
                systems=sweep.systems,
                seed=seed,
                resolved={},
            )
            try:
                jobs.append(replace(job, resolved=resolve(job)))
            except ConfigError as error:
                raise ConfigError(f"sweep {sweep.name}, point {number}: {error}") from None
    return jobs


def run_sweep(
    sweep: Sweep, jobs: list[Job], run: Run, folder: Path, *, workers: int, resume: bool, progress: Progress
) -> Outcome:
    """Run what is not done and write the table.

    Raises:
        ConfigError: there are results already and they are not to be resumed, or the folder cannot be made.
        HostError: the disk is full, or another sweep is at work in the folder.
    """
    if not resume and (folder / RUNS).exists():
        raise ConfigError(
            f"{folder} holds runs of an earlier sweep; continue it with --resume, or choose another place with --out."
        )
    with locked(folder, "sweep"):
        todo = [job for job in jobs if finished(job, folder) is None]
        kept, ended = len(jobs) - len(todo), dict[str, int]()
        title = f"{sweep.name}: {len(jobs)} runs, {workers} at a time"

        def told(job: Job | None, code: int) -> None:
            if job is not None:
                ended[job.run] = code
            progress(title, (kept + len(ended)) / len(jobs))

        progress(title, kept / len(jobs))
        tasks = [Task(subject=job, output=clear(job, folder) / OUTPUT) for job in todo]
        run_all(tasks, lambda job: run(job, folder / job.run), workers, told)
        rows = tuple(row_of(job, folder, how_ended(ended.get(job.run, 0))) for job in jobs)
        write_table(folder / TABLE, rows, sweep.keys, sweep.metrics)
    return Outcome(rows=rows, table=folder / TABLE, kept=kept, by_host=HostError.exit_code in ended.values())


def done_of(jobs: list[Job], folder: Path) -> int:
    """How many jobs are done."""
    return sum(finished(job, folder) is not None for job in jobs)
