"""Metrics of the evaluation, against figures computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testbed.fabric.peaks import Peaks
from testbed.metrics.metrics import Distribution, PcieUse, distribution, snic_use, system_metrics
from testbed.metrics.summary import PaperUnits
from tests.support.runs import RATES, Run, S, counter, outcome, sample

NODES = ("pe0", "de0")


def metrics_of(run: Run, rate_bps: int = 8_000):  # type: ignore[no-untyped-def]
    return system_metrics(run, kv_bytes_per_token=10, nodes=NODES, rates=replace(RATES, snic_bps=rate_bps))


def test_a_distribution_interpolates_between_ranks() -> None:
    d = distribution([4.0, 1.0, 3.0, 2.0])
    assert (d.mean, d.p50) == (2.5, 2.5) and d.p99 == pytest.approx(3.97)
    assert distribution([7.0]) == Distribution(mean=7.0, p50=7.0, p99=7.0)
    assert distribution([]) == Distribution(mean=0.0, p50=0.0, p99=0.0)


def test_times_of_a_round() -> None:
    m = metrics_of(Run(outcomes=[outcome(start_s=2.0), outcome(1, start_s=4.0)]))
    assert m.jct_s == 12.0  # from the first submission to the last completion
    assert (m.ttft_s.mean, m.ttst_s.mean, m.tpot_s.mean) == (5.0, 1.0, 3.0)
    assert m.ttft_shares == pytest.approx({"sched": 0.2, "read": 0.4, "prefill": 0.4})


def test_short_generations_have_no_tpot() -> None:
    one = outcome(generate_tokens=1, second_token_ns=0, tokens={0: 1})
    two = outcome(1, generate_tokens=2, tokens={0: 1, 1: 2})
    m = metrics_of(Run(outcomes=[one, two]))
    assert m.ttst_s.mean == 1.0 and m.tpot_s.mean == 0.0 and m.requests == 2


def test_counts_and_bytes_by_path() -> None:
    rounds = [outcome(), outcome(1, read_side="de", hit_tokens=32, de_hit_tokens=32)]
    rounds += [outcome(2, read_side="none", hit_tokens=0), outcome(3, read_side="split", de_hit_tokens=16)]
    m = metrics_of(Run(outcomes=rounds, tokens_verified=9))
    assert m.bytes_by_path == {"pe": 640 + 480, "de": 320 + 160}
    assert m.requests_by_path == {"pe": 1, "de": 1, "split": 1}
    assert (m.prompt_tokens, m.hit_tokens, m.hit_rate) == (400, 160, 0.4)
    assert (m.tokens_emitted, m.tokens_verified) == (12, 9)


def test_hits_from_dram_are_not_read_from_storage() -> None:
    kept = outcome(1, read_side="split", hit_tokens=64, de_hit_tokens=32, dram_hit_tokens=40, de_dram_hit_tokens=16)
    m = metrics_of(Run(outcomes=[outcome(hit_tokens=16), kept]))
    assert m.bytes_by_path == {"pe": 160 + 10 * (32 - 24), "de": 10 * (32 - 16)}
    assert (m.hit_tokens, m.dram_hit_share) == (80, 0.5)


def test_hits_of_first_turns_are_told_apart() -> None:
    rounds = [outcome(hit_tokens=16), outcome(1, hit_tokens=0), outcome(turn=1, hit_tokens=64)]
    m = metrics_of(Run(outcomes=[*rounds, outcome(2, error="Timeout", hit_tokens=1000)]))
    assert (m.first_turn_hit_tokens, m.hit_tokens) == (16, 80)


def test_failed_rounds_are_counted_and_left_out() -> None:
    m = metrics_of(Run(outcomes=[outcome(), outcome(1, error="Timeout", hit_tokens=1000)]))
    assert (m.requests, m.failed_requests, m.hit_tokens) == (1, 1, 64)
    empty = metrics_of(Run())
    assert (empty.jct_s, empty.hit_rate, empty.requests, empty.snic_plateau_min) == (0.0, 0.0, 0, 0.0)


def test_fairness_of_kv_is_over_the_rates_of_rounds() -> None:
    """From 1 to 6 s one round gets 100 tokens, the other 300: (1 + 3)^2 / (2 (1 + 9)) = 0.8."""
    assert metrics_of(Run(outcomes=[outcome(), outcome(1)])).kv_fairness == pytest.approx(1.0)
    assert metrics_of(Run(outcomes=[outcome(), outcome(1, prompt_tokens=300)])).kv_fairness == pytest.approx(0.8)
    assert metrics_of(Run()).kv_fairness == 1.0


def test_snic_use_over_the_run_and_in_the_plateau() -> None:
    """The link carries 1,000 bytes/s. pe0 is idle for 10 s, then full for 10 s; de0 carries half; then it is quiet."""
    carried = ((0, 0, 0), (10, 0, 0), (20, 10_000, 5_000), (40, 10_000, 5_000))
    samples = [sample(at_s, pe0=pe0, de0=de0) for at_s, pe0, de0 in carried]
    use = snic_use(samples, NODES, 8_000, 0, 40 * S)
    assert use["pe0"].run == pytest.approx(0.25) and use["de0"].run == pytest.approx(0.125)
    assert use["pe0"].plateau == pytest.approx(1.0) and use["de0"].plateau == pytest.approx(0.5)


def test_the_plateau_is_of_the_nodes_that_read() -> None:
    samples = [sample(0, pe0=0, de0=0), sample(10, pe0=9_500, de0=0)]
    m = metrics_of(Run(outcomes=[outcome()], samples=samples))
    assert m.snic_plateau_min == pytest.approx(0.95)
    assert m.snic_utilisation["de0"].plateau == 0.0
    assert m.read_balance == pytest.approx(2.0)  # one of two carries all


@pytest.mark.parametrize(
    ("system", "side", "least"),
    [("basic", "pe", 0.95), ("dualpath", "pe", 0.0), ("dual-path-rr", "pe", 0.0), ("mine", "de", 0.0)],
)
def test_a_side_that_should_read_and_does_not_counts(system: str, side: str, least: float) -> None:
    samples = [sample(0, pe0=0, de0=0), sample(10, pe0=9_500, de0=0)]
    by_de = 64 if side == "de" else 0
    m = metrics_of(Run(system=system, outcomes=[outcome(read_side=side, de_hit_tokens=by_de)], samples=samples))
    assert m.snic_plateau_min == pytest.approx(least)


def test_use_without_samples_or_traffic_is_zero() -> None:
    for samples in ([], [sample(0, pe0=5)], [sample(0, pe0=0), sample(9, pe0=0)]):
        use = snic_use(samples, NODES, 8_000, 0, 9 * S)
        assert all(u.run == u.plateau == 0.0 for u in use.values())


def test_paper_units_divide_by_the_scales() -> None:
    units = PaperUnits(time=2.0, length=4, bytes=10.0)
    times = Distribution(mean=8.0, p50=4.0, p99=16.0)
    assert units.seconds(times) == {"mean": 4.0, "p50": 2.0, "p99": 8.0}
    assert units.seconds_per_token(times) == {"mean": 1.0, "p50": 0.5, "p99": 2.0}


def test_of_the_second_token_only_the_step_shrinks() -> None:
    """A gap of 16 s with a step of 4 s is 12 s of load and wait and one paper step of 1 s, at time scale 2."""
    units = PaperUnits(time=2.0, length=4, bytes=10.0)
    times = Distribution(mean=16.0, p50=4.0, p99=2.0)
    assert units.seconds_to_second_token(times, 4.0) == {"mean": 6.5, "p50": 0.5, "p99": 0.25}
    assert units.seconds_to_second_token(times, 0.0) == {"mean": 8.0, "p50": 2.0, "p99": 1.0}  # no TPOT known
    assert PaperUnits(time=1.0, length=1, bytes=1.0).seconds_to_second_token(times, 4.0)["mean"] == 16.0


def test_the_busiest_of_each_kind_over_the_run() -> None:
    """10 s at 16 kbit/s carry 20,000 bytes, headers included; a storage server is no link of a node."""
    counters = {name: counter(name, payload) for name, payload in (
        ("pe0.snic.rx", 1448), ("pe0.cnic0.read", 2896), ("pe0.cnic1.write", 5792), ("pe0gpu0.pcie.tx", 1448),
        ("de0.dram", 14480), ("st0.snic.tx", 144800),
    )}  # fmt: skip
    reports = {"pe0gpu0": {"compute": {"busy_ns": 2 * S}}, "pe0gpu1": {"compute": {"busy_ns": 4 * S}}, "st0": {}}
    busiest = metrics_of(Run(outcomes=[outcome()], counters=counters, reports=reports)).busiest
    assert busiest == pytest.approx(
        {
            "snic": 1514 / 10_000,
            "cnic": 4 * 1514 / 20_000,
            "pcie": 1514 / 40_000,
            "dram": 10 * 1514 / 80_000,
            "gpu": 0.4,
        }
    )


def test_pcie_links_over_the_run_and_in_their_busiest_second() -> None:
    """10 s at 32 kbit/s carry 40,000 bytes."""
    counters = {f"pe0gpu1.pcie.{way}": counter("x", 1448 * n) for way, n in (("rx", 10), ("tx", 0))}
    m = metrics_of(Run(outcomes=[outcome()], counters=counters, pcie_peaks_bps={"pe0gpu1.pcie.rx": 24_000.0}))
    carried = 10 * (1448 + 66) / 40_000
    assert m.pcie_utilisation == {
        "pe0gpu1": {"rx": PcieUse(run=pytest.approx(carried), max=0.75), "tx": PcieUse(run=0.0, max=0.0)}
    }
    without_peaks = metrics_of(Run(outcomes=[outcome()], counters=counters))
    assert without_peaks.pcie_utilisation["pe0gpu1"]["rx"].max == pytest.approx(carried)


def test_the_busiest_window_of_a_link() -> None:
    peaks = Peaks()
    for at_s, carried in ((0.0, 5), (1.0, 105), (2.0, 405), (2.2, 805), (4.0, 905)):
        peaks.look(int(at_s * S), {"x": carried})
    assert peaks.bps == {"x": 2_400.0}  # a fifth of a second is no window: its bytes are spread over the next


def test_the_busier_submitting_thread_of_an_engine() -> None:
    reports = {
        "pe0": {"submission": {"pe0.cnic1": {"busy_ns": 2 * S}, "pe0.copy0": {"busy_ns": 4 * S}}},
        "pe0gpu1": {"submission": {"pe0gpu1.cnic": {"busy_ns": 5 * S}}},
        "st0": {},
    }
    assert metrics_of(Run(outcomes=[outcome()], reports=reports)).submission_busy == {"pe0gpu0": 0.4, "pe0gpu1": 0.5}


def test_uses_of_all_of_a_kind_together_over_the_run() -> None:
    """Two CNICs of a prefill node, one of them idle: half of what the other carried; what an SNIC sends is left out."""
    counters = {name: counter(name, payload) for name, payload in (
        ("pe0.snic.rx", 1448), ("pe0.snic.tx", 14480), ("de0.snic.rx", 0), ("pe0.cnic0.read", 2896),
        ("pe0.cnic1.read", 0), ("de0.cnic0.write", 1448), ("de0.dram", 14480), ("pe0gpu0.pcie.tx", 1448),
        ("st0.snic.rx", 144800),
    )}  # fmt: skip
    uses = metrics_of(Run(outcomes=[outcome()], counters=counters)).uses
    assert uses == pytest.approx(
        {
            "snic": 1514 / 20_000,
            "pe_cnic_read": 2 * 1514 / 40_000,
            "de_cnic_write": 1514 / 20_000,
            "de_dram": 10 * 1514 / 80_000,
        }
    )


def test_the_working_set_of_the_later_half_of_the_arrivals() -> None:
    """Rounds take 10 s and have 103 tokens; agents come at 0, 10 and 30 s, so 10 to 30 s is looked at: one of two
    rounds with a pause of 5 s is there until 25 s, one of one round until 20 s."""
    rounds = [
        outcome(0, 0), outcome(0, 1, start_s=15.0, prompt_tokens=197), outcome(1, 0, start_s=10.0),
        outcome(2, 0, start_s=30.0),
    ]  # fmt: skip
    found = metrics_of(Run(outcomes=rounds)).working_set
    assert found.agents == pytest.approx((15 + 10) / 20)
    assert found.bytes == pytest.approx(10 * (5 * 103 + 10 * 200 + 10 * 103) / 20)  # 10 bytes per token
    assert found.life_s == pytest.approx((25 + 10 + 10) / 3)
    together = metrics_of(Run(outcomes=[outcome(0), outcome(1)])).working_set
    assert (together.agents, together.bytes) == (2.0, 10 * 2 * 103)
