"""Scenarios by name or path, with overrides from the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from scenarios.describe import stands_for
from scenarios.resolve import resolve
from scenarios.schema import Expectation, Scenario
from testbed.errors import ConfigError
from testbed.runtime.plan import RunPlan
from topologies.tomlinput import fill, leaf_type, nearest, parse_value, read_toml

SUFFIX = ".toml"
EXPERIMENTS = "experiments"
"""Folder of the experiments, beside the scenarios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedScenario:
    """A scenario ready to run. ``resolved``: the configuration with all defaults and overrides, for the run folder."""

    name: str
    scenario: Scenario
    plan: RunPlan
    resolved: Mapping[str, Any]
    stands_for: str
    """One line: which model and hardware of the paper, scaled by what, and every departure from them."""

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """What the scenario claims of the systems that run."""
        return self.scenario.expect


def scenario_names() -> list[str]:
    """Names of the scenarios that ship."""
    files = resources.files("scenarios").iterdir()
    return sorted(f.name.removesuffix(SUFFIX) for f in files if f.name.endswith(SUFFIX))


def experiment_names() -> list[str]:
    """Names of the experiments that ship (``testbed.experiment``)."""
    files = (resources.files("scenarios") / EXPERIMENTS).iterdir()
    return sorted(f.name.removesuffix(SUFFIX) for f in files if f.name.endswith(SUFFIX))


def name_of(name_or_path: str) -> str:
    """What a scenario is called in the names of run folders."""
    return Path(name_or_path).stem if is_path(name_or_path) else name_or_path


def read_scenario(name_or_path: str, overrides: Sequence[str] = ()) -> Scenario:
    """A shipped scenario by name, or any by path, with ``key=value`` overrides typed by the schema.

    Raises:
        ConfigError: no such scenario or key (with the nearest name), or a value of the wrong type.
    """
    tables = _read(name_or_path)
    for override in overrides:
        _override(tables, override)
    return fill(Scenario, tables, f"scenario {name_or_path}")


def load_scenario(
    name_or_path: str,
    *,
    overrides: Sequence[str] = (),
    systems: Sequence[str] = (),
    seed: int | None = None,
    run_dir: Path,
) -> LoadedScenario:
    """Everything a run needs. ``systems`` and ``seed`` win over the file and over ``overrides``.

    Raises:
        ConfigError: the input cannot be run; one sentence with the way out.
    """
    scenario = read_scenario(name_or_path, overrides)
    if systems:
        scenario = dataclasses.replace(scenario, systems=tuple(systems))
    if seed is not None:
        scenario = dataclasses.replace(scenario, seed=seed)
    name = name_of(name_or_path)
    plan = resolve(name, scenario, run_dir)
    return LoadedScenario(
        name=name,
        scenario=scenario,
        plan=plan,
        resolved={"scenario": name, **msgspec.to_builtins(scenario), "emulated": _emulated(plan)},
        stands_for=stands_for(scenario, plan),
    )


def is_path(name_or_path: str) -> bool:
    """Whether a scenario or an experiment is named by its file."""
    return name_or_path.endswith(SUFFIX) or "/" in name_or_path


def is_experiment(name_or_path: str) -> bool:
    """Whether this names an experiment and not a scenario; a file that cannot be read is neither.

    Raises:
        ConfigError: a file that is not TOML.
    """
    if is_path(name_or_path):
        path = Path(name_or_path)
        return path.is_file() and not {"variant", "question"}.isdisjoint(read_toml(path))
    return name_or_path in experiment_names()


def _read(name_or_path: str) -> dict[str, Any]:
    if is_experiment(name_or_path):
        raise ConfigError(
            f"{name_or_path} is an experiment, many runs; only `testbed run` takes one, and none as its scenario."
        )
    if is_path(name_or_path):
        return read_toml(Path(name_or_path))
    names = scenario_names()
    if name_or_path not in names:
        hint = nearest(name_or_path, [*names, *experiment_names()]) or f"; choose one of {', '.join(names)}"
        raise ConfigError(f"unknown scenario {name_or_path!r}{hint}.")
    with resources.as_file(resources.files("scenarios") / f"{name_or_path}{SUFFIX}") as path:
        return read_toml(path)


def _override(tables: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key, text = key.strip(), text.strip()
    where = f"--set {override}"
    if not equals or not key:
        raise ConfigError(f"{where}: give it as key=value, for example scale.bandwidth=8000.")
    value = parse_value(text, leaf_type(Scenario, key, where), where, key)
    *path, last = key.split(".")
    at = tables
    for part in path:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise ConfigError(f"{where}: {part} is no table in the file; write [{part}] there.")
    at[last] = value


def _emulated(plan: RunPlan) -> dict[str, Any]:
    """What the emulated cluster is given, in emulated units."""
    skipped = {
        "scripts", "starts_ns", "run_dir", "scale", "cost", "roles", "systems", "limits", "sim", "scenario", "seed",
    }  # fmt: skip
    values = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.name not in skipped}
    scale = plan.scale
    return {
        **msgspec.to_builtins({k: v for k, v in values.items()}, enc_hook=str),
        "gpu": msgspec.to_builtins(plan.cost.gpu),
        "full_block_bytes": plan.params.layout.full_block_bytes,
        "byte_scale": float(scale.byte_scale),
        "time_scale": float(scale.time_scale),
        "requests": sum(script.turns for script in plan.scripts),
    }
