"""Figures 12, 13 and 14: what each technique brings, and how evenly storage and attention are used (section 7.5).

Figure 12 left (parts of the TTFT) is online, 660B. Its right half adds layerwise prefill, the second path and the
scheduler one after the other; "without scheduling" is round robin.

"Three machines" of Figure 13 fits 1P2D and 2P1D only. 1P2D of the 27B is compared with the paper; the others stand
beside it. Figure 14 uses the ablation's 1,024 agents, where only DualPath packs its batches by the compute quota.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from testbed.flowsim.run import FlowCase
from testbed.paper import reference
from testbed.paper.cases import Scope, system_title
from testbed.paper.figures.figure import Figure, Results, jct, mean, ratio
from testbed.paper.figures.offline import JCT, kind_of
from testbed.paper.rows import Kind, Row
from testbed.paper.summary import CaseSummary

CUT = "cut of JCT against Basic, %"
MEAN_CUT = "mean cut of JCT against Basic, %"
SHARE = "share of TTFT, %"
SNIC_MEAN = "SNIC max/avg, mean"
SCHEDULING_RISE = "Sch share at .25 over .15 APS"

_STEPS = ("layerwise", "dual-path-rr", "dualpath")
_BALANCE_SYSTEMS = ("dual-path-rr", "dualpath")
_FIG13_AGENTS = 1024
_FIG13_CELLS = (("ds-27b", (1, 2), "27B 1P2D"), ("ds-27b", (2, 1), "27B 2P1D"), ("ds-660b", (2, 4), "660B 2P4D"))
_FIG13_COMPARED = "27B 1P2D"
_FIG14_AGENTS = 1024
_CALIBRATED_APS = 0.2
_SERIES_POINTS = 60


def _ablation_case(scope: Scope, system: str, agents: int) -> FlowCase:
    return scope.offline("ds-660b", "64K", system, agents)


def _share_case(scope: Scope, system: str, aps: float) -> FlowCase:
    return scope.online("ds-660b", system, aps)


def _fig12_cases(scope: Scope) -> list[FlowCase]:
    right = [_ablation_case(scope, s, n) for s in ("basic", *_STEPS) for n in reference.FIGURE_12_AGENTS]
    return [_share_case(scope, *cell) for cell in reference.FIGURE_12_LEFT] + right


def _fig12_rows(scope: Scope, results: Results) -> list[Row]:
    return [*_share_rows(scope, results), *_ablation_rows(scope, results)]


def _share_rows(scope: Scope, results: Results) -> list[Row]:
    rows = []
    scheduling: dict[tuple[str, float], float | None] = {}
    for (system, aps), paper in reference.FIGURE_12_LEFT.items():
        summary = results(_share_case(scope, system, aps))
        shares = summary.ttft_shares if summary.ttft_s > 0 else (None,) * len(paper)
        scheduling[system, aps] = shares[0]
        for part, theirs, ours in zip(reference.TTFT_PARTS, paper, shares, strict=True):
            rows.append(
                Row(
                    figure="fig12",
                    where=f"660B {aps:g} APS {part}",
                    quantity=SHARE,
                    system=system_title(system),
                    paper=theirs,
                    ours=ours,
                    kind=Kind.CALIBRATED if aps == _CALIBRATED_APS else Kind.PREDICTED,
                    panel=f"{part}: {SHARE}",
                    x=aps,
                )
            )
    for system in ("basic", "dualpath"):
        paper_shares = [reference.FIGURE_12_LEFT[system, aps][0] for aps in (0.25, 0.15)]
        rows.append(
            Row(
                figure="fig12",
                where="660B",
                quantity=SCHEDULING_RISE,
                system=system_title(system),
                paper=ratio(*paper_shares),
                ours=ratio(scheduling[system, 0.25], scheduling[system, 0.15]),
            )
        )
    return rows


def _ablation_rows(scope: Scope, results: Results) -> list[Row]:
    times: dict[tuple[str, int], Row] = {}
    for system in ("basic", *_STEPS):
        for agents, paper in zip(reference.FIGURE_12_AGENTS, reference.FIGURE_12_RIGHT[system], strict=True):
            times[system, agents] = Row(
                figure="fig12",
                where=f"660B 64K {agents}",
                quantity=JCT,
                system=system_title(system),
                paper=paper,
                ours=jct(results(_ablation_case(scope, system, agents))),
                kind=kind_of("ds-660b", "64K", agents, system) if system in ("basic", "dualpath") else Kind.PREDICTED,
                panel=f"ablation: {JCT}",
                x=agents,
            )
    rows = list(times.values())
    for system in _STEPS:
        cuts = [_cut(times["basic", agents], times[system, agents]) for agents in reference.FIGURE_12_AGENTS]
        rows += cuts
        rows.append(
            Row(
                figure="fig12",
                where="660B 64K",
                quantity=MEAN_CUT,
                system=system_title(system),
                paper=reference.MEAN_CUT_PERCENT[system],
                ours=mean([cut.ours for cut in cuts]),
            )
        )
    return rows


def _cut(basic: Row, other: Row) -> Row:
    def percent(below: float | None, above: float | None) -> float | None:
        left = ratio(below, above)
        return None if left is None else 100 * (1 - left)

    return Row(
        figure=other.figure,
        where=other.where,
        quantity=CUT,
        system=other.system,
        paper=percent(other.paper, basic.paper),
        ours=percent(other.ours, basic.ours),
        kind=Kind.CALIBRATED if Kind.CALIBRATED == basic.kind == other.kind else Kind.PREDICTED,
    )


def _fig13_case(scope: Scope, model: str, nodes: tuple[int, int], system: str) -> FlowCase:
    return scope.offline(model, "48K", system, _FIG13_AGENTS, nodes=nodes)


def _fig13_cases(scope: Scope) -> list[FlowCase]:
    return [_fig13_case(scope, model, nodes, s) for model, nodes, _ in _FIG13_CELLS for s in _BALANCE_SYSTEMS]


def _fig13_rows(scope: Scope, results: Results) -> list[Row]:
    rows = []
    for model, nodes, where in _FIG13_CELLS:
        for system in _BALANCE_SYSTEMS:
            series = results(_fig13_case(scope, model, nodes, system)).snic_balance
            paper = reference.FIGURE_13[system] if where == _FIG13_COMPARED else (None, None, None)
            low, high = np.percentile(series, (1, 99)) if len(series) else (None, None)
            for quantity, theirs, ours in (
                (SNIC_MEAN, paper[0], float(series.mean()) if len(series) else None),
                ("SNIC max/avg, 1st percentile (paper: smallest)", paper[1], low),
                ("SNIC max/avg, 99th percentile (paper: largest)", paper[2], high),
            ):
                rows.append(
                    Row(
                        figure="fig13",
                        where=f"{where} 48K {_FIG13_AGENTS}",
                        quantity=quantity,
                        system=system_title(system),
                        paper=theirs,
                        ours=None if ours is None else float(ours),
                    )
                )
            if where == _FIG13_COMPARED:
                rows += _series_rows("fig13", f"{where} 48K", "SNIC max/avg", system, series)
    return rows


def _fig14_cases(scope: Scope) -> list[FlowCase]:
    return [_ablation_case(scope, system, _FIG14_AGENTS) for system in _BALANCE_SYSTEMS]


def _fig14_rows(scope: Scope, results: Results) -> list[Row]:
    rows = []
    for system in _BALANCE_SYSTEMS:
        summary = results(_ablation_case(scope, system, _FIG14_AGENTS))
        early, late = _early_and_late(summary)
        given = reference.FIGURE_14_EARLY if system == "dualpath" else None
        for quantity, paper, ours in (
            ("attention time max/avg, first 5 %", given, early),
            ("attention time max/avg, later", None, late),
        ):
            rows.append(
                Row(
                    figure="fig14",
                    where=f"660B 64K {_FIG14_AGENTS}",
                    quantity=quantity,
                    system=system_title(system),
                    paper=paper,
                    ours=ours,
                )
            )
        rows += _series_rows("fig14", "660B 64K", "attention time max/avg", system, summary.attention_balance)
    return rows


def _early_and_late(summary: CaseSummary) -> tuple[float | None, float | None]:
    series, at = summary.attention_balance, summary.attention_early
    return (
        float(series[:at].mean()) if at else None,
        float(series[at:].mean()) if at < len(series) else None,
    )


def _series_rows(figure: str, where: str, quantity: str, system: str, series: npt.NDArray[np.float64]) -> list[Row]:
    """A series as at most ``_SERIES_POINTS`` means of neighbours, by percent of the run; for the plot and the file."""
    parts = [part for part in np.array_split(series, min(_SERIES_POINTS, max(len(series), 1))) if len(part)]
    return [
        Row(
            figure=figure,
            where=f"{where}, {100 * (i + 0.5) / len(parts):.1f} % of the run",
            quantity=quantity,
            system=system_title(system),
            ours=float(part.mean()),
            panel=f"{where}: {quantity}",
            x=100 * (i + 0.5) / len(parts),
            listed=False,
        )
        for i, part in enumerate(parts)
    ]


FIG12 = Figure(
    name="fig12", title="Parts of the TTFT (660B online); ablation (660B 64K)", x_label="APS or agents",
    cases=_fig12_cases, rows=_fig12_rows,
)  # fmt: skip
FIG13 = Figure(
    name="fig13", title="Balance of SNICs: round robin and scheduled", x_label="% of the run, tail dropped",
    cases=_fig13_cases, rows=_fig13_rows,
)  # fmt: skip
FIG14 = Figure(
    name="fig14", title="Balance of attention time between prefill engines", x_label="% of the run, tail dropped",
    cases=_fig14_cases, rows=_fig14_rows,
)  # fmt: skip
