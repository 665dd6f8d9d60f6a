"""``testbed calibrate``: the fastest scale at which this host carries a scenario, found by short live runs.

Rates are divided and time is stretched by the same factor, so that ``byte_scale`` stays: every block, message and layer
step is the same, only slower. A probe is the scenario with all its agents, which make the load, and few turns; what
judges it is the run's own verdict. Slower is taken to be easier, which is what bisection needs.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from scenarios.loader import LoadedScenario, name_of, read_scenario
from testbed.cli.host_scale import HostScale, Scales, host_and_cores, keep, load_hash
from testbed.cli.run import RunRequest, prepare, refuse_hidden, run_in_folder, set_options
from testbed.errors import ConfigError
from testbed.metrics.summary import EXIT_FAILED, EXIT_INVALID, EXIT_VALID
from testbed.report import run_folder

_STEPS = 8  # on each side of the scenario's own scale
_STEP = 2**0.25
FACTORS = tuple(_STEP**k for k in range(-_STEPS, _STEPS + 1))
"""What the scenario's time is stretched by, fastest first: 1/4 to 4."""
MOST_PROBES = len(FACTORS).bit_length()
_MARGIN = _STEP
"""A host is not always as quiet as it was, and a run is longer than a probe."""
_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest:
    """The arguments of ``testbed calibrate``. No probe begins after ``minutes``; ``keep``: leave their run folders."""

    scenario: str
    systems: Sequence[str] = ()
    overrides: Sequence[str] = ()
    turns: int = 2
    probes: int = MOST_PROBES
    minutes: float = 30.0
    keep: bool = False
    out: Path = Path("runs")


class _Ended(Exception):
    """A probe says that no other makes sense: the host cannot run it, or it was interrupted."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def stretched(loaded: LoadedScenario, factor: float) -> Scales:
    """Rates divided and time multiplied by ``factor``; bytes stay what the scenario's scale was fitted to."""
    bandwidth = float(f"{float(loaded.plan.scale.bandwidth_scale) * factor:.5g}")
    return Scales(bandwidth=bandwidth, time=float(f"{bandwidth / loaded.plan.scale.byte_scale:.6g}"))


def first_valid(count: int, is_valid: Callable[[int], bool], go_on: Callable[[], bool]) -> int | None:
    """The lowest of ``count`` indices that is valid, given that all above a valid one are; None if none was found.

    ``go_on`` is asked before each probe; cut short, the answer is the lowest that was seen to be valid.
    """
    low, high = 0, count
    while low < high and go_on():
        middle = (low + high) // 2
        if is_valid(middle):
            high = middle
        else:
            low = middle + 1
    return high if high < count else None


def calibrate(request: CalibrateRequest) -> int:
    """Find the scale and keep it; the exit code of docs/contract.md.

    Raises:
        TestbedError: the input cannot be run, or the host cannot run it.
    """
    for name, value in (("turns", request.turns), ("probes", request.probes), ("minutes", request.minutes)):
        if not 0 < value < math.inf:
            raise ConfigError(f"--{name} is {value:g}, but it must be a positive number.")
    whole = RunRequest(
        scenario=request.scenario, systems=request.systems, overrides=request.overrides, out=request.out, summary=False
    )
    loaded = prepare(whole)
    asked = read_scenario(request.scenario, request.overrides).cluster  # its lanes may be "auto" still
    loaded = replace(loaded, scenario=replace(loaded.scenario, cluster=asked))
    turns = min(request.turns, loaded.scenario.workload.max_turns or request.turns)
    short = replace(whole, overrides=(*request.overrides, f"workload.max_turns={turns}"))
    for factor in FACTORS[0], FACTORS[-1]:  # what cannot be built at either end is said before anything runs
        prepare(replace(short, overrides=(*short.overrides, *stretched(loaded, factor).overrides)))
    refuse_hidden(request.out)
    folder = run_folder.create(request.out, f"calibrate-{name_of(request.scenario)}", datetime.now())
    probing = _Probing(request, short, loaded, folder)
    try:
        found = first_valid(len(FACTORS), probing.is_valid, probing.go_on)
    except _Ended as ended:
        return ended.code
    finally:
        with suppress(OSError):  # what is kept is in it
            folder.rmdir()
    return _told(request, loaded, probing, found)


class _Probing:
    """Short live runs at stretched scales, each told in a line."""

    def __init__(self, request: CalibrateRequest, short: RunRequest, loaded: LoadedScenario, folder: Path) -> None:
        self.failed = False  # the last probe that was not valid ended with an error
        self._request, self._short, self._loaded, self._folder = request, short, loaded, folder
        self._probes = 0
        self._deadline_s = time.monotonic() + request.minutes * 60

    def go_on(self) -> bool:
        """Whether there may be another probe."""
        return self._probes < self._request.probes and time.monotonic() < self._deadline_s

    def is_valid(self, index: int) -> bool:
        """Probe ``FACTORS[index]``.

        Raises:
            _Ended: bad input or host, or an interruption.
        """
        self._probes += 1
        scales = stretched(self._loaded, FACTORS[index])
        request = replace(self._short, overrides=(*self._short.overrides, *scales.overrides))
        at = self._folder / f"probe-{self._probes}"
        at.mkdir()
        code = run_in_folder(at, prepare(request), request)
        if code not in (EXIT_VALID, EXIT_FAILED, EXIT_INVALID):
            raise _Ended(code)
        sys.stdout.write(f"probe {self._probes}: {' '.join(scales.overrides)}: {self._verdict(at, code)}\n")
        sys.stdout.flush()
        if code == EXIT_FAILED:
            sys.stdout.write(f"  its run folder stays: {at}\n")
        elif not self._request.keep:
            shutil.rmtree(at, ignore_errors=True)
        if code != EXIT_VALID:
            self.failed = code == EXIT_FAILED
        return code == EXIT_VALID

    def _verdict(self, at: Path, code: int) -> str:
        word = {EXIT_VALID: "valid", EXIT_FAILED: "FAILED", EXIT_INVALID: "INVALID"}[code]
        try:
            systems: dict[str, Any] = json.loads((at / "roles.json").read_text(encoding="utf-8"))
        except OSError:
            return word  # it failed before there were any
        limits = self._loaded.plan.limits
        lag_ms = max(role["lag_p99_ns"] for run in systems.values() for role in run["roles"].values()) / _NS_PER_MS
        cpu_share = max(run["host_cpu_share"] for run in systems.values())
        return (
            f"{word}; lag p99 {lag_ms:.0f} ms (limit {limits.lag_p99_ms:g}), "
            f"CPU {cpu_share:.0%} (limit {limits.cpu_share:.0%})"
        )


def _told(request: CalibrateRequest, loaded: LoadedScenario, probing: _Probing, found: int | None) -> int:
    """Say what to use, and keep it."""
    if found is None:
        slowest = stretched(loaded, FACTORS[-1])
        sys.stderr.write(
            f"error: {request.scenario}: no scale that was tried is valid on this host (the slowest there is, "
            f"1:{slowest.bandwidth:,g}); close other programs, or cut the load with --set workload.agents=... or "
            "cluster.gpus_per_node=...\n"
        )
        return EXIT_FAILED if probing.failed else EXIT_INVALID
    use = stretched(loaded, FACTORS[found] * _MARGIN)
    host, cores = host_and_cores()
    scale = HostScale(
        scenario=name_of(request.scenario),
        date=f"{datetime.now():%Y-%m-%d %H:%M}",
        host=host,
        cores=cores,
        scenario_hash=load_hash(loaded.scenario),
        systems=loaded.scenario.systems,
        scales=use,
    )
    given = set_options(request.overrides)
    if request.systems:
        given += ["--systems", ",".join(request.systems)]
    command = shlex.join(["testbed", "run", request.scenario, *given])
    sys.stdout.write(
        f"The fastest that was valid on this host ({cores} cores): 1:{stretched(loaded, FACTORS[found]).bandwidth:,g}; "
        f"with a margin of {_MARGIN - 1:.0%}, use\n"
        f"  {command} {shlex.join(set_options(use.overrides))}\n"
    )
    path = keep(scale)
    sys.stdout.write(f"or, the same, {command} --calibrated (kept in {path}).\n")
    return EXIT_VALID
