"""From the runs of an experiment to its verdict: medians, expectations, agreement of the worlds.

Pure arithmetic over ``metrics.json`` documents. A claim about a variant that has no metrics is not judged: its run's
failure is the verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.errors import HostError
from testbed.experiment.file import Experiment
from testbed.metrics.expression import UnknownMetricError, evaluate, figure, names_in, with_numbers
from testbed.metrics.summary import EXIT_FAILED, EXIT_INVALID, EXIT_VALID
from testbed.metrics.verdict import flatten_document, identifier
from testbed.runtime.plan import World

Values = Mapping[str, float]
"""``{"dualpath.jct_s": 31.2}``: medians of one variant in one world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How one run of a variant ended. ``document``: its metrics.json; None if there is none, ``error`` says why, and
    ``by_host`` whether it is the host's fault (a full disk)."""

    world: World
    variant: str
    folder: str
    document: Mapping[str, Any] | None
    error: str = ""
    by_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A variant that this host cannot run in a world, and why: neither passed nor failed."""

    world: World
    variant: str
    reason: str

    def __str__(self) -> str:
        """In one line."""
        return f"UNSUPPORTED {self.world}, {self.variant}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """An expectation in one world. ``numbers``: the claim with what was measured in the place of names."""

    world: World
    name: str
    claim: str
    text: str
    holds: bool
    numbers: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One figure in both worlds."""

    value: str
    live: float
    sim: float
    tolerance: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured; NaN where nothing was."""
        return self.sim / self.live - 1 if self.live else 0.0 if self.sim == self.live else math.nan

    @property
    def agrees(self) -> bool:
        """Whether it is within the tolerance."""
        return abs(self.error) <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An experiment, judged. ``failures``, ``troubles``: of which run, and why, a sentence each. Claims and agreements
    about an ``unsupported`` variant are left out in that world.
    """

    experiment: Experiment
    measured: Mapping[World, Mapping[str, Values]]
    judged: tuple[Judged, ...]
    agreements: tuple[Agreement, ...]
    failures: tuple[str, ...]
    troubles: tuple[str, ...]
    unsupported: tuple[Unsupported, ...] = ()
    by_host: bool = False

    @property
    def exit_code(self) -> int:
        """1: a run failed, an expectation is false or the worlds differ; 2: the host stopped a run; 3: a run is not
        valid, so nothing is shown."""
        if self.by_host:
            return HostError.exit_code
        if self.failures:
            return EXIT_FAILED
        if self.troubles:
            return EXIT_INVALID
        return EXIT_VALID if self._right else EXIT_FAILED

    @property
    def _right(self) -> bool:
        """Nothing is false or apart, and something has been judged at all."""
        return bool(self.judged) and all(j.holds for j in self.judged) and all(a.agrees for a in self.agreements)

    @property
    def verdict(self) -> str:
        """The whole in one sentence."""
        false = sum(not j.holds for j in self.judged)
        apart = sum(not a.agrees for a in self.agreements)
        if self.failures:
            return f"FAILED: {len(self.failures)} runs failed."
        if self.troubles:
            return f"INVALID: {len(self.troubles)} runs are not valid, so nothing is shown."
        parts = [f"{len(self.judged) - false} of {len(self.judged)} expectations hold"]
        if self.agreements:
            parts.append(f"live and sim agree on {len(self.agreements) - apart} of {len(self.agreements)} figures")
        if self.unsupported:
            parts.append(f"{len(self.unsupported)} variants are unsupported here and were not run")
        return f"{'TRUE' if self._right else 'FALSE'}: {', '.join(parts)}."


def judge(experiment: Experiment, runs: Sequence[RunEnd], unsupported: Sequence[Unsupported] = ()) -> Outcome:
    """Judge all runs of an experiment; worlds that did not run are left out."""
    failures, troubles = [], []
    for run in runs:
        where = f"{run.world}, {run.variant}"
        if run.document is None:
            failures.append(f"{where}: {run.error}")
        else:
            failures += [f"{where}: {why}" for why in run.document["failures"]]
            troubles += [f"{where}: {why}" for why in run.document["invalid_reasons"]]
    measured = _measured(runs)
    flat = {world: _over_variants(by_variant) for world, by_variant in measured.items()}
    judged, agreements = [], []
    try:
        judged = _judged(experiment, flat)
        agreements = _agreements(experiment, flat)
    except UnknownMetricError as error:  # of a node or a role that this cluster does not have
        failures.append(str(error))
    return Outcome(
        experiment=experiment,
        measured=measured,
        judged=tuple(judged),
        agreements=tuple(agreements),
        failures=tuple(failures),
        troubles=tuple(troubles),
        unsupported=tuple(unsupported),
        by_host=any(run.by_host for run in runs),
    )


def _measured(runs: Sequence[RunEnd]) -> dict[World, dict[str, Values]]:
    documents: dict[World, dict[str, list[Values]]] = {}
    for run in runs:
        if run.document is not None:
            documents.setdefault(run.world, {}).setdefault(run.variant, []).append(flatten_document(run.document))
    return {world: {name: _median(each) for name, each in by.items()} for world, by in documents.items()}


def _median(repeats: Sequence[Values]) -> Values:
    """Figure by figure; one that only some runs have (a role that came late) is left out."""
    return {
        key: statistics.median(values[key] for values in repeats)
        for key in repeats[0]
        if all(key in values for values in repeats)
    }


def _over_variants(by_variant: Mapping[str, Values]) -> dict[str, float]:
    return {f"{identifier(name)}.{key}": value for name, values in by_variant.items() for key, value in values.items()}


def _judged(experiment: Experiment, flat: Mapping[World, Mapping[str, float]]) -> list[Judged]:
    judged = []
    for world, metrics in flat.items():
        for claim in experiment.claims:
            if world not in claim.worlds or _missing(claim.claim, metrics):
                continue
            judged.append(
                Judged(
                    world=world,
                    name=claim.name,
                    claim=claim.claim,
                    text=claim.text,
                    holds=evaluate(claim.claim, metrics).holds,
                    numbers=with_numbers(claim.claim, metrics),
                )
            )
    return judged


def _agreements(experiment: Experiment, flat: Mapping[World, Mapping[str, float]]) -> list[Agreement]:
    if len(flat) < 2:
        return []
    live, sim = flat["live"], flat["sim"]
    return [
        Agreement(value=c.value, live=figure(c.value, live), sim=figure(c.value, sim), tolerance=c.tolerance)
        for c in experiment.comparisons
        if not _missing(c.value, live) and not _missing(c.value, sim)
    ]


def _missing(text: str, metrics: Mapping[str, float]) -> bool:
    """Whether a variant that the expression names has no metrics at all."""
    there = {name.partition(".")[0] for name in metrics}
    return any(name.partition(".")[0] not in there for name in names_in(text))
