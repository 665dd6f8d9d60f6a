"""Fluid flows: each discipline by hand-computed times, the rule of reserved slots, accounts, refusals."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from testbed.errors import BugError, ConfigError
from testbed.fabric.arbiter import ArbiterTables
from testbed.fabric.sim.fluid import Discipline, FluidNetwork, Lane, Resource

BYTE_PER_NS = 8_000_000_000
FIFO, FAIR, PACKETS, STRICT, WEIGHTED, INFINIBAND = Discipline


def network(*specs: tuple[str, float, Discipline]) -> FluidNetwork:
    """Resources by name, rate in bytes per ns, discipline."""
    return FluidNetwork(tuple(Resource(name=n, rate_bps=int(r * BYTE_PER_NS), discipline=d) for n, r, d in specs))


def run(net: FluidNetwork, starts: Iterable[tuple[int, int, str, Lane]]) -> dict[int, int]:
    """End of each flow by its place in ``starts`` (now_ns, size_bytes, path in words, lane), in order of completion."""
    ends: dict[int, int] = {}
    pending = list(enumerate(starts))
    while True:
        upcoming = net.next_ns()
        if pending and (upcoming is None or pending[0][1][0] < upcoming):
            token, (now, size, path, lane) = pending.pop(0)
            net.start(now, size, tuple(path.split()), lane, token)
        elif upcoming is not None:
            ends.update((token, upcoming) for token in net.complete(upcoming))  # type: ignore[misc]
        else:
            return ends


def test_fifo_reserves_at_the_start() -> None:
    """begin = max(now, free_at of each); end = begin + size at the lowest rate; each free_at by its own service."""
    net = network(("snic", 1, FIFO), ("dram", 4, FIFO), ("cnic", 2, FIFO))
    starts = [(0, 1000, "snic dram", Lane.KV), (0, 1000, "snic dram", Lane.KV), (0, 1000, "cnic dram", Lane.KV)]
    # dram: three slots of 250; the third flow begins at 500, behind the slots of the first two, not behind the SNIC;
    # it holds cnic for 500 from 0 on, so that the fourth begins at 500 too
    assert run(net, [*starts, (100, 400, "cnic", Lane.KV)]) == {0: 1000, 1: 2000, 2: 1000, 3: 700}
    assert net.carried_bytes("dram", 2000) == 3000 and net.carried_bytes("snic", 2000) == 2000


def test_fifo_rounds_up_and_takes_up_again_after_idling() -> None:
    net = network(("a", 3, FIFO))
    assert run(net, [(0, 10, "a", Lane.KV), (1, 10, "a", Lane.KV), (100, 10, "a", Lane.KV)]) == {0: 4, 1: 8, 2: 104}


def test_completions_at_one_time_come_in_order_of_start() -> None:
    net = network(("a", 1, FIFO), ("b", 2, FIFO), ("c", 1, FAIR))
    net.start(0, 100, ("c",), Lane.KV, "first")
    net.start(0, 200, ("b",), Lane.KV, "second")
    net.start(0, 100, ("a",), Lane.KV, "third")
    assert net.next_ns() == 100
    assert net.complete(100) == ["first", "second", "third"]
    assert net.next_ns() is None


def test_a_flow_of_no_bytes_ends_at_once() -> None:
    net = network(("a", 1, FIFO), ("b", 1, FAIR))
    net.start(0, 1000, ("a",), Lane.KV, "long")
    net.start(7, 0, ("a",), Lane.KV, "empty")
    net.start(7, 0, ("a", "b"), Lane.HIGH, "empty too")
    assert net.next_ns() == 7 and net.complete(7) == ["empty", "empty too"]


def test_fair_shares_are_max_min() -> None:
    net = network(("narrow", 1, FAIR), ("wide", 2, FAIR))
    starts = [(0, 1000, "narrow wide", Lane.KV), (0, 2000, "narrow wide", Lane.KV), (0, 2000, "wide", Lane.HIGH)]
    assert run(net, starts) == {0: 2000, 2: 2000, 1: 3000}


def test_fair_divides_anew_when_a_flow_joins() -> None:
    assert run(network(("a", 1, FAIR)), [(0, 1000, "a", Lane.KV), (500, 250, "a", Lane.KV)]) == {1: 1000, 0: 1250}


def test_strict_serves_the_high_lane_first() -> None:
    starts = [(0, 1000, "a", Lane.KV), (400, 300, "a", Lane.HIGH), (400, 300, "a", Lane.HIGH)]
    assert run(network(("a", 1, STRICT)), starts) == {1: 1000, 2: 1000, 0: 1600}


def test_strict_leaves_kv_what_the_high_lane_cannot_use() -> None:
    net = network(("a", 4, STRICT), ("b", 1, FAIR))
    assert run(net, [(0, 3000, "a", Lane.KV), (0, 1000, "a b", Lane.HIGH)]) == {0: 1000, 1: 1000}


def test_lanes_hold_through_a_fair_resource() -> None:
    """Lanes at the CNIC, equal shares at a PCIe link no wider: KV must not take half of the link."""
    starts = [(0, 990, "cnic pcie", Lane.HIGH), (0, 1000, "cnic pcie", Lane.KV), (0, 1000, "cnic pcie", Lane.KV)]
    assert run(network(("cnic", 1, STRICT), ("pcie", 1, FAIR)), starts) == {0: 990, 1: 2990, 2: 2990}
    assert run(network(("cnic", 1, WEIGHTED), ("pcie", 1, FAIR)), starts) == {0: 1000, 1: 2990, 2: 2990}


@pytest.mark.parametrize("kind", [FIFO, STRICT, WEIGHTED])
def test_a_narrower_fair_resource_knows_no_lanes_and_no_queue(kind: Discipline) -> None:
    """PCIe in front of a CNIC that it cannot fill: GPUs lack quality of service on PCIe (paper 5)."""
    starts = [(0, 1000, "cnic pcie", Lane.HIGH), (0, 1000, "cnic pcie", Lane.KV), (0, 1000, "cnic pcie", Lane.KV)]
    assert run(network(("cnic", 1, kind), ("pcie", 0.75, FAIR)), starts) == {0: 4000, 1: 4000, 2: 4000}


def test_a_bystander_leaves_those_behind_the_high_lane_their_part() -> None:
    """High and KV through lanes of 5, both and another flow through a fair 9: KV gets what the lanes have left."""
    net = network(("lanes", 5, STRICT), ("fair", 9, FAIR))
    for token, (path, lane) in enumerate([("lanes fair", Lane.HIGH), ("lanes fair", Lane.KV), ("fair", Lane.HIGH)]):
        net.start(0, 10_000, tuple(path.split()), lane, token)
    assert [net.carried_bytes("lanes", 1000, lane) for lane in Lane] == [4500, 500]
    assert net.carried_bytes("fair", 1000) == 9000


def test_kv_waits_without_an_end_behind_an_endless_high_lane() -> None:
    net = network(("a", 1, STRICT))
    net.start(0, 10, ("a",), Lane.KV, "kv")
    net.start(0, 1000, ("a",), Lane.HIGH, "high")
    assert net.next_ns() == 1000
    assert net.backlog_bytes("a", 500, Lane.KV) == 10 and net.carried_bytes("a", 500, Lane.KV) == 0
    assert net.complete(1000) == ["high"] and net.next_ns() == 1010


def test_a_flow_with_nothing_left_ends_though_a_high_one_starts_first() -> None:
    net = network(("a", 1, STRICT))
    net.start(0, 100, ("a",), Lane.KV, "kv")
    assert net.next_ns() == 100
    net.start(100, 50, ("a",), Lane.HIGH, "high")
    assert net.next_ns() == 100 and net.complete(100) == ["kv"]
    assert net.next_ns() == 150 and net.complete(150) == ["high"]


def test_weighted_lanes_share_and_borrow() -> None:
    """99:1 whatever the number of flows in a lane; an idle lane's part is borrowed, as by HTB."""
    starts = [(0, 9_900, "a", Lane.HIGH), (0, 1_000, "a", Lane.KV), (0, 1_000, "a", Lane.KV)]
    assert run(network(("a", 1, WEIGHTED)), starts) == {0: 10_000, 1: 11_900, 2: 11_900}


def test_a_weighted_lane_borrows_what_the_other_cannot_use() -> None:
    net = network(("a", 100, WEIGHTED), ("b", 30, FAIR))
    assert run(net, [(0, 30_000, "a b", Lane.HIGH), (0, 70_000, "a", Lane.KV)]) == {0: 1000, 1: 1000}


def test_infiniband_lanes_have_the_shares_of_the_tables() -> None:
    """963:1 with model traffic on VL0 alone (1/964 of the link is KV), 2409:1 with VL0, 1 and 3."""
    starts = [(0, 963_000, "a", Lane.HIGH), (0, 2_000, "a", Lane.KV)]
    assert run(network(("a", 0.964, INFINIBAND)), starts) == {0: 1_000_000, 1: 1_001_038}  # then 1000 B at full rate
    spec = Resource(name="a", rate_bps=2410 * 8_000_000, discipline=INFINIBAND, high_vls=(0, 1, 3))
    assert run(FluidNetwork((spec,)), [(0, 2_409_000, "a", Lane.HIGH), (0, 1_001, "a", Lane.KV)])[0] == 1_000_000
    unlimited = ArbiterTables(high=((0, 64),), low=((2, 64),), high_limit=255)
    spec = Resource(name="a", rate_bps=BYTE_PER_NS, discipline=INFINIBAND, tables=unlimited)
    assert run(FluidNetwork((spec,)), [(0, 10, "a", Lane.KV), (0, 990, "a", Lane.HIGH)]) == {1: 990, 0: 1000}


def test_a_fifo_resource_on_a_shared_path_gives_all_to_the_first() -> None:
    """What the first flow cannot use goes to the next: DRAM is not held back by one slow lane."""
    net = network(("dram", 4, FIFO), ("cnic", 1, FAIR), ("pcie", 2, FAIR))
    starts = [(0, 1000, "dram cnic", Lane.KV), (0, 2000, "dram pcie", Lane.KV), (0, 1000, "dram", Lane.KV)]
    assert run(net, starts) == {0: 1000, 1: 1000, 2: 1000}
    net = network(("dram", 4, FIFO), ("cnic", 8, FAIR))
    assert run(net, [(0, 4000, "dram cnic", Lane.KV)] * 2) == {0: 1000, 1: 2000}


def test_two_full_queues_of_packets_in_a_row_are_waited_for_one_after_the_other() -> None:
    """The first, behind a window of 376,832 bytes, gives the last flow its rate; in the second it waits once more."""
    net = network(("first", 1, PACKETS), ("second", 4, PACKETS))
    starts = [(0, 400_000, "first", Lane.KV), (0, 2_000_000, "second", Lane.KV), (0, 1000, "first second", Lane.HIGH)]
    ends = run(net, starts)
    rate = 1000 / 377_832
    assert ends[2] == pytest.approx(1000 / rate + 376_832 / (4 - rate), abs=3)
    assert ends[0] == pytest.approx(401_000, abs=2)
    assert run(network(("first", 1, PACKETS), ("second", 4, PACKETS)), [starts[0], starts[2]])[1] == pytest.approx(
        377_832, abs=1
    )


def test_what_follows_on_the_same_way_does_not_overtake_what_still_waits() -> None:
    """A fifo first, then a queue of packets that empties: the first flow waits in it, the second need not."""
    net = network(("first", 0.5, FIFO), ("second", 4, PACKETS), ("third", 4, FAIR))
    way = "first second"
    starts = [(0, 1_000_000, "second third", Lane.KV), (0, 100_000, way, Lane.KV), (290_000, 1_000, way, Lane.KV)]
    ends = run(net, starts)
    assert ends[0] < 290_000 and ends[1] == pytest.approx(200_000 + 376_832 / 3.5, rel=1e-3) and ends[2] >= ends[1]


def test_shared_flows_wait_for_slots_reserved_before_them() -> None:
    net = network(("dram", 1, FIFO), ("cnic", 1, FAIR))
    starts = [(0, 1000, "dram", Lane.KV), (100, 500, "dram cnic", Lane.KV), (200, 500, "dram", Lane.KV)]
    assert run(net, starts) == {0: 1000, 1: 1500, 2: 2000}
    assert net.carried_bytes("dram", 2000) == 2000 and net.carried_bytes("cnic", 2000) == 500


def test_a_lone_fifo_flow_reserves_again_once_shared_flows_are_gone() -> None:
    net = network(("dram", 1, FIFO), ("cnic", 1, FAIR))
    starts = [(0, 100, "dram cnic", Lane.KV), (150, 100, "dram", Lane.KV), (160, 100, "dram cnic", Lane.KV)]
    assert run(net, starts) == {0: 100, 1: 250, 2: 350}


def test_resources_that_wait_for_each_other_still_use_their_rate() -> None:
    """Strict: the high flow goes first on one; fifo: the KV flow goes first on the other. No allocation has both."""
    net = network(("lanes", 1, STRICT), ("queue", 1, FIFO))
    assert run(net, [(0, 500, "lanes queue", Lane.KV), (0, 500, "lanes queue", Lane.HIGH)]) == {1: 500, 0: 1000}
    net = network(("lanes", 1, WEIGHTED), ("both", 1, FAIR))
    assert run(net, [(0, 505, "lanes both", Lane.KV), (0, 495, "lanes both", Lane.HIGH)]) == {1: 500, 0: 1000}


def test_what_a_tie_leaves_unused_is_filled_up() -> None:
    """Held back by the tie, the KV flow gets what the high flow then cannot use."""
    net = network(("lanes", 4, STRICT), ("queue", 4, FIFO), ("slow", 1, FIFO))
    starts = [(0, 3000, "lanes queue", Lane.KV), (0, 1000, "lanes queue slow", Lane.HIGH)]
    assert run(net, starts) == {0: 1000, 1: 1000}


def test_accounts_are_linear_in_between_and_by_lane() -> None:
    net = network(("f", 1, FIFO), ("s", 1, WEIGHTED))
    net.start(0, 100, ("f",), Lane.KV, 0)
    net.start(0, 100, ("f",), Lane.HIGH, 1)
    net.start(0, 200, ("s",), Lane.KV, 2)
    net.start(0, 198, ("s",), Lane.HIGH, 3)
    assert [net.carried_bytes("f", 40, lane) for lane in (Lane.KV, Lane.HIGH, None)] == [40, 0, 40]
    assert [net.backlog_bytes("f", 40, lane) for lane in (Lane.KV, Lane.HIGH, None)] == [60, 100, 160]
    assert net.complete(100) == [0]
    assert [net.carried_bytes("f", 130, lane) for lane in (Lane.KV, Lane.HIGH)] == [100, 30]
    assert [net.carried_bytes("s", 150, lane) for lane in (Lane.KV, Lane.HIGH)] == [1, 148]  # rounded down
    assert [net.backlog_bytes("s", 150, lane) for lane in (Lane.KV, Lane.HIGH)] == [199, 50]
    assert net.next_ns() == 200


def test_refuses_what_the_caller_has_wrong() -> None:
    net = network(("a", 1, FIFO), ("b", 1, FAIR))
    net.start(5, 10, ("a",), Lane.KV, 0)
    for path in ((), ("a", "a"), ("c",)):
        with pytest.raises(BugError):
            net.start(5, 10, path, Lane.KV, 1)
    with pytest.raises(BugError, match="-1 bytes"):
        net.start(5, -1, ("a",), Lane.KV, 1)
    with pytest.raises(BugError, match="goes back"):
        net.complete(4)
    with pytest.raises(BugError, match="a flow ended at 15 ns"):
        net.start(16, 1, ("a",), Lane.KV, 1)
    with pytest.raises(BugError, match="no resource c"):
        net.carried_bytes("c", 5)
    net.start(5, 5, ("b",), Lane.KV, 2)
    with pytest.raises(BugError, match="a flow ended at 10 ns"):
        net.backlog_bytes("a", 11)
    with pytest.raises(BugError, match="same name"):
        network(("a", 1, FIFO), ("a", 1, FAIR))


def test_refuses_resources_that_carry_nothing() -> None:
    with pytest.raises(ConfigError, match="resource a: rate_bps is 0"):
        Resource(name="a", rate_bps=0, discipline=FIFO)
    for weights in ((0, 0), (-1, 2)):
        with pytest.raises(ConfigError, match="resource a: lane weights"):
            Resource(name="a", rate_bps=1, discipline=WEIGHTED, high_weight=weights[0], kv_weight=weights[1])
    with pytest.raises(ConfigError, match="no arbiter table serves"):
        Resource(name="a", rate_bps=1, discipline=INFINIBAND, high_vls=(7,), kv_vl=8)
