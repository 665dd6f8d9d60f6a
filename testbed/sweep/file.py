"""Sweep files: a scenario, and the settings with which it runs again and again.

A file holds either a grid (every combination of its lists) or a list of points; each point runs with every seed and
every system. Settings are the keys that ``testbed run --set`` takes, quoted or as tables.

Invariants: points keep the order of the file (in a grid the last key varies fastest) and no two are alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scenarios.schema import Scenario
from testbed.errors import ConfigError
from testbed.runtime.plan import World
from testbed.sweep.table import DEFAULT_METRICS, check_metric
from topologies.tomlinput import fill, leaf_type, read_toml

_OWN_KEYS = {"seed": "seeds", "systems": "systems"}
"""Settings of a scenario that a sweep has a key of its own for."""

Settings = tuple[tuple[str, str], ...]
"""Keys and values as ``--set`` takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTables:
    """What a sweep file may hold. No seeds or systems: those of the scenario."""

    scenario: str
    world: World = "sim"
    seeds: tuple[int, ...] = ()
    systems: tuple[str, ...] = ()
    metrics: tuple[str, ...] = DEFAULT_METRICS
    grid: Mapping[str, Any] = field(default_factory=dict)
    points: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep, read and expanded. ``keys``: all settings that any point has, in the order of the file."""

    name: str
    scenario: str
    world: World
    seeds: tuple[int | None, ...]
    systems: tuple[str, ...]
    metrics: tuple[str, ...]
    keys: tuple[str, ...]
    points: tuple[Settings, ...]


def read_sweep(path: Path) -> Sweep:
    """Read and expand a sweep file.

    Raises:
        ConfigError: it cannot be read, has an unknown key (with the nearest one), or describes no sweep.
    """
    where = f"sweep {path}"
    tables = fill(SweepTables, read_toml(path), where)
    for metric in tables.metrics:
        check_metric(metric, where)
    points = _expanded(tables, where)
    _refuse_twins(points, where)
    if len(set(tables.seeds)) != len(tables.seeds):
        raise ConfigError(f"{where}: seeds {list(tables.seeds)}: each can run once.")
    return Sweep(
        name=path.stem,
        scenario=_beside(path, tables.scenario),
        world=tables.world,
        seeds=tables.seeds or (None,),
        systems=tables.systems,
        metrics=tables.metrics,
        keys=tuple(dict.fromkeys(key for point in points for key, _ in point)),
        points=tuple(points),
    )


def _expanded(tables: SweepTables, where: str) -> list[Settings]:
    if tables.grid and tables.points:
        raise ConfigError(f"{where}: has a grid and points; give one of the two.")
    if tables.points:
        return [_point(point, f"{where}: points[{i}]") for i, point in enumerate(tables.points)]
    if not tables.grid:
        raise ConfigError(
            f'{where}: has neither a grid nor points; give one, for example [grid] "workload.agents" = [2].'
        )
    lists = dict(_flat(tables.grid))
    for key, values in lists.items():
        _check_key(key, f"{where}: grid")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}: grid.{key} is {values!r}, but it must be a list of at least one value.")
    return [
        tuple((key, _text(value)) for key, value in zip(lists, values, strict=True))
        for values in itertools.product(*lists.values())
    ]


def _point(tables: Mapping[str, Any], where: str) -> Settings:
    settings = settings_of(tables)
    for key, _ in settings:
        _check_key(key, where)
    return settings


def settings_of(tables: Mapping[str, Any]) -> Settings:
    """Settings as a file holds them (keys quoted or tables nested), as ``--set`` takes them."""
    return tuple((key, _text(value)) for key, value in _flat(tables))


def _flat(tables: Mapping[str, Any], walked: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values, whether the file quotes them or nests tables."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{walked}{key}.")
        else:
            yield f"{walked}{key}", value


def _check_key(key: str, where: str) -> None:
    if key in _OWN_KEYS:
        raise ConfigError(f"{where}: {key} is no setting of a point; use the key {_OWN_KEYS[key]} of the sweep.")
    leaf_type(Scenario, key, where)


def _text(value: Any) -> str:
    """A TOML value as a command line would spell it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_text, value)) if isinstance(value, list) else str(value)


def _refuse_twins(points: Sequence[Settings], where: str) -> None:
    seen: dict[Settings, int] = {}
    for number, point in enumerate(points, start=1):
        if (twin := seen.setdefault(tuple(sorted(point)), number)) != number:
            raise ConfigError(f"{where}: points {twin} and {number} are the same; take one away.")


def _beside(sweep: Path, scenario: str) -> str:
    """A scenario file is looked for beside the sweep file, whatever directory the command runs in."""
    return str(sweep.parent / scenario) if "/" in scenario or scenario.endswith(".toml") else scenario
