"""Statistics of a workload: its means and the hit rate a perfect cache would reach.

A token's KV is stored when its block is full; the last token emitted in a turn has none until the next forward. So of
the prompt of turn i, ``floor((context - 1) / block)`` blocks hit, context being the tokens before its append, and no
prompt hits entirely: at least one token is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from testbed.errors import ConfigError
from testbed.workload.tokens import Ids
from testbed.workload.trajectory import AgentScript, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The columns of Table 2 over a set of trajectories.

    Averages over trajectories of each one's own average (``append_tokens``, ``generate_tokens``, ``context_tokens``),
    and the same over all turns (``*_per_turn``): see ``table2`` for why the two differ.
    """

    turns: float
    append_tokens: float
    generate_tokens: float
    total_tokens: float
    context_tokens: float
    append_tokens_per_turn: float
    generate_tokens_per_turn: float
    context_tokens_per_turn: float


def means(trajectories: Sequence[Trajectory]) -> Means:
    """Means of a set of trajectories.

    Raises:
        ConfigError: the set is empty.
    """
    if not trajectories:
        raise ConfigError("workload: no trajectories.")
    counts = [len(t.turns) for t in trajectories]
    appends = [sum(turn.append_tokens for turn in t.turns) for t in trajectories]
    generated = [sum(turn.generate_tokens for turn in t.turns) for t in trajectories]
    contexts = [_context_sum(t) for t in trajectories]
    size, turns = len(trajectories), sum(counts)
    return Means(
        turns=turns / size,
        append_tokens=sum(a / n for a, n in zip(appends, counts, strict=True)) / size,
        generate_tokens=sum(g / n for g, n in zip(generated, counts, strict=True)) / size,
        total_tokens=(sum(appends) + sum(generated)) / size,
        context_tokens=sum(c / n for c, n in zip(contexts, counts, strict=True)) / size,
        append_tokens_per_turn=sum(appends) / turns,
        generate_tokens_per_turn=sum(generated) / turns,
        context_tokens_per_turn=sum(contexts) / turns,
    )


def _context_sum(trajectory: Trajectory) -> int:
    total = before = 0
    for turn in trajectory.turns:
        total += before
        before += turn.append_tokens + turn.generate_tokens
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class HitStats:
    """What a perfect cache of whole blocks would do; tokens summed over all requests.

    ``own_hit_tokens``: hits on an agent's own earlier turns. ``shared_hit_tokens``: hits of a first turn on blocks of
    an agent listed before; they need the other's first turn to be stored already.
    """

    requests: int
    prompt_tokens: int
    own_hit_tokens: int
    shared_hit_tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that hit the agents' own history: what a scenario can count on."""
        return self.own_hit_tokens / self.prompt_tokens

    @property
    def shared_hit_rate(self) -> float:
        """Share with the hits between agents."""
        return (self.own_hit_tokens + self.shared_hit_tokens) / self.prompt_tokens


def expected_hits(scripts: Sequence[AgentScript], block_tokens: int, *, warm_stored: bool = False) -> HitStats:
    """Hits of an infinite cache of blocks of ``block_tokens`` (all in emulated tokens), agents in list order.

    ``warm_stored``: the run stores the full blocks of each agent's ``warm_tokens`` before it starts.

    Raises:
        ConfigError: no agents or a block below one token.
    """
    if not scripts or block_tokens < 1:
        raise ConfigError(f"workload: {len(scripts)} agents and blocks of {block_tokens} tokens; both must be >= 1.")
    prompt = own = shared = requests = 0
    stored: set[int] = set()
    for script in scripts:
        before = 0
        warm_blocks = script.warm_tokens // block_tokens if warm_stored else 0
        own += warm_blocks * block_tokens
        for turn in script.trajectory.turns:
            prompt += before + turn.append_tokens
            own += max(before - 1, 0) // block_tokens * block_tokens
            before += turn.append_tokens + turn.generate_tokens
        requests += script.turns
        hashes = _block_hashes(script.append_ids(0), block_tokens)
        most = (script.prompt_tokens(0) - 1) // block_tokens
        shared += sum(h in stored for h in hashes[warm_blocks:most]) * block_tokens
        stored.update(hashes)
    return HitStats(requests=requests, prompt_tokens=prompt, own_hit_tokens=own, shared_hit_tokens=shared)


def _block_hashes(ids: Ids, block_tokens: int) -> list[int]:
    """Chained hashes of the full blocks of ``ids``: equal hashes, equal prefixes."""
    hashes = []
    parent = 0
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        parent = xxhash.xxh3_64_intdigest(ids[start : start + block_tokens].tobytes(), seed=parent)
        hashes.append(parent)
    return hashes
