"""``testbed``: the command line. Errors are one sentence on stderr and an exit code (docs/contract.md).

Modules that only one command needs are imported by it, so that ``testbed list`` does not load a network.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from testbed.cli.blame import explained
from testbed.errors import ConfigError

BROKEN_PIPE = 141

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What the library raises for a command line that makes no sense; it gives this class no public name."""


class _Commands(TyperGroup):
    """Says what is wrong with a command line in one sentence, as for all other bad input."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> NoReturn:
        given = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            code = super().main(given, *rest, **{**more, "standalone_mode": False})
        except _UsageError as error:
            said = error.format_message()  # type: ignore[attr-defined]
            path = error.ctx.command_path if error.ctx else "testbed"  # type: ignore[attr-defined]
            sys.stderr.write(f"error: {' '.join(said.split()).rstrip('.')}; `{path} --help` lists what there is.\n")
            code = ConfigError.exit_code
        sys.exit(code)


app = typer.Typer(
    name="testbed",
    cls=_Commands,
    help="An emulation testbed for DualPath: KV cache reads through prefill and decode storage NICs, with real bytes.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

P = ParamSpec("P")

Scenario = Annotated[str, typer.Argument(help="A shipped scenario (see `testbed list`) or the path of a TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. scale.bandwidth=8000.")
]


def _command(body: Callable[P, int]) -> Callable[P, None]:
    """A command that ends with the exit code of ``body`` and never with a traceback (unless TESTBED_DEBUG=1)."""

    @functools.wraps(body)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(_guarded(lambda: body(*args, **kwargs)))

    return command


def _guarded(body: Callable[[], int]) -> int:
    try:
        code = body()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered has nowhere to go
        return BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        sentence, code = explained(error)
        sys.stderr.write(f"error: {sentence}\n")
        return code


@app.command()
@_command
def run(
    scenario: Scenario = "quickstart",
    systems: Annotated[str, typer.Option(help="Systems to compare, separated by commas.")] = "",
    seed: Annotated[int | None, typer.Option(help="Seed of everything random; default: the scenario's.")] = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    world: Annotated[
        str,
        typer.Option(
            help="live: real bytes in the kernel; sim: sizes, in virtual time.",
            show_default="live; an experiment: all of its own",
        ),
    ] = "",
    resume: Annotated[Path | None, typer.Option(help="Folder of an experiment that was interrupted.")] = None,
    capture: Annotated[
        str, typer.Option(metavar="LINK,...", help="Record packets of these links, e.g. pe0.cnic0,de0.snic (live).")
    ] = "",
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Use the scale that `testbed calibrate` found on this host.")
    ] = False,
) -> int:
    """Run a scenario, or all variants of an experiment, on the emulated cluster and judge it."""
    from scenarios.loader import is_experiment  # noqa: PLC0415
    from testbed.cli.run import RunRequest, world_named  # noqa: PLC0415
    from testbed.cli.run import run as run_scenario  # noqa: PLC0415

    if is_experiment(scenario):
        from testbed.cli.experiment import ExperimentRequest, run_experiment  # noqa: PLC0415

        if systems:
            raise ConfigError(f"experiment {scenario}: its variants say which systems run; leave out --systems.")
        if capture:
            raise ConfigError(f"experiment {scenario}: packets are recorded of single runs; leave out --capture.")
        if calibrated:
            raise ConfigError(f"experiment {scenario}: scales are calibrated for scenarios; leave out --calibrated.")
        return run_experiment(
            ExperimentRequest(
                experiment=scenario,
                world=world_named(world) if world else None,
                seed=seed,
                overrides=tuple(overrides or ()),
                out=out,
                quiet=quiet,
                resume=resume,
            )
        )
    if resume is not None:
        raise ConfigError(f"--resume is for experiments, and {scenario} is none; leave it out.")
    names = tuple(name.strip() for name in systems.split(",") if name.strip())
    if calibrated:
        from testbed.cli.host_scale import calibrated as scale_of_host  # noqa: PLC0415

        overrides = [*(overrides or ()), *scale_of_host(scenario, overrides or (), names).overrides]
    return run_scenario(
        RunRequest(
            scenario=scenario,
            systems=names,
            seed=seed,
            overrides=tuple(overrides or ()),
            out=out,
            quiet=quiet,
            world=world_named(world or "live"),
            capture=tuple(name.strip() for name in capture.split(",")) if capture else (),
        )
    )


@app.command(name="calibrate")
@_command
def calibrate_(
    scenario: Scenario = "quickstart",
    systems: Annotated[str, typer.Option(help="Systems to run, separated by commas.")] = "",
    overrides: Overrides = None,
    turns: Annotated[int, typer.Option(help="Turns of every agent in a probe.")] = 2,
    probes: Annotated[int, typer.Option(help="Most probes.")] = 5,
    minutes: Annotated[float, typer.Option(help="No probe begins after so long.")] = 30.0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the run folders of probes.")] = False,
    out: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
) -> int:
    """Find the fastest scale at which this host runs a scenario validly, by short live runs."""
    from testbed.cli.calibrate import CalibrateRequest, calibrate  # noqa: PLC0415

    return calibrate(
        CalibrateRequest(
            scenario=scenario,
            systems=tuple(name.strip() for name in systems.split(",") if name.strip()),
            overrides=tuple(overrides or ()),
            turns=turns,
            probes=probes,
            minutes=minutes,
            keep=keep,
            out=out,
        )
    )


@app.command()
@_command
def parity(
    scenario: Annotated[
        str, typer.Argument(help="A scenario, or `all` of those that the sim world answers for.")
    ] = "quickstart",
    runs: Annotated[int, typer.Option(help="Live runs; their median counts.")] = 1,
    draws: Annotated[int, typer.Option(help="Timings that the sim world predicts from; their median counts.")] = 5,
    live_run: Annotated[
        list[Path] | None,
        typer.Option("--live-run", metavar="FOLDER", help="Compare with this run; nothing runs live."),
    ] = None,
    systems: Annotated[str, typer.Option(help="Systems to compare, separated by commas.")] = "",
    seed: Annotated[int | None, typer.Option(help="Seed of everything random; default: the scenario's.")] = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> int:
    """Run a scenario live and in the sim world, and compare: is the prediction right?"""
    from testbed.cli.parity import ParityRequest  # noqa: PLC0415
    from testbed.cli.parity import parity as run_parity  # noqa: PLC0415

    return run_parity(
        ParityRequest(
            scenario=scenario,
            runs=runs,
            draws=draws,
            live_runs=tuple(live_run or ()),
            systems=tuple(name.strip() for name in systems.split(",") if name.strip()),
            seed=seed,
            overrides=tuple(overrides or ()),
            out=out,
            quiet=quiet,
        )
    )


@app.command(name="capture")
@_command
def capture_(
    file: Annotated[Path, typer.Argument(help="A recorded link: runs/.../capture/<link>.pcap.", readable=False)],
    entering: Annotated[
        list[Path] | None,
        typer.Option(
            help="A recorded memory behind that CNIC (pe0gpu0.cnic, pe0.mem0); may be repeated.", readable=False
        ),
    ] = None,
) -> int:
    """Say what the packets of a link tell of its lanes: bytes, DSCP, and who waited for whom."""
    from testbed.cli.capture import capture  # noqa: PLC0415

    return capture(file, tuple(entering or ()))


@app.command(name="list")
@_command
def list_() -> int:
    """Scenarios, experiments, topologies, systems and their options, and models that ship."""
    from scenarios.loader import experiment_names, read_scenario, scenario_names  # noqa: PLC0415
    from testbed.experiment.file import read_experiment  # noqa: PLC0415
    from testbed.models.model import MODELS  # noqa: PLC0415
    from testbed.protocol.params import OPTIONS, SYSTEMS  # noqa: PLC0415
    from topologies.loader import load_topology, topology_names  # noqa: PLC0415

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for kind, rows in (
        ("scenario", [(name, read_scenario(name).title) for name in scenario_names()]),
        ("experiment", [(name, read_experiment(name).question) for name in experiment_names()]),
        ("topology", [(name, load_topology(name).title) for name in topology_names()]),
        ("system", [(name, system.title) for name, system in SYSTEMS.items()]),
        ("option", [(f"-{name}", f"behind a system's name: {option.sentence}") for name, option in OPTIONS.items()]),
        ("model", [(name, model.title) for name, model in MODELS.items()]),
    ):
        for name, title in rows:
            table.add_row(kind, name, escape(title))
    Console(highlight=False).print(table)
    return 0


@app.command()
@_command
def check(
    config: Annotated[str, typer.Argument(help="A built-in cluster, e.g. 1p1d-2r, or the path of a TOML file.")] = "",
    faults: Annotated[int | None, typer.Option(help="Most faults; default: without any, then with one.")] = None,
    only: Annotated[str, typer.Option(help="Kinds of faults, separated by commas, e.g. lose,refuse.")] = "",
    at_random: Annotated[bool, typer.Option("--random", help="Random walks, for clusters too large.")] = False,
    seeds: Annotated[int, typer.Option(help="How many random walks.")] = 200,
    max_states: Annotated[int, typer.Option(help="Stop at so many states.")] = 20_000_000,
    memory_gb: Annotated[float, typer.Option(help="Stop when the process takes so much memory.")] = 4.0,
    full: Annotated[bool, typer.Option("--full", help="Every order, also of what commutes.")] = False,
    replay: Annotated[Path | None, typer.Option(help="Follow the trace in this file.")] = None,
    out: Annotated[Path, typer.Option(help="Where a trace is saved.")] = Path("runs"),
) -> int:
    """Explore small clusters in every order of events and with faults; say whether the protocol holds."""
    from testbed.cli.check import CheckRequest  # noqa: PLC0415
    from testbed.cli.check import check as check_protocol  # noqa: PLC0415

    return check_protocol(
        CheckRequest(
            config=config,
            faults=faults,
            only=tuple(kind.strip() for kind in only.split(",") if kind.strip()),
            at_random=at_random,
            seeds=seeds,
            max_states=max_states,
            memory_gb=memory_gb,
            full=full,
            replay=replay,
            out=out,
        )
    )


@app.command()
@_command
def doctor() -> int:
    """Check what the testbed needs of this host."""
    from testbed.fabric.live.doctor import checks  # noqa: PLC0415

    failed = 0
    for check in checks():
        failed += not check.ok
        state = "FAIL" if not check.ok else "warn" if check.warning else "ok  "
        sys.stdout.write(f"{state} {check.name}: {check.detail}\n")
        if state != "ok  " and check.remedy:
            sys.stdout.write(f"     {check.remedy}\n")
    return 2 if failed else 0


@app.command()
@_command
def scale(scenario: Scenario = "quickstart", overrides: Overrides = None) -> int:
    """Show how a scenario maps the paper's cluster onto the emulated one, and what is kept."""
    from scenarios.loader import load_scenario  # noqa: PLC0415
    from scenarios.resolve import gpu_of, shape_of  # noqa: PLC0415
    from testbed.models.scale_report import describe  # noqa: PLC0415

    loaded = load_scenario(scenario, overrides=tuple(overrides or ()), run_dir=Path("unmade"))
    fitted = loaded.plan.scale
    rows = describe(
        fitted,
        shape_of(loaded.scenario).hardware,
        gpu_of(loaded.scenario.gpu, fitted.model),
        paper_block_tokens=loaded.scenario.protocol.block_tokens,
    )
    table = Table(title=loaded.stands_for, title_justify="left")
    for column in ("", "paper", "emulated", "kept", "why"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.quantity, row.paper, row.emulated, "yes" if row.preserved else "no", row.why)
    Console(highlight=False).print(table)
    return 0


@app.command()
@_command
def shell(
    topology: Annotated[str, typer.Argument(help="A topology or scenario: its cluster is built.")] = "1p1d",
    command: Annotated[list[str] | None, typer.Option("--command", "-c", help="Run this, then leave.")] = None,
    overrides: Overrides = None,
) -> int:
    """Mininet's command line on the running emulated cluster (nodes, net, pingall, pe0 ip -s link, ...)."""
    from testbed.cli.cluster import spec_named  # noqa: PLC0415
    from testbed.fabric.live.lane_offers import settled  # noqa: PLC0415
    from testbed.fabric.live.limits import check_buildable  # noqa: PLC0415
    from testbed.fabric.live.mininet_face import interactive  # noqa: PLC0415
    from testbed.fabric.live.sandbox import run_in_sandbox  # noqa: PLC0415

    spec = spec_named(topology, tuple(overrides or ()), settled)
    check_buildable(spec)
    return run_in_sandbox(lambda: interactive(spec, command))


@app.command()
@_command
def topo(
    topology: Annotated[str, typer.Argument(help="A topology or scenario.")] = "1p1d", overrides: Overrides = None
) -> int:
    """Print the cluster of a topology as a tree: switches, nodes, GPUs, links and their rates."""
    from testbed.cli.cluster import spec_named, tree  # noqa: PLC0415

    Console(highlight=False).print(tree(spec_named(topology, tuple(overrides or ()))))
    return 0


@app.command()
@_command
def plan(
    gpus: Annotated[int, typer.Option("--gpus", "--g", help="GPUs, each with its CNIC, per node (g).")] = 8,
    s: Annotated[str, typer.Option("--s", help="Storage bandwidth of a node in units of one CNIC.")] = "1",
    cnic_gbit: Annotated[str, typer.Option(help="Bandwidth of a CNIC (B), Gbit/s.")] = "400",
    memory_gb_s: Annotated[str, typer.Option(help="Memory bandwidth of a node (M), GB/s.")] = "500",
    prefill: Annotated[int, typer.Option(help="Prefill nodes (P).")] = 2,
    decode: Annotated[int, typer.Option(help="Decode nodes (D).")] = 4,
    plot: Annotated[Path | None, typer.Option(help="Draw the region of s/g and P/D into this file.")] = None,
    confirm: Annotated[bool, typer.Option("--confirm", help="Simulate clusters across both bounds (minutes).")] = False,
) -> int:
    """Which resource limits a P:D ratio: equations 1-9 of the paper's section 4.2."""
    from testbed.cli import analysis  # noqa: PLC0415

    request = analysis.PlanRequest(
        gpus=gpus, s=s, cnic_gbit=cnic_gbit, memory_gb_s=memory_gb_s, prefill=prefill, decode=decode, plot=plot
    )
    code = analysis.plan(request)
    if confirm:
        from testbed.cli.confirm import confirm as simulate  # noqa: PLC0415

        code = simulate(request.setting)
    return code


@app.command()
@_command
def lanes(
    discipline: Annotated[str, typer.Argument(help="htb, prio, ets, none or infiniband; default: all.")] = "",
    opensm: Annotated[str, typer.Option(help="A file with arbiter tables in OpenSM's words.")] = "",
    scenario: Annotated[str, typer.Option(help="Whose cluster and whose lanes' settings count.")] = "quickstart",
    rate_gbps: Annotated[float, typer.Option(help="Rate of the real link; 0: the paper's CNIC.")] = 0.0,
    overrides: Overrides = None,
) -> int:
    """What a lane discipline becomes on each world: parameters, worst-case shares, the longest wait."""
    from testbed.cli.lanes import LanesRequest  # noqa: PLC0415
    from testbed.cli.lanes import lanes as show_lanes  # noqa: PLC0415

    return show_lanes(
        LanesRequest(
            discipline=discipline,
            opensm=opensm,
            scenario=scenario,
            rate_gbps=rate_gbps,
            overrides=tuple(overrides or ()),
        )
    )


@app.command()
@_command
def ratio(
    model: Annotated[list[str] | None, typer.Option(help="A model; may be repeated. Default: all.")] = None,
    context: Annotated[str, typer.Option(help="Context lengths in tokens, separated by commas.")] = "16384,32721,65536",
    append: Annotated[int, typer.Option(help="Appended tokens per turn.")] = 429,
    indexer: Annotated[bool, typer.Option(help="Count the key cache of the sparse-attention indexer.")] = False,
) -> int:
    """GB of KV to load per PFLOP of prefill: Table 1 of the paper beside ours."""
    from testbed.cli import analysis  # noqa: PLC0415

    return analysis.ratio(model or (), analysis.numbers("--context", context, int), append, indexer=indexer)


@app.command()
@_command
def workingset(
    model: Annotated[str, typer.Option(help="Whose bytes per token count.")] = "ds-660b",
    aps: Annotated[str, typer.Option(help="Agents per second, separated by commas.")] = "0.1,0.45",
    jct_s: Annotated[str, typer.Option(help="JCT in seconds, one for each APS or one for all.")] = "569,1100",
    total_tokens: Annotated[float, typer.Option(help="Mean length of a finished trajectory.")] = 55_958,
    r: Annotated[str, typer.Option(help="Factors by which tool calls stretch the JCT.")] = "1,2,4",
    indexer: Annotated[bool, typer.Option(help="Count the key cache of the sparse-attention indexer.")] = False,
) -> int:
    """How much KV an online service keeps: Little's law, and what tool calls do to it (paper 8.2)."""
    from testbed.cli import analysis  # noqa: PLC0415

    return analysis.workingset(
        analysis.WorkingSetRequest(
            model=model,
            indexer=indexer,
            aps=analysis.numbers("--aps", aps, float),
            jct_s=analysis.numbers("--jct-s", jct_s, float),
            total_tokens=total_tokens,
            r=analysis.numbers("--r", r, float),
        )
    )


@app.command()
@_command
def paper(
    figures: Annotated[
        list[str] | None, typer.Argument(help="fig7 ... fig15, table1, table3, tools, or all.", show_default="all")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the agents; does not compare.")] = False,
    workers: Annotated[int, typer.Option(help="Simulations at a time; 0: one per CPU.")] = 0,
    aps_step: Annotated[float, typer.Option(help="Resolution of the capacity search, agents per second.")] = 0.05,
    out: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
) -> int:
    """Simulate the paper's figures and tables, and print the paper's values beside ours."""
    from testbed.cli.paper import PaperRequest  # noqa: PLC0415
    from testbed.cli.paper import paper as reproduce  # noqa: PLC0415

    return reproduce(
        PaperRequest(figures=tuple(figures or ("all",)), quick=quick, workers=workers, aps_step=aps_step, out=out)
    )


@app.command()
@_command
def sweep(
    file: Annotated[
        Path, typer.Argument(help="A TOML file with a scenario and a grid or a list of settings.", readable=False)
    ],
    workers: Annotated[int, typer.Option(help="Runs at a time; 0: one per CPU.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the sweep's folder is made.")] = Path("runs/sweeps"),
    resume: Annotated[bool, typer.Option("--resume", help="Keep what an earlier, interrupted sweep has done.")] = False,
) -> int:
    """Run a scenario over many settings and seeds, and put all results into one table."""
    from testbed.cli import sweep as sweeping  # noqa: PLC0415

    return sweeping.sweep(sweeping.SweepRequest(file=file, workers=workers, out=out, resume=resume))


def main() -> None:
    """Entry of the ``testbed`` command."""
    app()
