"""The paper's values: a few by heart, and that every series fits its axis."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from testbed.paper import reference as ref


def test_figure_7_gives_the_known_gains() -> None:
    cell = ref.FIGURE_7["ds-660b", "64K"]
    assert (cell["oracle"][2], cell["dualpath"][2], cell["basic"][2]) == (4920, 5390, 10080)
    gains = {
        (model, trace): [round(b / d, 2) for b, d in zip(by["basic"], by["dualpath"], strict=True) if b and d]
        for (model, trace), by in ref.FIGURE_7.items()
    }
    assert gains["ds-660b", "64K"] == [1.40, 1.83, 1.87, 1.86]
    assert max(gains["ds-660b", "32K"]) == 1.63 and gains["ds-27b", "48K"] == [1.58, 1.61, 1.78, 1.51]


def test_figure_8_gains_and_equal_snics() -> None:
    gain = [b / d for b, d in zip(ref.FIGURE_8["basic", 1, 2], ref.FIGURE_8["dualpath", 1, 2], strict=True) if b and d]
    assert max(gain) == pytest.approx(ref.FIGURE_8_MAX_GAIN, abs=0.02)
    for snics, a, b in ref.FIGURE_8_EQUAL_SNICS:
        for system, prefill, decode in (a, b):
            assert snics == (prefill if system == "basic" else prefill + decode)


def test_ablation_gives_the_mean_cuts() -> None:
    basic = ref.FIGURE_12_RIGHT["basic"]
    for system, percent in ref.MEAN_CUT_PERCENT.items():
        cuts = [100 * (1 - x / b) for x, b in zip(ref.FIGURE_12_RIGHT[system], basic, strict=True) if x and b]
        assert sum(cuts) / len(cuts) == pytest.approx(percent, abs=0.3)


def test_capacity_gains_and_their_mean() -> None:
    for model, gain in ref.CAPACITY_GAIN.items():
        ratio = ref.CAPACITY_APS[model, "dualpath"] / ref.CAPACITY_APS[model, "basic"]
        assert ratio == pytest.approx(gain, abs=0.005)
    assert sum(ref.CAPACITY_GAIN.values()) / 2 == pytest.approx(1.96)


def test_shares_of_ttft_are_of_a_whole() -> None:
    for shares in ref.FIGURE_12_LEFT.values():
        assert sum(shares) == pytest.approx(100, abs=1)


def test_table_3_is_24_times_the_size() -> None:
    (small, small_jct), (large, large_jct) = ref.TABLE_3_OFFLINE_JCT_S.items()
    assert [b / a for a, b in zip(small, large, strict=True)] == [24, 24, 24]
    assert (small_jct, large_jct) == (3167, 3201)


@pytest.mark.parametrize(
    ("axis", "series"),
    [
        *((ref.FIGURE_7_AGENTS, s) for by in ref.FIGURE_7.values() for s in by.values()),
        *((ref.FIGURE_8_AGENTS, s) for s in ref.FIGURE_8.values()),
        *((ref.FIGURE_10_APS, s) for by in ref.FIGURE_10.values() for s in by.values()),
        *((ref.FIGURE_10_SGL_APS, s) for s in ref.FIGURE_10_SGL.values()),
        *((ref.FIGURE_12_AGENTS, s) for s in ref.FIGURE_12_RIGHT.values()),
    ],
)
def test_series_fit_their_axes_and_rise(axis: Sequence[float], series: ref.Series) -> None:
    assert len(series) == len(axis)
    values = [value for value in series if value is not None]
    assert values and values == sorted(values)
