"""``testbed run``: resolve and check everything, run in a world, judge, report.

A live run happens in a child inside the sandbox; whatever it leaves for people is in the run folder and on the
terminal, so nothing has to travel back but the exit code. A sim run needs neither sandbox nor root.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import cast, get_args

from rich.console import Console

from scenarios.loader import LoadedScenario, load_scenario, name_of, read_scenario
from testbed.analysis.lanes import outlook
from testbed.cli.blame import INTERRUPTED, explained, sentence_for
from testbed.cli.janitor import cleaning_up
from testbed.cli.judge import summarise
from testbed.cli.progress import reporting
from testbed.errors import ConfigError, HostError
from testbed.fabric.live.addresses import Plan
from testbed.fabric.live.blockfile import BlockFormat
from testbed.fabric.live.lane_offers import settled
from testbed.fabric.live.limits import check_buildable
from testbed.fabric.live.recorder import MOST_FILE_BYTES, capture_points
from testbed.fabric.live.sandbox import PRIVATE_PATH, run_in_sandbox
from testbed.fabric.recording import Recording
from testbed.fabric.spec import LaneDiscipline
from testbed.metrics.expression import check_expression
from testbed.metrics.summary import Summary
from testbed.report import run_folder, tables
from testbed.runtime.live_run import run_live
from testbed.runtime.plan import RunPlan, World
from testbed.runtime.sim_run import run_sim
from topologies.tomlinput import nearest

_SIGNALLED = 128
"""Exit codes above: killed by the signal of the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The arguments of ``testbed run``. ``summary`` False: no table at the end, only progress."""

    scenario: str
    systems: Sequence[str] = ()
    seed: int | None = None
    overrides: Sequence[str] = ()
    out: Path = Path("runs")
    quiet: bool = False
    world: World = "live"
    summary: bool = True
    capture: Sequence[str] = ()


def world_named(name: str) -> World:
    """A world by name.

    Raises:
        ConfigError: there is none of that name.
    """
    for world in get_args(World):
        if name == world:
            return cast(World, world)
    raise ConfigError(f"unknown world {name!r}{nearest(name, get_args(World))}; choose live or sim.")


def run(request: RunRequest) -> int:
    """Run a scenario; the exit code of docs/contract.md.

    Raises:
        TestbedError: the input cannot be run, or the host cannot run it; nothing has been started then.
    """
    loaded = prepare(request)  # all faults of the input, before anything is left on the disk
    if request.world == "live":
        refuse_hidden(request.out)
    return run_in_folder(run_folder.create(request.out, name_of(request.scenario), datetime.now()), loaded, request)


def run_in_folder(folder: Path, loaded: LoadedScenario, request: RunRequest) -> int:
    """Run a scenario that has been prepared; everything that it leaves goes into ``folder``."""
    loaded = replace(loaded, plan=replace(loaded.plan, run_dir=folder))
    with cleaning_up(folder):
        try:
            code = _run_in(folder, loaded, request)
        except BaseException as error:
            run_folder.write_failure(folder, sentence_for(error))
            raise
    if code > _SIGNALLED and code != INTERRUPTED:  # of an interruption the child has told
        sentence = f"ended by {signal.Signals(code - _SIGNALLED).name}"
        run_folder.write_failure(folder, sentence)
        sys.stderr.write(f"error: {sentence}; what there is of the run is in {folder}\n")
    return code


def _run_in(folder: Path, loaded: LoadedScenario, request: RunRequest) -> int:
    run_folder.check_space(folder, stored_bytes(loaded.plan) if request.world == "live" else 0)
    run_folder.write_configuration(folder, {**loaded.resolved, "world": request.world}, sys.argv)
    if not request.quiet and request.summary:
        out = Console(highlight=False)
        out.print(loaded.stands_for, soft_wrap=True)
        out.print(f"Run folder: {folder}", soft_wrap=True)
        if loaded.plan.cluster.lanes is LaneDiscipline.INFINIBAND:  # tables are written by hand; other lanes by name
            for warning in outlook(loaded.plan.cluster).warnings:
                sys.stderr.write(f"warning: {loaded.scenario.cluster.opensm}: {warning}\n")
    if request.world == "live":
        return run_in_sandbox(lambda: _run_inside(loaded, folder, request))
    return _run_inside(loaded, folder, request)


def set_options(overrides: Sequence[str]) -> list[str]:
    """The words of the command line that say the same."""
    return [word for override in overrides for word in ("--set", override)]


def prepare(request: RunRequest) -> LoadedScenario:
    """Load the scenario, for a folder that is still to be made, and check its expectations.

    Raises:
        ConfigError: anything wrong with the input, or a world that cannot run it.
    """
    scenario = read_scenario(request.scenario, request.overrides)
    for expectation in scenario.expect:
        check_expression(expectation.metric)
    overrides = tuple(request.overrides)
    if request.world == "live":
        overrides = (*overrides, f"cluster.lanes={settled(scenario.cluster.lanes)}")
    loaded = load_scenario(
        request.scenario, overrides=overrides, systems=request.systems, seed=request.seed, run_dir=Path()
    )
    if request.world == "live":
        check_buildable(loaded.plan.cluster)
    _check_tables(loaded)
    return replace(loaded, plan=replace(loaded.plan, capture=_captured(request, loaded)))


def _check_tables(loaded: LoadedScenario) -> None:
    """Refuse arbiter tables under which a lane that the run needs would never send anything.

    Raises:
        ConfigError: naming the lane and the file.
    """
    plan, tables = loaded.plan, loaded.scenario.cluster.opensm
    if plan.cluster.lanes is not LaneDiscipline.INFINIBAND:
        return
    high, kv = outlook(plan.cluster).alone
    for lane, share, needed in (("model traffic", high, plan.params.collectives is not None), ("KV", kv, True)):
        if needed and not share:
            raise ConfigError(
                f"{tables}: {lane} has a share of 0 even when all others idle, so the run could not end; give its "
                f"virtual lane a weight (`testbed lanes --opensm {tables}` shows the tables)."
            )


def _captured(request: RunRequest, loaded: LoadedScenario) -> tuple[str, ...]:
    """The links to record, each once.

    Raises:
        ConfigError: a link that the cluster does not have, or a world without packets.
    """
    names = tuple(dict.fromkeys(request.capture))
    if not names:
        return ()
    if request.world != "live":
        raise ConfigError(f"--capture: the {request.world} world has no packets; leave it out, or run live.")
    points = capture_points(Plan(loaded.plan.cluster))
    for name in names:
        if name not in points:
            raise ConfigError(
                f"--capture: there is no link {name!r} in this cluster{nearest(name, points)}; "
                f"there are {', '.join(list(points)[:3])} and so on (`testbed topo` draws them)."
            )
    return names


def refuse_hidden(out: Path) -> None:
    """Refuse a place that processes in the sandbox could not see.

    Raises:
        ConfigError: the run folders, or this code, lie where the sandbox mounts its own file system.
    """
    code = Path(__file__).resolve().parents[2]
    for path, way in ((out.resolve(), "choose another place with --out"), (code, "move the testbed elsewhere")):
        if path.is_relative_to(PRIVATE_PATH):
            raise ConfigError(f"{path} is below {PRIVATE_PATH}, which the sandbox hides behind its own; {way}.")


def stored_bytes(plan: RunPlan) -> int:
    """The most that a run stores: all blocks of all agents, in each replica, plus the past; and what is recorded."""
    layout = plan.params.layout
    blocks = sum(layout.full_blocks(script.trajectory.total_tokens) for script in plan.scripts)
    warm = sum(script.warm_tokens // layout.block_tokens for script in plan.scripts)
    copies = min(plan.params.replicas, len(plan.roles.storage))
    recorded = MOST_FILE_BYTES * len(plan.capture) * len(plan.systems)
    return (blocks * copies + warm) * BlockFormat(layout).file_bytes + recorded


def _run_inside(loaded: LoadedScenario, folder: Path, request: RunRequest) -> int:
    """Run (live: in the sandbox), judge, write, print."""
    try:
        with reporting(Console(stderr=True), quiet=request.quiet) as progress:
            run_world = run_live if request.world == "live" else run_sim
            result = run_world(loaded.plan, progress)
        summary = summarise(loaded, result, request.world)
        run_folder.write_results(folder, summary, result.systems)
        run_folder.write_captures(folder, [_named_below(folder, one) for one in result.recordings])
    except (Exception, KeyboardInterrupt) as error:
        sentence, code = explained(error)
        run_folder.write_failure(folder, sentence)
        sys.stderr.write(f"error: {sentence.rstrip('.')}; what there is of the run is in {folder}\n")
        return code
    told = not request.quiet and request.summary
    if told:
        tables.print_summary(Console(highlight=False), summary)
    for reason in () if told else (*summary.failures, *summary.invalid_reasons):
        sys.stderr.write(f"{reason}\n")
    return _told_captures(folder, summary, result.recordings, told=told)


def _named_below(folder: Path, recording: Recording) -> dict[str, object]:
    return {**asdict(recording), "file": str(Path(recording.file).relative_to(folder))}


def _told_captures(folder: Path, summary: Summary, recordings: Sequence[Recording], *, told: bool) -> int:
    """Say what was recorded. Result: the exit code of the run; a capture that failed is a fault of the host."""
    for recording in recordings if told else ():
        sys.stdout.write(f"{recording.text}\n")
    failures = [recording.failure for recording in recordings if recording.failure]
    if not failures:
        return summary.exit_code
    run_folder.write_failure(folder, "\n".join((*summary.failures, *summary.invalid_reasons, *failures)))
    for failure in failures:
        sys.stderr.write(f"error: {failure}\n")
    return summary.exit_code if summary.failures else HostError.exit_code
