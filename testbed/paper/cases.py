"""The simulations that the figures need, in the paper's units (section 7.2, A.2).

Figures share cells, so a cell must always be described the same way: everything that builds a ``FlowCase`` is here.

With ``quick`` a tenth of the agents run on the same cluster. Their arrivals keep the rate and stop after a tenth of the
time. Load per SNIC is then a tenth, so nothing of it compares with the paper; it shows that the whole works.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from testbed.flowsim.run import FlowCase
from testbed.models.model import model_named
from testbed.paper.online import WARM_UP_S
from testbed.workload.table2 import profile_named

ONLINE_TRACE = "64K"
"""The paper does not say. Basic is stable up to 0.20 APS on 660B and 0.3 on 27B. Offline, where its SNICs are as busy,
it completes 0.203 and 0.26 agents/s of the 64K trace, 0.37 and 0.51 of 48K: only 64K saturates where the paper does."""

SCALE_TRACE = "48K"
"""Of Table 3 offline and Figure 15: Figure 7's 660B/48K/2,048 takes 3,140 s, Table 3's 2K agents 3,167 s."""

ONLINE_HORIZON_S = 5400.0
"""A job of the 64K trace takes about 1,200 s, the stop rule compares over 1,800 s: the rest is to become steady."""

MODEL_TITLES = {"ds-660b": "660B", "ds-27b": "27B", "qwen-32b": "Qwen 32B"}
SYSTEM_TITLES = {
    "oracle": "Oracle", "dualpath": "DualPath", "dual-path-rr": "+ dual path", "layerwise": "+ layerwise",
    "basic": "Basic", "sgl-mc": "SGL(MC)",
}  # fmt: skip

_QUICK = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How much is run. ``aps_step``: resolution of the capacity search, agents/s (the paper's grid is 0.05)."""

    quick: bool = False
    aps_step: float = 0.05
    seed: int = 0

    def offline(
        self,
        model: str,
        trace: str,
        system: str,
        agents: int,
        *,
        nodes: tuple[int, int] | None = None,
        append_scale: float = 1.0,
        generate_scale: float = 1.0,
    ) -> FlowCase:
        """All agents start together. ``nodes``: prefill and decode nodes; default: the model's of A.2."""
        prefill, decode = nodes or default_nodes(model)
        return FlowCase(
            model=model,
            trace=trace,
            system=system,
            prefill_nodes=prefill,
            decode_nodes=decode,
            agents=max(1, round(agents / _QUICK)) if self.quick else agents,
            seed=self.seed,
            append_scale=append_scale,
            generate_scale=generate_scale,
        )

    def online(
        self,
        model: str,
        system: str,
        aps: float,
        *,
        nodes: tuple[int, int] | None = None,
        tool_delay_s: float = 0.0,
    ) -> FlowCase:
        """Poisson arrivals at ``aps`` agents/s until the horizon, which tool calls put off as they stretch a job."""
        prefill, decode = nodes or default_nodes(model)
        horizon_s = ONLINE_HORIZON_S * stretch(ONLINE_TRACE, tool_delay_s)
        horizon_s = horizon_s / _QUICK if self.quick else horizon_s
        return FlowCase(
            model=model,
            trace=ONLINE_TRACE,
            system=system,
            prefill_nodes=prefill,
            decode_nodes=decode,
            agents=most_arrivals(aps * horizon_s),
            aps=aps,
            seed=self.seed,
            horizon_s=horizon_s,
            options=(("tool_delay_s", tool_delay_s),) if tool_delay_s else (),
        )


def default_nodes(model: str) -> tuple[int, int]:
    """Prefill and decode nodes of the model's experiments (A.2).

    Raises:
        ConfigError: no such model.
    """
    spec = model_named(model)
    return spec.prefill_nodes, spec.decode_nodes


def stretch(trace: str, tool_delay_s: float) -> float:
    """How many times as long an average agent lives that waits so long for its tools between turns, about."""
    return 1 + (profile_named(trace).turns - 1) * tool_delay_s / WARM_UP_S


def most_arrivals(expected: float) -> int:
    """A number of Poisson arrivals that is practically never exceeded: 5 standard deviations above the mean."""
    return math.ceil(expected + 5 * math.sqrt(expected) + 10)


def expected_requests(case: FlowCase) -> float:
    """About how many requests a case simulates; what it costs, to run the longest first."""
    agents = case.agents if case.aps == 0 else case.aps * case.horizon_s
    return agents * profile_named(case.trace).turns / math.sqrt(case.append_scale * case.generate_scale)


def model_title(model: str) -> str:
    """As the figures call it: "660B"."""
    return MODEL_TITLES[model]


def system_title(system: str) -> str:
    """As the figures call it: "DualPath"."""
    return SYSTEM_TITLES[system]


def describe(case: FlowCase) -> str:
    """One case in a few words, for progress and errors."""
    load = f"{case.aps:g} APS" if case.aps else f"{case.agents:,} agents"
    scales = "".join(
        f", {name} x{value:g}"
        for name, value in (("append", case.append_scale), ("generate", case.generate_scale))
        if value != 1.0
    )
    scales += "".join(f", {name} {value:g}" for name, value in case.options)
    return (
        f"{model_title(case.model)} {case.trace} {system_title(case.system)} "
        f"{case.prefill_nodes}P{case.decode_nodes}D {load}{scales}"
    )
