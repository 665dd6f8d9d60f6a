"""Rows of every figure, from simulations that a formula answers (tests.support.paper_world)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from testbed.flowsim.run import FlowCase
from testbed.paper.cases import Scope, describe
from testbed.paper.figures import FIGURES
from testbed.paper.figures.figure import mean, ratio
from testbed.paper.figures.serving import CAPACITY
from testbed.paper.online import Outcome, Stop
from testbed.paper.rows import Kind, Row
from testbed.paper.summary import CaseSummary, blank, reduce
from tests.support.paper_world import fake_simulate

SCOPE = Scope()


def fake(case: FlowCase) -> CaseSummary:
    return reduce(fake_simulate(case))


class Desk:
    """Answers, and remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: dict[FlowCase, CaseSummary] = {}

    def __call__(self, case: FlowCase) -> CaseSummary:
        if case not in self.asked:
            self.asked[case] = fake(case)
        return self.asked[case]


@pytest.fixture(scope="module")
def desk() -> Desk:
    return Desk()


def rows(name: str, desk: Desk) -> dict[tuple[str, str], Row]:
    listed = FIGURES[name].rows(SCOPE, desk)
    by_cell = {(row.cell, row.system): row for row in listed}
    assert len(by_cell) == len(listed), "two rows of a figure have the same cell and system"
    return by_cell


@pytest.mark.parametrize("name", FIGURES)
def test_cases_known_beforehand_are_all_but_the_search(name: str) -> None:
    desk = Desk()
    made = FIGURES[name].rows(SCOPE, desk)
    cases = set(FIGURES[name].cases(SCOPE))
    extra = set(desk.asked) - cases
    assert cases <= set(desk.asked), "a simulation that no row uses"
    assert not extra or (name in ("fig10", "tools") and all(case.aps for case in extra) and len(extra) < 15)
    assert made and {row.figure for row in made} == {name}


def test_figures_share_cells() -> None:
    lists = [FIGURES[name].cases(SCOPE) for name in FIGURES]
    wanted, different = sum(len(set(cases)) for cases in lists), len(set().union(*map(set, lists)))
    assert different < wanted - 60
    assert max(Counter(describe(case) for cases in map(set, lists) for case in cases).values()) >= 3


def test_figure_7(desk: Desk) -> None:
    r = rows("fig7", desk)
    jct = r["660B 64K 2048: JCT, s", "Basic"]
    assert jct.paper == 10080 and jct.ours == pytest.approx(1.8 * 2048) and jct.kind is Kind.CALIBRATED
    assert r["660B 64K 1024: JCT, s", "Basic"].kind is Kind.PREDICTED
    assert r["27B 64K 2048: JCT, s", "Basic"].kind is Kind.CALIBRATED
    assert r["27B 64K 2048: JCT, s", "DualPath"].kind is Kind.PREDICTED
    gain = r["660B 64K 2048: speed-up", "Basic / DualPath"]
    assert gain.ours == pytest.approx(1.8) and gain.paper == pytest.approx(10080 / 5390)
    assert gain.rel_error == pytest.approx(1.8 / (10080 / 5390) - 1)
    errors = [
        abs(row.rel_error)
        for row in r.values()
        if row.quantity == "speed-up" and row.where.startswith("27B") and row.rel_error is not None
    ]
    assert len(errors) == 12
    total = r["27B: speed-up, mean absolute error", "Basic / DualPath"]
    assert total.ours == pytest.approx(sum(errors) / 12)
    assert ("Qwen 32B 64K 2048: JCT, s", "Oracle") in r
    assert ("660B 64K 2048: JCT, s", "SGL(MC)") not in r and ("660B 64K 1024: JCT, s", "SGL(MC)") in r


def test_figure_7_orders_only_what_the_paper_tells_apart(desk: Desk) -> None:
    r = rows("fig7", desk)
    order = "pairs of systems in the paper's order"
    # 660B 32K 2048: Oracle 1680, DualPath 1640 are a tie; with Basic and SGL(MC) five of six pairs are apart
    assert r[f"660B 32K 2048: {order}", "all"].paper == 5 == r[f"660B 32K 2048: {order}", "all"].ours
    assert r[f"27B 64K 2048: {order}", "all"].paper == 3

    def upside_down(case: FlowCase) -> CaseSummary:
        return replace(fake(case), jct_s=1 / fake(case).jct_s)

    worst = {(row.cell, row.system): row for row in FIGURES["fig7"].rows(SCOPE, upside_down)}
    assert worst[f"27B 64K 2048: {order}", "all"].ours == 0
    assert not [cell for cell, _ in r if cell.startswith("Qwen") and order in cell]


def test_figure_8(desk: Desk) -> None:
    r = rows("fig8", desk)
    assert r["27B 64K 1P2D 2048: JCT, s", "Basic"].paper == 8280
    assert r["27B 32K 1P2D 2048: JCT, s", "Basic"].paper is None
    pair = r["27B 64K 2048 2 SNICs: JCT max/min of equal SNICs", "DualPath 1P1D, Basic 2P1D"]
    assert pair.ours == pytest.approx(1.8) and pair.paper == pytest.approx(4470 / 4200)
    assert len([1 for row in r.values() if "equal SNICs" in row.quantity]) == 9
    assert r["27B: mean speed-up", "Basic / DualPath"].ours == pytest.approx(1.8)
    assert r["27B: largest speed-up", "Basic / DualPath"].paper == 2.46
    assert r["27B 64K 1P1D 2048: JCT, s", "Basic"].kind is Kind.CALIBRATED
    assert r["27B 64K 2P1D 2048: JCT, s", "Basic"].kind is Kind.PREDICTED


def test_figure_9(desk: Desk) -> None:
    r = rows("fig9", desk)
    assert r["660B 64K 1024 append x2: JCT, s", "DualPath"].ours == pytest.approx(2048)
    low = r["660B 64K 1024: smallest speed-up over append scales", "Basic / DualPath"]
    assert low.ours == pytest.approx(1.8) and low.paper == 1.82
    falls = r["660B 64K 1024: steps of generation length at which the speed-up falls", "Basic / DualPath"]
    assert (falls.paper, falls.ours) == (2, 0)  # the formula's gain does not depend on it


def test_tool_calls_stretch_lives_and_horizons_and_not_the_formulas_capacity(desk: Desk) -> None:
    r = rows("tools", desk)
    assert [case.horizon_s for case in FIGURES["tools"].cases(SCOPE)[::3]] == pytest.approx([5400, 10_350, 20_250])
    for stretch in (1, 2, 4):
        assert r[f"660B r = {stretch}: {CAPACITY}", "DualPath"].ours == 0.5  # TTFT 8 * APS, at most 4 s
    assert r[f"660B r = 4: {CAPACITY}, over r = 1 (argued: 4)", "DualPath"].ours == 1
    grown = r["660B r = 2: working set at capacity, over r = 1 (argued: 4)", "DualPath"].ours
    assert grown == pytest.approx(1)  # the formula's agents make one request and no pause
    assert all(row.paper is None for row in r.values())
    assert "tool_delay_s" in describe(FIGURES["tools"].cases(SCOPE)[-1])


def test_figure_10_finds_capacities(desk: Desk) -> None:
    r = rows("fig10", desk)
    # the formula: TTFT 8 * APS * slowness, at most 4 s
    assert r["660B: largest APS within the SLO", "DualPath"].ours == 0.5
    assert r["660B: largest APS within the SLO", "Basic"].ours == 0.25
    assert r["660B: largest APS within the SLO", "Oracle"].ours == 0.55
    gain = r["27B: capacity gain", "DualPath / Basic"]
    assert gain.ours == pytest.approx(2.0) and gain.paper == 1.67
    assert r["660B 0.2 APS: TTFT, s", "DualPath"].ours == pytest.approx(1.6)
    assert r["660B 0.2 APS: TTFT, s", "DualPath"].paper == 1.08
    assert r["660B 0.3 APS (over the SLO): TTFT, s", "Basic"].paper is None
    assert r["660B 0.06 APS: TPOT, s", "SGL(MC)"].paper == 0.047
    assert r["27B 0.3 APS: TPOT, s", "DualPath"].paper is None


def test_a_finer_step_finds_more(desk: Desk) -> None:
    fine = {(row.cell, row.system): row for row in FIGURES["fig10"].rows(Scope(aps_step=0.01), desk)}
    assert fine["660B: largest APS within the SLO", "Basic"].ours == 0.27


def test_a_capacity_beyond_the_search_says_so() -> None:
    def idle(case: FlowCase) -> CaseSummary:
        return replace(fake(case), stop=Stop(outcome=Outcome.STEADY, from_s=0.0, until_s=1.0), ttft_s=0.1)

    r = {(row.cell, row.system): row for row in FIGURES["fig10"].rows(SCOPE, idle)}
    assert r["27B (the search ends there): largest APS within the SLO", "Basic"].ours == 2.0


def test_figure_11(desk: Desk) -> None:
    r = rows("fig11", desk)
    assert r["660B 0.1 APS: job time, s", "DualPath"].paper == 569.0
    assert r["660B 0.1 APS: job time, s", "Oracle"].paper is None
    job_s = r["660B 0.1 APS: job time, s", "DualPath"].ours
    working_set = r["660B 0.1 APS: working set, GB", "DualPath"]
    assert job_s and working_set.paper == 69
    assert working_set.ours == pytest.approx(0.1 * job_s * 40_016 * 55_958 / 2 / 1e9)


def test_figure_12(desk: Desk) -> None:
    r = rows("fig12", desk)
    share = r["660B 0.2 APS Sch: share of TTFT, %", "Basic"]
    assert share.paper == 40 and share.ours == pytest.approx(25) and share.kind is Kind.CALIBRATED
    assert r["660B 0.25 APS Sch: share of TTFT, %", "Basic"].kind is Kind.PREDICTED
    assert r["660B: Sch share at .25 over .15 APS", "Basic"].paper == pytest.approx(72 / 21)
    assert r["660B: Sch share at .25 over .15 APS", "Basic"].ours == pytest.approx(1.0)
    cut = r["660B 64K 2048: cut of JCT against Basic, %", "+ dual path"]
    assert cut.ours == pytest.approx(100 * (1 - 1.15 / 1.8)) and cut.paper == pytest.approx(100 * (1 - 6536 / 10124))
    assert r["660B 64K: mean cut of JCT against Basic, %", "DualPath"].paper == 45.62
    assert r["660B 64K 2048: JCT, s", "DualPath"].kind is Kind.CALIBRATED
    assert r["660B 64K 2048: JCT, s", "+ layerwise"].kind is Kind.PREDICTED


def with_balance(series: np.ndarray[tuple[int], np.dtype[np.float64]], early: int) -> CaseSummary:
    return replace(fake(SCOPE.offline("ds-660b", "64K", "dualpath", 8)), snic_balance=series,
                   attention_balance=series, attention_early=early)  # fmt: skip


def test_figures_13_and_14() -> None:
    series = np.concatenate([np.full(10, 1.2), np.full(190, 1.6)])
    r13 = {(row.cell, row.system): row for row in FIGURES["fig13"].rows(SCOPE, lambda _: with_balance(series, 10))}
    compared = r13["27B 1P2D 48K 1024: SNIC max/avg, mean", "DualPath"]
    assert compared.ours == pytest.approx(1.58) and compared.paper == 1.184
    assert r13["660B 2P4D 48K 1024: SNIC max/avg, mean", "DualPath"].paper is None
    drawn = [row for row in r13.values() if row.panel and row.system == "DualPath"]
    assert len(drawn) == 60 and not any(row.listed for row in drawn)
    assert drawn[0].ours == pytest.approx(1.2) and 0 < drawn[0].x < drawn[-1].x < 100
    r14 = {(row.cell, row.system): row for row in FIGURES["fig14"].rows(SCOPE, lambda _: with_balance(series, 10))}
    early = r14["660B 64K 1024: attention time max/avg, first 5 %", "DualPath"]
    assert early.ours == pytest.approx(1.2) and early.paper == 1.06
    assert r14["660B 64K 1024: attention time max/avg, later", "DualPath"].ours == pytest.approx(1.6)
    assert r14["660B 64K 1024: attention time max/avg, first 5 %", "+ dual path"].paper is None


def test_figure_15() -> None:
    bins = np.arange(320)
    large = replace(
        fake(SCOPE.offline("ds-660b", "48K", "dualpath", 49_152, nodes=(48, 96))),
        jct_s=3200.0,
        ttft_by_bin_s=np.where(bins == 20, 50.0, 10.0),
        prompt_tokens_by_bin=bins * 10.0,
        agents_by_bin=320.0 - bins,
    )
    r = {(row.cell, row.system): row for row in FIGURES["fig15"].rows(SCOPE, lambda _: large)}
    assert r["48P96D 900 s: prompt tokens/s", "DualPath"].ours == pytest.approx(89.5)  # bins 85 to 94
    assert r["48P96D 900 s: prompt tokens/s", "DualPath"].paper == 6.2e7
    assert r["48P96D 1000 s: agents left", "DualPath"].ours == 220.0
    assert r["48P96D: largest TTFT, s", "DualPath"].ours == pytest.approx(14.0)  # one bin of ten is at 50
    assert r["48P96D: largest TTFT, s", "DualPath"].paper == 27.7
    assert not r["48P96D 100 s: TTFT, s", "DualPath"].listed and r["48P96D 200 s: TTFT, s", "DualPath"].listed


def test_table_3(desk: Desk) -> None:
    r = rows("table3", desk)
    flat = r["offline: JCT, 24x the size over 1x", "DualPath"]
    assert flat.paper == pytest.approx(3201 / 3167) and flat.ours == pytest.approx(24.0)  # the formula's JCT is agents
    assert r["online 44P88D 8.8 APS: TTFT, s", "DualPath"].paper == 1.847
    assert r["online: TPOT, 22x the size over 1x", "DualPath"].ours == pytest.approx(1.0)


def test_table_1_needs_no_simulation() -> None:
    def none(case: FlowCase) -> CaseSummary:
        raise AssertionError(case)

    r = {row.cell: row for row in FIGURES["table1"].rows(SCOPE, none)}
    trace = r["DS 660B, context 32,721: GB/PFLOP"]
    assert trace.paper == 22 and trace.ours == pytest.approx(21.6, abs=0.05)


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "table1"])
def test_simulations_that_gave_nothing_leave_no_numbers(name: str) -> None:
    nothing = FIGURES[name].rows(SCOPE, blank)
    counted = ("order", "falls", "SLO", "agents left", "tokens/s")  # pairs, steps and rates are 0 of nothing
    assert [row for row in nothing if row.ours is not None and not any(word in row.cell for word in counted)] == []


def test_a_run_over_the_slo_is_no_capacity() -> None:
    def over(case: FlowCase) -> CaseSummary:
        stop = Stop(outcome=Outcome.OVER, from_s=0.0, until_s=150.0)
        return replace(fake(case), stop=stop if case.aps else None)

    r = {(row.cell, row.system): row for row in FIGURES["fig10"].rows(SCOPE, over)}
    assert r["660B: largest APS within the SLO", "DualPath"].ours == 0.0
    assert r["660B: capacity gain", "DualPath / Basic"].ours is None


def test_small_sums() -> None:
    assert ratio(3.0, 2.0) == 1.5 and ratio(None, 2.0) is None and ratio(1.0, 0.0) is None
    assert mean([1.0, 3.0]) == 2.0 and mean([1.0, None]) is None and mean([]) is None
