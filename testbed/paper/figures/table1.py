"""Table 1: GB of KV to load per PFLOP of prefill, from public configurations (section 3). Nothing is simulated."""

from __future__ import annotations

from testbed.analysis.ratio import RATIO_MODELS, TABLE_CONTEXTS, TRACE_CONTEXT
from testbed.flowsim.run import FlowCase
from testbed.paper.cases import Scope
from testbed.paper.figures.figure import Figure, Results
from testbed.paper.rows import Row

RATIO = "GB/PFLOP"


def _cases(scope: Scope) -> list[FlowCase]:
    return []


def _rows(scope: Scope, results: Results) -> list[Row]:
    return [
        Row(
            figure="table1",
            where=f"{model.title}, context {context:,}",
            quantity=RATIO,
            system="",
            paper=model.paper_ratio(context),
            ours=model.ratio(context),
            panel=f"{model.title}: {RATIO}",
            x=context,
        )
        for model in RATIO_MODELS.values()
        for context in sorted((*TABLE_CONTEXTS, TRACE_CONTEXT))
    ]


TABLE1 = Figure(
    name="table1", title="Cache-compute ratio, 429 tokens appended", x_label="context, tokens", cases=_cases, rows=_rows
)
