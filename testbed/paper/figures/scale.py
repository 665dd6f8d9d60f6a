"""Figure 15 and Table 3: 1,152 GPUs beside 48 (section 7.6). Traces: ``SCALE_TRACE`` and ``ONLINE_TRACE``."""

from __future__ import annotations

from testbed.flowsim.run import FlowCase
from testbed.paper import reference
from testbed.paper.cases import SCALE_TRACE, Scope, system_title
from testbed.paper.figures.figure import Figure, Results, jct, ratio
from testbed.paper.figures.offline import JCT, kind_of
from testbed.paper.rows import Row
from testbed.paper.summary import BIN_S, CaseSummary

OFFLINE_FLATNESS = "JCT, 24x the size over 1x"
ONLINE_FLATNESS = "22x the size over 1x"

_LARGE = (48, 96, 49_152)
_SYSTEM = "dualpath"
_STEP_S = 100.0
_HALF_WINDOW_S = 50.0


def _offline_case(scope: Scope, prefill: int, decode: int, agents: int) -> FlowCase:
    return scope.offline("ds-660b", SCALE_TRACE, _SYSTEM, agents, nodes=(prefill, decode))


def _online_case(scope: Scope, prefill: int, decode: int, aps: float) -> FlowCase:
    return scope.online("ds-660b", _SYSTEM, aps, nodes=(prefill, decode))


def _fig15_cases(scope: Scope) -> list[FlowCase]:
    return [_offline_case(scope, *_LARGE)]


def _fig15_rows(scope: Scope, results: Results) -> list[Row]:
    """The paper's points, and ours every 100 s beside them; windows of 100 s around a time, cut at the start."""
    summary = results(_offline_case(scope, *_LARGE))
    rows = []
    for quantity, points in (
        ("prompt tokens/s", reference.FIGURE_15_PROMPT_TPS),
        ("TTFT, s", reference.FIGURE_15_TTFT_S),
        ("agents left", reference.FIGURE_15_AGENTS),
    ):
        steps = {i * _STEP_S for i in range(int(summary.jct_s / _STEP_S) + 1)}
        for at_s in sorted(steps | points.keys()):
            rows.append(
                Row(
                    figure="fig15",
                    where=f"48P96D {at_s:.0f} s",
                    quantity=quantity,
                    system=system_title(_SYSTEM),
                    paper=points.get(at_s),
                    ours=_value(summary, quantity, at_s),
                    panel=quantity,
                    x=at_s,
                    listed=at_s in points,
                )
            )
    smoothed = [summary.mean_ttft_s(*_around(i * BIN_S)) for i in range(len(summary.ttft_by_bin_s))]
    rows.append(
        Row(
            figure="fig15",
            where="48P96D",
            quantity="largest TTFT, s",
            system=system_title(_SYSTEM),
            paper=max(reference.FIGURE_15_TTFT_S.values()),
            ours=max((ttft for ttft in smoothed if ttft is not None), default=None),
        )
    )
    return rows


def _around(at_s: float) -> tuple[float, float]:
    return max(0.0, at_s - _HALF_WINDOW_S), at_s + _HALF_WINDOW_S


def _value(summary: CaseSummary, quantity: str, at_s: float) -> float | None:
    if quantity == "agents left":
        return summary.agents_at(at_s)
    if quantity == "TTFT, s":
        return summary.mean_ttft_s(*_around(at_s))
    return summary.prompt_tps(*_around(at_s))


def _table3_cases(scope: Scope) -> list[FlowCase]:
    return [_offline_case(scope, *size) for size in reference.TABLE_3_OFFLINE_JCT_S] + [
        _online_case(scope, *size) for size in reference.TABLE_3_ONLINE
    ]


def _table3_rows(scope: Scope, results: Results) -> list[Row]:
    rows: list[Row] = []
    for (prefill, decode, agents), paper in reference.TABLE_3_OFFLINE_JCT_S.items():
        rows.append(
            Row(
                figure="table3",
                where=f"offline {prefill}P{decode}D {agents} agents",
                quantity=JCT,
                system=system_title(_SYSTEM),
                paper=paper,
                ours=jct(results(_offline_case(scope, prefill, decode, agents))),
                kind=kind_of("ds-660b", SCALE_TRACE, agents, _SYSTEM),
            )
        )
    small, large = rows
    rows.append(_flatness("offline", OFFLINE_FLATNESS, small, large))
    online = []
    for (prefill, decode, aps), papers in reference.TABLE_3_ONLINE.items():
        summary = results(_online_case(scope, prefill, decode, aps))
        ours = (summary.ttft_s, summary.ttst_s, summary.tpot_s) if summary.ttft_s > 0 else (None,) * 3
        for quantity, theirs, value in zip(("TTFT, s", "TTST, s", "TPOT, s"), papers, ours, strict=True):
            online.append(
                Row(
                    figure="table3", where=f"online {prefill}P{decode}D {aps:g} APS", quantity=quantity,
                    system=system_title(_SYSTEM), paper=theirs, ours=value,
                )
            )  # fmt: skip
    half = len(online) // 2
    flat = [
        _flatness("online", f"{a.quantity.split(',')[0]}, {ONLINE_FLATNESS}", a, b)
        for a, b in zip(online[:half], online[half:], strict=True)
    ]
    return [*rows, *online, *flat]


def _flatness(where: str, quantity: str, small: Row, large: Row) -> Row:
    return Row(
        figure="table3",
        where=where,
        quantity=quantity,
        system=small.system,
        paper=ratio(large.paper, small.paper),
        ours=ratio(large.ours, small.ours),
    )


FIG15 = Figure(
    name="fig15", title="48P96D, 49,152 agents over time", x_label="seconds", cases=_fig15_cases, rows=_fig15_rows
)
TABLE3 = Figure(name="table3", title="24 times the size", x_label="", cases=_table3_cases, rows=_table3_rows)
