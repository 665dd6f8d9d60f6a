"""The scale at which this host carries a scenario: what ``testbed calibrate`` keeps and ``run --calibrated`` takes.

One file per scenario below the user's cache. It is of one host and of one load: who calibrated elsewhere, with other
cores, or before the scenario changed is told so, and nothing is guessed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from scenarios.loader import name_of, read_scenario
from scenarios.resolve import shape_of
from scenarios.schema import Scenario
from testbed.errors import ConfigError, HostError

_NO_LOAD = ("title", "description", "expect", "seed", "sim", "systems")
"""Keys of a scenario that change nothing of what a host must carry; systems are compared apart."""
_DIGITS = 16


class Scales(msgspec.Struct, frozen=True, kw_only=True):
    """The two scales that say how fast an emulated cluster is; ``overrides`` are what ``--set`` takes."""

    bandwidth: float
    time: float

    @property
    def overrides(self) -> tuple[str, str]:
        """Both keys."""
        return f"scale.bandwidth={self.bandwidth:g}", f"scale.time={self.time:g}"


class HostScale(msgspec.Struct, frozen=True, kw_only=True):
    """Scales that were measured. ``scenario_hash``: of everything in the scenario that makes load."""

    scenario: str
    date: str
    host: str
    cores: int
    scenario_hash: str
    systems: tuple[str, ...]
    scales: Scales


def host_and_cores() -> tuple[str, int]:
    """The host's name, and the cores that this process may use."""
    return platform.node(), len(os.sched_getaffinity(0))


def load_hash(scenario: Scenario) -> str:
    """Tells loads apart: the same for two scenarios that ask the same of a host."""
    loads = {k: v for k, v in msgspec.to_builtins(scenario).items() if k not in _NO_LOAD}
    document = json.dumps([loads, msgspec.to_builtins(shape_of(scenario))], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:_DIGITS]


def path_of(scenario: str) -> Path:
    """Where the scale of a scenario is kept; two files of one name share it, and the hash tells them apart."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dualpath-testbed" / "calibration" / f"{name_of(scenario)}.json"


def keep(scale: HostScale) -> Path:
    """Keep a scale, in place of an earlier one.

    Raises:
        HostError: the cache cannot be written.
    """
    path = path_of(scale.scenario)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(scale)) + b"\n")
    except OSError as error:
        raise HostError(
            f"{path}: the calibration cannot be kept ({error.strerror}); set XDG_CACHE_HOME to another folder, or "
            "give the scales above with --set."
        ) from error
    return path


def calibrated(scenario: str, overrides: Sequence[str], systems: Sequence[str]) -> Scales:
    """The scales that were measured for this scenario on this host.

    Raises:
        ConfigError: there is none, or it is of another host, another load or other systems.
    """
    path = path_of(scenario)
    wanted = read_scenario(scenario, overrides)
    wanted = replace(wanted, systems=tuple(systems) or wanted.systems)
    way = f"run `testbed calibrate {scenario}` with the same --set and --systems"
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=HostScale)
    except FileNotFoundError as error:
        raise ConfigError(f"--calibrated: {scenario} was never calibrated on this host; {way}.") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--calibrated: {path} cannot be read ({error}); {way}.") from error
    host, cores = host_and_cores()
    stale = ""
    if (kept.host, kept.cores) != (host, cores):
        stale = f"on {kept.host} with {kept.cores} cores, and this is {host} with {cores}"
    elif kept.scenario_hash != load_hash(wanted):
        stale = "and the scenario, or what --set changes of it, has been another since"
    elif missing := [name for name in wanted.systems if name not in kept.systems]:
        stale = f"without {', '.join(missing)}"
    if stale:
        raise ConfigError(f"--calibrated: {scenario} was calibrated on {kept.date} {stale}; {way}.")
    return kept.scales
