"""The bounds of section 4.2 against simulated clusters, and when the verdict says no."""

from __future__ import annotations

from fractions import Fraction

import pytest

from testbed.analysis import bottleneck as bn
from testbed.analysis.bottleneck import Resource, Setting, pd_interval, uses
from testbed.analysis.confirm import Crossing, Sample, Step, bounds, step, steps_across, window_uses
from testbed.cli.confirm import _measure, _Simulation, kind_of
from testbed.errors import ConfigError, RunFailedError

PAPER = Setting(gpus=8, s=Fraction(1), memory_ratio=Fraction(10))
WRITE, DRAM, SNIC = Resource.DE_CNIC_WRITE, Resource.DE_DRAM, Resource.SNIC


def test_the_papers_bounds_are_crossed_by_the_nearest_small_clusters() -> None:
    lower, upper = bounds(PAPER)
    assert lower == ("P/D >= 1/7", (Resource.PE_CNIC_WRITE,), [(1, 6), (1, 7), (1, 8), (1, 9)])
    assert upper == ("P/D <= 7/2", (WRITE, DRAM), [(3, 1), (7, 2), (4, 1), (5, 1)])


def test_bounds_that_small_clusters_do_not_reach_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 10 nodes"):
        bounds(Setting(gpus=32, s=Fraction(1), memory_ratio=Fraction(1000)))
    with pytest.raises(ConfigError, match="no bound to cross"):
        bounds(Setting(gpus=8, s=Fraction(4), memory_ratio=Fraction(10)))


def test_steps_go_from_inside_to_outside() -> None:
    interval = pd_interval(Setting(gpus=8, s=Fraction(2), memory_ratio=Fraction(100)))
    assert (interval.lower, interval.upper) == (Fraction(1, 3), Fraction(3, 2))
    assert steps_across(Fraction(1, 3), interval, up=False) == [(2, 5), (1, 3), (2, 7), (1, 4)]
    assert steps_across(Fraction(3, 2), interval, up=True) == [(4, 3), (3, 2), (5, 3), (2, 1)]


def crossing(*steps: tuple[float, float]) -> Crossing:
    """Steps by use of SNIC and DE CNIC write; the third and fourth are predicted to lie outside."""
    predicted = (Fraction(1), Fraction(1), Fraction(8, 9), Fraction(8, 11))
    return Crossing(
        title="P/D <= 7/2",
        named=(WRITE,),
        steps=tuple(
            Step(prefill=1, decode=1, predicted_storage=p, measured={SNIC: snic, WRITE: write, DRAM: 0.99})
            for p, (snic, write) in zip(predicted, steps, strict=True)
        ),
    )


@pytest.mark.parametrize(
    ("steps", "confirmed"),
    [
        (((1.0, 0.9), (1.0, 0.99), (0.88, 0.99), (0.7, 1.0)), True),
        (((1.0, 0.9), (0.95, 0.98), (0.88, 0.99), (0.7, 1.0)), True),  # one step early
        (((1.0, 0.9), (1.0, 0.99), (0.98, 0.99), (0.7, 1.0)), True),  # one step late
        (((0.9, 0.98), (0.9, 0.99), (0.88, 0.99), (0.7, 1.0)), False),  # two steps early
        (((1.0, 0.9), (1.0, 0.99), (1.0, 0.99), (1.0, 1.0)), False),  # never
        (((1.0, 0.9), (1.0, 0.99), (0.88, 0.9), (0.7, 1.0)), False),  # something else is full
        (((1.0, 0.9), (1.0, 0.99), (0.88, 0.99), (1.0, 1.0)), False),  # storage is full again
    ],
)
def test_the_verdict(steps: tuple[tuple[float, float], ...], confirmed: bool) -> None:
    assert crossing(*steps).confirmed is confirmed


def test_uses_are_those_of_the_window() -> None:
    """1,000 B in 2 s: 45 % to 85 % lies from 0.45 s to 1.4 s, at 400 B/s on average over 0.95 s."""
    carried = [(0, 0, 0), (500_000_000, 500, 100), (2_000_000_000, 1000, 1600)]
    samples = [Sample(at_ns=at, carried={SNIC: snic, WRITE: write}) for at, snic, write in carried]
    found = window_uses(samples, {SNIC: 8000.0, WRITE: 8000.0})
    begin_s, end_s = 0.45, 0.5 + 350 / 500 * 1.5
    assert found[SNIC] == pytest.approx(400 / (end_s - begin_s) / 1000)
    assert found[WRITE] == pytest.approx((100 + 0.7 * 1500 - 90) / (end_s - begin_s) / 1000)
    with pytest.raises(RunFailedError, match="nothing was read"):
        window_uses([samples[0], samples[0]], {SNIC: 8000.0})


def test_counters_by_kind() -> None:
    named = {
        "pe0.snic.rx": SNIC, "de3.snic.rx": SNIC, "pe0.snic.tx": None, "st1.snic.rx": None,
        "pe0.cnic7.read": Resource.PE_CNIC_READ, "de10.cnic0.write": WRITE, "de0.dram": DRAM,
        "pe0gpu1.pcie.rx": None,
    }  # fmt: skip
    assert {name: kind_of(name) for name in named} == named


def simulated(prefill: int, decode: int) -> Step:
    document = _measure(_Simulation(at=PAPER, nodes=(prefill, decode)))
    samples = [Sample(at_ns=at, carried={Resource(k): v for k, v in c.items()}) for at, c in document["samples"]]  # type: ignore[attr-defined]
    capacity = {Resource(kind): rate for kind, rate in document["capacity"].items()}  # type: ignore[attr-defined]
    return step(PAPER, (prefill, decode), samples, capacity)


def test_every_use_inside_the_interval_is_what_its_equation_says() -> None:
    found = simulated(1, 2)
    for resource, expected in uses(PAPER, bn.pd_ratio(1, 2)).items():
        assert found.measured[resource] == pytest.approx(float(expected), abs=0.045), resource
    assert found.storage_full and found.full == ()


def test_beyond_the_upper_bound_the_decode_side_is_full_and_storage_is_not() -> None:
    found = simulated(4, 1)
    assert found.measured[SNIC] == pytest.approx(8 / 9, abs=0.04)
    assert set(found.full) <= {WRITE, DRAM} and found.full and not found.storage_full


def test_beyond_the_lower_bound_writes_of_the_prefill_side_are_full() -> None:
    found = simulated(1, 8)
    assert found.measured[SNIC] == pytest.approx(8 / 9, abs=0.04)
    assert found.full == (Resource.PE_CNIC_WRITE,)
