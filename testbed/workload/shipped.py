"""The workload that ships: lengths (no text) of nine public SWE-agent trajectories.

``data/swe_lengths.json`` is made by ``lengths_document(load_trajectories(folder))``. It keeps the tokens appended and
generated per turn, and which trajectories share the start of their first prompt and for how many tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from testbed.errors import BugError
from testbed.workload.trajectory import Trajectory, Turn

DATA_FILE = "swe_lengths.json"
MIN_SHARED_TOKENS = 64
"""Shorter common starts than a block of the paper are no sharing."""


def load_shipped() -> list[Trajectory]:
    """The shipped trajectories, lengths only, in a fixed order.

    Raises:
        BugError: the package's data file is missing or damaged.
    """
    try:
        text = resources.files("testbed.workload").joinpath("data", DATA_FILE).read_text("utf-8")
        return [_from_entry(entry) for entry in json.loads(text)["trajectories"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BugError(f"testbed.workload: the shipped {DATA_FILE} cannot be read ({error!r}); reinstall.") from error


def _from_entry(entry: dict[str, Any]) -> Trajectory:
    return Trajectory(
        name=entry["name"],
        turns=tuple(Turn(append_tokens=a, generate_tokens=g) for a, g in entry["turns"]),
        shared_prefix=entry["shared_prefix"],
        shared_prefix_tokens=entry["shared_prefix_tokens"],
    )


def lengths_document(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The JSON document of lengths for trajectories with known ids.

    Trajectories that share at least ``MIN_SHARED_TOKENS`` leading tokens, directly or through others, form a group
    named after its first; each one's ``shared_prefix_tokens`` is the longest start it has in common with any other.
    """
    entries = []
    groups = _groups(trajectories)
    for i, trajectory in enumerate(trajectories):
        shared = max((_common(trajectory, other) for j, other in enumerate(trajectories) if j != i), default=0)
        shares = shared >= MIN_SHARED_TOKENS
        entries.append(
            {
                "name": trajectory.name,
                "shared_prefix": trajectories[groups[i]].name if shares else "",
                "shared_prefix_tokens": shared if shares else 0,
                "turns": [[t.append_tokens, t.generate_tokens] for t in trajectory.turns],
            }
        )
    return {
        "source": "SWE-agent project (MIT licence): trajectories of its repository, lengths only",
        "unit": "tokens of testbed.workload.tokens.tokenize, [appended, generated] per turn",
        "trajectories": entries,
    }


def _groups(trajectories: Sequence[Trajectory]) -> list[int]:
    """Index of the first member of each trajectory's group."""
    groups = list(range(len(trajectories)))
    for i, a in enumerate(trajectories):
        for j in range(i):
            if _common(a, trajectories[j]) >= MIN_SHARED_TOKENS and groups[i] != groups[j]:
                low, high = sorted((groups[i], groups[j]))
                groups = [low if g == high else g for g in groups]
    return groups


def _common(a: Trajectory, b: Trajectory) -> int:
    """Number of leading tokens that two first prompts have in common."""
    count = 0
    for x, y in zip(a.turns[0].append_ids or (), b.turns[0].append_ids or (), strict=False):
        if x != y:
            break
        count += 1
    return count
