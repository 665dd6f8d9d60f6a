"""What lanes promise: the worst-case shares of the paper's tables, of each discipline, and what starves."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import pytest

from testbed.analysis.lanes import outlook, shares_of_vls
from testbed.errors import ConfigError
from testbed.fabric.arbiter import PAPER_TABLES, ArbiterTables
from testbed.fabric.spec import ClusterSpec, LaneDiscipline
from testbed.units import GBIT

SPEC = ClusterSpec(
    name="paper", prefill_nodes=1, decode_nodes=1, gpus_per_node=8, storage_servers=2, cnic_rate_bps=400 * GBIT,
    snic_rate_bps=400 * GBIT, pcie_rate_bps=512 * GBIT, dram_rate_bps=4000 * GBIT,
)  # fmt: skip


def spec(lanes: str, **change: object) -> ClusterSpec:
    return replace(SPEC, lanes=LaneDiscipline(lanes), **change)  # type: ignore[arg-type]


def tables(high: str, low: str, limit: int) -> ArbiterTables:
    return ArbiterTables.parse(f"qos_high_limit {limit}\nqos_vlarb_high {high}\nqos_vlarb_low {low}")


def test_the_papers_tables_leave_kv_a_thousandth() -> None:
    found = outlook(spec("infiniband"))
    assert found.shares is not None
    assert round(float(found.shares[1]) * 100, 2) == 0.10
    assert found.alone == (1, 1)
    assert found.warnings == ()
    one, whole = (float(share) * 100 for share in shares_of_vls(PAPER_TABLES, (0, 1, 3)))
    assert (one, whole) == (pytest.approx(0.042, abs=0.0006), pytest.approx(0.40, abs=0.005))
    assert [round(float(share) * 100, 2) for share in shares_of_vls(PAPER_TABLES, (0,))] == [0.1, 0.41]


def test_the_papers_limit_is_20_us() -> None:
    assert 240 * 4096 == 983_040
    found = outlook(spec("ets"))
    assert found.waits_bytes[1] == 983_040 + 4096
    assert found.waits_ns(400 * GBIT)[1] == pytest.approx(19_743, abs=1)
    # one low packet for each of ten expiries is KV's while VL0, 1 and 3 are in the low table too
    assert outlook(spec("infiniband")).waits_bytes[1] == 10 * (983_040 + 4096)


@pytest.mark.parametrize(
    ("lanes", "kv"), [("htb", Fraction(1, 100)), ("ets", Fraction(1, 241)), ("prio", Fraction(0)), ("none", None)]
)
def test_shares_while_both_want_more(lanes: str, kv: Fraction | None) -> None:
    found = outlook(spec(lanes))
    assert found.shares == (None if kv is None else (1 - kv, kv))
    assert found.alone == (1, 1)


def test_a_packet_above_its_quantum_takes_two_turns_and_the_ratio_stays() -> None:
    small, large = outlook(spec("ets"), packet_bytes=1514), outlook(spec("ets"), packet_bytes=7570)
    assert small.shares == large.shares
    assert small.waits_bytes[1] is not None and large.waits_bytes[1] is not None
    assert small.waits_bytes[1] <= 983_040 + 2 * 1514
    assert 2 * 983_040 < large.waits_bytes[1] <= 2 * 983_040 + 2 * 7570
    assert large.waits_bytes[0] == 2 * 7570


def test_only_none_lets_model_traffic_wait_without_bound() -> None:
    waits = {lanes.value: outlook(spec(lanes.value), packet_bytes=8000).waits_bytes for lanes in LaneDiscipline}
    assert {name for name, (high, _) in waits.items() if high is None} == {"none"}
    assert {name for name, (_, kv) in waits.items() if kv is None} == {"none", "prio"}
    assert waits["htb"][1] == 800_000
    assert outlook(spec("htb"), packet_bytes=8000, bucket_bytes=15_000).waits_bytes == (31_000, 815_000)


@pytest.mark.parametrize(
    ("arbiter", "warning"),
    [
        (tables("0:192", "2:64", 255), "KV has a share of 0 .* qos_high_limit is 255"),
        (tables("0:192,2:0", "0:192,2:0", 240), "VL 2 has a weight in neither table: its share is 0"),
        (tables("1:192", "2:64", 240), "model traffic's VL 0 has a weight in neither table"),
        (tables("2:192", "0:64", 255), "model traffic on VL 0 has a share of 0"),
    ],
)
def test_tables_that_starve_a_lane_are_named(arbiter: ArbiterTables, warning: str) -> None:
    found = outlook(spec("infiniband", arbiter=arbiter)).warnings
    assert len(found) == 1
    assert re.search(warning, found[0])


def test_prio_and_none_say_what_they_cost() -> None:
    assert "share of 0" in outlook(spec("prio")).warnings[0]
    assert "no isolation" in outlook(spec("none")).warnings[0]
    assert outlook(spec("htb")).warnings == outlook(spec("ets")).warnings == ()


@pytest.mark.parametrize("quanta", [(0, 4096), (983_040, 0), (1 << 32, 1), (1, 2, 3)])
def test_a_quantum_that_serves_nobody_is_refused(quanta: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="ets_quanta are"):
        spec("ets", ets_quanta=quanta)
