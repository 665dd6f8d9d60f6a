"""Figures of collectives from engines' reports, and their part of the traffic ledger."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testbed.fabric.live.counters import ClassCount
from testbed.metrics.collectives import Stretch, collective_metrics, expected_exchanges
from testbed.metrics.ledger import settle
from testbed.metrics.metrics import system_metrics
from testbed.protocol.shards import shard_wire_bytes
from tests.support.runs import RATES, Run, S, counter, outcome
from tests.unit.test_collectives import collectives
from tests.unit.test_ledger import LAYOUT

PES, DES = ("pe0gpu0", "pe0gpu1"), ("de0gpu0", "de0gpu2")


def report(**figures: int) -> dict[str, object]:
    values = {"rounds": 1, "exchanges": 4, "sent_bytes": 10, "wait_ns": S, "given_up": 0, "every": 1}
    named = {key.replace("__", "."): value for key, value in {**values, **figures}.items()}
    return {"machine": {f"collective.{key}": value for key, value in named.items()}}


def test_latencies_are_merged_over_engines() -> None:
    reports = {
        "pe0gpu0": report(dispatch_ns__1000000=98, combine_ns__5000000=1),
        "pe0gpu1": report(dispatch_ns__1000000=1, dispatch_ns__7000000=1),
        "de0gpu0": report(wait_ns=2 * S),
        "de0gpu2": report(wait_ns=0, given_up=3),
    }
    found = collective_metrics(reports, (PES, DES), 10 * S)
    assert found is not None
    pe = found.dispatch_s["pe"]
    assert (pe.count, pe.p50, pe.p99) == (100, 0.001, 0.001)
    assert pe.mean == pytest.approx(0.00106)
    assert found.combine_s["pe"].p99 == 0.005
    assert found.combine_s["de"].count == 0
    assert found.bubble_share == {"pe": 0.1, "de": 0.1}
    assert found.exchanged_bytes == {"pe": 20, "de": 20}
    assert found.given_up == 3


def test_stretches_are_free_of_sizes() -> None:
    """A large exchange takes twice as long as idle, three small ones as long as idle."""
    reports = {
        "pe0gpu0": report(dispatch_permille__1000=3, dispatch_slowest_ns=30, dispatch_idle_ns=30),
        "pe0gpu1": report(combine_permille__2000=1, combine_slowest_ns=2_000, combine_idle_ns=1_000),
    }
    found = collective_metrics(reports, (PES, DES), S)
    assert found is not None
    assert found.stretch["pe"] == Stretch(mean=2030 / 1030, p50=1.0, p99=2.0)
    assert found.stretch["de"] == Stretch(mean=0.0, p50=0.0, p99=0.0)


def test_attention_is_balanced_over_the_engines_of_a_group() -> None:
    reports = {
        "pe0gpu0": report(attention_ns__0=30, attention_ns__1=40, attention_ns__2=7, attention_ns__3=9),
        "pe0gpu1": report(attention_ns__0=10, attention_ns__2=7, every=2),  # it has forgotten round 3, and had no 1
    }
    found = collective_metrics(reports, (PES,), S)
    assert found is not None
    assert found.attention_balance_full == pytest.approx((1.5 + 1.0) / 2)
    assert found.attention_balance == pytest.approx((1.5 + 1.0) / 2)
    every_round = {**reports, "pe0gpu1": report(attention_ns__0=10, attention_ns__2=7)}
    found = collective_metrics(every_round, (PES,), S)
    assert found is not None
    assert found.attention_balance == pytest.approx((1.5 + 2.0 + 1.0 + 2.0) / 4)


def test_without_collectives_there_are_no_figures() -> None:
    assert collective_metrics({"pe0gpu0": {"machine": {}}, "de0gpu0": {}}, (PES, DES), S) is None


def test_exchanges_are_predicted_from_tokens() -> None:
    done = outcome(prompt_tokens=100, hit_tokens=64, generate_tokens=3, prefill_engine="pe0gpu1")
    failed = outcome(prompt_tokens=900, error="Timeout", prefill_engine="pe0gpu1")
    found = expected_exchanges([done, failed], (PES, DES), collectives(), 4, {"pe0gpu1": report(exchanges=4)})
    # 36 tokens, three layers with experts, half of 9 bytes there and of 18 back.
    there, back, shards = 36 * 3 * 9 // 2, 36 * 3 * 9, 4 * shard_wire_bytes(0)
    assert found["pe0.cnic1.read"] == found["pe0gpu1.pcie.tx"] == found["pe0.cnic0.write"] == there + shards
    assert found["pe0.cnic1.write"] == found["pe0gpu0.pcie.tx"] == back
    assert found["de0.cnic2.read"] == 2 * 3 * 9 // 2  # the first of three tokens is prefill's
    assert not expected_exchanges([done], (PES, DES), None, 4, {})


def test_kv_in_the_high_lane_is_an_error_though_the_sum_fits() -> None:
    size = 1000 * LAYOUT.full_block_bytes
    kv, high = ({"pe0.cnic0.read": size}, {"pe0.cnic0.read": size // 2, "pe0gpu0.pcie.tx": size // 2})
    right = counter("pe0.cnic0.read", size)
    right = replace(right, high=ClassCount(bytes=size // 2))
    swapped = replace(right, kv=ClassCount(bytes=size // 2), high=ClassCount(bytes=size))
    pcie = counter("pe0gpu0.pcie.tx", size // 2)

    def errors(cnic: object, lanes: bool = True) -> list[float]:
        counters = {"pe0.cnic0.read": cnic, "pe0gpu0.pcie.tx": pcie}
        return [round(e.error, 3) for e in settle("basic", kv, counters, LAYOUT, high=high, lanes=lanes)]  # type: ignore[arg-type]

    assert errors(right) == [0.0, 0.0, 0.0]
    assert errors(swapped) == [-0.5, 0.0, 1.0]
    assert errors(swapped, lanes=False) == [0.0, 0.0]  # one queue: what is in it is not told apart


def test_kv_throughput_leaves_out_model_traffic_with_lanes_and_without() -> None:
    lanes = replace(counter("pe0.cnic0.read", 10_000), high=ClassCount(bytes=3_000))
    one_queue = counter("pe0.cnic0.read", 13_000)
    reports = {"pe0gpu0": report(sent_bytes=3_000)}
    for cnic in (lanes, one_queue):
        run = Run(outcomes=[outcome()], counters={"pe0.cnic0.read": cnic}, reports=reports)
        found = system_metrics(run, kv_bytes_per_token=1, nodes=("pe0",), rates=RATES, groups=(PES,))
        assert found.kv_bytes_per_s == pytest.approx(1_000)
