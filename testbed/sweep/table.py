"""The table of a sweep: one row per point, seed and system, with all settings and the chosen metrics.

Invariants: rows and columns follow the sweep file alone, so the table does not depend on how many workers ran it or on
when it was interrupted. A run that failed has its rows too, with the reason and without metrics.
"""

from __future__ import annotations

import csv
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from testbed.errors import ConfigError, HostError
from testbed.metrics.metrics import Distribution, SystemMetrics
from topologies.tomlinput import nearest

DEFAULT_METRICS = (
    "jct_s", "paper.jct_s", "paper.ttft_s.mean", "paper.ttst_s.mean", "paper.tpot_s.mean", "requests",
    "failed_requests", "hit_rate", "bytes_by_path.pe", "bytes_by_path.de", "snic_plateau_min", "read_balance",
)  # fmt: skip

_FREE = "*"
"""Stands for any name in a metric whose parts depend on the cluster (``snic_utilisation.pe0.run``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run's share in the table. ``document``: its metrics.json, None if there is none; ``error``: then why."""

    point: int
    settings: Mapping[str, str]
    seed: int
    systems: tuple[str, ...]
    run: str
    document: Mapping[str, Any] | None
    error: str


def known_metrics() -> list[str]:
    """Dotted names of everything that ``metrics.json`` has per system, in emulated and in the paper's units."""
    paper = [f"paper.{key}" for key in ("jct_s", "bytes_by_path.*")]
    paper += [f"paper.{key}.{part}" for key in ("ttft_s", "ttst_s", "tpot_s") for part in _names(Distribution)]
    return [name for name in _names(SystemMetrics) if name != "system"] + paper


def _names(kind: Any) -> Iterator[str]:
    for name, hint in typing.get_type_hints(kind).items():
        inner = typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint  # "... | None": if any
        if is_dataclass(inner):
            yield from (f"{name}.{rest}" for rest in _names(inner))
        elif typing.get_origin(inner) is not None:
            value = typing.get_args(inner)[-1]
            yield from (
                (f"{name}.{_FREE}.{rest}" for rest in _names(value)) if is_dataclass(value) else (f"{name}.{_FREE}",)
            )
        else:
            yield name


def check_metric(name: str, where: str) -> None:
    """Refuse a column that no run can have.

    Raises:
        ConfigError: naming the nearest one, or what is in it if it is a whole table.
    """
    known = known_metrics()
    parts = name.split(".")
    if any(_matches(parts, each.split(".")) for each in known):
        return
    inside = [each for each in known if each.startswith(f"{name}.")]
    if inside:
        raise ConfigError(f"{where}: metric {name!r} is a table; take one of {', '.join(inside)}.")
    hint = nearest(name, known) or f"; known are {', '.join(known)}"
    raise ConfigError(f"{where}: unknown metric {name!r}{hint}.")


def _matches(parts: Sequence[str], known: Sequence[str]) -> bool:
    return len(parts) == len(known) and all(b in (_FREE, a) for a, b in zip(parts, known, strict=True))


def write_table(path: Path, rows: Sequence[Row], keys: Sequence[str], metrics: Sequence[str]) -> None:
    """Write all rows as CSV.

    Raises:
        HostError: the disk is full or read-only.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["point", *keys, "seed", "system", "valid", "error", *metrics, "run"])
            for row in rows:
                writer.writerows(_lines(row, keys, metrics))
    except OSError as error:
        raise HostError(f"{path}: cannot be written ({error.strerror}).") from error


def _lines(row: Row, keys: Sequence[str], metrics: Sequence[str]) -> Iterator[list[object]]:
    for system in row.systems:
        values = (row.document or {}).get("systems", {}).get(system)
        yield [
            row.point,
            *(row.settings.get(key, "") for key in keys),
            row.seed,
            system,
            "" if row.document is None else str(row.document["valid"]).lower(),
            row.error,
            *("" if values is None else _value(values, metric) for metric in metrics),
            row.run,
        ]


def _value(document: Any, metric: str) -> object:
    """The value of a dotted name; empty if this run has none (no node of that name)."""
    for part in metric.split("."):
        if not isinstance(document, Mapping) or part not in document:
            return ""
        document = document[part]
    return document
