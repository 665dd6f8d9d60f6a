"""A simulation that takes no time: answers of the right shape, from a formula."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from testbed.flowsim.run import FlowCase, FlowResult

SLOWNESS = {
    "oracle": 0.9, "dualpath": 1.0, "dual-path-rr": 1.15, "layerwise": 1.5, "basic": 1.8, "sgl-mc": 4.0
}  # fmt: skip
"""JCT relative to DualPath."""


def flow_result(
    case: FlowCase,
    *,
    submitted_s: npt.ArrayLike,
    parts_s: tuple[float, float, float, float] = (1.0, 2.0, 3.0, 4.0),
    ttst_s: float = 0.2,
    tpot_s: float = 0.03,
    generate: int = 12,
    agent: npt.ArrayLike | None = None,
    jct_s: float | None = None,
    finished: bool = True,
    snic_bytes: npt.ArrayLike = ((1.0, 1.0),),
    attention_s: npt.ArrayLike = ((1.0, 1.0),),
) -> FlowResult:
    """Requests that all take the same time; ``parts_s`` are Sch, Alloc, Read and Prefill."""
    submitted = np.asarray(submitted_s, dtype=np.float64)
    sched, alloc, read, prefill = np.cumsum(parts_s)
    second = submitted + prefill + ttst_s
    last = second + tpot_s * (generate - 2)
    counts = np.full(len(submitted), 100, dtype=np.int64)
    return FlowResult(
        case=case,
        jct_s=float(last.max() - submitted.min()) if jct_s is None else jct_s,
        requests=len(submitted),
        finished=finished,
        events=0,
        submitted_s=submitted,
        scheduled_s=submitted + sched,
        allocated_s=submitted + alloc,
        read_s=submitted + read,
        first_token_s=submitted + prefill,
        second_token_s=second,
        last_token_s=last,
        completed_s=last,
        prompt_tokens=counts,
        hit_tokens=counts - 10,
        append_tokens=counts // 10,
        generate_tokens=np.full(len(submitted), generate, dtype=np.int64),
        agent=np.arange(len(submitted)) if agent is None else np.asarray(agent, dtype=np.int64),
        side=np.zeros(len(submitted), dtype=np.int64),
        snic_node=("pe0", "de0"),
        window_s=1.0,
        snic_bytes=np.asarray(snic_bytes, dtype=np.float64),
        attention_s=np.asarray(attention_s, dtype=np.float64),
        utilisation={},
    )


def fake_simulate(case: FlowCase) -> FlowResult:
    """JCT by system; online, TTFT is above 4 s from a load on that depends on the system."""
    scale = SLOWNESS[case.system]
    if not case.aps:
        jct_s = scale * case.agents * case.append_scale
        return flow_result(case, submitted_s=[0.0, 1.0, 2.0], jct_s=jct_s, parts_s=(0.1, 0.2, 0.3, 0.4))
    ttft = 8.0 * case.aps * scale
    submitted = np.arange(0.0, case.horizon_s, 5.0)
    return flow_result(case, submitted_s=submitted, parts_s=(ttft / 4,) * 4, jct_s=case.horizon_s, finished=False)
