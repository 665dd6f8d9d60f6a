"""What DualPath gains where storage is the limit: the shipped 1P1D and 1P2D scenarios, judged as a user sees them.

Run: ``python -m tests.bench.bench_ratio``. Nothing is subtracted: JCT of Basic over JCT of DualPath, at least 0.9 of
the ideal (the number of SNICs that read), and the SNICs at least 90 % busy in the plateau. These are the scenarios'
own expectations; here they must hold.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from testbed.cli.run import RunRequest, run

SCENARIOS = ("quickstart", "one-pe-two-de")


def judged(scenario: str) -> bool:
    """Run a scenario and print its verdicts; True when it is valid and all hold."""
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
        code = run(RunRequest(scenario=scenario, out=Path(folder), quiet=True))
        (file,) = Path(folder).glob("*/metrics.json")
        metrics = json.loads(file.read_text(encoding="utf-8"))
    for verdict in metrics["verdicts"]:
        print(f"{scenario}: {verdict['expectation']}: {verdict['measured']:.3f}", flush=True)
    outcome = "valid" if code == 0 else "; ".join(metrics["invalid_reasons"]) or f"exit code {code}"
    print(f"{scenario}: {outcome}", flush=True)
    return code == 0 and all(verdict["holds"] for verdict in metrics["verdicts"])


def main() -> int:
    """Exit code 1 when an expectation does not hold, or a run is not valid."""
    return 0 if all([judged(scenario) for scenario in SCENARIOS]) else 1


if __name__ == "__main__":
    sys.exit(main())
