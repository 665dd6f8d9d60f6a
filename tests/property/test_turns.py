"""CNICs as the live world has them, whatever the load: lanes, turns between source memories, queues of packets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.fabric.sim.disciplines import Contender, Port, fill
from testbed.fabric.sim.fluid import WINDOW_BYTES, Discipline, FluidNetwork, Lane, Resource
from tests.property.test_fluid import SETTINGS, Start, busy_end, lanes, rates, run, sizes, times

SOURCES = ("p", "q", "r")
FEWER = settings(SETTINGS, max_examples=60)
LANED = (Discipline.STRICT, Discipline.WEIGHTED, Discipline.INFINIBAND)
QUEUED = (*LANED, Discipline.PACKETS)

# paths of a cluster: an SNIC (a queue) and two CNICs beside one memory, and what does not touch the memory
PATHS = (("snic", "dram"), ("dram", "cnic", "write"), ("cnic", "write"), ("write", "dram"), ("dram", "snic"))


def clusters(widest: int = 8) -> st.SearchStrategy[tuple[Resource, ...]]:
    """An SNIC, two sides of CNICs and a memory that is between ``1/widest`` and ``widest`` times as fast."""
    return st.builds(
        lambda rate, wide, kind, high, kv: (
            Resource(name="snic", rate_bps=rate, discipline=Discipline.FIFO),
            Resource(name="dram", rate_bps=rate * wide // 8 + 1, discipline=Discipline.PACKETS),
            *(
                Resource(name=name, rate_bps=rate, discipline=kind, turns=True, high_weight=high, kv_weight=kv)
                for name in ("cnic", "write")
            ),
        ),
        rates,
        st.integers(1, 8 * widest),
        st.sampled_from(QUEUED),
        st.integers(0, 99),
        st.integers(1, 9),
    )


def loads(paths: tuple[tuple[str, ...], ...] = PATHS) -> st.SearchStrategy[list[Start]]:
    """Up to a dozen flows in order of start."""
    flow = st.tuples(times, sizes, st.sampled_from(paths), lanes, st.sampled_from(SOURCES))
    return st.lists(flow, min_size=1, max_size=12).map(lambda starts: sorted(starts, key=lambda s: s[0]))


@FEWER
@given(clusters(), loads())
def test_every_byte_is_carried_once_and_never_beyond_the_rate(
    resources: tuple[Resource, ...], starts: list[Start]
) -> None:
    history = run(resources, starts)
    assert sorted(history.ends) == list(range(len(starts)))
    for (name, lane), carried in history.carried[-1][1].items():
        assert carried == sum(s[1] for s in starts if name in s[2] and s[3] is lane)
    for i, (begin, before) in enumerate(history.carried):
        for end, after in history.carried[i + 1 :]:
            for r in resources:
                grown = sum(after[r.name, lane] - before[r.name, lane] for lane in Lane)
                assert (grown - 4) * 8_000_000_000 <= r.rate_bps * (end - begin), (r.name, grown)  # rounding: 2 a lane


@FEWER
@given(st.sampled_from(QUEUED), rates, loads((("a",),)))
def test_a_cnic_works_while_it_has_work(kind: Discipline, rate_bps: int, starts: list[Start]) -> None:
    ends = run((Resource(name="a", rate_bps=rate_bps, discipline=kind, turns=True),), starts).ends
    done = busy_end(starts, rate_bps)
    assert done <= max(ends.values()) <= done + 2 * len(starts) + len(starts) * done // rate_bps + 1


@FEWER
@given(clusters(), loads())
def test_flows_of_a_stream_end_in_order_of_start(resources: tuple[Resource, ...], starts: list[Start]) -> None:
    """One connection: what was posted first arrives first."""
    history = run(resources, starts)
    streams: dict[tuple[object, ...], list[int]] = {}
    for place, start in enumerate(starts):
        if start[1] and "snic" not in start[2]:
            streams.setdefault(start[2:], []).append(place)
    for places in streams.values():
        assert [place for place in history.order if place in places] == places


@FEWER
@given(loads((("snic", "dram"), ("dram", "cnic", "write"), ("cnic", "write"))), rates, st.sampled_from(LANED))
def test_a_memory_too_wide_to_fill_changes_nothing(starts: list[Start], rate_bps: int, kind: Discipline) -> None:
    """As wide as all NICs together, it holds nothing back, and the SNIC's flows have their slots all the same."""
    nics = (
        Resource(name="snic", rate_bps=rate_bps, discipline=Discipline.FIFO),
        *(Resource(name=name, rate_bps=rate_bps, discipline=kind, turns=True) for name in ("cnic", "write")),
    )
    dram = Resource(name="dram", rate_bps=2 * rate_bps, discipline=Discipline.PACKETS)
    starts = [(*start[:4], start[4] + str("dram" in start[2])) for start in starts]  # else two streams become one
    without = [(at, size, tuple(n for n in path if n != "dram"), lane, of) for at, size, path, lane, of in starts]
    assert run((*nics, dram), starts).ends == run(nics, without).ends


Want = tuple[Lane, str, int, int]


def shares(kind: Discipline, rate_bps: int, wanted: list[Want]) -> tuple[Port, list[Contender]]:
    """One CNIC, flows of (lane, source, weight in its queue, limit elsewhere)."""
    port = Port(Resource(name="a", rate_bps=rate_bps, discipline=kind, turns=True))
    limits = [
        Port(Resource(name=f"l{i}", rate_bps=want[3], discipline=Discipline.FAIR)) for i, want in enumerate(wanted)
    ]
    flows = [Contender(i, (port, limits[i]), want[0], *want[1:3]) for i, want in enumerate(wanted)]
    for flow, limit in zip(flows, limits, strict=True):
        port.flows[flow.order] = limit.flows[flow.order] = flow
    fill([port, *limits], flows)
    return port, flows


wants = st.lists(
    st.tuples(lanes, st.sampled_from(SOURCES), st.integers(1, 1000), st.integers(1, 2 * 10**9)), min_size=1, max_size=10
)


@FEWER
@given(st.sampled_from(LANED), wants)
def test_turns_are_max_min_between_queues(kind: Discipline, wanted: list[Want]) -> None:
    """A flow below its own limit: no other queue of the lane has more than its queue, but for rounding."""
    port, flows = shares(kind, 10**9, wanted)
    total: dict[str, int] = {}
    for flow in flows:
        if flow.lane is Lane.KV:
            total[flow.source] = total.get(flow.source, 0) + flow.rate_bps
    for flow, want in zip(flows, wanted, strict=True):
        if flow.lane is Lane.KV and flow.rate_bps < want[3]:
            assert port.is_full
            assert max(total.values()) <= total[flow.source] + 4 * len(flows)


@FEWER
@given(st.sampled_from(LANED), wants)
def test_within_a_queue_flows_share_by_what_they_have_in_it(kind: Discipline, wanted: list[Want]) -> None:
    """A flow below its own limit: no other of its queue has more for its weight."""
    _, flows = shares(kind, 10**9, wanted)
    for flow, want in zip(flows, wanted, strict=True):
        if flow.rate_bps == want[3]:
            continue
        for other in flows:
            if other.lane is flow.lane and (other.source == flow.source or flow.lane is Lane.HIGH):
                assert other.rate_bps * flow.weight <= (flow.rate_bps + 2 * len(flows)) * other.weight + flow.weight


@FEWER
@given(
    st.integers(1, 999),
    st.integers(1, 999),
    st.lists(st.sampled_from(SOURCES), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_lanes_have_their_weights_whatever_is_in_them(high: int, kv: int, sources: list[str], shards: int) -> None:
    resource = Resource(
        name="a", rate_bps=10**9, discipline=Discipline.WEIGHTED, turns=True, high_weight=high, kv_weight=kv
    )
    net = FluidNetwork((resource,))
    for i in range(shards):
        net.start(0, 10**9, ("a",), Lane.HIGH, i, f"s{i}")
    for i, source in enumerate(sources):
        net.start(0, 10**9, ("a",), Lane.KV, -i, source)
    got = [net.carried_bytes("a", 10**8, lane) for lane in Lane]
    assert abs(got[0] * kv - got[1] * high) <= (high + kv) * 20


@dataclass
class Turns:
    """The reference: a queue of packets per source, served in turns; each stream keeps at most ``window`` packets in
    its queue, and follows up at the tail when one has left."""

    window: int
    queues: dict[str, deque[int]] = field(default_factory=dict)

    def ends(self, wanted: list[tuple[str, int]]) -> list[int]:
        """When the last packet of each stream of (source, packets) has left, in packet times."""
        left = [packets for _, packets in wanted]
        behind = [0] * len(wanted)
        for i, (source, packets) in enumerate(wanted):
            behind[i] = max(0, packets - self.window)
            self.queues.setdefault(source, deque()).extend([i] * min(self.window, packets))
        now, ends = 0, [0] * len(wanted)
        while any(left):
            for queue in self.queues.values():
                if queue:
                    now += 1
                    i = queue.popleft()
                    left[i] -= 1
                    if behind[i]:
                        behind[i] -= 1
                        queue.append(i)
                    if not left[i]:
                        ends[i] = now
        return ends


PACKET_BYTES = 4096
WINDOW_PACKETS = WINDOW_BYTES // PACKET_BYTES


@FEWER
@given(st.lists(st.tuples(st.sampled_from(SOURCES), st.integers(1, 2000)), min_size=1, max_size=6))
def test_equals_queues_of_packets_in_turns(wanted: list[tuple[str, int]]) -> None:
    """Fluid against packets: apart by no more than it takes to empty a full queue, which holds all windows."""
    wires = [f"wire{i}" for i in range(len(wanted))]  # one for each connection, and none is full
    net = FluidNetwork(
        (
            Resource(name="a", rate_bps=8 * 10**9, discipline=Discipline.WEIGHTED, turns=True),
            *(Resource(name=wire, rate_bps=10**10, discipline=Discipline.PACKETS) for wire in wires),
        )
    )
    for i, (source, packets) in enumerate(wanted):
        net.start(0, packets * PACKET_BYTES, ("a", wires[i]), Lane.KV, i, source)
    ends = [0] * len(wanted)
    while (now := net.next_ns()) is not None:
        for place in net.complete(now):
            assert isinstance(place, int)
            ends[place] = now // PACKET_BYTES
    expected = Turns(WINDOW_PACKETS).ends(wanted)
    for i, (source, _) in enumerate(wanted):
        queued = sum(min(packets, WINDOW_PACKETS) for of, packets in wanted if of == source)
        assert abs(ends[i] - expected[i]) <= (queued + 1) * len({of for of, _ in wanted})
