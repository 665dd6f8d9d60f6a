"""``testbed paper``: the paper's figures and tables from simulation, paper beside ours (``runs/<time>-paper/``).

===============  ==========================================================================================
paper.csv        one line per value: figure, cell, system, paper, ours, rel_error, kind
simulations.csv  one line per simulation: what it was, how it ended, how long it took
<figure>.png     the plots
===============  ==========================================================================================
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from testbed.cli.blame import sentence_for
from testbed.cli.progress import reporting
from testbed.errors import ConfigError, RunFailedError
from testbed.flowsim.run import FlowCase, FlowResult, simulate
from testbed.paper import plots, tables
from testbed.paper.acceptance import criteria
from testbed.paper.cases import Scope, describe
from testbed.paper.figures import FIGURES
from testbed.paper.figures.figure import Figure
from testbed.paper.lab import Lab
from testbed.paper.rows import Row, number, write_csv, write_table
from testbed.report import run_folder
from topologies.tomlinput import nearest

ALL = "all"
_SIMULATION_COLUMNS = ("simulation", "system", "requests", "outcome", "jct_s", "ttft_s", "ttst_s", "tpot_s", "took_s")
_PLAIN_WIDTH = 140
"""Characters of a table in a file or pipe, where nobody can widen the window."""
_FINEST_APS, _COARSEST_APS = 0.001, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRequest:
    """The arguments of ``testbed paper``. ``workers`` 0: as many as there are CPUs here."""

    figures: Sequence[str] = (ALL,)
    quick: bool = False
    workers: int = 0
    aps_step: float = 0.05
    out: Path = Path("runs")


def paper(request: PaperRequest, simulate_case: Callable[[FlowCase], FlowResult] = simulate) -> int:
    """Simulate, compare, print and write.

    Raises:
        ConfigError: an unknown figure, or arguments out of range; nothing has been started then.
        HostError: results cannot be written, or a simulation was killed.
        RunFailedError: a simulation did not come to its end; everything else has been printed and written then.
    """
    figures = chosen(request.figures)
    check(request)
    scope = Scope(quick=request.quick, aps_step=request.aps_step)
    folder = run_folder.create(request.out, "paper", datetime.now())
    try:
        run_folder.write_configuration(
            folder,
            {
                "seed": scope.seed,
                "figures": [f.name for f in figures],
                "quick": scope.quick,
                "aps_step": scope.aps_step,
            },
            sys.argv,
        )
        with reporting(Console(stderr=True), quiet=False) as report:
            lab = Lab(workers=request.workers or len(os.sched_getaffinity(0)), report=report, simulate=simulate_case)
            lab.run(case for figure in figures for case in figure.cases(scope))
            by_figure = {figure.name: figure.rows(scope, lab) for figure in figures}
        _write(folder, figures, by_figure, lab, scope)
        _print(folder, figures, by_figure, scope)
        _refuse_unfinished(lab)
    except BaseException as error:
        run_folder.write_failure(folder, sentence_for(error))
        raise
    return 0


def chosen(names: Sequence[str]) -> list[Figure]:
    """Figures by name, in the paper's order; ``all`` is every one.

    Raises:
        ConfigError: no such figure, with the nearest.
    """
    known = [*FIGURES, ALL]
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown figure {name!r}{nearest(name, known)}; choose from {', '.join(known)}.")
    return [figure for name, figure in FIGURES.items() if name in names or ALL in names]


def check(request: PaperRequest) -> None:
    """Refuse numbers out of range.

    Raises:
        ConfigError: which, and the range.
    """
    if request.workers < 0:
        raise ConfigError(f"--workers is {request.workers}; give 1 or more, or leave it out for one per CPU.")
    if not _FINEST_APS <= request.aps_step <= _COARSEST_APS:
        raise ConfigError(f"--aps-step is {request.aps_step:g}; choose between {_FINEST_APS:g} and {_COARSEST_APS:g}.")


def _write(folder: Path, figures: Sequence[Figure], rows: dict[str, list[Row]], lab: Lab, scope: Scope) -> None:
    write_csv(folder / "paper.csv", (row for figure in figures for row in rows[figure.name]))
    write_table(
        folder / "simulations.csv",
        _SIMULATION_COLUMNS,
        sorted(
            (
                describe(case), case.system, done.summary.requests, done.summary.outcome, number(done.summary.jct_s),
                number(done.summary.ttft_s), number(done.summary.ttst_s), number(done.summary.tpot_s),
                f"{done.took_s:.1f}",
            )
            for case, done in lab.done.items()
        ),
    )  # fmt: skip
    for figure in figures:
        plots.draw(figure, rows[figure.name], folder / f"{figure.name}.png", note=_note(figure, scope))


def _note(figure: Figure, scope: Scope) -> str:
    return tables.QUICK_NOTE if scope.quick and figure.cases(scope) else ""


def _print(folder: Path, figures: Sequence[Figure], rows: dict[str, list[Row]], scope: Scope) -> None:
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = _PLAIN_WIDTH
    for figure in figures:
        out.print(tables.figure_table(figure, rows[figure.name], note=_note(figure, scope)))
    everything = [row for figure in figures for row in rows[figure.name]]
    if len(figures) == len(FIGURES):
        out.print(tables.acceptance_table(criteria(everything), note=tables.QUICK_NOTE if scope.quick else ""))
    if not scope.quick:
        out.print(tables.summary_line(everything), soft_wrap=True)
    out.print(f"Run folder: {folder}", soft_wrap=True)


def _refuse_unfinished(lab: Lab) -> None:
    stuck = [
        f"{describe(case)} ({done.error or 'agents were left'})"
        for case, done in lab.done.items()
        if done.error or not (case.horizon_s or done.summary.finished)
    ]
    if stuck:
        raise RunFailedError(f"{len(stuck)} simulations did not come to their end: {'; '.join(sorted(stuck))}.")
