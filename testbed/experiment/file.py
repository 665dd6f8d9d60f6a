"""Experiment files: a base scenario, its variants, and what is expected of their metrics (docs/experiments.md).

Expectations name metrics as ``variant.system.metric``, with underscores for hyphens; the variant ``each`` stands for
every one that has the systems named. Figures name them as ``system.metric`` and are taken of every variant.

Invariants: every name in an experiment that was read exists (variants, systems, settings, metrics), and every claim
can be judged in the worlds that it is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from scenarios.loader import EXPERIMENTS, SUFFIX, is_path, name_of, read_scenario
from scenarios.schema import Scenario
from testbed.errors import ConfigError
from testbed.metrics.expression import check_expression, check_figure, names_in, with_first
from testbed.metrics.verdict import identifier
from testbed.protocol.params import system_named
from testbed.runtime.plan import World
from testbed.sweep.file import Settings, settings_of
from testbed.sweep.table import check_metric
from topologies.tomlinput import fill, leaf_type, nearest, read_toml

EACH = "each"
"""In an expectation: every variant in turn."""
DEFAULT_REPEATS: Mapping[World, int] = {"live": 1, "sim": 3}
MOST_REPEATS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatTable:
    """Runs of a variant, by world, of which the median counts: live for noise, sim over timings (``sim.draw``)."""

    live: int | None = None
    sim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantTable:
    """``x``, ``series``: where its figures go in the plot. No systems, worlds or repeats: those of the experiment."""

    name: str
    x: float | None = None
    series: str = ""
    set: Mapping[str, Any] = field(default_factory=dict)
    systems: tuple[str, ...] = ()
    worlds: tuple[World, ...] = ()
    repeat: RepeatTable = field(default_factory=RepeatTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectTable:
    """``claim``: a comparison over variants; ``text``: the same in words. No worlds: all that run its variants."""

    name: str
    claim: str
    text: str
    worlds: tuple[World, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreeTable:
    """What must be alike live and in sim; tolerances are relative. No ``throughput``: mean lives of everything."""

    throughput: tuple[str, ...] | None = None
    ratios: tuple[str, ...] = ()
    throughput_tolerance: float = 0.05
    ratio_tolerance: float = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number of every variant, for the table; if it has a ``panel``, for that panel of the plot too."""

    label: str
    value: str
    panel: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """``x``: a setting whose values are the places of the variants; else their ``x``, else their names."""

    x: str = ""
    x_label: str = ""
    kind: Literal["line", "bar"] = "line"
    log: tuple[Literal["x", "y"], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentTables:
    """What an experiment file may hold. ``scenario``: the base; ``set``: settings of all variants, as for --set."""

    title: str
    question: str
    scenario: str
    variant: tuple[VariantTable, ...]
    expect: tuple[ExpectTable, ...]
    worlds: tuple[World, ...] = ("live", "sim")
    systems: tuple[str, ...] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    agree: AgreeTable = field(default_factory=AgreeTable)
    figure: tuple[Figure, ...] = ()
    plot: Plot = field(default_factory=Plot)
    repeat: RepeatTable = field(default_factory=RepeatTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A variant, its settings and systems complete. ``x``: its place in the plot; None if places are names."""

    name: str
    x: float | None
    series: str
    settings: Settings
    systems: tuple[str, ...]
    worlds: tuple[World, ...]
    repeats: Mapping[World, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An expectation, of single variants and for certain worlds."""

    name: str
    claim: str
    text: str
    worlds: tuple[World, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Something that must be alike live and in sim."""

    value: str
    tolerance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment, read and checked."""

    name: str
    title: str
    question: str
    scenario: str
    worlds: tuple[World, ...]
    variants: tuple[Variant, ...]
    claims: tuple[Claim, ...]
    comparisons: tuple[Comparison, ...]
    figures: tuple[Figure, ...]
    plot: Plot


def read_experiment(name_or_path: str) -> Experiment:
    """A shipped experiment by name, or any by path.

    Raises:
        ConfigError: it cannot be read, or names what does not exist; one sentence with the way out.
    """
    name = name_of(name_or_path)
    where = f"experiment {name}"
    if is_path(name_or_path):
        raw = read_toml(Path(name_or_path))
    else:
        with resources.as_file(resources.files("scenarios") / EXPERIMENTS / f"{name_or_path}{SUFFIX}") as path:
            raw = read_toml(path)
    tables = fill(ExperimentTables, raw, where)
    for key in ("throughput_tolerance", "ratio_tolerance"):
        if not 0 <= (tolerance := getattr(tables.agree, key)) < 1:
            raise ConfigError(f"{where}: agree.{key} is {tolerance:g}, but it must be from 0 to 1, as 0.05 for 5 %.")
    if not tables.worlds or not tables.variant or not tables.expect:
        raise ConfigError(f"{where}: needs at least one world, one [[variant]] and one [[expect]].")
    variants = _variants(tables, where)
    _check_figures(tables.figure, variants, where)
    return Experiment(
        name=name,
        title=tables.title,
        question=tables.question,
        scenario=tables.scenario,
        worlds=tables.worlds,
        variants=variants,
        claims=_claims(tables, variants, where),
        comparisons=_comparisons(tables, variants, where),
        figures=tables.figure,
        plot=tables.plot,
    )


# --- variants ------------------------------------------------------------------------------------------------------


def _variants(tables: ExperimentTables, where: str) -> tuple[Variant, ...]:
    base = read_scenario(tables.scenario)
    systems = tables.systems or base.systems
    common = _settings(tables.set, where)
    common_repeats = _repeats(tables.repeat, DEFAULT_REPEATS, where)
    seen: set[str] = set()
    variants = []
    for table in tables.variant:
        here = f"{where}, variant {table.name}"
        if table.name == EACH or identifier(table.name) in seen or not identifier(table.name).isidentifier():
            raise ConfigError(
                f"{here}: every variant needs a name of its own, of letters, digits and hyphens, and not {EACH!r}."
            )
        seen.add(identifier(table.name))
        for system in table.systems or systems:
            try:
                system_named(system)
            except ConfigError as error:
                raise ConfigError(f"{here}: {error}") from None
        for world in table.worlds:
            if world not in tables.worlds:
                raise ConfigError(f"{here}: the world {world!r} is not among those of the experiment; add it there.")
        settings = tuple((dict(common) | dict(_settings(table.set, here))).items())
        variants.append(
            Variant(
                name=table.name,
                x=_place(tables.plot, table, dict(settings), here),
                series=table.series,
                settings=settings,
                systems=table.systems or systems,
                worlds=tuple(w for w in tables.worlds if not table.worlds or w in table.worlds),
                repeats=_repeats(table.repeat, common_repeats, here),
            )
        )
    for variant in variants:
        stem, _, number = variant.name.rpartition("-")
        if number.isdecimal() and any(other.name == stem for other in variants):
            raise ConfigError(
                f"{where}: a repeat of the variant {stem} has the folder of {variant.name}; give one another name."
            )
    if len({variant.x is None for variant in variants}) > 1:
        raise ConfigError(f"{where}: some variants have an x and some have none; give it to all or to none.")
    return tuple(variants)


def _repeats(table: RepeatTable, default: Mapping[World, int], where: str) -> dict[World, int]:
    given: dict[World, int | None] = {"live": table.live, "sim": table.sim}
    repeats = {world: default[world] if count is None else count for world, count in given.items()}
    for world, count in repeats.items():
        if not 1 <= count <= MOST_REPEATS:
            raise ConfigError(f"{where}: repeat.{world} is {count}, but everything runs 1 to {MOST_REPEATS} times.")
    return repeats


def _settings(tables: Mapping[str, Any], where: str) -> Settings:
    settings = settings_of(tables)
    for key, _ in settings:
        if key == "systems":
            raise ConfigError(f"{where}: systems is no setting of a variant; use its key systems.")
        leaf_type(Scenario, key, where)
    return settings


def _place(plot: Plot, table: VariantTable, settings: Mapping[str, str], where: str) -> float | None:
    try:
        place = float(settings[plot.x]) if plot.x else table.x
    except (KeyError, ValueError):
        raise ConfigError(f"{where}: plot.x is {plot.x}, but the variant does not set it to a number.") from None
    if place is not None and not (math.isfinite(place) and (place > 0 or "x" not in plot.log)):
        kind = "positive" if "x" in plot.log else "finite"
        raise ConfigError(f"{where}: its place in the plot is {place:g}, but that must be a {kind} number.")
    return place


# --- expressions ---------------------------------------------------------------------------------------------------


def _claims(tables: ExperimentTables, variants: Sequence[Variant], where: str) -> tuple[Claim, ...]:
    claims = []
    for table in tables.expect:
        here = f"{where}, expectation {table.name}"
        check_expression(table.claim)
        for variant, claim in _expanded(_one_line(table.claim), variants, here):
            worlds = _worlds_of(claim, variants, table.worlds or tables.worlds, here)
            if table.worlds and worlds != tuple(w for w in tables.worlds if w in table.worlds):
                raise ConfigError(f"{here}: its variants do not all run in {', '.join(table.worlds)}.")
            if not worlds:
                raise ConfigError(f"{here}: there is no world in which all of its variants run.")
            name = f"{table.name} ({variant})" if variant else table.name
            claims.append(Claim(name=name, claim=claim, text=_one_line(table.text), worlds=worlds))
    return tuple(claims)


def _comparisons(tables: ExperimentTables, variants: Sequence[Variant], where: str) -> tuple[Comparison, ...]:
    """What both worlds must agree on: what the file lists, else the mean life of an agent in every system of every
    common variant: agents over life is the throughput of a closed loop. JCT is one agent's life, the last one's."""
    agree, here = tables.agree, f"{where}, agree"
    common = [variant for variant in variants if len(variant.worlds) == len(tables.worlds)]
    throughput = agree.throughput
    if throughput is None:
        throughput = tuple(
            f"{identifier(v.name)}.{identifier(s)}.working_set.life_s" for v in common for s in v.systems
        )
    wanted = [(text, agree.throughput_tolerance) for text in throughput]
    wanted += [(text, agree.ratio_tolerance) for text in agree.ratios]
    comparisons = []
    for text, tolerance in wanted:
        check_figure(text)
        for _, value in _expanded(text, common, here):
            _check_names(value, common, here)
            comparisons.append(Comparison(value=value, tolerance=tolerance))
    return tuple(comparisons) if len(tables.worlds) > 1 else ()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _check_figures(figures: Iterable[Figure], variants: Sequence[Variant], where: str) -> None:
    for figure in figures:
        here = f"{where}, figure {figure.label}"
        check_figure(figure.value)
        if not _expanded(_of_each(figure.value), variants, here):
            raise ConfigError(f"{here}: {figure.value!r} is of systems that run together in no variant.")


def _of_each(value: str) -> str:
    """The expression of a figure as one over variants: every first name moves behind ``each``."""
    for system in dict.fromkeys(name.partition(".")[0] for name in names_in(value)):
        value = with_first(value, system, f"{EACH}.{system}")
    return value


def _expanded(text: str, variants: Sequence[Variant], where: str) -> list[tuple[str, str]]:
    """``(variant, expression)`` for every variant that ``each`` stands for; ``("", text)`` where nothing does.

    Raises:
        ConfigError: a name that does not exist.
    """
    systems = {name.split(".")[1] for name in names_in(text) if name.startswith(f"{EACH}.")}
    if not systems:
        _check_names(text, variants, where)
        return [("", text)]
    fitting = [v for v in variants if systems <= {identifier(s) for s in v.systems}]
    expanded = [(v.name, with_first(text, EACH, identifier(v.name))) for v in fitting]
    for _, one in expanded:
        _check_names(one, variants, where)
    if not expanded:
        raise ConfigError(f"{where}: no variant runs {' and '.join(sorted(systems))}.")
    return expanded


def _check_names(text: str, variants: Sequence[Variant], where: str) -> None:
    by_name = {identifier(variant.name): variant for variant in variants}
    for name in names_in(text):
        first, _, rest = name.partition(".")
        system, _, metric = rest.partition(".")
        if first not in by_name:
            raise ConfigError(
                f"{where}: {name!r} is of no variant{nearest(first, by_name)}; write VARIANT.SYSTEM.METRIC."
            )
        systems = [identifier(s) for s in by_name[first].systems]
        if system not in systems:
            raise ConfigError(
                f"{where}: {name!r}: the variant {first} runs {', '.join(systems)}, not {system!r}; "
                "write VARIANT.SYSTEM.METRIC."
            )
        check_metric(metric, where)


def _worlds_of(text: str, variants: Sequence[Variant], worlds: Sequence[World], where: str) -> tuple[World, ...]:
    _check_names(text, variants, where)
    named = {name.partition(".")[0] for name in names_in(text)}
    used = [variant for variant in variants if identifier(variant.name) in named]
    return tuple(world for world in worlds if all(world in variant.worlds for variant in used))
