"""Trajectories with the profile of the paper's traces (Table 2), from a seed.

The paper gives five means per trace and nothing of the distributions. Two facts about the means shape this generator:

* turns x (append + gen) is 1.6 to 1.7 times the mean total, so append and gen cannot be averages over all turns; they
  are read as averages over trajectories of each trajectory's own average. Then E[turns] * E[1/turns] = 1.6 to 1.7: the
  number of turns is widely spread and tasks with many turns have short ones. (Averaged over all turns, append and gen
  are that factor smaller.)
* the mean context is more than half the mean total, so the first prompt (system prompt, tools, task) is long.

Model of one trajectory, with MaxLen M:

=============  ===================================================================================
total          M * u^p, u uniform: most end near MaxLen, as truncated replays do; never above it
turns          log-logistic, cut at its 2nd and 98th percentile, independent of the total
first append   log-logistic (sigma 0.3) around a mean, cut likewise; at most half the total
gen            a fixed share of what is left after the first append; gamma-spread over turns (shape 4)
append         the rest; lognormal-spread over turns (sigma 0.8: tool outputs have long tails)
=============  ===================================================================================

p, the two parameters of turns, the mean of the first append and the share of gen are solved for once per profile on a
fixed grid, without any random number. Draws are quasi-random (stratified, paired by a Kronecker sequence from a random
start), so that the means of a few dozen agents are already near the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from testbed.errors import ConfigError
from testbed.workload.trajectory import Trajectory, Turn

Floats = npt.NDArray[np.float64]

TRACE_SIZE = 500
"""Trajectories of each of the paper's traces."""

MIN_TURNS = 2
_CUT = 0.02
_FIRST_SHAPE = 0.3 / 1.8  # the logarithm of the odds of u has a standard deviation of 1.8
_FIRST_MOST = 0.5
_APPEND_SIGMA = 0.8
_GEN_SHAPE = 4.0
_KRONECKER = 1.2207440846057596  # root of x^4 = x + 1: the best step for three dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One row of Table 2; tokens, except ``turns``."""

    name: str
    max_tokens: int
    turns: float
    append_tokens: float
    generate_tokens: float
    total_tokens: float
    context_tokens: float


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        name: Profile(
            name=name,
            max_tokens=max_tokens,
            turns=turns,
            append_tokens=append,
            generate_tokens=gen,
            total_tokens=total,
            context_tokens=context,
        )
        for name, max_tokens, turns, append, gen, total, context in (
            ("32K", 32_768, 60, 608, 148, 28_639, 17_183),
            ("48K", 49_152, 106, 474, 172, 42_607, 25_120),
            ("64K", 65_536, 157, 429, 176, 55_958, 32_721),
        )
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    """Solved parameters of a profile."""

    total_power: float
    turns_scale: float
    turns_shape: float
    first_scale: float
    generate_share: float


def profile_named(name: str) -> Profile:
    """Look a profile up.

    Raises:
        ConfigError: no such profile.
    """
    if name not in PROFILES:
        raise ConfigError(f"unknown trace profile {name!r}; choose one of {', '.join(PROFILES)}.")
    return PROFILES[name]


def generate(profile: Profile, count: int, seed: int) -> list[Trajectory]:
    """``count`` trajectories of a profile, lengths only; the same for the same arguments.

    Raises:
        ConfigError: ``count`` below 1 or a negative seed.
    """
    if count < 1 or seed < 0:
        raise ConfigError(f"table2: {count} trajectories from seed {seed}; need at least 1 and a seed >= 0.")
    rng = np.random.default_rng([seed, profile.max_tokens])
    p = _solve(profile)
    u = _quasi_random(rng, count)
    totals = np.round(profile.max_tokens * u[0] ** p.total_power)
    turns = np.maximum(MIN_TURNS, np.round(p.turns_scale * _odds(u[1]) ** p.turns_shape))
    firsts = np.round(np.minimum(p.first_scale * _odds(u[2]) ** _FIRST_SHAPE, _FIRST_MOST * totals))
    trajectories = []
    for i in range(count):
        lengths = _turns(rng, int(totals[i]), int(turns[i]), max(1, int(firsts[i])), p.generate_share)
        trajectories.append(Trajectory(name=f"{profile.name}-{i:04d}", turns=lengths))
    return trajectories


def _turns(rng: np.random.Generator, total: int, turns: int, first: int, share: float) -> tuple[Turn, ...]:
    """Turns of ``total`` tokens in all (at least one per append and generation)."""
    rest = max(total - first, 2 * turns - 1)
    generated = min(max(round(share * rest), turns), rest - (turns - 1))
    generations = _split(generated, rng.gamma(_GEN_SHAPE, size=turns))
    appends = [first, *_split(rest - generated, rng.lognormal(sigma=_APPEND_SIGMA, size=turns - 1))]
    return tuple(Turn(append_tokens=a, generate_tokens=g) for a, g in zip(appends, generations, strict=True))


def _split(total: int, weights: Floats) -> list[int]:
    """``total`` in whole parts of at least 1, in proportion to ``weights``."""
    spare = total - len(weights)
    edges = np.concatenate([[0], np.round(np.cumsum(weights) / weights.sum() * spare)]).astype(np.int64)
    return [1 + int(part) for part in np.diff(edges)]


def _quasi_random(rng: np.random.Generator, count: int) -> Floats:
    """Points of the unit cube that fill it and each of its axes evenly: shape [3, count], in (0, 1).

    The order along each axis is that of a Kronecker sequence from a random start; then one point per stratum.
    """
    steps = 1.0 / _KRONECKER ** np.arange(1, 4)
    points = (rng.random(3) + np.outer(rng.permutation(count), steps)) % 1.0
    ranks = points.argsort(axis=0).argsort(axis=0)
    return np.asarray(((ranks + rng.uniform(1e-9, 1.0, (count, 3))) / count).T, dtype=np.float64)


def _odds(u: Floats) -> Floats:
    """Odds of u after cutting off both tails: to a power, a log-logistic variable."""
    cut = _CUT + (1 - 2 * _CUT) * u
    return np.asarray(cut / (1 - cut), dtype=np.float64)


@cache
def _solve(profile: Profile) -> _Parameters:
    """Parameters at which the means of the model are those of the table, on a fixed grid."""
    grid = (np.arange(4000) + 0.5) / 4000
    power = profile.max_tokens / profile.total_tokens - 1  # mean of u^p is 1 / (1 + p)
    odds = _odds(grid)

    def turns(shape: float) -> Floats:
        spread = odds**shape
        return np.asarray(spread * (profile.turns / spread.mean()), dtype=np.float64)

    per_turn = profile.append_tokens + profile.generate_tokens
    # totals and turns are independent: E[total / turns] = E[total] * E[1 / turns]
    shape = _bisect(lambda x: float(profile.total_tokens * (1 / turns(x)).mean()), per_turn, 0.0, 2.0)
    n = turns(shape)
    # The mean context of a trajectory is (1 - 1/n) * (first + total - append) / 2, the first context being empty.
    # Averages over trajectories and over turns differ a little here: halfway between the two.
    per_trajectory, per_turn_weight = float((1 / n).mean()), 1 / profile.turns
    inverse_turns = (per_trajectory + per_turn_weight) / 2
    twice_mean = 2 * profile.context_tokens / (1 - inverse_turns)
    first = share = 0.0
    for _ in range(50):  # a contraction: append is a few percent of first
        share = profile.generate_tokens / ((profile.total_tokens - first) * per_trajectory)
        append = (1 - share) * (profile.total_tokens - first) * inverse_turns
        first = twice_mean - profile.total_tokens + append
    return _Parameters(
        total_power=power,
        turns_scale=profile.turns / float((odds**shape).mean()),
        turns_shape=shape,
        first_scale=first / float((odds**_FIRST_SHAPE).mean()),
        generate_share=share,
    )


def _bisect(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Argument of a growing ``function`` at which it is ``target``."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2
