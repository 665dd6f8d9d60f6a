"""Trajectories and their replay: round i's prompt is A_1, G_1, ..., A_{i-1}, G_{i-1}, A_i (paper A.3).

A ``Trajectory`` is what happened: lengths, and token ids where the text is known. An ``AgentScript`` is one agent's
replay of it: it yields the ids of every appended A_i; the generated G_i are whatever the emulated cluster emits, cut
to exactly ``generate_tokens``.

Invariants: every turn appends and generates at least one token; two trajectories with the same ``shared_prefix`` have
equal ids in their first ``min(shared_prefix_tokens)`` positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from testbed.errors import ConfigError
from testbed.workload.tokens import Ids, group_ids, random_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One round: ``append_tokens`` join the prompt, then ``generate_tokens`` are emitted.

    ``append_ids``: 32-bit ids of the appended tokens, or None where only their number is known.
    """

    append_tokens: int
    generate_tokens: int
    append_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the invariants.

        Raises:
            ConfigError: a count below 1, or ids that are not ``append_tokens`` many.
        """
        if self.append_tokens < 1 or self.generate_tokens < 1:
            raise ConfigError(
                f"turn: {self.append_tokens} tokens appended and {self.generate_tokens} generated; both must be >= 1."
            )
        if self.append_ids is not None and len(self.append_ids) != self.append_tokens:
            raise ConfigError(f"turn: {len(self.append_ids)} ids for {self.append_tokens} appended tokens.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One agent task: its turns, and the text its first prompt shares with others (the system prompt).

    ``shared_prefix`` names that text and ``shared_prefix_tokens`` says how much of turn 0 it is; used where ids are
    absent. Where ids are present the sharing is in the ids themselves.
    """

    name: str
    turns: tuple[Turn, ...]
    shared_prefix: str = ""
    shared_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the invariants.

        Raises:
            ConfigError: no turns, or a shared prefix longer than the first append.
        """
        if not self.turns:
            raise ConfigError(f"trajectory {self.name}: it has no turns.")
        if not 0 <= self.shared_prefix_tokens <= self.turns[0].append_tokens:
            raise ConfigError(
                f"trajectory {self.name}: shared_prefix_tokens is {self.shared_prefix_tokens}, but its first turn "
                f"appends {self.turns[0].append_tokens} tokens."
            )

    def context_tokens(self, turn: int) -> int:
        """Tokens before the append of ``turn`` (0-based): what a perfect cache would hold."""
        return sum(t.append_tokens + t.generate_tokens for t in self.turns[:turn])

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole trajectory, the last generation included."""
        return self.context_tokens(len(self.turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentScript:
    """One agent's replay of a trajectory. Turns are 0-based.

    ``warm_tokens`` of the first prompt are history from before the replay starts (``start_turn``); a run may store
    their KV beforehand. ``seed`` decides the ids of all text whose content is unknown.
    """

    name: str
    trajectory: Trajectory
    seed: int
    vocab_size: int
    warm_tokens: int = 0

    @property
    def turns(self) -> int:
        """Number of rounds."""
        return len(self.trajectory.turns)

    def generate_tokens(self, turn: int) -> int:
        """Tokens to emit in ``turn``."""
        return self.trajectory.turns[turn].generate_tokens

    def prompt_tokens(self, turn: int) -> int:
        """Length of the prompt of ``turn``."""
        return self.trajectory.context_tokens(turn) + self.trajectory.turns[turn].append_tokens

    def append_ids(self, turn: int) -> Ids:
        """Ids of the tokens appended in ``turn``: uint32, below ``vocab_size``, shape [append_tokens]."""
        this = self.trajectory.turns[turn]
        if this.append_ids is not None:
            ids = np.asarray(this.append_ids, dtype=np.uint32)
        else:
            ids = random_ids(f"{self.seed}/{self.trajectory.name}/{turn}", 0, this.append_tokens)
            shared = self.trajectory.shared_prefix_tokens if turn == 0 else 0
            if shared:
                ids[:shared] = random_ids(f"{self.seed}/shared/{self.trajectory.shared_prefix}", 0, shared)
        return ids % np.uint32(self.vocab_size)

    def prompt_ids(self, turn: int, generated: Sequence[Ids]) -> Ids:
        """Prompt of ``turn``, given what was emitted in the turns before it (A_1, G_1, ..., A_turn).

        Raises:
            ValueError: ``generated`` does not hold exactly the tokens of the turns before.
        """
        lengths = [len(g) for g in generated]
        wanted = [self.generate_tokens(i) for i in range(turn)]
        if lengths != wanted:
            raise ValueError(f"{self.name}: turn {turn} follows generations of {wanted} tokens, got {lengths}")
        parts = [part for i in range(turn) for part in (self.append_ids(i), np.asarray(generated[i], dtype=np.uint32))]
        return np.concatenate([*parts, self.append_ids(turn)])


def shrink(trajectory: Trajectory, length_scale: int) -> Trajectory:
    """The trajectory with every length divided by ``length_scale``, at least one token per append and generation.

    Rounding errors are carried to the next turn, appends and generations apart, so sums keep their proportion. Known
    ids are hashed in groups of ``length_scale`` from the start of each append: trajectories that share n leading ids
    still share ``n // length_scale``.
    """
    if length_scale == 1:
        return trajectory
    appends = _shrink_lengths([t.append_tokens for t in trajectory.turns], length_scale)
    generations = _shrink_lengths([t.generate_tokens for t in trajectory.turns], length_scale)
    turns = tuple(
        Turn(
            append_tokens=append,
            generate_tokens=generate,
            append_ids=None if turn.append_ids is None else group_ids(turn.append_ids, length_scale, append),
        )
        for turn, append, generate in zip(trajectory.turns, appends, generations, strict=True)
    )
    shared = min(trajectory.shared_prefix_tokens // length_scale, turns[0].append_tokens)
    return replace(trajectory, turns=turns, shared_prefix_tokens=shared)


def _shrink_lengths(lengths: Sequence[int], scale: int) -> list[int]:
    result = []
    carry = Fraction(0)
    for length in lengths:
        exact = Fraction(length, scale) + carry
        short = min(max(1, round(exact)), -(-length // scale))
        carry = max(Fraction(-1, 2), min(Fraction(1, 2), exact - short))  # the debt of tiny turns is forgiven
        result.append(short)
    return result
