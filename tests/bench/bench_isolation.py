"""What KV costs the model: collectives and TPOT beside a full KV load over the same without KV, with lanes and without.

Run: ``python -m tests.bench.bench_isolation``. The variants of the experiment ``vl-isolation``, one turn per agent.
With lanes each figure is at most 1.05 (the best of a few attempts: other programs on the host only make things worse);
without lanes collectives are visibly slower, and the factors are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from testbed.cli.run import RunRequest
from testbed.experiment.file import Variant, read_experiment
from tests.bench.bench_ratio import result_of

EXPERIMENT, ALONE, BESIDE = "vl-isolation", "oracle", "dualpath"
SHORT = ("workload.max_turns=1",)
ATTEMPTS = 3
TARGET = 1.05
LEAST_WITHOUT = 1.3
"""Without lanes, collectives of decode in the mean."""


def factors(document: Mapping[str, Any]) -> dict[str, float]:
    """Each figure beside KV over the same without."""
    alone, beside = (document["systems"][name] for name in (ALONE, BESIDE))
    found = {"TPOT": beside["tpot_s"]["mean"] / alone["tpot_s"]["mean"]}
    for kind, title in (("pe", "prefill"), ("de", "decode")):
        for part in ("mean", "p50", "p99"):
            values = [of["collectives"]["stretch"][kind][part] for of in (beside, alone)]
            found[f"collectives in {title}, {part}"] = values[0] / values[1]
    return found


JUDGED = ("TPOT", "collectives in prefill, p50", "collectives in decode, p50", "collectives in decode, p99")
"""Means and p99 of prefill depend on which requests meet in a batch: printed only."""


def measured(variant: Variant, scenario: str) -> dict[str, float] | None:
    """The factors of a run of the variant; None, and why, if it ended without."""
    settings = (*(f"{key}={value}" for key, value in variant.settings), *SHORT)
    outcome, document = result_of(RunRequest(scenario=scenario, systems=(ALONE, BESIDE), overrides=settings))
    if not document or not document["valid"]:
        print(f"{variant.name}: {outcome}", flush=True)
        return None
    found = factors(document)
    print(f"{variant.name}: {', '.join(f'{name} {value:.3f}' for name, value in found.items())}; {outcome}", flush=True)
    return found


def main() -> int:
    """Exit code 1 when a target was missed."""
    experiment = read_experiment(EXPERIMENT)
    lanes, without = experiment.variants
    best: dict[str, float] = {}
    for _ in range(ATTEMPTS):
        found = measured(lanes, experiment.scenario) or {}
        best = {name: min(value, best.get(name, value)) for name, value in found.items()} or best
        if best and all(best[name] <= TARGET for name in JUDGED):
            break
    off = measured(without, experiment.scenario) or {}
    for name in (*JUDGED, "collectives in decode, mean"):
        print(f"{name}: {best.get(name, 0):.3f} with lanes (target {TARGET}), {off.get(name, 0):.3f} without")
    good = bool(best) and all(best[name] <= TARGET for name in JUDGED)
    return 0 if good and off.get("collectives in decode, mean", 0) >= LEAST_WITHOUT else 1


if __name__ == "__main__":
    sys.exit(main())
