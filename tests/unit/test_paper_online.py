"""The stop rule on synthetic series, and the search for the largest load."""

from __future__ import annotations

import numpy as np
import pytest

from testbed.paper.online import Outcome, Stop, aps_grid, capacity, stop_rule, within_slo

TIMES = np.arange(1.0, 3600.0, 2.0)


def test_steady_from_the_start_stops_as_soon_as_half_an_hour_after_the_warm_up_is_known() -> None:
    stop = stop_rule(TIMES, np.full(len(TIMES), 1.0), 3570.0)
    assert stop == Stop(outcome=Outcome.STEADY, from_s=1350.0, until_s=3150.0)  # 1200 + 150 + 1800


def test_longer_lives_take_longer_to_be_steady() -> None:
    ttft = np.where(TIMES < 1300.0, 1.0, 1.04)  # steady all the while
    assert stop_rule(TIMES, ttft, 3570.0, stretch=1.125).until_s == 3530.0  # 1.125 x (1200 + 1800) + 150
    assert stop_rule(TIMES, ttft, 3570.0, stretch=1.2).outcome is Outcome.UNSETTLED


def test_a_series_that_settles_late_stops_when_both_windows_agree() -> None:
    ttft = np.where(TIMES < 1400.0, 1.0, 2.0)  # a step: windows agree when the earlier one lies behind it, within 5 %
    stop = stop_rule(TIMES, ttft, 3570.0)
    # 2 / 1.05 is enough for the earlier window: its first tenth, 14.3 s, may still lie before the step
    assert stop == Stop(outcome=Outcome.STEADY, from_s=1540.0, until_s=3340.0)


def test_a_slow_rise_is_unsettled_and_measured_where_it_had_got_to() -> None:
    stop = stop_rule(TIMES, 0.5 + TIMES / 1200.0, 3570.0)
    assert stop == Stop(outcome=Outcome.UNSETTLED, from_s=3420.0, until_s=3570.0)


def test_above_the_slo_stops_at_once_even_in_the_warm_up() -> None:
    stop = stop_rule(TIMES, np.where(TIMES < 300.0, 1.0, 10.0), 3570.0)
    # the mean of the window is above 4 s when a third of it is at 10 s: 50 s after the step
    assert stop == Stop(outcome=Outcome.OVER, from_s=210.0, until_s=360.0)


def test_one_slow_request_does_not_stop_it() -> None:
    ttft = np.full(len(TIMES), 1.0)
    ttft[100] = 100.0
    assert stop_rule(TIMES, ttft, 3570.0).outcome is Outcome.STEADY


def test_the_order_of_requests_does_not_matter() -> None:
    ttft = 0.5 + np.sin(TIMES / 700.0) ** 2
    order = np.random.default_rng(1).permutation(len(TIMES))
    assert stop_rule(TIMES[order], ttft[order], 3570.0) == stop_rule(TIMES, ttft, 3570.0)


def test_nothing_served_is_unsettled() -> None:
    none = np.zeros(0)
    assert stop_rule(none, none, 100.0) == Stop(outcome=Outcome.UNSETTLED, from_s=0.0, until_s=100.0)


@pytest.mark.parametrize(
    ("outcome", "ttft_s", "tpot_s", "kept"),
    [
        (Outcome.STEADY, 4.0, 0.05, True),
        (Outcome.STEADY, 4.01, 0.05, False),
        (Outcome.STEADY, 1.0, 0.051, False),
        (Outcome.UNSETTLED, 1.0, 0.03, True),
        (Outcome.OVER, 3.0, 0.03, False),
    ],
)
def test_slo(outcome: Outcome, ttft_s: float, tpot_s: float, kept: bool) -> None:
    assert within_slo(outcome, ttft_s, tpot_s) is kept


@pytest.mark.parametrize("largest", [0.0, 0.05, 0.2, 0.45, 0.95, 1.0])
def test_capacity_is_found_in_few_runs(largest: float) -> None:
    asked: list[float] = []

    def within(aps: float) -> bool:
        asked.append(aps)
        return aps <= largest

    assert capacity(within, aps_grid(0.05, 1.0), {}) == largest
    assert len(asked) <= 5 and len(set(asked)) == len(asked)


def test_a_finer_grid_finds_more() -> None:
    assert capacity(lambda aps: aps <= 0.237, aps_grid(0.05, 1.0), {}) == 0.2
    assert capacity(lambda aps: aps <= 0.237, aps_grid(0.01, 1.0), {}) == 0.23


def test_the_grid_is_free_of_dust() -> None:
    grid = aps_grid(0.05, 1.0)
    assert len(grid) == 20 and grid[2] == 0.15 and grid[-1] == 1.0
    assert aps_grid(0.3, 1.0) == (0.3, 0.6, 0.9)


def test_a_search_starts_from_what_is_known() -> None:
    asked: list[float] = []

    def within(aps: float) -> bool:
        asked.append(aps)
        return aps <= 0.35

    known = {0.1: True, 0.3: True, 0.4: False, 0.5: False}
    assert capacity(within, aps_grid(0.05, 1.0), known) == 0.35 and asked == [0.35]
    assert capacity(within, aps_grid(0.05, 1.0), {0.05: False}) == 0.0 and asked == [0.35]
    # a point that is within above one that is not, by the noise of a run, does not count
    assert capacity(within, aps_grid(0.1, 1.0), {0.1: True, 0.2: False, 0.3: True}) == 0.1 and asked == [0.35]
