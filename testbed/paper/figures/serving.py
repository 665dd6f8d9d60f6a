"""Figures 10 and 11: online serving by arrival rate, what the SLO allows, and how long a job takes (section 7.4).

The paper's Figure 11 is not known to us beyond two times at low load; ours is the job time by arrival rate, and the
working set that follows from it (section 8.2).
"""

from __future__ import annotations

from testbed.analysis.workingset import GB, working_set_bytes
from testbed.flowsim.run import FlowCase
from testbed.models.model import model_named
from testbed.paper import reference
from testbed.paper.cases import ONLINE_TRACE, Scope, model_title, system_title
from testbed.paper.figures.figure import Figure, Results, ratio
from testbed.paper.online import aps_grid, capacity
from testbed.paper.rows import Row
from testbed.paper.summary import CaseSummary
from testbed.workload.table2 import profile_named

CAPACITY = "largest APS within the SLO"
CAPACITY_GAIN = "capacity gain"
GAIN_SYSTEM = "DualPath / Basic"
JOB = "job time, s"

_SYSTEMS = ("oracle", "dualpath", "basic")
_APS = {"ds-660b": reference.FIGURE_10_APS, "ds-27b": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)}
_BASIC_UP_TO = {"ds-660b": 0.3, "ds-27b": 0.5}
"""Basic is long over the SLO beyond."""
_HIGHEST_APS = 2.0
_LOW_LOAD_APS = 0.1


def _loads() -> list[tuple[str, str, float]]:
    """(model, system, APS) of the plotted points."""
    return [
        (model, system, aps)
        for model, grid in _APS.items()
        for system in _SYSTEMS
        for aps in grid
        if system != "basic" or aps <= _BASIC_UP_TO[model]
    ]


def _fig10_cases(scope: Scope) -> list[FlowCase]:
    sgl = [scope.online("ds-660b", "sgl-mc", aps) for aps in reference.FIGURE_10_SGL_APS]
    return [scope.online(*load) for load in _loads()] + sgl


def _fig10_rows(scope: Scope, results: Results) -> list[Row]:
    rows = []
    for model, system, aps in _loads():
        at = reference.FIGURE_10_APS.index(aps) if model == "ds-660b" else None
        paper = {
            quantity: None if at is None or system not in given else given[system][at]
            for quantity, given in reference.FIGURE_10.items()
        }
        rows += _latency_rows(model, system, aps, results(scope.online(model, system, aps)), paper)
    for i, aps in enumerate(reference.FIGURE_10_SGL_APS):
        paper = {quantity: given[i] for quantity, given in reference.FIGURE_10_SGL.items()}
        rows += _latency_rows("ds-660b", "sgl-mc", aps, results(scope.online("ds-660b", "sgl-mc", aps)), paper)
    for model in _APS:
        rows += _capacity_rows(scope, results, model)
    return rows


def _latency_rows(
    model: str, system: str, aps: float, summary: CaseSummary, paper: dict[str, float | None]
) -> list[Row]:
    served = summary.ttft_s > 0
    values = {"TTFT": summary.ttft_s, "TTST": summary.ttst_s, "TPOT": summary.tpot_s}
    return [
        Row(
            figure="fig10",
            where=f"{model_title(model)} {aps:g} APS" + _remark(summary),
            quantity=f"{quantity}, s",
            system=system_title(system),
            paper=paper[quantity],
            ours=value if served else None,
            panel=f"{model_title(model)}: {quantity}, s",
            x=aps,
        )
        for quantity, value in values.items()
    ]


def _remark(summary: CaseSummary) -> str:
    steady = summary.stop is not None and summary.stop.outcome.value == "steady"
    return "" if steady else f" ({summary.outcome})"


def _capacity_rows(scope: Scope, results: Results, model: str) -> list[Row]:
    grid = aps_grid(scope.aps_step, _HIGHEST_APS)

    def largest(system: str) -> float:
        def within(aps: float) -> bool:
            return results(scope.online(model, system, aps)).within_slo

        drawn = [aps for drawn_model, drawn_system, aps in _loads() if (drawn_model, drawn_system) == (model, system)]
        return capacity(within, grid, {aps: within(aps) for aps in drawn})

    found = {system: largest(system) for system in _SYSTEMS}
    rows = [
        Row(
            figure="fig10",
            where=model_title(model) + (" (the search ends there)" if aps == grid[-1] else ""),
            quantity=CAPACITY,
            system=system_title(system),
            paper=reference.CAPACITY_APS.get((model, system)),
            ours=aps,
        )
        for system, aps in found.items()
    ]
    rows.append(
        Row(
            figure="fig10",
            where=model_title(model),
            quantity=CAPACITY_GAIN,
            system=GAIN_SYSTEM,
            paper=reference.CAPACITY_GAIN[model],
            ours=ratio(found["dualpath"], found["basic"]),
        )
    )
    return rows


def _fig11_cases(scope: Scope) -> list[FlowCase]:
    return [scope.online(*load) for load in _loads()]


def _fig11_rows(scope: Scope, results: Results) -> list[Row]:
    rows = []
    for model, system, aps in _loads():
        summary = results(scope.online(model, system, aps))
        low_load = system == "dualpath" and aps == _LOW_LOAD_APS
        rows.append(
            Row(
                figure="fig11",
                where=f"{model_title(model)} {aps:g} APS",
                quantity=JOB,
                system=system_title(system),
                paper=reference.LOW_LOAD_JOB_S[model] if low_load else None,
                ours=summary.job_s if summary.ttft_s > 0 else None,
                panel=f"{model_title(model)}: {JOB}",
                x=aps,
            )
        )
    rows += [_working_set_row(aps, paper, scope, results) for aps, paper in reference.WORKING_SET_GB.items()]
    return rows


def _working_set_row(aps: float, paper: float, scope: Scope, results: Results) -> Row:
    """Little's law: agents in the system times half of a trajectory's KV."""
    summary = results(scope.online("ds-660b", "dualpath", aps))
    tokens = profile_named(ONLINE_TRACE).total_tokens
    return Row(
        figure="fig11",
        where=f"660B {aps:g} APS",
        quantity="working set, GB",
        system=system_title("dualpath"),
        paper=paper,
        ours=working_set_bytes(aps, summary.job_s, tokens, model_named("ds-660b").kv_bytes_per_token) / GB
        if summary.ttft_s > 0
        else None,
    )


FIG10 = Figure(
    name="fig10", title="Online serving by arrival rate, and capacity", x_label="APS",
    cases=_fig10_cases, rows=_fig10_rows,
)  # fmt: skip
FIG11 = Figure(
    name="fig11", title="Online: time of a whole job, and working set", x_label="APS",
    cases=_fig11_cases, rows=_fig11_rows,
)  # fmt: skip
