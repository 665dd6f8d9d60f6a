"""What DualPath gains where storage is the limit: the shipped 1P1D and 1P2D scenarios, judged as a user sees them.

Run: ``python -m tests.bench.bench_ratio``. Nothing is subtracted: JCT of Basic over JCT of DualPath, at least 0.9 of
the ideal (the number of SNICs that read), and the SNICs at least 90 % busy in the plateau. These are the scenarios'
own expectations; here they must hold. The quickstart runs three times: its ratios must lie within 5 % of each other.
A run without results, or a figure that is not there, is a target missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from testbed.cli.run import RunRequest, run
from testbed.errors import TestbedError

RUNS = {"quickstart": 3, "one-pe-two-de": 1}
MOST_SPREAD = 0.05
"""Largest over smallest ratio of the same scenario, less 1."""


def result_of(request: RunRequest) -> tuple[str, dict[str, Any]]:
    """How a run ended ("valid", or why not) and its ``metrics.json``, empty if it left none; nothing else stays."""
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
        try:
            code = run(replace(request, out=Path(folder), quiet=True))
        except TestbedError as error:
            return str(error), {}
        files = list(Path(folder).glob("*/metrics.json"))
        metrics = json.loads(files[0].read_text(encoding="utf-8")) if files else {}
    why = "; ".join((*metrics.get("failures", ()), *metrics.get("invalid_reasons", ())))
    return "valid" if code == 0 else why or f"exit code {code}", metrics


def judged(scenario: str) -> tuple[bool, float | None]:
    """Run a scenario and print its verdicts; whether it is valid and all hold, and the ratio if there is one."""
    outcome, metrics = result_of(RunRequest(scenario=scenario))
    verdicts = metrics.get("verdicts", [])
    for verdict in verdicts:
        measured = verdict["measured"]
        figure = "nothing measured" if measured is None else f"{measured:.3f}"
        print(f"{scenario}: {verdict['expectation']}: {figure}", flush=True)
    print(f"{scenario}: {outcome}", flush=True)
    held = bool(verdicts) and all(v["holds"] and v["measured"] is not None for v in verdicts)
    ratio = next((v["measured"] for v in verdicts if v["name"] == "gain"), None)
    return outcome == "valid" and held, ratio


def repeated(scenario: str, runs: int) -> bool:
    """Run a scenario several times and print its ratios and their spread; whether all targets were met."""
    results = [judged(scenario) for _ in range(runs)]
    ratios = [ratio for _, ratio in results if ratio]
    good = all(met for met, _ in results)
    print(f"{scenario}: ratios {', '.join(f'{ratio:.3f}' for ratio in ratios) or 'none'}", flush=True)
    if runs > 1:
        spread = max(ratios) / min(ratios) - 1 if len(ratios) == runs else None
        figure = "unknown" if spread is None else f"{spread:.1%}"
        print(f"{scenario}: spread {figure} (target {MOST_SPREAD:.0%})", flush=True)
        good = good and spread is not None and spread <= MOST_SPREAD
    return good


def main() -> int:
    """Exit code 1 when an expectation does not hold, or a run is not valid."""
    return 0 if all([repeated(scenario, runs) for scenario, runs in RUNS.items()]) else 1


if __name__ == "__main__":
    sys.exit(main())
