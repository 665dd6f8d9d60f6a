"""The generator reproduces Table 2 over 500 trajectories, within MaxLen, from any seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ConfigError
from testbed.workload.stats import means
from testbed.workload.table2 import PROFILES, TRACE_SIZE, Profile, _quasi_random, generate, profile_named

profiles = pytest.mark.parametrize("profile", list(PROFILES.values()), ids=list(PROFILES))


@profiles
@pytest.mark.parametrize("seed", [0, 1, 7, 2026, 99_999])
def test_means_are_within_two_percent_of_the_table(profile: Profile, seed: int) -> None:
    got = means(generate(profile, TRACE_SIZE, seed))
    for column in ("turns", "append_tokens", "generate_tokens", "total_tokens", "context_tokens"):
        assert getattr(got, column) == pytest.approx(getattr(profile, column), rel=0.02), column
    # the context is the same whichever way it is averaged, so the bytes loaded are too
    assert got.context_tokens_per_turn == pytest.approx(profile.context_tokens, rel=0.02)


@profiles
def test_max_len_is_respected_and_nearly_reached(profile: Profile) -> None:
    totals = [t.total_tokens for t in generate(profile, TRACE_SIZE, 3)]
    assert max(totals) <= profile.max_tokens
    assert sum(total > 0.75 * profile.max_tokens for total in totals) > TRACE_SIZE / 2


@profiles
def test_turns_are_spread_and_appends_have_a_tail(profile: Profile) -> None:
    trajectories = generate(profile, 200, 5)
    turns = sorted(len(t.turns) for t in trajectories)
    assert turns[20] < 0.5 * profile.turns and turns[-20] > 1.7 * profile.turns
    later = sorted(turn.append_tokens for t in trajectories for turn in t.turns[1:])
    assert later[len(later) * 99 // 100] > 4 * later[len(later) // 2]


def test_a_seed_decides_everything() -> None:
    profile = profile_named("48K")
    assert generate(profile, 20, 4) == generate(profile, 20, 4)
    assert generate(profile, 20, 4) != generate(profile, 20, 5)
    assert len({t.name for t in generate(profile, 20, 4)}) == 20


def test_a_few_dozen_agents_are_near_the_table() -> None:
    profile = profile_named("64K")
    got = means(generate(profile, 32, 0))
    assert got.turns == pytest.approx(profile.turns, rel=0.06)
    assert got.context_tokens == pytest.approx(profile.context_tokens, rel=0.04)


def test_draws_fill_each_axis_and_pair_better_than_chance() -> None:
    squares: list[float] = []
    for seed in range(40):
        points = _quasi_random(np.random.default_rng(seed), 500)
        assert all(sorted(np.floor(axis * 500).astype(int)) == list(range(500)) for axis in points)
        squares.extend(np.asarray(np.corrcoef(points))[np.triu_indices(3, 1)] ** 2)
    assert np.sqrt(np.mean(squares)) < 0.6 / np.sqrt(500)  # 1 / sqrt(500) by chance


@given(count=st.integers(1, 12), seed=st.integers(0, 2**40), name=st.sampled_from(list(PROFILES)))
@settings(max_examples=40)
def test_any_count_gives_valid_trajectories(count: int, seed: int, name: str) -> None:
    profile = profile_named(name)
    trajectories = generate(profile, count, seed)
    assert len(trajectories) == count
    for trajectory in trajectories:
        assert len(trajectory.turns) >= 2
        assert trajectory.total_tokens <= profile.max_tokens
        assert all(t.append_tokens >= 1 and t.generate_tokens >= 1 for t in trajectory.turns)


def test_bad_arguments_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="32K, 48K, 64K"):
        profile_named("128K")
    with pytest.raises(ConfigError, match="at least 1"):
        generate(profile_named("32K"), 0, 0)
    with pytest.raises(ConfigError, match="seed"):
        generate(profile_named("32K"), 1, -1)
