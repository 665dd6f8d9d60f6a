"""``testbed run EXPERIMENT``: every variant in every world, in a run folder of its own below one; then the verdict.

Live variants run one after the other, sim variants as many at a time as there are CPUs; each in a process of its own.
Invariant: nothing is made or started before the configuration of every variant has been checked.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from scenarios.loader import LoadedScenario
from testbed.cli.blame import code_of_run
from testbed.cli.progress import Report, reporting
from testbed.cli.run import RunRequest, prepare, refuse_hidden, run_in_folder, set_options, stored_bytes
from testbed.cli.sweep import code_of, ended_like_ctrl_c
from testbed.errors import ConfigError, HostError, UnsupportedError
from testbed.experiment import report
from testbed.experiment.file import Experiment, Variant, read_experiment
from testbed.experiment.judge import Outcome, RunEnd, Unsupported, judge
from testbed.report import run_folder
from testbed.runtime.plan import World
from testbed.sweep.jobs import OUTPUT, emptied, is_other, locked, metrics_of, reason_in
from testbed.sweep.pool import Task, how_ended, run_all


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRequest:
    """The arguments of ``testbed run`` for an experiment. ``world`` None: all of its own. ``resume``: the folder of one
    that was interrupted."""

    experiment: str
    world: World | None = None
    seed: int | None = None
    overrides: Sequence[str] = ()
    out: Path = Path("runs")
    quiet: bool = False
    resume: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One run of one variant. ``folder``: relative to that of the experiment."""

    variant: str
    folder: str
    request: RunRequest
    loaded: LoadedScenario

    @property
    def resolved(self) -> Mapping[str, Any]:
        """Its configuration, as its run folder holds it."""
        return {**self.loaded.resolved, "world": self.request.world}


def run_experiment(request: ExperimentRequest) -> int:
    """Run an experiment; the exit code of docs/contract.md.

    Raises:
        TestbedError: the file, a variant or the host cannot be used; nothing has been started then.
        HostError: the host (a full disk) stopped runs.
    """
    experiment = read_experiment(request.experiment)
    worlds = _worlds(experiment, request.world)
    jobs, unsupported = _jobs(experiment, worlds, request)
    if not any(jobs.values()):
        first = f"; {unsupported[0].variant}: {unsupported[0].reason}" if unsupported else "."
        raise HostError(f"experiment {experiment.name}: no variant of it can run here {' or '.join(worlds)}{first}")
    if "live" in worlds:
        refuse_hidden(request.resume or request.out)
    folder = _folder(experiment, request)
    again = _again(request, folder)
    _refuse_others(folder, jobs)
    plans = [(job.loaded.plan, world) for world, of_world in jobs.items() for job in of_world]
    run_folder.check_space(folder, max((stored_bytes(plan) for plan, world in plans if world == "live"), default=0))
    if not request.quiet:
        Console(highlight=False, markup=False).print(f"{experiment.title}\nFolder: {folder}", soft_wrap=True)
    try:
        with (
            locked(folder, "experiment"),
            ended_like_ctrl_c(),
            reporting(Console(stderr=True), quiet=request.quiet) as progress,
        ):
            ends = [_run_world(world, todo, folder, progress) for world, todo in jobs.items() if todo]
    except KeyboardInterrupt as interruption:
        sys.stderr.write(f"error: interrupted; `{again}` does what is missing\n")
        return code_of(interruption)
    runs = [end for of_world in ends for end in of_world]
    outcome = judge(experiment, runs, unsupported)
    if not request.quiet:
        report.print_outcome(Console(highlight=False), outcome)
    try:
        _leave(folder, outcome, runs)
    except HostError as error:
        raise HostError(f"{str(error).rstrip('.')}; free some space, then `{again}` does what is missing.") from error
    if not request.quiet:
        Console(highlight=False, markup=False).print(f"Run folders, experiment.csv and plots: {folder}", soft_wrap=True)
    elif outcome.exit_code or outcome.unsupported:
        lines = (*map(str, outcome.unsupported), *outcome.failures, *outcome.troubles, outcome.verdict)
        sys.stderr.write("".join(f"{line}\n" for line in lines))
    if outcome.by_host:
        raise HostError(f"this host stopped runs, see above; mend that, then `{again}` does what is missing.")
    return outcome.exit_code


def _again(request: ExperimentRequest, folder: Path) -> str:
    """The command that goes on where this one ended."""
    given = set_options(request.overrides)
    if request.seed is not None:
        given += ["--seed", str(request.seed)]
    if request.world is not None:
        given += ["--world", request.world]
    return shlex.join(["testbed", "run", request.experiment, *given, "--resume", str(folder)])


def _worlds(experiment: Experiment, wanted: World | None) -> tuple[World, ...]:
    if wanted is None:
        return experiment.worlds
    if wanted not in experiment.worlds:
        raise ConfigError(f"experiment {experiment.name} does not run in the world {wanted!r}; leave out --world.")
    return (wanted,)


def _jobs(
    experiment: Experiment, worlds: Sequence[World], request: ExperimentRequest
) -> tuple[dict[World, list[_Job]], list[Unsupported]]:
    """Everything that is to run, checked, and what this host cannot run.

    Raises:
        ConfigError: a variant that cannot run anywhere, by its name.
    """
    jobs: dict[World, list[_Job]] = {world: [] for world in worlds}
    unsupported = []
    for world in worlds:
        for variant in experiment.variants:
            if world not in variant.worlds:
                continue
            try:
                first = _job(experiment, variant, world, request)
            except UnsupportedError as error:
                unsupported.append(Unsupported(world=world, variant=variant.name, reason=str(error)))
                continue
            jobs[world].append(first)
            jobs[world] += [_repeated(first, number) for number in range(1, variant.repeats[world])]
    return jobs, unsupported


def _job(experiment: Experiment, variant: Variant, world: World, request: ExperimentRequest) -> _Job:
    wanted = RunRequest(
        scenario=experiment.scenario,
        systems=variant.systems,
        seed=request.seed,
        overrides=(*(f"{key}={value}" for key, value in variant.settings), *request.overrides),
        quiet=True,
        world=world,
    )
    try:
        loaded = prepare(wanted)
    except ConfigError as error:
        raise ConfigError(f"experiment {experiment.name}, variant {variant.name}: {error}") from None
    return _Job(
        variant=variant.name,
        folder=f"{world}/{variant.name}",
        request=wanted,
        loaded=replace(loaded, scenario=replace(loaded.scenario, expect=())),  # of the base, not of the variant
    )


def _repeated(job: _Job, number: int) -> _Job:
    """The job once more: live as it is, in sim with another timing of messages."""
    plan, resolved = job.loaded.plan, job.loaded.resolved
    if job.request.world == "sim":
        draw = plan.sim.draw + number
        plan = replace(plan, sim=replace(plan.sim, draw=draw))
        resolved = {**resolved, "sim": {**resolved["sim"], "draw": draw}}
    loaded = replace(job.loaded, plan=plan, resolved=resolved)
    return replace(job, folder=f"{job.folder}-{number + 1}", loaded=loaded)


def _folder(experiment: Experiment, request: ExperimentRequest) -> Path:
    if request.resume is None:
        return run_folder.create(request.out, experiment.name, datetime.now())
    named = re.compile(rf"\d+-\d+-{re.escape(experiment.name)}(-\d+)?")
    if not request.resume.is_dir() or not named.fullmatch(request.resume.resolve().name):
        raise ConfigError(f"--resume {request.resume}: is no folder of the experiment {experiment.name}.")
    return request.resume.resolve()


def _refuse_others(folder: Path, jobs: Mapping[World, Sequence[_Job]]) -> None:
    """Lose no finished run that is not of these jobs. One that was broken off as it was written is no finished run.

    Raises:
        ConfigError: there is one.
    """
    for of_world in jobs.values():
        for job in of_world:
            at = folder / job.folder
            if is_other(at, job.resolved):
                raise ConfigError(
                    f"{at} holds a run of another configuration; resume with the --set and --seed that it was run "
                    "with, or begin anew without --resume."
                )


def _run_world(world: World, jobs: Sequence[_Job], folder: Path, progress: Report) -> list[RunEnd]:
    """Run what has no metrics of its configuration yet; how everything ended."""
    todo = [job for job in jobs if metrics_of(folder / job.folder, job.resolved, world) is None]
    ended: dict[str, int] = {}
    workers = 1 if world == "live" else os.cpu_count() or 1  # live runs would falsify each other

    def told(job: _Job | None, code: int) -> None:
        if job is not None:
            ended[job.folder] = code
        done = len(jobs) - len(todo) + len(ended)
        latest = f", {job.variant} is done" if job is not None else ""
        progress(f"{world}: {done} of {len(jobs)} runs{latest if done < len(jobs) else ''}", done / len(jobs))

    def work(job: _Job) -> int:
        return code_of_run(lambda: run_in_folder(folder / job.folder, job.loaded, job.request))

    progress(f"{world}: {len(jobs) - len(todo)} of {len(jobs)} runs", 0.0)
    run_all([Task(subject=job, output=emptied(folder / job.folder) / OUTPUT) for job in todo], work, workers, told)
    ends = []
    for job in jobs:
        document = metrics_of(folder / job.folder, job.resolved, world)
        code = ended.get(job.folder, 0)
        error = "" if document else reason_in(folder / job.folder) or how_ended(code) or "did not run"
        ends.append(
            RunEnd(
                world=world,
                variant=job.variant,
                folder=job.folder,
                document=document,
                error=error,
                by_host=not document and code == HostError.exit_code,
            )
        )
    return ends


def _leave(folder: Path, outcome: Outcome, runs: Sequence[RunEnd]) -> None:
    from testbed.experiment.plot import draw  # noqa: PLC0415 - matplotlib takes half a second

    report.write(folder, outcome, runs)
    for world in outcome.measured:
        draw(outcome, (world,), folder / f"plot-{world}.png")
    draw(outcome, tuple(outcome.measured), folder / "plot.svg")
