"""Whether simulated clusters saturate where equations 1-9 say (paper 4.2): steps across a bound, and a verdict.

A sweep walks P/D across one end of the interval with the smallest clusters there are: two steps inside (the end itself
counts as inside), two outside. Each step measures how busy every kind of resource is while the cluster is full.

A bound is confirmed if storage stops being full within one step of where it should, and from there on a resource that
sets the bound is full in its stead. Uses are averages over all resources of a kind, for the equations assume balance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from testbed.analysis.bottleneck import PdInterval, Resource, Setting, pd_interval, storage_share
from testbed.errors import ConfigError, RunFailedError

FULL = 0.97
"""A resource this busy on average is the limit; what is missing are gaps between one transfer and the next."""
WINDOW = (0.45, 0.85)
"""Shares of all storage bytes between which is measured: before, buffers fill and hide a limit; after, work ends."""
MOST_NODES = 10
_EACH_SIDE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Bytes that all resources of a kind had carried at a time."""

    at_ns: int
    carried: Mapping[Resource, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One cluster of a sweep: what storage should reach, and how busy everything was (0 to 1)."""

    prefill: int
    decode: int
    predicted_storage: Fraction
    measured: Mapping[Resource, float]

    @property
    def storage_full(self) -> bool:
        """Whether storage was the limit."""
        return self.measured[Resource.SNIC] >= FULL

    @property
    def full(self) -> tuple[Resource, ...]:
        """Everything else that was full."""
        return tuple(r for r, use in self.measured.items() if use >= FULL and r is not Resource.SNIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A sweep across a bound, from inside to outside. ``named``: the resources that set the bound."""

    title: str
    named: tuple[Resource, ...]
    steps: tuple[Step, ...]

    @property
    def predicted_at(self) -> int:
        """Number of the first step at which storage should not be full."""
        return next((i for i, step in enumerate(self.steps) if step.predicted_storage < 1), len(self.steps))

    @property
    def measured_at(self) -> int:
        """Number of the first step at which it was not."""
        return next((i for i, step in enumerate(self.steps) if not step.storage_full), len(self.steps))

    @property
    def confirmed(self) -> bool:
        """Storage gives way within one step of the prediction, and to what the equation names."""
        beyond = self.steps[self.measured_at :]
        return (
            bool(beyond)
            and abs(self.measured_at - self.predicted_at) <= 1
            and all(not step.storage_full and set(step.full) & set(self.named) for step in beyond)
        )


def bounds(at: Setting) -> list[tuple[str, tuple[Resource, ...], list[tuple[int, int]]]]:
    """The sweeps that test a setting: title, resources that set the bound, (P, D) from inside to outside.

    Raises:
        ConfigError: there is no interval, or small clusters do not reach across one of its ends.
    """
    interval = pd_interval(at)
    if interval.empty or interval.lower is None:
        raise ConfigError("--confirm: storage is the limit at no P/D, so there is no bound to cross.")
    return [
        (f"P/D >= {interval.lower}", (interval.lower_resource,), steps_across(interval.lower, interval, up=False)),
        (f"P/D <= {interval.upper}", interval.upper_resources, steps_across(interval.upper, interval, up=True)),
    ]


def steps_across(bound: Fraction, interval: PdInterval, *, up: bool) -> list[tuple[int, int]]:
    """(P, D) of at most ``MOST_NODES`` nodes nearest to a bound, from two inside to two outside.

    Raises:
        ConfigError: there are none on one side.
    """
    ratios = sorted(
        {Fraction(p, d) for p in range(1, MOST_NODES) for d in range(1, MOST_NODES - p + 1)}, reverse=not up
    )
    inside = [pd for pd in ratios if pd in interval][-_EACH_SIDE:]
    outside = [pd for pd in ratios if (pd > bound if up else pd < bound)][:_EACH_SIDE]
    if not inside or not outside:
        raise ConfigError(
            f"--confirm: no clusters of at most {MOST_NODES} nodes lie on both sides of P/D = {bound}; "
            "choose g, s and M whose bounds are nearer to 1."
        )
    return [(pd.numerator, pd.denominator) for pd in (*inside, *outside)]


def step(at: Setting, nodes: tuple[int, int], samples: Sequence[Sample], capacity: Mapping[Resource, float]) -> Step:
    """What a run says about a step; ``capacity``: bit/s of all resources of a kind together."""
    return Step(
        prefill=nodes[0],
        decode=nodes[1],
        predicted_storage=storage_share(at, Fraction(*nodes)),
        measured=window_uses(samples, capacity),
    )


def window_uses(samples: Sequence[Sample], capacity: Mapping[Resource, float]) -> dict[Resource, float]:
    """How busy each kind of resource was in the window, from cumulative samples, linear between them.

    Raises:
        RunFailedError: the SNICs carried nothing.
    """
    total = samples[-1].carried[Resource.SNIC]
    begin, end = (_at_share(samples, share * total) for share in WINDOW)
    seconds = (end[0] - begin[0]) / 1e9
    return {kind: (end[1][kind] - begin[1][kind]) * 8 / seconds / rate for kind, rate in capacity.items()}


def _at_share(samples: Sequence[Sample], snic_bytes: float) -> tuple[float, dict[Resource, float]]:
    """Time and bytes of every kind when the SNICs had carried so much."""
    for before, after in pairwise(samples):
        low, high = before.carried[Resource.SNIC], after.carried[Resource.SNIC]
        if high >= snic_bytes and high > low:
            part = (snic_bytes - low) / (high - low)
            carried = {
                kind: before.carried[kind] + part * (after.carried[kind] - before.carried[kind])
                for kind in after.carried
            }
            return before.at_ns + part * (after.at_ns - before.at_ns), carried
    raise RunFailedError("--confirm: nothing was read from storage.")
