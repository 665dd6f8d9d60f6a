"""The run folder ``runs/<YYYYmmdd-HHMMSS>-<scenario>/``: everything needed to understand or repeat a run.

====================  =========================================================================================
config.resolved.json  the configuration with all defaults and overrides, and what it means in emulated units
environment.json      command, seed, versions of Python, kernel and packages, git commit, host
links.csv             calibration: one line per shaped link
requests.csv          one line per round and system, times in seconds since its system's first submission
metrics.json          the contract for tools (docs/contract.md)
roles.json            final report of every role of every system: event-loop lag, CPU time, memory, queues, disk
<system>/trace/       one event trace per role, written by the roles themselves
<system>/capture/     packets of the links that --capture named, one pcap file per link
captures.json         what was recorded, what is not in the files; only with --capture
failure.txt           only if the run did not end valid: why
====================  =========================================================================================
"""

from __future__ import annotations

import csv
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from testbed.errors import ConfigError, HostError
from testbed.metrics.summary import LinkRow, Summary
from testbed.metrics.views import RoundView, SystemView
from testbed.units import NS_PER_S

_PACKAGES = (
    "dualpath-testbed", "aiofiles", "matplotlib", "mininet", "msgspec", "numba", "numpy", "pyroute2", "rich", "typer",
    "xxhash",
)  # fmt: skip
_MOST_FOLDERS = 1000
_SPARE_BYTES = 200_000_000
"""Room for traces and logs beside the blocks."""

_REQUEST_COLUMNS = (
    "system", "agent", "turn", "prompt_tokens", "generate_tokens", "hit_tokens", "read_side", "de_hit_tokens",
    "dram_hit_tokens", "prefill_engine", "decode_engine", "submitted_s", "scheduled_s", "prefill_started_s",
    "first_token_s", "second_token_s", "last_token_s", "completed_s", "tokens", "error", "error_detail",
)  # fmt: skip


def create(out: Path, scenario: str, now: datetime) -> Path:
    """A new run folder below ``out``.

    Raises:
        ConfigError: ``out`` cannot hold it.
    """
    base = f"{now:%Y%m%d-%H%M%S}-{scenario}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for number in range(1, _MOST_FOLDERS):
            folder = out / (base if number == 1 else f"{base}-{number}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder.resolve()
    except OSError as error:
        raise ConfigError(f"--out {out}: no run folder can be made there ({error.strerror}).") from error
    raise ConfigError(f"--out {out}: there are {_MOST_FOLDERS} folders called {base} already.")


def check_space(folder: Path, block_bytes: int) -> None:
    """Refuse a disk that cannot hold the blocks of a run.

    Raises:
        HostError: too little free space, with both figures.
    """
    free = shutil.disk_usage(folder).free
    need = block_bytes + _SPARE_BYTES
    if free < need:
        raise HostError(
            f"{folder}: {free / 1e6:,.0f} MB are free, but this run may store {need / 1e6:,.0f} MB; "
            "free some space or choose another disk with --out."
        )


def write_configuration(folder: Path, resolved: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """What is known before the run.

    Raises:
        HostError: the disk is full or read-only.
    """
    _write_json(folder / "config.resolved.json", resolved)
    _write_json(folder / "environment.json", {"command": list(arguments), "seed": resolved["seed"], **_environment()})


def write_results(folder: Path, summary: Summary, systems: Sequence[SystemView]) -> None:
    """What is known after it.

    Raises:
        HostError: the disk is full.
    """
    _write_json(folder / "metrics.json", summary.document())
    _write_csv(folder / "links.csv", list(LinkRow.__dataclass_fields__), map(_link_row, summary.links))
    _write_csv(folder / "requests.csv", _REQUEST_COLUMNS, _request_rows(systems))
    _write_json(folder / "roles.json", {run.system: _reports(run) for run in systems})
    problems = (*summary.failures, *summary.invalid_reasons)
    if problems:
        write_failure(folder, "\n".join(problems))


def write_captures(folder: Path, recordings: Sequence[Mapping[str, Any]]) -> None:
    """What was recorded of which link.

    Raises:
        HostError: the disk is full.
    """
    if recordings:
        _write_json(folder / "captures.json", {"captures": list(recordings)})


def write_failure(folder: Path, reason: str) -> None:
    """Why the run did not end valid; a full disk must not hide the reason, so nothing is raised."""
    try:
        (folder / "failure.txt").write_text(reason + "\n", encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"{folder}: the reason could not be written ({error.strerror}).\n")


def drop_blocks(folder: Path) -> bool:
    """Remove what storage servers keep of a run that was cut short; whether all of it is gone."""
    for directory in (folder / "warm", *folder.glob("*/storage")):
        shutil.rmtree(directory, ignore_errors=True)
    return not (folder / "warm").exists() and not any(folder.glob("*/storage"))


def _reports(run: SystemView) -> dict[str, object]:
    return {"host_cpu_share": run.host_cpu_share, "roles": {name: dict(report) for name, report in run.reports.items()}}


def _link_row(link: LinkRow) -> tuple[object, ...]:
    return tuple(getattr(link, name) for name in LinkRow.__dataclass_fields__)


def _request_rows(systems: Sequence[SystemView]) -> Iterable[tuple[object, ...]]:
    for run in systems:
        begin_ns = min((r.submitted_ns for r in run.outcomes), default=0)
        for r in run.outcomes:
            yield _request_row(run.system, r, begin_ns)


def _request_row(system: str, r: RoundView, begin_ns: int) -> tuple[object, ...]:
    later = (
        r.scheduled_ns, r.prefill_started_ns, r.first_token_ns, r.second_token_ns, r.last_token_ns,
        r.completed_ns,
    )  # fmt: skip
    return (
        system, r.agent, r.turn, r.prompt_tokens, r.generate_tokens, r.hit_tokens, r.read_side, r.de_hit_tokens,
        r.dram_hit_tokens, r.prefill_engine, r.decode_engine, _seconds(r.submitted_ns - begin_ns),
        *(_seconds(t - begin_ns) if t else "" for t in later), len(r.tokens), r.error,
        r.error_detail,
    )  # fmt: skip


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / NS_PER_S:.6f}"


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise HostError(f"{path}: cannot be written ({error.strerror}).") from error


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[tuple[object, ...]]) -> None:
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(rows)
    except OSError as error:
        raise HostError(f"{path}: cannot be written ({error.strerror}).") from error


def _environment() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "user": "root" if os.geteuid() == 0 else "ordinary",
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "git_commit": _commit(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Commit of the checkout that this code is in, with "+changes" if it has any; empty outside one."""
    here = Path(__file__).resolve().parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return f"{commit}+changes" if _git(here, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        ("git", "-C", str(directory), *arguments), capture_output=True, text=True, timeout=5, check=True
    )
    return done.stdout.strip()
