"""``testbed check``: explore small clusters in every order of events, walk larger ones at random, replay a trace."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from testbed.cli.check_cluster import CheckConfig, config_of, load_config, setup_of
from testbed.errors import ConfigError
from testbed.fabric.check.explore import Bounds, Coverage, Explorer
from testbed.fabric.check.hosted import NamedMove, replay, shortened
from testbed.fabric.check.inputs import Violation
from testbed.fabric.check.reduction import Reduction
from testbed.fabric.check.trace import FORMAT, TraceFile, decode, encode, lines, named
from testbed.fabric.check.walk import walk
from testbed.fabric.check.world import FAULTS, LOSE, REFUSE, REPEAT, CheckWorld

STOPPED = 3
DEFAULT = (
    ("1p1d-2r", 0, FAULTS),
    ("1p1d-2turns", 1, FAULTS),
    ("1p1d-2r", 1, frozenset({LOSE, REFUSE, REPEAT})),
)
"""Two requests at once in every order; one after the other with any fault; at once with most kinds of faults."""
_PROGRESS_EVERY_S = 2.0
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What was asked for on the command line. ``faults`` None: without any, then with one; no ``config``: DEFAULT."""

    config: str
    faults: int | None
    only: tuple[str, ...]
    """Kinds of faults that may strike; none: all."""
    at_random: bool
    seeds: int
    max_states: int
    memory_gb: float
    full: bool
    replay: Path | None
    out: Path


def check(request: CheckRequest) -> int:
    """Exit code: 0 nothing found, 1 a violation, 3 a bound was reached first.

    Raises:
        ConfigError: an unknown configuration or key, numbers out of range, a file that is no trace.
    """
    if request.replay is not None:
        return _replay(request.replay)
    for name, value in (("seeds", request.seeds), ("max-states", request.max_states), ("memory-gb", request.memory_gb)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"--{name} is {value}, but it must be positive.")
    if request.faults is not None and request.faults < 0:
        raise ConfigError(f"--faults is {request.faults}, but it must be 0 or more.")
    if request.at_random:
        return _walk(request)
    if unknown := [kind for kind in request.only if kind not in FAULTS]:
        raise ConfigError(f"--only: no fault is called {unknown[0]}; there are {', '.join(sorted(FAULTS))}.")
    kinds = frozenset(request.only) or FAULTS
    worst = 0
    if request.config or request.faults is not None or request.only:
        config = load_config(request.config or "1p1d-2r")
        plans = [(config, faults, kinds) for faults in ((0, 1) if request.faults is None else (request.faults,))]
    else:
        plans = [(load_config(name), faults, only) for name, faults, only in DEFAULT]
    for config, faults, kinds in plans:
        code = _explore(request, config, faults, kinds)
        if code == 1:
            return 1
        worst = max(worst, code)
    return worst


# --- exhaustively ----------------------------------------------------------------------------------------------------


def _explore(request: CheckRequest, config: CheckConfig, faults: int, kinds: frozenset[str]) -> int:
    world = CheckWorld(setup_of(config))
    bounds = Bounds(
        max_states=request.max_states,
        max_memory_bytes=int(request.memory_gb * 1e9),
        memory_bytes=_memory_bytes,
        clock_s=time.perf_counter,
        on_progress=_Progress(),
    )
    reduction = None if request.full else Reduction(world)
    explorer = Explorer(world, faults, bounds, reduction=reduction, kinds=kinds)
    gc.disable()  # a collector would walk millions of states again and again; see _Progress
    try:
        coverage = explorer.run()
    finally:
        gc.enable()
    of_kind = f" ({', '.join(sorted(kinds))})" if faults and kinds != FAULTS else ""
    _write(f"{config.name}, {_at_most(faults)}{of_kind}: {_covered(coverage)}, {_verdict(coverage)}")
    if coverage.found is not None:
        found = coverage.found
        moves = named(world, faults, found.moves)
        return _show(request.out, config, faults, moves, found.violations, at_end=found.at_end)
    return STOPPED if coverage.stopped else 0


def _at_most(faults: int) -> str:
    return {0: "no fault", 1: "at most one fault"}.get(faults, f"at most {faults} faults")


def _covered(coverage: Coverage) -> str:
    return (
        f"{coverage.states:,} states, {coverage.transitions:,} transitions, depth {coverage.depth}, "
        f"{coverage.ends:,} ends, {coverage.seconds:.1f} s, {coverage.rate:,.0f} states/s"
    )


def _verdict(coverage: Coverage) -> str:
    if coverage.found is not None:
        return "VIOLATION"
    if coverage.stopped:
        return f"STOPPED: {coverage.stopped}; nothing wrong in what was covered"
    return "explored to the end, nothing wrong"


def _memory_bytes() -> int:
    """What the process takes now (resident)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


class _Progress:
    """Called now and then: frees what is young and dead, and writes a line on a terminal's stderr."""

    def __init__(self) -> None:
        self._next_s = _PROGRESS_EVERY_S

    def __call__(self, states: int, depth: int, seconds: float) -> None:
        gc.collect(0)  # machines that were copied for one transition; older objects are states
        if seconds >= self._next_s and sys.stderr.isatty():
            self._next_s = seconds + _PROGRESS_EVERY_S
            sys.stderr.write(f"\r{states:,} states, depth {depth}, {states / seconds:,.0f} states/s   \r")
            sys.stderr.flush()


# --- at random -------------------------------------------------------------------------------------------------------


def _walk(request: CheckRequest) -> int:
    config = load_config(request.config or "2p2d-6r")
    faults = 1 if request.faults is None else request.faults
    steps, start_s = 0, time.perf_counter()
    for seed in range(request.seeds):
        walked = walk(setup_of(config), faults, random.Random(f"{config.name} {seed}").randrange)
        steps += len(walked.moves)
        if walked.violations:
            _write(f"{config.name}, {_at_most(faults)}, seed {seed}: {len(walked.moves)} steps, VIOLATION")
            return _show(request.out, config, faults, walked.moves, walked.violations, at_end=walked.at_end)
    seconds = time.perf_counter() - start_s
    _write(
        f"{config.name}, {_at_most(faults)}: {request.seeds} random walks, {steps:,} steps, {seconds:.1f} s, "
        f"{steps / seconds:,.0f} steps/s, nothing wrong"
    )
    return 0


# --- traces ----------------------------------------------------------------------------------------------------------


def _show(
    out: Path,
    config: CheckConfig,
    faults: int,
    moves: Sequence[NamedMove],
    violations: Sequence[Violation],
    *,
    at_end: bool,
) -> int:
    """Print a trace, save it, and say how to replay it."""
    if not at_end:
        moves = shortened(setup_of(config), faults, moves, violations[0])
    for line in lines(moves, violations):
        _write(line)
    trace = TraceFile(
        format=FORMAT,
        config=msgspec.to_builtins(asdict(config)),
        faults=faults,
        at_end=at_end,
        violations=list(violations),
        moves=list(moves),
    )
    path = out / f"check-{config.name}-{violations[0].checker}.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(trace))
    _write(f"replay: testbed check --replay {path}")
    return 1


def _replay(path: Path) -> int:
    if not path.is_file():
        raise ConfigError(f"{path} is no file; testbed check names the trace that it has saved.")
    trace = decode(str(path), path.read_bytes())
    setup = setup_of(config_of(str(path), trace.config))
    violations = replay(setup, trace.faults, trace.moves, at_end=trace.at_end)
    for line in lines(trace.moves, violations):
        _write(line)
    if not violations:
        _write("nothing is wrong any more: the trace was of machines that have changed, or have been altered by a test")
    return 1 if violations else 0


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
