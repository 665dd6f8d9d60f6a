"""From a workload source to the agents that replay it (paper 7.2, A.3, A.4).

Sources: ``shipped`` (default), ``sweagent:PATH`` (a ``.traj`` file or a folder of them), ``table2:64K`` (32K, 48K,
64K). Agents beyond the number of trajectories replay one drawn again, behind a synthetic first round of random tokens
that generates one token: its blocks then have another prefix, so nothing is shared across agents.

Everything is a pure function of its arguments, seed included (``sweagent:`` also reads its files).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from testbed.errors import ConfigError
from testbed.units import NS_PER_S
from testbed.workload.shipped import load_shipped
from testbed.workload.sweagent import load_trajectories
from testbed.workload.table2 import TRACE_SIZE, generate, profile_named
from testbed.workload.tokens import random_ids
from testbed.workload.trajectory import AgentScript, Trajectory, Turn, shrink

SYNTHETIC_TOKENS = 64
"""Paper tokens of the synthetic first round; UNKNOWN in the paper. One block is the least that changes every block."""


MOST_ARRIVALS_S = 365 * 86_400
MOST_AGENTS = 100_000
"""Each is a script in memory, long before anything runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the agents replay. Lengths are paper tokens, except in the scripts that ``agents`` makes.

    ``max_turns`` keeps the first so many turns (0: all), counted from ``start_turn``; the turns before ``start_turn``
    become the start of the first prompt (``AgentScript.warm_tokens``). A trajectory too short for ``start_turn``
    starts at its last turn.
    """

    source: str = "shipped"
    agents: int
    seed: int = 0
    length_scale: int = 1
    max_turns: int = 0
    start_turn: int = 0
    synthetic_tokens: int = SYNTHETIC_TOKENS

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: a value out of range.
        """
        for key, least in (
            ("agents", 1),
            ("seed", 0),
            ("length_scale", 1),
            ("max_turns", 0),
            ("start_turn", 0),
            ("synthetic_tokens", 1),
        ):
            value = getattr(self, key)
            if value < least:
                raise ConfigError(f"workload: {key} is {value}, but it must be at least {least}.")
        if self.agents > MOST_AGENTS:
            raise ConfigError(f"workload: agents is {self.agents}, but it must be at most {MOST_AGENTS}.")


def source_trajectories(workload: Workload) -> list[Trajectory]:
    """The trajectories of a workload's source, at paper length.

    Raises:
        ConfigError: an unknown source, or a file of it that is not a trajectory.
    """
    kind, _, argument = workload.source.partition(":")
    sources: dict[str, Callable[[], list[Trajectory]]] = {
        "shipped": load_shipped,
        "sweagent": lambda: load_trajectories(Path(argument)),
        "table2": lambda: generate(profile_named(argument), min(workload.agents, TRACE_SIZE), workload.seed),
    }
    if kind not in sources or (kind == "shipped") != (argument == ""):
        raise ConfigError(
            f"workload: unknown source {workload.source!r}; use shipped, sweagent:PATH or table2:32K, 48K or 64K."
        )
    return sources[kind]()


def make_agents(workload: Workload, vocab_size: int) -> list[AgentScript]:
    """One script per agent, in emulated tokens with ids below ``vocab_size``; names ``agent0``, ``agent1``, ...

    Raises:
        ConfigError: as ``source_trajectories``.
    """
    trajectories = source_trajectories(workload)
    extra = workload.agents - len(trajectories)
    draws = np.random.default_rng([workload.seed, len(trajectories)]).integers(len(trajectories), size=max(extra, 0))
    scripts = []
    for i in range(workload.agents):
        name = f"agent{i}"
        if i < len(trajectories):
            trajectory, synthetic = trajectories[i], 0
        else:
            drawn = trajectories[draws[i - len(trajectories)]]
            trajectory, synthetic = _behind_synthetic_round(drawn, name, workload), 1
        scripts.append(_script(workload, vocab_size, name, trajectory, synthetic))
    return scripts


def _behind_synthetic_round(trajectory: Trajectory, agent: str, workload: Workload) -> Trajectory:
    first = Turn(append_tokens=workload.synthetic_tokens, generate_tokens=1)
    return Trajectory(name=f"{trajectory.name}+{agent}", turns=(first, *trajectory.turns))


def _script(workload: Workload, vocab_size: int, name: str, trajectory: Trajectory, synthetic: int) -> AgentScript:
    """``synthetic``: leading rounds that are not the trajectory's own; ``start_turn`` and ``max_turns`` skip them."""
    last = len(trajectory.turns) - 1
    start = min(workload.start_turn + synthetic, last) if workload.start_turn else 0
    most = workload.max_turns + (synthetic if start == 0 else 0) if workload.max_turns else last + 1
    cut = replace(trajectory, turns=trajectory.turns[: start + most])
    warm = cut.context_tokens(start)
    short = shrink(_merged(cut, start, workload.seed), workload.length_scale)
    warm_short = min(warm // workload.length_scale, short.turns[0].append_tokens - 1)
    return AgentScript(name=name, trajectory=short, seed=workload.seed, vocab_size=vocab_size, warm_tokens=warm_short)


def _merged(trajectory: Trajectory, start: int, seed: int) -> Trajectory:
    """The trajectory from turn ``start``, everything before it being part of the first append."""
    if start == 0:
        return trajectory
    history, first = trajectory.turns[:start], trajectory.turns[start]
    tokens = trajectory.context_tokens(start) + first.append_tokens
    ids: tuple[int, ...] | None = None
    if all(turn.append_ids is not None for turn in (*history, first)):
        parts: list[int] = []
        for i, turn in enumerate(history):
            parts.extend(turn.append_ids or ())
            parts.extend(random_ids(f"{seed}/{trajectory.name}/{i}/generated", 0, turn.generate_tokens).tolist())
        ids = (*parts, *(first.append_ids or ()))
    merged = replace(first, append_tokens=tokens, append_ids=ids)
    return replace(trajectory, turns=(merged, *trajectory.turns[start + 1 :]))


def offline_starts_ns(agents: int) -> list[int]:
    """Start times of an offline run: all agents at once."""
    return [0] * agents


def poisson_starts_ns(agents: int, arrivals_per_second: float, seed: int) -> list[int]:
    """Start times of an online run: Poisson arrivals at the given emulated rate (APS), the first after a gap.

    Raises:
        ConfigError: a rate that is not positive, or so low that nobody could wait for it.
    """
    if not 0 < arrivals_per_second < float("inf"):
        raise ConfigError(f"workload: {arrivals_per_second} agents per second, but the rate must be positive.")
    if agents / arrivals_per_second > MOST_ARRIVALS_S:
        raise ConfigError(
            f"workload: {agents} agents at {arrivals_per_second:.3g} per emulated second arrive over more than a year; "
            "raise workload.arrivals."
        )
    gaps = np.random.default_rng([seed, agents]).exponential(1 / arrivals_per_second, agents)
    return [int(t) for t in np.round(np.cumsum(gaps) * NS_PER_S)]
