"""Collectives of a group: sizes, parts, and the barrier in every order of arrival, with losses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulators.collectives import DEADLINE, EXPERTS_ID, CollectiveFigures, ExpertGroup, Phase
from testbed.errors import ConfigError, PeerError
from testbed.models.compute import gpu_for
from testbed.models.model import DS_27B, DS_660B, QWEN_32B
from testbed.models.scale import Scale
from testbed.protocol.collectives import Collectives, Part
from testbed.protocol.machine import Compute, Exchange, ExchangeTag, Outbox, SetDeadline, ShardArrived
from testbed.units import GBIT

ENGINES = ("pe0gpu0", "pe0gpu1", "pe0gpu2")
WAIT_NS = 1_000


def collectives(**changes: Any) -> Collectives:
    """Three bytes to each of two peers per token and layer; one layer per part, the first without experts."""
    values: dict[str, Any] = {
        "transport": "rdma", "layers": 2, "dense_layers": 1, "top_k": 2, "dispatch_bytes": 9.0, "combine_bytes": 18.0,
        "prefill_expert_ns": 10.0, "decode_expert_ns": 100.0, "cnic_rate_bps": 10**9,
    }  # fmt: skip
    return Collectives(**(values | changes))


def group(role: str, engines: tuple[str, ...] = ENGINES) -> ExpertGroup:
    c = collectives()
    return ExpertGroup(role, engines, c, c.parts(((0, 4),)), WAIT_NS, per_token_ns=c.prefill_expert_ns)


# --- sizes -------------------------------------------------------------------------------------------------------


def test_golden_sizes_of_deepep() -> None:
    """128 tokens, hidden 7168, top-8: 7.3 MB of dispatch and 14.7 MB of combine per GPU and layer."""
    assert 128 * DS_660B.exchange_bytes(combine=False) == pytest.approx(7.3e6, rel=0.01)
    assert 128 * DS_660B.exchange_bytes(combine=True) == pytest.approx(14.7e6, rel=0.01)
    unscaled = Scale().fit(DS_660B)
    c = unscaled.collectives(unscaled.compute_model(gpu_for(DS_660B)), "rdma", 1, 400 * GBIT)
    engines = tuple(f"de0gpu{i}" for i in range(8))
    sent = sum(c.shard_bytes(128, 1, c.share(engines, engines[0], peer), combine=False) for peer in engines[1:])
    assert sent == pytest.approx(7.34e6 * 7 / 8, rel=1e-3)


def test_sizes_shrink_as_kv_does() -> None:
    scale = Scale(bandwidth_scale=11_000, time_scale=2.096, length_scale=32, agents_scale=32).fit(DS_27B)
    c = scale.collectives(scale.compute_model(gpu_for(DS_27B)), "rdma", 15, 36_000_000)
    paper = DS_27B.exchange_bytes(combine=False) / DS_27B.kv_bytes_per_token_layer
    assert c.dispatch_bytes / scale.kv_bytes_per_token_layer == pytest.approx(paper, rel=1e-9)
    assert c.combine_bytes == 2 * c.dispatch_bytes


def test_experts_of_the_published_configurations() -> None:
    assert (DS_660B.expert_layers, DS_27B.expert_layers, QWEN_32B.expert_layers) == (58, 29, 0)
    assert DS_660B.expert_share == pytest.approx(0.552, abs=0.001)  # 20.4 B of 37 B active parameters
    assert DS_27B.expert_share == pytest.approx(0.520, abs=0.001)


def test_a_model_without_experts_is_refused() -> None:
    scale = Scale().fit(QWEN_32B)
    with pytest.raises(ConfigError, match=r"collectives: Qwen 32B has no experts.*off.*\."):
        scale.collectives(scale.compute_model(gpu_for(QWEN_32B)), "rdma", 1, 10**9)


def test_rails_send_one_copy_per_remote_node_to_the_same_index() -> None:
    c = collectives(transport="rails", top_k=8)
    engines = tuple(f"pe{n}gpu{i}" for n in range(2) for i in range(2))
    assert c.share(engines, "pe0gpu0", "pe0gpu1") == 0  # NVLink
    assert c.share(engines, "pe0gpu0", "pe1gpu1") == 0  # forwarded there by NVLink
    assert c.share(engines, "pe0gpu0", "pe1gpu0") == pytest.approx((1 - 0.5**8) / 8)
    wide = tuple(f"pe{n}gpu0" for n in range(16))
    assert c.share(wide, "pe0gpu0", "pe9gpu0") == pytest.approx(4 / 16 / 8)  # at most four nodes per token


def test_parts_do_not_cross_steps() -> None:
    c = collectives(layers=2)
    assert c.parts(((0, 3), (3, 6))) == (
        Part(0, 0, 2, False), Part(0, 2, 3, True), Part(1, 3, 5, False), Part(1, 5, 6, True),
    )  # fmt: skip
    assert [c.expert_layers(a, b) for a, b in ((0, 1), (0, 2), (1, 3))] == [0, 1, 2]


def test_local_time_leaves_out_experts_and_idle_network() -> None:
    g = group("pe0gpu0")
    # Part 0 is layers 0 and 1, one of them with experts: 10 ns a token; (9 + 18) bytes x 2/3 at 8 ns a byte.
    assert g.local_ns(1_000, 4) == 1_000 - 40 - 4 * 27 * 2 // 3 * 8
    assert g.local_ns(10, 4) == 0


# --- the barrier -------------------------------------------------------------------------------------------------


class Cluster:
    """Groups joined by a wire whose deliveries ``pick`` chooses among; every engine has some batches to run."""

    def __init__(self, batches: dict[str, list[int]], pick: Any, lose: Any = lambda *_: False) -> None:
        self.groups = {role: group(role) for role in ENGINES}
        self.batches = batches
        self.pick, self.lose = pick, lose
        self.flight: list[tuple[str, Any]] = []
        self.posted: list[tuple[str, Exchange]] = []
        self.experts: list[tuple[str, int]] = []
        self.finished: Counter[str] = Counter()
        self.timeouts: list[str] = []
        self.errors: list[str] = []
        self.now_ns = 0
        self.deadlines: dict[str, int] = {}

    def run(self) -> None:
        for role in ENGINES:
            self._begin(role)
        while True:
            self.now_ns += 1
            if self.flight:
                role, event = self.flight.pop(self.pick(len(self.flight)))
            elif self.deadlines:
                role = min(self.deadlines, key=self.deadlines.__getitem__)
                self.now_ns, event = self.deadlines.pop(role), DEADLINE
            else:
                return
            self._take(role, event)

    def _take(self, role: str, event: Any) -> None:
        g, out = self.groups[role], Outbox()
        if event == DEADLINE:
            over = False
            if late := g.late(out, self.now_ns):
                self.timeouts.append(f"{role}: {late}")
                over = g.resume(out, self.now_ns)
        elif event == "local":
            over = g.computed(self.batches[role][0], out, self.now_ns)
        elif event == "experts":
            over = g.experts_computed(out, self.now_ns)
        else:
            try:
                over = g.arrived(event, out, self.now_ns)
            except PeerError as error:
                self.errors.append(str(error))
                over = g.resume(out, self.now_ns)
        self._perform(role, out)
        self._go_on(role, over)

    def _go_on(self, role: str, over: bool) -> None:
        g = self.groups[role]
        if over and g.phase is Phase.IDLE:
            self.finished[role] += 1
            if g.loaded:
                self.batches[role].pop(0)
                self._begin(role)
        elif over:
            self.flight.append((role, "local"))
        while g.called and not self.batches[role]:
            out = Outbox()
            if g.join(out, self.now_ns):
                self.finished[role] += 1
            self._perform(role, out)

    def _begin(self, role: str) -> None:
        if self.batches[role]:
            self.groups[role].begin()
            self.flight.append((role, "local"))

    def _perform(self, role: str, out: Outbox) -> None:
        for action in out.take():
            if isinstance(action, Exchange):
                self.posted.append((role, action))
                for peer, _ in action.shards:
                    if not self.lose(role, peer, action.tag):
                        self.flight.append((peer, ShardArrived(role, action.tag, action.tokens, 5)))
            elif isinstance(action, Compute):
                assert action.compute_id == EXPERTS_ID
                self.experts.append((role, action.duration_ns))
                self.flight.append((role, "experts"))
            elif isinstance(action, SetDeadline):
                self.deadlines[role] = action.at_ns
            else:
                self.deadlines.pop(role, None)


@settings(max_examples=150)
@given(
    st.tuples(*(st.lists(st.integers(0, 3), max_size=2) for _ in ENGINES)),
    st.lists(st.integers(0, 2**16), min_size=1),
)
def test_every_order_of_arrival_takes_all_through_all_rounds(
    batches: tuple[list[int], ...], choices: list[int]
) -> None:
    turn = iter(range(10**9))
    world = Cluster(
        {role: list(batch) for role, batch in zip(ENGINES, batches, strict=True)},
        lambda n: choices[next(turn) % len(choices)] % n,
    )
    world.run()
    assert not world.errors
    assert not world.timeouts
    rounds = {role: g.round for role, g in world.groups.items()}
    # Rounds are common: at least as many as the longest list of batches, at most as many as all of them.
    assert len(set(rounds.values())) == 1
    assert max(map(len, batches)) <= rounds[ENGINES[0]] <= sum(map(len, batches))
    assert not any(world.batches.values())
    _check_exchanges(world, rounds[ENGINES[0]])


def _check_exchanges(world: Cluster, rounds: int) -> None:
    """Everybody posts every collective once and in order; combine takes back what dispatch brought."""
    tags = [ExchangeTag(r, p, c) for r in range(rounds) for p in range(2) for c in (False, True)]
    sizes: dict[tuple[ExchangeTag, str, str], int] = {}
    for role in ENGINES:
        own = [action for by, action in world.posted if by == role]
        assert [action.tag for action in own] == tags
        sizes |= {(action.tag, role, peer): size for action in own for peer, size in action.shards}
    for (tag, sender, receiver), size in sizes.items():
        if tag.combine:
            assert size == 2 * sizes[ExchangeTag(tag.round, tag.part, False), receiver, sender]


def test_experts_compute_for_the_mean_of_the_group() -> None:
    world = Cluster({"pe0gpu0": [6], "pe0gpu1": [3], "pe0gpu2": []}, lambda n: 0)
    world.run()
    # 10 ns a token and layer; one layer of part 0 has experts, both of part 1. The third engine works as much.
    assert Counter(world.experts) == Counter((role, ns) for role in ENGINES for ns in (30, 60))


def test_an_engine_with_a_batch_that_is_not_ready_keeps_the_round_waiting() -> None:
    first, second = group("a", ("a", "b")), group("b", ("a", "b"))
    out = Outbox()
    first.begin()
    first.computed(1, out, 0)
    assert not second.called
    second.arrived(ShardArrived("a", ExchangeTag(0, 0, False), 1, 5), out, 1)
    assert second.called  # it is its engine that does not join, because it has a batch
    second.begin()
    second.computed(2, out, 2)
    assert (second.round, second.phase) == (0, Phase.EXPERTS)


@pytest.mark.parametrize("combine", [False, True])
@pytest.mark.parametrize("part", [0, 1])
def test_a_lost_shard_is_one_named_timeout(part: int, combine: bool) -> None:
    lost = ExchangeTag(0, part, combine)
    world = Cluster(
        {"pe0gpu0": [1, 1], "pe0gpu1": [1], "pe0gpu2": []},
        lambda n: 0,
        lambda sender, peer, tag: (sender, peer, tag) == ("pe0gpu1", "pe0gpu0", lost),
    )
    world.run()
    kind = "combine" if combine else "dispatch"
    assert world.timeouts == [f"pe0gpu0: {kind} of round 0 part {part} did not come from pe0gpu1"]
    assert not world.errors
    assert {g.round for g in world.groups.values()} == {2}
    assert {g.phase for g in world.groups.values()} == {Phase.IDLE}


def test_an_engine_that_nobody_hears_is_gone_on_without_and_catches_up() -> None:
    """Nothing of pe0gpu2 arrives for a while; it hears the others all the time."""
    heard_from = ExchangeTag(2, 0, False)
    world = Cluster(
        {"pe0gpu0": [1] * 4, "pe0gpu1": [1] * 4, "pe0gpu2": []},
        lambda n: 0,
        lambda sender, peer, tag: sender == "pe0gpu2" and tag < heard_from,
    )
    world.run()
    assert len(world.timeouts) == 4  # each of the others once in each of two rounds, not at every barrier
    for g in world.groups.values():
        assert all(set(counted) <= {5} for counted in g.figures.latencies.values()), (
            "nobody waited 0 ns for a lost shard"
        )
    assert {g.round for g in world.groups.values()} == {4}
    assert all(not held for g in world.groups.values() for held in g._arrived.values())


def test_a_group_that_went_on_is_caught_up_with() -> None:
    """pe0gpu2 stands still until the others have given it up, and then gets all at once what they have sent."""
    g, out = group("c", ("a", "b", "c")), Outbox()
    tags = [ExchangeTag(0, p, c) for p in range(2) for c in (False, True)]
    g.begin()  # its own layers take for ever
    for peer in "ab":
        g.arrived(ShardArrived(peer, tags[0], 1, 5), out, 0)
    with pytest.raises(PeerError, match="the group went on without it"):
        g.arrived(ShardArrived("a", tags[1], 1, 5), out, 0)
    g.arrived(ShardArrived("a", tags[2], 1, 5), out, 0)
    for tag in tags[2:]:  # from b, all else is lost
        g.arrived(ShardArrived("a", ExchangeTag(1, tag.part, tag.combine), 1, 5), out, 0)
    assert sum(map(len, g._arrived.values())) <= 4
    assert not g.computed(1, out, 1)
    assert g.phase is Phase.EXPERTS  # without a's dispatch, which it no longer awaits


@pytest.mark.parametrize(
    ("sender", "tag", "error"),
    [
        ("z", ExchangeTag(0, 0, False), "not of its group"),
        ("b", ExchangeTag(0, 0, False), "a second time"),
        ("b", ExchangeTag(0, 1, False), "the group went on without it"),
        ("b", ExchangeTag(0, 7, False), "a round has 2 parts"),
    ],
)
def test_a_shard_that_is_not_due_is_the_peers_fault(sender: str, tag: ExchangeTag, error: str) -> None:
    g, out = group("a", ("a", "b")), Outbox()
    g.arrived(ShardArrived("b", ExchangeTag(0, 0, False), 1, 5), out, 0)
    with pytest.raises(PeerError, match=error):
        g.arrived(ShardArrived(sender, tag, 1, 5), out, 0)


def test_a_shard_that_was_used_does_not_come_again() -> None:
    g, out = group("a", ("a", "b")), Outbox()
    g.begin()
    g.computed(1, out, 0)
    g.arrived(ShardArrived("b", ExchangeTag(0, 0, False), 1, 5), out, 0)
    with pytest.raises(PeerError, match="comes late, or a second time"):
        g.arrived(ShardArrived("b", ExchangeTag(0, 0, False), 1, 5), out, 0)


def test_figures_are_bounded_and_true() -> None:
    figures = CollectiveFigures()
    for n in range(100_000):
        figures.slowest(False, 1_000_000 + 10 * n, 500_000)
        figures.attention(n, n + 1)
    report = figures.report()
    assert len(report) < 5_000
    counted = {int(k.rsplit(".", 1)[1]): v for k, v in report.items() if k.startswith("collective.dispatch_ns.")}
    assert sum(counted.values()) == 100_000
    assert sum(ns * n for ns, n in counted.items()) / 100_000 == pytest.approx(1_499_995, rel=0.005)
    kept = {int(k.rsplit(".", 1)[1]): v for k, v in report.items() if k.startswith("collective.attention_ns.")}
    assert kept == {n: n + 1 for n in range(0, 100_000, report["collective.every"])}
