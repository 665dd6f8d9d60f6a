"""Fluid flows whatever the network and the load: nothing lost, nothing beyond the rate, every discipline's promise."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.fabric.sim.disciplines import Contender, Port, fill
from testbed.fabric.sim.fluid import Discipline, FluidNetwork, Lane, Resource

SETTINGS = settings(max_examples=100, derandomize=True)
NAMES = ("a", "b", "c", "d")
SHARED = tuple(d for d in Discipline if d is not Discipline.FIFO)

Start = tuple[int, int, tuple[str, ...], Lane, str]
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True).map(tuple)
lanes = st.sampled_from(Lane)
rates = st.integers(1_000_000, 64_000_000_000)
sizes = st.one_of(st.integers(0, 5), st.integers(0, 2_000_000))
times = st.one_of(st.just(0), st.integers(0, 400_000))


def loads(route: st.SearchStrategy[tuple[str, ...]] = paths) -> st.SearchStrategy[list[Start]]:
    """Up to a dozen flows in order of start: (now_ns, size_bytes, path, lane, source)."""
    return st.lists(st.tuples(times, sizes, route, lanes, st.just("")), min_size=1, max_size=12).map(
        lambda starts: sorted(starts, key=lambda s: s[0])
    )


def networks(kinds: tuple[Discipline, ...] = tuple(Discipline)) -> st.SearchStrategy[tuple[Resource, ...]]:
    """The four resources, each of some rate, discipline and lane weights."""
    one = st.tuples(rates, st.sampled_from(kinds), st.integers(0, 99), st.integers(1, 9))
    return st.tuples(*[one] * len(NAMES)).map(
        lambda specs: tuple(
            Resource(name=name, rate_bps=rate, discipline=kind, high_weight=high, kv_weight=kv)
            for name, (rate, kind, high, kv) in zip(NAMES, specs, strict=True)
        )
    )


def with_a(resources: tuple[Resource, ...], kind: Discipline) -> tuple[Resource, ...]:
    """The same resources, the first of another discipline."""
    return (Resource(name="a", rate_bps=resources[0].rate_bps, discipline=kind), *resources[1:])


@dataclass
class History:
    """End of each flow by its place in the load, the tokens as they came, and what was carried at each instant."""

    ends: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    carried: list[tuple[int, dict[tuple[str, Lane], int]]] = field(default_factory=list)


def run(resources: tuple[Resource, ...], starts: list[Start], sample_ns: tuple[int, ...] = ()) -> History:
    """Play a load to its end, sampling the accounts at every event and at ``sample_ns``."""
    net, history = FluidNetwork(resources), History()
    events = sorted([(start[0], place) for place, start in enumerate(starts)] + [(at, -1) for at in sample_ns])

    def sample(now: int) -> None:
        history.carried.append(
            (now, {(r.name, lane): net.carried_bytes(r.name, now, lane) for r in resources for lane in Lane})
        )

    while True:
        upcoming = net.next_ns()
        if events and (upcoming is None or events[0][0] < upcoming):
            now, place = events.pop(0)
            if place >= 0:
                net.start(now, *starts[place][1:4], place, starts[place][4])
        elif upcoming is not None:
            now = upcoming
            for token in net.complete(now):
                assert isinstance(token, int)
                history.ends[token] = now
                history.order.append(token)
        else:
            return history
        sample(now)
        for r in resources:
            started = sum(s[1] for p, s in enumerate(starts) if r.name in s[2] and (s[0], p) <= (now, place))
            left = started - net.carried_bytes(r.name, now)
            assert left - 2 <= net.backlog_bytes(r.name, now) <= left


def carried_by(starts: list[Start], name: str, lane: Lane) -> int:
    return sum(size for _, size, path, of, _ in starts if name in path and of is lane)


@SETTINGS
@given(networks(), loads())
def test_every_flow_ends_and_every_byte_is_carried_once(resources: tuple[Resource, ...], starts: list[Start]) -> None:
    history = run(resources, starts)
    assert sorted(history.ends) == list(range(len(starts)))
    for (name, lane), carried in history.carried[-1][1].items():
        assert carried == carried_by(starts, name, lane)
    by_name = {r.name: r.rate_bps for r in resources}
    for place, (now, size, path, *_) in enumerate(starts):
        alone_ns = -(-size * 8_000_000_000 // min(by_name[name] for name in path))
        assert history.ends[place] >= now + alone_ns
    assert history.order == sorted(history.order, key=lambda place: (history.ends[place], place))


@SETTINGS
@given(networks(), loads(), st.lists(st.integers(0, 2_000_000), max_size=12).map(tuple))
def test_no_resource_carries_more_than_its_rate_in_any_window(
    resources: tuple[Resource, ...], starts: list[Start], sample_ns: tuple[int, ...]
) -> None:
    """Between any two samples: at most rate x time, and a byte a lane for rounding down."""
    carried = run(resources, starts, sample_ns).carried
    for i, (begin, before) in enumerate(carried):
        for end, after in carried[i + 1 :]:
            for r in resources:
                for lane in Lane:
                    assert after[r.name, lane] >= before[r.name, lane]
                grown = sum(after[r.name, lane] - before[r.name, lane] for lane in Lane)
                assert (grown - 2) * 8_000_000_000 <= r.rate_bps * (end - begin)


def busy_end(starts: list[Start], rate_bps: int) -> int:
    """When a queue that never idles while it holds work is empty, without any rounding up but the last."""
    end = 0
    for now, size, *_ in starts:
        end = max(end, now * rate_bps) + size * 8_000_000_000
    return -(-end // rate_bps)


@SETTINGS
@given(st.sampled_from(Discipline), rates, loads(st.just(("a",))))
def test_a_resource_works_while_it_has_work(kind: Discipline, rate_bps: int, starts: list[Start]) -> None:
    """Whatever the discipline, the last flow ends when all work is done: a nanosecond a flow for rounding up, and
    one bit per second a flow that integer shares leave."""
    ends = run((Resource(name="a", rate_bps=rate_bps, discipline=kind),), starts).ends
    done = busy_end(starts, rate_bps)
    idle_ns = 2 * len(starts) + len(starts) * done // rate_bps + 1
    assert done <= max(ends.values()) <= done + idle_ns


@SETTINGS
@given(rates, loads(st.just(("a",))))
def test_strict_high_flows_never_see_kv(rate_bps: int, starts: list[Start]) -> None:
    resources = (Resource(name="a", rate_bps=rate_bps, discipline=Discipline.STRICT),)
    history = run(resources, starts)
    high = [place for place, start in enumerate(starts) if start[3] is Lane.HIGH]
    alone = run(resources, [starts[place] for place in high])
    assert [history.ends[place] for place in high] == [alone.ends[i] for i in range(len(high))]


@SETTINGS
@given(
    st.integers(1, 99),
    st.integers(1, 99),
    st.lists(sizes, min_size=1, max_size=6),
    st.lists(sizes, min_size=1, max_size=6),
)
def test_weighted_lanes_divide_by_weight(high_weight: int, kv_weight: int, high: list[int], kv: list[int]) -> None:
    """Until the first lane runs dry the bytes carried are as the weights, whatever the number of flows."""
    resource = Resource(
        name="a", rate_bps=10**9, discipline=Discipline.WEIGHTED, high_weight=high_weight, kv_weight=kv_weight
    )
    starts: list[Start] = [
        (0, size, ("a",), lane, "") for lane, all_of in ((Lane.HIGH, high), (Lane.KV, kv)) for size in all_of
    ]
    history = run((resource,), starts)
    dry = min(max(history.ends[p] for p, s in enumerate(starts) if s[3] is lane) for lane in Lane)
    for now, carried in history.carried:
        if now <= dry:
            got = carried["a", Lane.HIGH], carried["a", Lane.KV]
            slack = (high_weight + kv_weight) * (2 + len(starts) * (1 + now // 10**9))
            assert abs(got[0] * kv_weight - got[1] * high_weight) <= slack


@SETTINGS
@given(networks((Discipline.FAIR,)), st.sampled_from(SHARED), loads(), st.randoms(use_true_random=False))
def test_shared_flows_do_not_depend_on_the_order_at_one_instant(
    resources: tuple[Resource, ...], kind: Discipline, starts: list[Start], chance: random.Random
) -> None:
    """Only the instant of a start counts, not its place among the starts of that instant."""
    resources = with_a(resources, kind)
    places = list(range(len(starts)))
    chance.shuffle(places)
    places.sort(key=lambda place: starts[place][0])
    ends, shuffled = run(resources, starts).ends, run(resources, [starts[place] for place in places]).ends
    assert ends == {place: shuffled[i] for i, place in enumerate(places)}


@SETTINGS
@given(rates, loads(st.just(("a",))))
def test_fifo_ends_in_order_of_start(rate_bps: int, starts: list[Start]) -> None:
    """One at a time, each at the full rate, as a queue written in four lines; flows of no bytes do not wait."""
    ends = run((Resource(name="a", rate_bps=rate_bps, discipline=Discipline.FIFO),), starts).ends
    free = 0
    for place, (now, size, *_) in enumerate(starts):
        if size:
            free = max(now, free) + -(-size * 8_000_000_000 // rate_bps)
        assert ends[place] == (free if size else now)


@SETTINGS
@given(rates, rates, loads(st.just(("a", "b"))))
def test_a_shared_path_through_fifo_keeps_its_order(rate_bps: int, other_bps: int, starts: list[Start]) -> None:
    """Fifo then fair: one flow at a time, as if both were fifo, but for a nanosecond a flow."""
    fifo = Resource(name="a", rate_bps=rate_bps, discipline=Discipline.FIFO)
    mixed = run((fifo, Resource(name="b", rate_bps=max(other_bps, rate_bps), discipline=Discipline.FAIR)), starts)
    reserved = run((fifo, Resource(name="b", rate_bps=max(other_bps, rate_bps), discipline=Discipline.FIFO)), starts)
    assert [p for p in mixed.order if starts[p][1]] == [p for p in reserved.order if starts[p][1]]
    assert all(abs(mixed.ends[place] - end) <= len(starts) for place, end in reserved.ends.items())


Want = tuple[tuple[str, ...], Lane]
flows = st.lists(st.tuples(paths, lanes), min_size=1, max_size=12)


def filled(resources: tuple[Resource, ...], wanted: list[Want]) -> tuple[list[Port], list[Contender]]:
    ports = {r.name: Port(r) for r in resources}
    contenders = [Contender(i, tuple(ports[n] for n in path), lane) for i, (path, lane) in enumerate(wanted)]
    for flow in contenders:
        for port in flow.path:
            port.flows[flow.order] = flow
    fill(list(ports.values()), contenders)
    return list(ports.values()), contenders


@SETTINGS
@given(networks(), flows)
def test_every_flow_crosses_a_full_resource(resources: tuple[Resource, ...], wanted: list[Want]) -> None:
    """Work conservation of a whole network, mixed disciplines and ties included."""
    ports, contenders = filled(resources, wanted)
    for port in ports:
        assert sum(flow.rate_bps for flow in port.flows.values()) == port.rate_bps - port.left_bps <= port.rate_bps
    for flow in contenders:
        assert flow.rate_bps >= 0 and any(port.is_full for port in flow.path)


@SETTINGS
@given(networks((Discipline.FAIR,)), flows)
def test_fair_is_max_min(resources: tuple[Resource, ...], wanted: list[Want]) -> None:
    """Each flow has a bottleneck: a full resource on which no other flow has more."""
    _, contenders = filled(resources, wanted)
    for flow in contenders:
        assert any(
            port.is_full and all(other.rate_bps <= flow.rate_bps + len(port.flows) for other in port.flows.values())
            for port in flow.path
        )


@SETTINGS
@given(networks((Discipline.STRICT,)), flows)
def test_strict_lanes_on_every_resource(resources: tuple[Resource, ...], wanted: list[Want]) -> None:
    """High flows have the rates they would have alone."""
    _, contenders = filled(resources, wanted)
    high = [flow.rate_bps for flow in contenders if flow.lane is Lane.HIGH]
    _, alone = filled(resources, [want for want in wanted if want[1] is Lane.HIGH])
    assert high == [flow.rate_bps for flow in alone]


def through_a(wanted: list[Want]) -> list[Want]:
    return [(("a", *(name for name in path if name != "a")), lane) for path, lane in wanted]


@SETTINGS
@given(networks((Discipline.FAIR,)), flows)
def test_lanes_of_the_narrowest_resource_hold_through_the_others(
    resources: tuple[Resource, ...], wanted: list[Want]
) -> None:
    """High flows have the rates they would have alone: KV takes no fair share that it could not get through."""
    narrowest = min(resources, key=lambda r: r.rate_bps).rate_bps
    wide = tuple(Resource(name=r.name, rate_bps=r.rate_bps, discipline=r.discipline) for r in resources[1:])
    resources = (Resource(name="a", rate_bps=narrowest, discipline=Discipline.STRICT), *wide)
    _, contenders = filled(resources, through_a(wanted))
    high = [flow.rate_bps for flow in contenders if flow.lane is Lane.HIGH]
    _, alone = filled(resources, [want for want in through_a(wanted) if want[1] is Lane.HIGH])
    assert all(abs(rate - flow.rate_bps) <= len(wanted) for rate, flow in zip(high, alone, strict=True))


@SETTINGS
@given(networks((Discipline.FAIR,)), st.sampled_from(Discipline), flows)
def test_a_resource_too_wide_to_fill_changes_nothing(
    resources: tuple[Resource, ...], kind: Discipline, wanted: list[Want]
) -> None:
    wanted = [(path if len(path) > 1 else (*path, "b" if path[0] == "a" else "a"), lane) for path, lane in wanted]
    wide = Resource(name="a", rate_bps=len(wanted) + sum(r.rate_bps for r in resources[1:]), discipline=kind)
    _, contenders = filled((wide, *resources[1:]), wanted)
    _, without = filled(resources[1:], [(tuple(n for n in path if n != "a"), lane) for path, lane in wanted])
    assert [flow.rate_bps for flow in contenders] == [flow.rate_bps for flow in without]


@SETTINGS
@given(networks((Discipline.FAIR,)), st.sampled_from((Discipline.FIFO, Discipline.STRICT)), flows)
def test_who_goes_first_on_a_full_resource_is_limited_elsewhere(
    resources: tuple[Resource, ...], kind: Discipline, wanted: list[Want]
) -> None:
    """Or else nothing is left to those behind it, but for the rounding of equal parts."""
    _, contenders = filled(with_a(resources, kind), through_a(wanted))
    for flow in contenders:
        if any(port.is_full for port in flow.path if port.name != "a"):
            continue
        for other in contenders:
            behind = other.order > flow.order if kind is Discipline.FIFO else other.lane > flow.lane
            assert not behind or other.rate_bps < len(wanted)
