"""The working set of an online service (paper section 8.2): why KV lives on SSD and not in a pool of DRAM.

Agents arrive at a rate lambda and stay for their JCT T. Little's law: lambda * T of them are there at a time. A context
grows from nothing to ``total_tokens``, about evenly over its agent's life, so each holds half of that on average.

Tool calls stretch an agent's life r-fold. At the same arrival rate the working set then grows r-fold (Little's law).
The paper goes further: it lets the service take r times as many agents per second too, and gets r^2. That step needs a
limit on the number of agents at a time, or on their bursts; where the limit is work per request, as in a steady state
bound by storage or compute, requests per second do not fall with r and the arrival rate stays. Both are given.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.errors import ConfigError

GB = 10**9

PAPER_POINTS: tuple[tuple[float, float, float], ...] = ((0.1, 569.0, 69.0), (0.45, 1100.0, 681.0))
"""(APS, JCT in s, the paper's working set in GB) of DS 660B. The paper states neither JCT nor bytes per token here:
569 s is its JCT at low load, and 1,100 s is what 0.45 APS takes for the growth of the working set to fit."""


def agents_present(aps: float, jct_s: float) -> float:
    """Little's law: agents in the system at a time for ``aps`` arrivals per second that stay ``jct_s`` seconds.

    Raises:
        ConfigError: a value that is not positive.
    """
    _positive("aps", aps)
    _positive("jct-s", jct_s)
    return aps * jct_s


def working_set_bytes(aps: float, jct_s: float, total_tokens: float, bytes_per_token: float) -> float:
    """Section 8.2: lambda * T * total_tokens / 2 tokens of KV, in bytes.

    Raises:
        ConfigError: a value that is not positive.
    """
    _positive("total-tokens", total_tokens)
    _positive("bytes per token", bytes_per_token)
    return agents_present(aps, jct_s) * total_tokens / 2 * bytes_per_token


def implied_bytes_per_token(working_set_gb: float, aps: float, jct_s: float, total_tokens: float) -> float:
    """The bytes per token with which ``working_set_bytes`` gives a stated working set."""
    return working_set_gb * GB / working_set_bytes(aps, jct_s, total_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretched:
    """What tool calls that stretch every JCT by ``r`` do. Factors over r = 1, and working sets in bytes.

    ``test_hours`` and ``test_cost``: machine-hours of one online test, and hours times storage (section 8.2: r, r^3).
    """

    r: float
    jct_s: float
    same_rate_bytes: float
    scaled_rate_bytes: float
    test_hours: float
    test_cost: float


def stretched(r: float, aps: float, jct_s: float, total_tokens: float, bytes_per_token: float) -> Stretched:
    """The working set when agents live ``r`` times as long: r-fold at the same APS, r^2-fold at r times the APS.

    Raises:
        ConfigError: a value that is not positive, or r below 1.
    """
    if not r >= 1:
        raise ConfigError(f"r is {r:g}, but tool calls only make an agent's life longer: give at least 1.")
    return Stretched(
        r=r,
        jct_s=r * jct_s,
        same_rate_bytes=working_set_bytes(aps, r * jct_s, total_tokens, bytes_per_token),
        scaled_rate_bytes=working_set_bytes(r * aps, r * jct_s, total_tokens, bytes_per_token),
        test_hours=r,
        test_cost=r**3,
    )


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} is {value:g}, but it must be a positive number.")
