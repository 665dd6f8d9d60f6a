"""Tool calls between the rounds, which the paper's replay leaves out (section 8.2).

The paper argues: when tools stretch an agent's life r-fold, capacity in agents per second is r-fold too, hence the
working set r^2-fold. Here pauses between rounds stretch lives, and capacity is searched for under the same SLO. What
is argued was not measured, so it is in the names of the rows and not among the paper's values.
"""

from __future__ import annotations

from testbed.analysis.workingset import GB, working_set_bytes
from testbed.flowsim.run import FlowCase
from testbed.models.model import model_named
from testbed.paper.cases import ONLINE_TRACE, Scope, model_title, system_title
from testbed.paper.figures.figure import Figure, Results, ratio
from testbed.paper.figures.serving import CAPACITY
from testbed.paper.online import aps_grid, capacity
from testbed.paper.rows import Row
from testbed.workload.table2 import profile_named

LIFE = "life of an agent at capacity, s"
WORKING_SET = "working set at capacity, GB"

_MODEL, _SYSTEM = "ds-660b", "dualpath"
_STRETCH = (1, 2, 4)
_LIFE_S = 1_100.0
"""Of a job at capacity without tool calls, about; what comes out is a row."""
_FIRST_APS = (0.4, 0.45, 0.5)
_HIGHEST_APS = 2.0


def _case(scope: Scope, r: int, aps: float) -> FlowCase:
    pause_s = (r - 1) * _LIFE_S / (profile_named(ONLINE_TRACE).turns - 1)
    return scope.online(_MODEL, _SYSTEM, aps, tool_delay_s=pause_s)


def _cases(scope: Scope) -> list[FlowCase]:
    return [_case(scope, r, aps) for r in _STRETCH for aps in _FIRST_APS]


def _rows(scope: Scope, results: Results) -> list[Row]:
    rows = []
    base: dict[str, float | None] = {}
    for r in _STRETCH:
        values = _at_capacity(scope, results, r)
        base = base or values
        argued = {LIFE: r, CAPACITY: r, WORKING_SET: r * r}
        for quantity, value in values.items():
            rows.append(_row(r, quantity, value, panel=quantity))
            if r > 1:
                rows.append(_row(r, over_none(quantity, argued[quantity]), ratio(value, base[quantity])))
    return rows


def _at_capacity(scope: Scope, results: Results, r: int) -> dict[str, float | None]:
    def within(aps: float) -> bool:
        return results(_case(scope, r, aps)).within_slo

    known = {aps: within(aps) for aps in _FIRST_APS}
    most = capacity(within, aps_grid(scope.aps_step, _HIGHEST_APS), known)
    if not most:
        return {LIFE: None, CAPACITY: most, WORKING_SET: None}
    life_s = results(_case(scope, r, most)).job_s
    tokens, size = profile_named(ONLINE_TRACE).total_tokens, model_named(_MODEL).kv_bytes_per_token
    return {LIFE: life_s, CAPACITY: most, WORKING_SET: working_set_bytes(most, life_s, tokens, size) / GB}


def over_none(quantity: str, argued: int) -> str:
    """Name of a quantity over what it is without tool calls."""
    return f"{quantity.removesuffix(', s').removesuffix(', GB')}, over r = 1 (argued: {argued})"


def _row(r: int, quantity: str, ours: float | None, panel: str = "") -> Row:
    return Row(
        figure="tools", where=f"{model_title(_MODEL)} r = {r}", quantity=quantity, system=system_title(_SYSTEM),
        ours=ours, panel=panel, x=r,
    )  # fmt: skip


TOOLS = Figure(
    name="tools", title="Tool calls that stretch lives r-fold: capacity and working set (section 8.2)", x_label="r",
    cases=_cases, rows=_rows,
)  # fmt: skip
