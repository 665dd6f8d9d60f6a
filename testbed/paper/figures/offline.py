"""Figures 7, 8 and 9: JCT when all agents start together, and what DualPath gains over Basic (section 7.3)."""

from __future__ import annotations

from itertools import combinations, pairwise

from testbed.flowsim.run import FlowCase
from testbed.paper import reference
from testbed.paper.cases import Scope, model_title, system_title
from testbed.paper.figures.figure import Figure, Results, jct, mean, ratio
from testbed.paper.rows import Kind, Row

JCT = "JCT, s"
GAIN = "speed-up"
MEAN_ERROR = "speed-up, mean absolute error"
ORDER = "pairs of systems in the paper's order"
EQUAL = "JCT max/min of equal SNICs"
GAIN_SYSTEM = "Basic / DualPath"

TRACES = ("32K", "48K", "64K")
_SYSTEMS = ("oracle", "dualpath", "basic")
_CALIBRATED_CELL = ("ds-660b", "64K", 2048)
_CALIBRATED_BASIC = ("ds-27b", "64K", 2048)
_SCALES = (0.5, 1.0, 2.0)
_FIG9_CELL = ("ds-660b", "64K", 1024)
_NODES = ((1, 1), (2, 1), (1, 2))


def kind_of(model: str, trace: str, agents: int, system: str) -> Kind:
    """Whether free parameters were fitted on a cell in its default topology."""
    cell = (model, trace, agents)
    fitted = cell == _CALIBRATED_CELL or (cell == _CALIBRATED_BASIC and system == "basic")
    return Kind.CALIBRATED if fitted else Kind.PREDICTED


def _fig7_cells() -> list[tuple[str, str, int, str, float | None]]:
    """(model, trace, agents, system, the paper's JCT); SGL(MC) only where the paper has it."""
    cells = []
    for model in ("ds-660b", "ds-27b", "qwen-32b"):
        for trace in TRACES:
            given = reference.FIGURE_7.get((model, trace), {})
            for i, agents in enumerate(reference.FIGURE_7_AGENTS):
                for system in (*_SYSTEMS, "sgl-mc"):
                    paper = given[system][i] if system in given else None
                    if system != "sgl-mc" or paper is not None:
                        cells.append((model, trace, agents, system, paper))
    return cells


def _fig7_cases(scope: Scope) -> list[FlowCase]:
    return [scope.offline(model, trace, system, agents) for model, trace, agents, system, _ in _fig7_cells()]


def _fig7_rows(scope: Scope, results: Results) -> list[Row]:
    rows = []
    cells: dict[tuple[str, str, int], dict[str, Row]] = {}
    for model, trace, agents, system, paper in _fig7_cells():
        row = Row(
            figure="fig7",
            where=f"{model_title(model)} {trace} {agents}",
            quantity=JCT,
            system=system_title(system),
            paper=paper,
            ours=jct(results(scope.offline(model, trace, system, agents))),
            kind=kind_of(model, trace, agents, system),
            panel=f"{model_title(model)} {trace}: {JCT}",
            x=agents,
        )
        rows.append(row)
        cells.setdefault((model, trace, agents), {})[system] = row
    gains = {cell: _gain(by_system) for cell, by_system in cells.items()}
    rows += gains.values()
    rows += [order for by_system in cells.values() if (order := _order(by_system)) is not None]
    for models in (("ds-660b",), ("ds-27b",), ("ds-660b", "ds-27b")):
        rows.append(_mean_error(models, [gain for (model, _, _), gain in gains.items() if model in models]))
    return rows


def _gain(cell: dict[str, Row]) -> Row:
    basic, dual = cell["basic"], cell["dualpath"]
    return Row(
        figure=basic.figure,
        where=basic.where,
        quantity=GAIN,
        system=GAIN_SYSTEM,
        paper=ratio(basic.paper, dual.paper),
        ours=ratio(basic.ours, dual.ours),
        kind=Kind.CALIBRATED if Kind.CALIBRATED == basic.kind == dual.kind else Kind.PREDICTED,
    )


def _order(cell: dict[str, Row]) -> Row | None:
    """How many pairs that the paper tells apart are in its order here."""
    apart = right = 0
    for a, b in combinations(cell.values(), 2):
        if a.paper is None or b.paper is None:
            continue
        if max(a.paper, b.paper) <= min(a.paper, b.paper) * (1 + reference.FIGURE_7_NOISE):
            continue
        apart += 1
        right += a.ours is not None and b.ours is not None and (a.ours < b.ours) == (a.paper < b.paper)
    if not apart:
        return None
    first = cell["basic"]
    return Row(figure=first.figure, where=first.where, quantity=ORDER, system="all", paper=apart, ours=right)


def _mean_error(models: tuple[str, ...], gains: list[Row]) -> Row:
    errors = [None if gain.rel_error is None else abs(gain.rel_error) for gain in gains]
    return Row(
        figure="fig7",
        where=" and ".join(map(model_title, models)),
        quantity=MEAN_ERROR,
        system=GAIN_SYSTEM,
        ours=mean(errors),
    )


def _fig8_cases(scope: Scope) -> list[FlowCase]:
    return [
        scope.offline("ds-27b", trace, system, agents, nodes=nodes)
        for trace in TRACES
        for nodes in _NODES
        for agents in reference.FIGURE_8_AGENTS
        for system in ("basic", "dualpath")
    ]


def _fig8_rows(scope: Scope, results: Results) -> list[Row]:
    rows: list[Row] = []
    gains: dict[tuple[str, int, int, int], Row] = {}
    times: dict[tuple[str, int, int, int], Row] = {}  # of the 64K trace, by (system, P, D, agents)
    for trace in TRACES:
        for prefill, decode in _NODES:
            for i, agents in enumerate(reference.FIGURE_8_AGENTS):
                cell = {}
                for system in ("basic", "dualpath"):
                    row = _fig8_row(scope, results, trace, (prefill, decode), i, system)
                    cell[system] = row
                    if trace == "64K":
                        times[system, prefill, decode, agents] = row
                gains[trace, prefill, decode, agents] = _gain(cell)
                rows += cell.values()
    rows += gains.values()
    rows += [_equal(snics, times[*a, n], times[*b, n], n) for snics, a, b in reference.FIGURE_8_EQUAL_SNICS
             for n in reference.FIGURE_8_AGENTS]  # fmt: skip
    ours = [gain.ours for gain in gains.values()]
    there = [gain for gain in ours if gain is not None]
    rows.append(_fig8_total("mean speed-up", reference.FIGURE_8_MEAN_GAIN, mean(ours)))
    rows.append(_fig8_total("largest speed-up", reference.FIGURE_8_MAX_GAIN, max(there, default=None)))
    return rows


def _fig8_row(scope: Scope, results: Results, trace: str, nodes: tuple[int, int], i: int, system: str) -> Row:
    agents = reference.FIGURE_8_AGENTS[i]
    topology = f"{nodes[0]}P{nodes[1]}D"
    return Row(
        figure="fig8",
        where=f"27B {trace} {topology} {agents}",
        quantity=JCT,
        system=system_title(system),
        paper=reference.FIGURE_8[system, *nodes][i] if trace == "64K" else None,
        ours=jct(results(scope.offline("ds-27b", trace, system, agents, nodes=nodes))),
        kind=kind_of("ds-27b", trace, agents, system) if nodes == (1, 1) else Kind.PREDICTED,
        panel=f"27B {trace} {topology}: {JCT}",
        x=agents,
    )


def _equal(snics: int, a: Row, b: Row, agents: int) -> Row:
    def spread(x: float | None, y: float | None) -> float | None:
        return None if x is None or y is None else ratio(max(x, y), min(x, y))

    return Row(
        figure="fig8",
        where=f"27B 64K {agents} {snics} SNIC{'s' if snics > 1 else ''}",
        quantity=EQUAL,
        system=f"{_setting(a)}, {_setting(b)}",
        paper=spread(a.paper, b.paper),
        ours=spread(a.ours, b.ours),
    )


def _setting(row: Row) -> str:
    return f"{row.system} {row.where.split()[2]}"


def _fig8_total(quantity: str, paper: float, ours: float | None) -> Row:
    return Row(figure="fig8", where="27B", quantity=quantity, system=GAIN_SYSTEM, paper=paper, ours=ours)


def _fig9_scales() -> list[tuple[str, float, float]]:
    """(what varies, append scale, generate scale)."""
    return [("append", scale, 1.0) for scale in _SCALES] + [("generate", 1.0, scale) for scale in _SCALES]


def _fig9_case(scope: Scope, system: str, append: float, generate: float) -> FlowCase:
    model, trace, agents = _FIG9_CELL
    return scope.offline(model, trace, system, agents, append_scale=append, generate_scale=generate)


def _fig9_cases(scope: Scope) -> list[FlowCase]:
    return [_fig9_case(scope, system, *scales) for _, *scales in _fig9_scales() for system in ("basic", "dualpath")]


def _fig9_rows(scope: Scope, results: Results) -> list[Row]:
    rows = []
    gains: dict[str, list[float | None]] = {"append": [], "generate": []}
    where = "660B 64K 1024"
    for varies, append, generate in _fig9_scales():
        scale = append * generate
        cell = {}
        for system in ("basic", "dualpath"):
            cell[system] = Row(
                figure="fig9",
                where=f"{where} {varies} x{scale:g}",
                quantity=JCT,
                system=system_title(system),
                ours=jct(results(_fig9_case(scope, system, append, generate))),
                panel=f"{varies} scale: {JCT}",
                x=scale,
            )
        gain = _gain(cell)
        gains[varies].append(gain.ours)
        rows += [*cell.values(), gain]
    append_gains = [gain for gain in gains["append"] if gain is not None]
    low, high = reference.FIGURE_9_APPEND_GAIN
    generate_gains = gains["generate"]
    falls = [a is not None and b is not None and a > b for a, b in pairwise(generate_gains)]
    for quantity, paper, ours in (
        ("smallest speed-up over append scales", low, min(append_gains, default=None)),
        ("largest speed-up over append scales", high, max(append_gains, default=None)),
        ("steps of generation length at which the speed-up falls", len(falls), sum(falls)),
    ):
        rows.append(Row(figure="fig9", where=where, quantity=quantity, system=GAIN_SYSTEM, paper=paper, ours=ours))
    return rows


FIG7 = Figure(
    name="fig7", title="Offline JCT by model, trace and agents", x_label="agents", cases=_fig7_cases, rows=_fig7_rows
)
FIG8 = Figure(name="fig8", title="27B with 1P1D, 2P1D and 1P2D", x_label="agents", cases=_fig8_cases, rows=_fig8_rows)
FIG9 = Figure(
    name="fig9",
    title="660B 64K, 1,024 agents: longer appends and generations",
    x_label="scale",
    cases=_fig9_cases,
    rows=_fig9_rows,
)
