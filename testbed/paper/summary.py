"""What is kept of one simulation: means, a coarse time series, and how evenly SNICs and attention were used.

A run of 48K agents has five million requests; this is a few thousand numbers, so it is made where the run was made.

=========  ==========================================================================================
TTFT       first token minus submission; its parts (Figure 12): until scheduled (Sch), until buffers are allocated
           (Alloc), until the hit is read (Read), until the first token (Prefill)
TTST       second token minus first
TPOT       (last token minus second) / (tokens - 2), rounds of at least three tokens
job        first submission to last completion of an agent
=========  ==========================================================================================

Offline means are over all requests, online means over what the stop rule measures. Max/avg is taken per window, and the
tail is dropped: the windows after nine tenths of all bytes (or attention time) are done, when few agents are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from testbed.flowsim.run import FlowCase, FlowResult
from testbed.paper.cases import stretch
from testbed.paper.online import Stop, stop_rule, within_slo

Floats = npt.NDArray[np.float64]

BIN_S = 10.0
TAIL = 0.1
SETTLE_S = 30.0
"""Before an online horizon: a request whose first token came later may not have completed, and would be missing."""

_SHORTEST_TPOT = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaseSummary:
    """One simulation in paper seconds.

    ``ttft_parts_s``: means of Sch, Alloc, Read, Prefill. ``job_s``: mean over agents that started in the first half.
    ``ttft_by_bin_s`` (by first token; NaN where none came), ``prompt_tokens_by_bin`` and ``agents_by_bin`` (in the
    system when the bin begins): one value per ``BIN_S`` seconds. ``snic_balance`` and ``attention_balance``: max/avg
    per window of ``window_s`` seconds, idle windows left out, tail dropped; ``attention_early`` is how many of the
    latter lie in the first 5 % of the run.
    """

    case: FlowCase
    jct_s: float
    requests: int
    finished: bool
    stop: Stop | None
    ttft_s: float
    ttst_s: float
    tpot_s: float
    ttft_parts_s: tuple[float, float, float, float]
    job_s: float
    ttft_by_bin_s: Floats
    prompt_tokens_by_bin: Floats
    agents_by_bin: Floats
    window_s: float
    snic_balance: Floats
    attention_balance: Floats
    attention_early: int

    @property
    def ttft_shares(self) -> tuple[float, ...]:
        """Parts of the TTFT in percent; all 0 without requests."""
        total = sum(self.ttft_parts_s)
        return tuple(100 * part / total if total > 0 else 0.0 for part in self.ttft_parts_s)

    @property
    def within_slo(self) -> bool:
        """Whether an online run kept the SLO."""
        return self.stop is not None and within_slo(self.stop.outcome, self.ttft_s, self.tpot_s)

    @property
    def outcome(self) -> str:
        """How it ended, in a word."""
        if self.stop is not None:
            return self.stop.outcome.value
        return "finished" if self.finished else "not finished"

    def mean_ttft_s(self, from_s: float, until_s: float) -> float | None:
        """Mean over bins of an interval; None without a first token there."""
        part = self.ttft_by_bin_s[_bin(from_s) : _bin(until_s)]
        return float(np.nanmean(part)) if np.isfinite(part).any() else None

    def prompt_tps(self, from_s: float, until_s: float) -> float:
        """Prompt tokens per second of an interval."""
        return float(self.prompt_tokens_by_bin[_bin(from_s) : _bin(until_s)].sum() / (until_s - from_s))

    def agents_at(self, at_s: float) -> float:
        """Agents in the system."""
        index = _bin(at_s)
        return float(self.agents_by_bin[index]) if index < len(self.agents_by_bin) else 0.0


def blank(case: FlowCase) -> CaseSummary:
    """Of a simulation that gave nothing."""
    none = np.zeros(0)
    return CaseSummary(
        case=case,
        jct_s=0.0,
        requests=0,
        finished=False,
        stop=None,
        ttft_s=0.0,
        ttst_s=0.0,
        tpot_s=0.0,
        ttft_parts_s=(0.0, 0.0, 0.0, 0.0),
        job_s=0.0,
        ttft_by_bin_s=none,
        prompt_tokens_by_bin=none,
        agents_by_bin=none,
        window_s=1.0,
        snic_balance=none,
        attention_balance=none,
        attention_early=0,
    )


def reduce(result: FlowResult) -> CaseSummary:
    """Summarise a simulation."""
    case = result.case
    ttft = result.first_token_s - result.submitted_s
    end_s = case.horizon_s if case.horizon_s else result.jct_s
    stop = None
    if case.aps:
        longer = stretch(case.trace, case.option("tool_delay_s", 0.0))
        stop = stop_rule(result.first_token_s, ttft, max(0.0, end_s - SETTLE_S), longer)
    measured = np.ones(len(ttft), dtype=bool)
    if stop is not None:
        measured = (result.first_token_s >= stop.from_s) & (result.first_token_s < stop.until_s)
    began, ended = _jobs(result, end_s)
    times = np.arange(0.0, max(end_s, BIN_S), BIN_S)
    bins = (result.first_token_s / BIN_S).astype(np.int64)
    count = np.bincount(bins, minlength=len(times))
    with np.errstate(invalid="ignore", divide="ignore"):
        ttft_by_bin = np.bincount(bins, weights=ttft, minlength=len(times)) / count
    prompts = np.bincount(bins, weights=result.prompt_tokens.astype(np.float64), minlength=len(times))
    attention_balance, kept = balance(result.attention_s)
    early = round(0.05 * end_s / result.window_s)
    return CaseSummary(
        case=case,
        jct_s=result.jct_s,
        requests=result.requests,
        finished=result.finished,
        stop=stop,
        ttft_s=_mean(ttft[measured]),
        ttst_s=_mean((result.second_token_s - result.first_token_s)[measured & (result.generate_tokens > 1)]),
        tpot_s=_tpot(result, measured),
        ttft_parts_s=(
            _mean((result.scheduled_s - result.submitted_s)[measured]),
            _mean((result.allocated_s - result.scheduled_s)[measured]),
            _mean((result.read_s - result.allocated_s)[measured]),
            _mean((result.first_token_s - result.read_s)[measured]),
        ),
        job_s=_mean((ended - began)[began <= end_s / 2]),
        ttft_by_bin_s=ttft_by_bin,
        prompt_tokens_by_bin=prompts.astype(np.float64),
        agents_by_bin=_in_system(began, ended, times),
        window_s=result.window_s,
        snic_balance=balance(result.snic_bytes)[0],
        attention_balance=attention_balance,
        attention_early=int(np.searchsorted(kept, early)),
    )


def balance(used: npt.NDArray[np.generic]) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Max over mean of each window, and which windows these are: idle ones are left out, the tail is dropped.

    Args:
        used: [windows, users], what each used in each window.
    """
    amounts = np.asarray(used, dtype=np.float64)
    total = amounts.sum(axis=1)
    before = np.cumsum(total) - total
    kept = np.flatnonzero((total > 0) & (before < (1 - TAIL) * total.sum()))
    return amounts[kept].max(axis=1) / amounts[kept].mean(axis=1), kept


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _tpot(result: FlowResult, measured: npt.NDArray[np.bool_]) -> float:
    long = measured & (result.generate_tokens >= _SHORTEST_TPOT)
    gaps = (result.last_token_s - result.second_token_s)[long]
    return _mean(gaps / (result.generate_tokens[long] - 2))


def _jobs(result: FlowResult, end_s: float) -> tuple[Floats, Floats]:
    """When each agent that was served began and ended.

    An agent's next round follows its last at once, or after a tool call. One that completed a round shortly before the
    horizon is therefore still there: it ends with the horizon, and its job is longer than that.
    """
    if not len(result.agent):
        return np.zeros(0), np.zeros(0)
    agents = int(result.agent.max()) + 1
    began, ended = np.full(agents, np.inf), np.full(agents, -np.inf)
    np.minimum.at(began, result.agent, result.submitted_s)
    np.maximum.at(ended, result.agent, result.completed_s)
    served = np.isfinite(began)
    began, ended = began[served], ended[served]
    if result.case.horizon_s:
        still = end_s - 2 * SETTLE_S - result.case.option("tool_delay_s", 0.0)
        ended = np.where(ended > still, end_s, ended)
    return began, ended


def _in_system(began: Floats, ended: Floats, times: Floats) -> Floats:
    came = np.searchsorted(np.sort(began), times, side="right")
    left = np.searchsorted(np.sort(ended), times, side="right")
    return np.asarray(came - left, dtype=np.float64)


def _bin(at_s: float) -> int:
    return max(0, int(at_s / BIN_S))
