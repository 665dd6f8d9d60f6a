"""Trajectories, agents, replay, sharing, shrinking and the expected hit rate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import ConfigError
from testbed.workload.agents import Workload, make_agents, offline_starts_ns, poisson_starts_ns, source_trajectories
from testbed.workload.shipped import load_shipped
from testbed.workload.stats import expected_hits, means
from testbed.workload.tokens import random_ids
from testbed.workload.trajectory import AgentScript, Trajectory, Turn, shrink

VOCAB = 1000
turn_lengths = st.lists(st.tuples(st.integers(1, 900), st.integers(1, 300)), min_size=1, max_size=30)


def trajectory(lengths: list[tuple[int, int]], name: str = "t", shared: int = 0) -> Trajectory:
    turns = tuple(Turn(append_tokens=a, generate_tokens=g) for a, g in lengths)
    return Trajectory(name=name, turns=turns, shared_prefix="sys" if shared else "", shared_prefix_tokens=shared)


def script(of: Trajectory, seed: int = 0, **more: int) -> AgentScript:
    return AgentScript(name="agent0", trajectory=of, seed=seed, vocab_size=VOCAB, **more)


def test_the_prompt_is_appends_and_generations_in_turn() -> None:
    agent = script(trajectory([(5, 2), (3, 1), (4, 6)]))
    g = [np.array([7, 8], dtype=np.uint32), np.array([9], dtype=np.uint32)]
    prompt = agent.prompt_ids(2, g)
    want = [*agent.append_ids(0), 7, 8, *agent.append_ids(1), 9, *agent.append_ids(2)]
    assert prompt.tolist() == want and len(prompt) == agent.prompt_tokens(2) == 15
    assert agent.prompt_ids(0, []).tolist() == agent.append_ids(0).tolist()
    with pytest.raises(ValueError, match="turn 2 follows"):
        agent.prompt_ids(2, g[:1])
    with pytest.raises(ValueError, match="turn 1 follows"):
        agent.prompt_ids(1, [g[1]])


@given(lengths=turn_lengths, seed=st.integers(0, 1000))
def test_ids_are_a_function_of_seed_name_and_position(lengths: list[tuple[int, int]], seed: int) -> None:
    a, b = script(trajectory(lengths), seed), script(trajectory(lengths), seed)
    for turn, (append, _) in enumerate(lengths):
        ids = a.append_ids(turn)
        assert ids.dtype == np.uint32 and ids.shape == (append,) and ids.max() < VOCAB
        assert np.array_equal(ids, b.append_ids(turn))


def test_ids_differ_by_seed_name_and_turn() -> None:
    base = script(trajectory([(50, 1), (50, 1)])).append_ids(0)
    assert not np.array_equal(base, script(trajectory([(50, 1)]), seed=1).append_ids(0))
    assert not np.array_equal(base, script(trajectory([(50, 1)], name="u")).append_ids(0))
    assert not np.array_equal(base, script(trajectory([(50, 1), (50, 1)])).append_ids(1))
    assert len(np.unique(random_ids("x", 0, 10_000))) > 9_990


@given(start=st.integers(0, 500), count=st.integers(0, 200))
def test_random_text_is_one_endless_text(start: int, count: int) -> None:
    assert np.array_equal(random_ids("x", 0, start + count)[start:], random_ids("x", start, count))


def test_a_shared_prefix_is_shared_and_nothing_more() -> None:
    a = script(trajectory([(100, 1)], name="a", shared=40)).append_ids(0)
    b = script(trajectory([(80, 1)], name="b", shared=30)).append_ids(0)
    assert np.array_equal(a[:30], b[:30])
    assert not np.array_equal(a[30:40], b[30:40]) and not np.array_equal(a[40:80], b[40:])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Turn(append_tokens=0, generate_tokens=1),
        lambda: Turn(append_tokens=1, generate_tokens=0),
        lambda: Turn(append_tokens=2, generate_tokens=1, append_ids=(1,)),
        lambda: Trajectory(name="x", turns=()),
        lambda: trajectory([(5, 1)], shared=6),
        lambda: Workload(agents=0),
        lambda: Workload(agents=1, length_scale=0),
        lambda: Workload(agents=1, max_turns=-1),
        lambda: source_trajectories(Workload(agents=1, source="mooncake")),
        lambda: source_trajectories(Workload(agents=1, source="table2:96K")),
        lambda: source_trajectories(Workload(agents=1, source="sweagent:")),
        lambda: source_trajectories(Workload(agents=1, source="shipped:x")),
        lambda: source_trajectories(Workload(agents=1, source="sweagent:/nowhere.traj")),
        lambda: means([]),
        lambda: expected_hits([], 64),
        lambda: poisson_starts_ns(3, 0.0, 1),
    ],
)
def test_user_faults_are_config_errors(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


@given(lengths=turn_lengths, k=st.integers(1, 64))
def test_shrinking_keeps_turns_and_proportions(lengths: list[tuple[int, int]], k: int) -> None:
    long = trajectory(lengths, shared=min(lengths[0][0], 130))
    short = shrink(long, k)
    assert len(short.turns) == len(long.turns)
    for a, b in zip(long.turns, short.turns, strict=True):
        assert 1 <= b.append_tokens <= -(-a.append_tokens // k)
        assert 1 <= b.generate_tokens <= -(-a.generate_tokens // k)
    if all(t.append_tokens >= k for t in long.turns):
        total = sum(t.append_tokens for t in long.turns)
        assert abs(sum(t.append_tokens for t in short.turns) - total / k) <= 1
    assert short.shared_prefix_tokens <= long.shared_prefix_tokens // k


@given(ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200), k=st.integers(1, 20))
def test_shrinking_known_ids(ids: list[int], k: int) -> None:
    long = Trajectory(name="x", turns=(Turn(append_tokens=len(ids), generate_tokens=5, append_ids=tuple(ids)),))
    short = shrink(long, k).turns[0]
    assert short.append_ids is not None and len(short.append_ids) == short.append_tokens
    assert short.append_tokens == max(1, round(len(ids) / k))


def test_the_shipped_workload() -> None:
    shipped = load_shipped()
    assert len(shipped) == 9 and shipped == load_shipped()
    assert all(5 <= len(t.turns) <= 21 for t in shipped)
    groups = [t.shared_prefix for t in shipped]
    assert groups.count("crypto-1") == 2 and groups.count("repair-humanevalfix") == 4
    stats = expected_hits(make_agents(Workload(agents=9), VOCAB), 64)
    assert stats.requests == sum(len(t.turns) for t in shipped) == 114
    assert stats.hit_rate == pytest.approx(0.896, abs=0.002)
    assert stats.shared_hit_tokens == (1264 // 64 + 287 // 64 + 85 // 64 + 80 // 64) * 64


def test_extra_agents_replay_behind_a_synthetic_round() -> None:
    agents = make_agents(Workload(agents=30, seed=3, synthetic_tokens=70), VOCAB)
    assert [a.name for a in agents] == [f"agent{i}" for i in range(30)]
    assert len({a.trajectory.name for a in agents}) == 30
    originals = {t.name: t for t in load_shipped()}
    for agent in agents[9:]:
        first = agent.trajectory.turns[0]
        assert (first.append_tokens, first.generate_tokens) == (70, 1)
        assert agent.trajectory.turns[1:] == originals[agent.trajectory.name.partition("+")[0]].turns
        assert agent.trajectory.shared_prefix_tokens == 0
    assert expected_hits(agents, 32).shared_hit_tokens == expected_hits(agents[:9], 32).shared_hit_tokens
    assert len({tuple(a.append_ids(0)[:64].tolist()) for a in agents[9:]}) == 21
    assert agents == make_agents(Workload(agents=30, seed=3, synthetic_tokens=70), VOCAB)
    assert agents != make_agents(Workload(agents=30, seed=4, synthetic_tokens=70), VOCAB)


def test_max_turns_and_start_turn() -> None:
    whole = make_agents(Workload(agents=12), VOCAB)
    cut = make_agents(Workload(agents=12, max_turns=3), VOCAB)
    assert [a.turns for a in cut] == [3] * 9 + [4] * 3  # the synthetic round comes on top
    assert cut[0].trajectory.turns == whole[0].trajectory.turns[:3]
    late = make_agents(Workload(agents=12, start_turn=2, max_turns=2), VOCAB)
    assert [a.turns for a in late] == [2] * 12
    for a, b in zip(late, whole, strict=True):
        start = 2 + ("+" in b.trajectory.name)
        assert a.warm_tokens == b.trajectory.context_tokens(start)
        assert a.prompt_tokens(0) == b.prompt_tokens(start) and a.prompt_tokens(1) == b.prompt_tokens(start + 1)
    ending = make_agents(Workload(agents=9, start_turn=1000), VOCAB)
    assert [a.turns for a in ending] == [1] * 9
    cold, warm = (expected_hits(late, 64, warm_stored=stored) for stored in (False, True))
    assert warm.own_hit_tokens - cold.own_hit_tokens == sum(a.warm_tokens // 64 * 64 for a in late)


def test_known_text_survives_a_late_start(tmp_path: Path) -> None:
    text = '{"history": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "ok then"}, '
    text += '{"role": "tool", "content": "done"}, {"role": "assistant", "content": "good"}]}'
    for name in ("a", "b"):
        (tmp_path / f"{name}.traj").write_text(text % ("the very same task " * 9))
    a, b = make_agents(Workload(source=f"sweagent:{tmp_path}", agents=2, start_turn=1), VOCAB)
    same = make_agents(Workload(source=f"sweagent:{tmp_path}", agents=2), VOCAB)[0]
    n = same.prompt_tokens(0)
    for late in (a, b):
        assert np.array_equal(late.append_ids(0)[:n], same.append_ids(0))
    assert a.warm_tokens == n + same.generate_tokens(0)


@pytest.mark.parametrize("k", [4, 16, 32])
def test_the_hit_rate_survives_shrinking(k: int) -> None:
    paper = expected_hits(make_agents(Workload(source="table2:64K", agents=16), VOCAB), 64)
    small = expected_hits(make_agents(Workload(source="table2:64K", agents=16, length_scale=k), VOCAB), 64 // k)
    assert small.requests == paper.requests
    assert small.hit_rate == pytest.approx(paper.hit_rate, abs=0.003)
    # tiny generations are rounded up to one token, so contexts grow a little with k
    assert small.prompt_tokens * k == pytest.approx(paper.prompt_tokens, rel=0.12)


def test_table2_agents_share_nothing_and_hit_as_the_paper_says() -> None:
    stats = expected_hits(make_agents(Workload(source="table2:64K", agents=32), VOCAB), 64)
    assert stats.shared_hit_tokens == 0
    assert stats.hit_rate > 0.985


def brute_force_hits(scripts: list[AgentScript], block: int) -> int:
    """Own hits, token by token: which blocks of the prompt had all their KV before the request."""
    hits = 0
    for agent in scripts:
        with_kv = 0
        for turn in range(agent.turns):
            prompt = agent.prompt_tokens(turn)
            hits += sum(block for b in range(prompt // block) if (b + 1) * block <= with_kv)
            with_kv = prompt + agent.generate_tokens(turn) - 1
    return hits


@given(lengths=turn_lengths, block=st.integers(1, 70))
def test_expected_hits_agree_with_counting(lengths: list[tuple[int, int]], block: int) -> None:
    scripts = [script(trajectory(lengths))]
    stats = expected_hits(scripts, block)
    assert stats.own_hit_tokens == brute_force_hits(scripts, block)
    assert stats.own_hit_tokens < stats.prompt_tokens
    assert stats.shared_hit_tokens == 0


def test_equal_first_prompts_hit_all_but_the_last_block() -> None:
    turn = Turn(append_tokens=64, generate_tokens=1, append_ids=tuple(range(64)))
    twins = [script(Trajectory(name=name, turns=(turn,))) for name in "ab"]
    assert expected_hits(twins, 16).shared_hit_tokens == 48
    assert expected_hits(twins, 16).shared_hit_rate == 48 / 128 and expected_hits(twins, 16).hit_rate == 0


def test_means_weigh_trajectories_or_turns() -> None:
    got = means([trajectory([(10, 2)]), trajectory([(4, 1), (2, 3), (3, 1)])])
    assert (got.turns, got.total_tokens) == (2, (12 + 14) / 2)
    assert (got.append_tokens, got.append_tokens_per_turn) == ((10 + 3) / 2, 19 / 4)
    assert (got.context_tokens, got.context_tokens_per_turn) == ((0 + 5) / 2, 15 / 4)


def test_starts() -> None:
    assert offline_starts_ns(3) == [0, 0, 0]
    starts = poisson_starts_ns(4000, 0.5, 1)
    assert starts == sorted(starts) == poisson_starts_ns(4000, 0.5, 1) != poisson_starts_ns(4000, 0.5, 2)
    assert starts[-1] / 4000 / 1e9 == pytest.approx(2.0, rel=0.05)
    gaps = np.diff(starts) / 1e9
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
