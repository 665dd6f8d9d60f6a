"""What is kept of a simulation, on results made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from testbed.flowsim.run import FlowCase
from testbed.paper.online import Outcome
from testbed.paper.summary import balance, blank, reduce
from tests.support.paper_world import flow_result

OFFLINE = FlowCase(model="ds-660b", trace="64K", system="dualpath", prefill_nodes=2, decode_nodes=4, agents=3)
ONLINE = FlowCase(
    model="ds-660b", trace="48K", system="dualpath", prefill_nodes=2, decode_nodes=4, agents=900, aps=0.2,
    horizon_s=3600.0,
)  # fmt: skip


def test_latencies_and_their_parts() -> None:
    s = reduce(flow_result(OFFLINE, submitted_s=[0.0, 0.0, 5.0]))
    assert (s.ttft_s, s.ttst_s, s.tpot_s) == pytest.approx((10.0, 0.2, 0.03))
    assert s.ttft_parts_s == pytest.approx((1.0, 2.0, 3.0, 4.0))
    assert s.ttft_shares == pytest.approx((10.0, 20.0, 30.0, 40.0))
    assert s.jct_s == pytest.approx(5.0 + 10.0 + 0.2 + 0.3) and s.stop is None and s.outcome == "finished"


def test_short_rounds_have_no_tpot() -> None:
    s = reduce(flow_result(OFFLINE, submitted_s=[0.0], generate=2))
    assert s.tpot_s == 0.0 and s.ttst_s == pytest.approx(0.2)


def test_time_series_by_first_token() -> None:
    # first tokens at 10, 15 and 35 s, 100 prompt tokens each
    s = reduce(flow_result(OFFLINE, submitted_s=[0.0, 5.0, 25.0], agent=[0, 1, 2]))
    assert s.prompt_tps(10.0, 20.0) == pytest.approx(20.0) and s.prompt_tps(20.0, 30.0) == 0.0
    assert s.mean_ttft_s(0.0, 40.0) == pytest.approx(10.0) and s.mean_ttft_s(0.0, 10.0) is None
    assert s.agents_at(0.0) == 1.0 and s.agents_at(10.0) == 2.0  # the first leaves at 10.5 s
    assert s.agents_at(20.0) == 0.0 and s.agents_at(30.0) == 1.0 and s.agents_at(1e6) == 0.0


def test_a_job_lasts_from_an_agents_first_round_to_its_last() -> None:
    s = reduce(flow_result(OFFLINE, submitted_s=[0.0, 20.0, 2.0], agent=[0, 0, 1], jct_s=31.0))
    assert s.job_s == pytest.approx((30.5 + 10.5) / 2)


def test_online_counts_what_the_stop_rule_measures() -> None:
    submitted = np.arange(0.0, 3590.0, 2.0)
    s = reduce(flow_result(ONLINE, submitted_s=submitted, parts_s=(0.25, 0.25, 0.25, 0.25), finished=False))
    assert s.stop is not None and s.stop.outcome is Outcome.STEADY
    assert s.within_slo and s.ttft_s == pytest.approx(1.0) and s.outcome == "steady"
    slow = reduce(flow_result(ONLINE, submitted_s=submitted, finished=False))  # 10 s
    assert slow.stop is not None and slow.stop.outcome is Outcome.OVER
    assert not slow.within_slo and slow.ttft_s == pytest.approx(10.0)


def test_online_agents_busy_at_the_horizon_are_not_done() -> None:
    # one round at 0 s ends a job; rounds at 0 s and 3,560 s: the agent waits for its next round when time is up
    s = reduce(flow_result(ONLINE, submitted_s=[0.0, 0.0, 3560.0], agent=[0, 1, 1], finished=False))
    assert s.job_s == pytest.approx((10.5 + 3600.0) / 2)
    # who came late is cut short by the horizon, and does not count
    late = reduce(flow_result(ONLINE, submitted_s=[0.0, 1801.0, 1900.0], agent=[0, 1, 1], finished=False))
    assert late.job_s == pytest.approx(10.5)


def test_balance_drops_the_tail_and_idle_windows() -> None:
    used = [[3.0, 1.0]] + [[0.0, 0.0]] + [[2.0, 2.0]] * 9 + [[1.0, 0.0]] * 4
    series, kept = balance(np.array(used))  # 44 in all: after 40 of them (39.6 = 90 %) only single readers are left
    assert series.tolist() == [1.5] + [1.0] * 9 and kept.tolist() == [0, *range(2, 11)]


def test_early_attention_is_by_time() -> None:
    attention = [[2.0, 1.0]] * 5 + [[1.0, 1.0]] * 95
    s = reduce(flow_result(OFFLINE, submitted_s=[0.0], jct_s=100.0, attention_s=attention))
    assert s.attention_early == 5
    assert s.attention_balance[:5].tolist() == pytest.approx([4 / 3] * 5) and s.attention_balance[5:].max() == 1.0


def test_a_result_without_requests_and_a_blank_one() -> None:
    s = reduce(flow_result(ONLINE, submitted_s=[], jct_s=0.0, finished=False))
    assert s.ttft_s == 0.0 and s.job_s == 0.0 and s.ttft_shares == (0.0,) * 4 and s.outcome == "unsettled"
    nothing = blank(OFFLINE)
    assert not nothing.finished and not nothing.within_slo and nothing.agents_at(0.0) == 0.0
    assert nothing.mean_ttft_s(0.0, 100.0) is None and nothing.outcome == "not finished"
