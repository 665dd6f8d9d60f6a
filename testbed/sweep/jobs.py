"""The runs of a sweep on the disk: what each is, where it lies, whether it is done.

A run lies in ``runs/<digest of its resolved configuration>/``, so that a sweep file may grow, shrink or be
reordered without losing what has been run. Invariant: a run is done if and only if there is a whole metrics.json beside
a configuration equal to the one that would run now; everything else is removed and run again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.errors import ConfigError, HostError
from testbed.runtime.plan import World
from testbed.sweep.file import Settings
from testbed.sweep.table import Row

RUNS = "runs"
OUTPUT = "output.txt"
"""What a run printed."""
_DIGEST_CHARS = 16
_LOCK = ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One point with one seed. ``resolved``: its configuration as ``config.resolved.json`` holds it."""

    point: int
    settings: Settings
    scenario: str
    world: World
    systems: tuple[str, ...]
    seed: int | None
    resolved: Mapping[str, Any]

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as ``testbed run --set`` takes them."""
        return tuple(f"{key}={value}" for key, value in self.settings)

    @property
    def run(self) -> str:
        """Where the run lies, relative to the folder of the sweep."""
        text = json.dumps(self.resolved, sort_keys=True)
        return f"{RUNS}/{hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]}"


def finished(job: Job, folder: Path) -> Mapping[str, Any] | None:
    """The metrics.json of a job that is done, else None. ``folder``: that of the sweep."""
    for configuration in sorted((folder / job.run).glob("*/config.resolved.json")):
        if (document := metrics_of(configuration.parent, job.resolved, job.world)) is not None:
            return document
    return None


def metrics_of(run: Path, resolved: Mapping[str, Any], world: World) -> Mapping[str, Any] | None:
    """The metrics.json in a run folder if it is whole and of this configuration and world, else None."""
    document = _json(run / "metrics.json")
    if not isinstance(document, dict) or document.get("world") != world:
        return None
    return document if _json(run / "config.resolved.json") == plain(resolved) else None


def is_other(run: Path, resolved: Mapping[str, Any]) -> bool:
    """Whether a run folder holds a whole run of another configuration."""
    document, configuration = _json(run / "metrics.json"), _json(run / "config.resolved.json")
    return isinstance(document, dict) and isinstance(configuration, dict) and configuration != plain(resolved)


def clear(job: Job, folder: Path) -> Path:
    """An empty directory for a job that is to run; what a broken-off run left there is gone.

    Raises:
        HostError: the disk does not allow it.
    """
    return emptied(folder / job.run)


def emptied(directory: Path) -> Path:
    """The directory, made anew.

    Raises:
        HostError: the disk does not allow it.
    """
    try:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
    except OSError as error:
        raise HostError(f"{directory}: cannot be made ({error.strerror}).") from error
    return directory


@contextmanager
def locked(folder: Path, kind: str) -> Iterator[None]:
    """Two of a ``kind`` (sweep, experiment) in one folder would remove each other's half-done runs.

    Their runs hold the lock too: what a killed one left behind has it until it has ended.

    Raises:
        ConfigError: the folder cannot be made.
        HostError: another one is at work in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("w")
    except OSError as error:
        raise ConfigError(f"{folder}: no {kind} can be kept there ({error.strerror}).") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HostError(
                f"{folder}: another {kind} is at work there; wait for it or choose another --out."
            ) from None
        yield


def row_of(job: Job, folder: Path, ended: str = "") -> Row:
    """A job's share in the table. ``ended``: how its process ended, if this is all that is known."""
    document = finished(job, folder)
    failures = [] if document is None else document["failures"]
    return Row(
        point=job.point,
        settings=dict(job.settings),
        seed=job.resolved["seed"],
        systems=tuple(job.resolved["systems"]),
        run=job.run,
        document=document,
        error="; ".join(failures) if document is not None else reason_in(folder / job.run) or ended or "did not run",
    )


def plain(resolved: Mapping[str, Any]) -> Any:
    """A configuration as it reads back from JSON (tuples are lists, keys are text)."""
    return json.loads(json.dumps(resolved))


def reason_in(directory: Path) -> str:
    """Why a run has no metrics: what its folder says, else the last that it printed."""
    for path in (*sorted(directory.glob("**/failure.txt")), directory / OUTPUT):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
        said = [line.strip() for line in lines if line.strip()]
        if said:
            return said[-1].removeprefix("error: ")
    return ""


def _json(path: Path) -> Any:
    """The document in a file; None if there is none or it is half-written."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
