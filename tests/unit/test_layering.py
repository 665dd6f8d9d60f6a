"""Imports point left only (architecture, "Layers"). The rule is the tables below; ast reads what is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = ("testbed", "emulators", "topologies", "scenarios")
MAX_LINES = 600

# What a package may import of the project, beside itself. The longest name that matches counts.
MAY_IMPORT: dict[str, set[str]] = {
    "testbed.units": set(),
    "testbed.errors": set(),
    "testbed.ids": set(),
    "testbed.fabric.arbiter": {"testbed.units", "testbed.errors"},
    "testbed.fabric.peaks": {"testbed.units"},
    "testbed.fabric.recording": set(),
    "testbed.fabric.spec": {"testbed.units", "testbed.errors", "testbed.ids", "testbed.fabric.arbiter"},
    "testbed.protocol": {"testbed.units", "testbed.errors", "testbed.ids", "testbed.fabric.spec"},
    "testbed.kvmodel": {"testbed.errors", "testbed.protocol"},
    "testbed.models": {"testbed.units", "testbed.errors", "testbed.protocol", "testbed.fabric.spec"},
    "testbed.analysis": {
        "testbed.units",
        "testbed.errors",
        "testbed.models",
        "testbed.fabric.arbiter",
        "testbed.fabric.spec",
    },
    "testbed.sweep": {
        "testbed.errors",
        "testbed.runtime.plan",
        "testbed.metrics",
        "testbed.fabric.live.syscalls",
        "scenarios",
        "topologies",
    },
    "testbed.experiment": {
        "testbed.errors",
        "testbed.metrics",
        "testbed.protocol.params",
        "testbed.runtime.plan",
        "testbed.sweep",
        "scenarios",
        "topologies",
    },
    "testbed.workload": {"testbed.units", "testbed.errors", "testbed.protocol"},
    "emulators": {"testbed.units", "testbed.errors", "testbed.ids", "testbed.fabric.spec", "testbed.protocol"},
    "testbed.trace": {"testbed.units", "testbed.errors", "testbed.ids", "testbed.protocol"},
    "testbed.paper": {
        "testbed.errors",
        "testbed.models",
        "testbed.workload",
        "testbed.analysis",
        "testbed.flowsim",
        "testbed.fabric.live.syscalls",
    },
    "testbed.fabric.live": {
        "testbed.units",
        "testbed.errors",
        "testbed.ids",
        "testbed.fabric.recording",
        "testbed.fabric.spec",
        "testbed.protocol",
        "testbed.kvmodel",
        "testbed.trace",
    },
    "testbed.capture": {"testbed.units", "testbed.errors", "testbed.fabric.live"},
    "testbed.fabric.check": {"testbed.errors", "testbed.ids", "testbed.protocol"},
    "testbed.fabric.sim": {
        "testbed.units",
        "testbed.errors",
        "testbed.ids",
        "testbed.fabric.arbiter",
        "testbed.fabric.peaks",
        "testbed.fabric.spec",
        "testbed.protocol",
    },
}
# No layer may import these, whatever its own row says.
NEVER: dict[str, set[str]] = {
    "testbed.fabric": {"emulators", "topologies", "scenarios", "testbed.runtime", "testbed.cli"},
    "testbed.protocol": {"emulators", "topologies", "scenarios", "testbed.fabric.live", "testbed.runtime"},
    "testbed.runtime": {"topologies", "scenarios", "testbed.cli"},
    "testbed.runtime.result": {"testbed.fabric.live", "testbed.fabric.sim"},  # the same for every world
    "testbed.metrics": {"testbed.fabric.live", "emulators", "scenarios", "topologies", "testbed.runtime"},
    "topologies": {"scenarios", "testbed.cli"},
    "scenarios": {"testbed.cli"},
    "emulators": {"testbed.fabric.live", "testbed.runtime", "topologies", "scenarios"},
    "testbed": {"testbed.cli"},  # the command line is the only place that knows everything
}
# Packages without I/O, clock or chance.
PURE = (
    "testbed.protocol",
    "testbed.kvmodel",
    "testbed.models",
    "testbed.metrics",
    "testbed.analysis",
    "testbed.fabric.arbiter",
    "testbed.fabric.peaks",
    "testbed.fabric.sim",
    "testbed.fabric.check",
    "emulators",
)
IMPURE = {"asyncio", "socket", "os", "time", "random", "threading", "subprocess", "select"}
# Entries and readers of files, which belong to a pure package by name only; with the reason.
EXEMPT: dict[str, str] = {}


def _modules() -> Iterator[tuple[str, Path]]:
    for top in PROJECT:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(_modules())


def _imports(path: Path) -> Iterator[str]:
    """Names of everything imported, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _row(module: str) -> tuple[str, set[str]] | None:
    names = [name for name in MAY_IMPORT if _within(module, name)]
    return (max(names, key=len), MAY_IMPORT[max(names, key=len)]) if names else None


def _wrong(module: str, imported: list[str]) -> list[str]:
    wrong = []
    for name in imported:
        if not any(_within(name, top) for top in PROJECT):
            continue
        row = _row(module)
        if row is not None and not any(_within(name, allowed) for allowed in (row[0], *row[1])):
            wrong.append(f"{module} imports {name}, which is not left of {row[0]}")
        for package, forbidden in NEVER.items():
            inside = _within(module, package) and not _within(module, "testbed.cli")
            if inside and any(_within(name, f) for f in forbidden):
                wrong.append(f"{module} imports {name}: never in {package}")
    return wrong


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_left(module: str) -> None:
    assert _wrong(module, list(_imports(MODULES[module]))) == []


@pytest.mark.parametrize("module", sorted(m for m in MODULES if any(_within(m, p) for p in PURE)))
def test_pure_packages_know_no_world(module: str) -> None:
    impure = {name.split(".")[0] for name in _imports(MODULES[module])} & IMPURE
    assert not impure or module in EXEMPT, f"{module} imports {impure}"


@pytest.mark.parametrize("path", sorted([*MODULES.values(), *(ROOT / "tests").rglob("*.py")]), ids=str)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_the_rules_bite() -> None:
    assert _wrong("testbed.protocol.grants", ["emulators.base"])
    assert _wrong("testbed.protocol.grants", ["testbed.kvmodel.device"])
    assert _wrong("testbed.fabric.live.roles", ["scenarios.loader"])
    assert _wrong("emulators.base", ["testbed.fabric.live.roles"])
    assert _wrong("scenarios.loader", ["testbed.cli.main"])
    assert _wrong("testbed.runtime.plan", ["testbed.cli"])
    assert not _wrong("testbed.cli.main", ["testbed.cli.run", "scenarios.loader", "testbed.fabric.live.roles"])
    assert not _wrong("emulators.base", ["testbed.protocol.grants", "asyncio", "emulators.cluster"])
    assert {"emulators.base", "testbed.protocol", "testbed.fabric.live.roles"} <= set(MODULES)
