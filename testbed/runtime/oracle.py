"""The end-to-end oracle: every token that an agent received, against a reference that has no cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from testbed.runtime.result import SystemRun
from testbed.workload.trajectory import AgentScript

Reference = Callable[[AgentScript], Sequence[Sequence[int]]]
"""Tokens of every turn of an agent."""


def verify_tokens(scripts: Sequence[AgentScript], runs: Sequence[SystemRun], reference: Reference) -> None:
    """Count the tokens that are right in ``runs``, and say which are not."""
    for agent, script in enumerate(scripts):
        expected = reference(script)
        for run in runs:
            for outcome in (o for o in run.outcomes if o.agent == agent and not o.error):
                got = [outcome.tokens.get(i, -1) for i in range(outcome.generate_tokens)]
                right = list(expected[outcome.turn])
                if got == right:
                    run.tokens_verified += len(got)
                else:
                    wrong = next(i for i, (a, b) in enumerate(zip(got, right, strict=True)) if a != b)
                    run.wrong_tokens.append(
                        f"{script.name} turn {outcome.turn}: token {wrong} is {got[wrong]}, the reference says "
                        f"{right[wrong]}"
                    )
