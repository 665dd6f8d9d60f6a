"""The working set of a run: agents that have come and not left, and the KV of their contexts (paper section 8.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from testbed.metrics.views import RoundView
from testbed.units import NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSet:
    """Means over the later half of the arrivals (by number; where all come together: over the whole run).

    ``agents``: present, between their first submission and the end of their last round. ``bytes``: KV of their
    contexts. ``life_s``: how long an agent of the run is present.
    """

    agents: float
    bytes: float
    life_s: float


def working_set(rounds: Sequence[RoundView], kv_bytes_per_token: int) -> WorkingSet:
    """Measure it; all 0 without rounds."""
    by_agent: dict[int, list[RoundView]] = {}
    for r in rounds:
        by_agent.setdefault(r.agent, []).append(r)
    lives = [sorted(turns, key=lambda r: r.turn) for turns in by_agent.values()]
    if not lives:
        return WorkingSet(agents=0.0, bytes=0.0, life_s=0.0)
    arrivals = sorted(turns[0].submitted_ns for turns in lives)
    ends = [max(r.completed_ns, r.submitted_ns) for turns in lives for r in turns[-1:]]
    since, until = arrivals[len(arrivals) // 2], arrivals[-1]
    if since == until:
        since, until = arrivals[0], max(ends)
    span = max(1, until - since)
    agents = contexts = 0
    for turns in lives:
        for begin, end, tokens in _spans(turns):
            inside = max(0, min(end, until) - max(begin, since))
            agents += inside
            contexts += inside * tokens
    life = sum(end - turns[0].submitted_ns for turns, end in zip(lives, ends, strict=True))
    return WorkingSet(
        agents=agents / span, bytes=contexts * kv_bytes_per_token / span, life_s=life / len(lives) / NS_PER_S
    )


def _spans(turns: Sequence[RoundView]) -> Iterator[tuple[int, int, int]]:
    """From when to when (ns) an agent has a context of how many tokens: the prompt and what follows it."""
    for r, following in zip(turns, [*turns[1:], None], strict=True):
        end = max(r.completed_ns, r.submitted_ns) if following is None else following.submitted_ns
        yield r.submitted_ns, end, r.prompt_tokens + r.generate_tokens
